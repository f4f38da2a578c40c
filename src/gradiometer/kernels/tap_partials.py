"""Merge the partial sums of an activation, which compiled code has computed, into a row of a store.

Programs add up blocks of them, and the one that finishes last adds the results of all in a fixed order, as in
`gradiometer.kernels.activations`. It decides whether the activation must be read: it then sets a flag, and
`gradiometer.kernels.activation` measures everything. Reads 28 bytes and a magnitude per partial.
"""

from operator import itemgetter

import torch
import triton
import triton.language as tl

from gradiometer.columns import ACTIVATIONS, Cursor
from gradiometer.kernels import tuning
from gradiometer.kernels.activations import ACTIVATION_PARTIALS
from gradiometer.kernels.primitives import add_to, finishes_last, is_due, is_finite, merged

# partials that a program reads at a time
_BLOCK = 1024
_THREADS, _REGISTERS = 256, 128

# defaults of arguments, see finalize.py
_EVERY = int(Cursor.EVERY)
_NUMEL, _FIRST, _TOP = itemgetter("numel", "sumsq", "abs_max")(ACTIVATIONS.index)
_CALLS, _NUM_CHANNELS, _ZERO_CHANNELS = itemgetter("n_calls", "n_channels", "n_zero_channels")(
    ACTIVATIONS.index
)


@triton.jit(do_not_specialize=["row", "count", "numel", "channels", "most", "work"])
def _merge_partials_kernel(
    sums_ptr,  # (count,) float64, and so on
    squares_ptr,
    fourths_ptr,
    zeros_ptr,  # (count,) float32
    tops_ptr,  # (count,) of the activation's dtype
    store_ptr,  # (R, 12) float64
    cursor_ptr,  # (6,) float64
    partials_ptr,  # (9, MAX_PROGRAMS) float64
    counter_ptr,  # one int32, 0
    flag_ptr,  # one int32
    row: tl.int32,
    count: tl.int64,
    numel: tl.int64,
    channels: tl.int64,
    most: tl.int32,
    work: tl.int32,  # blocks of a program
    BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
    NUM_SUMS: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
    MERGED: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    EVERY: tl.constexpr = _EVERY,
    NUMEL: tl.constexpr = _NUMEL,
    FIRST: tl.constexpr = _FIRST,
    TOP: tl.constexpr = _TOP,
    CALLS: tl.constexpr = _CALLS,
    NUM_CHANNELS: tl.constexpr = _NUM_CHANNELS,
    ZERO_CHANNELS: tl.constexpr = _ZERO_CHANNELS,
):
    # the kernel that reads the flag also reads the cursor
    if tl.load(cursor_ptr + EVERY) <= 0:
        return
    if not is_due(cursor_ptr):
        return
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    sumsq = tl.zeros((BLOCK,), tl.float64)
    sum4 = tl.zeros((BLOCK,), tl.float64)
    zeros = tl.zeros((BLOCK,), tl.float64)
    of_a_channel = tl.zeros((BLOCK,), tl.float64)
    nonfinite = tl.zeros((BLOCK,), tl.int32)
    top = tl.zeros((BLOCK,), NARROW)
    program = tl.program_id(0)
    first = program.to(tl.int64) * work * BLOCK
    for start in range(first, tl.minimum(first + work.to(tl.int64) * BLOCK, count), BLOCK):
        offs = start + lanes
        mask = offs < count
        total += tl.load(sums_ptr + offs, mask=mask, other=0.0)
        sumsq += tl.load(squares_ptr + offs, mask=mask, other=0.0)
        sum4 += tl.load(fourths_ptr + offs, mask=mask, other=0.0)
        here = tl.load(zeros_ptr + offs, mask=mask, other=0.0)
        zeros += here.to(tl.float64)
        limit = most.to(tl.float32)
        of_a_channel += tl.where(here < limit, here, limit).to(tl.float64)
        read = tl.load(tops_ptr + offs, mask=mask, other=0.0).to(NARROW)
        # the maximum may drop NaN
        nonfinite += tl.where(is_finite(read), 0, 1)
        top = tl.maximum(top, read)

    # In the order of `_SUMS` of the activation kernel. In place of NaN: magnitudes that are not finite; of
    # marked channels: zeros that may be those of one
    out = partials_ptr + program
    tl.store(out, tl.sum(sumsq))
    tl.store(out + MAX_PROGRAMS, tl.sum(total))
    tl.store(out + 2 * MAX_PROGRAMS, tl.sum(zeros))
    tl.store(out + 3 * MAX_PROGRAMS, tl.sum(nonfinite).to(tl.float64))
    tl.store(out + 4 * MAX_PROGRAMS, 0.0)
    tl.store(out + 5 * MAX_PROGRAMS, 0.0)
    tl.store(out + 6 * MAX_PROGRAMS, tl.sum(sum4))
    tl.store(out + 7 * MAX_PROGRAMS, tl.sum(of_a_channel))
    tl.store(out + 8 * MAX_PROGRAMS, tl.max(top).to(tl.float64))

    if finishes_last(counter_ptr):
        values, highest = merged(partials_ptr, tl.num_programs(0), NUM_SUMS, MERGED, MAX_PROGRAMS)
        part = tl.arange(0, NUM_SUMS)
        is_last = part == NUM_SUMS - 1
        # a channel of zeros has numel / channels of them
        may_be_dead = is_last & (values * channels.to(tl.float64) >= numel.to(tl.float64))
        must_read = tl.sum((may_be_dead | ((part == 3) & (values > 0))).to(tl.int32)) > 0
        tl.store(flag_ptr, must_read.to(tl.int32))
        if not must_read:
            columns = store_ptr + row.to(tl.int64) * NUM_COLUMNS
            add_to(columns + NUMEL, numel.to(tl.float64))
            # no channel of zeros
            add_to(columns + tl.where(is_last, ZERO_CHANNELS, FIRST + part), tl.where(is_last, 0.0, values))
            add_to(columns + NUM_CHANNELS, channels.to(tl.float64))
            add_to(columns + CALLS, 1.0)
            tl.store(columns + TOP, tl.maximum(tl.load(columns + TOP), highest))
        # for the next launch
        tl.store(counter_ptr, 0)


def merge_partials(
    partials: list[torch.Tensor],
    store: torch.Tensor,
    row: int,
    cursor: torch.Tensor,
    scratch: torch.Tensor,
    counter: torch.Tensor,
    flag: torch.Tensor,
    numel: int,
    channels: int,
    most: int,
) -> None:
    """Merge the partials of an activation into a row of a store, in a step that is due.

    The flag becomes 1 if the activation is not finite, or may have a channel of zeros: it must be read then,
    and nothing is merged. Otherwise the flag becomes 0.

    ``partials``: sums of x, x**2, x**4 and of zeros, and the largest magnitudes; of one size. ``numel``,
    ``channels``: of the activation. ``most``: the most elements that a partial has of one channel.
    ``scratch`` and ``counter``: the partials and the counter of `gradiometer.kernels.activation`.
    """
    count = partials[0].numel()
    blocks = triton.cdiv(count, _BLOCK)
    work = triton.cdiv(blocks, tuning.MAX_PROGRAMS)
    _merge_partials_kernel[(triton.cdiv(blocks, work),)](
        *partials,
        store,
        cursor,
        scratch,
        counter,
        flag,
        row,
        count,
        numel,
        channels,
        most,
        work,
        BLOCK=_BLOCK,
        NARROW=tl.float64 if partials[-1].dtype == torch.float64 else tl.float32,
        NUM_SUMS=ACTIVATION_PARTIALS[0] - 1,
        MAX_PROGRAMS=tuning.MAX_PROGRAMS,
        MERGED=tuning.MERGED_PROGRAMS,
        NUM_COLUMNS=ACTIVATIONS.width,
        **tuning.options(_THREADS, _REGISTERS, store.device),
    )
