"""The `shards` argument of `Ranks`: maps patterns of names to the ranks that hold parts of these tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gradiometer.distributed import process_groups
from gradiometer.distributed.sharding import Mesh, Sharding, ShardSpec

if TYPE_CHECKING:
    from collections.abc import Sequence


def check_patterns(shards: Any) -> None:
    """Raise an error unless ``shards`` is a mapping whose keys are regular expressions."""
    if not isinstance(shards, Mapping):
        raise TypeError(f"Ranks: shards must map regular expressions to groups, got {type(shards).__name__}")
    for pattern in shards:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(f"Ranks(shards=...): {pattern!r} is not a regular expression: {error}") from None


def check_matches(pattern: str, names: Sequence[str]) -> None:
    """Raise an error for a pattern that matches no tensor of any rank."""
    if not any([re.search(pattern, name) for name in names]):
        some = ", ".join(map(repr, names[:3])) + (" ..." if len(names) > 3 else "")
        msg = f"Ranks(shards=...): {pattern!r} matches no tensor of any rank; available: {some or 'none'}"
        raise ValueError(msg)


def with_shards(sharding: Sharding, shards: Mapping[str, Any]) -> Sharding:
    """Return the sharding with an additional mesh dimension for tensors whose parts differ between ranks."""
    specs, meshes = list(sharding.specs), list(sharding.meshes)
    for pattern, group in shards.items():
        size, rank = 1, 0
        if group is not None or process_groups.is_active():
            rank, ranks = process_groups.ranks_of(process_groups.group_of(group))
            size = len(ranks)
        made: dict[int, int] = {}
        for place, name in enumerate(sharding.names):
            if not re.search(pattern, name):
                continue
            _, dtype, mesh, placements = specs[place]
            if mesh not in made:
                # one dimension more than the mesh of a DTensor
                base = meshes[mesh] if mesh >= 0 else Mesh((), (), ())
                at = None if base.coordinate is None else (rank, *base.coordinate)
                made[mesh] = len(meshes)
                meshes.append(Mesh((pattern, *base.names), (size, *base.shape), at))
            specs[place] = ShardSpec(None, dtype, made[mesh], ("S", *placements))
    return replace(sharding, specs=tuple(specs), meshes=tuple(meshes))
