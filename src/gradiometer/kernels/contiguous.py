"""Copy a tensor with strides into contiguous memory, in a step that is due.

A program copies a tile of rows and columns; the columns are the last dimension. Reads and writes each element
once, and in a step that is not due only the cursor.
"""

import math

import torch
import triton
import triton.language as tl

from gradiometer.columns import Cursor
from gradiometer.kernels import tuning
from gradiometer.kernels.primitives import is_due

# elements of a tile, and dimensions of a tensor
_TILE, _DIMS = 1024, 5
_THREADS, _REGISTERS = 128, 128

# a default of an argument, see finalize.py
_EVERY = int(Cursor.EVERY)


@triton.jit(
    do_not_specialize=["rows", "n1", "n2", "n3", "n4", "stride0", "stride1", "stride2", "stride3", "stride4"]
)
def _contiguous_kernel(
    x_ptr,
    out_ptr,  # (rows, n4)
    values_ptr,  # (256,) float32: what the bytes of x stand for
    cursor_ptr,  # (6,) float64
    flag_ptr,  # one int32
    rows: tl.int64,  # n0 * n1 * n2 * n3
    n1: tl.int64,
    n2: tl.int64,
    n3: tl.int64,
    n4: tl.int64,
    stride0: tl.int64,
    stride1: tl.int64,
    stride2: tl.int64,
    stride3: tl.int64,
    stride4: tl.int64,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INDEX: tl.constexpr,
    BYTES: tl.constexpr,
    FLAGGED: tl.constexpr,
    EVERY: tl.constexpr = _EVERY,
):
    if tl.load(cursor_ptr + EVERY) <= 0:
        return
    if not is_due(cursor_ptr):
        return
    if FLAGGED:  # noqa: SIM102 a constexpr: without a flag, the load is not compiled
        if tl.load(flag_ptr) == 0:
            return
    parts = tl.cdiv(n4, COLUMNS)
    program = tl.program_id(0).to(tl.int64)
    row = program // parts * ROWS + tl.arange(0, ROWS)
    column = program % parts * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < n4)[None, :]
    # divisions of 32-bit integers are several times as fast
    left = row.to(INDEX)
    start = (left % n3.to(INDEX)) * stride3
    left = left // n3.to(INDEX)
    start += (left % n2.to(INDEX)) * stride2
    left = left // n2.to(INDEX)
    start += (left % n1.to(INDEX)) * stride1 + (left // n1.to(INDEX)) * stride0
    x = tl.load(x_ptr + (start[:, None] + (column * stride4)[None, :]), mask=mask, other=0)
    if BYTES:
        x = tl.load(values_ptr + x.to(tl.int32), mask=mask, other=0.0)
    tl.store(out_ptr + (row * n4)[:, None] + column[None, :], x, mask=mask)


def contiguous(x: torch.Tensor, cursor: torch.Tensor, flag: torch.Tensor | None = None) -> torch.Tensor:
    """Return a tensor, or a contiguous copy of it, which has no values in a step that is not due.

    The copy of a tensor of 8-bit floating-point numbers is float32. ``cursor`` and ``flag``: as for
    `gradiometer.kernels.activation`.
    """
    is_bytes = x.itemsize == 1
    if x.is_contiguous() and not is_bytes:
        return x
    # dimensions in which the strides are those of one dimension are joined
    dims: list[tuple[int, int]] = []
    for n, stride in zip(x.shape, x.stride(), strict=True):
        if n == 1:
            continue
        if dims and dims[-1][1] == n * stride:
            dims[-1] = dims[-1][0] * n, stride
        else:
            dims.append((n, stride))
    if len(dims) > _DIMS:
        # by torch, in every step
        return (x.float() if is_bytes else x).contiguous()
    (n0, _), *sizes = dims = [(1, 0)] * (_DIMS - len(dims)) + dims
    columns = sizes[-1][0]
    width = min(triton.next_power_of_2(columns), _TILE)
    rows = n0 * math.prod([n for n, _ in sizes[:-1]])
    values = out = torch.empty(x.shape, dtype=torch.float32 if is_bytes else x.dtype, device=x.device)
    if is_bytes:
        # computed anew for each call: a tensor that is kept would belong to a stream, or to a captured graph
        values = torch.arange(256, dtype=torch.uint8, device=x.device).view(x.dtype).float()
        x = x.view(torch.uint8)
    _contiguous_kernel[(triton.cdiv(rows, _TILE // width) * triton.cdiv(columns, width),)](
        x,
        out,
        values,
        cursor,
        cursor if flag is None else flag,
        rows,
        *[n for n, _ in sizes],
        *[stride for _, stride in dims],
        ROWS=_TILE // width,
        COLUMNS=width,
        INDEX=tl.int32 if rows < 2**31 else tl.int64,
        BYTES=is_bytes,
        FLAGGED=flag is not None,
        **tuning.options(_THREADS, _REGISTERS, x.device),
    )
    return out
