"""The ops that measure tensors.

``gradiometer::tensor_stats`` returns columns and flags; ``gradiometer::tensor_stats_fingerprints`` also
returns fingerprints, from the same read.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from gradiometer.columns import NUM_FINGERPRINT_COLUMNS, TENSORS, Thresholds
from gradiometer.ops import dispatch, eager_plan, packing, reference, uploads
from gradiometer.ops.launch_plans import host_plan
from gradiometer.ops.library import REVISION, by_device, define

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.ops.launch_plans import LaunchPlan


def tensor_stats(
    tensors: Sequence[Tensor], thresholds: Thresholds, inv_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Measure tensors of one device in one read.

    Args:
        tensors: at least one floating-point or complex strided tensor; any shapes, strides, dtypes.
        thresholds: the limits for the flags.
        inv_scale: one element on the same device; the statistics are those of ``inv_scale * x``.

    Returns:
        columns ``(T, C) float64`` in the order of `gradiometer.columns.TENSORS`, and flags
        ``(T,) int32``, on the tensors' device.
    """
    return measure(tensors, thresholds, inv_scale, dispatch.recognize(tensors))[:2]


def measure(
    tensors: Sequence[Tensor],
    thresholds: Thresholds,
    inv_scale: Tensor | None,
    plan: LaunchPlan | None,
    *,
    fingerprint: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Do what `tensor_stats` does; also return fingerprints, ``(T, 3) int64``, if asked.

    ``plan`` is the result of `recognize` for these tensors. Fingerprints are those of the tensors' own bits,
    whatever ``inv_scale`` is.
    """
    if plan is not None and (inv_scale is None or dispatch.is_plain(inv_scale)):
        return measure_now(tensors, thresholds, inv_scale, plan, fingerprint=fingerprint)
    limits = thresholds.vanishing, thresholds.exploding, thresholds.dead
    with dispatch.without_grad():
        if fingerprint:
            return torch.ops.gradiometer.tensor_stats_fingerprints(tensors, *limits, inv_scale, REVISION)  # type: ignore[no-any-return]
        return *torch.ops.gradiometer.tensor_stats(tensors, *limits, inv_scale, REVISION), None


def norm_on_host(tensors: Sequence[Tensor]) -> float | None:
    """Return the L2 norm of all tensors together.

    None unless `recognize` has a plan for them, and eager PyTorch measures them on the CPU.
    """
    with dispatch.without_grad():
        plan = dispatch.recognize(tensors)
        if plan is None or plan.device.type != "cpu" or dispatch.uses_kernels(plan.device):
            return None
        with dispatch.without_autocast(plan.device):
            return math.sqrt(reference.sumsq(tensors))


def _by_reference(
    tensors: Sequence[Tensor],
    thresholds: Thresholds,
    inv_scale: Tensor | None = None,
    plan: LaunchPlan | None = None,
    gate: Tensor | None = None,
    *,
    fingerprint: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    # the host reads the gate before it calls
    del gate
    eager = host_plan(tensors, plan, eager_plan.plan_of)
    return reference.tensor_stats(tensors, thresholds, inv_scale, eager, fingerprint=fingerprint)


def _by_kernels(
    tensors: Sequence[Tensor],
    thresholds: Thresholds,
    inv_scale: Tensor | None = None,
    plan: LaunchPlan | None = None,
    gate: Tensor | None = None,
    *,
    fingerprint: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    from gradiometer import kernels  # noqa: PLC0415 as in dispatch.py

    tuning = kernels.tuning
    keep = plan is not None or not uploads.may_warm_up()
    count = len(tensors)
    narrow = [i for i, x in enumerate(tensors) if x.itemsize == 1] if fingerprint else []
    if narrow:
        # the kernels read formats of one byte as wider ones; the bits are read from copies, as more rows
        tensors, plan = [*tensors, *[packing.in_float32(tensors[i]) for i in narrow]], None
    packed = packing.pack(tensors, tuning.CHUNK, tuning.MAX_CHUNKS, plan, keep=keep, in_words=fingerprint)
    chunk_map, device = packed.chunk_map, packed.table.device
    shape = len(kernels.PARTIALS), chunk_map.num_chunks
    partials = torch.empty(shape, dtype=torch.float64, device=device)
    bits = None
    if fingerprint:
        shape = kernels.NUM_FINGERPRINT_PARTIALS, chunk_map.num_chunks
        bits = torch.empty(shape, dtype=torch.int64, device=device)
    for group in chunk_map.groups:
        kernels.moments(packed.pointers, packed.table, partials, *group, chunk_map.num_tensors, gate, bits)
    columns, flags = kernels.finalize(packed.table, partials, chunk_map.num_tensors, thresholds, inv_scale)
    if bits is None:
        return columns, flags, None
    fingerprints = kernels.finalize_fingerprints(packed.table, bits, chunk_map.num_tensors)
    for extra, i in enumerate(narrow, start=count):
        fingerprints[i].copy_(fingerprints[extra])
        fingerprints[i, 0] = tensors[i].numel()
    return columns[:count], flags[:count], fingerprints[:count]


measure_now = by_device(_by_reference, _by_kernels)


def _op(
    tensors: list[Tensor], vanishing: float, exploding: float, dead: float, *inv_scale: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    return measure_now(tensors, Thresholds(vanishing, exploding, dead), *inv_scale, **options)


def _fake(tensors: list[Tensor], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    new, rows = tensors[0].new_empty, len(tensors)
    return (
        new((rows, TENSORS.width), dtype=torch.float64),
        new((rows,), dtype=torch.int32),
        new((rows, NUM_FINGERPRINT_COLUMNS), dtype=torch.int64),
    )


_ARGUMENTS: Final = "(Tensor[] tensors, float vanishing, float exploding, float dead, Tensor? inv_scale=None)"
define(
    f"tensor_stats{_ARGUMENTS} -> (Tensor columns, Tensor flags)",
    lambda *args: _op(*args)[:2],
    lambda *args: _fake(*args)[:2],
)
define(
    f"tensor_stats_fingerprints{_ARGUMENTS} -> (Tensor columns, Tensor flags, Tensor fingerprints)",
    partial(_op, fingerprint=True),
    _fake,
)
