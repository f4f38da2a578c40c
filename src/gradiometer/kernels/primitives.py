"""Device functions that the kernels share."""

import triton
import triton.language as tl

__all__ = ["accumulate", "is_finite", "squared_fma"]


@triton.jit
def is_finite(x):
    # comparisons with NaN are false
    return tl.abs(x) < float("inf")


@triton.jit
def squared_fma(x, total):
    # one instruction; exact squares for fp32, bf16 and fp16, so that fusing changes no bit there
    return tl.fma(x, x, total)


@triton.jit
def accumulate(x, sumsq, total, top, zeros):
    """Add a tile to lane-wise totals: sum of squares and sum in fp64, largest |x|, count of zeros."""
    wide = x.to(tl.float64)
    sumsq = squared_fma(wide, sumsq)
    total += wide
    # drops NaN: a chunk that holds one is read again
    top = tl.maximum(top, tl.abs(x))
    zeros += (x == 0).to(tl.int32)
    return sumsq, total, top, zeros
