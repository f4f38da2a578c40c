"""Histograms of magnitudes, see `gradiometer.columns.exponents`: each chunk counts in shared memory.

A program gives each element a number of its own small scale, 7 for each binade, and counts a tile at a time.
At the end of a chunk it adds the counts that are not 0 to its tensor's row; integers, so that the order of
these atomic additions does not matter.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from gradiometer.columns import HIGHEST_BINADE, LOWEST_BINADE, NUM_EXPONENT_COLUMNS, bin_of
from gradiometer.kernels import tuning
from gradiometer.kernels.primitives import locate

__all__ = ["classes", "exponents"]

_DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16}

# intervals of mantissas that bins may tell apart, by their first mantissa in units of 2**-23: 0, the rest up
# to 2**-16, up to 0.8125, below 0.875, below 1 - 2**-8, below 1 - 2**-11, and the rest
_STARTS = (0, 1, 2**7 + 1, 13 * 2**19 + 1, 14 * 2**19, 2**23 - 2**15, 2**23 - 2**12)
_CLASSES = len(_STARTS)
# of subnormal float32 numbers: the exponent fields that they would have
_LEAST_FIELD = -22


def _class_count(is_double: bool) -> int:
    return 4096 if is_double else 2048


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
    found = torch.full((_class_count(is_double),), NUM_EXPONENT_COLUMNS - 1, dtype=torch.int32, device="cpu")
    found[: len(magnitudes)] = bin_of(magnitudes).to(torch.int32)
    # then zeros, infinities and NaN
    found[len(magnitudes)] = 0
    found[len(magnitudes) + 1] = NUM_EXPONENT_COLUMNS - 2
    return found


@triton.jit
def _class_of_double(word, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Return the number of each float64 number, given as bits."""
    a = word & 0x7FFFFFFFFFFFFFFF
    # as rounded to float32: a mantissa of float32 has 2**29 of these units
    half = a + (1 << 28)
    binade = (half >> 52).to(tl.int32) - 1023
    m = half & 0xFFFFFFFFFFFFF
    step = (m > (1 << 29)).to(tl.int32) + (m > (1 << 36) + (1 << 28)).to(tl.int32)
    step += (m > (13 << 48) + (1 << 29)).to(tl.int32) + (m >= (14 << 48)).to(tl.int32)
    step += (m >= (1 << 52) - (1 << 44)).to(tl.int32) + (m >= (1 << 52) - (1 << 41)).to(tl.int32)
    binade = tl.minimum(tl.maximum(binade, FIRST), LAST)
    found = (binade - FIRST) * 7 + step
    MOST: tl.constexpr = (LAST - FIRST + 1) * 7
    INF: tl.constexpr = 0x7FF0000000000000
    found = tl.where(a == 0, MOST, found)
    return tl.where(a >= INF, tl.where(a == INF, MOST + 1, MOST + 2), found)


@triton.jit
def _class_of(word, DTYPE: tl.constexpr):
    """Return the number of each narrower number, given as bits."""
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
    found = ((v >> 23) + 22) * 7 + step
    # 277 binades, whose last has infinities and NaN
    found = tl.where(a == 0, 1939, found)
    return tl.where(a >= 0x7F800000, tl.where(a == 0x7F800000, 1940, 1941), found)


@triton.jit(do_not_specialize=["first_chunk", "num_tensors"])
def _exponents_kernel(
    pointers_ptr,  # (T,) int64
    table_ptr,  # (4 * T + N,) int64, see packing.ChunkMap
    classes_ptr,  # (BINS,) int32, the column of each class
    rows_ptr,  # (T, C) int64
    first_chunk: tl.int32,
    num_tensors: tl.int32,
    COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
    WORD: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
):
    chunk = first_chunk + tl.program_id(0)
    address, n = locate(chunk, pointers_ptr, table_ptr, num_tensors, ITEMSIZE)
    lanes = tl.arange(0, TILE)
    counts = tl.zeros((BINS,), tl.int32)
    base = address.to(tl.pointer_type(WORD))
    head = tl.minimum((-address & 15).to(tl.int32) // ITEMSIZE, n)
    full = (n - head) // TILE
    # no mask: it would split the loads
    words = tl.multiple_of((address + head * ITEMSIZE).to(tl.pointer_type(WORD)), 16) + lanes
    for _ in range(full):
        word = tl.load(words)
        found = _class_of_double(word, FIRST, LAST) if DTYPE == tl.float64 else _class_of(word, DTYPE)
        counts += tl.histogram(found, BINS)
        words += TILE
    # the elements before and after the tiles
    tiles = full * TILE
    for i in range(0, n - tiles, TILE):
        mask = lanes < n - tiles - i
        place = i + lanes
        place = tl.where(place < head, place, place + tiles)
        word = tl.load(base + place, mask=mask, other=0)
        found = _class_of_double(word, FIRST, LAST) if DTYPE == tl.float64 else _class_of(word, DTYPE)
        counts += tl.histogram(found, BINS, mask=mask)
    bins = tl.arange(0, BINS)
    row = tl.load(table_ptr + 4 * num_tensors + chunk)
    column = tl.load(classes_ptr + bins)
    tl.atomic_add(rows_ptr + row * COLUMNS + column, counts.to(tl.int64), mask=counts > 0, sem="relaxed")


def exponents(
    pointers: torch.Tensor,
    table: torch.Tensor,
    columns: torch.Tensor,
    rows: torch.Tensor,
    dtype: torch.dtype,
    first_chunk: int,
    num_chunks: int,
    num_tensors: int,
) -> None:
    """Add the histograms of one dtype's chunks to their tensors' rows.

    Args:
        pointers: ``(T,) int64``, the tensors' addresses.
        table: int64, a `gradiometer.ops.packing.ChunkMap`'s table.
        columns: `classes` of this dtype, on the device.
        rows: ``(T, C) int64``.
        dtype: the dtype of these chunks' tensors.
        first_chunk: the group's first chunk.
        num_chunks: the group's number of chunks.
        num_tensors: T.
    """
    tile, threads, registers = tuning.EXPONENTS[dtype]
    _exponents_kernel[(num_chunks,)](
        pointers,
        table,
        columns,
        rows,
        first_chunk,
        num_tensors,
        COLUMNS=NUM_EXPONENT_COLUMNS,
        DTYPE=_DTYPES[dtype],
        WORD=_WORDS[dtype.itemsize],
        ITEMSIZE=dtype.itemsize,
        FIRST=LOWEST_BINADE - 1,
        LAST=HIGHEST_BINADE + 1,
        BINS=_class_count(dtype == torch.float64),
        TILE=tile,
        **tuning.options(threads, registers, rows.device),
    )
