"""The contract of the first loss, compared with that of a model that knows nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from gradiometer.checks.contract import contract
from gradiometer.checks.loss_graph import bounded_logits
from gradiometer.checks.report import Evidence, NotApplicable
from gradiometer.rules import Severity
from gradiometer.rules.criterion import HINTS, SATURATED, SCALE, about_bounded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from gradiometer.checks.probe import Probe

LEAK: Final = (
    "look for the labels in the inputs: labels that are not shifted, a mask that lets later tokens in, "
    "features computed from the labels"
)
FINITE: Final = (
    "look at the inputs and at the labels: all of them may be ignored, or logits may overflow; "
    "gradiometer.check_finite names weights that are not finite"
)
GRAPH: Final = "remove torch.no_grad(), detach() and item() between the model and the loss"
SUMMED: Final = "divide the loss by the number of labels: use reduction='mean'"
# nodes of the graph that are looked at
_NODES: Final = 20_000
# fewer labels tell nothing
_LEAST: Final = 4
# that much above ln(C): logits of variance s**2 have about ln(C) + s**2 / 2, and s is about 1 if they come
# from a norm layer and one matrix. T5's are 0.8 above
_EXCESS: Final = 2.5


class CrossEntropy(NamedTuple):
    """A cross entropy, as it is in the graph of a loss.

    Attributes:
        classes: the number of classes.
        counted: the number of labels.
        loss: the mean over labels.
        permuted: the mean over labels that are permuted at random.
        uniform: the mean over labels that are drawn at random.
        error: the standard error of ``loss``.
        summed: whether the loss is a sum over labels.
        contrastive: whether each example of the batch is its own class.
    """

    classes: int
    counted: int
    loss: float
    permuted: float
    uniform: float
    error: float
    summed: bool
    contrastive: bool

    @property
    def guess(self) -> float:
        """The loss of a model that knows nothing."""
        return math.log(self.classes)


def cross_entropies(loss: Tensor, probe: Probe | None = None) -> list[CrossEntropy]:
    """Return the cross entropies that a loss is computed from.

    They are those in its graph, or that of the logits and the labels if the loss is equal to it.

    >>> logits = torch.zeros(4, 3, requires_grad=True)
    >>> loss = torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 0]))
    >>> [(x.classes, x.counted, round(x.loss, 3)) for x in cross_entropies(loss)]
    [(3, 4, 1.099)]
    """
    found: list[CrossEntropy] = []
    stack, seen = [loss.grad_fn], {None}
    while stack and len(seen) < _NODES:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)  # type: ignore[arg-type]
        if type(node).__name__.startswith("NllLoss"):
            logp, target = node._saved_self.detach(), node._saved_target  # type: ignore[attr-defined] # noqa: SLF001
            if logp.dim() == 4:
                logp, target = logp.permute(0, 2, 3, 1).flatten(0, 2), target.flatten()
            ignored = node._saved_ignore_index  # type: ignore[attr-defined] # noqa: SLF001
            ignored -= 2**64 if ignored >= 2**63 else 0
            each = _measure(logp, target, ignored, summed=node._saved_reduction == 2)  # type: ignore[attr-defined] # noqa: SLF001
            if each is not None:
                found.append(each)
            continue
        stack += [after for after, _ in node.next_functions]
    if found or probe is None:
        return found
    return _of_logits(loss, probe)


def _measure(logp: Tensor, target: Tensor, ignored: int, *, summed: bool = False) -> CrossEntropy | None:
    logp, target = logp.reshape(-1, logp.shape[-1]).double(), target.reshape(-1)
    used = (target != ignored) & (target >= 0) & (target < logp.shape[-1])
    logp, target = logp[used], target[used]
    if len(target) == 0 or logp.shape[-1] < 2:
        return None
    losses = -logp.gather(1, target[:, None])[:, 0]
    order = torch.randperm(len(target), generator=torch.Generator(device="cpu").manual_seed(0), device="cpu")
    permuted = -logp.gather(1, target[order.to(target.device)][:, None])
    error = float(losses.std()) / math.sqrt(len(losses)) if len(losses) > 1 else float("inf")
    loss, mixed, uniform = (float(x.mean()) for x in (losses, permuted, -logp))
    own = torch.equal(target, torch.arange(logp.shape[-1], device=target.device))
    return CrossEntropy(logp.shape[-1], len(target), loss, mixed, uniform, error, summed, own)


def _of_logits(loss: Tensor, probe: Probe) -> list[CrossEntropy]:
    """Return the cross entropy of logits and labels if it is the loss, up to a margin."""
    labels = None if probe.batch.labels is None else probe.batch.tensors[probe.batch.labels]
    logits = probe.reference
    if labels is None or labels.is_floating_point() or logits.dim() < 2:
        return []
    if logits.dim() == 4:
        logits = logits.movedim(1, -1)
    pairs = [(logits, labels)]
    if labels.dim() > 1 and logits.dim() > 2:
        pairs.append((logits[:, :-1], labels[:, 1:]))
    for x, y in pairs:
        if x.shape[:-1] == y.shape:
            each = _measure(x.double().log_softmax(-1), y.long(), -100)
            if each is not None and abs(each.loss - float(loss.detach())) < 0.02 * abs(each.loss):
                return [each]
    return []


def is_pretrained(probe: Probe) -> bool:
    """Return whether the weights have been trained: as passed, or by the path in a config, or by evidence.

    The evidence is that most weights of norm layers are not constant, and that the first loss is below that
    of a model that knows nothing; or that most parameters are frozen.
    """
    if probe.pretrained is not None:
        return probe.pretrained
    frozen = sum(p.numel() for p in probe.model.parameters() if not p.requires_grad)
    if 2 * frozen > sum(p.numel() for p in probe.model.parameters()):
        return True
    paths = [getattr(probe.config, name, None) for name in ("name_or_path", "_name_or_path")]
    return any(isinstance(x, str) and x for x in paths) or _is_trained(probe)


def _is_trained(probe: Probe) -> bool:
    """Return whether a model has been trained, as its norm weights and its loss tell."""
    norms = [
        p
        for name, module in probe.model.named_modules()
        if "norm" in type(module).__name__.lower()
        for key, p in module.named_parameters(recurse=False)
        if "bias" not in key and p.numel() > 1
    ]
    varied = sum(bool((p != p.flatten()[0]).any()) for p in norms)
    if not norms or varied * 2 <= len(norms):
        return False
    try:
        found = cross_entropies(probe.loss(), probe)
    except Exception:  # noqa: BLE001 without a loss nothing is known
        return False
    return any(_is_low(each, 0.8) for each in found)


def _is_low(each: CrossEntropy, share: float) -> bool:
    certain = each.loss + 4 * each.error < each.guess if each.counted > 1 else False
    return certain and each.loss < share * each.guess and each.permuted > each.loss + 0.2 * each.guess


@contract("initialization", "the loss takes logits, and starts near that of uniform predictions")
def first_loss(probe: Probe) -> Iterator[Evidence]:
    """Compare the loss of the batch with ln(C), and with that of permuted labels."""
    loss = probe.loss()
    value = float(loss.detach())
    if not math.isfinite(value):
        word = "NaN" if math.isnan(value) else "infinite"
        yield Evidence(f"the first loss is {word}", value=value, advice=FINITE)
        return
    if not loss.requires_grad:
        if not any(p.requires_grad for p in probe.model.parameters()):
            raise NotApplicable("no parameter requires a gradient")
        yield Evidence("the loss has no graph: backward() fails", advice=GRAPH)
        return
    if value == 0:
        yield Evidence("the first loss is exactly 0", value=0.0, advice=FINITE)
        return
    found = cross_entropies(loss, probe)
    bounded = bounded_logits(loss)
    if bounded:
        text, advice = about_bounded(bounded, found[0].classes if found else 0)
        severity = Severity.INFO if bounded in HINTS else Severity.WARNING
        yield Evidence(text, advice=advice, severity=severity)
        return
    if is_pretrained(probe):
        raise NotApplicable("the model is pretrained")
    if not found:
        raise NotApplicable("the loss is not a cross entropy of the batch's labels")
    for each in found:
        yield from _judge(each, probe)
    whole = sum(x.guess for x in found)
    if any(x.summed and x.counted > 1 for x in found) and value > 3 * whole:
        text = f"the first loss is {value:.3g}: the cross entropy is summed over {found[0].counted} labels"
        yield Evidence(text, None, value, whole, SUMMED, Severity.INFO)


def _judge(each: CrossEntropy, probe: Probe) -> Iterator[Evidence]:
    guess = each.guess
    nothing = f"uniform predictions give ln({each.classes:,}) = {guess:.3g}"
    # a margin on the labels' logits, or a scale of similarities in a batch, is meant
    by_chance = min(each.permuted, each.uniform) >= guess + _EXCESS and not each.contrastive
    if each.loss >= guess + _EXCESS and by_chance:
        is_sure = each.loss >= SATURATED or _ends_in_norm(probe)
        if is_sure or each.loss >= 3 * guess:
            text = f"the first loss is {each.loss:.3g}, but {nothing}: the logits are too large"
            severity = Severity.WARNING if is_sure else Severity.INFO
            yield Evidence(text, None, each.loss, guess + _EXCESS, SCALE, severity)
            return
    if each.counted >= _LEAST and _is_low(each, 0.6):
        text = f"the first loss is {each.loss:.3g}, but {nothing}; with permuted labels it is "
        text += f"{each.permuted:.3g}: the input contains the labels"
        yield Evidence(text, None, each.loss, 0.6 * guess, LEAK)


def _ends_in_norm(probe: Probe) -> bool:
    """Return whether the last layer with a matrix gets what a norm layer returns."""
    norms: list[Tensor] = []
    last: list[bool] = [False]

    def note(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        own = list(module.parameters(recurse=False))
        if "norm" in type(module).__name__.lower() and isinstance(output, Tensor):
            norms.append(output)
        elif any(p.dim() > 1 for p in own) and args and isinstance(args[0], Tensor):
            x = args[0]
            last[0] = any(x.data_ptr() == y.data_ptr() or _is_part(x, y) for y in norms[-2:])

    handles = [x.register_forward_hook(note) for x in probe.model.modules()]
    try:
        probe.output()
    finally:
        for handle in handles:
            handle.remove()
    return last[0]


def _is_part(x: Tensor, y: Tensor) -> bool:
    """Return whether these are values of a norm layer's output, of some positions or times a number."""
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
