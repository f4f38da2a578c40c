"""Sums of fp32 numbers that are as accurate as fp64 sums, for GPUs with few fp64 units.

A term is ``high + low``. A thread adds its terms of a tile in a tree: an error-free transformation gives the
rounding error of each addition of high parts, and the low parts and these errors are added in fp32. The
result is added to a total of three fp32 numbers, without loss: SumK with K = 3 of Ogita, Rump and Oishi,
"Accurate sum and dot product", 2005. At the end fp64 additions join the three.

Error bound, with u = 2**-24 and S the sum of the terms' magnitudes. Let low parts be at most c u times the
high ones: c is 0 for exact terms, 1 for products and squares, 2 for a product with a difference. After k
levels of the tree they are at most (c + k) u S, and level k + 1 adds them with two roundings, which lose
(c + k) u**2 S and (c + k + 1) u**2 S. So a tree of 8 terms loses at most (6 c + 9) u**2 S. A product with a
difference has lost 2 u**2 of itself before, and the square of a difference 4 u**2. Totals lose less than
0.6 u**2 S in 128 tiles. So the bound is 23.6 u**2 S < 8.4e-14 S, beside less than 1e-14 S for the fp64
additions of 2**24 elements.

Underflow: a product may lose up to 2**-149. Where the mean of positive terms is below `LEAST_SQUARE`,
kernels read the elements again and add them in fp64. Otherwise it is at most 4 u**2 S for squares, whose
other losses are at most 19.6 u**2 S.
"""

import triton
import triton.language as tl

# the least mean of positive terms of which 2**-149 is at most 2**-46
LEAST_SQUARE = 2.0**-103


@triton.jit
def two_sum(a, b):
    """Return ``a + b``, rounded, and the rounding error, which is exact (Knuth)."""
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


@triton.jit
def two_product(a, b):
    """Return ``a * b``, rounded, and the rounding error, which is exact if nothing underflows."""
    product = a * b
    return product, tl.fma(a, b, -product)


@triton.jit
def square(high, low):
    """Return the square of ``high + low``; without ``low**2``, which is at most 2**-48 of it."""
    product, error = two_product(high, high)
    low = tl.fma(high, 2 * low, error)
    # the rounding error is exact, since low is the smaller one (Dekker)
    total = product + low
    return total, low - (total - product)


@triton.jit
def _halved(x):
    """Return the elements with even and with odd indices, which the same thread holds."""
    HALF: tl.constexpr = x.shape[0] // 2
    return tl.split(tl.reshape(x, (HALF, 2)))


@triton.jit
def add_tile(total, high, low):
    """Add the elements of a tile, ``high + low``, to a lane-wise total; ``low`` None means 0."""
    first, second, third = total
    for _ in tl.static_range(3):
        if high.shape[0] > first.shape[0]:
            a, b = _halved(high)
            high, error = two_sum(a, b)
            if low is None:
                low = error
            else:
                a, b = _halved(low)
                low = (a + b) + error
    first, error = two_sum(first, high)
    second, error = two_sum(second, error)
    third += error
    if low is not None:
        second, error = two_sum(second, low)
        third += error
    return first, second, third


@triton.jit
def add_product(total, x, y, EXACT: tl.constexpr):
    """Add the products of two tiles to a total. EXACT: fp32 holds them."""
    if EXACT:
        total = add_tile(total, x * y, None)
    else:
        high, low = two_product(x, y)
        total = add_tile(total, high, low)
    return total


@triton.jit
def add_counts(total, counts):
    """Add numbers whose sum is exact."""
    for _ in tl.static_range(3):
        if counts.shape[0] > total.shape[0]:
            a, b = _halved(counts)
            counts = a + b
    return total + counts


@triton.jit
def larger(total, x):
    """Return the lane-wise maxima; they drop NaN."""
    for _ in tl.static_range(3):
        if x.shape[0] > total.shape[0]:
            a, b = _halved(x)
            x = tl.maximum(a, b)
    return tl.maximum(total, x)


@triton.jit
def _larger_pair(a, b):
    high_a, low_a = a
    high_b, low_b = b
    is_larger = (high_b > high_a) | ((high_b == high_a) & (low_b > low_a))
    return tl.where(is_larger, high_b, high_a), tl.where(is_larger, low_b, low_a)


@triton.jit
def largest_magnitude(total, high, low):
    """Return the lane-wise largest ``|high + low|`` as high and low parts; it drops NaN."""
    # low gets the sign that makes high positive
    sign = high.to(tl.int32, bitcast=True) & -(2**31)
    low = (low.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
    high = tl.abs(high)
    for _ in tl.static_range(3):
        if high.shape[0] > total[0].shape[0]:
            high_a, high_b = _halved(high)
            low_a, low_b = _halved(low)
            high, low = _larger_pair((high_a, low_a), (high_b, low_b))
    return _larger_pair(total, (high, low))


@triton.jit
def joined(total):
    """Return the sum over all lanes in fp64."""
    return tl.sum(total[0].to(tl.float64) + (total[1].to(tl.float64) + total[2].to(tl.float64)))
