"""The sums of one chunk for projections, see projections.py."""

import triton
import triton.language as tl

from gradiometer.columns.projections import HIGH_FACTOR, SIGN_MIX
from gradiometer.kernels.primitives import halves, is_finite

# defaults of arguments, see finalize.py
(_SHIFT_0, _FACTOR_0), (_SHIFT_1, _FACTOR_1), (_SHIFT_2, _FACTOR_2), (_SHIFT_3, _) = SIGN_MIX
_HIGH = HIGH_FACTOR


@triton.jit
def _hash(
    low,
    key,
    added,
    SHIFT_0: tl.constexpr = _SHIFT_0,
    FACTOR_0: tl.constexpr = _FACTOR_0,
    SHIFT_1: tl.constexpr = _SHIFT_1,
    FACTOR_1: tl.constexpr = _FACTOR_1,
    SHIFT_2: tl.constexpr = _SHIFT_2,
    FACTOR_2: tl.constexpr = _FACTOR_2,
    SHIFT_3: tl.constexpr = _SHIFT_3,
):
    """Return `gradiometer.columns.sign_hash`; ``added``: the second key plus that of the upper half."""
    x = low ^ key
    x = (x ^ (x >> SHIFT_0)) * FACTOR_0 + added
    x = (x ^ (x >> SHIFT_1)) * FACTOR_1
    x = (x ^ (x >> SHIFT_2)) * FACTOR_2
    return x ^ (x >> SHIFT_3)


@triton.jit
def _add_if(total, x, bit, PREDICATED: tl.constexpr):
    """Return ``total + x`` where the bit is set."""
    if PREDICATED:
        # as a branch: the assembler makes one predicated addition of it, but of a predicated one a selection
        total = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.eq.b32 p, $3, 0; @p bra skip; add.rn.f64 $0, $1, $2; skip: }",
            "=d,0,d,r",
            [total, x, bit],
            dtype=tl.float64,
            is_pure=True,
            pack=1,
        )
    else:
        total = tl.where(bit != 0, total + x, total)
    return total


@triton.jit
def _add(x, word, sums, K: tl.constexpr, CHECKED: tl.constexpr, PREDICATED: tl.constexpr):
    """Add an element of each lane to its sums; CHECKED: leave out NaN and Inf, and count them."""
    sumsq, total, nonfinite, negative = sums
    if CHECKED:
        finite = is_finite(x)
        nonfinite += tl.where(finite, 0.0, 1.0)
        x = tl.where(finite, x, 0.0)
    wide = x.to(tl.float64)
    sumsq = tl.fma(wide, wide, sumsq)
    total += wide
    found = ()
    for j in tl.static_range(K):
        found = found + (_add_if(negative[j], wide, word & (1 << j), PREDICATED),)  # type: ignore[assignment]
    return sumsq, total, nonfinite, found


@triton.jit
def _elements(x, LANES: tl.constexpr):
    """Return the 2 or 4 elements that each thread holds of a tile, as a tuple."""
    if x.shape[0] == 2 * LANES:
        found = tl.split(tl.reshape(x, (LANES, 2)))
    else:
        even, odd = tl.split(tl.reshape(x, (LANES, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        found = first, second, third, fourth
    return found


@triton.jit
def _add_run(
    address,
    n,
    low,
    key,
    added,
    sums,
    DTYPE: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
    K: tl.constexpr,
    CHECKED: tl.constexpr,
    PREDICATED: tl.constexpr,
):
    """Add up n elements that are adjacent in memory and in the whole; ``low``: the index of the first."""
    NARROW: tl.constexpr = tl.float64 if ITEMSIZE == 8 else tl.float32
    # two numbers of 2 bytes are read as one word, see moments.py
    PAIRS: tl.constexpr = ITEMSIZE == 2
    EACH: tl.constexpr = 2 if PAIRS else 1
    WORD: tl.constexpr = tl.int32 if PAIRS else DTYPE
    # a thread's part of a tile is one load of 16 bytes
    WORDS: tl.constexpr = LANES * (2 if ITEMSIZE == 8 else 4)
    base = address.to(tl.pointer_type(DTYPE))
    head = tl.minimum((-address & 15).to(tl.int32) // ITEMSIZE, n)
    full = (n - head) // (WORDS * EACH * UNROLL)
    lanes = tl.arange(0, WORDS)
    # no mask: it would split the loads
    words = tl.multiple_of((address + head * ITEMSIZE).to(tl.pointer_type(WORD)), 16) + lanes
    index = low + head.to(tl.uint32) + lanes.to(tl.uint32) * EACH
    for _ in range(full):
        for u in tl.static_range(UNROLL):
            word = tl.load(words + u * WORDS)
            place = index + u * WORDS * EACH
            if PAIRS:
                even, odd = halves(word, DTYPE)
                evens, odds = _elements(even, LANES), _elements(odd, LANES)
                of_evens = _elements(_hash(place, key, added), LANES)
                of_odds = _elements(_hash(place + 1, key, added), LANES)
                for i in tl.static_range(4):
                    sums = _add(evens[i], of_evens[i], sums, K, CHECKED, PREDICATED)
                    sums = _add(odds[i], of_odds[i], sums, K, CHECKED, PREDICATED)
            else:
                xs, signs = _elements(word, LANES), _elements(_hash(place, key, added), LANES)
                for i in tl.static_range(WORDS // LANES):
                    sums = _add(xs[i], signs[i], sums, K, CHECKED, PREDICATED)
        words += UNROLL * WORDS
        index += UNROLL * WORDS * EACH
    # the elements before and after the tiles
    tiles = full * (WORDS * EACH * UNROLL)
    few = tl.arange(0, LANES)
    for i in range(0, n - tiles, LANES):
        place = i + few
        mask = place < n - tiles
        place = tl.where(place < head, place, place + tiles)
        x = tl.load(base + place, mask=mask, other=0.0).to(NARROW)
        sums = _add(x, _hash(low + place.to(tl.uint32), key, added), sums, K, CHECKED, PREDICATED)
    return sums


@triton.jit
def _add_tiles(
    address,
    first,
    rows,
    columns,
    run_ptr,
    key,
    added,
    sums,
    DTYPE: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    K: tl.constexpr,
    CHECKED: tl.constexpr,
    PREDICATED: tl.constexpr,
    HIGH: tl.constexpr = _HIGH,
):
    """Add up rows and columns of any strides; ``first``: the index of the first element."""
    NARROW: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    base = address.to(tl.pointer_type(DTYPE))
    stride, step = tl.load(run_ptr + 5), tl.load(run_ptr + 6)
    pitch, increment = tl.load(run_ptr + 7), tl.load(run_ptr + 8)
    # tiles of 2**log columns
    log = tl.load(run_ptr + 9).to(tl.int32)
    across, down = (1 << log), TILE >> log
    lanes = tl.arange(0, LANES)
    places, indices = (), ()
    for i in tl.static_range(TILE // LANES):
        row, column = (i * LANES + lanes) >> log, (i * LANES + lanes) & (across - 1)
        places = places + (row.to(tl.int64) * stride + column.to(tl.int64) * step,)  # type: ignore[assignment]
        indices = indices + (first + row.to(tl.int64) * pitch + column.to(tl.int64) * increment,)  # type: ignore[assignment]
    for top in range(0, rows, down):
        for left in range(0, columns, across):
            offset, start = top * stride + left * step, top * pitch + left * increment
            xs, signs = (), ()
            for i in tl.static_range(TILE // LANES):
                lane = i * LANES + lanes
                mask = ((lane >> log) < rows - top) & ((lane & (across - 1)) < columns - left)
                xs = xs + (tl.load(base + (offset + places[i]), mask=mask, other=0.0).to(NARROW),)  # type: ignore[assignment]
                index = start + indices[i]
                high = (index >> 32).to(tl.uint32) * HIGH
                signs = signs + (_hash(index.to(tl.uint32), key, added + high),)  # type: ignore[assignment]
            for i in tl.static_range(TILE // LANES):
                sums = _add(xs[i], signs[i], sums, K, CHECKED, PREDICATED)
    return sums


@triton.jit
def _stacked(xs, K: tl.constexpr):
    """Return K tensors of one dimension as one of two, ``(lanes, K)``."""
    found = xs
    for level in tl.static_range(1, K.bit_length()):
        joined = ()
        for j in tl.static_range(K >> level):
            joined = joined + (tl.join(found[j], found[j + (K >> level)]),)  # type: ignore[assignment]
        found = joined
    return tl.reshape(found[0], (xs[0].shape[0], K))


@triton.jit
def chunk_sums(
    address,
    first,
    rows,
    columns,
    run_ptr,
    key_ptr,
    FLAT: tl.constexpr,
    DTYPE: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
    TILE: tl.constexpr,
    K: tl.constexpr,
    CHECKED: tl.constexpr,
    PREDICATED: tl.constexpr,
    HIGH: tl.constexpr = _HIGH,
):
    """Return a chunk's sum of squares, number of NaN and infinite elements, and projections ``(K,)``."""
    keys = tl.load(key_ptr)
    key, added = keys.to(tl.uint32), (keys >> 32).to(tl.uint32)
    zero = tl.zeros((LANES,), tl.float64)
    sums = zero, zero, zero, (zero,) * K
    if FLAT:
        # the upper half is the same for all elements of a run
        added += (first >> 32).to(tl.uint32) * HIGH
        low = first.to(tl.uint32)
        sums = _add_run(
            address, columns, low, key, added, sums, DTYPE, ITEMSIZE, LANES, UNROLL, K, CHECKED, PREDICATED
        )
    else:
        sums = _add_tiles(
            address,
            first,
            rows,
            columns,
            run_ptr,
            key,
            added,
            sums,
            DTYPE,
            LANES,
            TILE,
            K,
            CHECKED,
            PREDICATED,
        )
    sumsq, total, nonfinite, negative = sums
    projections = tl.sum(total) - 2.0 * tl.sum(_stacked(negative, K), 0)
    return tl.sum(sumsq), tl.sum(nonfinite), projections
