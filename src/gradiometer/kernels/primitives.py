"""Device functions that the kernels share."""

import triton
import triton.language as tl

__all__ = ["accumulate", "is_finite"]


@triton.jit
def is_finite(x):
    """Neither NaN nor infinite: comparisons with NaN are false."""
    return tl.abs(x) < float("inf")


@triton.jit
def accumulate(x, sumsq, total, top, zeros):
    """Add a tile to lane-wise totals: sum of squares and sum in fp64, largest |x|, count of zeros."""
    wide = x.to(tl.float64)
    # the square of an fp32, bf16 or fp16 value is exact in fp64: fused or not, the same bits
    sumsq = tl.fma(wide, wide, sumsq)
    total += wide
    # drops NaN: a chunk that holds one is read again
    top = tl.maximum(top, tl.abs(x))
    zeros += (x == 0).to(tl.int32)
    return sumsq, total, top, zeros
