"""The part of each tensor that a rank holds: all of it, or a shard, as plain values without tensors."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from gradiometer.distributed import process_groups
from gradiometer.distributed.parts import UnknownPartError, part_of_dtensor
from gradiometer.inputs import is_dtensor, is_whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gradiometer.inputs import Part


class Mesh(NamedTuple):
    """A mesh of ranks: its dimensions, and this rank's coordinate; None: outside."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None


class ShardSpec(NamedTuple):
    """How ranks hold one tensor.

    ``shape``: the shape of the whole tensor; None: not known. ``mesh``: its index in `Sharding.meshes`; -1
    for a plain tensor. ``placements``: for each dimension of the mesh ``"R"``, or how the tensor is sharded.
    """

    shape: tuple[int, ...] | None
    dtype: str
    mesh: int = -1
    placements: tuple[str, ...] = ()

    @property
    def sharded(self) -> tuple[int, ...]:
        """The mesh dimensions over which it is sharded."""
        return tuple(i for i, placement in enumerate(self.placements) if placement != "R")

    @property
    def numel(self) -> int | None:
        """The number of elements of the whole tensor; a complex number counts as two."""
        if self.shape is None:
            return None
        return torch.Size(self.shape).numel() * (2 if self.dtype.startswith("complex") else 1)

    def __str__(self) -> str:
        """Return a string such as ``(64, 128) float32, S(0) R``."""
        shape = "" if self.shape is None else f"{self.shape} "
        return f"{shape}{self.dtype}" + (f", {' '.join(self.placements)}" if self.mesh >= 0 else "")


@dataclass(frozen=True, eq=False)
class Sharding:
    """The part of its L tensors that one rank holds, in the order of its model. Equal by value."""

    names: tuple[str, ...]
    specs: tuple[ShardSpec, ...]
    meshes: tuple[Mesh, ...] = ()
    # this rank's part of tensors that are not whole here, if it is known; other ranks have other parts
    parts: Mapping[str, Part | None] = field(default_factory=dict)
    # names of parts of which it is not known where in the whole tensor they are
    unplaced: frozenset[str] = frozenset()

    @cached_property
    def digest(self) -> bytes:
        """A hash that is the same on ranks whose shardings differ only in coordinates inside their meshes."""
        meshes = [(mesh.names, mesh.shape, mesh.coordinate is None) for mesh in self.meshes]
        return hashlib.sha256(repr((self.names, self.specs, meshes)).encode()).digest()

    def to_plain(self) -> tuple[Any, ...]:
        """Return tuples of plain values for `from_plain`, equal for equal shardings."""
        return self.names, tuple(map(tuple, self.specs)), tuple(map(tuple, self.meshes))

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> Sharding:
        """Return the sharding from the result of `to_plain`, also after a round trip through JSON."""
        names, specs, meshes = plain
        return cls(
            tuple(names),
            tuple([ShardSpec(None if s is None else tuple(s), d, m, tuple(p)) for s, d, m, p in specs]),
            tuple([Mesh(tuple(n), tuple(s), None if c is None else tuple(c)) for n, s, c in meshes]),
        )

    @property
    def coordinates(self) -> tuple[tuple[int, ...] | None, ...]:
        """This rank's coordinate in each mesh."""
        return tuple(mesh.coordinate for mesh in self.meshes)

    @property
    def is_sharded(self) -> bool:
        """Whether any tensor is sharded."""
        return any(spec.sharded for spec in self.specs)

    def __eq__(self, other: object) -> bool:
        """Compare by value."""
        if not isinstance(other, Sharding):
            return NotImplemented
        return self is other or (self.digest, self.coordinates) == (other.digest, other.coordinates)

    def __hash__(self) -> int:
        """Hash by value."""
        return hash((self.digest, self.coordinates))


# DTensors in a compiled function: we only know that they are sharded
UNKNOWN: Final = Sharding((), (ShardSpec(None, "", -1, ("?",)),))


def plain_sharding(names: tuple[str, ...]) -> Sharding:
    """Return the sharding of plain tensors of which only the names are known."""
    return Sharding(names, (ShardSpec(None, ""),) * len(names))


def sharding_of(names: tuple[str, ...], tensors: Sequence[Any]) -> Sharding:
    """Return the sharding of tensors, plain ones and DTensors."""
    meshes: dict[Any, int] = {}
    specs = []
    parts = {}
    for name, tensor in zip(names, tensors, strict=True):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if is_dtensor(type(tensor)):
            mesh = meshes.setdefault(tensor.device_mesh, len(meshes))
            cuts = tuple(["R" if is_whole(placement) else str(placement) for placement in tensor.placements])
            specs.append(ShardSpec(tuple(tensor.shape), dtype, mesh, cuts))
            # now, because Dynamo cannot read all placements
            with suppress(UnknownPartError):
                parts[name] = part_of_dtensor(name, tensor, "Ranks")
        else:
            specs.append(ShardSpec(tuple(tensor.shape), dtype))
    return Sharding(names, tuple(specs), tuple([_mesh(mesh) for mesh in meshes]), parts)


def _mesh(mesh: Any) -> Mesh:
    shape = tuple(mesh.shape)
    names = mesh.mesh_dim_names or tuple([f"dim {i}" for i in range(len(shape))])
    coordinate = mesh.get_coordinate()
    return Mesh(tuple(names), shape, None if coordinate is None else tuple(coordinate))


def part_of(name: str, tensor: Tensor, what: str, sharding: Sharding | None = None) -> Part | None:
    """Return the part of a tensor that this rank holds; None for one that is whole here.

    ``what``: names the caller in error messages. ``sharding``: that of `Ranks`, if tensors are to be merged:
    it may know plain tensors to be parts.

    Raises:
        UnknownPartError: if it is not known which elements this rank holds.
    """
    if sharding is not None:
        if name in sharding.unplaced:
            msg = f"{what}: {name!r} is a part of a larger tensor, as with gm.Ranks(shards=...), and it is "
            msg += "not known which elements these are; pass a DTensor, or leave it out"
            raise UnknownPartError(msg)
        if name in sharding.parts:
            return sharding.parts[name]
    return part_of_dtensor(name, tensor, what)


# the `shards` argument of `Ranks`: from patterns of names to the ranks that hold parts of these tensors


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
    unplaced = set(sharding.unplaced)
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
            unplaced.add(name)
    return replace(sharding, specs=tuple(specs), meshes=tuple(meshes), unplaced=frozenset(unplaced))
