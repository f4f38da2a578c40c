"""The ring of recorded steps: its layout, and the ops that write one step.

A ring is ``(capacity, size) float64``. A slot holds one step: a header, then a section for each table, see
`gradiometer.columns.Section`. A section whose number in the header is not the slot's step was not written in
this step, and a row whose first column, the number of elements, is 0 was not measured. The state of the ring,
the cursor, is on the same device, so that a compiled or captured step finds both at the same addresses and
reads their current values.

``gradiometer::record_`` measures tensors and writes the result; ``gradiometer::append_`` writes an earlier
result. Both change their arguments, so they stay in a graph.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from gradiometer.columns import (
    HEADER_SECTIONS,
    HEADER_SKIPPED,
    HEADER_STEP,
    NUM_FINGERPRINT_COLUMNS,
    TENSORS,
    Cursor,
    Section,
    Thresholds,
)
from gradiometer.ops import dispatch
from gradiometer.ops.dispatch import for_a_graph, is_plain
from gradiometer.ops.library import by_device, define
from gradiometer.ops.tensors import measure_now

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.ops.launch_plans import LaunchPlan

_NONFINITE: Final = [TENSORS.index[name] for name in ("n_nan", "n_posinf", "n_neginf")]
_SUMSQ: Final = TENSORS.index["sumsq"]


def record_(
    tensors: Sequence[Tensor],
    thresholds: Thresholds,
    inv_scale: Tensor | None,
    num_grads: int,
    ring: Tensor,
    cursor: Tensor,
    section: Section,
    plan: LaunchPlan | None,
    *,
    gated: bool = False,
    fingerprint: bool = False,
) -> None:
    """Measure tensors of one device and write them into the current step of a ring.

    The first call in a step opens a slot if the step is due, its gradients are not finite, or their norm is
    above the limit. The first call for a section writes all its rows; a later one in the same step overwrites
    the rows that it measured.

    Args:
        tensors: R tensors; one without elements stands for a tensor that is not measured.
        thresholds: the limits for the flags.
        inv_scale: as for `tensor_stats`.
        num_grads: the number of gradients, which come first and decide whether to skip the step; with 0 or -1
            the decision does not change.
        ring: the ring, changed in place.
        cursor: its state, changed in place.
        section: where the rows are.
        plan: the result of `recognize` for the tensors.
        gated: do not read the tensors in a step that is not due. A gated call never decides to skip a step.
        fingerprint: whether to record fingerprints, too.
    """
    with torch.no_grad():
        # A known list in eager code needs no dispatcher. Others go through the op, at the end of this file.
        if plan is not None and (inv_scale is None or is_plain(inv_scale)):
            _record(
                tensors, thresholds, inv_scale, num_grads, gated, ring, cursor, section, fingerprint, plan
            )
            return
        limits = thresholds.vanishing, thresholds.exploding, thresholds.dead
        given = for_a_graph(tensors)
        options = num_grads, gated, ring, cursor, tuple(section), fingerprint
        torch.ops.gradiometer.record_(given, *limits, inv_scale, *options)


def append_(
    columns: Tensor,
    flags: Tensor,
    num_grads: int,
    ring: Tensor,
    cursor: Tensor,
    section: Section,
    fingerprints: Tensor | None = None,
) -> None:
    """Write rows that were measured before into the current step's slot, as `record_` does.

    They are the first rows of the section, and overwrite what a call in the same step wrote there.
    """
    # The op disables gradients itself. torch cannot load an exported no_grad block that returns nothing
    torch.ops.gradiometer.append_(columns, flags, num_grads, ring, cursor, tuple(section), fingerprints)


def numbers(tensor: Tensor) -> ctypes.Array[ctypes.c_double]:
    """Return the memory of a contiguous float64 tensor on the CPU; operators take ten times as long."""
    return (ctypes.c_double * tensor.numel()).from_address(tensor.data_ptr())


def is_due(cursor: Tensor) -> bool:
    """Return whether EVERY is positive and divides STEP. Reads the cursor, and waits for its device."""
    # not even a call that returns the same tensor: function transforms would wrap it
    state = numbers(cursor if cursor.device.type == "cpu" else cursor.cpu())
    every = state[Cursor.EVERY]
    return bool(every > 0 and state[Cursor.STEP] % every == 0)


def is_projected(cursor: Tensor) -> bool:
    """Return whether EVERY and PROJECT_EVERY are positive and divide STEP. Waits for the cursor's device."""
    state = numbers(cursor if cursor.device.type == "cpu" else cursor.cpu())
    each = state[Cursor.EVERY], state[Cursor.PROJECT_EVERY]
    return all([every > 0 and state[Cursor.STEP] % every == 0 for every in each])


def _record(
    tensors: Sequence[Tensor],
    thresholds: Thresholds,
    inv_scale: Tensor | None,
    num_grads: int,
    gated: bool,  # noqa: FBT001 in the order of the schema
    ring: Tensor,
    cursor: Tensor,
    section: Section,
    fingerprint: bool,  # noqa: FBT001
    plan: LaunchPlan | None = None,
) -> None:
    if gated and not dispatch.uses_kernels(ring.device) and not is_due(cursor):
        return
    gate = cursor if gated else None
    columns, flags, fingerprints = measure_now(
        tensors, thresholds, inv_scale, plan, gate, fingerprint=fingerprint
    )
    # if the gate is closed, the rows come from uninitialized memory: do not decide from them
    _append(columns, flags, -1 if gated else num_grads, ring, cursor, section, fingerprints)


def append_in_eager(
    columns: Tensor,
    flags: Tensor,
    num_grads: int,
    ring: Tensor,
    cursor: Tensor,
    section: Section,
    fingerprints: Tensor | None = None,
) -> None:
    """Do what `append_` does, in eager PyTorch."""
    if cursor.device.type != "cpu":
        # Triton is not there or cannot launch kernels: go through the host, and wait for the device
        there, state_there = ring.cpu(), cursor.cpu()
        bits = None if fingerprints is None else fingerprints.cpu()
        append_in_eager(columns.cpu(), flags.cpu(), num_grads, there, state_there, section, bits)
        ring.copy_(there)
        cursor.copy_(state_there)
        return
    state = numbers(cursor)
    step, count, every, skip_nonfinite, skip_above, *_ = state
    found = False
    if num_grads > 0:
        sums = columns[:num_grads].sum(dim=0).tolist()
        nonfinite = any([sums[place] for place in _NONFINITE])
        above = math.sqrt(sums[_SUMSQ]) > skip_above
        found = nonfinite or above
        state[Cursor.SKIP] = (nonfinite and skip_nonfinite > 0) or above

    # in an empty ring this is the last slot, which holds no step
    slot = ring[int(count - 1) % len(ring)]
    header = numbers(slot[: section.header_size])
    if header[HEADER_STEP] == step:
        header[HEADER_SKIPPED] = max(header[HEADER_SKIPPED], state[Cursor.SKIP])
    elif found or step % every == 0:
        slot = ring[int(count) % len(ring)]
        header = numbers(slot[: section.header_size])
        header[HEADER_STEP], header[HEADER_SKIPPED] = step, state[Cursor.SKIP]
        header[HEADER_SECTIONS:] = [-1.0] * (section.header_size - HEADER_SECTIONS)
        state[Cursor.COUNT] += 1
    else:
        return
    own = slice(section.header, section.header + section.tables)
    is_written = [last == step for last in header[own]]
    header[own] = [step] * section.tables
    if len(set(is_written)) == 1:
        _write(slot, section, columns, flags, fingerprints, is_written=is_written[0])
        return
    size = section.rows // max(1, section.tables)
    for i, written in enumerate(is_written):
        rows = slice(i * size, (i + 1) * size)
        width = columns.shape[1] + 1 + (0 if fingerprints is None else NUM_FINGERPRINT_COLUMNS)
        part = section._replace(offset=section.offset + i * size * width, rows=size)
        bits = None if fingerprints is None else fingerprints[rows]
        _write(slot, part, columns[rows], flags[rows], bits, is_written=written)


def _write(
    slot: Tensor,
    section: Section,
    columns: Tensor,
    flags: Tensor,
    fingerprints: Tensor | None,
    *,
    is_written: bool,
) -> None:
    """Write the rows; if the section was written in this step before, only those that were measured."""
    given, size = columns.shape
    bits = None if fingerprints is None else fingerprints.view(torch.float64)
    width = size + 1 + (0 if bits is None else bits.shape[1])
    rows = slot[section.offset : section.offset + section.rows * width].view(section.rows, width)
    if not is_written:
        rows[:given, :size] = columns
        rows[:given, size] = flags
        if bits is not None:
            rows[:given, size + 1 :] = bits
        rows[given:] = 0.0
        return
    measured = (columns[:, 0] > 0).unsqueeze(1)
    parts = [columns, flags.to(torch.float64).unsqueeze(1), *([] if bits is None else [bits])]
    start = 0
    for part in parts:
        kept = rows[:given, start : start + part.shape[1]]
        torch.where(measured, part, kept, out=kept)
        start += part.shape[1]


def _append_by_kernels(*args: Any, **options: Any) -> None:
    from gradiometer import kernels  # noqa: PLC0415 as in dispatch.py

    kernels.append(*args, **options)


_append = by_device(append_in_eager, _append_by_kernels)


def _record_op(tensors: list[Tensor], vanishing: float, exploding: float, dead: float, *rest: Any) -> None:
    others: list[Any] = list(rest)
    others[-2] = Section(*others[-2])
    _record(tensors, Thresholds(vanishing, exploding, dead), *others)


def _append_op(columns: Tensor, *rest: Any) -> None:
    flags, num_grads, ring, cursor, section, *fingerprints = rest
    _append(columns, flags, num_grads, ring, cursor, Section(*section), *fingerprints)


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
