"""The ring of recorded steps: its layout, and eager PyTorch code that writes one step.

A ring is ``(capacity, size) float64``. A slot holds one step: a header, then a section for each table, see
`gradiometer.columns.Section`. A section whose number in the header is not the slot's step was not written in
this step, and a row whose first column, the number of elements, is 0 was not measured. The state of the ring,
the cursor, is on the same device, so that a compiled or captured step finds both at the same addresses and
reads their current values.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Final

import torch

from gradiometer.columns import (
    HEADER_SECTIONS,
    HEADER_SKIPPED,
    HEADER_STEP,
    NUM_FINGERPRINT_COLUMNS,
    TENSORS,
    Cursor,
    Section,
)

if TYPE_CHECKING:
    from torch import Tensor

_NONFINITE: Final = [TENSORS.index[name] for name in ("n_nan", "n_posinf", "n_neginf")]
_SUMSQ: Final = TENSORS.index["sumsq"]


def is_due(cursor: Tensor) -> bool:
    """Return whether the current step is due. Reads the cursor, which is on the CPU."""
    step, _, every, *_ = cursor.tolist()
    return bool(step % every == 0)


def append_(
    columns: Tensor,
    flags: Tensor,
    grads: int,
    steps: Tensor,
    cursor: Tensor,
    section: Section,
    fingerprints: Tensor | None = None,
) -> None:
    """Write rows of one step into the ring in eager PyTorch, as `kernels.append` does on a GPU.

    The first call in a step opens a slot if the step is due, its gradients are not finite, or their norm is
    above the limit. The first call for a section writes all its rows; a later one in the same step overwrites
    the rows that it measured.

    Args:
        columns: ``(M, C) float64``, of the first M of the section's rows.
        flags: ``(M,) int32``.
        grads: the number of gradients, which come first and decide whether to skip the step; with 0 or -1
            the decision does not change.
        steps: the ring, changed in place.
        cursor: its state, changed in place.
        section: where the rows are.
        fingerprints: ``(M, 3) int64``, if the section has room for them.
    """
    if cursor.device.type != "cpu":
        # Triton is not there or cannot launch kernels: go through the host, and wait for the device
        there, state_there = steps.cpu(), cursor.cpu()
        bits = None if fingerprints is None else fingerprints.cpu()
        append_(columns.cpu(), flags.cpu(), grads, there, state_there, section, bits)
        steps.copy_(there)
        cursor.copy_(state_there)
        return
    state = numbers(cursor)
    step, count, every, skip_nonfinite, skip_above, _ = state
    found = False
    if grads > 0:
        sums = columns[:grads].sum(dim=0).tolist()
        nonfinite = any([sums[place] for place in _NONFINITE])
        above = math.sqrt(sums[_SUMSQ]) > skip_above
        found = nonfinite or above
        state[Cursor.SKIP] = (nonfinite and skip_nonfinite > 0) or above

    # in an empty ring this is the last slot, which holds no step
    slot = steps[int(count - 1) % len(steps)]
    header = numbers(slot[: section.header_size])
    if header[HEADER_STEP] == step:
        header[HEADER_SKIPPED] = max(header[HEADER_SKIPPED], state[Cursor.SKIP])
    elif found or step % every == 0:
        slot = steps[int(count) % len(steps)]
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


def numbers(tensor: Tensor) -> ctypes.Array[ctypes.c_double]:
    """Return the memory of a contiguous float64 tensor on the CPU; operators take ten times as long."""
    return (ctypes.c_double * tensor.numel()).from_address(tensor.data_ptr())
