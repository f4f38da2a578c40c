"""What the ranks agree on at set-up: one order of all names, and who counts what.

Ranks that hold the same part of a tensor hold copies of it, and the first of them counts it; ranks that
hold different parts each count their own. This covers replicated and sharded dimensions of a mesh,
meshes of which there are several, tensors that only the ranks of one pipeline stage have, and plain
tensors of which every rank has a copy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradiometer.layout import Holding, Layout

__all__ = ["Agreement", "DisagreementError", "Member", "agree"]


class DisagreementError(ValueError):
    """The first thing in which ranks differ."""


class Member(NamedTuple):
    """What a rank tells of itself: which layout it has, and where it stands in the layout's meshes."""

    digest: bytes
    coordinates: tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True)
class Agreement:
    """The rows of all ranks together.

    Attributes:
        names: of T rows, the same on every rank.
        holdings: of each row.
        members: what each rank told.
        layouts: by digest.
    """

    names: tuple[str, ...]
    holdings: tuple[Holding, ...]
    members: tuple[Member, ...]
    layouts: Mapping[bytes, Layout]

    def counts(self, rank: int) -> list[bool]:
        """Return which rows of its own layout a rank counts: those of which no earlier rank has a copy."""
        mine = self.members[rank]
        found: list[bool] = []
        firsts: dict[tuple[object, ...], bool] = {}
        index = {digest: _index(layout) for digest, layout in self.layouts.items()}
        for name in self.layouts[mine.digest].names:
            # rows of which the same ranks hold the same parts are decided once
            pattern = tuple(
                (digest, layout.holdings[place].mesh, layout.holdings[place].sharded)
                for digest, layout in self.layouts.items()
                if (place := index[digest].get(name)) is not None
            )
            if pattern not in firsts:
                firsts[pattern] = self._is_first(rank, pattern)
            found.append(firsts[pattern])
        return found

    def _is_first(self, rank: int, pattern: Sequence[tuple[bytes, int, tuple[int, ...]]]) -> bool:
        how = {digest: (mesh, sharded) for digest, mesh, sharded in pattern}
        mine = _part(self.members[rank], *how[self.members[rank].digest])
        if mine is None:
            return False
        return not any(
            member.digest in how and _part(member, *how[member.digest]) == mine
            for member in self.members[:rank]
        )

    def where(self, row: int, rank: int) -> str:
        """Return where a rank stands in the mesh of a row: ``rank 5, dp_shard 1 of 4, tp 0 of 2``."""
        member = self.members[rank]
        layout = self.layouts[member.digest]
        place = _index(layout).get(self.names[row])
        if place is None:
            return f"rank {rank}"
        holding = layout.holdings[place]
        coordinate = None if holding.mesh < 0 else member.coordinates[holding.mesh]
        if coordinate is None:
            return f"rank {rank}"
        mesh = layout.meshes[holding.mesh]
        parts = [f"{mesh.names[i]} {coordinate[i]} of {mesh.shape[i]}" for i in holding.sharded]
        return ", ".join([f"rank {rank}", *parts])


def agree(members: Sequence[Member], layouts: Mapping[bytes, Layout]) -> Agreement:
    """Return what follows from what all ranks have told.

    Args:
        members: one a rank.
        layouts: each that a member has, by its digest.

    Raises:
        DisagreementError: where ranks have tensors of one name that are not parts of one tensor.
    """
    first: dict[bytes, int] = {}
    for rank, member in enumerate(members):
        first.setdefault(member.digest, rank)
    ordered = {digest: layouts[digest] for digest in first}
    names = _in_order([layout.names for layout in ordered.values()])
    index = {digest: _index(layout) for digest, layout in ordered.items()}
    holdings = []
    covered: set[object] = set()
    for name in names:
        held = [(d, layout.holdings[index[d][name]]) for d, layout in ordered.items() if name in index[d]]
        digest, holding = held[0]
        cut = _cut(ordered[digest], holding)
        for other, theirs in held[1:]:
            if (theirs.shape, theirs.dtype, _cut(ordered[other], theirs)) != (
                holding.shape,
                holding.dtype,
                cut,
            ):
                msg = f"{name!r} is {holding} on rank {first[digest]}, and {theirs} on rank {first[other]}"
                raise DisagreementError(msg)
        pattern = tuple((d, h.mesh, h.sharded) for d, h in held)
        if cut and pattern not in covered:
            _check_cover(name, members, pattern, [size for _, size in cut])
            covered.add(pattern)
        holdings.append(holding)
    return Agreement(names, tuple(holdings), tuple(members), ordered)


def _index(layout: Layout) -> dict[str, int]:
    return {name: place for place, name in enumerate(layout.names)}


def _cut(layout: Layout, holding: Holding) -> list[tuple[str, int]]:
    """Return how a tensor is cut: for each sharded dimension the placement and into how many parts."""
    return [(holding.placements[i], layout.meshes[holding.mesh].shape[i]) for i in holding.sharded]


def _part(member: Member, mesh: int, sharded: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return which part a rank holds; None: none, as it is outside of the mesh."""
    if mesh < 0:
        return ()
    coordinate = member.coordinates[mesh]
    return None if coordinate is None else tuple([coordinate[i] for i in sharded])


def _check_cover(
    name: str,
    members: Sequence[Member],
    pattern: Sequence[tuple[bytes, int, tuple[int, ...]]],
    sizes: Sequence[int],
) -> None:
    """Refuse a tensor of which some part is on no rank."""
    how = {digest: (mesh, sharded) for digest, mesh, sharded in pattern}
    held = {_part(member, *how[member.digest]) for member in members if member.digest in how} - {None}
    parts = 1
    for size in sizes:
        parts *= size
    if len(held) == parts:
        return
    without = [rank for rank, member in enumerate(members) if member.digest not in how]
    msg = f"{name!r} is cut into {parts} parts, and ranks hold {len(held)} of them"
    if without:
        some = ", ".join(map(str, without[:8])) + (" ..." if len(without) > 8 else "")
        msg += f"; without any: rank {some}"
    raise DisagreementError(msg)


def _in_order(lists: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return all names once, as near to a model's order as several parts of it tell.

    Pipeline stages may be dealt out in turns: what differs in its first number alone goes by that number.

    >>> _in_order([("emb", "layers.0.w", "layers.2.w"), ("layers.1.w", "layers.3.w", "head")])
    ('emb', 'layers.0.w', 'layers.1.w', 'layers.2.w', 'layers.3.w', 'head')
    """
    names = dict.fromkeys([name for part in lists for name in part])
    if any(len(part) == len(names) for part in lists):
        return max(lists, key=len)
    stems: dict[str, int] = {}
    keys: dict[str, tuple[int, int]] = {}
    for name in names:
        match = re.search(r"(?:^|\.)(\d+)(?=\.|$)", name)
        stem = name if match is None else name[: match.start(1)]
        keys[name] = stems.setdefault(stem, len(stems)), int(match[1]) if match else 0
    return tuple(sorted(names, key=keys.__getitem__))
