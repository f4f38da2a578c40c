"""What a user passes -> named tensors; and what cannot be measured is refused, by name, before any work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from gradiometer.layout import is_dtensor, is_partial, local_shard

__all__ = [
    "Named",
    "Parameters",
    "Tensors",
    "Traits",
    "check",
    "check_names",
    "has_float64",
    "is_plain_subclass",
    "layout",
    "local_shards",
    "named_parameters",
    "named_tensors",
    "present",
]

Tensors = Mapping[str, Tensor] | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
Parameters = nn.Module | Tensors

# distinct lists of names kept; a training step has one or two
NAMES_KEPT: Final = 16

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


class Named(NamedTuple):
    """Tensors, and a name of each."""

    names: tuple[str, ...]
    tensors: list[Tensor]


def named_parameters(source: nn.Module | Mapping[str, Any] | Iterable[Any], what: str) -> Named:
    """Return the parameters, with names, of a module or of what `named_tensors` takes; tied ones once."""
    if isinstance(source, nn.Module):
        pairs = list(_unwrapped(source).named_parameters())
        return _named([name for name, _ in pairs], [parameter for _, parameter in pairs], what)
    named = named_tensors(source, what)
    for name, parameter in zip(named.names, named.tensors, strict=True):
        if not isinstance(parameter, Tensor):
            msg = f"{what}: {name!r} {_refusal(parameter)}"
            raise TypeError(msg)
    seen: set[Tensor] = set()
    once: list[Tensor | None] = []
    for parameter in named.tensors:
        once.append(None if parameter in seen else parameter)
        seen.add(parameter)
    return present(named.names, once)


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside of what torch.compile and data parallelism put around it."""
    while True:
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            module = module.module
        elif type(module).__name__ == "OptimizedModule":
            module = module._orig_mod  # type: ignore[assignment] # noqa: SLF001
        else:
            return module


def present(names: tuple[str, ...], tensors: Sequence[Tensor | None]) -> Named:
    """Leave out what is None."""
    found = [tensor for tensor in tensors if tensor is not None]
    if len(found) < len(names):
        names = tuple([name for name, tensor in zip(names, tensors, strict=True) if tensor is not None])
    return Named(names, found)


def named_tensors(source: Mapping[str, Any] | Iterable[Any], what: str) -> Named:
    """Return the tensors, with names, of a mapping, of tensors, or of (name, tensor) pairs.

    Tensors without names are named by their position. Wrappers' parts of names are left out.
    """
    if isinstance(source, nn.Module):
        msg = f"{what}: got a module; collect_grads and collect_weights say what to measure"
        raise TypeError(msg)
    if isinstance(source, Mapping):
        return _named(list(source.keys()), list(source.values()), what)
    if isinstance(source, Tensor):
        msg = f"{what}: expected several tensors, got one; pass {{'name': tensor}} or [tensor]"
        raise TypeError(msg)
    if isinstance(source, str) or not isinstance(source, Iterable):
        if callable(source):
            msg = f"{what}: got a function; call it and pass what it returns"
            raise TypeError(msg)
        msg = f"{what}: expected a module, a mapping or an iterable of tensors, got {type(source).__name__}"
        raise TypeError(msg)
    items = list(source)
    if not any([issubclass(kind, tuple) for kind in {type(item) for item in items}]):
        return Named(_kept(_positions)(len(items)), items)
    pairs = [
        item if isinstance(item, tuple) and len(item) == 2 else (str(i), item) for i, item in enumerate(items)
    ]
    return _named([name for name, _ in pairs], [tensor for _, tensor in pairs], what)


def _named(names: list[Any], tensors: list[Any], what: str) -> Named:
    if {type(name) for name in names} != {str}:
        for name in names:
            if not isinstance(name, str):
                msg = f"{what}: a name must be a string, got {name!r}"
                raise TypeError(msg)
    return Named(_kept(_clean)(tuple(names)), tensors)


def _positions(count: int) -> tuple[str, ...]:
    return tuple([str(i) for i in range(count)])


def _clean(names: tuple[str, ...]) -> tuple[str, ...]:
    # one look at all names: most models have no wrapper
    together = " ".join(names)
    if not any([wrapper in together for wrapper in _WRAPPERS]):
        return names
    return tuple([_without_wrappers(name) for name in names])


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


def local_shards(named: Named, what: str) -> Named:
    """Return what this rank holds of DTensors; other tensors as they are.

    Raises:
        TypeError: for a DTensor whose values are summands still.
    """
    if not any([is_dtensor(kind) for kind in {type(tensor) for tensor in named.tensors}]):
        return named
    shards = []
    for name, tensor in zip(named.names, named.tensors, strict=True):
        if not is_dtensor(type(tensor)):
            shards.append(tensor)
            continue
        if is_partial(tensor):
            msg = (
                f"{what}: {name!r} is a DTensor with placements {tensor.placements}: its values are summands "  # type: ignore[attr-defined]
                "that the ranks have not added up; redistribute it first, or, of gradients, pass "
                "reduce=gm.Ranks(model) to collect_grads"
            )
            raise TypeError(msg)
        shards.append(local_shard(tensor))
    return Named(named.names, shards)


def check(named: Named, what: str) -> Traits:
    """Refuse what cannot be measured.

    Raises:
        TypeError: for what is no tensor, or a tensor of a kind that has no such statistics.
    """
    tensors = named.tensors
    types = {type(tensor) for tensor in tensors}
    kinds: dict[tuple[torch.dtype, torch.layout, torch.device], None] = {}
    fine = all([_is_measurable_type(kind) for kind in types])
    if fine:
        # kinds first: in the steady state no tensor is looked at one by one
        if torch.compiler.is_compiling():
            kinds = dict.fromkeys([(tensor.dtype, layout(tensor), tensor.device) for tensor in tensors])
        else:
            kinds = dict.fromkeys([(tensor.dtype, tensor.layout, tensor.device) for tensor in tensors])
        fine = all([_is_measurable(*kind) for kind in kinds])
        fine = fine and not any([tensor.is_nested for tensor in tensors])
    if not fine:
        for name, tensor in zip(named.names, tensors, strict=True):
            reason = _refusal(tensor)
            if reason is not None:
                msg = f"{what}: {name!r} {reason}"
                raise TypeError(msg)
    devices = list(dict.fromkeys([device for _, _, device in kinds]))
    return Traits(types, {layout for _, layout, _ in kinds}, devices)


def layout(tensor: Tensor) -> torch.layout:
    """Return a tensor's layout; in a graph, where tensors are strided or sparse COO, without asking for it.

    Dynamo does not let ``autograd.Function.backward`` read the attribute.
    """
    if torch.compiler.is_compiling():
        return torch.sparse_coo if tensor.is_sparse else torch.strided
    return tensor.layout


def check_names(names: tuple[str, ...], what: str) -> None:
    """Refuse a name that stands twice, with a ValueError."""
    twice = _kept(_twice)(names)
    if twice is not None:
        msg = f"{what}: the name {twice!r} stands for two tensors; give each its own"
        raise ValueError(msg)


def _twice(names: tuple[str, ...]) -> str | None:
    if len(set(names)) == len(names):
        return None
    return next(name for i, name in enumerate(names) if name in names[:i])


_KEPT: Final = {
    function: lru_cache(maxsize=NAMES_KEPT)(function) for function in (_positions, _clean, _twice)
}


def _kept(function: Any) -> Any:
    """Return the function with its last results kept; as it is for Dynamo, which warns of caches."""
    return function if torch.compiler.is_compiling() else _KEPT[function]


def _is_measurable_type(kind: type) -> bool:
    return issubclass(kind, Tensor) and not issubclass(kind, _UNINITIALIZED)


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
    if isinstance(tensor, nn.Module):
        return "is a module; pass one module alone, or its named_parameters()"
    if isinstance(tensor, dict) and "params" in tensor:
        return "is a group of parameters; pass group['params']"
    if not isinstance(tensor, Tensor):
        return f"is no tensor but {type(tensor).__name__}; leave it out or convert it with torch.as_tensor"
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
