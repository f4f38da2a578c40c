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

from gradiometer.columns.projections import FIRST_PROJECTION, HIGH_FACTOR, SIGN_MIX, WORD_BITS
from gradiometer.kernels import tuning
from gradiometer.kernels.primitives import DTYPES, halves, is_finite, is_projected

# fields of a run, see ops/projection_chunks.py
_FIELDS = 13
# columns before the projections, without the number of elements
_HEAD = FIRST_PROJECTION - 1
# columns and chunks that the second kernel adds up at a time
_COLUMNS, _PARTS = 32, 32

# defaults of arguments, see finalize.py
(_SHIFT_0, _FACTOR_0), (_SHIFT_1, _FACTOR_1), (_SHIFT_2, _FACTOR_2), (_SHIFT_3, _) = SIGN_MIX
_HIGH = HIGH_FACTOR


@triton.jit
def _hash(
    low,
    key,
    added,
    SHIFT_0: tl.constexpr = _SHIFT_0,
    FACTOR_0: tl.constexpr = _FACTOR_0,
    SHIFT_1: tl.constexpr = _SHIFT_1,
    FACTOR_1: tl.constexpr = _FACTOR_1,
    SHIFT_2: tl.constexpr = _SHIFT_2,
    FACTOR_2: tl.constexpr = _FACTOR_2,
    SHIFT_3: tl.constexpr = _SHIFT_3,
):
    """Return `gradiometer.columns.sign_hash`, uint32; ``added``: the second key plus that of the upper half."""
    x = low ^ key
    x = (x ^ (x >> SHIFT_0)) * FACTOR_0 + added
    x = (x ^ (x >> SHIFT_1)) * FACTOR_1
    x = (x ^ (x >> SHIFT_2)) * FACTOR_2
    return x ^ (x >> SHIFT_3)


@triton.jit
def _add_if(total, x, bit, PREDICATED: tl.constexpr):
    """Return ``total + x`` where the bit is set."""
    if PREDICATED:
        # as a branch: the assembler makes one predicated addition of it, but of a predicated one a selection
        total = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.eq.b32 p, $3, 0; @p bra skip; add.rn.f64 $0, $1, $2; skip: }",
            "=d,0,d,r",
            [total, x, bit],
            dtype=tl.float64,
            is_pure=True,
            pack=1,
        )
    else:
        total = tl.where(bit != 0, total + x, total)
    return total


@triton.jit
def _add(x, word, sums, K: tl.constexpr, CHECKED: tl.constexpr, PREDICATED: tl.constexpr):
    """Add an element of each lane to its sums; CHECKED: leave out NaN and Inf, and count them."""
    sumsq, total, nonfinite, negative = sums
    if CHECKED:
        finite = is_finite(x)
        nonfinite += tl.where(finite, 0.0, 1.0)
        x = tl.where(finite, x, 0.0)
    wide = x.to(tl.float64)
    sumsq = tl.fma(wide, wide, sumsq)
    total += wide
    found = ()
    for j in tl.static_range(K):
        found = found + (_add_if(negative[j], wide, word & (1 << j), PREDICATED),)
    return sumsq, total, nonfinite, found


@triton.jit
def _elements(x, LANES: tl.constexpr):
    """Return the 2 or 4 elements that each thread holds of a tile, as a tuple."""
    if x.shape[0] == 2 * LANES:
        found = tl.split(tl.reshape(x, (LANES, 2)))
    else:
        even, odd = tl.split(tl.reshape(x, (LANES, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        found = first, second, third, fourth
    return found


@triton.jit
def _add_run(
    address,
    n,
    low,
    key,
    added,
    sums,
    DTYPE: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
    K: tl.constexpr,
    CHECKED: tl.constexpr,
    PREDICATED: tl.constexpr,
):
    """Add up n elements that are adjacent in memory and in the whole tensor, ``low`` the index of the first."""
    NARROW: tl.constexpr = tl.float64 if ITEMSIZE == 8 else tl.float32
    # two numbers of 2 bytes are read as one word, see moments.py
    PAIRS: tl.constexpr = ITEMSIZE == 2
    EACH: tl.constexpr = 2 if PAIRS else 1
    WORD: tl.constexpr = tl.int32 if PAIRS else DTYPE
    # a thread's part of a tile is one load of 16 bytes
    WORDS: tl.constexpr = LANES * (2 if ITEMSIZE == 8 else 4)
    base = address.to(tl.pointer_type(DTYPE))
    head = tl.minimum((-address & 15).to(tl.int32) // ITEMSIZE, n)
    full = (n - head) // (WORDS * EACH * UNROLL)
    lanes = tl.arange(0, WORDS)
    # no mask: it would split the loads
    words = tl.multiple_of((address + head * ITEMSIZE).to(tl.pointer_type(WORD)), 16) + lanes
    index = low + head.to(tl.uint32) + lanes.to(tl.uint32) * EACH
    for _ in range(full):
        for u in tl.static_range(UNROLL):
            word = tl.load(words + u * WORDS)
            place = index + u * WORDS * EACH
            if PAIRS:
                even, odd = halves(word, DTYPE)
                evens, odds = _elements(even, LANES), _elements(odd, LANES)
                of_evens = _elements(_hash(place, key, added), LANES)
                of_odds = _elements(_hash(place + 1, key, added), LANES)
                for i in tl.static_range(4):
                    sums = _add(evens[i], of_evens[i], sums, K, CHECKED, PREDICATED)
                    sums = _add(odds[i], of_odds[i], sums, K, CHECKED, PREDICATED)
            else:
                xs, signs = _elements(word, LANES), _elements(_hash(place, key, added), LANES)
                for i in tl.static_range(WORDS // LANES):
                    sums = _add(xs[i], signs[i], sums, K, CHECKED, PREDICATED)
        words += UNROLL * WORDS
        index += UNROLL * WORDS * EACH
    # the elements before and after the tiles
    tiles = full * (WORDS * EACH * UNROLL)
    few = tl.arange(0, LANES)
    for i in range(0, n - tiles, LANES):
        place = i + few
        mask = place < n - tiles
        place = tl.where(place < head, place, place + tiles)
        x = tl.load(base + place, mask=mask, other=0.0).to(NARROW)
        sums = _add(x, _hash(low + place.to(tl.uint32), key, added), sums, K, CHECKED, PREDICATED)
    return sums


@triton.jit
def _add_tiles(
    address,
    first,
    rows,
    columns,
    run_ptr,
    key,
    added,
    sums,
    DTYPE: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    K: tl.constexpr,
    CHECKED: tl.constexpr,
    PREDICATED: tl.constexpr,
    HIGH: tl.constexpr = _HIGH,
):
    """Add up rows and columns of any strides; ``first``: the index of the first element."""
    NARROW: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    base = address.to(tl.pointer_type(DTYPE))
    stride, step = tl.load(run_ptr + 5), tl.load(run_ptr + 6)
    pitch, increment = tl.load(run_ptr + 7), tl.load(run_ptr + 8)
    # tiles of 2**log columns
    log = tl.load(run_ptr + 9).to(tl.int32)
    across, down = (1 << log), TILE >> log
    lanes = tl.arange(0, LANES)
    places, indices = (), ()
    for i in tl.static_range(TILE // LANES):
        row, column = (i * LANES + lanes) >> log, (i * LANES + lanes) & (across - 1)
        places = places + (row.to(tl.int64) * stride + column.to(tl.int64) * step,)
        indices = indices + (first + row.to(tl.int64) * pitch + column.to(tl.int64) * increment,)
    for top in range(0, rows, down):
        for left in range(0, columns, across):
            offset, start = top * stride + left * step, top * pitch + left * increment
            xs, signs = (), ()
            for i in tl.static_range(TILE // LANES):
                lane = i * LANES + lanes
                mask = ((lane >> log) < rows - top) & ((lane & (across - 1)) < columns - left)
                xs = xs + (tl.load(base + (offset + places[i]), mask=mask, other=0.0).to(NARROW),)
                index = start + indices[i]
                high = (index >> 32).to(tl.uint32) * HIGH
                signs = signs + (_hash(index.to(tl.uint32), key, added + high),)
            for i in tl.static_range(TILE // LANES):
                sums = _add(xs[i], signs[i], sums, K, CHECKED, PREDICATED)
    return sums


@triton.jit
def _stacked(xs, K: tl.constexpr):
    """Return K tensors of one dimension as one of two, ``(lanes, K)``."""
    found = xs
    for level in tl.static_range(1, K.bit_length()):
        joined = ()
        for j in tl.static_range(K >> level):
            joined = joined + (tl.join(found[j], found[j + (K >> level)]),)
        found = joined
    return tl.reshape(found[0], (xs[0].shape[0], K))


@triton.jit
def _chunk_sums(
    address,
    first,
    rows,
    columns,
    run_ptr,
    key_ptr,
    FLAT: tl.constexpr,
    DTYPE: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
    TILE: tl.constexpr,
    K: tl.constexpr,
    CHECKED: tl.constexpr,
    PREDICATED: tl.constexpr,
    HIGH: tl.constexpr = _HIGH,
):
    """Return a chunk's sum of squares, number of NaN and infinite elements, and projections ``(K,)``."""
    keys = tl.load(key_ptr)
    key, added = keys.to(tl.uint32), (keys >> 32).to(tl.uint32)
    zero = tl.zeros((LANES,), tl.float64)
    sums = zero, zero, zero, (zero,) * K
    if FLAT:
        # the upper half is the same for all elements of a run
        added += (first >> 32).to(tl.uint32) * HIGH
        low = first.to(tl.uint32)
        sums = _add_run(
            address, columns, low, key, added, sums, DTYPE, ITEMSIZE, LANES, UNROLL, K, CHECKED, PREDICATED
        )
    else:
        sums = _add_tiles(
            address,
            first,
            rows,
            columns,
            run_ptr,
            key,
            added,
            sums,
            DTYPE,
            LANES,
            TILE,
            K,
            CHECKED,
            PREDICATED,
        )
    sumsq, total, nonfinite, negative = sums
    projections = tl.sum(total) - 2.0 * tl.sum(_stacked(negative, K), 0)
    return tl.sum(sumsq), tl.sum(nonfinite), projections


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

    sumsq, nonfinite, projections = _chunk_sums(
        address, first, rows, columns, run_ptr, key_ptr,
        FLAT, DTYPE, ITEMSIZE, LANES, UNROLL, TILE, K, False, PREDICATED,
    )  # fmt: skip
    if is_finite(sumsq) == 0:
        sumsq, nonfinite, projections = _chunk_sums(
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
    is_flat: bool,  # noqa: FBT001 of a launch group
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
