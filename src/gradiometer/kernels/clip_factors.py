"""The decisions of `gradiometer.ZScoreClip` and `gradiometer.PerTensorClip`, in one small launch each.

One program reads all rows, changes the state and the record in place, and writes the factors. The formulas
are those of the modules, operation by operation. Only the sum of squares over the rows may differ in its last
bits: lanes add rows in a fixed order, and their totals are added in pairs.
"""

import math
import sys
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from gradiometer.columns import TENSORS
from gradiometer.kernels import tuning
from gradiometer.kernels.finalize import bits
from gradiometer.kernels.primitives import NAN, NEGINF, NUMEL, POSINF, SUMSQ, TOP

# as in gradiometer.control.scale
_EPS = 1e-6
_LARGEST = sys.float_info.max


@triton.jit
def _number(bits):
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def _nonfinite(
    row, mask, NAN: tl.constexpr = NAN, POSINF: tl.constexpr = POSINF, NEGINF: tl.constexpr = NEGINF
):
    """Return the number of non-finite elements of each row."""
    infinite = tl.load(row + POSINF, mask=mask, other=0.0) + tl.load(row + NEGINF, mask=mask, other=0.0)
    return tl.load(row + NAN, mask=mask, other=0.0) + infinite


@triton.jit
def _total(
    columns_ptr,
    num_rows,
    NUM_COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    NUMEL: tl.constexpr = NUMEL,
    SUMSQ: tl.constexpr = SUMSQ,
    TOP: tl.constexpr = TOP,
    INF: tl.constexpr = math.inf,
):
    """Return the norm, a norm that does not overflow, and the number of non-finite elements; of all rows."""
    offs = tl.arange(0, TILE)
    numel = tl.zeros((TILE,), tl.float64)
    sumsq = tl.zeros((TILE,), tl.float64)
    nonfinite = tl.zeros((TILE,), tl.float64)
    tops = tl.zeros((TILE,), tl.float64)
    for i in range(0, num_rows, TILE):
        mask = offs < num_rows - i
        row = columns_ptr + (i + offs).to(tl.int64) * NUM_COLUMNS
        numel += tl.load(row + NUMEL, mask=mask, other=0.0)
        sumsq += tl.load(row + SUMSQ, mask=mask, other=0.0)
        nonfinite += _nonfinite(row, mask)
        x = tl.load(row + TOP, mask=mask, other=0.0)
        # keeps NaN, as the scale of the gradients may be NaN
        tops = tl.where((tops >= x) | (tops != tops), tops, x)
    top = tl.sum(tops)
    top = tl.where(top == top, tl.max(tops), top)
    norm = tl.sqrt(tl.sum(sumsq))
    finite = tl.where(norm < INF, norm, top * tl.sqrt(tl.sum(numel)))
    return norm, finite, tl.sum(nonfinite)


@triton.jit
def _over(limit, above, LARGEST: tl.constexpr = _LARGEST):
    return limit / tl.where(above > LARGEST, LARGEST, above)


@triton.jit(do_not_specialize=["num_rows", "z_threshold", "decay", "warmup_steps", "max_norm", "eps"])
def _z_score_kernel(
    columns_ptr,  # (T, C) float64
    factor_ptr,  # () float64
    state_ptr,  # (3,) float64
    record_ptr,  # (3, 1) float64
    num_rows: tl.int32,
    z_threshold: tl.int64,  # bits of float64, as in finalize.py
    decay: tl.int64,
    warmup_steps: tl.int64,
    max_norm: tl.int64,
    eps: tl.int64,
    NUM_COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    EPS: tl.constexpr = _EPS,
    INF: tl.constexpr = math.inf,
):
    threshold, decay, most = _number(z_threshold), _number(decay), _number(max_norm)
    mean, variance, count = tl.load(state_ptr), tl.load(state_ptr + 1), tl.load(state_ptr + 2)
    steps, clipped = tl.load(record_ptr + 1), tl.load(record_ptr + 2)
    # its sums are barriers between these loads and the stores
    norm, finite, nonfinite = _total(columns_ptr, num_rows, NUM_COLUMNS, TILE)

    is_warm = count >= _number(warmup_steps)
    std = tl.sqrt(variance)
    z = (finite - mean) / (std + _number(eps))
    is_outlier = is_warm & (z > threshold)
    eta = tl.where(is_outlier, z / threshold, 1.0)
    limit = tl.where(is_outlier, mean + (threshold * std) / eta, finite)
    bound = tl.where(is_outlier, limit, most)
    bound = tl.where(bound > most, most, bound)
    ratio = _over(bound, finite + EPS)
    factor = tl.where(ratio < 1.0, ratio, 1.0)

    number = count + 1.0
    change = limit - mean
    running = mean + change / number
    deviation = change * (limit - running)
    faded = decay * mean + (1.0 - decay) * limit
    square = (limit - faded) * (limit - faded)
    later = decay * variance + (1.0 - decay) * square
    spread = tl.where(is_warm, later, variance + (deviation - variance) / number)
    enters = (nonfinite == 0) & (norm > 0) & (norm < INF) & (spread < INF)
    tl.store(state_ptr, tl.where(is_warm, faded, running), mask=enters)
    tl.store(state_ptr + 1, spread, mask=enters)
    tl.store(state_ptr + 2, number, mask=enters)
    tl.store(factor_ptr, factor)
    tl.store(record_ptr, factor)
    tl.store(record_ptr + 1, steps + ((norm != 0) | (nonfinite > 0)).to(tl.float64))
    tl.store(record_ptr + 2, clipped + (factor < 1.0).to(tl.float64))


@triton.jit(do_not_specialize=["num_rows", "max_ratio", "decay", "warmup_steps", "max_norm", "eps"])
def _per_tensor_kernel(
    columns_ptr,  # (T, C) float64
    factor_ptr,  # (T,) float64
    average_ptr,  # (T,) float64
    count_ptr,  # (1,) float64
    record_ptr,  # (3, T) float64
    num_rows: tl.int32,
    max_ratio: tl.int64,  # bits of float64
    decay: tl.int64,
    warmup_steps: tl.int64,
    max_norm: tl.int64,
    eps: tl.int64,
    NUM_COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    SUMSQ: tl.constexpr = SUMSQ,
    EPS: tl.constexpr = _EPS,
    INF: tl.constexpr = math.inf,
):
    ratio, decay, warmup, eps = _number(max_ratio), _number(decay), _number(warmup_steps), _number(eps)
    count = tl.load(count_ptr)
    common = tl.full((), 1.0, tl.float64)
    if count < warmup:
        _, finite, _ = _total(columns_ptr, num_rows, NUM_COLUMNS, TILE)
        common = _over(_number(max_norm), finite + EPS)
        common = tl.where(common < 1.0, common, 1.0)
    offs = tl.arange(0, TILE)
    entered = tl.zeros((TILE,), tl.int32)
    for i in range(0, num_rows, TILE):
        mask = offs < num_rows - i
        at = (i + offs).to(tl.int64)
        row = columns_ptr + at * NUM_COLUMNS
        norm = tl.sqrt(tl.load(row + SUMSQ, mask=mask, other=0.0))
        average = tl.load(average_ptr + at, mask=mask, other=0.0)
        limit = ratio * average
        later = decay * average + (1.0 - decay) * tl.minimum(norm, limit, propagate_nan=tl.PropagateNan.ALL)
        later = tl.where(later < INF, later, norm)
        first = tl.minimum(average, common * norm, propagate_nan=tl.PropagateNan.ALL)
        updated = tl.where(count >= warmup, later, first)
        own = tl.where(norm > limit, _over(limit, norm + eps), 1.0)
        factor = tl.where(count >= warmup, own, tl.where(norm > 0, common, 1.0))
        enters = (norm > 0) & (_nonfinite(row, mask) == 0) & (updated < INF)
        entered = entered | enters.to(tl.int32)
        tl.store(average_ptr + at, updated, mask=enters)
        tl.store(factor_ptr + at, factor, mask=mask)
        record = record_ptr + at
        tl.store(record, factor, mask=mask)
        steps = tl.load(record + num_rows, mask=mask, other=0.0) + (norm > 0).to(tl.float64)
        tl.store(record + num_rows, steps, mask=mask)
        clipped = tl.load(record + 2 * num_rows, mask=mask, other=0.0) + (factor < 1.0).to(tl.float64)
        tl.store(record + 2 * num_rows, clipped, mask=mask)
    # the sum is a barrier: all threads have read the count
    count += (tl.sum(entered) > 0).to(tl.float64)
    tl.store(count_ptr, tl.where(count > warmup, warmup, count))


def clip_factors(
    columns: torch.Tensor, buffers: Sequence[torch.Tensor], settings: Sequence[float], *, per_tensor: bool
) -> torch.Tensor:
    """Count a step of ZScoreClip or PerTensorClip, as its ``decide`` does; return factors, 0-d or ``(T,)``.

    ``buffers``: state and record of ZScoreClip, or average, count and record of PerTensorClip; float64,
    contiguous, changed in place. ``settings``: z_threshold or max_ratio, then decay, warmup_steps, max_norm
    and eps.
    """
    kernel = _per_tensor_kernel if per_tensor else _z_score_kernel
    shape = columns.shape[: int(per_tensor)]
    factors = torch.empty(shape, dtype=torch.float64, device=columns.device)
    tile, threads, registers = tuning.FINALIZE
    kernel[(1,)](
        columns.contiguous(),
        factors,
        *buffers,
        columns.shape[0],
        *[bits(x) for x in settings],
        NUM_COLUMNS=TENSORS.width,
        TILE=tile,
        **tuning.options(threads, registers, columns.device),
    )
    return factors
