"""Measure the rows and the columns of a matrix in one read, see `gradiometer.columns.lines`.

A program reads tiles below one another. It writes partials of the rows of each tile, and at the end those of
the tiles' columns. A second kernel merges the partials of each line, in a fixed order. Strides and addresses
are run-time numbers that Triton assumes nothing about, so the code, and with it the order of additions, is
the same for all rows of one length, and for all columns of one length. The partials take 0.3 bytes per
element of a large matrix.
"""

import torch
import triton
import triton.language as tl

from gradiometer.columns.lines import LINES, MIX
from gradiometer.kernels import tuning
from gradiometer.kernels.primitives import is_finite

# rows and columns of a tile, and the most tiles of a program
_ROWS, _COLUMNS, _TILES = 8, 256, 32
# partials and lines that a program merges at a time
_PARTS, _LINES = 16, 64
_THREADS, _REGISTERS = 256, 255

# defaults of arguments, see finalize.py
_SUMS, _WIDTH = LINES.num_sums - 1, LINES.width
(_SHIFT_1, _FACTOR_1), (_SHIFT_2, _FACTOR_2), (_SHIFT_3, _) = MIX


@triton.jit
def _weights(
    index,
    SHIFT_1: tl.constexpr = _SHIFT_1,
    FACTOR_1: tl.constexpr = _FACTOR_1,
    SHIFT_2: tl.constexpr = _SHIFT_2,
    FACTOR_2: tl.constexpr = _FACTOR_2,
    SHIFT_3: tl.constexpr = _SHIFT_3,
):
    """Return `gradiometer.columns.line_weights` of these indices, int64."""
    x = (index + 1).to(tl.uint32)
    x = (x ^ (x >> SHIFT_1)) * FACTOR_1
    x = (x ^ (x >> SHIFT_2)) * FACTOR_2
    x = x ^ (x >> SHIFT_3)
    return x.to(tl.int32, bitcast=True).to(tl.float64) * (2.0**-31)


@triton.jit
def _store(out_ptr, step, mask, total, sumsq, nonfinite, projection, top):
    """Store the columns of lines but ``numel``, ``step`` elements apart."""
    tl.store(out_ptr, total, mask=mask)
    tl.store(out_ptr + step, sumsq, mask=mask)
    tl.store(out_ptr + 2 * step, nonfinite, mask=mask)
    tl.store(out_ptr + 3 * step, projection, mask=mask)
    tl.store(out_ptr + 4 * step, top, mask=mask)


@triton.jit(
    do_not_specialize=["rows", "columns", "stride", "column_stride"],
    do_not_specialize_on_alignment=["x_ptr", "of_rows_ptr", "of_columns_ptr"],
)
def _lines_kernel(
    x_ptr,  # (rows, columns)
    of_rows_ptr,  # (5, cdiv(columns, COLUMNS), rows) float64
    of_columns_ptr,  # (5, cdiv(rows, ROWS * TILES), columns) float64
    rows: tl.int64,
    columns: tl.int64,
    stride: tl.int64,
    column_stride: tl.int64,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
):
    across = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0).to(tl.int64)
    strip, block = program % across, program // across
    column = strip * COLUMNS + tl.arange(0, COLUMNS)
    of_column = _weights(column)[None, :]
    first = block * ROWS * TILES

    total = tl.zeros((COLUMNS,), tl.float64)
    sumsq = tl.zeros((COLUMNS,), tl.float64)
    nonfinite = tl.zeros((COLUMNS,), tl.float64)
    projection = tl.zeros((COLUMNS,), tl.float64)
    top = tl.zeros((COLUMNS,), tl.float64)
    for start in range(first, tl.minimum(first + ROWS * TILES, rows), ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        offs = (row * stride)[:, None] + (column * column_stride)[None, :]
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float64)
        finite = is_finite(x)
        x = tl.where(finite, x, 0.0)
        # counts of a tile in fp32 are exact
        other = tl.where(finite, 0.0, 1.0)
        square = x * x
        magnitude = tl.abs(x)
        _store(
            of_rows_ptr + strip * rows + row,
            across * rows,
            row < rows,
            tl.sum(x, 1),
            tl.sum(square, 1),
            tl.sum(other, 1),
            tl.sum(x * of_column, 1),
            tl.max(magnitude, 1),
        )
        total += tl.sum(x, 0)
        sumsq += tl.sum(square, 0)
        nonfinite += tl.sum(other, 0)
        projection += tl.sum(x * _weights(row)[:, None], 0)
        top = tl.maximum(top, tl.max(magnitude, 0))
    _store(
        of_columns_ptr + block * columns + column,
        tl.cdiv(rows, ROWS * TILES) * columns,
        column < columns,
        total,
        sumsq,
        nonfinite,
        projection,
        top,
    )


@triton.jit(
    do_not_specialize=["lines", "parts", "numel"], do_not_specialize_on_alignment=["partials_ptr", "out_ptr"]
)
def _merge_lines_kernel(
    partials_ptr,  # (5, parts, lines) float64
    out_ptr,  # (lines, 6) float64
    lines: tl.int64,
    parts: tl.int64,
    numel: tl.int64,
    PARTS: tl.constexpr,
    LINES: tl.constexpr,
    SUMS: tl.constexpr = _SUMS,
    WIDTH: tl.constexpr = _WIDTH,
):
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    part = tl.arange(0, PARTS)
    out = out_ptr + line * WIDTH
    tl.store(out, tl.zeros((LINES,), tl.float64) + numel.to(tl.float64), mask=line < lines)
    for k in tl.static_range(SUMS + 1):
        values = tl.zeros((PARTS, LINES), tl.float64)
        for i in range(0, parts, PARTS):
            mask = (part < parts - i)[:, None] & (line < lines)[None, :]
            offs = ((k * parts + i + part) * lines)[:, None] + line[None, :]
            read = tl.load(partials_ptr + offs, mask=mask, other=0.0)
            values = values + read if k < SUMS else tl.maximum(values, read)
        tl.store(out + (k + 1), tl.sum(values, 0) if k < SUMS else tl.max(values, 0), mask=line < lines)


def lines(x: torch.Tensor, out: torch.Tensor) -> None:
    """Measure the rows and then the columns of a matrix of any strides, ``(rows + columns, 6) float64``."""
    rows, columns = x.shape
    if not x.numel():
        out.zero_()
        return
    options = tuning.options(_THREADS, _REGISTERS, x.device)
    across, down = triton.cdiv(columns, _COLUMNS), triton.cdiv(rows, _ROWS * _TILES)
    of_rows, of_columns = [
        torch.empty((LINES.width - 1, *shape), dtype=torch.float64, device=x.device)
        for shape in ((across, rows), (down, columns))
    ]
    _lines_kernel[(across * down,)](
        x,
        of_rows,
        of_columns,
        rows,
        columns,
        *x.stride(),
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        TILES=_TILES,
        **options,
    )
    for partials, found, numel in ((of_rows, out[:rows], columns), (of_columns, out[rows:], rows)):
        _, parts, count = partials.shape
        _merge_lines_kernel[(triton.cdiv(count, _LINES),)](
            partials, found, count, parts, numel, PARTS=_PARTS, LINES=_LINES, **options
        )
