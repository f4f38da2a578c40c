"""Partial statistics of every chunk, in one pass over memory.

For a chunk of tensor x: sum x_i**2 and sum x_i in fp64, counts of zeros, NaN, +Inf and -Inf, and
max |x_i|, over finite elements. Reads each element once (a chunk with NaN or Inf twice), and writes
seven float64 a chunk: ``partials (7, N)``, in the order of `PARTIALS`.

Optimistic: fp64 holds the square of every fp32, bf16 and fp16 value, so a chunk's sum of squares is
finite exactly when all its elements are. The main loop has no mask and no NaN or Inf counter; a
chunk whose sum is not finite is read again by the counting path. (fp64 elements beyond 1e154
overflow their square: such a chunk is read again too, and its sum of squares is inf.)
"""

import torch
import triton
import triton.language as tl

from gradiometer.kernels.primitives import accumulate, is_finite
from gradiometer.kernels.tuning import CHUNK, MOMENTS_THREADS, TILE, warps
from gradiometer.schema import COLUMN_NAMES

__all__ = ["PARTIALS", "moments"]

# every raw column but numel, which is known
PARTIALS = COLUMN_NAMES[1:]

_DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit(do_not_specialize=["first_chunk", "num_tensors", "num_chunks"])
def _moments_kernel(
    pointers_ptr,  # (T,) int64
    table_ptr,  # (3 * T + N,) int64, see pack.Layout
    partials_ptr,  # (7, N) float64
    first_chunk: tl.int32,
    num_tensors: tl.int32,
    num_chunks: tl.int32,
    DTYPE: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    chunk = first_chunk + tl.program_id(0)
    row = tl.load(table_ptr + 3 * num_tensors + chunk)
    start = (chunk - tl.load(table_ptr + num_tensors + row)) * CHUNK
    n = tl.minimum(tl.load(table_ptr + row) - start, CHUNK).to(tl.int32)
    address = tl.load(pointers_ptr + row) + start * ITEMSIZE
    lanes = tl.arange(0, TILE)

    # fp16 and bf16 are compared as fp32: the same values, and native on every device
    NARROW: tl.constexpr = tl.float64 if ITEMSIZE == 8 else tl.float32
    sumsq = tl.zeros((TILE,), tl.float64)
    total = tl.zeros((TILE,), tl.float64)
    top = tl.zeros((TILE,), NARROW)
    zeros = tl.zeros((TILE,), tl.int32)

    # a view may begin anywhere: its first elements up to a 16-byte boundary are taken apart
    head = (-address & 15).to(tl.int32) // ITEMSIZE
    head = tl.minimum(head, n)
    if head > 0:
        base = address.to(tl.pointer_type(DTYPE))
        x = tl.load(base + lanes, mask=lanes < head, other=0.0).to(NARROW)
        sumsq, total, top, zeros = accumulate(x, sumsq, total, top, zeros)
        zeros -= (lanes >= head).to(tl.int32)

    aligned = tl.multiple_of((address + head * ITEMSIZE).to(tl.pointer_type(DTYPE)), 16)
    full = (n - head) // TILE
    for i in range(full):
        x = tl.load(aligned + (i * TILE + lanes)).to(NARROW)
        sumsq, total, top, zeros = accumulate(x, sumsq, total, top, zeros)

    left = n - head - full * TILE
    if left > 0:
        x = tl.load(aligned + (full * TILE + lanes), mask=lanes < left, other=0.0).to(NARROW)
        sumsq, total, top, zeros = accumulate(x, sumsq, total, top, zeros)
        zeros -= (lanes >= left).to(tl.int32)

    chunk_sumsq = tl.sum(sumsq)
    chunk_total = tl.sum(total)
    chunk_top = tl.max(top).to(tl.float64)
    chunk_zeros = tl.sum(zeros)
    chunk_nan = 0
    chunk_posinf = 0
    chunk_neginf = 0

    if not is_finite(chunk_sumsq):
        base = address.to(tl.pointer_type(DTYPE))
        sumsq = tl.zeros((TILE,), tl.float64)
        total = tl.zeros((TILE,), tl.float64)
        top = tl.zeros((TILE,), NARROW)
        nan = tl.zeros((TILE,), tl.int32)
        posinf = tl.zeros((TILE,), tl.int32)
        neginf = tl.zeros((TILE,), tl.int32)
        zeros = tl.zeros((TILE,), tl.int32)
        for i in range(tl.cdiv(n, TILE)):
            offs = i * TILE + lanes
            # 1.0 stands for what is not there: neither zero nor non-finite
            x = tl.load(base + offs, mask=offs < n, other=1.0).to(NARROW)
            nan += (x != x).to(tl.int32)
            posinf += (x == float("inf")).to(tl.int32)
            neginf += (x == -float("inf")).to(tl.int32)
            zeros += (x == 0).to(tl.int32)
            x = tl.where(is_finite(x) & (offs < n), x, 0.0)
            wide = x.to(tl.float64)
            sumsq = tl.fma(wide, wide, sumsq)
            total += wide
            top = tl.maximum(top, tl.abs(x))
        chunk_sumsq = tl.sum(sumsq)
        chunk_total = tl.sum(total)
        chunk_top = tl.max(top).to(tl.float64)
        chunk_zeros = tl.sum(zeros)
        chunk_nan = tl.sum(nan)
        chunk_posinf = tl.sum(posinf)
        chunk_neginf = tl.sum(neginf)

    # the order of PARTIALS
    out = partials_ptr + chunk
    stride = num_chunks.to(tl.int64)
    tl.store(out, chunk_sumsq)
    tl.store(out + stride, chunk_total)
    tl.store(out + 2 * stride, chunk_zeros.to(tl.float64))
    tl.store(out + 3 * stride, chunk_nan.to(tl.float64))
    tl.store(out + 4 * stride, chunk_posinf.to(tl.float64))
    tl.store(out + 5 * stride, chunk_neginf.to(tl.float64))
    tl.store(out + 6 * stride, chunk_top)


def moments(
    pointers: torch.Tensor,
    table: torch.Tensor,
    partials: torch.Tensor,
    dtype: torch.dtype,
    first_chunk: int,
    num_chunks: int,
    num_tensors: int,
) -> None:
    """Write the partials of one dtype's chunks.

    Args:
        pointers: ``(T,) int64``, the tensors' addresses.
        table: int64, a `gradiometer.pack.Layout`'s table.
        partials: ``(7, N) float64``, written at columns ``first_chunk ... first_chunk + num_chunks - 1``.
        dtype: of the tensors that these chunks belong to.
        first_chunk: the group's first chunk.
        num_chunks: the group's number of chunks.
        num_tensors: T.
    """
    _moments_kernel[(num_chunks,)](
        pointers,
        table,
        partials,
        first_chunk,
        num_tensors,
        partials.shape[1],
        DTYPE=_DTYPES[dtype],
        ITEMSIZE=dtype.itemsize,
        CHUNK=CHUNK,
        TILE=TILE[dtype.itemsize],
        num_warps=warps(MOMENTS_THREADS),
        enable_fp_fusion=False,
    )
