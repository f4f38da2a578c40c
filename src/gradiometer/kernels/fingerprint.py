"""Fingerprints in the moments kernel's read, and the launch that merges those of a tensor's chunks.

`gradiometer.columns.fingerprint` defines the sums. Lane l reads the words at s + l for the first word s of
each tile. Since m**(s + l) = m**l m**s, it adds up its words times m**s, which is the same for all lanes, and
multiplies by m**l at the end of the chunk.
"""

import torch
import triton
import triton.language as tl

from gradiometer.columns.fingerprint import (
    MIX_SHIFT,
    MULTIPLIER,
    NUM_FINGERPRINT_COLUMNS,
    POSITION_BITS,
    WORD_BYTES,
    signed,
)
from gradiometer.kernels import tuning

__all__ = [
    "NUM_FINGERPRINT_PARTIALS",
    "add_words",
    "chunk_sums",
    "first_power",
    "merge_fingerprints",
    "next_power",
    "split_words",
    "zero_sums",
]

# of a chunk: its first byte in the tensor, its number of bytes, and both sums
NUM_FINGERPRINT_PARTIALS = 4

_MIX_SHIFT = tl.constexpr(MIX_SHIFT)
_MULTIPLIER = tl.constexpr(signed(MULTIPLIER))
_POSITION_BITS = tl.constexpr(POSITION_BITS)
_WORD_BYTES = tl.constexpr(WORD_BYTES)


@triton.jit
def _powers(i, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Return m**i for the integers that have the bits FIRST ... LAST - 1 of i, int64."""
    factor = tl.full((), _MULTIPLIER, tl.int64)
    found = i.to(tl.int64) * 0 + 1
    for bit in tl.static_range(LAST):
        if bit >= FIRST:
            found = tl.where((i >> bit) & 1 != 0, found * factor, found)
        factor = factor * factor
    return found


@triton.jit
def first_power(words):
    """Return m**words as two uint32, the lower half first."""
    power = _powers(words, 0, 1)
    return power.to(tl.uint32), (power >> 32).to(tl.uint32)


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
def zero_sums(LANES: tl.constexpr):
    """Return the lane-wise sums of no words: of words, and of products in even and in odd tiles."""
    zero = tl.zeros((LANES,), tl.uint64)
    none = tl.zeros((LANES,), tl.uint32)
    return zero, (zero, none, none), (zero, none, none)


@triton.jit
def add_words(low, high, power, sums, odd: tl.constexpr):
    """Add a tile of words, given as halves, to the sums of even or odd tiles.

    power: m**s for the first word s of the last even tile, as two uint32.
    """
    word_sum, even, odds = sums
    # a bijection, after which a change of one half changes the lower half; one funnel shift
    low = low ^ high ^ ((high << _MIX_SHIFT) | (low >> (32 - _MIX_SHIFT)))
    word_sum += low.to(tl.uint64) + (high.to(tl.uint64) << 32)
    if odd:
        odds = _add_product(low, high, power, odds)
    else:
        even = _add_product(low, high, power, even)
    return word_sum, even, odds


@triton.jit
def _add_product(low, high, power, sums):
    # of the products of halves, two only add to the upper half; apart from each other, so that each is added
    # in the instruction that multiplies
    product, crossed, other = sums
    product += low.to(tl.uint64) * power[0].to(tl.uint64)
    return product, crossed + low * power[1], other + high * power[0]


@triton.jit
def _total(sums):
    product, crossed, other = sums
    return product + ((crossed + other).to(tl.uint64) << 32)


@triton.jit
def next_power(power, STEP: tl.constexpr):
    """Return the power of the next even tile; STEP is m**n for the n words of two tiles."""
    low, high = power
    LOW: tl.constexpr = STEP % 2**32
    HIGH: tl.constexpr = STEP // 2**32
    step = tl.full((), LOW, tl.uint32)
    high = high * step + tl.umulhi(low, step) + low * HIGH
    return low * step, high


@triton.jit
def chunk_sums(lanes, sums, BITS: tl.constexpr):
    """Return a chunk's word sum and weighted sum; there are 2**BITS lanes."""
    word_sum, even, odds = sums
    step = _powers(tl.full((), 1 << BITS, tl.int32), BITS, BITS + 1)
    weighted = _total(even).to(tl.int64) + step * _total(odds).to(tl.int64)
    # a thread's two lanes share the product of all bits but the first
    power = _powers(lanes, 1, BITS) * _powers(lanes, 0, 1)
    return tl.sum(word_sum.to(tl.int64)), tl.sum(weighted * power)


@triton.jit(do_not_specialize=["num_tensors", "num_chunks"])
def _merge_kernel(
    table_ptr,  # (4 * T + N,) int64, see packing.ChunkMap
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
        begin = tl.load(chunk, mask=mask, other=0)
        n_bytes += tl.load(chunk + size, mask=mask, other=0)
        chunk_sum = tl.load(chunk + 2 * size, mask=mask, other=0)
        word_sum += chunk_sum
        power = _powers(begin // _WORD_BYTES, 0, _POSITION_BITS)
        weighted_sum += power * tl.load(chunk + 3 * size, mask=mask, other=0)
    out = out_ptr + row * COLUMNS
    tl.store(out, tl.sum(n_bytes))
    tl.store(out + 1, tl.sum(word_sum))
    tl.store(out + 2, tl.sum(weighted_sum))


def merge_fingerprints(table: torch.Tensor, partials: torch.Tensor, num_tensors: int) -> torch.Tensor:
    """Merge the partials of all chunks into a fingerprint for each tensor.

    Args:
        table: int64, a `gradiometer.ops.packing.ChunkMap`'s table.
        partials: ``(4, N) int64``.
        num_tensors: T.

    Returns:
        ``(T, 3) int64``, see `gradiometer.columns.fingerprint.FINGERPRINT_COLUMNS`.
    """
    out = torch.empty((num_tensors, NUM_FINGERPRINT_COLUMNS), dtype=torch.int64, device=partials.device)
    tile, threads, registers = tuning.FINALIZE
    _merge_kernel[(num_tensors,)](
        table,
        partials,
        out,
        num_tensors,
        partials.shape[1],
        COLUMNS=NUM_FINGERPRINT_COLUMNS,
        TILE=tile,
        **tuning.options(threads, registers, partials.device),
    )
    return out
