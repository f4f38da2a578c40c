"""Inspect DTensors by their public attributes, and return the shards that this rank holds."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradiometer.inputs.named import Named


def is_dtensor(kind: type) -> bool:
    """Return whether a type is DTensor, without importing it."""
    return kind.__name__ == "DTensor"


def is_partial(tensor: Any) -> bool:
    """Return whether a DTensor is partial: its values are not yet reduced over the ranks."""
    return any([placement.is_partial() for placement in tensor.placements])


def local_shard(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor, sharing its memory."""
    with torch.no_grad():
        local: Any = tensor.to_local()
    # the data may still be in transit from another rank
    return local.wait() if type(local).__name__ == "AsyncCollectiveTensor" else local  # type: ignore[no-any-return]


def placed_like(name: str, grad: Any, parameter: Any, what: str) -> Tensor:
    """Return a gradient in the placements to measure, without communication. A partial one stays partial."""
    grad, found = places(name, grad, parameter, what)
    if all([place.is_settled for place in found]) or is_partial(grad):
        return grad  # type: ignore[no-any-return]
    if all([place.is_settled or place.now.is_replicate() for place in found]):
        with torch.no_grad():
            return grad.redistribute(placements=[place.then or place.now for place in found])  # type: ignore[no-any-return]
    theirs = f"has placements {parameter.placements}" if is_dtensor(type(parameter)) else "is a plain tensor"
    msg = f"{what}: the gradient of {name!r} has placements {grad.placements}, but its parameter {theirs}, "
    raise TypeError(msg + "and redistributing it needs the other ranks; pass reduce=gm.Ranks(model)")


def local_shards(named: Named, what: str) -> Named:
    """Replace DTensors by this rank's shards; refuse partial ones, and keep other tensors as they are."""
    if not any([is_dtensor(kind) for kind in set(map(type, named.tensors))]):
        return named
    for name, tensor in zip(*named, strict=True):
        if is_dtensor(type(tensor)) and is_partial(tensor):
            raise TypeError(
                f"{what}: {name!r} is a DTensor with placements {tensor.placements}, so its values are not "  # type: ignore[attr-defined]
                "yet reduced over the ranks; redistribute it first, or for gradients pass "
                "reduce=gm.Ranks(model) to collect_grads"
            )
    return Named(named.names, [local_shard(x) if is_dtensor(type(x)) else x for x in named.tensors])


class Place(NamedTuple):
    """The current placement of a gradient in a mesh dimension, and the one to measure; None: whole."""

    now: Any
    then: Any

    @property
    def is_settled(self) -> bool:
        """Whether the gradient already has the placement to measure."""
        return bool(self.now.is_replicate() if self.then is None else self.now == self.then)


def places(name: str, grad: Any, parameter: Any, what: str) -> tuple[Any, list[Place]]:
    """Return a gradient, and its current and required placement in each dimension of its mesh.

    A gradient is measured in the placements of its parameter: whole where the parameter is replicated, plain
    or partial. A plain gradient of a DTensor parameter is whole on each rank. If the list is empty, the
    gradient is measured as it is.
    """
    if not is_dtensor(type(parameter)):
        return grad, [Place(now, None) for now in grad.placements] if is_dtensor(type(grad)) else []
    if not is_dtensor(type(grad)):
        # from_local replicates by default
        grad = type(parameter).from_local(grad.detach(), parameter.device_mesh)
    elif grad.device_mesh != parameter.device_mesh:
        msg = f"{what}: the gradient of {name!r} is on the mesh {grad.device_mesh}, but its parameter is "
        raise TypeError(msg + f"on {parameter.device_mesh}; put both on one mesh")
    pairs = zip(grad.placements, parameter.placements, strict=True)
    return grad, [Place(now, None if is_whole(then) else then) for now, then in pairs]


def reduction_of(placement: Any) -> str | None:
    """Return the reduction that combines the parts of a partial tensor: "sum", "avg", ...

    None for other placements, and for subclasses of ``Partial``, which combine parts in their own way.
    """
    # Dynamo of torch 2.14.1 cannot trace str(placement)
    return placement.reduce_op if type(placement).__name__ == "Partial" else None


def is_whole(placement: Any) -> bool:
    """Return whether every rank in this mesh dimension measures the whole tensor."""
    # a partial tensor is added up before it is measured
    return bool(placement.is_replicate() or placement.is_partial())
