"""What a rank holds of each tensor: all of it, or the shard of a DTensor. Plain values, no tensors."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "UNKNOWN",
    "Holding",
    "Layout",
    "Mesh",
    "Place",
    "is_dtensor",
    "is_partial",
    "layout_of",
    "local_shard",
    "placed_like",
    "places",
    "plain_layout",
]


class Place(NamedTuple):
    """How a gradient is placed in a dimension of its mesh, and how it has to be measured; None: whole."""

    now: Any
    then: Any

    @property
    def is_settled(self) -> bool:
        """Whether it is so already."""
        return bool(self.now.is_replicate() if self.then is None else self.now == self.then)


class Mesh(NamedTuple):
    """A mesh of ranks: its dimensions, and where this rank stands in it; None: outside."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None


class Holding(NamedTuple):
    """What ranks hold of one tensor.

    ``shape``: of the whole tensor; None: not known. ``mesh``: its place among `Layout.meshes`; -1 for a
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
class Layout:
    """What one rank holds of its tensors, in the order of its model. Equal by value.

    Attributes:
        names: of the tensors, L.
        holdings: L.
        meshes: the meshes that holdings speak of.
    """

    names: tuple[str, ...]
    holdings: tuple[Holding, ...]
    meshes: tuple[Mesh, ...] = ()

    @cached_property
    def digest(self) -> bytes:
        """A hash, the same on ranks whose layouts differ in their coordinates alone."""
        meshes = [(mesh.names, mesh.shape, mesh.coordinate is None) for mesh in self.meshes]
        return hashlib.sha256(repr((self.names, self.holdings, meshes)).encode()).digest()

    def to_plain(self) -> tuple[Any, ...]:
        """Return tuples of plain values, equal for equal layouts, which `from_plain` reads."""
        return (
            self.names,
            tuple([tuple(holding) for holding in self.holdings]),
            tuple([tuple(mesh) for mesh in self.meshes]),
        )

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> Layout:
        """Return the layout of what `to_plain` returned, also after it was JSON."""
        names, holdings, meshes = plain
        return cls(
            tuple(names),
            tuple([Holding(None if s is None else tuple(s), d, m, tuple(p)) for s, d, m, p in holdings]),
            tuple([Mesh(tuple(n), tuple(s), None if c is None else tuple(c)) for n, s, c in meshes]),
        )

    @property
    def coordinates(self) -> tuple[tuple[int, ...] | None, ...]:
        """Where this rank stands in each mesh."""
        return tuple(mesh.coordinate for mesh in self.meshes)

    @property
    def is_sharded(self) -> bool:
        """Whether any tensor is cut."""
        return any(holding.sharded for holding in self.holdings)

    def __eq__(self, other: object) -> bool:
        """Compare by value."""
        if self is other:
            return True
        if not isinstance(other, Layout):
            return NotImplemented
        return self.digest == other.digest and self.coordinates == other.coordinates

    def __hash__(self) -> int:
        """Hash by value."""
        return hash((self.digest, self.coordinates))


# of DTensors in a compiled function: that they are cut is all that is known
UNKNOWN: Final = Layout((), (Holding(None, "", -1, ("?",)),))


def is_dtensor(kind: type) -> bool:
    """Tell whether this is DTensor, which is not imported for that."""
    return kind.__name__ == "DTensor"


def is_partial(tensor: Any) -> bool:
    """Tell whether the values of a DTensor are summands that ranks have not added up yet."""
    return any([placement.is_partial() for placement in tensor.placements])


def local_shard(tensor: Any) -> Tensor:
    """Return what this rank holds of a DTensor, sharing its memory."""
    with torch.no_grad():
        local: Any = tensor.to_local()
    # still on its way from another rank
    return local.wait() if type(local).__name__ == "AsyncCollectiveTensor" else local  # type: ignore[no-any-return]


def places(name: str, grad: Any, parameter: Any, what: str) -> tuple[Any, list[Place]]:
    """Return a gradient, and for each dimension of its mesh how it is placed and how it has to be measured.

    It is measured as layouts say its parameter is: whole where that is replicated, plain or summands. A plain
    gradient of a DTensor is whole on each rank. No places: it is measured as it is.

    Raises:
        TypeError: where the gradient and its parameter are on different meshes.
    """
    if not is_dtensor(type(parameter)):
        return grad, [Place(now, None) for now in grad.placements] if is_dtensor(type(grad)) else []
    if not is_dtensor(type(grad)):
        # replicated, if nothing is said
        grad = type(parameter).from_local(grad.detach(), parameter.device_mesh)
    elif grad.device_mesh != parameter.device_mesh:
        msg = (
            f"{what}: the gradient of {name!r} is on the mesh {grad.device_mesh}, and its parameter on "
            f"{parameter.device_mesh}: put both on one mesh"
        )
        raise TypeError(msg)
    pairs = zip(grad.placements, parameter.placements, strict=True)
    return grad, [Place(now, None if _is_whole(then) else then) for now, then in pairs]


def placed_like(name: str, grad: Any, parameter: Any, what: str) -> Tensor:
    """Return a gradient as it has to be measured, without any other rank. What is partial stays so.

    Raises:
        TypeError: where that takes other ranks; as `places`.
    """
    grad, found = places(name, grad, parameter, what)
    if all([place.is_settled for place in found]) or is_partial(grad):
        return grad  # type: ignore[no-any-return]
    if all([place.is_settled or place.now.is_replicate() for place in found]):
        with torch.no_grad():
            return grad.redistribute(placements=[place.then or place.now for place in found])  # type: ignore[no-any-return]
    theirs = f"has placements {parameter.placements}" if is_dtensor(type(parameter)) else "is a plain tensor"
    msg = (
        f"{what}: the gradient of {name!r} has placements {grad.placements}, and its parameter {theirs}: "
        "pass reduce=gm.Ranks(model)"
    )
    raise TypeError(msg)


def plain_layout(names: tuple[str, ...]) -> Layout:
    """Return the layout of plain tensors of which nothing but the names is known."""
    return Layout(names, (Holding(None, ""),) * len(names))


def layout_of(names: tuple[str, ...], tensors: Sequence[Any]) -> Layout:
    """Return the layout of tensors, plain ones and DTensors."""
    meshes: dict[Any, int] = {}
    holdings = []
    for tensor in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if is_dtensor(type(tensor)):
            mesh = meshes.setdefault(tensor.device_mesh, len(meshes))
            cuts = tuple(["R" if _is_whole(placement) else str(placement) for placement in tensor.placements])
            holdings.append(Holding(tuple(tensor.shape), dtype, mesh, cuts))
        else:
            holdings.append(Holding(tuple(tensor.shape), dtype))
    return Layout(names, tuple(holdings), tuple([_mesh(mesh) for mesh in meshes]))


def _is_whole(placement: Any) -> bool:
    # what is partial is added up before it is measured
    return bool(placement.is_replicate() or placement.is_partial())


def _mesh(mesh: Any) -> Mesh:
    shape = tuple(mesh.shape)
    names = mesh.mesh_dim_names or tuple([f"dim {i}" for i in range(len(shape))])
    coordinate = mesh.get_coordinate()
    return Mesh(tuple(names), shape, None if coordinate is None else tuple(coordinate))
