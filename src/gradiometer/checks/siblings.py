"""Layers of the same class in one list: what one of them has, the others have, too."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence


@dataclass(frozen=True)
class Siblings:
    """Layers of one list that are of one class.

    Attributes:
        path: the name of the list.
        places: the place of each layer in the list.
        layers: two or more modules that have modules inside.
    """

    path: str
    places: tuple[int, ...]
    layers: tuple[nn.Module, ...]

    def name(self, index: int, inside: str = "") -> str:
        """Return the full name of a module or parameter inside one of the layers."""
        return ".".join(x for x in (self.path, str(self.places[index]), inside) if x)

    def inside(self) -> Iterator[tuple[str, list[nn.Module]]]:
        """Return each path inside the layers that all of them have, with the module of each layer."""
        tables = [dict(layer.named_modules()) for layer in self.layers]
        for path in tables[0]:
            found = [table[path] for table in tables if path in table]
            if len(found) == len(tables):
                yield path, found


def siblings(model: nn.Module, *, equal_shapes: bool = False) -> list[Siblings]:
    """Return the layers of each list that have the same class.

    Args:
        model: the model.
        equal_shapes: whether parameters of the same name also have the same shape.
    """
    found = []
    for path, container in model.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        groups: list[tuple[type, dict[str, Any], list[int]]] = []
        children = list(container)
        for place, child in enumerate(children):
            if not child._modules:  # noqa: SLF001 leaves of a Sequential differ on purpose
                continue
            shapes = {name: p.shape for name, p in child.named_parameters()} if equal_shapes else {}
            for kind, others, places in groups:
                if kind is type(child) and _alike(shapes, others):
                    places.append(place)
                    break
            else:
                groups.append((type(child), shapes, [place]))
        found += [
            Siblings(path, tuple(places), tuple([children[i] for i in places]))
            for *_, places in groups
            if len({id(children[i]) for i in places}) > 1
        ]
    return found


def _alike(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return whether most names are in both, and have the same shape."""
    common = a.keys() & b.keys()
    return 2 * len(common) >= len(a | b) and all(a[name] == b[name] for name in common)


def odd_one(values: Sequence[Hashable]) -> int | None:
    """Return the index of the value that differs from all others, which agree; None without.

    Of two different values, it is the second.

    >>> odd_one([1, 1, 2]), odd_one([1, 2, 2]), odd_one([1, 1, 2, 2]), odd_one([1, 2])
    (2, 0, None, 1)
    """
    counts = Counter(values)
    if len(counts) != 2 or min(counts.values()) > 1:
        return None
    rare = counts.most_common()[-1][0]
    return values.index(rare) if len(values) > 2 else 1
