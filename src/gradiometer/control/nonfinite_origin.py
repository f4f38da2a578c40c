"""Where non-finite values began: followed from storage to storage, through the operations that read them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from torch.multiprocessing.reductions import StorageWeakRef

from gradiometer.control.located import Located, Operand, extremes
from gradiometer.control.operations import (
    Argument,
    Range,
    float_range,
    has_nan,
    is_finite,
    key_of,
    storage_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from gradiometer.control.model_context import ModelContext


@dataclass
class Origin:
    """Where non-finite values began: ``made`` by an operation, ``given`` to it as a number, or ``held``."""

    kind: Literal["made", "given", "held"]
    number: int
    located: Located
    # whether its Inf may be there on purpose, as in a mask
    is_mask: bool = False


class Operation(NamedTuple):
    """An operation that has written non-finite values."""

    name: str
    # those that it reads
    arguments: Sequence[Argument]
    # the values of tensors, by their `id`, before the operation wrote anything
    before: Mapping[int, tuple[Operand, Range]]
    # numbers among its arguments that are not finite
    scalars: Sequence[float]
    # tensors with non-finite values that it has written
    outputs: Sequence[tuple[Tensor, Range]]


class Origins:
    """The origin of the non-finite values of each storage; ``number``: the number of operations so far."""

    def __init__(self, context: ModelContext) -> None:
        self.number = 0
        self._context = context
        # by the address of a storage, which a weak reference reserves
        self._origins: dict[int, tuple[StorageWeakRef, Origin]] = {}
        self._uninitialized: dict[int, StorageWeakRef] = {}

    def clear(self) -> None:
        """Forget all origins."""
        self._origins.clear()

    def of_storage(self, tensor: Tensor) -> Origin | None:
        """Return the origin of what a tensor's storage holds; None if that is finite or not known."""
        known = self._origins.get(key_of(tensor))
        return None if known is None else known[1]

    def of(self, tensor: Tensor) -> Origin | None:
        """Return the origin of a tensor's non-finite values; None if it has none or if that is not known."""
        origin = self.of_storage(tensor)
        return None if origin is None or is_finite(extremes(tensor)) else origin

    def record(self, tensor: Tensor, origin: Origin) -> None:
        """Note the origin of what a tensor's storage holds."""
        if key := key_of(tensor):
            self._origins[key] = StorageWeakRef(storage_of(tensor)), origin

    def set_initialized(self, tensor: Tensor, value: bool) -> None:  # noqa: FBT001
        """Note whether a tensor has been written since its memory was allocated."""
        key = key_of(tensor)
        if value:
            self._uninitialized.pop(key, None)
        elif key:
            self._uninitialized[key] = StorageWeakRef(storage_of(tensor))

    def is_initialized(self, tensor: Tensor) -> bool:
        """Return whether a tensor has been written since its memory was allocated."""
        return key_of(tensor) not in self._uninitialized

    def held(self, label: str, operand: Operand, where: Located) -> Origin:
        """Return the origin of values that a tensor held before any operation."""
        reason = f"{label} is not finite already: {operand.counts}"
        located = replace(where, operation=None, inputs=(operand,), reason=reason)
        return Origin("held", self.number, located)

    def trace(self, operation: Operation) -> Origin:
        """Return the origin of the non-finite values that an operation has written."""
        makes_nan = any([has_nan(range_) for _, range_ in operation.outputs])
        nans: list[Origin] = []
        infs: list[Origin] = []
        for argument in operation.arguments:
            operand, range_ = operation.before.get(id(argument.tensor), (None, None))
            if operand is None:
                if argument.written:
                    continue  # not initialized before
                range_ = float_range(argument.tensor)
            if not is_finite(range_):
                origin = self.of_storage(argument.tensor)
                if origin is None:
                    operand = operand or self._context.described(argument.name, argument.tensor, range_)
                    origin = self._held_before(operation.name, argument, operand)
                (nans if has_nan(range_) else infs).append(origin)
        real = [origin for origin in infs if not origin.is_mask]
        if nans and makes_nan:
            return _first(nans)
        if real:
            origin = _first(real)
            if makes_nan and origin.located.then is None:
                where = self._context.locate(operation.name)
                at = f" at {where.source}" if where.source else ""
                origin.located = replace(origin.located, then=f"then {operation.name}{at} made NaN of it")
            return origin
        if infs and not makes_nan:
            return _first(infs)
        return _first(nans) if nans else self._made(operation, makes_nan=makes_nan, is_masked=bool(infs))

    def _made(self, operation: Operation, *, makes_nan: bool, is_masked: bool) -> Origin:
        """Return the origin of values that an operation made of finite ones, or of a mask."""
        inputs = [
            operation.before[id(x.tensor)][0]
            if id(x.tensor) in operation.before
            else self._context.described(x.name, x.tensor)
            for x in operation.arguments
            if not x.written or id(x.tensor) in operation.before
        ]
        outputs = [self._context.described("output", *output) for output in operation.outputs]
        where = replace(self._context.locate(operation.name), inputs=tuple(inputs), outputs=tuple(outputs))
        given = [x for x in operation.scalars if math.isnan(x) or not makes_nan]
        if given:
            number = str(given[0]).replace("inf", "Inf").replace("nan", "NaN")
            located = replace(where, reason=f"was given the number {number}")
            return Origin("given", self.number, located, is_mask=not makes_nan)
        how = "from masked inputs" if is_masked else "from finite inputs"
        if operation.name.endswith("._to_copy"):
            how = f"in a cast to {str(outputs[0].dtype).removeprefix('torch.')}"
        return Origin("made", self.number, replace(where, reason=f"made {outputs[0].counts} {how}"))

    def _held_before(self, name: str, argument: Argument, operand: Operand) -> Origin:
        """Return the origin of values that were there before any operation, and note it."""
        label = self._context.label(argument.tensor)
        if label is None:
            is_known = self.is_initialized(argument.tensor)
            unknown = f"a tensor that {name} reads as {argument.name}"
            label = unknown if is_known else "memory that was not initialized"
        origin = self.held(label, operand, self._context.locate(name))
        may_be_mask = not label.startswith(("parameter", "gradient")) and not operand.n_nan
        origin.is_mask = may_be_mask and (label.startswith("buffer") or not operand.n_posinf)
        self.record(argument.tensor, origin)
        return origin


def _first(origins: Sequence[Origin]) -> Origin:
    return min(origins, key=lambda origin: origin.number)
