"""The named parameters of a module, by a walk that is planned once and checked at each call.

``nn.Module.named_parameters`` runs Python code for each module and each parameter, which takes longer than
measuring small ones. A walk takes a few operations on lists for each level of the tree. It reads the current
``_modules`` and ``_parameters`` of every module, so it sees direct writes to them. A plan keeps names and
ids, but no module and no parameter: ids only tell which of the current objects are the same.
"""

from __future__ import annotations

import weakref
from itertools import chain, compress
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_PARAMETERS: Final = attrgetter("_parameters")
_MODULES: Final = attrgetter("_modules")
_NAMED: Final = (nn.Module.named_parameters, nn.Module._named_members)  # noqa: SLF001


class _Level(NamedTuple):
    """The modules at one depth.

    ``counts``: of the parameters of each, then of the children of each. ``names``: in the same order.
    """

    counts: list[int]
    names: list[str]
    children: list[Any]
    parameters: list[Any]


class _Shape(NamedTuple):
    """A level when the walk was planned; ``is_new``: which children are modules that were not met before."""

    counts: list[int]
    names: list[str]
    children: list[int]
    is_new: list[bool]


class ModuleWalk(NamedTuple):
    """How to find the parameters of a module.

    ``ids``: of the values of all ``_parameters``. ``names``: as ``named_parameters`` returns them.
    ``parameters_of``: returns the parameters among those values, and one more.
    """

    shapes: list[_Shape]
    ids: list[int]
    names: tuple[str, ...]
    parameters_of: Callable[[list[Any]], tuple[Tensor, ...]]


# the plan of each module
_walks: weakref.WeakKeyDictionary[nn.Module, ModuleWalk] = weakref.WeakKeyDictionary()


def planned(module: nn.Module) -> tuple[tuple[str, ...], list[Tensor]] | None:
    """Return the names and current parameters of a module, or None if `plan` has to be called."""
    walk = _walks.get(module)
    if walk is None or not _is_ordinary(module):
        return None
    modules: list[Any] = [module]
    values: list[Any] = []
    for counts, names, children, is_new in walk.shapes:
        try:
            level = _level(modules)
        except (AttributeError, TypeError):
            return None  # something else than dicts
        if level.counts != counts or level.names != names or list(map(id, level.children)) != children:
            return None
        values += level.parameters
        modules = list(compress(level.children, is_new))
    # with the same ids the same values are None or tied
    if list(map(id, values)) != walk.ids:
        return None
    return walk.names, list(walk.parameters_of(values)[1:])


def plan(module: nn.Module, names: tuple[str, ...], parameters: Sequence[Tensor]) -> None:
    """Keep a walk that finds these parameters, unless a class of the module overrides how they are listed."""
    _walks.pop(module, None)
    if not _is_ordinary(module):
        return
    shapes = []
    values: list[Any] = []
    modules: list[Any] = [module]
    met = {id(module), id(None)}
    while modules:
        if not all(map(_has_dicts, modules)):
            return
        level = _level(modules)
        is_new = []
        for child in level.children:
            is_new.append(id(child) not in met)
            met.add(id(child))
        shapes.append(_Shape(level.counts, level.names, list(map(id, level.children)), is_new))
        values += level.parameters
        modules = list(compress(level.children, is_new))
    ids = list(map(id, values))
    places = {i: place for place, i in enumerate(ids) if i != id(None)}
    if places and places.keys() == {id(parameter) for parameter in parameters}:
        # with one place an itemgetter would not return a tuple
        parameters_of = itemgetter(0, *[places[id(parameter)] for parameter in parameters])
        _walks[module] = ModuleWalk(shapes, ids, names, parameters_of)


def _is_ordinary(module: nn.Module) -> bool:
    """Return whether ``named_parameters`` is torch's own, also in a subclass and on the object."""
    return (
        getattr(module.named_parameters, "__func__", None),
        getattr(module._named_members, "__func__", None),  # noqa: SLF001
    ) == _NAMED


def _has_dicts(module: nn.Module) -> bool:
    """Return whether ``named_modules`` is torch's own, and reads dicts that `_level` reads as it does."""
    is_ordinary = type(module).named_modules is nn.Module.named_modules
    return is_ordinary and type(_PARAMETERS(module)) is type(_MODULES(module)) is dict


def _level(modules: list[Any]) -> _Level:
    dicts = [*map(_PARAMETERS, modules), *map(_MODULES, modules)]
    # most modules have no children
    filled = list(filter(None, dicts[len(modules) :]))
    return _Level(
        list(map(len, dicts)),
        list(chain.from_iterable(filter(None, dicts))),
        list(chain.from_iterable(map(dict.values, filled))),
        list(chain.from_iterable(map(dict.values, dicts[: len(modules)]))),
    )
