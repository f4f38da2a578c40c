"""Projections of tensors on random signs, in one read, see `gradiometer.columns.projections`.

A program reads one chunk, and writes its sum of squares, its number of NaN and infinite elements, and up to
32 projections; for more, the chunk is read again, by the next program, from the cache. A second kernel adds
the partials of a tensor's chunks in a fixed order.

The sum of elements with a negative sign costs one predicated fp64 addition per element and projection. The
projection is the sum of all elements minus twice that. Triton would compute the addition and select one of
two results, which takes three instructions; so the addition is written in PTX where that is the target. The
main loop has no mask for NaN and Inf: fp64 holds the squares of narrower formats, so a chunk whose sum of
squares is finite has none. Any other chunk is read again.
"""

import torch
import triton
import triton.language as tl

from gradiometer.columns.projections import FIRST_PROJECTION, WORD_BITS
from gradiometer.kernels import tuning
from gradiometer.kernels.primitives import DTYPES, is_finite, is_projected
from gradiometer.kernels.projection_sums import chunk_sums

# fields of a run, see ops/projection_chunks.py
_FIELDS = 13
# columns before the projections, without the number of elements
_HEAD = FIRST_PROJECTION - 1
# columns and chunks that the second kernel adds up at a time
_COLUMNS, _PARTS = 32, 32


@triton.jit(do_not_specialize=["first_chunk", "num_tensors", "num_runs"])
def _project_kernel(
    pointers_ptr,  # (T,) int64
    table_ptr,  # see ops/projection_chunks.py
    partials_ptr,  # (N, 2 + WORDS * K) float64
    gate_ptr,  # a cursor; unused without GATED
    first_chunk: tl.int32,
    num_tensors: tl.int32,
    num_runs: tl.int32,
    GATED: tl.constexpr,
    FLAT: tl.constexpr,
    DTYPE: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    K: tl.constexpr,
    PREDICATED: tl.constexpr,
    FIELDS: tl.constexpr = _FIELDS,
    HEAD: tl.constexpr = _HEAD,
):
    if GATED:  # noqa: SIM102 the first is known at compile time, the second at run time
        if not is_projected(gate_ptr):
            return
    chunk = first_chunk + tl.program_id(0) // WORDS
    word = tl.program_id(0) % WORDS
    runs_ptr = table_ptr + (3 + WORDS) * num_tensors
    run = tl.load((runs_ptr + FIELDS * num_runs).to(tl.pointer_type(tl.int32)) + chunk)
    run_ptr = runs_ptr + FIELDS * run
    tensor = tl.load(run_ptr)
    # the rows and columns of the chunk
    rows, columns = tl.load(run_ptr + 3), tl.load(run_ptr + 4)
    tall, wide = tl.load(run_ptr + 10), tl.load(run_ptr + 11)
    place = chunk - tl.load(run_ptr + 12)
    across = tl.cdiv(columns, wide)
    top, left = place // across * tall, place % across * wide
    rows, columns = tl.minimum(rows - top, tall).to(tl.int32), tl.minimum(columns - left, wide).to(tl.int32)
    offset = tl.load(run_ptr + 1) + top * tl.load(run_ptr + 5) + left * tl.load(run_ptr + 6)
    first = tl.load(run_ptr + 2) + top * tl.load(run_ptr + 7) + left * tl.load(run_ptr + 8)
    address = tl.load(pointers_ptr + tensor) + offset * ITEMSIZE
    key_ptr = table_ptr + 3 * num_tensors + tensor * WORDS + word

    sumsq, nonfinite, projections = chunk_sums(
        address, first, rows, columns, run_ptr, key_ptr,
        FLAT, DTYPE, ITEMSIZE, LANES, UNROLL, TILE, K, False, PREDICATED,
    )  # fmt: skip
    if is_finite(sumsq) == 0:
        sumsq, nonfinite, projections = chunk_sums(
            address, first, rows, columns, run_ptr, key_ptr,
            FLAT, DTYPE, ITEMSIZE, LANES, UNROLL, TILE, K, True, PREDICATED,
        )  # fmt: skip
    out = partials_ptr + chunk.to(tl.int64) * (HEAD + WORDS * K)
    if word == 0:
        tl.store(out, sumsq)
        tl.store(out + 1, nonfinite)
    tl.store(out + (HEAD + word * K) + tl.arange(0, K), projections)


@triton.jit(do_not_specialize=["num_tensors"])
def _merge_projections_kernel(
    table_ptr,  # see ops/projection_chunks.py
    partials_ptr,  # (N, WIDTH - 1) float64
    out_ptr,  # (T, WIDTH) float64
    gate_ptr,  # a cursor; unused without GATED
    num_tensors: tl.int32,
    GATED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    numel = tl.load(table_ptr + row)
    first = tl.load(table_ptr + num_tensors + row)
    count = tl.load(table_ptr + 2 * num_tensors + row)
    if GATED:
        due = is_projected(gate_ptr).to(tl.int64)
        numel, count = numel * due, count * due
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < WIDTH - 1
    part = tl.arange(0, PARTS)
    sums = tl.zeros((PARTS, COLUMNS), tl.float64)
    for i in range(0, count, PARTS):
        offs = (first + i + part)[:, None] * (WIDTH - 1) + column[None, :]
        sums += tl.load(partials_ptr + offs, mask=(part < count - i)[:, None] & mask[None, :], other=0.0)
    out = out_ptr + row * WIDTH
    if block == 0:
        tl.store(out, numel.to(tl.float64))
    tl.store(out + 1 + column, tl.sum(sums, 0), mask=mask)


def _has_ptx(device: torch.device) -> bool:
    return not (triton.knobs.runtime.interpret or torch.version.hip or device.type == "xpu")


def project(
    pointers: torch.Tensor,
    table: torch.Tensor,
    partials: torch.Tensor,
    dtype: torch.dtype,
    is_flat: bool,
    first_chunk: int,
    num_chunks: int,
    num_tensors: int,
    num_runs: int,
    gate: torch.Tensor | None = None,
) -> None:
    """Write the partials of one group's chunks, ``(N, 2 + k) float64``."""
    count = partials.shape[1] - _HEAD
    each = min(count, WORD_BITS)
    threads, registers = tuning.PROJECTION_THREADS, tuning.PROJECTION_REGISTERS[max(each, 16)]
    registers += 0 if is_flat else tuning.PROJECTION_GAP_REGISTERS
    _project_kernel[(num_chunks * (count // each),)](
        pointers,
        table,
        partials,
        partials if gate is None else gate,
        first_chunk,
        num_tensors,
        num_runs,
        GATED=gate is not None,
        FLAT=is_flat,
        DTYPE=DTYPES[dtype],
        ITEMSIZE=dtype.itemsize,
        LANES=threads,
        UNROLL=tuning.PROJECTION_UNROLL[dtype.itemsize],
        TILE=tuning.PROJECTION_TILE,
        WORDS=count // each,
        K=each,
        PREDICATED=_has_ptx(partials.device),
        **tuning.options(threads, registers, partials.device),
    )


def merge_projections(
    table: torch.Tensor, partials: torch.Tensor, num_tensors: int, gate: torch.Tensor | None = None
) -> torch.Tensor:
    """Merge the partials of each tensor's chunks into its row, ``(T, 3 + k) float64``.

    Rows are 0 in a step that is not due.
    """
    width = partials.shape[1] + 1
    rows = torch.empty((num_tensors, width), dtype=torch.float64, device=partials.device)
    blocks = triton.cdiv(width - 1, _COLUMNS)
    _, threads, registers = tuning.FINALIZE
    _merge_projections_kernel[(num_tensors * blocks,)](
        table,
        partials,
        rows,
        partials if gate is None else gate,
        num_tensors,
        GATED=gate is not None,
        WIDTH=width,
        BLOCKS=blocks,
        COLUMNS=_COLUMNS,
        PARTS=_PARTS,
        **tuning.options(threads, registers, partials.device),
    )
    return rows
