"""The tensors that a user passes, with their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

Tensors = Mapping[str, Tensor] | Iterable[Tensor] | Iterable[tuple[str, Tensor]]

# distinct lists of names kept; a training step has one or two
NAMES_KEPT: Final = 16

# added to names by torch.compile, FSDP and activation checkpointing; they are not part of the model
_WRAPPERS: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class Named(NamedTuple):
    """Tensors and their names."""

    names: tuple[str, ...]
    tensors: list[Tensor]


def present(names: tuple[str, ...], tensors: Sequence[Tensor | None]) -> Named:
    """Leave out tensors that are None."""
    found = [tensor for tensor in tensors if tensor is not None]
    if len(found) < len(names):
        names = tuple([name for name, tensor in zip(names, tensors, strict=True) if tensor is not None])
    return Named(names, found)


def named_tensors(source: Mapping[str, Any] | Iterable[Any], what: str) -> Named:
    """Return the named tensors of a mapping, of an iterable of tensors, or of (name, tensor) pairs.

    Tensors without names are named by their position. The parts of names that wrappers add are removed.
    """
    if isinstance(source, nn.Module):
        msg = f"{what}: got a module, not tensors; call collect_grads or collect_weights with the module"
        raise TypeError(msg)
    if isinstance(source, Mapping):
        return with_names(list(source.keys()), list(source.values()), what)
    if isinstance(source, Tensor):
        msg = f"{what}: got one tensor, not a collection of tensors; pass {{'name': tensor}} or [tensor]"
        raise TypeError(msg)
    if isinstance(source, str) or not isinstance(source, Iterable):
        if callable(source):
            raise TypeError(f"{what}: got a function, not tensors; call it and pass the result")
        msg = f"{what}: expected a module, a mapping or an iterable of tensors, got {type(source).__name__}"
        raise TypeError(msg)
    items = list(source)
    if not any([issubclass(kind, tuple) for kind in set(map(type, items))]):
        return Named(_kept(_positions)(len(items)), items)
    pairs = [x if isinstance(x, tuple) and len(x) == 2 else (str(i), x) for i, x in enumerate(items)]
    return with_names([name for name, _ in pairs], [tensor for _, tensor in pairs], what)


def with_names(names: list[Any], tensors: list[Any], what: str) -> Named:
    """Return tensors with their names, which must be strings, without the parts that wrappers add."""
    if set(map(type, names)) != {str}:
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"{what}: a name must be a string, got {name!r}")
    return Named(_kept(_clean)(tuple(names)), tensors)


def _positions(count: int) -> tuple[str, ...]:
    return tuple([str(i) for i in range(count)])


def _clean(names: tuple[str, ...]) -> tuple[str, ...]:
    # search all names at once: most models have no wrapper
    together = " ".join(names)
    if not any([wrapper in together for wrapper in _WRAPPERS]):
        return names
    paths = [name.split(".") for name in names]
    return tuple([".".join([*[x for x in path[:-1] if x not in _WRAPPERS], path[-1]]) for path in paths])


def check_names(names: tuple[str, ...], what: str) -> None:
    """Raise a ValueError if a name occurs twice."""
    twice = _kept(_twice)(names)
    if twice is not None:
        raise ValueError(f"{what}: two tensors have the name {twice!r}; give each tensor a unique name")


def _twice(names: tuple[str, ...]) -> str | None:
    first = {name: i for i, name in reversed(list(enumerate(names)))}
    return next((name for i, name in enumerate(names) if first[name] != i), None)


_KEPT: Final = {
    function: lru_cache(maxsize=NAMES_KEPT)(function) for function in (_positions, _clean, _twice)
}


def _kept(function: Any) -> Any:
    """Return the cached function, or the function itself for Dynamo, which warns about caches."""
    return function if torch.compiler.is_compiling() else _KEPT[function]
