"""How the projections kernel reads tensors: runs of chunks, with the indices of their elements.

A run is a piece of a tensor, see `gradiometer.ops.index_boxes`, which is split into chunks of the same number
of rows and columns.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gradiometer.columns.projections import WORD_BITS, sign_keys
from gradiometer.ops import index_boxes, packing
from gradiometer.ops.launch_plans import ChunkMap, LaunchGroup, LaunchPlan, int64, recognize, remember
from gradiometer.ops.projection_reference import laid_out, real_part

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from gradiometer.ops.index_boxes import Piece

_UPPER: Final = 1 << WORD_BITS


class _Known(NamedTuple):
    """What the next call with such a list can reuse.

    ``plan``: of addresses and tables; its chunk map's table is int64 on the host, the concatenation of
    ``numel (T,)``, ``first_chunk (T,)``, ``num_chunks (T,)``, ``keys (T, ceil(k / 32))``, each two of 32
    bits, ``runs (num_runs, 13)`` and ``chunk_run (N,)``, which is int32 and followed by one or two zeros. A
    run: tensor, offset, index of the first element, rows, columns, stride, step, pitch and increment, as in a
    `Piece`; the logarithm of a tile's columns, rows and columns of a chunk, first chunk. The dtype of a
    launch group is a dtype and whether elements are adjacent, in memory and in the whole tensor.
    ``copied``: the tensors that are in too many pieces.
    """

    key: tuple[Any, ...]
    plan: LaunchPlan
    num_runs: int
    copied: frozenset[int]


def pack(
    tensors: Sequence[Tensor],
    names: Sequence[str],
    count: int,
    seed: int,
    boxes: Sequence[int],
    sizes: tuple[int, int, int],
    *,
    keep: bool,
) -> tuple[packing.Pack, int]:
    """Pack tensors of one device for the kernels; return the number of runs, too.

    ``sizes``: elements of a chunk, chunks of a tensor at most, elements of a tile. ``keep``: as for
    `gradiometer.ops.packing.pack`. The rest: as for `measure_projections`.
    """
    plan = recognize(tensors) or remember(tensors)
    key = tuple(names), count, seed, tuple(boxes), sizes
    known: _Known | None = plan.host_plans.get(pack)
    views = list(tensors) if plan.direct else [packing.readable(x) for x in tensors]
    if known is None or known.key != key:
        known = plan.host_plans[pack] = _known(plan, tensors, views, key)
    views = [x.contiguous() if i in known.copied else x for i, x in enumerate(views)]
    chunk_map = known.plan.chunk_map
    assert chunk_map is not None  # noqa: S101 for the type checker
    addresses = [x.data_ptr() for x in views]
    return packing.packed_at(known.plan, chunk_map, views, addresses, keep=keep), known.num_runs


def _known(
    plan: LaunchPlan, tensors: Sequence[Tensor], views: Sequence[Tensor], key: tuple[Any, ...]
) -> _Known:
    names, count, seed, boxes, (chunk, max_chunks, tile) = key
    parts = index_boxes.decode(boxes, len(tensors))
    # only the shapes and strides of what is laid out matter: fp8 and complex tensors have been converted
    real_parts = [real_part(x, part)[1] for x, part in zip(tensors, parts, strict=True)]
    laid = [laid_out(x, part) for x, part in zip(views, real_parts, strict=True)]
    copied = frozenset([i for i, (x, _) in enumerate(laid) if x is not views[i]])
    words = -(-count // WORD_BITS)
    keys = [_keys_of(name, seed, word) for name in names for word in range(words)]

    kinds = [(x.dtype, all([_is_flat(piece) for piece in pieces])) for x, pieces in laid]
    numels = [sum([piece.rows * piece.columns for piece in pieces]) for _, pieces in laid]
    first, counts = [0] * len(laid), [0] * len(laid)
    runs: list[tuple[int, ...]] = []
    chunk_run: list[int] = []
    groups = []
    for kind in dict.fromkeys(kinds):
        done = len(chunk_run)
        for i, (_, pieces) in enumerate(laid):
            if kinds[i] != kind:
                continue
            first[i] = len(chunk_run)
            # a power of two, as in chunk_map_of
            length = max(chunk, 1 << max((numels[i] - 1) // max_chunks, 0).bit_length())
            for piece in _within_upper(pieces) if kind[1] else pieces:
                tall = max(1, length // piece.columns)
                log = 0 if kind[1] else _log_of(piece, tile)
                run = i, piece.offset, piece.first, piece.rows, piece.columns, *piece[3:5], *piece[6:]
                runs.append((*run, log, tall, length, len(chunk_run)))
                number = -(-piece.rows // tall) * -(-piece.columns // length)
                chunk_run += [len(runs) - 1] * number
            counts[i] = len(chunk_run) - first[i]
        if len(chunk_run) > done:
            groups.append(LaunchGroup(kind, done, len(chunk_run) - done))
    rows = array("q", array("i", chunk_run + [0] * (2 - len(chunk_run) % 2)).tobytes())
    table = int64([*numels, *first, *counts, *keys, *chain.from_iterable(runs), *rows])
    chunk_map = ChunkMap(len(laid), len(chunk_run), tuple(groups), table)
    own = replace(plan, chunk_map=chunk_map, kept=None, captured=0, host_plans={})
    return _Known(key, own, len(runs), copied)


def _keys_of(name: str, seed: int, word: int) -> int:
    """Return the keys of a word of signs as the halves of a signed integer."""
    low, high = sign_keys(name, seed, word)
    both = low | high << WORD_BITS
    return both - _UPPER**2 if both >= _UPPER**2 // 2 else both


def _is_flat(piece: Piece) -> bool:
    return piece.rows == 1 and (piece.columns == 1 or piece.step == piece.increment == 1)


def _within_upper(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Split pieces of adjacent elements where the upper half of the index changes."""
    for piece in pieces:
        start = 0
        while start < piece.columns:
            index = piece.first + start
            end = min(piece.columns, start + _UPPER - index % _UPPER)
            yield piece._replace(offset=piece.offset + start, first=index, columns=end - start)
            start = end


def _log_of(piece: Piece, tile: int) -> int:
    """Return the logarithm of the columns of a tile: the most that waste few of its elements."""
    tiles = [
        -(-piece.columns // (1 << log)) * -(-piece.rows // (tile >> log)) for log in range(tile.bit_length())
    ]
    return max([log for log, number in enumerate(tiles) if number <= 1.125 * min(tiles)])
