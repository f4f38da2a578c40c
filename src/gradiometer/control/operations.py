"""Operations that a dispatch mode sees: their arguments, outputs, values, and the line that called them."""

from __future__ import annotations

import math
import os
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gradiometer.control.located import extremes, values_of

if TYPE_CHECKING:
    from types import FrameType

# operations in place that do not read what they overwrite
_FILLS = "copy fill zero normal uniform random bernoulli exponential geometric cauchy log_normal set"
_OVERWRITE = frozenset(f"{prefix}{name}_" for name in _FILLS.split() for prefix in ("", "_foreach_"))

# minimum and maximum, see `extremes`; None if there is no value
Range = tuple[float, float] | None

# a file and a line of it; None and None if they are not known
Line = tuple[str | None, int | None]


class Argument(NamedTuple):
    """A tensor argument: its name, its position in a list, whether it is written, and whether it is read."""

    name: str
    tensor: Tensor
    position: int | None
    written: bool
    read: bool


# arguments and outputs


def name_of(func: Any) -> str:
    """Return an operation's name, such as ``aten.log``."""
    schema = getattr(func, "_schema", None)
    name = schema.name if schema is not None else str(getattr(func, "_name", func))
    return str(name).replace("::", ".")


def arguments_of(func: Any, args: Any, kwargs: Any) -> list[Argument]:
    """Return the tensor arguments of an operation."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        inputs = enumerate(tensors_in([*args, *kwargs.values()]))
        return [Argument(f"input {i}", x, None, written=False, read=True) for i, x in inputs]
    overwrites = schema.name.partition("::")[2] in _OVERWRITE
    found = []
    for i, argument in enumerate(schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        read = not (written and (overwrites or argument.kwarg_only))
        if isinstance(value, Tensor):
            found.append(Argument(argument.name, value, None, written, read))
        elif isinstance(value, list | tuple):
            tensors = [(j, x) for j, x in enumerate(value) if isinstance(x, Tensor)]
            found += [Argument(f"{argument.name}[{j}]", x, j, written, read) for j, x in tensors]
    return found


def outputs_of(output: Any, arguments: list[Argument]) -> list[tuple[int | None, Tensor]]:
    """Return the tensors that an operation has written, each once, with the position in a list."""
    found: dict[int, tuple[int | None, Tensor]] = {}
    for argument in arguments:
        if argument.written:
            found[id(argument.tensor)] = argument.position, argument.tensor
    if isinstance(output, Tensor):
        found.setdefault(id(output), (None, output))
    elif isinstance(output, list | tuple):
        for i, part in enumerate(output):
            for tensor in tensors_in(part):
                found.setdefault(id(tensor), (i, tensor))
    return list(found.values())


def nonfinite_scalars(args: Any, kwargs: Any) -> list[float]:
    """Return the numbers among the arguments that are not finite."""
    numbers = [x for x in tree_leaves((args, kwargs)) if isinstance(x, float | complex)]
    parts = [part for x in numbers for part in ((x.real, x.imag) if isinstance(x, complex) else (x,))]
    return [x for x in parts if not math.isfinite(x)]


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a nest of containers."""
    return [value] if isinstance(value, Tensor) else [x for x in tree_leaves(value) if isinstance(x, Tensor)]


# values


def storage_of(tensor: Tensor) -> Any:
    """Return the storage of a tensor's values; None if it has none."""
    values = values_of(tensor)
    return None if values is None else values.untyped_storage()


def key_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none."""
    storage = storage_of(tensor)
    return 0 if storage is None else int(storage._cdata)  # noqa: SLF001


def float_range(tensor: Tensor) -> Range:
    """Return the `extremes` of a floating-point or complex tensor, or None."""
    return extremes(tensor) if tensor.is_floating_point() or tensor.is_complex() else None


def is_finite(range_: Range) -> bool:
    """Return whether a range is finite; None, of no floats, is."""
    return range_ is None or (math.isfinite(range_[0]) and math.isfinite(range_[1]))


def has_nan(range_: Range) -> bool:
    """Return whether a range has NaN."""
    return range_ is not None and (math.isnan(range_[0]) or math.isnan(range_[1]))


# the stack


def is_backward() -> bool:
    """Return whether a backward is running."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001


def next_number() -> int:
    """Return the number of the next node of the autograd graph."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined] # noqa: SLF001


_TORCH = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120 compared with strings
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep  # noqa: PTH120
_LIBRARY = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120
_CHECKPOINT = os.path.join("torch", "utils", "checkpoint.py")  # noqa: PTH118


@cache
def _is_user_code(file: str) -> bool:
    if file.startswith((_TORCH, _OURS, "<frozen")):
        return False
    return not file.startswith(_LIBRARY) or "site-packages" in file


def line_of(*, in_backward: bool) -> tuple[Line, bool, bool]:
    """Return the innermost line of the user's code.

    And for the backward: whether that line is called by it, and whether a checkpoint repeats a forward.
    """
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001
    line: Line = None, None
    is_known = is_inside = is_repeated = False
    while frame is not None:
        file = frame.f_code.co_filename
        if in_backward and frame.f_code.co_name == "_engine_run_backward":
            in_backward, is_inside = False, is_known
        elif in_backward and file.endswith(_CHECKPOINT):
            is_repeated = True
        elif not is_known and _is_user_code(file):
            line, is_known = (file, frame.f_lineno), True
        if is_known and not in_backward:
            break
        frame = frame.f_back
    return line, is_inside, is_repeated
