"""Split a list of tensors into the chunks that the kernels read."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

# distinct lists kept; a training step has one or two (gradients, weights)
LISTS_KEPT: Final = 64


class Group(NamedTuple):
    """The chunks of one dtype, or of one tuple of a pair's dtypes, which one launch reads."""

    dtype: Any
    first_chunk: int
    num_chunks: int


@dataclass(frozen=True, eq=False)
class ChunkMap:
    """How a list of tensors is split into chunks.

    ``table``: int64 on the host, the concatenation of ``numel (T,)``, ``chunk (T,)`` (elements of one chunk
    of that tensor), ``first_chunk (T,)``, ``num_chunks (T,)`` and ``chunk_row (N,)``. A tensor's chunks are
    adjacent and in order. For pairs there follow ``pitch (T,)`` of all a, of all b and, if there are any, of
    all g: elements from the beginning of one chunk to that of the next.
    """

    num_tensors: int
    num_chunks: int
    groups: tuple[Group, ...]
    table: Tensor


@lru_cache(maxsize=LISTS_KEPT)
def chunk_map_of(
    sizes: tuple[int, ...],
    dtypes: tuple[Hashable, ...],
    chunk: int,
    max_chunks: int,
    blocks: tuple[int, ...] = (),
    pitches: tuple[int, ...] = (),
) -> ChunkMap:
    """Split tensors of these sizes into chunks, grouped by dtype, or by the dtypes of a pair.

    A chunk has ``chunk`` elements. If a tensor would have more than ``max_chunks`` chunks, its chunk size is
    the smallest power of two that avoids this. The size depends on the tensor alone, so that a row has the
    same bits whichever tensors share the call.

    ``blocks``: for pairs, the chunk size that the layout of each requires, or 0. ``pitches``: of all lists;
    -1 where chunks are adjacent in memory.
    """
    lengths = [max(chunk, _power_of_two(-(-size // max_chunks))) for size in sizes]
    lengths = [block or length for block, length in zip(blocks or [0] * len(sizes), lengths, strict=True)]
    counts = [-(-size // length) for size, length in zip(sizes, lengths, strict=True)]
    first = [0] * len(sizes)
    rows: list[int] = []
    groups = []
    for dtype in dict.fromkeys(dtypes):
        done = len(rows)
        for i, count in enumerate(counts):
            if dtypes[i] == dtype:
                first[i] = len(rows)
                rows += [i] * count
        if len(rows) > done:
            groups.append(Group(dtype, done, len(rows) - done))
    apart = [lengths[i % len(sizes)] if pitch < 0 else pitch for i, pitch in enumerate(pitches)]
    table = int64([*sizes, *lengths, *first, *counts, *rows, *apart])
    return ChunkMap(len(sizes), len(rows), tuple(groups), table)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length() if least > 1 else 1


def int64(values: Sequence[int]) -> Tensor:
    """Return integers as a tensor on the host."""
    # takes half the time of torch.tensor
    return torch.frombuffer(array("q", values), dtype=torch.int64)
