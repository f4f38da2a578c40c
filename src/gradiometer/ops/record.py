"""The ops that write a step into a ring.

``gradiometer::record_`` measures tensors and writes the result; ``gradiometer::append_`` writes an earlier
result. Both change their arguments, so they stay in a graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradiometer.columns import Section, Thresholds
from gradiometer.ops import dispatch, ring
from gradiometer.ops.dispatch import for_a_graph, is_plain
from gradiometer.ops.library import by_device, define
from gradiometer.ops.tensors import measure_now

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.ops.launch_plans import LaunchPlan


def record_(
    tensors: Sequence[Tensor],
    thresholds: Thresholds,
    inv_scale: Tensor | None,
    grads: int,
    steps: Tensor,
    cursor: Tensor,
    section: Section,
    plan: LaunchPlan | None,
    *,
    gated: bool = False,
    fingerprint: bool = False,
) -> None:
    """Measure tensors of one device and write them into the current step of a ring.

    Args:
        tensors: R tensors; one without elements stands for a tensor that is not measured.
        thresholds: the limits for the flags.
        inv_scale: as for `tensor_stats`.
        grads: the number of gradients, which come first and decide whether to skip the step.
        steps: the ring, see `gradiometer.ops.ring`.
        cursor: its state, ``(6,) float64``.
        section: where the rows are.
        plan: the result of `recognize` for the tensors.
        gated: do not read the tensors in a step that is not due. A gated call never decides to skip a step.
        fingerprint: whether to record fingerprints, too.
    """
    with torch.no_grad():
        if plan is not None and (inv_scale is None or is_plain(inv_scale)):
            _record(tensors, thresholds, inv_scale, grads, gated, steps, cursor, section, fingerprint, plan)
            return
        limits = thresholds.vanishing, thresholds.exploding, thresholds.dead
        given = for_a_graph(tensors)
        options = grads, gated, steps, cursor, section, fingerprint
        torch.ops.gradiometer.record_(given, *limits, inv_scale, *options)


def append_(
    columns: Tensor,
    flags: Tensor,
    grads: int,
    steps: Tensor,
    cursor: Tensor,
    section: Section,
    fingerprints: Tensor | None = None,
) -> None:
    """Write the result of `measure` into the current step of a ring, as `record_` does."""
    with torch.no_grad():
        torch.ops.gradiometer.append_(columns, flags, grads, steps, cursor, section, fingerprints)


def _record(
    tensors: Sequence[Tensor],
    thresholds: Thresholds,
    inv_scale: Tensor | None,
    grads: int,
    gated: bool,  # noqa: FBT001 in the order of the schema
    steps: Tensor,
    cursor: Tensor,
    section: Section,
    fingerprint: bool,  # noqa: FBT001
    plan: LaunchPlan | None = None,
) -> None:
    if gated and not dispatch.uses_kernels(steps.device) and not ring.is_due(cursor):
        return
    gate = cursor if gated else None
    columns, flags, fingerprints = measure_now(
        tensors, thresholds, inv_scale, plan, gate, fingerprint=fingerprint
    )
    # if the gate is closed, the rows come from uninitialized memory: do not decide from them
    _append(columns, flags, -1 if gated else grads, steps, cursor, section, fingerprints)


def _append_by_kernels(
    columns: Tensor,
    flags: Tensor,
    grads: int,
    steps: Tensor,
    cursor: Tensor,
    section: Section,
    fingerprints: Tensor | None = None,
) -> None:
    from gradiometer import kernels  # noqa: PLC0415 as in dispatch.py

    # the kernels read rows one after the other
    bits = None if fingerprints is None else fingerprints.contiguous()
    kernels.append(columns.contiguous(), flags.contiguous(), grads, steps, cursor, section, bits)


_append = by_device(ring.append_, _append_by_kernels)


def _record_op(tensors: list[Tensor], vanishing: float, exploding: float, dead: float, *rest: Any) -> None:
    others: list[Any] = list(rest)
    others[-2] = Section(*others[-2])
    _record(tensors, Thresholds(vanishing, exploding, dead), *others)


def _append_op(
    columns: Tensor,
    flags: Tensor,
    grads: int,
    steps: Tensor,
    cursor: Tensor,
    section: list[int],
    fingerprints: Tensor | None = None,
) -> None:
    _append(columns, flags, grads, steps, cursor, Section(*section), fingerprints)


define(
    "record_(Tensor[] tensors, float vanishing, float exploding, float dead, Tensor? inv_scale, int grads,"
    " bool gated, Tensor(a!) steps, Tensor(b!) cursor, int[] section, bool fingerprint) -> ()",
    _record_op,
)
define(
    "append_(Tensor columns, Tensor flags, int grads, Tensor(a!) steps, Tensor(b!) cursor, int[] section,"
    " Tensor? fingerprints=None) -> ()",
    _append_op,
)
