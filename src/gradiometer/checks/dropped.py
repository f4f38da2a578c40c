"""What a forward in training mode drops, by its trace: branches, scores, logits, or a residual stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from gradiometer.checks.operators import FUSED_NORMS, NORMS, SOFTMAXES

if TYPE_CHECKING:
    from gradiometer.checks.probe import Probe
    from gradiometer.checks.trace import Node, Ref, Trace

# the least share of elements that are set to 0
_LEAST_SHARE: Final = 1e-3
# sums before a dropped stream: the first ones may be embeddings and convolutions of positions
_LEAST_SUMS: Final = 2


@dataclass
class Drop:
    """An operator that sets elements to 0 by chance.

    Attributes:
        trace: the trace.
        index: the operator's index.
        source: what it is given.
        share: the share of elements that it set to 0.
        count: their number.
        kinds: ``"scores"``, ``"logits"`` or ``"stream"``, of those that should not be dropped.
    """

    trace: Trace
    index: int
    source: Ref
    share: float
    count: int
    kinds: set[str] = field(default_factory=set)

    def is_same(self, other: Drop) -> bool:
        """Return whether the same elements were dropped in another forward."""
        a, b = (each.trace.value((each.index, 0)) == 0 for each in (self, other))
        return torch.equal(a, b)

    def name(self, probe: Probe) -> str:
        """Return the name of the module that drops."""
        module = self.trace.nodes[self.index].module
        return (probe.names.get(module, "") or type(module).__name__) if module is not None else "the model"


def drops_in(trace: Trace) -> list[Drop]:
    """Return what was dropped, and classify it."""
    drops = [drop for i in range(len(trace.nodes)) if (drop := _drop(trace, i)) is not None]
    if not drops:
        return []
    sums = _sums(trace)
    for drop in drops:
        if _reaches_softmax(trace, drop):
            drop.kinds.add("scores")
        elif _is_output(trace, drop):
            drop.kinds.add("logits")
        elif _is_stream(trace, drop, sums):
            drop.kinds.add("stream")
    return drops


def _drop(trace: Trace, index: int) -> Drop | None:
    node = trace.nodes[index]
    if node.name == "native_dropout":
        source = node.inputs.get(0)
    elif node.is_pointwise and not node.is_noise and node.name in {"mul", "where", "masked_fill"}:
        noise = [k for k, (i, _) in node.inputs.items() if trace.nodes[i].is_noise]
        others = [ref for k, ref in node.inputs.items() if k not in noise]
        source = others[0] if noise and len(others) == 1 else None
    else:
        return None
    if source is None or not node.values or not trace.value(source).is_floating_point():
        return None
    before, after = trace.value(source), node.values[0]
    if before.shape != after.shape or before.numel() == 0:
        return None
    gone = (after == 0) & (before != 0)
    share = float(gone.double().sum()) / max(int((before != 0).sum()), 1)
    return Drop(trace, index, source, share, int(gone.sum())) if share > _LEAST_SHARE else None


def _reaches_softmax(trace: Trace, drop: Drop) -> bool:
    """Return whether scores, products of values, are dropped and then normalized."""
    ends = trace.behind(drop.source, lambda node: node.is_plain)[1]
    if not any(trace.is_product(trace.nodes[i]) for i in ends):
        return False
    shape = trace.value((drop.index, 0)).shape
    for i in range(drop.index + 1, min(drop.index + 40, len(trace.nodes))):
        node = trace.nodes[i]
        if node.name in SOFTMAXES and 0 in node.inputs and node.values[0].shape.numel() == shape.numel():
            passed = trace.behind(node.inputs[0], lambda x: x.is_plain)[0]
            if drop.index in passed:
                return True
    return False


def _is_output(trace: Trace, drop: Drop) -> bool:
    """Return whether the output of a linear layer is dropped, and that is the output of the model."""
    ends = trace.behind(drop.source, lambda node: node.is_plain)[1]
    if not any(trace.is_projection(trace.nodes[i]) for i in ends[:1]):
        return False
    value = trace.value((drop.index, 0))
    return value.numel() == trace.output.numel() and torch.equal(value.flatten(), trace.output.flatten())


def _sums(trace: Trace) -> dict[int, int]:
    """Return the sums of a stream and a branch of it, and the index of what the stream was before."""
    found: dict[int, int] = {}
    for i, node in enumerate(trace.nodes):
        if node.name != "add" or len(node.inputs) != 2:
            continue
        (a, _), (b, _) = (_moved(trace, ref) for ref in node.inputs.values())
        first, second = min(a, b), max(a, b)
        if first != second and node.values[0].dim() >= 3 and _depends(trace, second, first):
            found[i] = first
    return found


def _depends(trace: Trace, index: int, source: int) -> bool:
    """Return whether an operator depends on an earlier one through a linear layer."""
    between = trace.between({source}, index)
    return any(trace.is_projection(trace.nodes[i]) or trace.nodes[i].name == "convolution" for i in between)


def _moved(trace: Trace, ref: Ref) -> Ref:
    """Go back through moves of all elements, and through dropout if it is the stream's."""
    while True:
        node = trace.nodes[ref[0]]
        if not _is_whole(node):
            return ref
        ref = node.inputs[0]


_WHOLE: Final = frozenset(
    {"view", "_unsafe_view", "reshape", "alias", "detach", "_to_copy", "clone", "transpose", "permute"}
)


def _is_whole(node: Node) -> bool:
    """Return whether an operator moves or scales all elements of one tensor."""
    is_scaled = node.name in {"mul", "div"} and len(node.inputs) == 1
    return 0 in node.inputs and (is_scaled or node.name in _WHOLE)


def _is_stream(trace: Trace, drop: Drop, sums: dict[int, int]) -> bool:
    """Return whether a sum of a stream and its branch is dropped, and the result is the stream after that."""
    index = _moved(trace, drop.source)[0]
    while trace.nodes[index].name in FUSED_NORMS and 0 in trace.nodes[index].inputs:
        index = _moved(trace, trace.nodes[index].inputs[0])[0]
    if index not in sums:
        return False
    # how many sums the stream had before
    count, at = 1, sums[index]
    while count < _LEAST_SUMS and at is not None:
        node = _before(trace, at)
        if node in sums:
            count, at = count + 1, sums[node]
        else:
            break
    if count < _LEAST_SUMS:
        return False
    return any(_carried(trace, stream) == drop.index for stream in sums.values()) or _ends(trace, drop)


def _before(trace: Trace, index: int) -> int:
    """Go back from an operator through moves, norms and what drops by chance."""
    while True:
        node = trace.nodes[index]
        if _is_whole(node) or (node.name in FUSED_NORMS and 0 in node.inputs):
            index = node.inputs[0][0]
        elif node.name in {"mul", "native_dropout"} and (ref := _kept_part(trace, node)) is not None:
            index = ref[0]
        else:
            return index


def _carried(trace: Trace, index: int) -> int:
    """Go back through moves and norms."""
    while True:
        node = trace.nodes[index]
        if not _is_whole(node) and (node.name not in FUSED_NORMS or 0 not in node.inputs):
            return index
        index = node.inputs[0][0]


def _kept_part(trace: Trace, node: Node) -> Ref | None:
    others = [ref for ref in node.inputs.values() if not trace.nodes[ref[0]].is_noise]
    has_noise = node.name == "native_dropout" or len(others) < len(node.inputs)
    return others[0] if has_noise and len(others) == 1 else None


def _ends(trace: Trace, drop: Drop) -> bool:
    """Return whether a dropped sum is normalized, as that of the last layer; that of a classifier is not."""
    if trace.nodes[_moved(trace, drop.source)[0]].name in FUSED_NORMS:
        return False
    used = {drop.index}
    for i in range(drop.index + 1, min(drop.index + 12, len(trace.nodes))):
        node = trace.nodes[i]
        if any(source in used for source, _ in node.inputs.values()):
            if node.name in NORMS or node.name == "pow":
                return True
            if _is_whole(node):
                used.add(i)
    return False
