"""The search for the operation that made a NaN or Inf: a dispatch mode that follows such values.

An operation that makes a NaN or Inf is only a candidate: masks hold -Inf on purpose, and `torch.where` may
drop what it does not select. Its values are followed from storage to storage, until they reach what matters:
the loss, the gradient of a parameter, a parameter or a buffer; without a backward, the output of the model,
too. The candidate whose values get there first is the cause.
"""

from __future__ import annotations

import math
import sys
import weakref
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from gradiometer.control.located import Located, Operand, describe, extremes
from gradiometer.control.operations import (
    Argument,
    Source,
    arguments_of,
    float_range,
    has_nan,
    is_finite,
    key_of,
    name_of,
    next_number,
    nonfinite_scalars,
    outputs_of,
    source_of,
    storage_of,
    tensors_in,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import FrameType, TracebackType
    from typing import Self

    from gradiometer.control.step_copy import StepCopy

__all__ = ["NonfiniteSearch"]

# operations whose output is not written yet
_EMPTY = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_"}
)


class _Mark(NamedTuple):
    """The forward operation that made a node of the autograd graph."""

    operation: str
    source: Source | None
    module: str | None


@dataclass
class _Origin:
    """Where non-finite values began: ``made`` by an operation, ``given`` to it as a number, or ``held``."""

    kind: Literal["made", "given", "held"]
    number: int
    located: Located
    # whether its Inf may be there on purpose, as in a mask
    is_mask: bool = False


class NonfiniteSearch(TorchDispatchMode):
    """Follows NaN and Inf through all operations of this thread while it is entered.

    Args:
        roots: models and the prefixes of the names of their modules.
        step_copy: keeps what operations overwrite.

    Attributes:
        result: what was found; filled in at the end.
    """

    # such as flex_attention's
    supports_higher_order_operators = True

    def __init__(self, roots: Sequence[tuple[str, nn.Module]], step_copy: StepCopy | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.result = Located()
        self._copy = step_copy
        self._roots = list(roots)
        self._paths: dict[nn.Module, str] = {}
        self._tensors: dict[int, str] = {}
        self._leaves: dict[Tensor, str] = {}
        self._buffers: list[tuple[str, Tensor]] = []
        for prefix, root in self._roots:
            for name, module in root.named_modules():
                self._paths.setdefault(module, (prefix + name).removesuffix(".") if name else prefix[:-1])
            for name, p in root.named_parameters():
                self._leaves.setdefault(p, prefix + name)
                self._tensors.setdefault(key_of(p), f"parameter {prefix + name}")
            for name, tensor in root.named_buffers():
                self._buffers.append((prefix + name, tensor))
                self._tensors.setdefault(key_of(tensor), f"buffer {prefix + name}")
        for leaf, name in self._leaves.items():
            if leaf.is_leaf and leaf.grad is not None:
                self._tensors.setdefault(key_of(leaf.grad), f"gradient {name}.grad")
        self._inputs: dict[int, tuple[StorageWeakRef, str]] = {}
        self._stack: list[str] = []
        self._marks: dict[int, _Mark] = {}
        # nodes with lower numbers were made before
        self._first = 0
        # of each storage with a NaN or Inf, by its address, which a weak reference reserves
        self._origins: dict[int, tuple[StorageWeakRef, _Origin]] = {}
        self._empty: dict[int, StorageWeakRef] = {}
        # results that no operation has read yet, and whether a backward has made them
        self._ends: dict[int, tuple[weakref.ref[Tensor], _Origin, bool]] = {}
        # tensors outside of the models whose gradients are not finite
        self._others: dict[int, tuple[weakref.ref[Tensor], _Origin]] = {}
        self._number = 0
        self._cause: _Origin | None = None
        self._hint: _Origin | None = None
        self._raised: tuple[BaseException, Located] | None = None
        # the last operation, whose failure may show in the next one
        self._last: tuple[str, list[Argument]] = ("", [])
        self._has_backward = False
        self._is_paused = False
        self._exit = ExitStack()

    # the block

    def __enter__(self) -> Self:
        """Begin to follow the operations of this thread."""
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            # the backward of a device runs on another thread otherwise, where the mode is not active
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            for module in self._paths:
                stack.callback(module.register_forward_pre_hook(self._enter_module, prepend=True).remove)
                stack.callback(module.register_forward_hook(self._leave_module, always_call=True).remove)
            for _, root in self._roots:
                stack.callback(root.register_forward_pre_hook(self._see_inputs, with_kwargs=True).remove)
            for p in self._leaves:
                if p.requires_grad and p.is_leaf:
                    stack.callback(p.register_post_accumulate_grad_hook(self._see_grad).remove)
            self._first = next_number()
            super().__enter__()  # type: ignore[no-untyped-call]
            self._exit = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop, and fill in the result."""
        try:
            super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        finally:
            self._exit.close()
        self._see_the_end(error)
        self._origins.clear()
        self._ends.clear()
        self._others.clear()
        self._last = "", []
        self._raised = None

    def _see_the_end(self, error: BaseException | None) -> None:
        if self._cause is None:
            self._see_state()
        cause = self._cause
        if cause is None and self._raised is not None and self._raised[0] is error:
            self._fill(self._raised[1])
            return
        if cause is None:
            left = [origin for ref, origin in self._others.values() if ref() is not None]
            # results of a backward are gradients
            ends = [x for x in self._ends.values() if x[2] or not self._has_backward]
            left += [origin for ref, origin, _ in ends if ref() is not None]
            hint = None if self._has_backward else self._hint
            cause = hint or min(left, key=lambda origin: origin.number, default=None)
        if cause is not None:
            self._fill(cause.located)

    def _fill(self, located: Located) -> None:
        # the object that the `with` statement has given
        vars(self.result).update(vars(located))

    def _see_state(self) -> None:
        """Look at parameters and buffers, which an optimizer or a forward may have changed."""
        named = [(f"parameter {name}", p) for p, name in self._leaves.items()]
        for what, tensor in [*named, *[(f"buffer {name}", x) for name, x in self._buffers]]:
            if self._cause is not None:
                return
            if not tensor.is_floating_point() and not tensor.is_complex():
                continue
            range_ = extremes(tensor)
            if is_finite(range_):
                continue
            known = self._origins.get(key_of(tensor))
            if known is None:
                if what.startswith("parameter"):
                    self._cause = self._held(what, describe("value", tensor, None, range_), Located())
            elif known[1].kind == "made" or what.startswith("parameter") or has_nan(range_):
                self._cause = known[1]

    # modules

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        del args
        self._stack.append(self._paths[module])

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        del args
        path = self._paths[module]
        # several, if a module within was left by an exception
        while path in self._stack and self._stack.pop() != path:
            pass
        if self._cause is None and any([module is root for _, root in self._roots]):
            with self._paused():
                for tensor in tensors_in(output):
                    if origin := self._origin_of(tensor):
                        self._suspect(tensor, origin)

    def _see_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        try:
            bound = signature(module.forward).bind(*args, **kwargs).arguments
        except (TypeError, ValueError):
            bound = {f"argument {i}": x for i, x in enumerate(args)} | kwargs
        for name, value in bound.items():
            for tensor in tensors_in(value):
                key = key_of(tensor)
                if key and key not in self._inputs and key not in self._tensors:
                    self._inputs[key] = StorageWeakRef(storage_of(tensor)), f"input {name} of the model"

    # evidence

    def _see_grad(self, parameter: Tensor) -> None:
        self._has_backward = True
        grad = parameter.grad
        if grad is None or self._cause is not None:
            return
        with self._paused():
            if not is_finite(extremes(grad)):
                known = self._origins.get(key_of(grad))
                name = self._leaves[parameter]
                self._cause = (
                    known[1]
                    if known
                    else self._held(
                        f"the gradient of {name}", describe("gradient", grad), Located(direction="backward")
                    )
                )

    def _see_leaf(self, arguments: list[Argument]) -> None:
        """Look at a gradient that is about to be stored in a tensor outside of the models."""
        node = torch._C._current_autograd_node()  # noqa: SLF001
        leaf = getattr(node, "variable", None)
        if leaf is None or leaf in self._leaves or id(leaf) in self._others:
            return
        for argument in arguments:
            if argument.tensor is not leaf and (origin := self._origin_of(argument.tensor)):
                self._others[id(leaf)] = weakref.ref(leaf), origin

    def _suspect(self, tensor: Tensor, origin: _Origin) -> None:
        """Note an output of the model, or what may be a loss: they matter if there is no backward."""
        if self._hint is None and (not origin.is_mask or has_nan(extremes(tensor))):
            self._hint = origin

    def _origin_of(self, tensor: Tensor) -> _Origin | None:
        known = self._origins.get(key_of(tensor))
        return None if known is None or is_finite(extremes(tensor)) else known[1]

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
        if self._cause is not None:
            return self._born(func(*args, **kwargs), args, kwargs)
        name = name_of(func)
        self._number += 1
        in_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001
        self._has_backward |= in_backward
        self._mark(name, in_backward=in_backward)
        arguments = arguments_of(func, args, kwargs)
        if in_backward:
            self._see_leaf(arguments)
        if getattr(func, "is_view", False):
            return func(*args, **kwargs)
        ranges: dict[int, tuple[Operand, tuple[float, float] | None]] = {}
        if any([argument.written for argument in arguments]):
            for argument in arguments:
                if argument.read and not (argument.written and key_of(argument.tensor) in self._empty):
                    range_ = float_range(argument.tensor)
                    ranges[id(argument.tensor)] = self._describe(argument, range_), range_
        try:
            output = func(*args, **kwargs)
            self._look(name, arguments, ranges, args, kwargs, output)
        except Exception as error:
            checks = name == "aten._linalg_check_errors"
            self._see_error(error, *(self._last if checks else (name, arguments)))
            raise
        self._last = name, arguments
        return self._born(output, args, kwargs)

    def _born(self, output: Any, args: Any, kwargs: Any) -> Any:
        if self._copy is not None:
            self._copy.after(output, args, kwargs)
        return output

    def _look(
        self,
        name: str,
        arguments: list[Argument],
        ranges: dict[int, tuple[Operand, tuple[float, float] | None]],
        args: Any,
        kwargs: Any,
        output: Any,
    ) -> None:
        short = name.rpartition(".")[2]
        outputs = outputs_of(output, arguments)
        if short in _EMPTY:
            for _, tensor in outputs:
                if key := key_of(tensor):
                    self._empty[key] = StorageWeakRef(storage_of(tensor))
            return
        by_element = "foreach" in short or short.startswith("_fused_")
        bad: dict[int | None, list[tuple[Tensor, tuple[float, float]]]] = {}
        for index, tensor in outputs:
            if not tensor.is_floating_point() and not tensor.is_complex():
                continue
            self._empty.pop(key_of(tensor), None)
            range_ = extremes(tensor)
            if range_ is not None and not is_finite(range_):
                bad.setdefault(index if by_element else None, []).append((tensor, range_))
        in_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001
        is_root = short == "ones_like" and not in_backward
        # a test such as isfinite does not use a result up
        if not bad and any([x.is_floating_point() or x.is_complex() for _, x in outputs]):
            for argument in arguments:
                self._ends.pop(id(argument.tensor), None)
        for index, tensors in bad.items():
            mine = [x for x in arguments if x.read and (not by_element or x.place in {None, index})]
            origin = self._trace(name, mine, ranges, nonfinite_scalars(args, kwargs), tensors)
            for argument in mine:
                self._ends.pop(id(argument.tensor), None)
            for tensor, _ in tensors:
                if key := key_of(tensor):
                    self._origins[key] = StorageWeakRef(storage_of(tensor)), origin
                    if not origin.is_mask:
                        self._ends[id(tensor)] = weakref.ref(tensor), origin, in_backward
        self._see_loss(arguments, is_root=is_root)

    def _see_loss(self, arguments: list[Argument], *, is_root: bool) -> None:
        """Look at single numbers with a graph: `backward` begins with ``ones_like`` of the loss."""
        for argument in arguments:
            tensor = argument.tensor
            if tensor.requires_grad and not tensor.is_leaf and (is_root or tensor.numel() == 1):
                origin = self._origin_of(tensor)
                if origin is None:
                    continue
                if is_root and self._in_backward_call():
                    self._cause = self._cause or origin
                else:
                    self._suspect(tensor, origin)

    @staticmethod
    def _in_backward_call() -> bool:
        frame: FrameType | None = sys._getframe()  # noqa: SLF001 the documented way to walk the stack
        while frame is not None:
            if frame.f_code.co_name == "_make_grads":
                return True
            frame = frame.f_back
        return False

    def _trace(
        self,
        name: str,
        arguments: list[Argument],
        ranges: dict[int, tuple[Operand, tuple[float, float] | None]],
        scalars: list[float],
        outputs: list[tuple[Tensor, tuple[float, float]]],
    ) -> _Origin:
        """Return the origin of the non-finite values that an operation has written."""
        makes_nan = any([has_nan(range_) for _, range_ in outputs])
        nans: list[_Origin] = []
        infs: list[_Origin] = []
        for argument in arguments:
            known = ranges.get(id(argument.tensor))
            if known is None and argument.written:
                continue  # not initialized before
            range_ = known[1] if known else float_range(argument.tensor)
            if is_finite(range_):
                continue
            found = self._origins.get(key_of(argument.tensor))
            origin = (
                found[1] if found else self._external(name, argument, known[0] if known else None, range_)
            )
            (nans if has_nan(range_) else infs).append(origin)

        def first(origins: Iterable[_Origin]) -> _Origin:
            return min(origins, key=lambda origin: origin.number)

        if nans and makes_nan:
            return first(nans)
        real = [origin for origin in infs if not origin.is_mask]
        if real:
            origin = first(real)
            if makes_nan and origin.located.then is None:
                where = self._locate(name)
                at = f" at {where.source}" if where.source else ""
                origin.located = replace(origin.located, then=f"then {name}{at} made NaN of it")
            return origin
        if infs and not makes_nan:
            return first(infs)
        if nans:
            return first(nans)
        return self._candidate(
            name, arguments, ranges, scalars, outputs, makes_nan=makes_nan, masked=bool(infs)
        )

    def _candidate(
        self,
        name: str,
        arguments: list[Argument],
        ranges: dict[int, tuple[Operand, tuple[float, float] | None]],
        scalars: list[float],
        outputs: list[tuple[Tensor, tuple[float, float]]],
        *,
        makes_nan: bool,
        masked: bool,
    ) -> _Origin:
        read = [
            ranges[id(x.tensor)][0] if id(x.tensor) in ranges else self._describe(x)
            for x in arguments
            if not (x.written and id(x.tensor) not in ranges)
        ]
        made = [describe("output", tensor, self._name_in_model(tensor), range_) for tensor, range_ in outputs]
        where = replace(self._locate(name), inputs=tuple(read), outputs=tuple(made))
        given = [x for x in scalars if math.isnan(x) or not makes_nan]
        if given:
            number = str(given[0]).replace("inf", "Inf").replace("nan", "NaN")
            located = replace(where, reason=f"was given the number {number}")
            return _Origin("given", self._number, located, is_mask=not makes_nan)
        counts = " and ".join([operand.counts for operand in made[:1]])
        how = "from masked inputs" if masked else "from finite inputs"
        if name.endswith("._to_copy"):
            how = f"in a cast to {str(made[0].dtype).removeprefix('torch.')}"
        return _Origin("made", self._number, replace(where, reason=f"made {counts} {how}"))

    def _external(
        self, name: str, argument: Argument, operand: Operand | None, range_: tuple[float, float] | None
    ) -> _Origin:
        """Return the origin of values that were there before any operation."""
        key = key_of(argument.tensor)
        operand = operand or self._describe(argument, range_)
        if key in self._tensors:
            what = self._tensors[key]
        elif key in self._inputs:
            what = self._inputs[key][1]
        elif key in self._empty:
            what = "memory that was not initialized"
        else:
            what = f"a tensor that {name} reads as {argument.name}"
        origin = self._held(what, operand, self._locate(name))
        is_plain = not what.startswith(("parameter", "gradient")) and not operand.n_nan
        origin.is_mask = is_plain and (what.startswith("buffer") or not operand.n_posinf)
        if key:
            self._origins[key] = StorageWeakRef(storage_of(argument.tensor)), origin
        return origin

    def _held(self, what: str, operand: Operand, where: Located) -> _Origin:
        reason = f"{what} is not finite already: {operand.counts}"
        held = replace(where, operation=None, inputs=(operand,), reason=reason)
        return _Origin("held", self._number, held)

    def _see_error(self, error: BaseException, name: str, arguments: list[Argument]) -> None:
        """Note an operation that raised, and the origin of its inputs if they are not finite."""
        try:
            for argument in arguments:
                origin = self._origin_of(argument.tensor)
                if origin is not None and not origin.is_mask:
                    self._raised = error, replace(origin.located, then=f"then {name} raised an error")
                    return
            inputs = [self._describe(x) for x in arguments if x.read]
        except RuntimeError:
            inputs = []  # the device is lost
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        where = replace(self._locate(name), inputs=tuple(inputs), error=text, reason=f"raised {text}")
        self._raised = error, where

    def _describe(self, argument: Argument, range_: tuple[float, float] | None = None) -> Operand:
        return describe(argument.name, argument.tensor, self._name_in_model(argument.tensor), range_)

    def _name_in_model(self, tensor: Tensor) -> str | None:
        key = key_of(tensor)
        if key in self._tensors:
            return self._tensors[key].partition(" ")[2]
        return self._inputs[key][1] if key in self._inputs else None

    # places

    def _mark(self, name: str, *, in_backward: bool) -> None:
        """Note the operation of a new node of the graph: nodes are made, and numbered, before they run."""
        number = next_number() - 1
        if number in self._marks or number < self._first:
            return
        where = self._locate(name, in_backward=in_backward)
        source = None if where.file is None or where.line is None else Source(where.file, where.line)
        self._marks[number] = _Mark(name, source, where.module)

    def _locate(self, name: str, *, in_backward: bool | None = None) -> Located:
        """Return the place of the current operation."""
        if in_backward is None:
            in_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001
        source, is_inside, is_repeated = source_of(in_backward=in_backward)
        module = self._stack[-1] if self._stack else None
        direction: Literal["forward", "backward"] | None
        if not in_backward or is_repeated:
            direction = "forward" if module is not None or torch.is_grad_enabled() else None
            return Located(name, direction, module, None, *(source or (None, None)))
        node = torch._C._current_autograd_node()  # noqa: SLF001
        if node is None:
            what = "adding up the gradients of a tensor that is used several times"
            return Located(name, "backward", None, what, *(source or (None, None)))
        mark = self._marks.get(node._sequence_nr())  # noqa: SLF001
        what = mark.operation if mark else node.name().rpartition("Backward")[0] or node.name()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            what = type(node).__name__.removesuffix("Backward")
        elif hasattr(node, "variable"):
            what = f"adding up the gradients of {self._leaves.get(node.variable, 'a leaf')}"
        if mark is None or (is_inside and source is not None):
            # in a function of the user that the backward calls
            return Located(name, "backward", mark.module if mark else None, what, *(source or (None, None)))
        return Located(name, "backward", mark.module, what, *(mark.source or (None, None)))
