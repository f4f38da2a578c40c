"""The part of a DTensor that this rank holds, as boxes of indices of the whole tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradiometer.inputs import Box, Part, is_dtensor

if TYPE_CHECKING:
    from torch import Tensor


def part_of(tensor: Tensor) -> Part | None:
    """Return the part of a DTensor that this rank holds; None for a tensor that is whole here."""
    if not is_dtensor(type(tensor)):
        return None
    given: Any = tensor
    shape, origin = list(given.shape), [0] * given.dim()
    for place, number, count in zip(
        given.placements, given.device_mesh.get_coordinate(), given.device_mesh.shape, strict=True
    ):
        if place.is_shard():
            # as torch.chunk: the last parts may be shorter, or empty
            size = shape[place.dim]
            each = -(-size // count)
            first = min(each * number, size)
            origin[place.dim] += first
            shape[place.dim] = min(each, size - first)
    return Part(tuple(given.shape), (Box((0,) * len(shape), tuple(shape), tuple(origin)),))
