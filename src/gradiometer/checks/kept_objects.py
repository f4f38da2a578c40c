"""Keep what attributes and batches refer to: containers, objects, plain tensors and generators."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import MutableMapping, MutableSequence, MutableSet
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from gradiometer.inputs import is_dtensor, local_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

# objects that are looked at, and containers in containers
_OBJECTS, _DEPTH = 10_000, 6
_KNOWN: Final = (
    *(Tensor, nn.Module, torch.Generator, random.Random, tuple, frozenset),
    *(MutableMapping, MutableSequence, MutableSet, deque),
)
_PLAIN: Final = (str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device)


def kept_objects(
    values: Iterable[Any], known: Iterable[Any] = (), packages: Collection[str] = ()
) -> list[Callable[[], None]]:
    """Return functions that restore the mutable objects which values lead to.

    Args:
        values: containers and objects, such as the attributes of a module.
        known: tensors and modules that are restored elsewhere.
        packages: top-level packages of the classes whose objects are looked into. Those of others, such as
            a trainer or a logger, may be changed by their own threads meanwhile.
    """
    seen: dict[int, Any] = {id(x): x for x in known}
    left = deque((x, 0) for x in values)
    found = []
    while left and len(seen) < _OBJECTS:
        value, depth = left.popleft()
        if id(value) in seen or isinstance(value, _PLAIN) or _is_function(value):
            continue
        if not isinstance(value, _KNOWN) and package_of(value) not in packages:
            continue
        seen[id(value)] = value
        # an object of another library may refuse to be looked at
        with suppress(Exception):
            parts, restore = _kept(value)
            found.append(restore)
            left.extend((x, depth + 1) for x in parts if depth < _DEPTH)
    return found


def package_of(value: Any) -> str:
    """Return the top-level package of an object's class."""
    return type(value).__module__.partition(".")[0]


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, nn.Module)


def _kept(value: Any) -> tuple[list[Any], Callable[[], None]]:
    """Return the parts of an object, and a function that restores it."""
    if isinstance(value, Tensor):
        return [value.grad] if value.is_leaf and value.grad is not None else [], _tensor(value)
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return [], lambda: (value.set_state(state), None)[1]
    if isinstance(value, random.Random):
        own = value.getstate()
        return [], lambda: value.setstate(own)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        array = value.copy()
        return [], lambda: numpy.copyto(value, array) if value.flags.writeable else None
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        numbers = value.get_state()
        return [], lambda: value.set_state(numbers)
    if numpy is not None and isinstance(value, numpy.random.Generator):
        bits = value.bit_generator.state
        return [], lambda: setattr(value.bit_generator, "state", bits)
    if isinstance(value, dict | MutableMapping):
        items, restore = _container(value, value.items, lambda pairs: value.update(dict(pairs)))
        return [x for _, x in items], restore
    if isinstance(value, list | deque | MutableSequence):
        return _container(value, value.__iter__, value.extend)
    if isinstance(value, set | MutableSet):
        return _container(value, value.__iter__, lambda parts: [value.add(x) for x in parts])
    if isinstance(value, tuple | frozenset):
        return list(value), lambda: None
    return _object(value)


def _container(
    value: Any, parts: Callable[[], Iterable[Any]], fill: Callable[[list[Any]], Any]
) -> tuple[list[Any], Callable[[], None]]:
    before = list(parts())

    def restore() -> None:
        if not _same(list(parts()), before):
            value.clear()
            fill(before)

    return before, restore


def _object(value: Any) -> tuple[list[Any], Callable[[], None]]:
    own = getattr(value, "__dict__", None)
    before = dict(own) if isinstance(own, dict) else {}
    names = list(slots(value))
    slotted = {name: getattr(value, name) for name in names if hasattr(value, name)}

    def restore() -> None:
        if isinstance(own, dict) and not _same(list(own.items()), list(before.items())):
            own.clear()
            own.update(before)
        restore_slots(value, names, slotted)

    return [*before.values(), *slotted.values()], restore


def slots(value: Any) -> Iterator[str]:
    """Yield the names of attributes in slots."""
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in {"__dict__", "__weakref__"} and not name.startswith("__"):
                yield name


def restore_slots(value: Any, names: Iterable[str], before: dict[str, Any]) -> None:
    """Set the attributes in slots as before."""
    for name in names:
        if name in before and getattr(value, name, None) is not before[name]:
            object.__setattr__(value, name, before[name])
        elif name not in before and hasattr(value, name):
            object.__delattr__(value, name)


def _tensor(x: Tensor) -> Callable[[], None]:
    requires, grad = x.requires_grad, x.grad if x.is_leaf else None
    is_plain = not x.is_meta and x.layout == torch.strided and not x.is_quantized
    used, copy = x.data, x.data.clone() if is_plain else None

    def restore() -> None:
        if copy is not None and not same_bits(x, copy):
            if x.data_ptr() != used.data_ptr() or x.shape != used.shape:
                x.data = used
            if not same_bits(used, copy):
                write(used, copy)
        if x.is_leaf and x.requires_grad != requires:
            x.requires_grad_(requires)
        if x.is_leaf and x.grad is not grad:
            x.grad = grad

    return restore


def write(x: Tensor, values: Tensor) -> None:
    """Copy values into a tensor without a graph, also into one that was made in inference mode."""
    x, values = _here(x), _here(values)
    with torch.inference_mode() if x.is_inference() else torch.no_grad():
        x.copy_(values)


def _here(x: Tensor) -> Tensor:
    return local_shard(x) if is_dtensor(type(x)) else x


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same bits, of DTensors on this rank."""
    a, b = _here(a), _here(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.layout == b.layout == torch.sparse_coo:
        parts = ((a._indices(), b._indices()), (a._values(), b._values()))  # noqa: SLF001
        return all(same_bits(x, y) for x, y in parts)
    # one element may have any stride
    flat = [x.detach().resolve_conj().resolve_neg().reshape(-1) for x in (a, b)]
    bits = [
        (x if x.stride() == (1,) else x.clone(memory_format=torch.contiguous_format)).view(torch.uint8)
        for x in flat
    ]
    return torch.equal(bits[0], bits[1])


def _same(after: list[Any], before: list[Any]) -> bool:
    """Return whether two lists have the same objects; those of pairs, as of items, are compared."""
    if len(after) != len(before):
        return False
    for a, b in zip(after, before, strict=True):
        is_pair = type(a) is type(b) is tuple and len(a) == len(b)
        if a is not b and not (is_pair and all(x is y for x, y in zip(a, b, strict=True))):
            return False
    return True
