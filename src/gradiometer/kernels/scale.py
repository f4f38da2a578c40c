"""Multiply tensors in place by one coefficient, or by one for each, in one pass over memory.

fp64 elements become ``x_i * c`` in fp64. fp32, bf16 and fp16 elements become ``(x_i * high) * low``,
computed in fp32 and rounded to their format once. ``high * low = c``, and low is 1 unless c is below the
normal numbers of fp32. Reads and writes each element once; with c = 1 it touches none.

The chunks are processed in reverse order: those that the moments kernel has read last may still be in L2.
"""

import torch
import triton
import triton.language as tl

from gradiometer.kernels import tuning
from gradiometer.kernels.primitives import locate, row_of

_READ_AS = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.int16,
    torch.float16: tl.float16,
}

# the smallest normal fp32 number, and the factor that lifts smaller ones into the normal range
_TINY = 2.0**-126
_LIFT = 2.0**126


@triton.jit
def _scaled(x, factor, high, low):
    """Multiply fp64, fp32 or fp16 numbers, or bf16 ones that were read as int16."""
    if x.dtype == tl.float64:
        y = x * factor
    elif x.dtype == tl.int16:
        # bf16 is the upper half of fp32. Integer operations round it to nearest even in the interpreter too,
        # whose own conversion truncates
        wide = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True) * high * low
        bits = wide.to(tl.int32, bitcast=True)
        y = (tl.where(wide == wide, bits + 0x7FFF + ((bits >> 16) & 1), bits) >> 16).to(tl.int16)
    else:
        y = (x.to(tl.float32) * high * low).to(x.dtype)
    return y


@triton.jit(do_not_specialize=["last_chunk", "num_tensors"])
def _scale_kernel(
    pointers_ptr,  # (T,) int64
    table_ptr,  # see ops/launch_plans.py
    factor_ptr,  # () float64, or (T,) if PER_TENSOR
    last_chunk: tl.int32,
    num_tensors: tl.int32,
    DTYPE: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    TILE: tl.constexpr,
    PER_TENSOR: tl.constexpr,
    TINY: tl.constexpr = _TINY,
    LIFT: tl.constexpr = _LIFT,
):
    chunk = last_chunk - tl.program_id(0)
    if PER_TENSOR:
        factor_ptr += row_of(chunk, table_ptr, num_tensors)
    factor = tl.load(factor_ptr)
    # most training steps are not clipped
    if factor != 1.0:
        # gradiometer.control.scale splits the factor in the same way
        below = factor < TINY
        high = tl.where(below, factor * LIFT, factor).to(tl.float32)
        low = tl.where(below, TINY, 1.0).to(tl.float32)
        address, n = locate(chunk, pointers_ptr, table_ptr, num_tensors, ITEMSIZE)
        lanes = tl.arange(0, TILE)

        # a view may begin anywhere: its first elements, up to a 16-byte boundary, are scaled separately
        head = tl.minimum((-address & 15).to(tl.int32) // ITEMSIZE, n)
        base = address.to(tl.pointer_type(DTYPE))
        if head > 0:
            first = tl.arange(0, 16 // ITEMSIZE)
            x = tl.load(base + first, mask=first < head, other=0)
            tl.store(base + first, _scaled(x, factor, high, low), mask=first < head)

        # no mask: it would split loads and stores
        full = (n - head) // TILE
        ptrs = tl.multiple_of((address + head * ITEMSIZE).to(tl.pointer_type(DTYPE)), 16) + lanes
        for _ in range(full):
            tl.store(ptrs, _scaled(tl.load(ptrs), factor, high, low))
            ptrs += TILE

        # masked elements cost as much as others: use smaller tiles
        few = tl.arange(0, TILE // 4)
        for i in range(head + full * TILE, n, TILE // 4):
            x = tl.load(base + (i + few), mask=few < n - i, other=0)
            tl.store(base + (i + few), _scaled(x, factor, high, low), mask=few < n - i)


def scale(
    pointers: torch.Tensor,
    table: torch.Tensor,
    factor: torch.Tensor,
    dtype: torch.dtype,
    first_chunk: int,
    num_chunks: int,
    num_tensors: int,
) -> None:
    """Multiply one group's chunks in place by a factor, or by that of each tensor; at most 1."""
    tile, threads, registers = tuning.SCALE[dtype]
    _scale_kernel[(num_chunks,)](
        pointers,
        table,
        factor,
        first_chunk + num_chunks - 1,
        num_tensors,
        DTYPE=_READ_AS[dtype],
        ITEMSIZE=dtype.itemsize,
        TILE=tile,
        PER_TENSOR=factor.dim() > 0,
        **tuning.options(threads, registers, factor.device),
    )
