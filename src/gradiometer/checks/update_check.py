"""An optimizer's update from given gradients, compared with its plain implementation and with float64."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradiometer.checks.allowed_error import FACTOR
from gradiometer.checks.compared_tensors import GradientRow, Tensors, compare_tensors
from gradiometer.checks.gradient_report import GradientReport
from gradiometer.checks.gradient_runs import eagerly
from gradiometer.checks.recompiled import more_recompilations
from gradiometer.inputs import is_dtensor, local_shard, named_parameters
from gradiometer.stats import repeating
from gradiometer.terminal import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

# the options that choose an implementation; without all of them it is the plain one, a loop over parameters
_PLAIN: Final = {"foreach": False, "fused": False, "capturable": False}
_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class _NotComparableError(Exception):
    """Raised with the reason why updates can't be compared."""


def compare_updates(
    optimizer: Any,
    grads: Mapping[str, Tensor],
    model: nn.Module,
    *,
    step: Callable[[], Any] | None = None,
    modules: Mapping[str, str] | None = None,
    factor: float = FACTOR,
    lifting: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> GradientReport:
    """Return how an optimizer's update compares with that of its plain implementation, from equal gradients.

    The plain implementation has ``foreach=False, fused=False, capturable=False``, if the optimizer has these
    options, and is not compiled. It runs on copies in the dtypes of the parameters, which shows what rounding
    does, and on copies in float64. The optimizer runs on copies as well, and without hooks; ``step`` runs on
    the parameters themselves, which are restored, as is the optimizer's state.

    Args:
        optimizer: a ``torch.optim.Optimizer``, or what wraps one as its attribute ``optimizer``.
        grads: the gradients by parameter name. Other parameters have none.
        model: the model, for the names of parameters.
        step: calls the optimizer's step if it is compiled, such as ``torch.compile(optimizer.step)``; it may
            be called once before gradients are there. None for ``optimizer.step()``.
        modules: the module of each parameter, as text.
        factor: by how much an error may exceed that of the plain implementation.
        lifting: returns a context in which operators compute in float64 although they are asked for another
            dtype, for optimizers that cast to one.

    Returns:
        A report with a row for each parameter that the optimizer has. If updates can't be compared, it has
        one row, which says why.

    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    >>> grads = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    >>> print(compare_updates(optimizer, grads, model).summary)
    agrees with Adam(foreach=False, fused=False): 2 tensors, judged by float64
    """
    optimizer = plain_optimizer(optimizer)
    if not isinstance(optimizer, Optimizer):
        return not_compared(f"{type(optimizer).__name__} is not a torch.optim.Optimizer")
    found = named_parameters(model, "compare_updates")
    names = dict(zip(found.tensors, found.names, strict=True))
    for i, group in enumerate(optimizer.param_groups):
        names |= {p: f"group {i}, parameter {j}" for j, p in enumerate(group["params"]) if p not in names}
    options = {key: value for key, value in _PLAIN.items() if key in optimizer.defaults}
    kind = type(optimizer).__name__
    text = ", ".join(f"{key}={value}" for key, value in options.items() if key != "capturable")
    against = f"{kind}({text})" if text else f"{kind} in eager mode"
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    try:
        with torch.no_grad(), repeating(parameters):
            given = _own(optimizer, grads, names, step) if step else _copied(optimizer, grads, names, {})
            with eagerly():
                reference = _copied(optimizer, grads, names, options)
    except _NotComparableError as error:
        return not_compared(str(error), against)
    except Exception as error:  # noqa: BLE001 of an optimizer, which may be anything
        return not_compared(f"{kind} can't run on a copy: {type(error).__name__}: {one_line(error)}", against)
    notes: list[str] = []
    exact = None
    try:
        with torch.no_grad(), repeating(parameters), eagerly(), lifting():
            exact = _copied(optimizer, grads, names, options, torch.float64)
    except Exception as error:  # noqa: BLE001 as above
        notes.append(f"{kind} can't run in float64: {type(error).__name__}: {one_line(error)}")
    sizes = {names[p]: p for p in parameters}
    floors = {name: _rounding(p) for name, p in sizes.items()}
    compared = compare_tensors(
        "update", Tensors(given, reference, exact), factor, modules or {}, floors=floors
    )
    return GradientReport(
        tuple(compared.rows), against, "float64" if exact else "", factor, notes=tuple(notes)
    )


def plain_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that does the updates, of what wraps one as its attribute ``optimizer``."""
    inner = getattr(optimizer, "optimizer", None)
    if inner is None or (isinstance(optimizer, Optimizer) and not isinstance(inner, Optimizer)):
        return optimizer
    return plain_optimizer(inner)


def not_compared(reason: str, against: str = "its plain implementation") -> GradientReport:
    """Return the report on an update that can't be compared, for a reason."""
    row = GradientRow("optimizer", "update", text=reason)
    return GradientReport((row,), against, precision="")


def _rounding(p: Tensor) -> float:
    """Return the norm of the error that rounding a parameter after its update may have."""
    return float(_local(p).detach().double().norm()) * torch.finfo(p.dtype).eps / 2


def _copied(
    optimizer: Optimizer,
    grads: Mapping[str, Tensor],
    names: Mapping[Tensor, str],
    options: Mapping[str, Any],
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Return the updates of a copy of an optimizer, which has copies of its parameters and its state."""
    memo: dict[int, Any] = {}
    copies: dict[str, tuple[Tensor, nn.Parameter]] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            mine = nn.Parameter(p.detach().to(dtype or p.dtype, copy=True), p.requires_grad)
            grad = grads.get(names[p])
            mine.grad = None if grad is None else grad.detach().to(mine.dtype, copy=True)
            memo[id(p)] = mine
            copies[names[p]] = mine.detach().clone(), mine
    twin = object.__new__(type(optimizer))
    # not hooks, and not `step` if a scheduler has wrapped it
    left_out = {*_HOOKS, "step"}
    vars(twin).update(
        {key: copy.deepcopy(x, memo) for key, x in vars(optimizer).items() if key not in left_out}
    )
    vars(twin).update({key: OrderedDict() for key in _HOOKS})
    state = {p: _cast(values, dtype) for p, values in twin.state.items()}
    twin.state = defaultdict(dict, state)
    for group in twin.param_groups:
        group.update({key: value for key, value in options.items() if key in group})
    _call(twin.step)
    return {
        name: _local(p.detach()) - _local(before)
        for name, (before, p) in copies.items()
        if p.grad is not None
    }


def _own(
    optimizer: Optimizer, grads: Mapping[str, Tensor], names: Mapping[Tensor, str], step: Callable[[], Any]
) -> dict[str, Tensor]:
    """Return the updates of a step on the parameters themselves, which are restored."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [(p, p.detach().clone(), p.grad) for p in parameters]
    state = {p: dict(values) for p, values in optimizer.state.items()}
    tensors = [(x, x.clone()) for values in state.values() for x in values.values() if isinstance(x, Tensor)]
    groups = [dict(group) for group in optimizer.param_groups]
    tensors += [(x, x.clone()) for group in groups for x in group.values() if isinstance(x, Tensor)]
    hooks = {key: vars(optimizer)[key] for key in _HOOKS}
    vars(optimizer).update({key: OrderedDict() for key in _HOOKS})
    try:
        for p in parameters:
            grad = grads.get(names[p])
            p.grad = None if grad is None else grad.detach().to(p.dtype, copy=True)
        with more_recompilations() if hasattr(step, "_torchdynamo_orig_callable") else nullcontext():
            _call(step)
        return {names[p]: _change(p, old) for p, old, _ in before if p.grad is not None}
    finally:
        vars(optimizer).update(hooks)
        for p, old, grad in before:
            p.copy_(old)
            p.grad = grad
        for x, old in tensors:
            x.copy_(old)
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(values)


def _call(step: Callable[..., Any]) -> None:
    try:
        step()
    except TypeError as error:
        if "closure" in str(error):
            msg = "its step needs a closure, which computes gradients anew: there are no equal gradients"
            raise _NotComparableError(msg) from error
        raise


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Return the state of a parameter with floating-point tensors in a dtype."""
    if isinstance(value, Tensor):
        return value.to(dtype) if dtype and value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(x, dtype) for key, x in value.items()}
    if isinstance(value, list):
        return [_cast(x, dtype) for x in value]
    return value


def _change(p: Tensor, before: Tensor) -> Tensor:
    """Return by how much a parameter has changed, on this rank."""
    change = _local(p.detach()).double() - _local(before).double()
    return change.to(p.dtype)


def _local(x: Tensor) -> Tensor:
    return local_shard(x) if is_dtensor(type(x)) else x
