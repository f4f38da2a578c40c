"""Contracts of the optimizer: it holds what is trainable, and decays what is usually decayed."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from gradiometer.checks.contract import contract
from gradiometer.checks.loss_graph import variables
from gradiometer.checks.objective import objective, some, trainable
from gradiometer.checks.report import Evidence, NotApplicable
from gradiometer.rules import Severity

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gradiometer.checks.probe import Probe

LACKS: Final = (
    "create the optimizer with all of model.parameters(), after all layers exist and layers are frozen, "
    "or add the rest with optimizer.add_param_group"
)
STALE: Final = (
    "create the optimizer after the model has been moved, resized, copied or loaded; it updates tensors that "
    "the model no longer uses"
)
TWICE: Final = "give each parameter to one optimizer"
NO_DECAY: Final = (
    "weight decay is usual for matrices only: put norms and biases, all parameters with fewer than two "
    "dimensions, into a group with weight_decay=0"
)
DECOUPLE: Final = "use torch.optim.AdamW, whose decay is not divided by the rms of the gradients"
_NORMS: Final = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,  # noqa: SLF001 the base class of BatchNorm and InstanceNorm
)
# those that add the decay to the gradient, and then divide by its rms
_ADAPTIVE: Final = (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam)


def groups_of(given: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Return the groups of an optimizer, of several, or of what wraps them, each with its optimizer."""
    found: dict[int, tuple[Any, dict[str, Any]]] = {}
    for each in _inner(given):
        for group in getattr(each, "param_groups", ()):
            found.setdefault(id(group), (each, group))
    return list(found.values())


def held_by(given: Any) -> dict[Tensor, int]:
    """Return the tensors that an optimizer holds, each with the number of optimizers that hold it."""
    return Counter(p for _, group in groups_of(given) for p in group["params"])


def _inner(given: Any, depth: int = 5) -> list[Any]:
    if isinstance(given, list | tuple):
        return [x for each in given for x in _inner(each, depth)]
    inside = getattr(given, "optimizer", None) or getattr(given, "optimizers", None)
    if depth and inside is not None and not callable(inside):
        return _inner(inside, depth - 1)
    return [given]


def _named_groups(probe: Probe) -> list[tuple[Any, dict[str, Any]]]:
    if probe.optimizer is None:
        raise NotApplicable("pass optimizer= to compare its parameters with those of the model")
    groups = groups_of(probe.optimizer)
    if not groups:
        raise NotApplicable(f"{type(probe.optimizer).__name__} has no param_groups")
    return groups


@contract("gradients", "the optimizer holds all trainable parameters, and nothing else", is_static=True)
def optimizer(probe: Probe) -> Iterator[Evidence]:
    """Compare the parameters of the optimizer's groups with the trainable ones of the model."""
    groups = _named_groups(probe)
    held = held_by(probe.optimizer)
    names: dict[Tensor, str] = {p: name for name, p in probe.model.named_parameters()}
    lacking = {name: p for name, p in trainable(probe).items() if p not in held}
    foreign = [p for p in held if p not in names]
    # shards are not compared
    masters = {} if probe.is_sharded else _masters(foreign, lacking)
    lacking = {name: p for name, p in lacking.items() if name not in masters}
    foreign = [p for p in foreign if all(p is not x for x in masters.values())]
    stale = _stale(probe, foreign)
    if lacking:
        text = f"the optimizer does not hold {some(list(lacking))}"
        if stale:
            text += f", but holds tensors unknown to the model, {_shapes(stale)}"
        yield Evidence(text, next(iter(lacking)), float(len(lacking)), 0.0, STALE if stale else LACKS)
    elif stale:
        text = f"the optimizer holds tensors unknown to the model, {_shapes(stale)}"
        severity = Severity.WARNING if probe.has_loss else Severity.INFO
        yield Evidence(text, None, float(len(stale)), 0.0, STALE, severity)
    twice = [name for p, name in names.items() if held.get(p, 0) > 1]
    if twice:
        text = f"more than one parameter group holds {some(twice)}"
        yield Evidence(text, twice[0], float(len(twice)), 0.0, TWICE)
    yield from _odd_groups(groups, names)


def _odd_groups(
    groups: Sequence[tuple[Any, dict[str, Any]]], names: Mapping[Tensor, str]
) -> Iterator[Evidence]:
    for i, (_, group) in enumerate(groups):
        own = group["params"]
        if not own:
            yield Evidence(f"group {i} is empty", severity=Severity.INFO, advice="leave it out")
        elif all(p in names and not p.requires_grad for p in own):
            text = f"group {i} holds frozen parameters only: {some([names[p] for p in own])}"
            yield Evidence(text, names[own[0]], float(len(own)), 0.0, "leave them out", Severity.INFO)
        elif float(group.get("lr", 1.0)) == 0 and not group.get("initial_lr"):
            text = f"the learning rate of group {i} is 0"
            advice = "set it, unless a schedule starts at 0 and raises it"
            yield Evidence(text, names.get(own[0]), 0.0, 0.0, advice, Severity.INFO)


def _masters(foreign: Sequence[Tensor], lacking: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the copies in a wider dtype, by the names of the parameters that they are equal to."""
    found: dict[str, Tensor] = {}
    left = list(foreign)
    for name, p in lacking.items():
        for i, copy in enumerate(left):
            is_wider = copy.shape == p.shape and copy.dtype.itemsize > p.dtype.itemsize
            if is_wider and torch.equal(copy.detach().to(p.device, p.dtype), p.detach()):
                found[name] = left.pop(i)
                break
    return found


def _stale(probe: Probe, foreign: list[Tensor]) -> list[Tensor]:
    """Return the tensors of the optimizer that are neither the model's nor part of its loss."""
    if not foreign or probe.is_sharded:
        return foreign
    try:
        with probe.differentiated():
            graph = variables(objective(probe), ())[0]
    except Exception:  # noqa: BLE001 a model whose loss is not known
        graph = []
    used = {id(x) for x in graph}
    return [p for p in foreign if id(p) not in used]


def _shapes(tensors: Sequence[Tensor]) -> str:
    return "of shape " + some([str(tuple(p.shape)) for p in tensors])


@contract("gradients", "weight decay does not apply to norms and biases", is_static=True)
def weight_decay(probe: Probe) -> Iterator[Evidence]:
    """Look for norms, biases and other vectors in groups with weight decay, and for L2 decay in Adam."""
    groups = _named_groups(probe)
    names = {p: name for name, p in probe.model.named_parameters()}
    norms = {
        p
        for module in probe.model.modules()
        if isinstance(module, _NORMS)
        for p in module.parameters(recurse=False)
    }
    decaying = [(each, group) for each, group in groups if float(group.get("weight_decay", 0.0) or 0.0) > 0]
    vectors = [
        p for _, group in decaying for p in group["params"] if p.requires_grad and (p.dim() < 2 or p in norms)
    ]
    known = [names[p] for p in vectors if p in names]
    if known:
        text = f"weight decay also applies to {len(known)} norms, biases and vectors: {some(known)}"
        yield Evidence(text, known[0], float(len(known)), 0.0, NO_DECAY, Severity.INFO)
    for each, group in decaying:
        if type(each) in _ADAPTIVE and not group.get("decoupled_weight_decay", False):
            kind = type(each).__name__
            text = (
                f"{kind} adds weight_decay={group['weight_decay']:g} to the gradients, as L2 regularization"
            )
            yield Evidence(text, None, float(group["weight_decay"]), 0.0, DECOUPLE, Severity.INFO)
            return
