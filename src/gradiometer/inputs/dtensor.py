"""DTensors, by their public attributes: what they are and what this rank holds of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradiometer.inputs.named import Named

__all__ = [
    "Place",
    "is_dtensor",
    "is_partial",
    "is_whole",
    "local_shard",
    "local_shards",
    "placed_like",
    "places",
]


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


def local_shards(named: Named, what: str) -> Named:
    """Return what this rank holds of DTensors; other tensors as they are.

    Raises:
        TypeError: for a DTensor whose values are summands still.
    """
    if not any([is_dtensor(kind) for kind in {type(tensor) for tensor in named.tensors}]):
        return named
    shards = []
    for name, tensor in zip(named.names, named.tensors, strict=True):
        if not is_dtensor(type(tensor)):
            shards.append(tensor)
            continue
        if is_partial(tensor):
            msg = (
                f"{what}: {name!r} is a DTensor with placements {tensor.placements}: its values are summands "  # type: ignore[attr-defined]
                "that the ranks have not added up; redistribute it first, or, of gradients, pass "
                "reduce=gm.Ranks(model) to collect_grads"
            )
            raise TypeError(msg)
        shards.append(local_shard(tensor))
    return Named(named.names, shards)


class Place(NamedTuple):
    """How a gradient is placed in a dimension of its mesh, and how it has to be measured; None: whole."""

    now: Any
    then: Any

    @property
    def is_settled(self) -> bool:
        """Whether it is so already."""
        return bool(self.now.is_replicate() if self.then is None else self.now == self.then)


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
    return grad, [Place(now, None if is_whole(then) else then) for now, then in pairs]


def is_whole(placement: Any) -> bool:
    """Tell whether every rank of this dimension of a mesh holds all of the tensor."""
    # what is partial is added up before it is measured
    return bool(placement.is_replicate() or placement.is_partial())
