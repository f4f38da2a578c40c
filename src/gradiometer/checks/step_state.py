"""Everything that a step can reach and change, put back after each of its runs."""

from __future__ import annotations

import dis
import functools
import gc
import io
import types
from collections.abc import Iterator
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
    from collections.abc import Callable

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
        _refuse_iterators([x for _, x in found])
        owned += _behind([x for _, x in found if isinstance(x, Tensor)])
        # those of libraries are left alone: their caches stay filled
        reached = [x for package, x in found if not package or package in packages]
        functions = [x for x in reached if isinstance(x, types.FunctionType) and _package(x) in packages]
        self._undo = [_variables(x) for x in functions]
        self._undo += [_tensor_hooks(p) for p in self.parameters]
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
            stack.callback(_restore_settings, _settings())
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


def _settings() -> list[tuple[Callable[..., Any], Any]]:
    """Return global settings of torch that a step may change: functions that set them, and their values."""
    return [
        (torch.set_default_dtype, torch.get_default_dtype()),
        (torch.set_grad_enabled, torch.is_grad_enabled()),
        (torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()),
        (torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode()),
        (torch.autograd.set_detect_anomaly, torch.is_anomaly_enabled()),
    ]


def _restore_settings(before: list[tuple[Callable[..., Any], Any]]) -> None:
    for (restore, value), (_, now) in zip(before, _settings(), strict=True):
        if value != now:
            restore(value)


def _behind(tensors: list[Tensor]) -> list[Tensor]:
    """Return the leaves that the backward pass of tensors with a graph would reach."""
    left: list[Any] = [x.grad_fn for x in tensors]
    seen, found = set[Any](), list[Tensor]()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        left += [each for each, _ in node.next_functions]
    return found


def _refuse_iterators(values: list[Any]) -> None:
    """Raise a ValueError for an iterator, which each run of the step would advance.

    One that is an attribute of an object is left alone, unless a function that was found names it.
    """
    functions = [x for x in values if isinstance(x, types.FunctionType)]
    instructions = [x for function in functions for x in _instructions(function.__code__)]
    named = {x.argval for x in instructions if isinstance(x.argval, str)}
    others = [x for x in values if hasattr(x, "__dict__") and not isinstance(x, types.FunctionType | Tensor)]
    unnamed = {id(x) for other in others for key, x in vars(other).items() if key not in named}
    for x in values:
        if isinstance(x, Iterator) and not isinstance(x, io.IOBase) and id(x) not in unnamed:
            msg = f"the step has an iterator, a {type(x).__name__}, which each of its runs would advance, so "
            msg += "that they would not have the same data; pass what it yields as an argument of the step"
            raise ValueError(msg)


def _variables(function: types.FunctionType) -> Callable[[], None]:
    """Return a function that restores the outer and global variables that a function assigns."""
    names = {x.argval for x in _instructions(function.__code__) if x.opname == "STORE_GLOBAL"}
    before = {name: function.__globals__.get(name, _MISSING) for name in names}
    cells = [(cell, _content(cell)) for cell in function.__closure__ or ()]
    attributes = dict(vars(function))

    def restore() -> None:
        for name, value in before.items():
            if value is _MISSING:
                function.__globals__.pop(name, None)
            else:
                function.__globals__[name] = value
        for cell, value in cells:
            if value is not _MISSING and _content(cell) is not value:
                cell.cell_contents = value
        vars(function).clear()
        vars(function).update(attributes)

    return restore


def _tensor_hooks(p: Tensor) -> Callable[[], None]:
    """Return a function that restores the hooks of a parameter."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    before = {name: dict(getattr(p, name, None) or {}) for name in names}

    def restore() -> None:
        for name, hooks in before.items():
            table = getattr(p, name, None)
            if table is not None and list(table.items()) != list(hooks.items()):
                # autograd has the table itself
                table.clear()
                table.update(hooks)

    return restore


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Yield the instructions of code and of the functions that are defined in it."""
    yield from dis.get_instructions(code)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _instructions(inner)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _MISSING
