"""The plan that ranks agree on at setup: one order of all names, and which rank counts which tensor.

Ranks that hold the same part of a tensor hold copies, and only the first of them counts it. Ranks that hold
different parts each count their own. This covers replicated and sharded dimensions of a mesh, several
meshes, tensors that only the ranks of one pipeline stage have, and plain tensors with a copy on every rank.
"""

from __future__ import annotations

import heapq
import math
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradiometer.distributed.sharding import Sharding, ShardSpec


class DisagreementError(ValueError):
    """Ranks disagree; the message describes the first difference."""


class Member(NamedTuple):
    """One rank: the digest of its sharding, and its coordinate in each of the sharding's meshes."""

    digest: bytes
    coordinates: tuple[tuple[int, ...] | None, ...]


class _Way(NamedTuple):
    """How the ranks with one sharding hold a tensor: the mesh, and the mesh dimensions that shard it."""

    digest: bytes
    mesh: int
    sharded: tuple[int, ...]


# how all ranks hold one tensor; thousands of tensors share a few patterns, and each is checked once
_Pattern = tuple[_Way, ...]

# for each mesh dimension that shards a tensor: the placement, and the number of parts
_Cut = list[tuple[str, int]]


@dataclass(frozen=True)
class GlobalPlan:
    """The T rows of all ranks together, the same on every rank."""

    names: tuple[str, ...]
    specs: tuple[ShardSpec, ...]
    # for each row, how the ranks with each sharding hold its tensor
    patterns: tuple[_Pattern, ...]
    # one for each rank
    members: tuple[Member, ...]
    # by digest
    shardings: Mapping[bytes, Sharding]

    @cached_property
    def rows(self) -> dict[str, int]:
        """The row of each name."""
        return {name: row for row, name in enumerate(self.names)}

    def counts(self, rank: int) -> list[bool]:
        """Return which rows of its own sharding a rank counts: those that no earlier rank has a copy of."""
        return [place == 0 for place, _ in self.copies(rank)]

    def copies(self, rank: int) -> list[tuple[int, int]]:
        """Return its place among the ranks that hold the same part, and their number, for each of its rows.

        They are -1 and 0 for a rank outside of the mesh, which holds nothing.
        """
        known: dict[_Pattern, tuple[int, int]] = {}
        found = []
        for name in self.shardings[self.members[rank].digest].names:
            pattern = self.patterns[self.rows[name]]
            if pattern not in known:
                holders = self.holders(rank, pattern)
                known[pattern] = (holders.index(rank), len(holders)) if holders else (-1, 0)
            found.append(known[pattern])
        return found

    def holders(self, rank: int, pattern: _Pattern) -> list[int]:
        """Return the ranks that hold the same part of tensors with this pattern as a rank, in order."""
        own = self.members[rank]
        mine = next((_part(own, way) for way in pattern if way.digest == own.digest), None)
        if mine is None:
            return []
        pairs = [(way, other) for way in pattern for other in self._ranks[way.digest]]
        return sorted(other for way, other in pairs if _part(self.members[other], way) == mine)

    @cached_property
    def _ranks(self) -> dict[bytes, list[int]]:
        return _by_digest(self.members)

    def where(self, row: int, rank: int) -> str:
        """Return a rank's position in the mesh of a row: ``rank 5, dp_shard 1 of 4, tp 0 of 2``."""
        member = self.members[rank]
        sharding = self.shardings[member.digest]
        way = next((way for way in self.patterns[row] if way.digest == member.digest), None)
        coordinate = None if way is None or way.mesh < 0 else member.coordinates[way.mesh]
        if way is None or coordinate is None:
            return f"rank {rank}"
        mesh = sharding.meshes[way.mesh]
        parts = [f"{mesh.names[i]} {coordinate[i]} of {mesh.shape[i]}" for i in way.sharded]
        return ", ".join([f"rank {rank}", *parts])


def make_global_plan(members: Sequence[Member], shardings: Mapping[bytes, Sharding]) -> GlobalPlan:
    """Return the plan that follows from one member for each rank, and their shardings by digest.

    Raises:
        DisagreementError: if tensors of the same name are not parts of one tensor, or if a part is missing on
            all ranks.
    """
    ranks = _by_digest(members)
    ordered = {digest: shardings[digest] for digest in ranks}
    names = _in_order([sharding.names for sharding in ordered.values()])
    held: dict[str, list[tuple[ShardSpec, _Way, _Cut]]] = {name: [] for name in names}
    for digest, sharding in ordered.items():
        known: dict[tuple[int, tuple[str, ...]], tuple[_Way, _Cut]] = {}
        for name, spec in zip(sharding.names, sharding.specs, strict=True):
            kind = (spec.mesh, spec.placements)
            if kind not in known:
                known[kind] = _Way(digest, spec.mesh, spec.sharded), _cut(sharding, spec)
            held[name].append((spec, *known[kind]))
    kept: dict[_Pattern, _Pattern] = {}
    patterns = []
    for name, each in held.items():
        spec, way, cut = each[0]
        for theirs, other, others_cut in each[1:]:
            if (theirs.shape, theirs.dtype, others_cut) != (spec.shape, spec.dtype, cut):
                both = [
                    f"{_described(ordered[digest], what)} on rank {ranks[digest][0]}"
                    for what, (digest, _, _) in ((spec, way), (theirs, other))
                ]
                msg = f"{name!r} is {both[0]}, but {both[1]}; make them the same, "
                raise DisagreementError(msg + "or pass shards= if they are parts of one tensor")
        pattern = tuple([way for _, way, _ in each])
        if pattern not in kept:
            kept[pattern] = pattern
            _check_cover(name, members, ranks, pattern, math.prod([size for _, size in cut]))
        patterns.append(kept[pattern])
    specs = tuple([each[0][0] for each in held.values()])
    return GlobalPlan(names, specs, tuple(patterns), tuple(members), ordered)


def _by_digest(members: Sequence[Member]) -> dict[bytes, list[int]]:
    """Return the ranks of each sharding, by its digest."""
    ranks: dict[bytes, list[int]] = {}
    for rank, member in enumerate(members):
        ranks.setdefault(member.digest, []).append(rank)
    return ranks


def _cut(sharding: Sharding, spec: ShardSpec) -> _Cut:
    return [(spec.placements[i], sharding.meshes[spec.mesh].shape[i]) for i in spec.sharded]


def _described(sharding: Sharding, spec: ShardSpec) -> str:
    """Return a string such as ``(64, 128) float32, S(0) over dp_shard of 8``."""
    mesh = sharding.meshes[spec.mesh] if spec.mesh >= 0 else None
    cuts = [f"{spec.placements[i]} over {mesh.names[i]} of {mesh.shape[i]}" for i in spec.sharded if mesh]
    return ", ".join([str(spec._replace(mesh=-1)), *(cuts or ["whole"])])


def _part(member: Member, way: _Way) -> tuple[int, ...] | None:
    """Return which part a rank holds; None if the rank is outside the mesh."""
    if way.mesh < 0:
        return ()
    coordinate = member.coordinates[way.mesh]
    return None if coordinate is None else tuple([coordinate[i] for i in way.sharded])


def _check_cover(
    name: str, members: Sequence[Member], ranks: Mapping[bytes, Sequence[int]], pattern: _Pattern, parts: int
) -> None:
    """Raise an error if one of the parts of a tensor is missing on all ranks."""
    held = {_part(members[rank], way) for way in pattern for rank in ranks[way.digest]} - {None}
    if len(held) == parts:
        return
    having = {way.digest for way in pattern}
    without = [rank for rank, member in enumerate(members) if member.digest not in having]
    msg = f"{name!r} is sharded into {parts} parts, but the ranks hold only {len(held)} of them"
    if without:
        some = ", ".join(map(str, without[:8])) + (" ..." if len(without) > 8 else "")
        msg += f" (none on rank{'s' * (len(without) > 1)} {some})"
    raise DisagreementError(msg + "; every rank of its mesh must be in the group and have this tensor")


def _in_order(lists: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return all names once, in an order as close as possible to the model's.

    The order within each list is kept unless the lists contradict one another. Pipeline stages may be
    interleaved: names with the same prefix before their first number are ordered by that number.

    >>> _in_order([("emb", "layers.0.w", "layers.2.w"), ("layers.1.w", "layers.3.w", "head")])
    ('emb', 'layers.0.w', 'layers.1.w', 'layers.2.w', 'layers.3.w', 'head')
    """
    names = dict.fromkeys([name for part in lists for name in part])
    for part in lists:
        if len(part) == len(names):
            return part
    stems: dict[str, int] = {}
    keys: dict[str, tuple[int, int, int]] = {}
    for place, name in enumerate(names):
        match = re.search(r"(?:^|\.)(\d+)(?=\.|$)", name)
        stem = name if match is None else name[: match.start(1)]
        keys[name] = stems.setdefault(stem, len(stems)), int(match[1]) if match else 0, place
    by_number = sorted(names, key=keys.__getitem__)
    edges = {edge for part in lists for edge in pairwise(part)}
    numbered = {(a, b) for a, b in pairwise(by_number) if keys[a][0] == keys[b][0]}
    # parts may contradict one another, and the numbers may contradict the parts
    for known in (edges | numbered, edges):
        ordered = _sorted_by(known, keys)
        if len(ordered) == len(names):
            return tuple(ordered)
    return tuple(by_number)


def _sorted_by(edges: set[tuple[str, str]], keys: Mapping[str, tuple[int, int, int]]) -> list[str]:
    """Sort the names topologically by the edges, then by keys; return fewer if the edges have a cycle."""
    after: dict[str, list[str]] = {name: [] for name in keys}
    waiting = dict.fromkeys(keys, 0)
    for a, b in edges:
        after[a].append(b)
        waiting[b] += 1
    ready = [(keys[name], name) for name, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, name = heapq.heappop(ready)
        ordered.append(name)
        for other in after[name]:
            waiting[other] -= 1
            if waiting[other] == 0:
                heapq.heappush(ready, (keys[other], other))
    return ordered
