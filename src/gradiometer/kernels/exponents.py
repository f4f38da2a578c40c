"""Histograms of magnitudes, see `gradiometer.columns.exponents`.

A program gives each element of its chunk the number of a class, 7 for each binade, and counts a tile at a
time. That takes a few instructions for each 32 classes, so it is optimistic: it counts the classes of 36
binades, up to 4 above the largest of the chunk's first elements. A chunk with any other element but zeros is
read again, and counted in all classes. At its end a program adds the counts that are not 0 to its tensor's
row; they are integers, so the order of these atomic additions does not matter.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from gradiometer.columns import EXPONENTS, HIGHEST_BINADE, LOWEST_BINADE, Cursor, bin_of
from gradiometer.kernels import tuning
from gradiometer.kernels.primitives import DTYPES, WORDS, is_due, locate, row_of

# intervals of mantissas that bins may tell apart, by their first mantissa in units of 2**-23: 0, the rest up
# to 2**-16, up to 0.8125, below 0.875, below 1 - 2**-8, below 1 - 2**-11, and the rest
_STARTS = (0, 1, 2**7 + 1, 13 * 2**19 + 1, 14 * 2**19, 2**23 - 2**15, 2**23 - 2**12)
_CLASSES = len(_STARTS)
# of subnormal float32 numbers: the exponent fields that they would have
_LEAST_FIELD = -22
# default of an argument, see finalize.py
_STEP = int(Cursor.STEP)


@cache
def classes(dtype: torch.dtype) -> torch.Tensor:
    """Return the column of each number of the kernel's own scale for a dtype, int32 on the host."""
    is_double = dtype == torch.float64
    first = LOWEST_BINADE - 1 if is_double else _LEAST_FIELD - 127
    last = HIGHEST_BINADE + 1 if is_double else 127
    binades = torch.arange(first, last + 1, dtype=torch.int64, device="cpu")
    starts = torch.tensor(_STARTS, dtype=torch.int64, device="cpu") << 29
    # for the second interval the last magnitude: the first is a tie for the widest rounding
    starts[1] = 2**36
    magnitudes = (((binades + 1023) << 52)[:, None] + starts).view(-1)
    found = torch.full((4096 if is_double else 2048,), EXPONENTS.width - 1, dtype=torch.int32, device="cpu")
    found[: len(magnitudes)] = bin_of(magnitudes).to(torch.int32)
    # then zeros, infinities and NaN
    found[len(magnitudes)] = 0
    found[len(magnitudes) + 1] = EXPONENTS.width - 2
    return found


@triton.jit
def _class_of_double(word, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Return binade, from 0, and interval of each float64 number, given as bits, and ``|word|``."""
    a = word & 0x7FFFFFFFFFFFFFFF
    # as rounded to float32: a mantissa of float32 has 2**29 of these units
    half = a + (1 << 28)
    binade = (half >> 52).to(tl.int32) - 1023
    m = half & 0xFFFFFFFFFFFFF
    step = (m > (1 << 29)).to(tl.int32) + (m > (1 << 36) + (1 << 28)).to(tl.int32)
    step += (m > (13 << 48) + (1 << 29)).to(tl.int32) + (m >= (14 << 48)).to(tl.int32)
    step += (m >= (1 << 52) - (1 << 44)).to(tl.int32) + (m >= (1 << 52) - (1 << 41)).to(tl.int32)
    return tl.minimum(tl.maximum(binade, FIRST), LAST) - FIRST, step, a


@triton.jit
def _class_of(word, DTYPE: tl.constexpr):
    """Return binade, from 0, and interval of each narrower number, given as bits, and float32's ``|x|``."""
    if DTYPE == tl.bfloat16:
        a = (word.to(tl.int32) & 0x7FFF) << 16
    elif DTYPE == tl.float16:
        x = word.to(tl.float16, bitcast=True).to(tl.float32)
        a = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        a = word & 0x7FFFFFFF
    # a subnormal number is an integer times 2**-149; the integer as float32 has its binade and mantissa
    small = a.to(tl.float32).to(tl.int32, bitcast=True) - (149 << 23)
    v = tl.where(a < (1 << 23), small, a)
    m = v & 0x7FFFFF
    step = (m > 0).to(tl.int32) + (m > 128).to(tl.int32) + (m > 13 * 524288).to(tl.int32)
    step += (m >= 14 * 524288).to(tl.int32) + (m >= 8388608 - 32768).to(tl.int32)
    step += (m >= 8388608 - 4096).to(tl.int32)
    return (v >> 23) + 22, step, a


@triton.jit
def _classes(word, DTYPE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Return binade and interval of each number, and whether it is 0, not finite, NaN."""
    if DTYPE == tl.float64:
        binade, step, a = _class_of_double(word, FIRST, LAST)
        odd, nan = a >= 0x7FF0000000000000, a > 0x7FF0000000000000
    else:
        binade, step, a = _class_of(word, DTYPE)
        odd, nan = a >= 0x7F800000, a > 0x7F800000
    return binade, step, a == 0, odd, nan


@triton.jit
def _count_all(base, n, DTYPE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, TILE: tl.constexpr):
    """Count a chunk's elements in all classes, a tile at a time."""
    MOST: tl.constexpr = (LAST - FIRST + 1) * 7
    BINS: tl.constexpr = 4096 if MOST > 2045 else 2048
    lanes = tl.arange(0, TILE)
    counts = tl.zeros((BINS,), tl.int32)
    for i in range(0, n, TILE):
        mask = lanes < n - i
        word = tl.load(base + (i + lanes), mask=mask, other=0)
        binade, step, is_zero, odd, nan = _classes(word, DTYPE, FIRST, LAST)
        found = tl.where(is_zero, MOST, binade * 7 + step)
        found = tl.where(odd, tl.where(nan, MOST + 2, MOST + 1), found)
        counts += tl.histogram(found, BINS, mask=mask)
    return counts


@triton.jit
def _near(word, start, DTYPE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Return the number of each element in the window of 36 binades; 252 for zeros, 253 for others."""
    binade, step, is_zero, odd, _ = _classes(word, DTYPE, FIRST, LAST)
    far = odd | (binade < start) | (binade >= start + 36)
    return tl.where(is_zero, 252, tl.where(far, 253, (binade - start) * 7 + step))


@triton.jit(do_not_specialize=["first_chunk", "num_tensors"])
def _exponents_kernel(
    pointers_ptr,  # (T,) int64
    table_ptr,  # see ops/launch_plans.py
    classes_ptr,  # int32, the column of each class
    rows_ptr,  # (T, COLUMNS) int64
    gate_ptr,  # a cursor; unused without GATED
    first_chunk: tl.int32,
    num_tensors: tl.int32,
    GATED: tl.constexpr,
    COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
    WORD: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    TILE: tl.constexpr,
    UNROLL: tl.constexpr,
):
    if GATED:  # noqa: SIM102 the first is known at compile time, the second at run time
        if not is_due(gate_ptr):
            return
    chunk = first_chunk + tl.program_id(0)
    address, n = locate(chunk, pointers_ptr, table_ptr, num_tensors, ITEMSIZE)
    row_ptr = rows_ptr + row_of(chunk, table_ptr, num_tensors) * COLUMNS
    lanes = tl.arange(0, TILE)
    base = address.to(tl.pointer_type(WORD))

    # the window ends 4 binades above the largest of the first elements, or above 1 if all are 0
    word = tl.load(base + lanes, mask=lanes < n, other=0)
    binade, _, is_zero, odd, _ = _classes(word, DTYPE, FIRST, LAST)
    highest = tl.max(tl.where(odd | is_zero, -1, binade))
    start = tl.where(highest < 0, -FIRST, highest) - 31

    counts = tl.zeros((256,), tl.int32)
    head = tl.minimum((-address & 15).to(tl.int32) // ITEMSIZE, n)
    full = (n - head) // (TILE * UNROLL)
    # no mask: it would split the loads
    words = tl.multiple_of((address + head * ITEMSIZE).to(tl.pointer_type(WORD)), 16) + lanes
    for _ in range(full):
        for i in tl.static_range(UNROLL):
            counts += tl.histogram(_near(tl.load(words + i * TILE), start, DTYPE, FIRST, LAST), 256)
        words += TILE * UNROLL
    # the elements before and after the tiles
    tiles = full * (TILE * UNROLL)
    for i in range(0, n - tiles, TILE):
        mask = lanes < n - tiles - i
        place = i + lanes
        place = tl.where(place < head, place, place + tiles)
        word = tl.load(base + place, mask=mask, other=0)
        counts += tl.histogram(_near(word, start, DTYPE, FIRST, LAST), 256, mask=mask)

    bins = tl.arange(0, 256)
    MOST: tl.constexpr = (LAST - FIRST + 1) * 7
    if tl.sum(tl.where(bins == 253, counts, 0)) == 0:
        some = counts > 0
        place = tl.where(bins == 252, MOST, start * 7 + bins)
        column = tl.load(classes_ptr + place, mask=some, other=0)
        tl.atomic_add(row_ptr + column, counts.to(tl.int64), mask=some, sem="relaxed")
    else:
        # few lanes: so many counts take all registers
        every = _count_all(base, n, DTYPE, FIRST, LAST, 256)
        # Triton gives a name one shape in both branches
        all_bins = tl.arange(0, 4096 if MOST > 2045 else 2048)
        columns = tl.load(classes_ptr + all_bins)
        tl.atomic_add(row_ptr + columns, every.to(tl.int64), mask=every > 0, sem="relaxed")


def exponents(
    pointers: torch.Tensor,
    table: torch.Tensor,
    columns: torch.Tensor,
    rows: torch.Tensor,
    dtype: torch.dtype,
    first_chunk: int,
    num_chunks: int,
    num_tensors: int,
    gate: torch.Tensor | None = None,
) -> None:
    """Add the histograms of one group's chunks to their tensors' rows, ``(T, C) int64`` or wider.

    ``columns``: `classes` of this dtype, on the device.
    """
    tile, unroll, threads, registers = tuning.EXPONENTS[dtype]
    if torch.version.hip:
        # four warps, too: with two, the masks of lanes of all classes do not fit into scalar registers
        threads *= 2
    is_double = dtype == torch.float64
    _exponents_kernel[(num_chunks,)](
        pointers,
        table,
        columns,
        rows,
        rows if gate is None else gate,
        first_chunk,
        num_tensors,
        GATED=gate is not None,
        COLUMNS=rows.shape[1],
        DTYPE=DTYPES[dtype],
        WORD=WORDS[dtype.itemsize],
        ITEMSIZE=dtype.itemsize,
        FIRST=LOWEST_BINADE - 1 if is_double else _LEAST_FIELD - 127,
        LAST=HIGHEST_BINADE + 1 if is_double else 127,
        TILE=tile,
        UNROLL=unroll,
        **tuning.options(threads, registers, rows.device),
    )


@triton.jit(do_not_specialize=["num_tensors"])
def _begin_kernel(
    table_ptr,  # see ops/launch_plans.py
    rows_ptr,  # (T + 1, WIDTH) int64
    gate_ptr,  # a cursor
    num_tensors: tl.int32,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,  # a power of two, WIDTH or more
    STEP: tl.constexpr = _STEP,
):
    if is_due(gate_ptr):
        row = tl.program_id(0).to(tl.int64)
        # a tensor without elements was not measured; the last row only has the step
        if (row == num_tensors) | (tl.load(table_ptr + row, mask=row < num_tensors, other=0) > 0):
            columns = tl.arange(0, TILE)
            step = tl.load(gate_ptr + STEP).to(tl.int64)
            values = tl.where(columns == WIDTH - 1, step, 0)
            tl.store(rows_ptr + row * WIDTH + columns, values, mask=columns < WIDTH)


def begin_exponents(table: torch.Tensor, rows: torch.Tensor, gate: torch.Tensor, num_tensors: int) -> None:
    """Clear the rows of tensors that have elements, and the last row, if the step is due.

    Their last column gets the step.
    """
    _, threads, registers = tuning.FINALIZE
    width = rows.shape[1]
    _begin_kernel[(num_tensors + 1,)](
        table,
        rows,
        gate,
        num_tensors,
        WIDTH=width,
        TILE=triton.next_power_of_2(width),
        **tuning.options(threads, registers, rows.device),
    )
