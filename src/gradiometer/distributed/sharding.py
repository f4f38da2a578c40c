"""What a rank holds of each tensor: all of it, or the shard of a DTensor. Plain values, no tensors."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from gradiometer.inputs import is_dtensor, is_whole

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["UNKNOWN", "Mesh", "ShardSpec", "Sharding", "plain_sharding", "sharding_of"]


class Mesh(NamedTuple):
    """A mesh of ranks: its dimensions, and where this rank stands in it; None: outside."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None


class ShardSpec(NamedTuple):
    """What ranks hold of one tensor.

    ``shape``: of the whole tensor; None: not known. ``mesh``: its place among `Sharding.meshes`; -1 for a
    plain tensor. ``placements``: for each dimension of the mesh ``"R"``, or how the tensor is cut.
    """

    shape: tuple[int, ...] | None
    dtype: str
    mesh: int = -1
    placements: tuple[str, ...] = ()

    @property
    def sharded(self) -> tuple[int, ...]:
        """The dimensions of the mesh over which it is cut."""
        return tuple(i for i, placement in enumerate(self.placements) if placement != "R")

    @property
    def numel(self) -> int | None:
        """Elements of the whole tensor, as they are counted: two of a complex number."""
        if self.shape is None:
            return None
        return torch.Size(self.shape).numel() * (2 if self.dtype.startswith("complex") else 1)

    def __str__(self) -> str:
        """Return such as ``(64, 128) float32, S(0) R``."""
        shape = "" if self.shape is None else f"{self.shape} "
        return f"{shape}{self.dtype}" + (f", {' '.join(self.placements)}" if self.mesh >= 0 else "")


@dataclass(frozen=True, eq=False)
class Sharding:
    """What one rank holds of its tensors, in the order of its model. Equal by value.

    Attributes:
        names: of the tensors, L.
        specs: L.
        meshes: the meshes that specs speak of.
    """

    names: tuple[str, ...]
    specs: tuple[ShardSpec, ...]
    meshes: tuple[Mesh, ...] = ()

    @cached_property
    def digest(self) -> bytes:
        """A hash, the same on ranks whose shardings differ in their coordinates alone."""
        meshes = [(mesh.names, mesh.shape, mesh.coordinate is None) for mesh in self.meshes]
        return hashlib.sha256(repr((self.names, self.specs, meshes)).encode()).digest()

    def to_plain(self) -> tuple[Any, ...]:
        """Return tuples of plain values, equal for equal shardings, which `from_plain` reads."""
        return (
            self.names,
            tuple([tuple(spec) for spec in self.specs]),
            tuple([tuple(mesh) for mesh in self.meshes]),
        )

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> Sharding:
        """Return the sharding of what `to_plain` returned, also after it was JSON."""
        names, specs, meshes = plain
        return cls(
            tuple(names),
            tuple([ShardSpec(None if s is None else tuple(s), d, m, tuple(p)) for s, d, m, p in specs]),
            tuple([Mesh(tuple(n), tuple(s), None if c is None else tuple(c)) for n, s, c in meshes]),
        )

    @property
    def coordinates(self) -> tuple[tuple[int, ...] | None, ...]:
        """Where this rank stands in each mesh."""
        return tuple(mesh.coordinate for mesh in self.meshes)

    @property
    def is_sharded(self) -> bool:
        """Whether any tensor is cut."""
        return any(spec.sharded for spec in self.specs)

    def __eq__(self, other: object) -> bool:
        """Compare by value."""
        if self is other:
            return True
        if not isinstance(other, Sharding):
            return NotImplemented
        return self.digest == other.digest and self.coordinates == other.coordinates

    def __hash__(self) -> int:
        """Hash by value."""
        return hash((self.digest, self.coordinates))


# of DTensors in a compiled function: that they are cut is all that is known
UNKNOWN: Final = Sharding((), (ShardSpec(None, "", -1, ("?",)),))


def plain_sharding(names: tuple[str, ...]) -> Sharding:
    """Return the sharding of plain tensors of which nothing but the names is known."""
    return Sharding(names, (ShardSpec(None, ""),) * len(names))


def sharding_of(names: tuple[str, ...], tensors: Sequence[Any]) -> Sharding:
    """Return the sharding of tensors, plain ones and DTensors."""
    meshes: dict[Any, int] = {}
    specs = []
    for tensor in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if is_dtensor(type(tensor)):
            mesh = meshes.setdefault(tensor.device_mesh, len(meshes))
            cuts = tuple(["R" if is_whole(placement) else str(placement) for placement in tensor.placements])
            specs.append(ShardSpec(tuple(tensor.shape), dtype, mesh, cuts))
        else:
            specs.append(ShardSpec(tuple(tensor.shape), dtype))
    return Sharding(names, tuple(specs), tuple([_mesh(mesh) for mesh in meshes]))


def _mesh(mesh: Any) -> Mesh:
    shape = tuple(mesh.shape)
    names = mesh.mesh_dim_names or tuple([f"dim {i}" for i in range(len(shape))])
    coordinate = mesh.get_coordinate()
    return Mesh(tuple(names), shape, None if coordinate is None else tuple(coordinate))
