"""Histograms of magnitudes in eager PyTorch: the CPU implementation.

Each number gets a code of 15 bits, by operators on 16-bit integers, and one ``bincount`` counts the codes of
a piece. For float16 and bfloat16 numbers, the code is the magnitude's bits. float32 numbers get the codes of
`gradiometer.ops.exponent_codes`, of which each lies in one bin. float64 numbers are rounded to float32 first,
as a cast rounds them. The codes cover the middle of the range. If a part of a large tensor has other numbers,
its zeros are counted, and other blocks are read again with the codes of the ends; only numbers at the very
ends of the range are looked up in the edges. If small tensors have other numbers, zeros are counted too, and
the rest is looked up.
"""

from __future__ import annotations

from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from gradiometer.columns import EXPONENTS, bin_of
from gradiometer.inputs import as_real
from gradiometer.ops import exponent_codes as codes
from gradiometer.ops import openmp
from gradiometer.ops.streaming import MOST_THREADS, by_tensor, cut, piece_length

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# larger tensors are cut into pieces, smaller ones are put together
_LARGE: Final = 2**18
# elements that a thread reads at once, in buffers of 8 bytes for each. The calls for them take 50 us, and
# a thread may have to wait for Python's lock after each
_PIECE: Final = 2**19
# elements per additional thread, in batches of at least half of that length: threads that call many short
# operators wait for each other, on a busy machine milliseconds
_WORTH_A_THREAD: Final = 2**19
# numbers that are looked up together
_FEW: Final = 2**14
_WIDTH: Final = EXPONENTS.width
# magnitudes of 16 bits; the first of them are subnormal
_MAGNITUDES: Final = 2**15
_SUBNORMAL: Final = 2**7


class Run(NamedTuple):
    """Tensors of one size in a batch: their elements, and their rows."""

    elements: slice
    rows: slice
    size: int


class Batch(NamedTuple):
    """Small tensors of one dtype that are counted together, in ascending order of their sizes.

    ``indices``: their positions in the call. ``rows``: the same as an index.
    """

    indices: list[int]
    rows: slice | Tensor
    sizes: list[int]
    runs: list[Run]
    numel: int


class Plan(NamedTuple):
    """How to count a list of tensors: the indices of large ones, and batches of small ones."""

    large: list[int]
    batches: list[Batch]


def plan_of(tensors: Sequence[Tensor]) -> Plan:
    """Return the plan for real tensors; it also holds if only the addresses differ."""
    plan = Plan([], [])
    small: dict[torch.dtype, list[tuple[int, int]]] = {}
    for index, x in enumerate(tensors):
        numel = x.numel()
        if numel > _LARGE:
            plan.large.append(index)
        elif numel:
            small.setdefault(x.dtype, []).append((numel, index))
    for members in small.values():
        plan.batches.extend(_batches(sorted(members)))
    return plan


def _batches(members: list[tuple[int, int]]) -> Iterator[Batch]:
    """Put tensors together, given as (size, index) in ascending order."""
    start = filled = 0
    for i, (numel, _) in enumerate(members):
        filled += numel
        if filled > _PIECE or i - start == codes.ROWS:
            yield _batch_of(members[start:i])
            start, filled = i, numel
    yield _batch_of(members[start:])


def _batch_of(members: list[tuple[int, int]]) -> Batch:
    sizes, indices = [list(x) for x in zip(*members, strict=True)]
    runs: list[Run] = []
    first = start = 0
    for size, same in groupby(sizes):
        count = len(list(same))
        last, stop = first + count, start + count * size
        runs.append(Run(slice(start, stop), slice(first, last), size))
        first, start = last, stop
    rows: slice | Tensor = slice(indices[0], indices[-1] + 1)
    if indices != list(range(indices[0], indices[-1] + 1)):
        rows = torch.tensor(indices, device="cpu")
    return Batch(indices, rows, sizes, runs, start)


def exponent_stats(tensors: Sequence[Tensor], plan: Plan | None = None) -> Tensor:
    """Return the histograms of tensors of one device, ``(T, C) int64``.

    ``plan``: the result of `plan_of` for these tensors, if they are real.
    """
    device = tensors[0].device
    if plan is None:
        tensors = [as_real(x) for x in tensors]
        plan = plan_of(tensors)
    # a thread of OpenMP that has helped to write the zeros would wait for more on a core that is needed
    with openmp.one_thread():
        rows = torch.zeros((len(tensors), _WIDTH), dtype=torch.int64, device=device)
    if plan.batches:
        most_threads = min(MOST_THREADS, torch.get_num_threads()) if device.type == "cpu" else 1
        numels = [batch.numel for batch in plan.batches]

        def start() -> Callable[[Batch], None]:
            scratch = codes.Scratch(max(numels), device)
            return lambda batch: _count_batch(batch, tensors, scratch, rows)

        full = sum([numel for numel in numels if numel > _PIECE // 2])
        threads = min(most_threads, 1 + full // _WORTH_A_THREAD)
        openmp.map_on_threads(start, plan.batches, threads)
    if plan.large:
        large: list[tuple[int, tuple[Tensor, ...]]] = [(index, (tensors[index],)) for index in plan.large]
        most = max([x.numel() for _, (x, *_) in large])
        length = min(_PIECE if openmp.can_run_alone() else piece_length(), most)

        def start_large() -> Callable[[tuple[Tensor, ...]], Tensor]:
            scratch = codes.Scratch(length, device)
            return lambda block: _count_block(block[0], scratch)

        for index, row in by_tensor(large, length, start_large, lambda parts: torch.stack(parts).sum(0)):
            rows[index] = row
    return rows


# numbers of any format


def _look_up(x: Tensor, row: Tensor, count: int) -> Tensor:
    """Return the histograms of numbers by the edges, given the row of each, in ascending order."""
    found = x.new_zeros((count, _WIDTH), dtype=torch.int64)
    for start in range(0, len(x), _FEW):
        part, own = x[start : start + _FEW], row[start : start + _FEW]
        first, last = own[[0, -1]].tolist()
        columns = bin_of(codes.magnitudes_of(part)).add_(own - first, alpha=_WIDTH)
        length = (last + 1 - first) * _WIDTH
        found[first : last + 1] += torch.bincount(columns, minlength=length).view(-1, _WIDTH)
    return found


def _doubled(x: Tensor) -> Tensor:
    """Return integers that are 0 for 0 and -0, but for no subnormal number, flushed or not."""
    # fp8 formats have numbers other than 0, or NaN, in the place of 0 or -0
    x = x.float() if x.itemsize == 1 else x.contiguous()
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]) * 2


def _count_zeros(x: Tensor) -> int:
    return x.numel() - sum([int(torch.count_nonzero(_doubled(part))) for (part,) in cut((x,), _PIECE // 4)])


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


def _count_block(block: Tensor, scratch: codes.Scratch) -> Tensor:
    """Return the histogram of a block of a large tensor."""
    if block.itemsize == 1:
        return _count_bytes(block, scratch)
    if block.itemsize == 2:
        return _count_words(block, scratch)
    columns, n_below = _count_window(block, codes.MIDDLE, scratch)
    n_other = block.numel() - int(columns.sum())
    if n_other:
        zeros = int(columns[0])
        if n_below > zeros:
            columns += _count_window(block, 0, scratch, zeros)[0]
        if n_other > n_below - zeros:
            for window in range(codes.MIDDLE + 1, codes.NUM_WINDOWS):
                columns += _count_window(block, window, scratch)[0]
    return columns


def _histogram(
    block: Tensor,
    length: int,
    codes_of: Callable[[Tensor], Tensor],
    last: Tensor,
    apart: Callable[[Tensor, Tensor], None],
) -> Tensor:
    """Count the codes of a block, ``length`` of them at a time, and return the sums by column.

    ``last`` is the result of `_last_of`. ``apart`` is called with the counts of a piece, and that piece; it
    removes those that it counts itself.
    """
    upto = torch.zeros(_WIDTH, dtype=torch.int64, device=block.device)
    for (piece,) in cut((block,), length):
        counts = torch.bincount(codes_of(piece))
        apart(counts, piece)
        # one sum takes a fraction of the time of adding each count to its column
        upto += counts.cumsum_(0).index_select(0, last.clamp(max=len(counts) - 1))
        # before the next ones take their memory
        del counts
    columns = upto.clone()
    columns[1:] -= upto[:-1]
    return columns


@cache
def _window(window: int, device: torch.device) -> tuple[Tensor, Tensor]:
    columns, is_wide = codes.window_columns(window)
    return _last_of(columns).to(device), is_wide.to(device)


def _count_window(block: Tensor, window: int, scratch: codes.Scratch, zeros: int = 0) -> tuple[Tensor, int]:
    """Return the histogram of the numbers in a window, and how many are below the middle one.

    The middle window, which is read first, has the zeros; the one below it is given their number.
    """
    last, is_wide = _window(window, block.device)
    n_below = n_wide = 0

    def codes_of(piece: Tensor) -> Tensor:
        bits = scratch.first(piece.numel())[0]
        x = bits.view(torch.float32)
        if piece.dtype == torch.float64:
            x.view(piece.shape).copy_(piece)
        else:
            x = _contiguous(piece, x)
        return codes.window_codes(x.view(torch.int32), window, scratch)

    def apart(counts: Tensor, piece: Tensor) -> None:
        nonlocal n_below, n_wide, zeros
        if window != codes.MIDDLE:
            n_wide += int(counts[is_wide[: len(counts)]].sum())
            counts.masked_fill_(is_wide[: len(counts)], 0)
        elif found := int(counts[codes.BELOW].sum()):
            n_below += found
            zeros += _count_zeros(piece)

    columns = _histogram(block, scratch.numel, codes_of, last, apart)
    columns[:: _WIDTH - 1] = 0
    if window == codes.MIDDLE:
        columns[0] = zeros
    elif n_wide > zeros:
        for (piece,) in cut((block,), _FEW):
            which = is_wide.index_select(0, codes_of(piece).int()).view(piece.shape)
            others = piece[which.logical_and_(_doubled(piece).view(piece.shape).ne(0))]
            columns += _look_up(others, torch.zeros_like(others, dtype=torch.int16), 1)[0]
    return columns, n_below


@cache
def _last_of_words(dtype: torch.dtype, device: torch.device) -> Tensor:
    return _last_of(_columns_of(dtype, _MAGNITUDES)).to(device)


def _columns_of(dtype: torch.dtype, count: int) -> Tensor:
    """Return the columns of the first numbers of a narrow format, in the order of their bits."""
    bits = torch.arange(count, dtype=torch.int32, device="cpu")
    words = bits.to(torch.uint8 if dtype.itemsize == 1 else torch.int16)
    return bin_of(codes.magnitudes_of(words.view(dtype).float()))


def _count_words(block: Tensor, scratch: codes.Scratch) -> Tensor:
    """Return the histogram of numbers of 16 bits."""
    subnormal = torch.zeros(_SUBNORMAL, dtype=torch.int64, device=block.device)

    def codes_of(piece: Tensor) -> Tensor:
        out, _ = scratch.first(piece.numel())[1]
        words = _contiguous(piece, out.view(block.dtype)).view(torch.int16)
        return torch.bitwise_and(words, codes.int16(_MAGNITUDES - 1), out=out)

    def apart(counts: Tensor, _: Tensor) -> None:
        first = counts[:_SUBNORMAL]
        subnormal[: len(first)] += first
        first.zero_()

    last = _last_of_words(block.dtype, block.device)
    columns = _histogram(block, scratch.numel, codes_of, last, apart)
    if int(subnormal.sum()):
        # torch.set_flush_denormal makes 0 of subnormal bfloat16 numbers, or not
        columns.index_add_(0, _columns_of(block.dtype, _SUBNORMAL).to(block.device), subnormal)
    return columns


def _count_bytes(block: Tensor, scratch: codes.Scratch) -> Tensor:
    """Return the histogram of numbers of 8 bits."""
    counts = torch.zeros(2**8, dtype=torch.int64, device=block.device)
    for (piece,) in cut((block,), scratch.numel):
        counts += torch.bincount(piece.reshape(-1).view(torch.uint8), minlength=2**8)
    columns = counts.new_zeros(_WIDTH)
    return columns.index_add_(0, _columns_of(block.dtype, 2**8).to(block.device), counts)


# small tensors


def _count_batch(batch: Batch, tensors: Sequence[Tensor], scratch: codes.Scratch, rows: Tensor) -> None:
    """Write the rows of a batch."""
    parts = [x if x.dim() == 1 else x.reshape(-1) for x in [tensors[index] for index in batch.indices]]
    bits, words = scratch.first(batch.numel)
    dtype = _join(parts, batch.sizes, bits, words)
    own, found = codes.row_codes(dtype, bits, words)
    offsets = codes.row_offsets(dtype, own.device)
    for elements, members, size in batch.runs:
        torch.add(own[elements].view(-1, size), offsets[members], out=found[elements].view(-1, size))
    counts = torch.bincount(found, minlength=len(parts) * codes.NUM_ROW_CODES).view(len(parts), -1)
    rows[batch.rows, codes.ROW_COLUMNS] = counts[:, codes.INSIDE]
    zeros = counts[:, :: codes.NUM_ROW_CODES - 1].sum(1)
    n_other = int(zeros.sum())
    if not n_other:
        return
    if parts[0].dtype == torch.float64:
        # small numbers become 0 in float32
        nonzero = _doubled(torch.cat(parts)).ne(0)
    else:
        nonzero = codes.nonzero_among(dtype, words)
    if n_other > len(nonzero) - int(nonzero.count_nonzero()):
        which = codes.is_at_end(dtype, own).mul_(nonzero).nonzero().squeeze(1)
        x = torch.cat([x.float() if x.itemsize == 1 else x for x in parts])[which]
        others = _look_up(x, found[which] // codes.NUM_ROW_CODES, len(parts))
        rows[batch.rows] += others
        zeros -= others.sum(1)
    rows[batch.rows, 0] += zeros


def _join(parts: list[Tensor], sizes: list[int], bits: Tensor, words: list[Tensor]) -> torch.dtype:
    """Write numbers one after the other into the first buffer, in float32 or bfloat16; return which."""
    dtype = parts[0].dtype
    if dtype == torch.bfloat16:
        torch.cat(parts, out=bits.view(dtype)[: len(bits)])
        return dtype
    x = bits.view(torch.float32)
    if dtype == torch.float32:
        torch.cat(parts, out=x)
    elif dtype == torch.float16:
        x.copy_(torch.cat(parts, out=words[0].view(dtype)))
    else:
        # fp8 cannot be concatenated, and there is no room for float64
        torch._foreach_copy_(x.split(sizes), parts)
    return torch.float32
