"""What a tile of pairs adds to a chunk's totals, and the sums of these over all lanes.

Totals are in the order of `PAIR_PARTIALS` in pairs.py without NaN and Inf, with the largest |u| first; saa is
the sum of a * a, and so on.
"""

import triton
import triton.language as tl

from gradiometer.kernels.compensated import (
    add_counts,
    add_product,
    add_tile,
    joined,
    larger,
    largest_magnitude,
    square,
    two_product,
    two_sum,
)
from gradiometer.kernels.primitives import is_finite


@triton.jit
def add(a, b, g, same, totals, HAS_G: tl.constexpr):
    """Add a tile to lane-wise totals in fp64."""
    top, saa, sbb, sab, suu, su, unchanged, sgg, sug, nonzero, stuck = totals
    wide_a, wide_b = a.to(tl.float64), b.to(tl.float64)
    u = wide_a - wide_b
    saa = tl.fma(wide_a, wide_a, saa)
    sbb = tl.fma(wide_b, wide_b, sbb)
    sab = tl.fma(wide_a, wide_b, sab)
    suu = tl.fma(u, u, suu)
    su += u
    top = tl.maximum(top, tl.abs(u))
    # counts in fp32 are exact up to 2**24, and cost an instruction less than in integers
    unchanged += tl.where(same, 1.0, 0.0)
    if HAS_G:
        wide_g = g.to(tl.float64)
        sgg = tl.fma(wide_g, wide_g, sgg)
        sug = tl.fma(u, wide_g, sug)
        one = tl.where(g != 0, 1.0, 0.0)
        nonzero += one
        stuck += tl.where(same, one, 0.0)
    return top, saa, sbb, sab, suu, su, unchanged, sgg, sug, nonzero, stuck


@triton.jit
def add_compensated(a, b, g, same, totals, EXACT_PRODUCT: tl.constexpr, HAS_G: tl.constexpr):
    """Add a tile to totals as above, whose sums are compensated; then the largest |a| and |b|.

    The difference of a and b, u + rest, is exact. EXACT_PRODUCT: fp32 holds the products of a, b and g.
    """
    top, saa, sbb, sab, suu, su, unchanged, sgg, sug, nonzero, stuck, top_a, top_b = totals
    u, rest = two_sum(a, -b)
    saa = add_product(saa, a, a, EXACT_PRODUCT)
    sbb = add_product(sbb, b, b, EXACT_PRODUCT)
    sab = add_product(sab, a, b, EXACT_PRODUCT)
    high, low = square(u, rest)
    suu = add_tile(suu, high, low)
    su = add_tile(su, u, rest)
    top = largest_magnitude(top, u, rest)
    unchanged = add_counts(unchanged, tl.where(same, 1.0, 0.0))
    if HAS_G:
        sgg = add_product(sgg, g, g, EXACT_PRODUCT)
        high, low = two_product(u, g)
        sug = add_tile(sug, high, tl.fma(rest, g, low))
        one = tl.where(g != 0, 1.0, 0.0)
        nonzero = add_counts(nonzero, one)
        stuck = add_counts(stuck, tl.where(same, one, 0.0))
    top_a, top_b = larger(top_a, tl.abs(a)), larger(top_b, tl.abs(b))
    return top, saa, sbb, sab, suu, su, unchanged, sgg, sug, nonzero, stuck, top_a, top_b


@triton.jit
def sums_of(totals):
    """Return the totals of all lanes."""
    top, saa, sbb, sab, suu, su, unchanged, sgg, sug, nonzero, stuck = totals
    return (
        tl.max(top),
        tl.sum(saa),
        tl.sum(sbb),
        tl.sum(sab),
        tl.sum(suu),
        tl.sum(su),
        tl.sum(unchanged.to(tl.float64)),
        tl.sum(sgg),
        tl.sum(sug),
        tl.sum(nonzero.to(tl.float64)),
        tl.sum(stuck.to(tl.float64)),
    )


@triton.jit
def compensated_sums(totals, n, LEAST_SQUARE: tl.constexpr):
    """Return the totals of all lanes, as `sums_of` does, and whether the chunk has to be read again."""
    top, saa, sbb, sab, suu, su, unchanged, sgg, sug, nonzero, stuck, top_a, top_b = totals
    sums = (
        tl.max(top[0].to(tl.float64) + top[1].to(tl.float64)),
        joined(saa),
        joined(sbb),
        joined(sab),
        joined(suu),
        joined(su),
        tl.sum(unchanged.to(tl.float64)),
        joined(sgg),
        joined(sug),
        tl.sum(nonzero.to(tl.float64)),
        tl.sum(stuck.to(tl.float64)),
    )
    top, saa, sbb, sab, suu, su, unchanged, sgg, sug, nonzero, stuck = sums
    least = n.to(tl.float64) * LEAST_SQUARE
    again = (saa < least) & (tl.max(top_a) > 0)
    again = again | ((sbb < least) & (tl.max(top_b) > 0))
    again = again | ((suu < least) & (top > 0)) | ((sgg < least) & (nonzero > 0))
    # products of finite numbers may overflow, too
    return sums, again | (is_finite(saa + sbb + sab + suu + su + sgg + sug) == 0)
