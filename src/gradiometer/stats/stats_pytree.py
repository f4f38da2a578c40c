"""`TensorStats` as a pytree: compiled functions take and return it, and `torch.export` saves it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from torch.utils import _pytree as pytree

from gradiometer.columns import Thresholds
from gradiometer.distributed import Sharding

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["register"]

# The structure of stats as plain values, since strict torch.export cannot rebuild other constants: names,
# thresholds, skip_nonfinite, the sharding (() for None), and the attributes that are there.
_Context = tuple[tuple[str, ...], tuple[float, float, float], bool, tuple[Any, ...], tuple[str, ...]]

# optional attributes that are tensors or stats
_OPTIONAL: Final = ("origin", "local", "fingerprints", "diverged")


def _to_json(context: _Context) -> list[Any]:
    return list(context)


def _from_json(dumped: list[Any]) -> _Context:
    names, thresholds, skip_nonfinite, sharding, optional = dumped
    plain = Sharding.from_plain(sharding).to_plain() if sharding else ()
    return tuple(names), tuple(thresholds), skip_nonfinite, plain, tuple(optional)


def _children(stats: Any) -> dict[str, Any]:
    children: dict[str, Any] = {"columns": stats.columns, "flags": stats.flags}
    # None would be a leaf
    for name in _OPTIONAL:
        if getattr(stats, name) is not None:
            children[name] = getattr(stats, name)
    return children


def _context(stats: Any) -> _Context:
    limits = stats.thresholds
    thresholds = (limits.vanishing, limits.exploding, limits.dead)
    sharding = () if stats.sharding is None else stats.sharding.to_plain()
    optional = tuple([name for name in _OPTIONAL if getattr(stats, name) is not None])
    return stats.names, thresholds, stats.skip_nonfinite, sharding, optional


def _flatten(stats: Any) -> tuple[list[Any], _Context]:
    return list(_children(stats).values()), _context(stats)


def _flatten_with_keys(stats: Any) -> tuple[list[tuple[Any, Any]], _Context]:
    pairs = [(pytree.GetAttrKey(name), value) for name, value in _children(stats).items()]
    return pairs, _context(stats)


def register(kind: type) -> None:
    """Register `TensorStats` as a pytree node. Call it once."""

    def unflatten(children: Iterable[Any], context: _Context) -> Any:
        names, thresholds, skip_nonfinite, plain, optional = context
        columns, flags, *more = children
        sharding = Sharding.from_plain(plain) if plain else None
        given = dict(zip(optional, more, strict=True))
        return kind(names, columns, flags, Thresholds(*thresholds), skip_nonfinite, sharding, **given)

    pytree.register_pytree_node(
        kind,
        _flatten,
        unflatten,
        serialized_type_name="gradiometer.TensorStats",
        to_dumpable_context=_to_json,
        from_dumpable_context=_from_json,
        flatten_with_keys_fn=_flatten_with_keys,
    )
