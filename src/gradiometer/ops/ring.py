"""The ring of recorded steps: its layout, and eager PyTorch code that writes one step.

A ring is ``(capacity, R + 1, C + 1) float64``. A slot holds one step: first a header, then R rows of raw
columns and flags; a row whose ``numel`` is 0 was not measured. With updates, the last rows are the second
rows of `gradiometer.columns.updates`. With fingerprints it is three numbers wider:
they follow the flags, as float64 with the bits of the integers. The state of the ring, the cursor, is on the
same device, so that a compiled or captured step finds both at the same addresses and reads their current
values.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Final

import torch

from gradiometer.columns import COLUMN_INDEX, HEADER_SKIPPED, HEADER_STEP, NUM_COLUMNS, RING_WIDTH, Cursor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["append_", "is_due", "numbers"]


_NONFINITE: Final = [COLUMN_INDEX[name] for name in ("n_nan", "n_posinf", "n_neginf")]
_SUMSQ: Final = COLUMN_INDEX["sumsq"]
_NUMEL: Final = COLUMN_INDEX["numel"]


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
    fingerprints: Tensor | None = None,
) -> None:
    """Write one step's rows into the ring in eager PyTorch, as `kernels.append` does on a GPU.

    The first call in a step opens a slot if the step is due, its gradients are not finite, or their norm is
    above the limit. A later call in the same step overwrites the rows that it measured.

    Args:
        columns: ``(M, C) float64``, of the first M of the R rows.
        flags: ``(M,) int32``.
        grads: the number of gradients, which come first and decide whether to skip the step; with 0 or -1
            the decision does not change.
        steps: the ring, changed in place.
        cursor: its state, changed in place.
        fingerprints: ``(M, 3) int64``, if the ring has room for them.
    """
    if cursor.device.type != "cpu":
        # Triton is not there or cannot launch kernels: go through the host, and wait for the device
        there, state_there = steps.cpu(), cursor.cpu()
        bits = None if fingerprints is None else fingerprints.cpu()
        append_(columns.cpu(), flags.cpu(), grads, there, state_there, bits)
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
    bits = None if fingerprints is None else fingerprints.view(torch.float64)
    end = 1 + len(columns)
    header = numbers(slot[0])
    if header[HEADER_STEP] == step:
        rows = slot[1:end]
        measured = columns[:, _NUMEL] > 0
        torch.where(measured.unsqueeze(1), columns, rows[:, :NUM_COLUMNS], out=rows[:, :NUM_COLUMNS])
        torch.where(measured, flags.to(torch.float64), rows[:, NUM_COLUMNS], out=rows[:, NUM_COLUMNS])
        if bits is not None:
            kept = rows[:, RING_WIDTH:]
            kept.copy_(torch.where(measured.unsqueeze(1), bits, kept))
        header[HEADER_SKIPPED] = max(header[HEADER_SKIPPED], state[Cursor.SKIP])
    elif found or step % every == 0:
        slot = steps[int(count) % len(steps)]
        slot[1:end, :NUM_COLUMNS] = columns
        slot[1:end, NUM_COLUMNS] = flags
        if bits is not None:
            slot[1:end, RING_WIDTH:] = bits
        if end < len(slot):
            slot[end:] = 0.0
        header = numbers(slot[0])
        header[HEADER_STEP], header[HEADER_SKIPPED] = step, state[Cursor.SKIP]
        state[Cursor.COUNT] += 1


def numbers(tensor: Tensor) -> ctypes.Array[ctypes.c_double]:
    """Return the memory of a contiguous float64 tensor on the CPU; operators take ten times as long."""
    return (ctypes.c_double * tensor.numel()).from_address(tensor.data_ptr())
