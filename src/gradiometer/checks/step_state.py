"""Everything that a step can reach and change, put back after each of its runs."""

from __future__ import annotations

import dis
import functools
import gc
import types
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradiometer.checks.kept_objects import kept_objects, package_of
from gradiometer.checks.kept_state import kept_state
from gradiometer.control import random_state, restore_random_state
from gradiometer.control.step_copy import find_parts
from gradiometer.inputs import is_dtensor, unwrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SET_VERSIONS = torch._C._autograd._unsafe_set_version_counter  # noqa: SLF001
_MISSING = object()


class StepState:
    """What a step can reach: it is as now after each `restored` block.

    That is its models with their parameters, gradients, buffers, attributes and hooks; the state of
    optimizers, schedulers, scalers and generators; tensors, containers, and the attributes of objects of the
    caller's own packages, in its arguments, closure and the globals that it names; variables that it assigns;
    and the global random states.

    Attributes:
        all_optimizers: all optimizers that there are.
        compiled_steps: the compiled steps of optimizers that the step can reach.
    """

    def __init__(self, step: Any, args: Any, kwargs: Any, model: nn.Module, others: Any = ()) -> None:
        hooks = [
            hook
            for p in model.parameters()
            for hook in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values()
        ]
        found: list[tuple[str, Any]] = []
        own = set(model.parameters())
        # also those that it has from an unknown place
        self.all_optimizers = _optimizers()
        optimizers = [x for x in self.all_optimizers if own.intersection(_parameters(x))]
        named = {"model": model, "optimizers": optimizers, "kwargs": kwargs, "hooks": hooks, "more": others}
        self.parts = find_parts(step, args, named, found)
        self.modules = _roots([x for x in self.parts.values() if isinstance(x, nn.Module)])
        self.optimizers = [x for x in self.parts.values() if isinstance(x, Optimizer)]
        self.compiled_steps = _compiled_steps(self.optimizers, [x for _, x in found])
        inner = [x for root in self.modules for x in root.modules()]
        tensors = [x for root in self.modules for x in (*root.parameters(), *root.buffers())]
        owned = [p for x in self.optimizers for p in _parameters(x)]
        self.parameters = list(dict.fromkeys([*(x for x in tensors if isinstance(x, nn.Parameter)), *owned]))
        tables = [
            vars(x)
            for x in self.parts.values()
            if isinstance(x, Optimizer | LRScheduler | torch.amp.GradScaler)
        ]
        generators = [x for x in self.parts.values() if isinstance(x, torch.Generator)]
        callers = [*inner, step, getattr(step, "__self__", None)]
        packages = ({package_of(x) for x in callers} | {_package(step), "numpy"}) - {"torch"}
        # those of libraries are left alone: their caches stay filled
        reached = [x for package, x in found if not package or package in packages]
        functions = [x for x in reached if isinstance(x, types.FunctionType) and _package(x) in packages]
        self._undo = [_variables(x) for x in functions]
        self._undo += kept_objects([*tables, *generators, *owned, *reached], [*tensors, *inner], packages)
        self._devices = {x.device for x in [*tensors, *owned]}

    def random(self) -> dict[str, Any]:
        """Return the random states as they are now."""
        return random_state(self._devices)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put everything back at the end of a block."""
        plain = tuple([p for p in self.parameters if not (p.is_inference() or is_dtensor(type(p)))])
        versions = tuple([p._version for p in plain])  # noqa: SLF001
        random = self.random()
        with ExitStack() as stack:
            # in reverse: random numbers and versions last
            stack.callback(restore_random_state, random)
            stack.callback(_SET_VERSIONS, plain, versions)
            for undo in self._undo:
                stack.callback(undo)
            for module in self.modules:
                stack.enter_context(kept_state(module))
            yield


def _compiled_steps(optimizers: list[Optimizer], found: list[Any]) -> dict[Optimizer, Any]:
    """Return ``torch.compile(optimizer.step)`` of those that have it as an attribute, or elsewhere."""
    steps = {}
    for each in found:
        inner: Any = getattr(each, "_torchdynamo_orig_callable", None)
        optimizer = getattr(inner, "__self__", None)
        if isinstance(optimizer, Optimizer) and inner.__name__ == "step":
            steps[optimizer] = each
    own = {x: vars(x).get("step") for x in optimizers}
    return steps | {x: step for x, step in own.items() if hasattr(step, "_torchdynamo_orig_callable")}


def _optimizers() -> list[Optimizer]:
    return [x for x in gc.get_objects() if issubclass(type(x), Optimizer)]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def _roots(modules: list[nn.Module]) -> list[nn.Module]:
    """Return the modules that are not part of another, without wrappers."""
    plain = list(dict.fromkeys([unwrapped(x) for x in modules]))
    parts = {id(part) for x in plain for part in x.modules() if part is not x}
    return [x for x in plain if id(x) not in parts]


def _package(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", None)).partition(".")[0]


def _variables(function: types.FunctionType) -> Callable[[], None]:
    """Return a function that restores the outer and global variables that a function assigns."""
    names = {x.argval for x in dis.get_instructions(function) if x.opname == "STORE_GLOBAL"}
    before = {name: function.__globals__.get(name, _MISSING) for name in names}
    cells = [(cell, _content(cell)) for cell in function.__closure__ or ()]

    def restore() -> None:
        for name, value in before.items():
            if value is _MISSING:
                function.__globals__.pop(name, None)
            else:
                function.__globals__[name] = value
        for cell, value in cells:
            if value is not _MISSING and _content(cell) is not value:
                cell.cell_contents = value

    return restore


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _MISSING
