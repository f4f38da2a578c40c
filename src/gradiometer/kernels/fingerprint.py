"""Fingerprints in the moments kernel's read, and the launch that merges those of a tensor's chunks.

`gradiometer.columns.fingerprint` defines the sums. A tile has n words, one for each lane. For each tile, a
lane adds its word to a word sum, multiplies a weighted sum by m**-n, and adds the word sum to it: Horner's
rule. A word k tiles before the last then has weight 1 + m**-n + ... + m**-(k n). At the end of a chunk,
`chunk_sums` turns these into weights as if the last tile began the tensor, and the merge moves it to its
position.
"""

import torch
import triton
import triton.language as tl

from gradiometer.columns.fingerprint import (
    MIX_SHIFT,
    MULTIPLIER,
    NUM_FINGERPRINT_COLUMNS,
    POSITION_BITS,
    signed,
)
from gradiometer.kernels import tuning
from gradiometer.kernels.primitives import merge_chunks

# of a chunk: the position of its last tile, in words, its number of bytes, and both sums
NUM_FINGERPRINT_PARTIALS = 4

_MIX_SHIFT = tl.constexpr(MIX_SHIFT)
_MULTIPLIER = tl.constexpr(signed(MULTIPLIER))
_POSITION_BITS = tl.constexpr(POSITION_BITS)


@triton.jit
def _powers(i, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Return m**k and 1 + m + ... + m**(k - 1); k has the bits FIRST ... LAST - 1 of i, int64."""
    # for k = 2**bit
    power, total = tl.full((), _MULTIPLIER, tl.int64), tl.full((), 1, tl.int64)
    none = i.to(tl.int64) * 0
    powers, totals = none + 1, none
    for bit in tl.static_range(LAST):
        if bit >= FIRST:
            is_set = (i >> bit) & 1 != 0
            totals = tl.where(is_set, totals + powers * total, totals)
            powers = tl.where(is_set, powers * power, powers)
        total += total * power
        power *= power
    return powers, totals


@triton.jit
def split_words(x, LANES: tl.constexpr):
    """Return LANES words of 8 bytes, each in adjacent elements of x, as lower and upper halves, uint32."""
    if x.dtype.primitive_bitwidth == 64:
        word = x.to(tl.uint64, bitcast=True)
        low, high = word.to(tl.uint32), (word >> 32).to(tl.uint32)
    else:
        if x.dtype.primitive_bitwidth == 16:
            first, second = tl.split(tl.reshape(x.to(tl.uint16, bitcast=True), (2 * LANES, 2)))
            half = first.to(tl.uint32) | (second.to(tl.uint32) << 16)
        else:
            half = x.to(tl.uint32, bitcast=True)
        low, high = tl.split(tl.reshape(half, (LANES, 2)))
    return low, high


@triton.jit
def add_words(low, high, sums, STEP: tl.constexpr):
    """Add a tile of n words, given as halves, to the lane-wise sums; STEP is m**-n."""
    word_sum, weighted_sum = sums
    # x ^ (x >> 33)
    low = low ^ (high >> (_MIX_SHIFT - 32))
    word = low.to(tl.int64) | (high.to(tl.int64) << 32)
    word_sum += word
    return word_sum, weighted_sum * STEP + word_sum


@triton.jit
def chunk_sums(lanes, sums, BITS: tl.constexpr):
    """Return a chunk's sums, weighted as if its last tile began the tensor; there are n = 2**BITS lanes."""
    word_sum, weighted_sum = sums
    # the first word of the tile that is k tiles before the last has weight -(m**-1 + ... + m**-(k n - 1)),
    # which is 1 + m (1 + m + ... + m**(n - 1)) (1 - its weight so far)
    power, total = _powers(tl.full((), 1 << BITS, tl.int32), BITS, BITS + 1)
    first = word_sum + _MULTIPLIER * total * (word_sum - weighted_sum)
    # a thread's two lanes share the powers of all bits but the first
    even, evens = _powers(lanes, 1, BITS)
    odd, odds = _powers(lanes, 0, 1)
    power, total = even * odd, evens + even * odds
    return tl.sum(word_sum), tl.sum(total * word_sum + power * first)


@triton.jit(do_not_specialize=["num_tensors", "num_chunks"])
def _merge_kernel(
    table_ptr,  # see ops/launch_plans.py
    partials_ptr,  # (4, N) int64
    out_ptr,  # (T, 3) int64
    num_tensors: tl.int32,
    num_chunks: tl.int32,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(table_ptr + 2 * num_tensors + row)
    count = tl.load(table_ptr + 3 * num_tensors + row).to(tl.int32)
    size = num_chunks.to(tl.int64)
    offs = tl.arange(0, TILE)
    n_bytes = tl.zeros((TILE,), tl.int64)
    word_sum = tl.zeros((TILE,), tl.int64)
    weighted_sum = tl.zeros((TILE,), tl.int64)
    for i in range(0, count, TILE):
        mask = offs < count - i
        chunk = partials_ptr + first + (i + offs)
        position = tl.load(chunk, mask=mask, other=0)
        n_bytes += tl.load(chunk + size, mask=mask, other=0)
        chunk_sum = tl.load(chunk + 2 * size, mask=mask, other=0)
        word_sum += chunk_sum
        power, total = _powers(position, 0, _POSITION_BITS)
        weighted_sum += total * chunk_sum + power * tl.load(chunk + 3 * size, mask=mask, other=0)
    out = out_ptr + row * COLUMNS
    tl.store(out, tl.sum(n_bytes))
    tl.store(out + 1, tl.sum(word_sum))
    tl.store(out + 2, tl.sum(weighted_sum))


def finalize_fingerprints(table: torch.Tensor, partials: torch.Tensor, num_tensors: int) -> torch.Tensor:
    """Merge the partials of all chunks into a fingerprint for each tensor, ``(T, 3) int64``."""
    return merge_chunks(_merge_kernel, table, partials, num_tensors, NUM_FINGERPRINT_COLUMNS, tuning.FINALIZE)
