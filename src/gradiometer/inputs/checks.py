"""Check that tensors can be measured, before any work; an error names the first one that cannot."""

from __future__ import annotations

import math
import sys
from numbers import Real
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

if TYPE_CHECKING:
    from gradiometer.inputs.named import Named

_FP8: Final = frozenset(
    [
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    ]
)
_COMPLEX: Final = frozenset([torch.complex128, torch.complex64, torch.complex32])
_DTYPES: Final = _FP8 | _COMPLEX | {torch.float64, torch.float32, torch.bfloat16, torch.float16}
# fp8, and half complex numbers that are conjugated too
_UNRESOLVED: Final = _FP8 | {torch.complex32}
_UNINITIALIZED: Final = (UninitializedParameter, UninitializedBuffer)
_LAYOUTS: Final = frozenset({torch.strided, torch.sparse_coo})


def is_plain_subclass(kind: type) -> bool:
    """Return whether this is a tensor subclass, not a parameter, without its own ``__torch_dispatch__``."""
    if kind is Tensor or issubclass(kind, nn.Parameter):
        return False
    return kind.__torch_dispatch__ is Tensor.__torch_dispatch__  # type: ignore[attr-defined]


class Traits(NamedTuple):
    """The distinct types, layouts and devices of a list of tensors."""

    types: set[type]
    layouts: set[torch.layout]
    # in the order in which they appear
    devices: list[torch.device]


def check(named: Named, what: str) -> Traits:
    """Raise a TypeError that names the first object that cannot be measured, if there is one."""
    tensors = named.tensors
    types = set(map(type, tensors))
    kinds: dict[tuple[torch.dtype, torch.layout, torch.device], None] = {}
    fine = all([issubclass(kind, Tensor) and not issubclass(kind, _UNINITIALIZED) for kind in types])
    if fine:
        # check the distinct kinds first: if all are fine, no tensor has to be checked by itself
        if torch.compiler.is_compiling():
            kinds = dict.fromkeys([(tensor.dtype, layout(tensor), tensor.device) for tensor in tensors])
        else:
            kinds = dict.fromkeys([(tensor.dtype, tensor.layout, tensor.device) for tensor in tensors])
        fine = all([_is_measurable(*kind) for kind in kinds])
        fine = fine and not any([tensor.is_nested for tensor in tensors])
        if any([dtype in _UNRESOLVED for dtype, _, _ in kinds]) and not torch.compiler.is_compiling():
            fine = fine and not any([_is_unresolvable(tensor) for tensor in tensors])
    if not fine:
        for name, tensor in zip(named.names, tensors, strict=True):
            reason = refusal(tensor)
            if reason is not None:
                raise TypeError(f"{what}: {name!r} {reason}")
    devices = list(dict.fromkeys([device for _, _, device in kinds]))
    return Traits(types, {layout for _, layout, _ in kinds}, devices)


def layout(tensor: Tensor) -> torch.layout:
    """Return a tensor's layout; while compiling, without reading the attribute.

    Dynamo does not let ``autograd.Function.backward`` read it. Tensors in a graph are strided or sparse COO.
    """
    if torch.compiler.is_compiling():
        return torch.sparse_coo if tensor.is_sparse else torch.strided
    return tensor.layout


def _is_measurable(dtype: torch.dtype, layout: torch.layout, device: torch.device) -> bool:
    is_readable = dtype in _DTYPES and layout in _LAYOUTS and not _is_sparse_fp8(dtype, layout)
    return is_readable and has_float64(device)


def _is_sparse_fp8(dtype: torch.dtype, layout: torch.layout) -> bool:
    return layout == torch.sparse_coo and dtype.itemsize == 1


def _is_unresolvable(tensor: Tensor) -> bool:
    """Return whether torch cannot read a lazily negated tensor, not even to copy it."""
    return tensor.dtype in _UNRESOLVED and tensor.is_neg() and (not tensor.is_complex() or tensor.is_conj())


def has_float64(device: torch.device) -> bool:
    """Return whether statistics can be computed on this device."""
    if device.type == "xpu" and torch.xpu.is_available():
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type not in {"mps", "meta"}


def is_one_number(tensor: Tensor) -> bool:
    """Return whether a tensor holds one element in memory of its own, which an operator can read."""
    if tensor.is_nested or layout(tensor) != torch.strided or tensor.is_quantized:
        return False
    return tensor.numel() == 1 and tensor.device.type != "meta"


def is_limit(value: object) -> bool:
    """Return whether this is a non-negative real number that float64 can hold, or inf; NumPy scalars too."""
    if not isinstance(value, Real):
        return False
    if not isinstance(value, (int, float)):
        # NumPy's float32 warns of an overflow if it is compared with the largest float64
        try:
            value = float(value)
        except OverflowError:
            return False
    return value == math.inf or 0 <= value <= sys.float_info.max


def describe(value: object) -> str:
    """Return what an error message says about an argument that is not the number it has to be."""
    if isinstance(value, Tensor):
        if value.is_nested:
            return "a nested tensor"
        text = f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
        if layout(value) != torch.strided:
            text += f" with layout {value.layout}"
        return f"{text} on the meta device" if value.device.type == "meta" else text
    if not isinstance(value, (int, float)):
        return repr(value)
    # the digits of a very large integer raise an error. A number that Dynamo has made an input of the graph
    # has no repr
    is_huge = isinstance(value, int) and abs(value) > sys.float_info.max
    return "an integer beyond the range of float64" if is_huge else f"{value}"


def refusal(tensor: object) -> str | None:
    """Return why an object cannot be measured and what to do, or None."""
    if isinstance(tensor, nn.Module):
        return "is a module, not a tensor; pass one module by itself, or its named_parameters()"
    if isinstance(tensor, dict) and "params" in tensor:
        return "is a parameter group of an optimizer, not a tensor; pass group['params']"
    if not isinstance(tensor, Tensor):
        return f"has type {type(tensor).__name__}, not Tensor; omit it or convert it with torch.as_tensor"
    if isinstance(tensor, _UNINITIALIZED):
        return "is not initialized and has no values; run the model once to initialize it"
    if tensor.is_nested:
        return "is a nested tensor, which is not supported; pass tensor.values()"
    if tensor.layout not in _LAYOUTS:
        advice = "pass tensor.to_dense() or tensor.values()"
        return f"has layout {tensor.layout}, which is not supported; {advice}"
    if tensor.is_quantized:
        return f"has quantized dtype {tensor.dtype}, which is not supported; pass tensor.dequantize()"
    if tensor.dtype not in _DTYPES:
        advice = "convert it to a floating-point or complex dtype, such as float32"
        return f"has dtype {tensor.dtype}, which is not supported; {advice}"
    if _is_sparse_fp8(tensor.dtype, tensor.layout):
        return f"is sparse {tensor.dtype}, which torch cannot coalesce; convert it to float16 first"
    if _is_unresolvable(tensor):
        advice = "negate it in float32 or complex64 first"
        return f"is a lazily negated view of dtype {tensor.dtype}, which torch cannot read; {advice}"
    if tensor.device.type == "meta":
        return "is on the meta device and has no values; materialize the model first"
    if not has_float64(tensor.device):
        return f"is on {tensor.device}, which does not support float64; pass tensor.cpu()"
    return None
