"""Write columns and flags into the current step's slot of a ring, in two small launches.

The first runs one program, which decides whether to skip the step and selects its slot. The second writes
the rows.
`gradiometer.ops.ring` describes the ring and the cursor, and does the same in eager PyTorch.
"""

import torch
import triton
import triton.language as tl

from gradiometer.columns import COLUMN_INDEX, HEADER_SKIPPED, HEADER_STEP, NUM_COLUMNS, Cursor
from gradiometer.kernels import tuning
from gradiometer.kernels.primitives import is_due

__all__ = ["append"]

# defaults of arguments, see finalize.py
_STEP = int(Cursor.STEP)
_COUNT = int(Cursor.COUNT)
_SKIP_NONFINITE = int(Cursor.SKIP_NONFINITE)
_SKIP_ABOVE = int(Cursor.SKIP_ABOVE)
_SKIP = int(Cursor.SKIP)
_SUMSQ = COLUMN_INDEX["sumsq"]
_NAN = COLUMN_INDEX["n_nan"]
_POSINF = COLUMN_INDEX["n_posinf"]
_NEGINF = COLUMN_INDEX["n_neginf"]
_NUMEL = COLUMN_INDEX["numel"]

# rows per program
_ROWS = 64


@triton.jit(do_not_specialize=["grads", "capacity", "slot_size"])
def _open_kernel(
    columns_ptr,  # (M, C) float64
    ring_ptr,  # (capacity, R + 1, C + 1) float64
    cursor_ptr,  # (6,) float64
    plan_ptr,  # (2,) int64: the slot to write or -1, and whether it already holds this step
    grads: tl.int32,
    capacity: tl.int64,
    slot_size: tl.int64,  # (R + 1) * (C + 1)
    NUM_COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr = _STEP,
    COUNT: tl.constexpr = _COUNT,
    SKIP_NONFINITE: tl.constexpr = _SKIP_NONFINITE,
    SKIP_ABOVE: tl.constexpr = _SKIP_ABOVE,
    SKIP: tl.constexpr = _SKIP,
    HEADER_STEP: tl.constexpr = HEADER_STEP,
    HEADER_SKIPPED: tl.constexpr = HEADER_SKIPPED,
    SUMSQ: tl.constexpr = _SUMSQ,
    NAN: tl.constexpr = _NAN,
    POSINF: tl.constexpr = _POSINF,
    NEGINF: tl.constexpr = _NEGINF,
):
    found = tl.zeros((), tl.int1)
    skip = tl.load(cursor_ptr + SKIP)
    if grads > 0:
        offs = tl.arange(0, TILE)
        sumsq = tl.zeros((TILE,), tl.float64)
        nonfinite = tl.zeros((TILE,), tl.float64)
        for i in range(0, grads, TILE):
            mask = offs < grads - i
            row = columns_ptr + (i + offs).to(tl.int64) * NUM_COLUMNS
            sumsq += tl.load(row + SUMSQ, mask=mask, other=0.0)
            nonfinite += tl.load(row + NAN, mask=mask, other=0.0)
            nonfinite += tl.load(row + POSINF, mask=mask, other=0.0)
            nonfinite += tl.load(row + NEGINF, mask=mask, other=0.0)
        above = tl.sqrt(tl.sum(sumsq)) > tl.load(cursor_ptr + SKIP_ABOVE)
        has_nonfinite = tl.sum(nonfinite) > 0
        found = has_nonfinite | above
        skip = ((has_nonfinite & (tl.load(cursor_ptr + SKIP_NONFINITE) > 0)) | above).to(tl.float64)
        tl.store(cursor_ptr + SKIP, skip)

    step = tl.load(cursor_ptr + STEP)
    count = tl.load(cursor_ptr + COUNT).to(tl.int64)
    # in an empty ring this is the last slot, which holds no step
    last = (count + capacity - 1) % capacity
    is_open = tl.load(ring_ptr + last * slot_size + HEADER_STEP) == step
    slot = tl.where(is_open, last, count % capacity)
    # grads is -1 in a gated recorder, whose rows are garbage in a step that is not due
    if (is_open & (grads >= 0)) | found | is_due(cursor_ptr):
        header = ring_ptr + slot * slot_size
        skipped = tl.load(header + HEADER_SKIPPED)
        tl.store(header + HEADER_STEP, step)
        tl.store(header + HEADER_SKIPPED, tl.where(is_open, tl.maximum(skipped, skip), skip))
        tl.store(cursor_ptr + COUNT, (count + (is_open == 0).to(tl.int64)).to(tl.float64))
        tl.store(plan_ptr, slot)
    else:
        tl.store(plan_ptr, slot * 0 - 1)
    tl.store(plan_ptr + 1, is_open.to(tl.int64))


@triton.jit(do_not_specialize=["num_given", "num_rows"])
def _write_kernel(
    columns_ptr,  # (M, C) float64
    flags_ptr,  # (M,) int32
    fingerprints_ptr,  # (M, 3) int64; unused without FINGERPRINT
    ring_ptr,
    plan_ptr,
    num_given: tl.int32,  # M
    num_rows: tl.int32,  # R
    NUM_COLUMNS: tl.constexpr,
    RING_WIDTH: tl.constexpr,
    FINGERPRINT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,  # a power of two, C + 1 or more
    NUMEL: tl.constexpr = _NUMEL,
):
    slot = tl.load(plan_ptr)
    if slot >= 0:
        row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        given = row < num_given
        measured = tl.load(columns_ptr + row * NUM_COLUMNS + NUMEL, mask=given, other=0.0) > 0
        # a new slot gets zeros in the rows that are not given
        written = (row < num_rows) & (measured | (tl.load(plan_ptr + 1) == 0))
        column = tl.arange(0, WIDTH)
        out = ring_ptr + (slot * (num_rows + 1) + 1) * RING_WIDTH + row * RING_WIDTH
        mask = written[:, None] & (column < NUM_COLUMNS)[None, :]
        read = mask & given[:, None]
        values = tl.load(columns_ptr + row[:, None] * NUM_COLUMNS + column[None, :], mask=read, other=0.0)
        tl.store(out[:, None] + column[None, :], values, mask=mask)
        flags = tl.load(flags_ptr + row, mask=written & given, other=0)
        tl.store(out + NUM_COLUMNS, flags.to(tl.float64), mask=written)
        if FINGERPRINT:
            for i in tl.static_range(RING_WIDTH - NUM_COLUMNS - 1):
                place = row * (RING_WIDTH - NUM_COLUMNS - 1) + i
                bits = tl.load(fingerprints_ptr + place, mask=written & given, other=0)
                tl.store(out + (NUM_COLUMNS + 1 + i), bits.to(tl.float64, bitcast=True), mask=written)


def append(
    columns: torch.Tensor,
    flags: torch.Tensor,
    grads: int,
    ring: torch.Tensor,
    cursor: torch.Tensor,
    fingerprints: torch.Tensor | None = None,
) -> None:
    """Write one step's rows, and decide whether to skip the step.

    Args:
        columns: ``(M, C) float64``, contiguous, of the first M of the R rows.
        flags: ``(M,) int32``, contiguous.
        grads: the number of gradients, which are the first rows.
        ring: ``(capacity, R + 1, C + 1) float64``, changed in place.
        cursor: ``(6,) float64``, changed in place.
        fingerprints: ``(M, 3) int64``, contiguous, if the ring has three more columns for them.
    """
    capacity, size, width = ring.shape
    plan = torch.empty(2, dtype=torch.int64, device=ring.device)
    tile, threads, registers = tuning.FINALIZE
    options = tuning.options(threads, registers, ring.device)
    _open_kernel[(1,)](
        columns,
        ring,
        cursor,
        plan,
        grads,
        capacity,
        size * width,
        NUM_COLUMNS=NUM_COLUMNS,
        TILE=tile,
        **options,
    )
    _write_kernel[(triton.cdiv(size - 1, _ROWS),)](
        columns,
        flags,
        flags if fingerprints is None else fingerprints,
        ring,
        plan,
        columns.shape[0],
        size - 1,
        NUM_COLUMNS=NUM_COLUMNS,
        RING_WIDTH=width,
        FINGERPRINT=fingerprints is not None,
        ROWS=_ROWS,
        WIDTH=triton.next_power_of_2(NUM_COLUMNS + 1),
        **options,
    )
