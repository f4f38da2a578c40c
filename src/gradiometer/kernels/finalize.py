"""Merge the partials of all chunks into columns and flags of every tensor, in one small launch.

One program per tensor adds its chunks' partials in a fixed order, so that the row depends on nothing else in
the call. Thresholds are run-time fp64 scalars.
"""

import struct
from operator import itemgetter

import torch
import triton
import triton.language as tl

from gradiometer.columns import TENSORS, Flag, Thresholds
from gradiometer.kernels import tuning
from gradiometer.kernels.moments import PARTIALS

# These are defaults of arguments and not global constants: at every launch Triton compares each of those that
# a kernel uses with the value that was compiled, which takes the host time.

# indices in moments.PARTIALS; the first four are read as one tile
_SUMSQ, _, _ZEROS, _TOP, _NONFINITE, _NAN, _POSINF = range(len(PARTIALS))

# indices of columns; sumsq, sum and n_zero have the same order there as in PARTIALS
_NUMEL, _FIRST_SUM, _TOP_COLUMN = itemgetter("numel", "sumsq", "abs_max")(TENSORS.index)
_NAN_COLUMN, _POSINF_COLUMN, _NEGINF_COLUMN = itemgetter("n_nan", "n_posinf", "n_neginf")(TENSORS.index)

# rows of a ChunkMap's table, whose first row is numel
_FIRST_CHUNK = 2
_NUM_CHUNKS = 3

_NAN_FLAG, _INF_FLAG, _VANISHING, _EXPLODING, _DEAD = map(int, Flag)


@triton.jit(do_not_specialize=["num_tensors", "num_chunks", "vanishing", "exploding", "dead"])
def _finalize_kernel(
    table_ptr,  # see ops/launch_plans.py
    partials_ptr,  # (7, N) float64, see moments.PARTIALS
    columns_ptr,  # (T, C) float64
    flags_ptr,  # (T,) int32
    inv_scale_ptr,  # one element of a float dtype; unused without HAS_INV_SCALE
    num_tensors: tl.int32,
    num_chunks: tl.int32,
    vanishing: tl.int64,  # the bits of fp64 thresholds: floats would be converted to fp32 on the way
    exploding: tl.int64,
    dead: tl.int64,
    HAS_INV_SCALE: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    SUMSQ: tl.constexpr = _SUMSQ,
    ZEROS: tl.constexpr = _ZEROS,
    TOP: tl.constexpr = _TOP,
    NONFINITE: tl.constexpr = _NONFINITE,
    NAN: tl.constexpr = _NAN,
    POSINF: tl.constexpr = _POSINF,
    NUMEL: tl.constexpr = _NUMEL,
    FIRST_SUM: tl.constexpr = _FIRST_SUM,
    NAN_COLUMN: tl.constexpr = _NAN_COLUMN,
    POSINF_COLUMN: tl.constexpr = _POSINF_COLUMN,
    NEGINF_COLUMN: tl.constexpr = _NEGINF_COLUMN,
    TOP_COLUMN: tl.constexpr = _TOP_COLUMN,
    FIRST_CHUNK: tl.constexpr = _FIRST_CHUNK,
    NUM_CHUNKS: tl.constexpr = _NUM_CHUNKS,
    NAN_FLAG: tl.constexpr = _NAN_FLAG,
    INF_FLAG: tl.constexpr = _INF_FLAG,
    VANISHING: tl.constexpr = _VANISHING,
    EXPLODING: tl.constexpr = _EXPLODING,
    DEAD: tl.constexpr = _DEAD,
):
    row = tl.program_id(0).to(tl.int64)
    numel = tl.load(table_ptr + row)
    first = tl.load(table_ptr + FIRST_CHUNK * num_tensors + row)
    count = tl.load(table_ptr + NUM_CHUNKS * num_tensors + row).to(tl.int32)
    stride = num_chunks.to(tl.int64)

    # read the first four of PARTIALS as rows of one tile, so that all its loads are in flight together
    part = tl.arange(0, 4)
    offs = tl.arange(0, TILE)
    rows = partials_ptr + first + part[:, None] * stride + offs[None, :]
    sums = tl.zeros((4, TILE), tl.float64)
    nonfinite = tl.zeros((TILE,), tl.float64)
    for i in range(0, count, TILE):
        mask = offs < count - i
        x = tl.load(rows + i, mask=mask[None, :], other=0.0)
        sums = tl.where(part[:, None] == TOP, tl.maximum(sums, x), sums + x)
        nonfinite += tl.load(partials_ptr + first + NONFINITE * stride + (i + offs), mask=mask, other=0.0)
    values = tl.where(part == TOP, tl.max(sums, 1), tl.sum(sums, 1))
    row_nonfinite = tl.sum(nonfinite)

    nan = tl.zeros((TILE,), tl.float64)
    posinf = tl.zeros((TILE,), tl.float64)
    if row_nonfinite > 0:
        for i in range(0, count, TILE):
            mask = offs < count - i
            nan += tl.load(partials_ptr + first + NAN * stride + (i + offs), mask=mask, other=0.0)
            posinf += tl.load(partials_ptr + first + POSINF * stride + (i + offs), mask=mask, other=0.0)
    row_nan = tl.sum(nan)
    row_posinf = tl.sum(posinf)

    if HAS_INV_SCALE:
        scale = tl.load(inv_scale_ptr).to(tl.float64)
        values = tl.where(part == ZEROS, values, values * tl.where(part == TOP, tl.abs(scale), scale))
        values = tl.where(part == SUMSQ, values * scale, values)

    out = columns_ptr + row * NUM_COLUMNS
    row_numel = numel.to(tl.float64)
    tl.store(out + NUMEL, row_numel)
    tl.store(out + tl.where(part == TOP, TOP_COLUMN, FIRST_SUM + part), values)
    tl.store(out + NAN_COLUMN, row_nan)
    tl.store(out + POSINF_COLUMN, row_posinf)
    tl.store(out + NEGINF_COLUMN, row_nonfinite - row_nan - row_posinf)

    vanishing = vanishing.to(tl.int64).to(tl.float64, bitcast=True)
    exploding = exploding.to(tl.int64).to(tl.float64, bitcast=True)
    dead = dead.to(tl.int64).to(tl.float64, bitcast=True)
    # the same comparisons as in TENSORS.flags_of
    norm = tl.sqrt(tl.sum(tl.where(part == SUMSQ, values, 0.0)))
    row_zeros = tl.sum(tl.where(part == ZEROS, values, 0.0))
    has_nan = row_nan > 0
    has_inf = row_nonfinite > row_nan
    finite = row_nonfinite == 0
    exploding_norm = (finite & (norm <= exploding)) == 0
    dead_share = row_zeros / tl.maximum(row_numel, 1.0) >= dead
    flags = has_nan.to(tl.int32) * NAN_FLAG
    flags += has_inf.to(tl.int32) * INF_FLAG
    flags += (finite & (norm < vanishing)).to(tl.int32) * VANISHING
    flags += exploding_norm.to(tl.int32) * EXPLODING
    flags += dead_share.to(tl.int32) * DEAD
    tl.store(flags_ptr + row, flags * (numel > 0).to(tl.int32))


def bits(x: float) -> int:
    """Return the bits of a float64, to pass it to a kernel without a conversion to fp32."""
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


def finalize(
    table: torch.Tensor,
    partials: torch.Tensor,
    num_tensors: int,
    thresholds: Thresholds,
    inv_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge all chunks' partials into the columns ``(T, C) float64`` and flags ``(T,) int32`` of tensors.

    With ``inv_scale``, one element on the same device, the rows are those of ``inv_scale * x``.
    """
    columns = torch.empty((num_tensors, TENSORS.width), dtype=torch.float64, device=partials.device)
    flags = torch.empty((num_tensors,), dtype=torch.int32, device=partials.device)
    tile, threads, registers = tuning.FINALIZE
    _finalize_kernel[(num_tensors,)](
        table,
        partials,
        columns,
        flags,
        partials if inv_scale is None else inv_scale,
        num_tensors,
        partials.shape[1],
        *(bits(x) for x in (thresholds.vanishing, thresholds.exploding, thresholds.dead)),
        HAS_INV_SCALE=inv_scale is not None,
        NUM_COLUMNS=TENSORS.width,
        TILE=tile,
        **tuning.options(threads, registers, partials.device),
    )
    return columns, flags
