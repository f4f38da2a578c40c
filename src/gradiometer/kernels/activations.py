"""All columns of one activation, merged into a row of a store, in one launch and one pass over memory.

The elements are taken in tiles. Programs add up tiles that are a multiple of the channels' period apart, a
strip, so that each lane reads only one channel: its count of zeros, which is measured anyway, tells whether
the channel has another value, at no cost per element. The program that finishes last adds the partials of
all in a fixed order. So the result does not depend on which one that is.

The main loop has no mask and no NaN or Inf counter, like that of `gradiometer.kernels.moments`. A program
whose sum of squares is not finite reads its elements again. On GPUs with few fp64 units it adds fp32 numbers
with compensation.
"""

import math
from operator import itemgetter

import torch
import triton
import triton.language as tl

from gradiometer.columns import ACTIVATIONS, Cursor
from gradiometer.kernels import tuning
from gradiometer.kernels.compensated import LEAST_SQUARE, add_tile, joined, larger, square, two_product
from gradiometer.kernels.primitives import add_to, finishes_last, halves, is_due, is_finite, merged

# those that merge by sum, as adjacent columns of the store do, and the channels that the program marked
_SUMS = ("sumsq", "sum", "n_zero", "n_nan", "n_posinf", "n_neginf", "sum4", "n_marked")
# and the largest magnitude
ACTIVATION_PARTIALS = (len(_SUMS) + 1, tuning.MAX_PROGRAMS)
"""The shape of the scratch for partials: the same for tensors of all sizes."""

# channels that the last program resets together
_CHANNELS = 2048

# defaults of arguments, see finalize.py
_EVERY = int(Cursor.EVERY)
_NUMEL, _FIRST, _TOP = itemgetter("numel", "sumsq", "abs_max")(ACTIVATIONS.index)
_CALLS, _NUM_CHANNELS, _ZERO_CHANNELS = itemgetter("n_calls", "n_channels", "n_zero_channels")(
    ACTIVATIONS.index
)


@triton.jit
def _add(x, top, sumsq, total, sum4):
    """Add a tile to lane-wise totals."""
    wide = x.to(tl.float64)
    second = wide * wide
    # the maximum drops NaN: a program that reads one reads its elements again
    return tl.maximum(top, tl.abs(x)), sumsq + second, total + wide, tl.fma(second, second, sum4)


@triton.jit
def _add_compensated(x, top, sumsq, total, sum4, EXACT_SQUARE: tl.constexpr):
    """Add a tile to totals whose sums are compensated. EXACT_SQUARE: fp32 holds the square of each x."""
    if EXACT_SQUARE:
        second = x * x
        sumsq = add_tile(sumsq, second, None)
        fourth, error = two_product(second, second)
    else:
        second, error = two_product(x, x)
        sumsq = add_tile(sumsq, second, error)
        fourth, error = square(second, error)
    return larger(top, tl.abs(x)), sumsq, add_tile(total, x, None), add_tile(sum4, fourth, error)


@triton.jit
def _mark(is_nonzero, start, lanes, alive_ptr, channels, inner):
    """Mark the channels of the lanes that have read a value other than 0; return how many are new.

    start: the offset of lane 0.
    """
    start = start % (channels.to(tl.int64) * inner)
    first = start // inner
    # lanes cross from a channel to the next one in 32-bit arithmetic; an inner size beyond it is cut
    size = tl.minimum(inner, 2**30)
    skipped = (size - tl.minimum(inner - (start - first * inner), size)).to(tl.int32)
    channel = (first.to(tl.int32) + (skipped + lanes) // size.to(tl.int32)) % channels
    # atomic operations are slow: use them only for a channel that was not seen yet, or not long ago
    is_new = is_nonzero & (tl.load(alive_ptr + channel, mask=is_nonzero, other=1) == 0)
    seen = tl.atomic_or(alive_ptr + channel, 1, mask=is_new, sem="relaxed")
    return tl.sum((is_new & (seen == 0)).to(tl.int32))


@triton.jit
def _tiles_of(strip, first, last, strips, periods, full):
    """Return the first tile of a program in a strip, counted in the strip, and the number of its tiles."""
    begin = tl.maximum(first - strip * periods, 0)
    # the last period may be incomplete
    end = tl.minimum(tl.minimum(last - strip * periods, periods), tl.cdiv(full - strip, strips))
    return begin, tl.maximum(end - begin, 0)


@triton.jit
def _recount(
    x_ptr,
    first,
    last,
    strips,
    periods,
    full,
    tail,
    NARROW: tl.constexpr,
    TILE: tl.constexpr,
    FEW: tl.constexpr,
):
    """Read a program's tiles with NaN or Inf again, and ``tail`` elements after the full tiles."""
    lanes = tl.arange(0, FEW)
    sumsq = tl.zeros((FEW,), tl.float64)
    total = tl.zeros((FEW,), tl.float64)
    sum4 = tl.zeros((FEW,), tl.float64)
    top = tl.zeros((FEW,), NARROW)
    nan = tl.zeros((FEW,), tl.int32)
    posinf = tl.zeros((FEW,), tl.int32)
    neginf = tl.zeros((FEW,), tl.int32)
    for i in range(last - first + tl.where(tail > 0, 1, 0)):
        place = first + i
        strip = place // periods
        # after the program's own tiles: that of the tail
        tile = tl.where(place < last, (place - strip * periods) * strips + strip, full)
        n = tl.where(place < last, tl.where(tile < full, TILE, 0), tail)
        for k in range(0, n, FEW):
            x = tl.load(x_ptr + tile.to(tl.int64) * TILE + (k + lanes), mask=lanes < n - k, other=0.0)
            x = x.to(NARROW)
            nan += (x != x).to(tl.int32)
            posinf += (x == float("inf")).to(tl.int32)
            neginf += (x == float("-inf")).to(tl.int32)
            top, sumsq, total, sum4 = _add(tl.where(is_finite(x), x, 0.0), top, sumsq, total, sum4)
    return (
        tl.sum(sumsq),
        tl.sum(total),
        tl.sum(nan).to(tl.float64),
        tl.sum(posinf).to(tl.float64),
        tl.sum(neginf).to(tl.float64),
        tl.sum(sum4),
        tl.max(top).to(tl.float64),
    )


@triton.jit(do_not_specialize=["row", "numel", "channels", "inner", "strips", "periods", "work"])
def _activation_kernel(
    x_ptr,
    store_ptr,  # (R, 12) float64
    cursor_ptr,  # (6,) float64
    partials_ptr,  # (9, MAX_PROGRAMS) float64
    alive_ptr,  # (C,) int32, all 0
    counter_ptr,  # one int32, 0
    flag_ptr,  # one int32
    row: tl.int32,
    numel: tl.int64,
    channels: tl.int32,  # C
    inner: tl.int64,  # elements between an element and the next one of another channel
    strips: tl.int32,  # tiles between a tile and the next one of the same strip
    periods: tl.int32,  # most full tiles in a strip
    work: tl.int32,  # tiles of a program
    ITEMSIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    TILE: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
    NUM_SUMS: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    MERGED: tl.constexpr,
    FLAGGED: tl.constexpr,
    COMPENSATED: tl.constexpr,  # the lanes of compensated totals, one a thread; 0 for fp64
    LEAST_SQUARE: tl.constexpr = LEAST_SQUARE,
    EVERY: tl.constexpr = _EVERY,
    NUMEL: tl.constexpr = _NUMEL,
    FIRST: tl.constexpr = _FIRST,
    TOP: tl.constexpr = _TOP,
    CALLS: tl.constexpr = _CALLS,
    NUM_CHANNELS: tl.constexpr = _NUM_CHANNELS,
    ZERO_CHANNELS: tl.constexpr = _ZERO_CHANNELS,
):
    if tl.load(cursor_ptr + EVERY) <= 0:
        return
    if not is_due(cursor_ptr):
        return
    if FLAGGED:  # noqa: SIM102 a constexpr: without a flag, the load is not compiled
        if tl.load(flag_ptr) == 0:
            return
    program = tl.program_id(0)
    full = (numel // TILE).to(tl.int32)
    # a program's tiles are adjacent in the order of strips, and of periods in a strip
    first = program * work
    last = tl.minimum(first + work, strips * periods)
    # the first program also reads the elements after the last full tile
    tail = tl.where(program == 0, (numel - full.to(tl.int64) * TILE).to(tl.int32), 0)

    # fp16 and bf16 are compared as fp32, and two of them are read as one word: see moments.py
    NARROW: tl.constexpr = tl.float64 if ITEMSIZE == 8 else tl.float32
    LANES: tl.constexpr = TILE // 2 if PAIRS else TILE
    lanes = tl.arange(0, LANES)
    EXACT_SQUARE: tl.constexpr = ITEMSIZE == 2
    if COMPENSATED:
        top = tl.zeros((COMPENSATED,), tl.float32)
        sumsq, total, sum4 = (top, top, top), (top, top, top), (top, top, top)
    else:
        top = tl.zeros((LANES,), NARROW)
        sumsq = tl.zeros((LANES,), tl.float64)
        total = tl.zeros((LANES,), tl.float64)
        sum4 = tl.zeros((LANES,), tl.float64)
    zeros = tl.zeros((LANES,), tl.float32)
    if PAIRS:
        words_ptr = tl.multiple_of(x_ptr.to(tl.pointer_type(tl.int32)), 16)
        # of the upper halves
        more_zeros = tl.zeros((LANES,), tl.float32)
    else:
        words_ptr = x_ptr
    step = strips.to(tl.int64) * LANES

    marked = tl.zeros((), tl.int32)
    if first < last:
        for i in range((last - 1) // periods - first // periods + 1):
            strip = first // periods + i
            begin, count = _tiles_of(strip, first, last, strips, periods, full)
            before = zeros
            if PAIRS:
                more_before = more_zeros
            words = words_ptr + (begin.to(tl.int64) * strips + strip) * LANES + lanes
            for part in tl.static_range(2):
                # whole iterations, and then the tiles that are left
                for _ in tl.range(0, count // UNROLL if part == 0 else count % UNROLL, num_stages=STAGES):
                    for u in tl.static_range(UNROLL if part == 0 else 1):
                        word = tl.load(words + u * step)
                        if PAIRS:
                            low, x = halves(word, x_ptr.dtype.element_ty)
                            more_zeros += tl.where(x == 0, 1.0, 0.0)
                            zeros += tl.where(low == 0, 1.0, 0.0)
                            if COMPENSATED:
                                x = tl.interleave(low, x)
                            else:
                                top, sumsq, total, sum4 = _add(low, top, sumsq, total, sum4)
                        else:
                            x = word.to(NARROW)
                            zeros += tl.where(x == 0, 1.0, 0.0)
                        if COMPENSATED:
                            top, sumsq, total, sum4 = _add_compensated(
                                x, top, sumsq, total, sum4, EXACT_SQUARE
                            )
                        else:
                            top, sumsq, total, sum4 = _add(x, top, sumsq, total, sum4)
                    words += (UNROLL if part == 0 else 1) * step
            start = strip.to(tl.int64) * TILE
            if PAIRS:
                marked += _mark(zeros - before < count, start, 2 * lanes, alive_ptr, channels, inner)
                is_nonzero = more_zeros - more_before < count
                marked += _mark(is_nonzero, start, 2 * lanes + 1, alive_ptr, channels, inner)
            else:
                marked += _mark(zeros - before < count, start, lanes, alive_ptr, channels, inner)
    for i in range(0, tail, LANES):
        mask = lanes < tail - i
        start = full.to(tl.int64) * TILE + i
        x = tl.load(x_ptr + start + lanes, mask=mask, other=0.0).to(NARROW)
        zeros += tl.where((x == 0) & mask, 1.0, 0.0)
        if COMPENSATED:
            top, sumsq, total, sum4 = _add_compensated(x, top, sumsq, total, sum4, EXACT_SQUARE)
        else:
            top, sumsq, total, sum4 = _add(x, top, sumsq, total, sum4)
        # NaN too is not 0
        marked += _mark(x != 0, start, lanes, alive_ptr, channels, inner)

    if PAIRS:
        zeros += more_zeros
    # in the order of _SUMS
    all_zeros = tl.sum(zeros.to(tl.float64))
    all_top = tl.max(top).to(tl.float64)
    if COMPENSATED:
        all_sumsq, all_total, all_sum4 = joined(sumsq), joined(total), joined(sum4)
        # squares of tiny elements lost too much, and squares of large ones may be infinite
        least = ((last - first).to(tl.float64) * TILE + tail) * LEAST_SQUARE
        must_read = (all_top > 0) & ((all_sumsq < least) | (all_sum4 < least))
        must_read = must_read | (is_finite(all_sumsq + all_sum4) == 0)
    else:
        all_sumsq, all_total, all_sum4 = tl.sum(sumsq), tl.sum(total), tl.sum(sum4)
        must_read = is_finite(all_sumsq) == 0
    none = tl.zeros((), tl.float64)
    nan, posinf, neginf = none, none, none
    if must_read:
        # fewer lanes, or their totals would take registers from the main loop
        FEW: tl.constexpr = TILE // 2 if ITEMSIZE == 2 else TILE
        all_sumsq, all_total, nan, posinf, neginf, all_sum4, all_top = _recount(
            x_ptr, first, last, strips, periods, full, tail, NARROW, TILE, FEW
        )
    out = partials_ptr + program
    tl.store(out, all_sumsq)
    tl.store(out + MAX_PROGRAMS, all_total)
    tl.store(out + 2 * MAX_PROGRAMS, all_zeros)
    tl.store(out + 3 * MAX_PROGRAMS, nan)
    tl.store(out + 4 * MAX_PROGRAMS, posinf)
    tl.store(out + 5 * MAX_PROGRAMS, neginf)
    tl.store(out + 6 * MAX_PROGRAMS, all_sum4)
    tl.store(out + 7 * MAX_PROGRAMS, marked.to(tl.float64))
    tl.store(out + 8 * MAX_PROGRAMS, all_top)

    if finishes_last(counter_ptr):
        values, highest = merged(partials_ptr, tl.num_programs(0), NUM_SUMS, MERGED, MAX_PROGRAMS)
        part = tl.arange(0, NUM_SUMS)
        columns = store_ptr + row.to(tl.int64) * NUM_COLUMNS
        # the others have no value but 0
        is_marked = part == NUM_SUMS - 1
        values = tl.where(is_marked, channels.to(tl.float64) - values, values)
        add_to(columns + tl.where(is_marked, ZERO_CHANNELS, FIRST + part), values)
        add_to(columns + NUMEL, numel.to(tl.float64))
        add_to(columns + NUM_CHANNELS, channels.to(tl.float64))
        add_to(columns + CALLS, 1.0)
        tl.store(columns + TOP, tl.maximum(tl.load(columns + TOP), highest))

        # for the next launch
        places = tl.arange(0, CHANNELS)
        for i in range(0, channels, CHANNELS):
            tl.store(alive_ptr + (i + places), 0, mask=places < channels - i)
        tl.store(counter_ptr, 0)


def activation(
    x: torch.Tensor,
    store: torch.Tensor,
    row: int,
    cursor: torch.Tensor,
    partials: torch.Tensor,
    alive: torch.Tensor,
    counter: torch.Tensor,
    channel_dim: int,
    flag: torch.Tensor | None = None,
) -> None:
    """Measure an activation in a step that is due, and merge its columns into row ``row`` of the store.

    The step is due if ``every`` of the cursor is above 0 and divides it; otherwise a launch reads only the
    cursor, and writes nothing. An empty tensor is not measured. The C indices of ``channel_dim`` are the
    channels. With 0 in ``flag`` the launch does nothing, see `gradiometer.kernels.merge_partials`.

    Launches on one stream can use the same scratch: ``partials`` of shape `ACTIVATION_PARTIALS`, with any
    values; ``alive`` of C or more elements, and ``counter`` of one, 0 before and after each launch.
    """
    numel = x.numel()
    if numel == 0:
        return
    shape = x.shape or (1,)
    dim = channel_dim % len(shape)
    channels, inner = shape[dim], math.prod(shape[dim + 1 :])
    tile, unroll, threads, registers = tuning.ACTIVATIONS[x.dtype]
    compensated = x.dtype != torch.float64 and tuning.has_few_fp64_units(x.device)
    if compensated:
        registers = tuning.COMPENSATED_REGISTERS
    full = numel // tile
    # lanes read the same channel again after the least common multiple of a period and a tile
    period = channels * inner
    strips = max(1, min(period // math.gcd(period, tile), full))
    periods = triton.cdiv(full, strips)
    tiles = strips * periods
    work = triton.cdiv(max(1, triton.cdiv(tiles, tuning.MAX_PROGRAMS)), unroll) * unroll
    _activation_kernel[(max(1, triton.cdiv(tiles, work)),)](
        x,
        store,
        cursor,
        partials,
        alive,
        counter,
        counter if flag is None else flag,
        row,
        numel,
        channels,
        inner,
        strips,
        # a divisor
        max(1, periods),
        work,
        ITEMSIZE=x.dtype.itemsize,
        # a view may begin between two words
        PAIRS=x.dtype.itemsize == 2 and x.data_ptr() % 16 == 0,
        TILE=tile,
        UNROLL=unroll,
        STAGES=tuning.stages(x.device),
        NUM_SUMS=len(_SUMS),
        MAX_PROGRAMS=tuning.MAX_PROGRAMS,
        NUM_COLUMNS=ACTIVATIONS.width,
        CHANNELS=_CHANNELS,
        MERGED=tuning.MERGED_PROGRAMS,
        FLAGGED=flag is not None,
        COMPENSATED=threads if compensated else 0,
        **tuning.options(threads, registers, x.device),
    )
