"""Histograms of magnitudes in eager PyTorch: the CPU implementation.

Each number gets a code of 15 bits, by operators on 16-bit integers, and one ``bincount`` counts the codes of
a piece. For float16 and bfloat16 numbers, the code is the magnitude's bits. float32 numbers get the codes of
`gradiometer.ops.exponent_codes`, of which each lies in one bin. float64 numbers are rounded to float32 first,
as a cast rounds them. The codes cover the middle of the range. If a part of a large tensor has other numbers,
its zeros are counted, and other blocks are read again with the codes of the ends. Only numbers at the very
ends of the range, and those of small tensors, are looked up in the edges.
"""

from __future__ import annotations

from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from gradiometer.columns import NUM_EXPONENT_COLUMNS, bin_of
from gradiometer.inputs import as_real
from gradiometer.ops import exponent_codes as codes
from gradiometer.ops import openmp
from gradiometer.ops.reference import MOST_THREADS, by_tensor, cut, piece_length

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["exponent_stats"]

# larger tensors are cut into pieces, smaller ones are put together
_LARGE: Final = 2**16
# elements that a thread reads at once, 6 bytes for each: operators on fewer wait for Python's lock too often
_PIECE: Final = 2**18
# codes that it counts together, 2 bytes for each
_COUNTED: Final = 2**20
# elements of small tensors that a thread reads together, 12 bytes for each
_TOGETHER: Final = 2**17
# elements of small tensors per additional thread: on a busy machine, threads that call many short operators
# wait milliseconds for each other
_WORTH_A_THREAD: Final = 2**22
# rows of small tensors whose codes are computed together
_ROWS: Final = 256
# numbers that are looked up together, or of which zeros are counted
_FEW: Final = 2**14
_WIDTH: Final = NUM_EXPONENT_COLUMNS
# magnitudes of 16 bits; the first of them are subnormal
_MAGNITUDES: Final = 2**15
_SUBNORMAL: Final = 2**7


def exponent_stats(tensors: Sequence[Tensor]) -> Tensor:
    """Return the histograms of tensors of one device, ``(T, C) int64``."""
    device = tensors[0].device
    numbers = [as_real(x) for x in tensors]
    rows = torch.empty((len(numbers), _WIDTH), dtype=torch.int64, device=device)
    most_threads = min(MOST_THREADS, torch.get_num_threads()) if device.type == "cpu" else 1
    small: dict[torch.dtype, list[tuple[int, int]]] = {}
    large: list[tuple[int, tuple[Tensor, ...]]] = []
    elements = 0
    for index, x in enumerate(numbers):
        numel = x.numel()
        if numel > _LARGE:
            large.append((index, (x,)))
        else:
            small.setdefault(x.dtype, []).append((numel, index))
            elements += numel
    if small:
        batches = [batch for members in small.values() for batch in _batches(sorted(members), _TOGETHER)]

        def start() -> Callable[[list[int]], None]:
            scratch = codes.Scratch(min(_TOGETHER, elements), device, 4)
            return lambda batch: _count_batch(batch, numbers, scratch, rows)

        openmp.map_on_threads(start, batches, min(most_threads, 1 + elements // _WORTH_A_THREAD))
    if large:
        length, together = _PIECE, _COUNTED
        if not openmp.can_run_alone():
            length = together = piece_length()
        most = max([x.numel() for _, (x,) in large])
        length, together = min(length, most), min(together, most)

        def start_large() -> Callable[[tuple[Tensor, ...]], Tensor]:
            scratch, found = (
                codes.Scratch(length, device, 1),
                torch.empty(together, dtype=torch.int16, device=device),
            )
            return lambda block: _count_block(block[0], scratch, found)

        for index, row in by_tensor(large, together, start_large, _sum):
            rows[index] = row
    return rows


def _sum(rows: list[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.stack(rows).sum(0)


def _batches(members: list[tuple[int, int]], length: int) -> Iterator[list[int]]:
    """Put tensors together, given as ascending (size, index)."""
    batch: list[int] = []
    filled = 0
    for numel, index in members:
        if batch and (filled + numel > length or len(batch) == _ROWS):
            yield batch
            batch, filled = [], 0
        batch.append(index)
        filled += numel
    yield batch


# numbers of any format


def _look_up(x: Tensor) -> Tensor:
    """Return the histogram of numbers, by the edges."""
    found = x.new_zeros(_WIDTH, dtype=torch.int64)
    for part in x.reshape(-1).split(_FEW):
        found += torch.bincount(bin_of(codes.magnitudes_of(part)), minlength=_WIDTH)
    return found


def _doubled(x: Tensor) -> Tensor:
    """Return integers that are 0 for 0 and -0, but for no subnormal number, flushed or not."""
    # fp8 formats have numbers other than 0, or NaN, in the place of 0 or -0
    x = x.float() if x.itemsize == 1 else x.contiguous()
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]) * 2


def _count_zeros(x: Tensor) -> int:
    return x.numel() - sum([int(torch.count_nonzero(_doubled(part))) for (part,) in cut((x,), _FEW)])


def _contiguous(piece: Tensor, buffer: Tensor) -> Tensor:
    """Return the numbers in one dimension, without gaps; if necessary, copied into a buffer of their size."""
    if piece.is_contiguous():
        return piece.view(-1)
    buffer.view(piece.shape).copy_(piece)
    return buffer


def _last_of(columns: Tensor) -> Tensor:
    """Return the last code up to each column, given the columns of codes in ascending order, or 0."""
    every = torch.arange(_WIDTH, dtype=torch.int64, device="cpu")
    return torch.searchsorted(columns, every, right=True).sub_(1).clamp_(min=0)


# large tensors


def _count_block(block: Tensor, scratch: codes.Scratch, found: Tensor) -> Tensor:
    """Return the histogram of a block of a large tensor."""
    if block.itemsize == 1:
        return _count_bytes(block, scratch)
    if block.itemsize == 2:
        return _count_words(block, found)
    columns = _count_window(block, codes.MIDDLE, scratch, found)
    if int(columns.sum()) < block.numel():
        for window in range(codes.NUM_WINDOWS):
            if window != codes.MIDDLE:
                columns += _count_window(block, window, scratch, found)
    return columns


def _histogram(
    block: Tensor,
    length: int,
    found: Tensor,
    write: Callable[[Tensor, Tensor], object],
    last: Tensor,
    apart: Callable[[Tensor, Tensor], None],
) -> Tensor:
    """Write the codes of a block, ``length`` of them at a time, count them, and return the sums by column.

    ``last`` is the result of `_last_of`. ``apart`` is called with the counts of a part, and that part; it
    removes those that it counts itself.
    """
    upto = torch.zeros(_WIDTH, dtype=torch.int64, device=block.device)
    for (part,) in cut((block,), found.numel()):
        filled = 0
        for (piece,) in cut((part,), length):
            write(piece, found[filled : filled + piece.numel()])
            filled += piece.numel()
        counts = torch.bincount(found[:filled])
        apart(counts, part)
        # one sum takes a fraction of the time of adding each count to its column
        upto += counts.cumsum_(0).index_select(0, last.clamp(max=len(counts) - 1))
        # before the next ones take their memory
        del counts
    return upto.diff(prepend=upto.new_zeros(1))


@cache
def _window(window: int, device: torch.device) -> tuple[Tensor, Tensor]:
    columns, is_wide = codes.window_columns(window)
    return _last_of(columns).to(device), is_wide.to(device)


def _count_window(block: Tensor, window: int, scratch: codes.Scratch, found: Tensor) -> Tensor:
    """Return the histogram of the numbers in a window; that of the middle has the zeros."""
    last, is_wide = _window(window, block.device)
    is_necessary, zeros = False, 0

    def write(piece: Tensor, out: Tensor) -> Tensor:
        bits = scratch.first(piece.numel())[0]
        x = bits.view(torch.float32)
        if piece.dtype == torch.float64:
            x.view(piece.shape).copy_(piece)
        else:
            x = _contiguous(piece, x)
        return codes.window_codes(x.view(torch.int32), window, scratch, out)

    def apart(counts: Tensor, part: Tensor) -> None:
        nonlocal is_necessary, zeros
        if window != codes.MIDDLE:
            is_necessary |= bool(counts[is_wide[: len(counts)]].any())
            counts.masked_fill_(is_wide[: len(counts)], 0)
        elif counts[codes.BELOW].any():
            zeros += _count_zeros(part)

    columns = _histogram(block, scratch.numel, found, write, last, apart)
    columns[0], columns[-1] = zeros, 0
    if is_necessary:
        for (piece,) in cut((block,), _FEW):
            which = is_wide.index_select(0, write(piece, found[: piece.numel()]).int()).view(piece.shape)
            columns += _look_up(piece[which.logical_and_(_doubled(piece).view(piece.shape).ne(0))])
    return columns


@cache
def _last_of_words(dtype: torch.dtype, device: torch.device) -> Tensor:
    return _last_of(_columns_of(dtype, _MAGNITUDES)).to(device)


def _columns_of(dtype: torch.dtype, count: int) -> Tensor:
    """Return the columns of the first numbers of a narrow format, in the order of their bits."""
    bits = torch.arange(count, dtype=torch.int32, device="cpu")
    words = bits.to(torch.uint8 if dtype.itemsize == 1 else torch.int16)
    return bin_of(codes.magnitudes_of(words.view(dtype).float()))


def _count_words(block: Tensor, found: Tensor) -> Tensor:
    """Return the histogram of numbers of 16 bits."""
    subnormal = torch.zeros(_SUBNORMAL, dtype=torch.int64, device=block.device)

    def write(piece: Tensor, out: Tensor) -> None:
        words = _contiguous(piece, out.view(block.dtype)).view(torch.int16)
        torch.bitwise_and(words, codes.int16(_MAGNITUDES - 1), out=out)

    def apart(counts: Tensor, _: Tensor) -> None:
        first = counts[:_SUBNORMAL]
        subnormal[: len(first)] += first
        first.zero_()

    last = _last_of_words(block.dtype, block.device)
    columns = _histogram(block, found.numel(), found, write, last, apart)
    # torch.set_flush_denormal makes 0 of subnormal bfloat16 numbers, or not
    return columns.index_add_(0, _columns_of(block.dtype, _SUBNORMAL).to(block.device), subnormal)


def _count_bytes(block: Tensor, scratch: codes.Scratch) -> Tensor:
    """Return the histogram of numbers of 8 bits."""
    counts = torch.zeros(2**8, dtype=torch.int64, device=block.device)
    for (piece,) in cut((block,), scratch.numel):
        counts += torch.bincount(piece.reshape(-1).view(torch.uint8), minlength=2**8)
    columns = counts.new_zeros(_WIDTH)
    return columns.index_add_(0, _columns_of(block.dtype, 2**8).to(block.device), counts)


# small tensors


def _count_batch(batch: list[int], numbers: list[Tensor], scratch: codes.Scratch, rows: Tensor) -> None:
    """Write the rows of small tensors of one dtype, those of one size next to each other."""
    parts = [x if x.dim() == 1 else x.reshape(-1) for x in [numbers[index] for index in batch]]
    sizes = [x.numel() for x in parts]
    found = _row_codes(parts, sizes, scratch)
    offsets = codes.row_offsets(_ROWS).to(found.device)
    first = start = 0
    for size, same in groupby(sizes):
        count = len(list(same))
        stop = start + count * size
        found[start:stop].view(count, size).add_(offsets[first : first + count, None])
        first, start = first + count, stop
    start = 0
    for first in range(0, len(batch), codes.ROWS):
        some = slice(first, first + codes.ROWS)
        stop = start + sum(sizes[some])
        _write_rows(batch[some], parts[some], found[start:stop], rows)
        start = stop


def _write_rows(indices: list[int], parts: list[Tensor], found: Tensor, rows: Tensor) -> None:
    """Write the rows of tensors that are counted together, given their codes."""
    counts = torch.bincount(found, minlength=codes.NUM_ROW_CODES)
    if indices == list(range(indices[0], indices[0] + len(indices))):
        codes.write_columns(counts, rows[indices[0] : indices[-1] + 1])
    else:
        own = rows.new_empty((len(indices), _WIDTH))
        codes.write_columns(counts, own)
        rows[torch.tensor(indices, device=rows.device)] = own
    if outside := codes.count_outside(counts):
        sizes = [x.numel() for x in parts]
        for index, part, own, count in zip(indices, parts, found.split(sizes), outside, strict=False):
            if count:
                zeros = _count_zeros(part)
                rows[index, 0] = zeros
                if zeros < count:
                    rows[index] += _look_up(part[codes.is_outside(own).logical_and_(_doubled(part).ne(0))])


def _row_codes(parts: list[Tensor], sizes: list[int], scratch: codes.Scratch) -> Tensor:
    dtype = parts[0].dtype
    bits, words = scratch.first(sum(sizes))
    x = bits.view(torch.float32)
    if dtype == torch.float32:
        torch.cat(parts, out=x)
    elif dtype == torch.bfloat16:
        torch.cat(parts, out=words[0].view(dtype))
        return codes.row_codes_of_words(words[0], scratch)
    elif dtype == torch.float16:
        x.copy_(torch.cat(parts, out=words[0].view(dtype)))
    else:
        # fp8 cannot be concatenated, and there is no room for float64
        for part, to in zip(parts, x.split(sizes), strict=True):
            to.copy_(part)
    return codes.row_codes(bits, scratch)
