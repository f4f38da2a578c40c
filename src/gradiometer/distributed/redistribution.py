"""Place DTensor gradients like their parameters, with partial ones added up over their mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gradiometer.distributed import collectives
from gradiometer.inputs import is_dtensor, local_shard, places, reduction_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gradiometer.inputs import Named, Place


def redistribute(grads: Named, parameters: Sequence[Tensor], timeout: float, what: str) -> list[Tensor]:
    """Return this rank's shard of each gradient, placed like its parameter.

    Partial gradients, such as those of a normalization under sequence parallelism or of a partial parameter,
    are added up: those of one dtype over the same mesh dimensions together, in one collective per dimension.
    Other gradients that are not placed like their parameters are redistributed one by one. The gradient
    itself is not changed. All ranks of its mesh have to call this.
    """
    if not any([is_dtensor(kind) for kind in {type(x) for x in (*grads.tensors, *parameters)}]):
        return list(grads.tensors)
    shards: list[Tensor] = []
    summands: dict[Any, list[int]] = {}
    for name, grad, parameter in zip(*grads, parameters, strict=True):
        like, dimensions = _summed(*places(name, grad, parameter, what))
        if dimensions:
            key = (like.device_mesh, dimensions, like.dtype)  # type: ignore[attr-defined]
            summands.setdefault(key, []).append(len(shards))
        shards.append(local_shard(like) if is_dtensor(type(like)) else like)
    for (mesh, dimensions, _), indices in summands.items():
        flat = torch.cat([shards[i].reshape(-1) for i in indices])
        for dimension in dimensions:
            flat = collectives.all_reduce(flat, "sum", mesh.get_group(dimension), timeout)
        sizes = [shards[i].numel() for i in indices]
        for i, part in zip(indices, flat.split(sizes), strict=True):
            shards[i] = part.view(shards[i].shape)
    return shards


def _summed(grad: Any, found: list[Place]) -> tuple[Tensor, tuple[int, ...]]:
    """Return the gradient in the placements to measure, and the mesh dimensions to add it up over."""
    moved = tuple([i for i, place in enumerate(found) if not place.is_settled])
    if all([reduction_of(found[i].now) == "sum" and found[i].then is None for i in moved]):
        return grad, moved
    from torch.distributed.tensor import Replicate  # noqa: PLC0415 its import is slow

    with torch.no_grad():
        return grad.redistribute(placements=[place.then or Replicate() for place in found]), ()
