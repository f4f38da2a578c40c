"""Device functions and a launch that the kernels share."""

from typing import Any

import torch
import triton
import triton.language as tl

from gradiometer.columns import TENSORS, Cursor
from gradiometer.kernels import tuning
from gradiometer.kernels.compensated import add_counts, add_product, add_tile, larger

DTYPES: dict[Any, Any] = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
# indices of columns, as defaults of arguments, see finalize.py
NUMEL, SUMSQ = TENSORS.index["numel"], TENSORS.index["sumsq"]
NAN, POSINF, NEGINF = TENSORS.index["n_nan"], TENSORS.index["n_posinf"], TENSORS.index["n_neginf"]
TOP = TENSORS.index["abs_max"]
# integers with the bits of an element, by its size in bytes
WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16}

_STEP = tl.constexpr(int(Cursor.STEP))
_EVERY = tl.constexpr(int(Cursor.EVERY))
_PROJECT_EVERY = tl.constexpr(int(Cursor.PROJECT_EVERY))


@triton.jit
def row_of(chunk, table_ptr, num_tensors):
    """Return the row of a chunk's tensor."""
    return tl.load((table_ptr + 4 * num_tensors).to(tl.pointer_type(tl.int32)) + chunk).to(tl.int64)


@triton.jit
def locate(chunk, pointers_ptr, table_ptr, num_tensors, ITEMSIZE: tl.constexpr):
    """Return the address of a chunk's first element, and the number of its elements.

    The first chunk also has the elements before the first 16-byte boundary of a view that begins elsewhere,
    so that all others begin at a boundary. The last chunk may then be empty.
    """
    row = row_of(chunk, table_ptr, num_tensors)
    size = tl.load(table_ptr + num_tensors + row)
    start = (chunk - tl.load(table_ptr + 2 * num_tensors + row)) * size
    address = tl.load(pointers_ptr + row)
    head = (-address & 15) // ITEMSIZE
    begin = tl.where(start > 0, start + head, 0)
    n = tl.maximum(tl.minimum(tl.load(table_ptr + row), start + size + head) - begin, 0)
    return address + begin * ITEMSIZE, n.to(tl.int32)


@triton.jit
def is_due(cursor_ptr):
    """Return whether the current step is due; see gradiometer.columns.Cursor."""
    every = tl.load(cursor_ptr + _EVERY).to(tl.int64)
    return tl.load(cursor_ptr + _STEP).to(tl.int64) % every == 0


@triton.jit
def is_projected(cursor_ptr):
    """Return whether projections are due in the current step; see gradiometer.columns.Cursor."""
    step = tl.load(cursor_ptr + _STEP).to(tl.int64)
    every, of_them = tl.load(cursor_ptr + _EVERY), tl.load(cursor_ptr + _PROJECT_EVERY)
    divides = step % tl.maximum(every, 1.0).to(tl.int64) == 0
    divides &= step % tl.maximum(of_them, 1.0).to(tl.int64) == 0
    return divides & (every > 0) & (of_them > 0)


@triton.jit
def add_to(pointer, value):
    """Add to numbers in memory that no other program changes."""
    tl.store(pointer, tl.load(pointer) + value)


@triton.jit
def finishes_last(counter_ptr):
    """Return whether this program is the last to call this; it can then read what all of them wrote."""
    # all threads write before the addition, and read after it
    tl.debug_barrier()
    others = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return others == tl.num_programs(0) - 1


@triton.jit
def merged(partials_ptr, programs, NUM_SUMS: tl.constexpr, MERGED: tl.constexpr, MAX_PROGRAMS: tl.constexpr):
    """Return the sums and the maximum over programs, of partials ``(NUM_SUMS + 1, MAX_PROGRAMS)``.

    A program adds them in a fixed order, whichever it is, so it can be the one that finishes last.
    """
    offs = tl.arange(0, MERGED)
    sums = tl.zeros((NUM_SUMS, MERGED), tl.float64)
    tops = tl.zeros((MERGED,), tl.float64)
    rows = partials_ptr + tl.arange(0, NUM_SUMS)[:, None] * MAX_PROGRAMS + offs[None, :]
    for i in range(0, programs, MERGED):
        mask = offs < programs - i
        sums += tl.load(rows + i, mask=mask[None, :], other=0.0)
        read = tl.load(partials_ptr + NUM_SUMS * MAX_PROGRAMS + (i + offs), mask=mask, other=0.0)
        tops = tl.maximum(tops, read)
    return tl.sum(sums, 1), tl.max(tops)


@triton.jit
def is_finite(x):
    """Return whether x is neither NaN nor infinite: comparisons with NaN are false."""
    return tl.abs(x) < float("inf")


@triton.jit
def halves(word, DTYPE: tl.constexpr):
    """Convert two bf16 or fp16 values, read as one int32, to fp32."""
    if DTYPE == tl.float16:
        low = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        # a bf16 is the upper half of an fp32
        low = (word << 16).to(tl.float32, bitcast=True)
        # 0xffff0000
        high = (word & -65536).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def accumulate(x, totals, COMPENSATED: tl.constexpr, EXACT_SQUARE: tl.constexpr):
    """Add a tile to lane-wise totals: largest |x|, count of zeros, sum of squares, sum.

    Both sums are fp64, or, if COMPENSATED, fp32 totals, which may have fewer lanes. EXACT_SQUARE: fp32 holds
    the square of each x.
    """
    top, zeros, sumsq, total = totals
    if COMPENSATED:
        sumsq = add_product(sumsq, x, x, EXACT_SQUARE)
        total = add_tile(total, x, None)
        top = larger(top, tl.abs(x))
        zeros = add_counts(zeros, tl.where(x == 0, 1.0, 0.0))
    else:
        wide = x.to(tl.float64)
        # the square of an fp32, bf16 or fp16 value is exact in fp64: fused or not, the bits are the same
        sumsq = tl.fma(wide, wide, sumsq)
        total += wide
        # the maximum drops NaN: a chunk that holds one is read again
        top = tl.maximum(top, tl.abs(x))
        # counts in fp32 are exact up to 2**24, and cost an instruction less than in integers
        zeros += tl.where(x == 0, 1.0, 0.0)
    return top, zeros, sumsq, total


def merge_chunks(
    kernel: Any,
    table: torch.Tensor,
    partials: torch.Tensor,
    num_tensors: int,
    width: int,
    tuned: tuning.Tiles,
    **options: Any,
) -> torch.Tensor:
    """Launch a kernel that merges the partials of each tensor's chunks into its row; return all rows."""
    rows = torch.empty((num_tensors, width), dtype=partials.dtype, device=partials.device)
    sizes = num_tensors, partials.shape[1]
    options |= tuning.options(tuned.threads, tuned.registers, partials.device)
    kernel[(num_tensors,)](table, partials, rows, *sizes, COLUMNS=width, TILE=tuned.tile, **options)
    return rows
