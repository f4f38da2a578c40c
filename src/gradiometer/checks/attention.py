"""The contract of attention: weights are a softmax over the keys, scaled, and heads are split by token."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradiometer.checks.attention_parts import Attention, Operand, found_in, weighted_without_softmax
from gradiometer.checks.attention_scale import scale_faults
from gradiometer.checks.contract import contract
from gradiometer.checks.operators import SOFTMAXES
from gradiometer.checks.report import Evidence, NotApplicable
from gradiometer.checks.trace import Trace, UnknownError, traced

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gradiometer.checks.probe import Probe

SOFTMAX: Final = "take the softmax of q k / sqrt(d) + mask over the keys, and mask before the softmax"
HEADS: Final = (
    "split heads by x.view(B, T, heads, size).transpose(1, 2), and merge them by "
    "x.transpose(1, 2).reshape(B, T, heads * size)"
)
DROPPED: Final = "pass dropout_p=p if self.training else 0.0, or use nn.Dropout, which knows the mode"
TOP_LEFT: Final = (
    "is_causal of scaled_dot_product_attention aligns the first query with the first key; pass a mask where "
    "there are not as many queries as keys"
)
# by how much a row may differ from 1; more if a narrow dtype rounds it
_ROWS: Final = 1e-3
# operators that leave a part of the weights out, such as a sink
_CUTS: Final = frozenset({"cat", "slice", "split", "select", "constant_pad_nd", "split_with_sizes", "index"})


@contract(
    "behaviour", "attention weights are softmax(q k / sqrt(d) + mask) over keys, and heads split channels"
)
def attention(probe: Probe) -> Iterator[Evidence]:
    """Record one forward pass, and trace queries, keys, values, scores and weights through it."""
    with _Fused() as fused:
        trace = traced(probe)
    every = found_in(trace)
    plain, has_plain = _without_softmax(probe, trace)
    if not (every or fused.causal or has_plain):
        raise NotApplicable("no attention was found: no softmax between two products of activations")
    faults = plain
    known = bool(fused.causal) or has_plain
    if fused.misaligned:
        queries, keys = fused.misaligned[0]
        text = f"is_causal=True for {queries} queries and {keys} keys hides keys that the queries should see"
        faults.append((None, "causal", Evidence(text, advice=TOP_LEFT)))
    with torch.no_grad():
        for each in every:
            for examine in (_rows, _heads):
                try:
                    faults += [(each, kind, evidence) for kind, evidence in examine(probe, each)]
                    known = True
                except UnknownError:
                    continue
        scales, is_any = scale_faults(probe, every)
    faults += scales
    if not (known or is_any or faults):
        raise NotApplicable("attention was found, but its scores and heads could not be traced")
    yield from _grouped(probe, faults)


class _Fused(TorchFunctionMode):
    """Notes the calls of scaled_dot_product_attention with is_causal."""

    def __init__(self) -> None:
        super().__init__()
        self.causal = 0
        self.misaligned: list[tuple[int, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            given = dict(zip(names, args, strict=False)) | kwargs
            if given.get("is_causal"):
                self.causal += 1
                pair = given["query"].shape[-2], given["key"].shape[-2]
                if pair[0] != pair[1]:
                    self.misaligned.append(pair)
        return func(*args, **kwargs)


def _grouped(probe: Probe, faults: Iterable[tuple[Attention | None, str, Evidence]]) -> Iterator[Evidence]:
    """Yield one evidence for each kind of fault, and in how many modules it is."""
    first: dict[str, tuple[Attention | None, Evidence]] = {}
    counts: Counter[str] = Counter()
    for each, kind, evidence in faults:
        first.setdefault(kind, (each, evidence))
        counts[kind] += 1
    for kind, (each, evidence) in first.items():
        name = evidence.name if each is None else each.name(probe)
        more = f" (and {counts[kind] - 1} more)" if counts[kind] > 1 else ""
        where = f"in {name}{more}, " if name is not None else ""
        text = where + evidence.text
        yield Evidence(text, name, evidence.value, evidence.threshold, evidence.advice, evidence.severity)


def _rows(_: Probe, each: Attention) -> Iterator[tuple[str, Evidence]]:
    """Look at what the softmax normalizes, and at the sums of the rows that are used."""
    trace, weights = each.trace, each.weights
    if each.softmaxes > 1:
        yield "twice", Evidence("the softmax is applied to the output of a softmax", advice=SOFTMAX)
    if each.is_sigmoid:
        text = "the weights are a sigmoid of the scores, not a softmax: rows do not sum to 1"
        yield "sigmoid", Evidence(text, advice=SOFTMAX)
        return
    try:
        places = trace.places((each.softmax, 0), weights.ref)
    except UnknownError:
        # normalized once more: the sums tell
        yield from _sums(each.trace, weights)
        return
    lines = weights.keys_last(places)
    shape = trace.value((each.softmax, 0)).shape
    if lines.shape[-1] < 2 or bool((lines < 0).any()):
        raise UnknownError("softmax")
    over = _varying(lines.flatten(0, -2)[-1], shape)
    if each.dim not in over:
        others = _varying(lines.movedim(-2, -1).flatten(0, -2)[-1], shape)
        what = "queries" if each.dim in others else "heads or examples"
        text = f"the softmax is over the {what} (dimension {each.dim} of {tuple(shape)}), not over the keys"
        yield "dimension", Evidence(text, advice=SOFTMAX)
        return
    if over != {each.dim} or len(lines.flatten(0, -2)[-1].unique()) < shape[each.dim]:
        raise UnknownError("softmax")
    if any(trace.nodes[i].is_random for i in each.after_softmax()):
        sums = _row_sums(trace, weights)[0]
        text = f"attention weights are dropped in evaluation mode: rows sum to {_span(sums)}"
        yield "dropped", Evidence(text, advice=DROPPED)
    elif trace.nodes[each.softmax].name == "_log_softmax":
        yield "log", Evidence("the values are weighted by log_softmax of the scores", advice=SOFTMAX)
    else:
        yield from _sums(trace, weights)


def _row_sums(trace: Trace, weights: Operand) -> tuple[Tensor, float, float]:
    """Return the sum of each row, the largest difference from 1 of rows that are not 0, and its limit."""
    values = weights.keys_last(trace.argument(weights.node, weights.position))
    sums = values.double().sum(-1)
    error = torch.where((values == 0).all(-1), 0.0, (sums - 1).abs())
    return sums, float(error.max()), max(_ROWS, 2 * torch.finfo(values.dtype).eps)


def _sums(trace: Trace, weights: Operand) -> Iterator[tuple[str, Evidence]]:
    sums, worst, limit = _row_sums(trace, weights)
    if worst > limit:
        passed = trace.behind(weights.ref, lambda node: node.is_tokenwise and node.name not in SOFTMAXES)[0]
        if any(trace.nodes[i].name in _CUTS for i in passed):
            raise UnknownError("a part of the weights")
        text = f"rows of the weights sum to {_span(sums)}, not 1: they are masked or scaled after the softmax"
        yield "rows", Evidence(text, value=worst, threshold=limit, advice=SOFTMAX)


def _without_softmax(probe: Probe, trace: Trace) -> tuple[list[tuple[Attention | None, str, Evidence]], bool]:
    """Return attentions whose weights are neither a softmax nor have rows of sum 1, and whether any has."""
    found: list[tuple[Attention | None, str, Evidence]] = []
    operands = weighted_without_softmax(trace)
    for operand in operands:
        sums, worst, limit = _row_sums(trace, operand)
        module = operand.node.module
        if worst > limit and module is not None:
            name = probe.names.get(module) or type(module).__name__
            text = f"rows of the weights sum to {_span(sums)}, not 1: they are not a softmax of the scores"
            evidence = Evidence(text, name, worst, limit, SOFTMAX)
            found.append((None, "none", evidence))
    return found, bool(operands)


def _heads(probe: Probe, each: Attention) -> Iterator[tuple[str, Evidence]]:
    """Look at where queries, keys, values and the output of a token are."""
    batch = len(probe.streams[0].tensor) if probe.streams else 0
    landed = {}
    for what, operand in each.operands().items():
        try:
            landed[what] = operand.landings(each.trace)
        except UnknownError:
            continue
    if not landed:
        raise UnknownError("heads")
    for what, landings in landed.items():
        for landing in landings:
            if landing.is_split:
                text = f"the {what} of token {landing.label} are at positions {_some(landing.rows)}"
                yield "split", Evidence(text + ": heads are split across tokens", advice=HEADS)
                return
        spread = _shared(landings, batch)
        if spread is not None:
            text = f"the {what} of examples {spread[0]} and {spread[1]} are in the same attention matrix"
            yield "examples", Evidence(text, advice=HEADS)
            return
    if "keys" in landed and "values" in landed:
        values = {(x.projection_shape, x.token): x.rows for x in landed["values"]}
        for x in landed["keys"]:
            other = values.get((x.projection_shape, x.token), x.rows)
            if other != x.rows:
                text = f"the key of token {x.label} is at {_some(x.rows)}, its value at {_some(other)}"
                yield "values", Evidence(text, advice=HEADS)
                return
    for x in landed.get("queries", ()):
        tokens = each.merged(x) if len(x.rows) == 1 else None
        if tokens is None:
            continue
        if len(tokens) > 1:
            text = f"the output of token {x.label} goes to tokens {_some(tokens)} of the next linear layer"
            yield "merge", Evidence(text + ": heads are merged across tokens", advice=HEADS)
            return
        if tokens != {x.token}:
            text = f"the output of token {x.token} goes to token {_some(tokens)} of the next linear layer"
            yield "merge", Evidence(text, advice=HEADS)
            return


def _shared(landings: Iterable[Any], batch: int) -> tuple[int, int] | None:
    """Return two examples that share an attention, if the first dimension is that of examples."""
    every = [x for x in landings if len(x.lead) == 2 and x.lead[0] == batch != x.lead[1]]
    for a in every:
        for b in every:
            first, second = a.token // a.lead[1], b.token // b.lead[1]
            if first < second and a.groups & b.groups:
                return first, second
    return None


def _varying(places: Tensor, shape: torch.Size) -> set[int]:
    """Return the dimensions in which elements differ, by their places in a flat tensor."""
    return {d for d, x in enumerate(torch.unravel_index(places, shape)) if bool((x != x[0]).any())}


def _span(sums: Tensor) -> str:
    low, high = float(sums.min()), float(sums.max())
    return f"{low:.3g}" if high - low < 1e-3 * abs(high) else f"{low:.3g} to {high:.3g}"


def _some(places: Iterable[int]) -> str:
    every = sorted(places)
    return ", ".join(map(str, every[:4])) + (", ..." if len(every) > 4 else "")
