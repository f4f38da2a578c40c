"""What a user passes -> named tensors; and what cannot be measured is refused, by name, before any work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

__all__ = [
    "Named",
    "Traits",
    "check",
    "has_float64",
    "is_plain_subclass",
    "named_parameters",
    "named_tensors",
]

Named = list[tuple[str, Tensor]]

# put into names by torch.compile, FSDP and activation checkpointing; they are no part of the model
_WRAPPERS: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

_DTYPES: Final = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
        torch.complex128,
        torch.complex64,
        torch.complex32,
    }
)
_UNINITIALIZED: Final = (UninitializedParameter, UninitializedBuffer)
_LAYOUTS: Final = frozenset({torch.strided, torch.sparse_coo})


def named_parameters(source: nn.Module | Mapping[str, Any] | Iterable[Any], what: str) -> Named:
    """Return (name, parameter) pairs of a module or of what `named_tensors` takes; tied parameters once."""
    if isinstance(source, nn.Module):
        return _clean(list(source.named_parameters()), what)
    named = named_tensors(source, what)
    for name, parameter in named:
        if not isinstance(parameter, Tensor):
            msg = f"{what}: {name!r} {_refusal(parameter)}"
            raise TypeError(msg)
    seen: set[Tensor] = set()
    return [pair for pair in named if not (pair[1] in seen or seen.add(pair[1]))]  # type: ignore[func-returns-value]


def named_tensors(source: Mapping[str, Any] | Iterable[Any], what: str) -> Named:
    """Return (name, tensor) pairs of a mapping, of tensors, or of pairs.

    Tensors without names are named by their position. Wrappers' parts of names are left out.
    """
    if isinstance(source, nn.Module):
        msg = f"{what}: got a module; collect_grads and collect_weights say what to measure"
        raise TypeError(msg)
    if isinstance(source, Mapping):
        pairs: list[tuple[Any, Any]] = list(source.items())
    elif isinstance(source, Tensor):
        msg = f"{what}: expected several tensors, got one; pass {{'name': tensor}} or [tensor]"
        raise TypeError(msg)
    elif isinstance(source, Iterable):
        pairs = [
            item if isinstance(item, tuple) and len(item) == 2 else (str(i), item)
            for i, item in enumerate(source)
        ]
    else:
        msg = f"{what}: expected a module, a mapping or an iterable of tensors, got {type(source).__name__}"
        raise TypeError(msg)
    return _clean(pairs, what)


def _clean(pairs: list[tuple[Any, Any]], what: str) -> Named:
    for name, _ in pairs:
        if not isinstance(name, str):
            msg = f"{what}: a name must be a string, got {name!r}"
            raise TypeError(msg)
    # one look at all names: most models have no wrapper
    together = " ".join([name for name, _ in pairs])
    if not any([wrapper in together for wrapper in _WRAPPERS]):
        return pairs
    return [(_without_wrappers(name), tensor) for name, tensor in pairs]


def _without_wrappers(name: str) -> str:
    *path, own = name.split(".")
    return ".".join([*[part for part in path if part not in _WRAPPERS], own])


def is_plain_subclass(kind: type) -> bool:
    """Tell whether this is a subclass in Python alone, such as a labelled tensor, and not a parameter."""
    if kind is Tensor or issubclass(kind, nn.Parameter):
        return False
    return kind.__torch_dispatch__ is Tensor.__torch_dispatch__  # type: ignore[attr-defined]


class Traits(NamedTuple):
    """What kinds of tensors a list holds: a few, however many tensors there are."""

    types: set[type]
    layouts: set[torch.layout]
    # in the order in which they appear
    devices: list[torch.device]


def check(named: Named, what: str) -> Traits:
    """Refuse what cannot be measured.

    Raises:
        TypeError: for what is no tensor, or a tensor of a kind that has no such statistics.
        ValueError: for a name that stands twice.
    """
    tensors = [tensor for _, tensor in named]
    types = {type(tensor) for tensor in tensors}
    kinds: dict[tuple[torch.dtype, torch.layout, torch.device], None] = {}
    fine = all([_is_measurable_type(kind) for kind in types])
    if fine:
        # kinds first: in the steady state no tensor is looked at one by one
        kinds = dict.fromkeys([(tensor.dtype, tensor.layout, tensor.device) for tensor in tensors])
        fine = all([_is_measurable(*kind) for kind in kinds])
        fine = fine and not any([tensor.is_nested for tensor in tensors])
    if not fine:
        for name, tensor in named:
            reason = _refusal(tensor)
            if reason is not None:
                msg = f"{what}: {name!r} {reason}"
                raise TypeError(msg)
    if len({name for name, _ in named}) != len(named):
        names = [name for name, _ in named]
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        msg = f"{what}: the name {twice!r} stands for two tensors; give each its own"
        raise ValueError(msg)
    devices = list(dict.fromkeys([device for _, _, device in kinds]))
    return Traits(types, {layout for _, layout, _ in kinds}, devices)


def _is_measurable_type(kind: type) -> bool:
    return issubclass(kind, Tensor) and not issubclass(kind, _UNINITIALIZED) and kind.__name__ != "DTensor"


def _is_measurable(dtype: torch.dtype, layout: torch.layout, device: torch.device) -> bool:
    return (
        dtype in _DTYPES and layout in _LAYOUTS and has_float64(device) and not _is_sparse_fp8(dtype, layout)
    )


def _is_sparse_fp8(dtype: torch.dtype, layout: torch.layout) -> bool:
    return layout == torch.sparse_coo and dtype.itemsize == 1


def has_float64(device: torch.device) -> bool:
    """Tell whether statistics can be computed on this device."""
    if device.type == "xpu" and torch.xpu.is_available():
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type not in {"mps", "meta"}


def _refusal(tensor: object) -> str | None:
    """Say why this cannot be measured and what to do, or None."""
    if not isinstance(tensor, Tensor):
        return f"is no tensor but {type(tensor).__name__}; leave it out or convert it with torch.as_tensor"
    if type(tensor).__name__ == "DTensor":
        return "is a DTensor; pass its shard, tensor.to_local()"
    if isinstance(tensor, _UNINITIALIZED):
        return "is not initialized and has no values; run the model once first"
    if tensor.is_nested:
        return "is a nested tensor; pass its values, tensor.values()"
    if tensor.layout not in _LAYOUTS:
        return f"has layout {tensor.layout}; pass tensor.to_dense(), or its tensor.values()"
    if tensor.is_quantized:
        return f"is quantized ({tensor.dtype}); pass tensor.dequantize()"
    if tensor.dtype not in _DTYPES:
        return f"has dtype {tensor.dtype}; convert it to one that holds real or complex numbers, float32 say"
    if _is_sparse_fp8(tensor.dtype, tensor.layout):
        return f"is sparse and of {tensor.dtype}, which torch cannot coalesce; convert it to float16 first"
    if tensor.device.type == "meta":
        return "is on the meta device and has no values; materialize the model first"
    if not has_float64(tensor.device):
        return f"is on {tensor.device}, which has no float64; move it to the CPU first, tensor.cpu()"
    return None
