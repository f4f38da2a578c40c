"""The search for the operation that made a NaN or Inf: a dispatch mode that follows such values.

An operation that makes a NaN or Inf is only a candidate: masks hold -Inf on purpose, and `torch.where` may
drop what it does not select. Its values are followed from storage to storage, until they reach what matters:
the loss, the gradient of a parameter, a parameter or a buffer; without a backward, the output of the model,
too. The candidate whose values get there first is the cause.
"""

from __future__ import annotations

import sys
import weakref
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradiometer.control.located import Located, Operand, describe, extremes
from gradiometer.control.model_context import ModelContext
from gradiometer.control.nonfinite_origin import Operation, Origin, Origins
from gradiometer.control.operations import (
    Argument,
    Range,
    arguments_of,
    float_range,
    has_nan,
    is_backward,
    is_finite,
    name_of,
    next_number,
    nonfinite_scalars,
    outputs_of,
    tensors_in,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType, TracebackType
    from typing import Self

    from gradiometer.control.step_copy import StepCopy

# operations whose output is not written yet
_EMPTY = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_"}
)


class NonfiniteSearch(TorchDispatchMode):
    """Follows NaN and Inf through all operations of this thread while it is entered.

    ``roots``: models and the prefixes of the names of their modules. ``step_copy``: keeps what operations
    overwrite. ``result``: filled in at the end.
    """

    # such as flex_attention's
    supports_higher_order_operators = True

    def __init__(self, roots: Sequence[tuple[str, nn.Module]], step_copy: StepCopy | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.result = Located()
        self._copy = step_copy
        self._roots = [root for _, root in roots]
        self._context = ModelContext(roots)
        self._origins = Origins(self._context)
        # results that no operation has read yet, and whether a backward has made them
        self._unread: dict[int, tuple[weakref.ref[Tensor], Origin, bool]] = {}
        # tensors outside of the models whose gradients are not finite
        self._outside: dict[int, tuple[weakref.ref[Tensor], Origin]] = {}
        self._cause: Origin | None = None
        # the first output of the model, or possible loss, that is not finite: the cause without a backward
        self._first_result: Origin | None = None
        self._raised: tuple[BaseException, Located] | None = None
        # the last operation, whose failure may show in the next one
        self._last: tuple[str, list[Argument]] = ("", [])
        self._has_backward = False
        self._is_paused = False
        self._exit = ExitStack()

    # the block

    def __enter__(self) -> Self:
        context = self._context
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            # the backward of a device runs on another thread otherwise, where the mode is not active
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            for module in context.paths:
                stack.callback(module.register_forward_pre_hook(context.enter_module, prepend=True).remove)
                stack.callback(module.register_forward_hook(self._leave_module, always_call=True).remove)
            for root in self._roots:
                hook = root.register_forward_pre_hook(context.record_inputs, with_kwargs=True)
                stack.callback(hook.remove)
            for p in context.parameters:
                if p.requires_grad and p.is_leaf:
                    stack.callback(p.register_post_accumulate_grad_hook(self._check_grad).remove)
            context.first_node = next_number()
            super().__enter__()  # type: ignore[no-untyped-call]
            self._exit = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        finally:
            self._exit.close()
        if (located := self._conclude(error)) is not None:
            # the object that the `with` statement has given
            vars(self.result).update(vars(located))
        self._origins.clear()
        self._unread.clear()
        self._outside.clear()
        self._last = "", []
        self._raised = None

    def _conclude(self, error: BaseException | None) -> Located | None:
        """Return what was found; ``error`` ends the block."""
        if self._cause is None:
            self._check_state()
        cause = self._cause
        if cause is None and self._raised is not None and self._raised[0] is error:
            return self._raised[1]
        if cause is None:
            left = [origin for ref, origin in self._outside.values() if ref() is not None]
            # results of a backward are gradients
            unread = [x for x in self._unread.values() if x[2] or not self._has_backward]
            left += [origin for ref, origin, _ in unread if ref() is not None]
            result = None if self._has_backward else self._first_result
            cause = result or min(left, key=lambda origin: origin.number, default=None)
        return None if cause is None else cause.located

    # what matters

    def _check_state(self) -> None:
        """Look at parameters and buffers, which an optimizer or a forward may have changed."""
        named = [(f"parameter {name}", p) for p, name in self._context.parameters.items()]
        for label, tensor in [*named, *[(f"buffer {name}", x) for name, x in self._context.buffers]]:
            range_ = float_range(tensor)
            if is_finite(range_):
                continue
            origin = self._origins.of_storage(tensor)
            is_parameter = label.startswith("parameter")
            if origin is None:
                if is_parameter:
                    operand = describe("value", tensor, None, range_)
                    self._cause = self._origins.held(label, operand, Located())
            elif origin.kind == "made" or is_parameter or has_nan(range_):
                self._cause = origin
            if self._cause is not None:
                return

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        del args
        self._context.leave_module(module)
        if self._cause is None and any([module is root for root in self._roots]):
            with self._paused():
                for tensor in tensors_in(output):
                    self._check_result(tensor)

    def _check_grad(self, parameter: Tensor) -> None:
        self._has_backward = True
        grad = parameter.grad
        if grad is None or self._cause is not None:
            return
        with self._paused():
            if not is_finite(extremes(grad)):
                label = f"the gradient of {self._context.parameters[parameter]}"
                self._cause = self._origins.of_storage(grad) or self._origins.held(
                    label, describe("gradient", grad), Located(direction="backward")
                )

    def _check_result(self, tensor: Tensor, *, is_loss: bool = False) -> None:
        """Look at an output of the model, or at what may be a loss: it matters if there is no backward."""
        origin = self._origins.of(tensor)
        if origin is None:
            return
        if is_loss:
            self._cause = self._cause or origin
        elif self._first_result is None and (not origin.is_mask or has_nan(extremes(tensor))):
            self._first_result = origin

    # operations

    @contextmanager
    def _paused(self) -> Iterator[None]:
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and look at what it read and wrote."""
        del types
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        if self._copy is not None:
            self._copy.before(func, args, kwargs)
        output = self._follow(func, args, kwargs) if self._cause is None else func(*args, **kwargs)
        if self._copy is not None:
            self._copy.after(output, args, kwargs)
        return output

    def _follow(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = name_of(func)
        self._origins.number += 1
        self._has_backward |= is_backward()
        self._context.record_node(name)
        arguments = arguments_of(func, args, kwargs)
        # a gradient that is about to be stored in a tensor outside of the models
        node = torch._C._current_autograd_node() if is_backward() else None  # noqa: SLF001
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf not in self._context.parameters and id(leaf) not in self._outside:
            for argument in arguments:
                if argument.tensor is not leaf and (origin := self._origins.of(argument.tensor)):
                    self._outside[id(leaf)] = weakref.ref(leaf), origin
        if getattr(func, "is_view", False):
            return func(*args, **kwargs)
        before: dict[int, tuple[Operand, Range]] = {}
        if any([argument.written for argument in arguments]):
            for argument in arguments:
                tensor = argument.tensor
                if argument.read and (not argument.written or self._origins.is_initialized(tensor)):
                    range_ = float_range(tensor)
                    before[id(tensor)] = self._context.described(argument.name, tensor, range_), range_
        try:
            output = func(*args, **kwargs)
            self._check_outputs(name, arguments, before, (args, kwargs), output)
        except Exception as error:
            checks = name == "aten._linalg_check_errors"
            self._record_error(error, *(self._last if checks else (name, arguments)))
            raise
        self._last = name, arguments
        return output

    def _check_outputs(
        self,
        name: str,
        arguments: list[Argument],
        before: Mapping[int, tuple[Operand, Range]],
        inputs: tuple[Any, Any],
        output: Any,
    ) -> None:
        short = name.rpartition(".")[2]
        outputs = outputs_of(output, arguments)
        if short in _EMPTY:
            for _, tensor in outputs:
                self._origins.set_initialized(tensor, value=False)
            return
        by_element = "foreach" in short or short.startswith("_fused_")
        floats = [(position, x) for position, x in outputs if x.is_floating_point() or x.is_complex()]
        bad: dict[int | None, list[tuple[Tensor, Range]]] = {}
        for position, tensor in floats:
            self._origins.set_initialized(tensor, value=True)
            range_ = extremes(tensor)
            if not is_finite(range_):
                bad.setdefault(position if by_element else None, []).append((tensor, range_))
        # a test such as isfinite does not use a result up
        if floats and not bad:
            for argument in arguments:
                self._unread.pop(id(argument.tensor), None)
        for position, tensors in bad.items():
            read = [x for x in arguments if x.read and (not by_element or x.position in {None, position})]
            origin = self._origins.trace(Operation(name, read, before, nonfinite_scalars(*inputs), tensors))
            for argument in read:
                self._unread.pop(id(argument.tensor), None)
            for tensor, _ in tensors:
                self._origins.record(tensor, origin)
                if not origin.is_mask:
                    self._unread[id(tensor)] = weakref.ref(tensor), origin, is_backward()
        # `backward` begins with ``ones_like`` of the loss
        is_root = short == "ones_like" and not is_backward()
        for argument in arguments:
            tensor = argument.tensor
            if tensor.requires_grad and not tensor.is_leaf and (is_root or tensor.numel() == 1):
                self._check_result(tensor, is_loss=is_root and _is_in_backward_call())

    def _record_error(self, error: BaseException, name: str, arguments: list[Argument]) -> None:
        """Note an operation that raised, and the origin of its inputs if they are not finite."""
        try:
            for argument in arguments:
                origin = self._origins.of(argument.tensor)
                if origin is not None and not origin.is_mask:
                    self._raised = error, replace(origin.located, then=f"then {name} raised an error")
                    return
            inputs = [self._context.described(x.name, x.tensor) for x in arguments if x.read]
        except RuntimeError:
            inputs = []  # the device is lost
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        where = self._context.locate(name)
        self._raised = error, replace(where, inputs=tuple(inputs), error=text, reason=f"raised {text}")


def _is_in_backward_call() -> bool:
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 the documented way to walk the stack
    while frame is not None and frame.f_code.co_name != "_make_grads":
        frame = frame.f_back
    return frame is not None
