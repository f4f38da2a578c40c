"""Partial statistics of every chunk, in one pass over memory.

For a chunk of tensor x: sum x_i**2 and sum x_i in fp64, and max |x_i|, over finite elements; counts of
zeros, of non-finite values, of NaN and of +Inf. Reads each element once (twice in a chunk with NaN or Inf),
and writes seven float64 per chunk: ``partials (7, N)``, in the order of `PARTIALS`. If asked, it also adds up
the bits for fingerprints, see `gradiometer.kernels.fingerprint`; otherwise none of that is compiled.

On GPUs with few fp64 units the main loop adds fp32 numbers with compensation instead; the results are as
accurate.

The main loop is optimistic: it has no mask and no NaN or Inf counter. fp64 holds the square of every fp32,
bf16 and fp16 value, so a chunk's sum of squares is finite exactly when all its elements are. A chunk whose
sum is not finite is read again by the counting path. (Squares of fp64 elements beyond 1e154 overflow: such a
chunk is also read again, and its sum of squares is inf.)
"""

import torch
import triton
import triton.language as tl

from gradiometer.columns.fingerprint import WORD_BYTES, power, signed
from gradiometer.kernels import tuning
from gradiometer.kernels.compensated import LEAST_SQUARE, joined
from gradiometer.kernels.fingerprint import add_words, chunk_sums, split_words
from gradiometer.kernels.primitives import DTYPES, accumulate, halves, is_due, is_finite, locate, row_of

# The last two are read only if n_nonfinite is not 0. The other non-finite elements are -Inf.
PARTIALS = ("sumsq", "sum", "n_zero", "abs_max", "n_nonfinite", "n_nan", "n_posinf")


@triton.jit
def _recount(address, head, n, DTYPE: tl.constexpr, NARROW: tl.constexpr, TILE: tl.constexpr):
    """Read a chunk with NaN or Inf again; return its PARTIALS. ``head`` elements are not aligned."""
    lanes = tl.arange(0, TILE)
    sumsq = tl.zeros((TILE,), tl.float64)
    total = tl.zeros((TILE,), tl.float64)
    zeros = tl.zeros((TILE,), tl.int32)
    nonfinite = tl.zeros((TILE,), tl.int32)
    nan = tl.zeros((TILE,), tl.int32)
    posinf = tl.zeros((TILE,), tl.int32)
    top = tl.zeros((TILE,), NARROW)
    base = address.to(tl.pointer_type(DTYPE))
    # whole tiles without a mask, which would split the loads, and then the elements before and after them;
    # loads of fp64 elements are wide enough
    FIRST: tl.constexpr = 1 if DTYPE == tl.float64 else 0
    whole = (n - head) // TILE * TILE * (1 - FIRST)
    for part in tl.static_range(FIRST, 2):
        for i in range(0, whole if part == 0 else n - whole, TILE):
            if part == 0:
                mask = lanes >= 0
                x = tl.load(tl.multiple_of(base + head, 16) + (i + lanes)).to(NARROW)
            else:
                place = i + lanes
                mask = place < n - whole
                place = tl.where(place < head, place, place + whole)
                # masked lanes are 1.0: neither zero nor non-finite
                x = tl.load(base + place, mask=mask, other=1.0).to(NARROW)
            zeros += (x == 0).to(tl.int32)
            finite = is_finite(x)
            nonfinite += (finite == 0).to(tl.int32)
            nan += (x != x).to(tl.int32)
            posinf += (x == float("inf")).to(tl.int32)
            x = tl.where(finite & mask, x, 0.0)
            wide = x.to(tl.float64)
            sumsq = tl.fma(wide, wide, sumsq)
            total += wide
            top = tl.maximum(top, tl.abs(x))
    return (
        tl.sum(sumsq),
        tl.sum(total),
        tl.sum(zeros).to(tl.float64),
        tl.max(top).to(tl.float64),
        tl.sum(nonfinite).to(tl.float64),
        tl.sum(nan).to(tl.float64),
        tl.sum(posinf).to(tl.float64),
    )


@triton.jit(do_not_specialize=["first_chunk", "num_tensors", "num_chunks"])
def _moments_kernel(
    pointers_ptr,  # (T,) int64
    table_ptr,  # see ops/launch_plans.py
    partials_ptr,  # (7, N) float64
    gate_ptr,  # the cursor of a ring; unused without GATED
    fingerprints_ptr,  # (4, N) int64, see fingerprint.py; unused without FINGERPRINT
    first_chunk: tl.int32,
    num_tensors: tl.int32,
    num_chunks: tl.int32,
    GATED: tl.constexpr,
    FINGERPRINT: tl.constexpr,
    DTYPE: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    TILE: tl.constexpr,
    WORD_BITS: tl.constexpr,  # log2 of the number of words of 8 bytes in a tile
    STEP: tl.constexpr,  # see fingerprint.add_words
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
    COMPENSATED: tl.constexpr,  # the lanes of compensated totals, one a thread; 0 for fp64
    # not a global constant, see finalize.py
    LEAST_SQUARE: tl.constexpr = LEAST_SQUARE,
):
    if GATED:  # noqa: SIM102 the first is known at compile time, the second at run time
        if not is_due(gate_ptr):
            return
    chunk = first_chunk + tl.program_id(0)
    address, n = locate(chunk, pointers_ptr, table_ptr, num_tensors, ITEMSIZE)

    # fp16 and bf16 are compared as fp32: the same values, and native on every device
    NARROW: tl.constexpr = tl.float64 if ITEMSIZE == 8 else tl.float32
    # two numbers of 2 bytes are read as one word, which takes half as many registers while it is loaded
    PAIRS: tl.constexpr = ITEMSIZE == 2
    WORD: tl.constexpr = tl.int32 if PAIRS else DTYPE
    LANES: tl.constexpr = TILE // 2 if PAIRS else TILE
    lanes = tl.arange(0, LANES)
    EXACT_SQUARE: tl.constexpr = ITEMSIZE == 2
    if COMPENSATED:
        few = tl.zeros((COMPENSATED,), tl.float32)
        totals = few, few, (few, few, few), (few, few, few)
    else:
        wide = tl.zeros((LANES,), tl.float64)
        totals = tl.zeros((LANES,), NARROW), tl.zeros((LANES,), tl.float32), wide, wide

    # a view may begin anywhere: its first elements, up to a 16-byte boundary, are read separately
    head = (-address & 15).to(tl.int32) // ITEMSIZE
    head = tl.minimum(head, n)
    base = address.to(tl.pointer_type(DTYPE))
    if head > 0:
        x = tl.load(base + lanes, mask=lanes < head, other=0.0).to(NARROW)
        totals = accumulate(x, totals, COMPENSATED, EXACT_SQUARE)

    # no mask: it would split the loads
    full = (n - head) // (TILE * UNROLL)
    words = tl.multiple_of((address + head * ITEMSIZE).to(tl.pointer_type(WORD)), 16) + lanes
    if FINGERPRINT:
        # words of 8 bytes
        EACH: tl.constexpr = 8 // ITEMSIZE
        BITS: tl.constexpr = tl.int64 if EACH == 1 else tl.uint32 if EACH == 2 else tl.uint16
        WORDS: tl.constexpr = TILE // EACH
        places = tl.arange(0, WORDS)
        word_ptr = address.to(tl.pointer_type(tl.int64))
        # the words before the first tile
        place = places - (WORDS - head // EACH)
        lower, upper = split_words(tl.load(word_ptr + place, mask=place >= 0, other=0), WORDS)
        zero = tl.zeros((WORDS,), tl.int64)
        sums = add_words(lower, upper, (zero, zero), STEP)
    for _ in tl.range(0, full, num_stages=STAGES):
        for u in tl.static_range(UNROLL):
            word = tl.load(words + u * LANES)
            if FINGERPRINT:
                lower, upper = split_words(word, WORDS)
                sums = add_words(lower, upper, sums, STEP)
            if PAIRS:
                low, high = halves(word, DTYPE)
                if COMPENSATED:
                    totals = accumulate(tl.interleave(low, high), totals, COMPENSATED, EXACT_SQUARE)
                else:
                    totals = accumulate(low, totals, COMPENSATED, EXACT_SQUARE)
                    totals = accumulate(high, totals, COMPENSATED, EXACT_SQUARE)
            else:
                totals = accumulate(word.to(NARROW), totals, COMPENSATED, EXACT_SQUARE)
        words += UNROLL * LANES

    done = head + full * (TILE * UNROLL)
    for i in range(done, n, LANES):
        x = tl.load(base + (i + lanes), mask=lanes < n - i, other=0.0).to(NARROW)
        totals = accumulate(x, totals, COMPENSATED, EXACT_SQUARE)

    if FINGERPRINT:
        # read the last elements again, as words, in one tile at least
        last = done // EACH
        for i in range(last, tl.maximum(tl.cdiv(n, EACH), last + 1), WORDS):
            last = i
            place = i + places
            rest = tl.load(word_ptr + place, mask=place < n // EACH, other=0)
            bits_ptr = address.to(tl.pointer_type(BITS))
            for part in tl.static_range(EACH - 1):
                # the last word may be incomplete
                e = place * EACH + part
                bits = tl.load(bits_ptr + e, mask=(place == n // EACH) & (e < n), other=0)
                rest |= bits.to(tl.int64) << (8 * ITEMSIZE * part)
            lower, upper = split_words(rest, WORDS)
            sums = add_words(lower, upper, sums, STEP)
        chunk_words, chunk_weighted = chunk_sums(places, sums, WORD_BITS)
        out = fingerprints_ptr + chunk
        row = row_of(chunk, table_ptr, num_tensors)
        tl.store(out, (address - tl.load(pointers_ptr + row)) // 8 + last)
        tl.store(out + num_chunks.to(tl.int64), n.to(tl.int64) * ITEMSIZE)
        tl.store(out + 2 * num_chunks.to(tl.int64), chunk_words)
        tl.store(out + 3 * num_chunks.to(tl.int64), chunk_weighted)

    chunk_top = tl.max(totals[0]).to(tl.float64)
    # masked lanes were counted as zeros
    masked = tl.where(head > 0, LANES - head, 0) + ((done - n) & (LANES - 1))
    chunk_zeros = tl.sum(totals[1].to(tl.float64)) - masked.to(tl.float64)
    none = tl.zeros((), tl.float64)
    chunk_nonfinite, chunk_nan, chunk_posinf = none, none, none
    if COMPENSATED:
        chunk_sumsq, chunk_total = joined(totals[2]), joined(totals[3])
        # each square lost at most 2**-149, which matters only in a chunk of tiny elements
        again = (chunk_sumsq < n.to(tl.float64) * LEAST_SQUARE) & (chunk_top > 0)
        again = again | (is_finite(chunk_sumsq) == 0)
    else:
        chunk_sumsq, chunk_total = tl.sum(totals[2]), tl.sum(totals[3])
        again = is_finite(chunk_sumsq) == 0

    if again:
        # seven totals per lane: use fewer lanes, or they would take registers from the main loop
        FEW: tl.constexpr = TILE // 2 if ITEMSIZE == 2 else TILE
        chunk_sumsq, chunk_total, chunk_zeros, chunk_top, chunk_nonfinite, chunk_nan, chunk_posinf = _recount(
            address, head, n, DTYPE, NARROW, FEW
        )

    # the order of PARTIALS
    out = partials_ptr + chunk
    stride = num_chunks.to(tl.int64)
    tl.store(out, chunk_sumsq)
    tl.store(out + stride, chunk_total)
    tl.store(out + 2 * stride, chunk_zeros)
    tl.store(out + 3 * stride, chunk_top)
    tl.store(out + 4 * stride, chunk_nonfinite)
    tl.store(out + 5 * stride, chunk_nan)
    tl.store(out + 6 * stride, chunk_posinf)


def moments(
    pointers: torch.Tensor,
    table: torch.Tensor,
    partials: torch.Tensor,
    dtype: torch.dtype,
    first_chunk: int,
    num_chunks: int,
    num_tensors: int,
    gate: torch.Tensor | None = None,
    fingerprints: torch.Tensor | None = None,
) -> None:
    """Write the partials of one group's chunks, and those of fingerprints if there is room for them.

    For fingerprints, tensors begin at multiples of 8 bytes.
    """
    tile, unroll, threads, registers = tuning.MOMENTS[dtype]
    words = tile * dtype.itemsize // WORD_BYTES
    compensated = dtype != torch.float64 and tuning.has_few_fp64_units(partials.device)
    if compensated:
        registers = tuning.COMPENSATED_REGISTERS
    elif fingerprints is not None:
        registers += tuning.FINGERPRINT_REGISTERS
    _moments_kernel[(num_chunks,)](
        pointers,
        table,
        partials,
        partials if gate is None else gate,
        partials if fingerprints is None else fingerprints,
        first_chunk,
        num_tensors,
        partials.shape[1],
        GATED=gate is not None,
        FINGERPRINT=fingerprints is not None,
        DTYPE=DTYPES[dtype],
        ITEMSIZE=dtype.itemsize,
        TILE=tile,
        WORD_BITS=words.bit_length() - 1,
        STEP=signed(power(-words)),
        UNROLL=unroll,
        # without fingerprints, reading ahead costs more than it saves
        STAGES=1 if fingerprints is None else tuning.stages(partials.device),
        COMPENSATED=threads if compensated else 0,
        **tuning.options(threads, registers, partials.device),
    )
