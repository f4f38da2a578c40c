"""Merge the partial sums of an activation, which compiled code has computed, into a row of a store.

One program adds them up, in a fixed order, and decides whether the activation must be read: it then sets a
flag, and `gradiometer.kernels.activation` measures everything. Reads 28 bytes and a magnitude per partial.
"""

from operator import itemgetter

import torch
import triton
import triton.language as tl

from gradiometer.columns import ACTIVATIONS, Cursor
from gradiometer.kernels import tuning
from gradiometer.kernels.primitives import add_to, is_due, is_finite

# partials that the program reads at a time
_BLOCK = 2048
_THREADS, _REGISTERS = 512, 128

# defaults of arguments, see finalize.py
_EVERY = int(Cursor.EVERY)
_NUMEL, _SUMSQ, _SUM, _ZEROS = itemgetter("numel", "sumsq", "sum", "n_zero")(ACTIVATIONS.index)
_SUM4, _TOP, _CALLS, _NUM_CHANNELS = itemgetter("sum4", "abs_max", "n_calls", "n_channels")(ACTIVATIONS.index)


@triton.jit(do_not_specialize=["row", "count", "numel", "channels", "most"])
def _merge_partials_kernel(
    sums_ptr,  # (count,) float64, and so on
    squares_ptr,
    fourths_ptr,
    zeros_ptr,  # (count,) float32
    tops_ptr,  # (count,) of the activation's dtype
    store_ptr,  # (R, 12) float64
    cursor_ptr,  # (6,) float64
    flag_ptr,  # one int32
    row: tl.int32,
    count: tl.int64,
    numel: tl.int64,
    channels: tl.int64,
    most: tl.int32,
    BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    EVERY: tl.constexpr = _EVERY,
    NUMEL: tl.constexpr = _NUMEL,
    SUMSQ: tl.constexpr = _SUMSQ,
    SUM: tl.constexpr = _SUM,
    ZEROS: tl.constexpr = _ZEROS,
    SUM4: tl.constexpr = _SUM4,
    TOP: tl.constexpr = _TOP,
    CALLS: tl.constexpr = _CALLS,
    NUM_CHANNELS: tl.constexpr = _NUM_CHANNELS,
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
    for start in range(0, count, BLOCK):
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
    # a channel of zeros has numel / channels of them
    may_be_dead = tl.sum(of_a_channel) * channels.to(tl.float64) >= numel.to(tl.float64)
    must_read = (tl.sum(nonfinite) > 0) | may_be_dead
    tl.store(flag_ptr, must_read.to(tl.int32))
    if must_read:
        return
    columns = store_ptr + row.to(tl.int64) * NUM_COLUMNS
    add_to(columns + NUMEL, numel.to(tl.float64))
    add_to(columns + SUMSQ, tl.sum(sumsq))
    add_to(columns + SUM, tl.sum(total))
    add_to(columns + ZEROS, tl.sum(zeros))
    add_to(columns + SUM4, tl.sum(sum4))
    add_to(columns + NUM_CHANNELS, channels.to(tl.float64))
    add_to(columns + CALLS, 1.0)
    tl.store(columns + TOP, tl.maximum(tl.load(columns + TOP), tl.max(top).to(tl.float64)))


def merge_partials(
    partials: list[torch.Tensor],
    store: torch.Tensor,
    row: int,
    cursor: torch.Tensor,
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
    """
    _merge_partials_kernel[(1,)](
        *partials,
        store,
        cursor,
        flag,
        row,
        partials[0].numel(),
        numel,
        channels,
        most,
        BLOCK=_BLOCK,
        NARROW=tl.float64 if partials[-1].dtype == torch.float64 else tl.float32,
        NUM_COLUMNS=ACTIVATIONS.width,
        **tuning.options(_THREADS, _REGISTERS, store.device),
    )
