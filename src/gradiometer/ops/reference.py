"""Statistics in eager PyTorch: the CPU implementation, one streaming pass with little extra memory.

Large tensors go through small buffers piece by piece, on threads that do not wait for one another. Small
tensors are stacked into batches, so that each does not cost a dozen operator calls. Both paths are
optimistic: they count NaN and Inf only in pieces or rows whose extremes are not finite.

How a tensor is split depends only on its own size, shape and strides, and one thread sums up each piece. So
its statistics have the same bits whichever tensors share the call, and for any number of threads.
"""

from __future__ import annotations

import math
from array import array
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradiometer.columns import NUM_FINGERPRINT_COLUMNS, TENSORS, Fingerprint, Flag
from gradiometer.inputs import as_real
from gradiometer.ops import fingerprint as bits
from gradiometer.ops import openmp
from gradiometer.ops.eager_plan import BATCH, SMALL, EagerPlan, plan_of, prepared
from gradiometer.ops.reference_rows import (
    measure_batches,
    measure_group,
    row_of_number,
    rows_of,
    sum_of_squares,
    sums_of_squares_of,
)
from gradiometer.ops.streaming import fsum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.columns import Thresholds
    from gradiometer.ops.reference_rows import Row

# plain integers: an IntFlag creates an object for each result
_NAN, _INF, _VANISHING, _EXPLODING, _DEAD = map(int, Flag)


def tensor_stats(
    tensors: Sequence[Tensor],
    thresholds: Thresholds,
    inv_scale: Tensor | None = None,
    plan: EagerPlan | None = None,
    *,
    fingerprint: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Do what `gradiometer.ops.measure` does.

    ``plan``: the result of `plan_of` for these tensors, if `prepared` changes none of them.
    """
    fingerprints: dict[int, Fingerprint] | None = None
    if fingerprint:
        fingerprints = {}
        if plan is None or not all([tensor.is_contiguous() for tensor in tensors]):
            tensors = [as_real(tensor).contiguous() for tensor in tensors]
    originals = tensors
    if plan is None:
        tensors = [prepared(tensor) for tensor in tensors]
        plan = plan_of(tensors)
    rows: list[Row] = [(0.0,) * TENSORS.width] * len(tensors)
    for index in plan.single:
        rows[index] = row_of_number(tensors[index].item())
    for group in plan.groups:
        if len(group.sizes) * group.width <= BATCH or not openmp.can_run_alone():
            measure_group(tensors, group, rows, BATCH, fingerprints)
        else:
            with openmp.one_thread():
                measure_group(tensors, group, rows, 4 * BATCH, fingerprints)
    if plan.batches:
        with openmp.one_thread():
            measure_batches(tensors, plan.batches, rows, fingerprints)
    large = [(index, tensors[index]) for index in plan.large]
    for index, (row, found) in rows_of(large, fingerprint=fingerprint):
        rows[index] = row
        if fingerprints is not None:
            (fingerprints[index],) = found
    if fingerprints is not None:
        for index, x in enumerate(originals):
            if index not in fingerprints or x is not tensors[index]:
                # a single number, an empty tensor, or one in a format that was converted
                fingerprints[index] = bits.fingerprint(x, x.new_empty(SMALL, dtype=torch.int64))
    device = tensors[0].device
    columns = _tensor(array("d", chain.from_iterable(rows)), torch.float64, device)
    columns = columns.view(len(rows), TENSORS.width)
    bits_of_all = None
    if fingerprints is not None:
        values = array("q", chain.from_iterable([fingerprints[i].row for i in range(len(rows))]))
        bits_of_all = _tensor(values, torch.int64, device).view(len(rows), NUM_FINGERPRINT_COLUMNS)
    if inv_scale is not None:
        columns = TENSORS.scaled(columns, inv_scale.reshape(()).to(columns))
        return columns, TENSORS.flags_of(columns, thresholds), bits_of_all
    return columns, _tensor(array("i", _flags(rows, thresholds)), torch.int32, device), bits_of_all


def _tensor(values: array[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    x = torch.frombuffer(values, dtype=dtype)
    return x if device.type == "cpu" else x.to(device)


def sumsq(tensors: Sequence[Tensor]) -> float:
    """Return the sum of squares of real tensors of one device; NaN and Inf propagate."""
    large: list[tuple[int, Tensor]] = []
    small: dict[torch.dtype, list[Tensor]] = {}
    for index, x in enumerate(tensors):
        if x.numel() > SMALL:
            large.append((index, x))
        else:
            small.setdefault(x.dtype, []).append(x if x.dim() == 1 else x.reshape(-1))
    sums = [total for _, total in sums_of_squares_of(large)]
    for flats in small.values():
        step = BATCH // max(1, *[len(x) for x in flats])
        starts = range(0, len(flats), step)
        sums += [sum_of_squares(torch.cat(flats[start : start + step]).double()) for start in starts]
    return fsum(sums)


def _flags(rows: list[Row], thresholds: Thresholds) -> list[int]:
    """Do what `Schema.flags_of` does, for rows on the host."""
    # most rows have no flag; their squares and counts show it, with a margin for the rounding of the root and
    # of the quotient
    least = thresholds.vanishing * thresholds.vanishing * (1 + 2**-50)
    most = thresholds.exploding * thresholds.exploding * (1 - 2**-50)
    dead = thresholds.dead * (1 - 2**-50)
    return [
        0
        if least <= sumsq <= most and n_zero < dead * numel and not (n_nan or n_posinf or n_neginf)
        else _flags_of((numel, sumsq, total, n_zero, n_nan, n_posinf, n_neginf, top), thresholds)
        for numel, sumsq, total, n_zero, n_nan, n_posinf, n_neginf, top in rows
    ]


def _flags_of(row: Row, thresholds: Thresholds) -> int:
    numel, sumsq, _, n_zero, n_nan, n_posinf, n_neginf, _ = row
    if numel == 0:
        return 0
    if n_nan or n_posinf or n_neginf:
        flags = _EXPLODING | (_NAN if n_nan else 0) | (_INF if n_posinf or n_neginf else 0)
    else:
        norm = math.sqrt(sumsq)
        flags = _VANISHING if norm < thresholds.vanishing else 0
        flags = flags if norm <= thresholds.exploding else flags | _EXPLODING
    return flags | _DEAD if n_zero / numel >= thresholds.dead else flags
