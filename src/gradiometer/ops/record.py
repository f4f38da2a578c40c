"""The ops that write a step into a ring.

``gradiometer::record_`` measures tensors and writes the result; ``gradiometer::append_`` writes an earlier
result. Both change their arguments, so they stay in a graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradiometer.columns import Section, Thresholds
from gradiometer.ops import library, ring
from gradiometer.ops.library import LIBRARY, for_a_graph, is_plain, launching_on

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.ops.packing import LaunchPlan

LIBRARY.define(
    "record_(Tensor[] tensors, float vanishing, float exploding, float dead, Tensor? inv_scale, int grads,"
    " bool gated, Tensor(a!) steps, Tensor(b!) cursor, int[] section, bool fingerprint) -> ()"
)
LIBRARY.define(
    "append_(Tensor columns, Tensor flags, int grads, Tensor(a!) steps, Tensor(b!) cursor, int[] section,"
    " Tensor? fingerprints=None) -> ()"
)


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
        torch.ops.gradiometer.record_(
            for_a_graph(tensors),
            thresholds.vanishing,
            thresholds.exploding,
            thresholds.dead,
            inv_scale,
            grads,
            gated,
            steps,
            cursor,
            section,
            fingerprint,
        )


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
    if library.uses_kernels(steps.device):
        with torch.no_grad(), launching_on(steps.device):
            gate = cursor if gated else None
            measured = library.run_kernels(
                tensors, thresholds, inv_scale, plan, gate, fingerprint=fingerprint
            )
    elif gated and not ring.is_due(cursor):
        return
    else:
        measured = library.measure_now(tensors, thresholds, inv_scale, plan, fingerprint=fingerprint)
    columns, flags, fingerprints = measured
    # if the gate is closed, the rows come from uninitialized memory: do not decide from them
    _append(columns, flags, -1 if gated else grads, steps, cursor, section, fingerprints)


def _append(
    columns: Tensor,
    flags: Tensor,
    grads: int,
    steps: Tensor,
    cursor: Tensor,
    section: Sequence[int],
    fingerprints: Tensor | None = None,
) -> None:
    section = Section(*section)
    with torch.no_grad():
        if not library.uses_kernels(steps.device):
            ring.append_(columns, flags, grads, steps, cursor, section, fingerprints)
            return
        with launching_on(steps.device):
            from gradiometer import kernels  # noqa: PLC0415 as in library.py

            # the kernels read rows one after the other
            bits = None if fingerprints is None else fingerprints.contiguous()
            kernels.append(columns.contiguous(), flags.contiguous(), grads, steps, cursor, section, bits)


def _record_op(
    tensors: list[Tensor],
    vanishing: float,
    exploding: float,
    dead: float,
    inv_scale: Tensor | None,
    grads: int,
    gated: bool,  # noqa: FBT001 in the order of the schema
    steps: Tensor,
    cursor: Tensor,
    section: list[int],
    fingerprint: bool,  # noqa: FBT001
) -> None:
    limits = Thresholds(vanishing, exploding, dead)
    _record(tensors, limits, inv_scale, grads, gated, steps, cursor, Section(*section), fingerprint)


LIBRARY.impl("record_", _record_op, "CompositeExplicitAutograd")
LIBRARY.impl("append_", _append, "CompositeExplicitAutograd")
for _name in ("record_", "append_"):
    LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"gradiometer::{_name}", lambda *_: None, lib=LIBRARY)
