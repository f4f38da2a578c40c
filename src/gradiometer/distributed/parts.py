"""The part of a whole tensor that this rank holds, as boxes of its indices.

Shards are those of torch: each mesh dimension, from left to right, cuts what is left of a tensor dimension
into chunks like `torch.chunk`, of which the last may be shorter, or empty. FSDP2 over tensor parallelism cuts
in the other order, which a `_StridedShard` stands for: a rank then has a range of rows of each of the
``split_factor`` chunks that the later mesh dimensions make.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from gradiometer.inputs import Box, Part, is_dtensor, is_whole, local_shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# ranges of indices of one dimension, each the first index and the number of indices, in memory's order
_Ranges = list[tuple[int, int]]


class UnknownPartError(ValueError):
    """It is not known which elements of a whole tensor a rank holds; the message names the tensor."""


class _Cut(NamedTuple):
    """A mesh dimension that shards dimension ``dim``: this is rank ``place`` of ``size``."""

    dim: int
    factor: int
    place: int
    size: int


def part_of_dtensor(name: str, tensor: Tensor, what: str) -> Part | None:
    """Return the part of a DTensor that this rank holds; None for a tensor that is whole here.

    Raises:
        UnknownPartError: if it is not known which elements this rank holds.
    """
    if not is_dtensor(type(tensor)):
        return None
    given: Any = tensor
    whole, coordinate = tuple(given.shape), given.device_mesh.get_coordinate()
    if coordinate is None:
        return Part(whole, ())
    cuts = [
        _Cut(cut.dim, int(getattr(cut, "split_factor", 1)), place, size)
        for cut, place, size in zip(given.placements, coordinate, given.device_mesh.shape, strict=True)
        if not is_whole(cut)
    ]
    if not cuts:
        return None
    shape = tuple(local_shard(tensor).shape)
    for ordered in _orders(cuts):
        ranges = _cut_by(ordered, whole)
        if shape == tuple([sum([size for _, size in each]) for each in ranges]):
            return Part(whole, _boxes(ranges))
    msg = f"{what}: {name!r} is a DTensor of shape {whole} with placements {given.placements}, but the shard "
    msg += f"of this rank has shape {shape}, so it is not known which elements these are; "
    raise UnknownPartError(msg + "shard it like torch.distributed.tensor.distribute_tensor")


def _orders(cuts: list[_Cut]) -> list[list[_Cut]]:
    """Return the orders in which a tensor may have been cut, the likeliest first.

    With sizes that don't divide, chunks of FSDP2 over tensor parallelism are not always those that its
    placements give from left to right. FSDP2 keeps its own.
    """
    strided = [(i, cut) for i, cut in enumerate(cuts) if cut.factor > 1]
    is_fsdp = all(
        [
            cut.factor == math.prod([x.size for x in cuts[i + 1 :] if x.dim == cut.dim and x.factor == 1])
            for i, cut in strided
        ]
    )
    if not strided or not is_fsdp:
        return [cuts]
    last = [cut._replace(factor=1) for _, cut in strided]
    return [[cut for cut in cuts if cut.factor == 1] + last, cuts]


def _cut_by(cuts: list[_Cut], shape: Sequence[int]) -> list[_Ranges]:
    """Return the ranges of each dimension that are left after cuts in this order."""
    ranges: list[_Ranges] = [[(0, size)] for size in shape]
    for cut in cuts:
        every = ranges[cut.dim]
        chunks = [_chunk(every, j, cut.factor) for j in range(cut.factor)]
        ranges[cut.dim] = [x for chunk in chunks for x in _chunk(chunk, cut.place, cut.size)]
    return ranges


def _chunk(ranges: _Ranges, place: int, count: int) -> _Ranges:
    """Return one of ``count`` chunks of the indices in these ranges."""
    total = sum([size for _, size in ranges])
    each = -(-total // count)
    first, last = min(place * each, total), min((place + 1) * each, total)
    found, passed = [], 0
    for start, size in ranges:
        low, high = max(first, passed), min(last, passed + size)
        if low < high:
            found.append((start + low - passed, high - low))
        passed += size
    return found


def _boxes(ranges: list[_Ranges]) -> tuple[Box, ...]:
    """Return the boxes that a tensor with these ranges in its dimensions consists of."""
    placed = []
    for each in ranges:
        starts = itertools.accumulate([size for _, size in each], initial=0)
        placed.append([(start, *own) for start, own in zip(starts, each, strict=False)])
    found = []
    for sides in itertools.product(*placed):
        start, origin, size = [tuple([side[i] for side in sides]) for i in range(3)]
        found.append(Box(start, size, origin))
    return tuple(found)
