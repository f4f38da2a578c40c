"""Stats as pytrees: compiled functions take and return them, and `torch.export` saves them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from torch.utils import _pytree as pytree

from gradiometer.columns import Thresholds
from gradiometer.distributed import Sharding

if TYPE_CHECKING:
    from collections.abc import Iterable

# The structure of stats as plain values, since strict torch.export cannot rebuild other constants: names,
# the sharding (() for None), those of ``_VALUES`` that are there, by name, and the names of the tensors and
# stats in them.
_Context = tuple[tuple[str, ...], tuple[Any, ...], tuple[tuple[str, Any], ...], tuple[str, ...]]

# the attributes that are tensors or stats; None would be a leaf
_CHILDREN: Final = ("columns", "flags", "origin", "local", "fingerprints", "diverged", "projections")


def _from_json(dumped: list[Any]) -> _Context:
    names, sharding, values, children = dumped
    plain = Sharding.from_plain(sharding).to_plain() if sharding else ()
    kept = tuple([(name, tuple(value) if isinstance(value, list) else value) for name, value in values])
    return tuple(names), plain, kept, tuple(children)


def _children(stats: Any) -> dict[str, Any]:
    found = {name: getattr(stats, name, None) for name in _CHILDREN}
    return {name: value for name, value in found.items() if value is not None}


def _context(stats: Any, children: Iterable[str]) -> _Context:
    values: tuple[tuple[str, Any], ...] = ()
    if hasattr(stats, "thresholds"):
        limits = stats.thresholds
        values = (("thresholds", (limits.vanishing, limits.exploding, limits.dead)),)
        values += (("skip_nonfinite", stats.skip_nonfinite),)
    sharding = getattr(stats, "sharding", None)
    sharding = () if sharding is None else sharding.to_plain()
    return stats.names, sharding, values, tuple(children)


def _flatten(stats: Any) -> tuple[list[Any], _Context]:
    children = _children(stats)
    return list(children.values()), _context(stats, children)


def _flatten_with_keys(stats: Any) -> tuple[list[tuple[Any, Any]], _Context]:
    children = _children(stats)
    pairs = [(pytree.GetAttrKey(name), value) for name, value in children.items()]
    return pairs, _context(stats, children)


def register(kind: type) -> None:
    """Register a class of stats as a pytree node. Call it once for each."""

    def unflatten(children: Iterable[Any], context: _Context) -> Any:
        names, plain, values, given = context
        fields = dict(zip(given, children, strict=True)) | dict(values)
        if "thresholds" in fields:
            fields["thresholds"] = Thresholds(*fields["thresholds"])
        if plain:
            fields["sharding"] = Sharding.from_plain(plain)
        return kind(names, **fields)

    pytree.register_pytree_node(
        kind,
        _flatten,
        unflatten,
        serialized_type_name=f"gradiometer.{kind.__name__}",
        to_dumpable_context=list,
        from_dumpable_context=_from_json,
        flatten_with_keys_fn=_flatten_with_keys,
    )
