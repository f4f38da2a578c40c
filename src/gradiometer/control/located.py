"""What locate_nonfinite has found: an operation, its inputs and outputs, and its place in the code."""

from __future__ import annotations

import linecache
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from gradiometer.inputs import is_dtensor, local_shard
from gradiometer.stats import preformatted

# operands of one operation that are shown, at most
_SHOWN: Final = 8
_PLAIN: Final = {Tensor, torch.nn.Parameter, torch.nn.Buffer}
_COMPRESSED: Final = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


@dataclass(frozen=True)
class Operand:
    """A tensor that an operation read or wrote.

    Attributes:
        name: its name in the operation's schema, such as ``self``, or ``output``.
        tensor: its name in the model, if it is a parameter or a buffer; otherwise None.
        shape, dtype: of the tensor.
        min, max: of its finite elements; None if there are none. For complex tensors, of real and imaginary
            parts.
        n_nan, n_posinf, n_neginf: the number of elements (or parts) that are NaN, +Inf and -Inf.
    """

    name: str
    tensor: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    min: float | None
    max: float | None
    n_nan: int = 0
    n_posinf: int = 0
    n_neginf: int = 0

    @property
    def counts(self) -> str:
        """The non-finite elements, such as ``2 NaN and 1 -Inf``; empty if there are none."""
        parts = ((self.n_nan, "NaN"), (self.n_posinf, "Inf"), (self.n_neginf, "-Inf"))
        return " and ".join([f"{count:,} {word}" for count, word in parts if count])

    def __str__(self) -> str:
        name = self.name if self.tensor is None else f"{self.name} ({self.tensor})"
        values = []
        if self.min is not None and self.max is not None:
            is_one = self.min == self.max
            values.append(f"all {self.min:.4g}" if is_one else f"from {self.min:.4g} to {self.max:.4g}")
        values += [self.counts] * bool(self.counts)
        text = f"{name}: {str(self.dtype).removeprefix('torch.')} {list(self.shape)}"
        return f"{text}, {', '.join(values)}" if values else text


@dataclass(frozen=True)
class Located:
    """The operation that made the first NaN or Inf, as `locate_nonfinite` returns it; ``print`` shows it.

    True if anything was found. As the target of a ``with`` statement, it is filled in at the end of the
    block.

    Attributes:
        operation: the name of the operation, such as ``aten.log``; None if all was finite, or if a tensor was
            not finite before any operation.
        direction: ``"forward"`` (the loss, too), ``"backward"``, or None for neither, such as an optimizer's
            step.
        module: the innermost module that called it, by its name in the model, such as ``blocks.3.attn``, or
            ``""`` for the model itself; for the backward, the module that called the forward operation.
            None outside of the model.
        forward_operation: for the backward, the forward operation whose gradient it computes, such as
            ``aten.sqrt``, or the class of a custom ``autograd.Function``.
        file, line: the place in your code that called it; for the backward, that of the forward operation.
        inputs, outputs: the tensors that it read and wrote; of a list with an element for each
            parameter, only the element in question.
        reason: what is wrong, such as ``made 2 -Inf``.
        then: if the values were Inf, the first operation that made NaN of them.
        error: the exception, if the operation raised one.
    """

    operation: str | None = None
    direction: Literal["forward", "backward"] | None = None
    module: str | None = None
    forward_operation: str | None = None
    file: str | None = None
    line: int | None = None
    inputs: tuple[Operand, ...] = ()
    outputs: tuple[Operand, ...] = ()
    reason: str = ""
    then: str | None = None
    error: str | None = None

    def __bool__(self) -> bool:
        return bool(self.reason)

    @property
    def source(self) -> str | None:
        """The place in your code, such as ``model.py:12``, relative to the working directory if below it."""
        if self.file is None:
            return None
        path = Path(self.file)
        if path.is_absolute() and path.is_relative_to(Path.cwd()):
            path = path.relative_to(Path.cwd())
        return f"{path}:{self.line}"

    @property
    def code(self) -> str:
        """The text of that line; empty if the file cannot be read."""
        return linecache.getline(self.file or "", self.line or 0).strip()

    @property
    def place(self) -> str:
        """Where it happened, in one line without the code."""
        if self.direction == "backward":
            what = self.forward_operation or ""
            parts = ["in the backward" + (f", {what}" if " " in what else f" of {what}" if what else "")]
        else:
            parts = ["in the forward" if self.direction else "outside of forward and backward"]
        if self.module is not None:
            parts.append(f"in {self.module}" if self.module else "in the model itself")
        if self.source is not None:
            parts.append(f"at {self.source}")
        return ", ".join(parts)

    def __str__(self) -> str:
        if not self:
            return "all gradients, parameters and results are finite"
        lines = [f"{self.operation} {self.reason}" if self.operation else self.reason]
        code = f": {self.code}" if self.code else ""
        place = self.place if self.operation else f"first read {self.place}"
        lines.append(f"  {place}{code}")
        for operands in (self.inputs, self.outputs):
            lines += [f"  {operand}" for operand in operands[:_SHOWN]]
            if len(operands) > _SHOWN:
                lines.append(f"  and {len(operands) - _SHOWN} more")
        if self.then is not None:
            lines.append(f"  {self.then}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the same text for a notebook."""
        return preformatted(str(self))


def values_of(tensor: Tensor) -> Tensor | None:
    """Return the values of a tensor as a plain dense one; None if it has none that can be read."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # noqa: SLF001
        return None  # its values cannot be read here; operations see what is in it
    if is_dtensor(type(tensor)):
        tensor = local_shard(tensor)
    if tensor.layout == torch.sparse_coo:
        tensor = tensor._values()  # noqa: SLF001 values() needs a coalesced one
    elif tensor.is_nested or tensor.layout in _COMPRESSED:
        tensor = tensor.values()
    # zeros without memory, which the backward makes
    is_zero = tensor._is_zerotensor()  # noqa: SLF001
    # others, such as fake tensors, have no memory
    is_plain = type(tensor) in _PLAIN or type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    if is_zero or tensor.is_meta or tensor.is_quantized or not is_plain or not tensor.numel():
        return None
    return tensor.detach()


def extremes(tensor: Tensor) -> tuple[float, float] | None:
    """Return minimum and maximum, NaN or Inf if any element is; None without values. Waits for the device."""
    values = values_of(tensor)
    if values is None or values.dtype == torch.bool:
        return None
    values = _real(values)
    low, high = torch.stack(torch.aminmax(values)).tolist()
    return low, high


def _real(values: Tensor) -> Tensor:
    """Return the values in a dtype that ``aminmax`` supports."""
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.is_floating_point() and values.dtype.itemsize == 1:
        return values.float()
    return values.long() if values.dtype in {torch.uint16, torch.uint32, torch.uint64} else values


def describe(
    name: str, tensor: Tensor, known: str | None = None, range_: tuple[float, float] | None = None
) -> Operand:
    """Return the description of a tensor, whose `extremes` may be given. Waits for the device."""
    shape = tuple(tensor.shape)
    if range_ is None:
        range_ = extremes(tensor)
    if range_ is None or (math.isfinite(range_[0]) and math.isfinite(range_[1])):
        low, high = range_ or (None, None)
        return Operand(name, known, shape, tensor.dtype, low, high)
    values = values_of(tensor)
    assert values is not None  # noqa: S101 it has extremes
    values = _real(values)
    counts = [int(x.sum()) for x in (values.isnan(), values.isposinf(), values.isneginf())]
    finite = values[values.isfinite()]
    ends = torch.stack(torch.aminmax(finite)).tolist() if finite.numel() else (None, None)
    return Operand(name, known, shape, tensor.dtype, *ends, *counts)
