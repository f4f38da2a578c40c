"""Write rows into a section of the current step's slot of a ring, in two small launches.

The first runs one program, which decides whether to skip the step, selects its slot and marks the section as
written. The second writes the rows. Widths and offsets are arguments, so that tables of all schemas share the
kernels.
`gradiometer.ops.ring` describes the ring and the cursor, and does the same in eager PyTorch.
"""

import torch
import triton
import triton.language as tl

from gradiometer.columns import (
    HEADER_SECTIONS,
    HEADER_SKIPPED,
    HEADER_STEP,
    NUM_FINGERPRINT_COLUMNS,
    Cursor,
    Section,
)
from gradiometer.kernels import tuning
from gradiometer.kernels.primitives import NAN, NEGINF, POSINF, SUMSQ, is_due

# defaults of arguments, see finalize.py
_STEP, _COUNT, _, _SKIP_NONFINITE, _SKIP_ABOVE, _SKIP, _ = map(int, Cursor)

# rows per program
_ROWS = 64


@triton.jit(
    do_not_specialize=["grads", "capacity", "slot_size", "num_columns", "header", "tables", "header_size"]
)
def _open_kernel(
    columns_ptr,  # (M, C) float64
    ring_ptr,  # (capacity, slot_size) float64
    cursor_ptr,  # (6,) float64
    plan_ptr,  # (1 + tables,) int64: the slot to write or -1, and whether it already has this step's table
    grads: tl.int32,
    capacity: tl.int64,
    slot_size: tl.int64,
    num_columns: tl.int32,
    header: tl.int32,
    tables: tl.int32,
    header_size: tl.int32,
    TILE: tl.constexpr,
    STEP: tl.constexpr = _STEP,
    COUNT: tl.constexpr = _COUNT,
    SKIP_NONFINITE: tl.constexpr = _SKIP_NONFINITE,
    SKIP_ABOVE: tl.constexpr = _SKIP_ABOVE,
    SKIP: tl.constexpr = _SKIP,
    HEADER_STEP: tl.constexpr = HEADER_STEP,
    HEADER_SKIPPED: tl.constexpr = HEADER_SKIPPED,
    HEADER_SECTIONS: tl.constexpr = HEADER_SECTIONS,
    SUMSQ: tl.constexpr = SUMSQ,
    NAN: tl.constexpr = NAN,
    POSINF: tl.constexpr = POSINF,
    NEGINF: tl.constexpr = NEGINF,
):
    found = tl.zeros((), tl.int1)
    skip = tl.load(cursor_ptr + SKIP)
    if grads > 0:
        offs = tl.arange(0, TILE)
        sumsq = tl.zeros((TILE,), tl.float64)
        nonfinite = tl.zeros((TILE,), tl.float64)
        for i in range(0, grads, TILE):
            mask = offs < grads - i
            row = columns_ptr + (i + offs).to(tl.int64) * num_columns
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
        head = ring_ptr + slot * slot_size
        skipped = tl.load(head + HEADER_SKIPPED)
        tl.store(head + HEADER_STEP, step)
        tl.store(head + HEADER_SKIPPED, tl.where(is_open, tl.maximum(skipped, skip), skip))
        tl.store(cursor_ptr + COUNT, (count + (is_open == 0).to(tl.int64)).to(tl.float64))
        tl.store(plan_ptr, slot)
        for i in range(HEADER_SECTIONS, header_size):
            written = tl.load(head + i)
            own = (i >= header) & (i < header + tables)
            tl.store(plan_ptr + 1 + i - header, (is_open & (written == step)).to(tl.int64), mask=own)
            # what an earlier step has left in a new slot is no table of this one
            written = tl.where(is_open, written, -1.0)
            tl.store(head + i, tl.where(own, step, written))
    else:
        tl.store(plan_ptr, slot * 0 - 1)


@triton.jit(
    do_not_specialize=["num_given", "num_rows", "rows_of_table", "num_columns", "slot_size", "offset"]
)
def _write_kernel(
    columns_ptr,  # (M, C) float64
    flags_ptr,  # (M,) int32
    fingerprints_ptr,  # (M, 3) int64; unused without FINGERPRINTS
    ring_ptr,
    plan_ptr,
    num_given: tl.int32,  # M
    num_rows: tl.int32,  # of all tables
    rows_of_table: tl.int32,
    num_columns: tl.int32,
    slot_size: tl.int64,
    offset: tl.int64,
    FINGERPRINTS: tl.constexpr,  # numbers of a fingerprint, 0 or 3
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,  # a power of two, C or more
):
    slot = tl.load(plan_ptr)
    if slot >= 0:
        row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = row < num_rows
        given = row < num_given
        # the number of elements comes first
        measured = tl.load(columns_ptr + row * num_columns, mask=given, other=0.0) > 0
        is_written = tl.load(plan_ptr + 1 + row // rows_of_table, mask=inside, other=0)
        # a table gets zeros in the rows that are not given
        written = inside & (measured | (is_written == 0))
        column = tl.arange(0, WIDTH)
        width = num_columns + 1 + FINGERPRINTS
        out = ring_ptr + slot * slot_size + offset + row * width
        mask = written[:, None] & (column < num_columns)[None, :]
        read = mask & given[:, None]
        values = tl.load(columns_ptr + row[:, None] * num_columns + column[None, :], mask=read, other=0.0)
        tl.store(out[:, None] + column[None, :], values, mask=mask)
        flags = tl.load(flags_ptr + row, mask=written & given, other=0)
        tl.store(out + num_columns, flags.to(tl.float64), mask=written)
        for i in tl.static_range(FINGERPRINTS):
            bits = tl.load(fingerprints_ptr + row * FINGERPRINTS + i, mask=written & given, other=0)
            tl.store(out + (num_columns + 1 + i), bits.to(tl.float64, bitcast=True), mask=written)


def append(
    columns: torch.Tensor,
    flags: torch.Tensor,
    grads: int,
    ring: torch.Tensor,
    cursor: torch.Tensor,
    section: Section,
    fingerprints: torch.Tensor | None = None,
) -> None:
    """Do what `gradiometer.ops.append_` does."""
    capacity, size = ring.shape
    given, num_columns = columns.shape
    plan = torch.empty(1 + section.tables, dtype=torch.int64, device=ring.device)
    tile, threads, registers = tuning.FINALIZE
    options = tuning.options(threads, registers, ring.device)
    # the kernels read rows one after the other
    columns, flags = columns.contiguous(), flags.contiguous()
    bits = flags if fingerprints is None else fingerprints.contiguous()
    _open_kernel[(1,)](
        columns,
        ring,
        cursor,
        plan,
        grads,
        capacity,
        size,
        num_columns,
        section.header,
        section.tables,
        section.header_size,
        TILE=tile,
        **options,
    )
    if section.rows:
        _write_kernel[(triton.cdiv(section.rows, _ROWS),)](
            columns,
            flags,
            bits,
            ring,
            plan,
            given,
            section.rows,
            section.rows // section.tables,
            num_columns,
            size,
            section.offset,
            FINGERPRINTS=0 if fingerprints is None else NUM_FINGERPRINT_COLUMNS,
            ROWS=_ROWS,
            WIDTH=triton.next_power_of_2(num_columns),
            **options,
        )
