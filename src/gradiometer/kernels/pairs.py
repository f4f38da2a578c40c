"""Statistics of pairs of tensors, in one pass over both, and over a gradient too.

For a chunk: the `PAIR_PARTIALS` of b, of a later a, of u = a - b and of g, in fp64; see
`gradiometer.columns.pairs`. The main loop has no mask and no check for NaN or Inf. fp64 holds the squares of
all differences of narrower formats, so a chunk whose sums are finite has no NaN or Inf; any other chunk is
read again. On GPUs with few fp64 units the sums are compensated ones of fp32 numbers.
"""

import torch
import triton
import triton.language as tl

from gradiometer.columns import PAIRS as SCHEMA
from gradiometer.kernels import tuning
from gradiometer.kernels.compensated import LEAST_SQUARE
from gradiometer.kernels.pair_totals import add, add_compensated, compensated_sums, sums_of
from gradiometer.kernels.primitives import DTYPES, WORDS, halves, is_finite, merge_chunks, row_of

# all columns but numel, in their order; the last is a maximum
PAIR_PARTIALS = tuple(SCHEMA.index)[1:]
# their number, as a power of two
_PARTS = 16


@triton.jit
def _number(word, DTYPE: tl.constexpr):
    """Return the fp32 or fp64 number whose bits were read as an integer."""
    if DTYPE == tl.bfloat16:
        x = (word.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == tl.float16:
        x = word.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        x = word.to(DTYPE, bitcast=True)
    return x


@triton.jit
def _same(word_a, word_b, A: tl.constexpr, B: tl.constexpr):
    """Return where both have the same bits; for two dtypes, where they are the same number, not NaN."""
    if A == B:
        same = word_a == word_b
    elif A == tl.float64 or B == tl.float64:  # noqa: PLR1714 Triton has no tuples of types
        x, y = _number(word_a, A).to(tl.float64), _number(word_b, B).to(tl.float64)
        same = (x == y) & (x.to(tl.int64, bitcast=True) == y.to(tl.int64, bitcast=True))
    else:
        x, y = _number(word_a, A), _number(word_b, B)
        same = (x == y) & (x.to(tl.int32, bitcast=True) == y.to(tl.int32, bitcast=True))
    return same


@triton.jit
def _read_again(
    base_a, base_b, base_g, n, A: tl.constexpr, B: tl.constexpr, G: tl.constexpr, TILE: tl.constexpr
):
    """Read a chunk with NaN or Inf again; return its totals, and the counts of NaN, +Inf and -Inf."""
    lanes = tl.arange(0, TILE)
    wide = tl.zeros((TILE,), tl.float64)
    none = tl.zeros((TILE,), tl.float32)
    totals = wide, wide, wide, wide, wide, wide, none, wide, wide, none, none
    nan, posinf, neginf = none.to(tl.int32), none.to(tl.int32), none.to(tl.int32)
    for i in range(0, n, TILE):
        mask = lanes < n - i
        word_a = tl.load(base_a + (i + lanes), mask=mask, other=0)
        word_b = tl.load(base_b + (i + lanes), mask=mask, other=0)
        a, b = _number(word_a, A), _number(word_b, B)
        finite = is_finite(a) & is_finite(b)
        # the element counts as this, see columns/pairs.py; in fp32, which takes fewer registers
        x = tl.where(b != b, b, tl.where(is_finite(a), -b, a))
        x = tl.where(finite, 0.0, x).to(tl.float32)
        nan += (x != x).to(tl.int32)
        posinf += (x == float("inf")).to(tl.int32)
        neginf += (x == -float("inf")).to(tl.int32)
        same = _same(word_a, word_b, A, B) & mask
        a, b = tl.where(finite, a, 0.0), tl.where(finite, b, 0.0)
        g = a
        if G is not None:
            g = _number(tl.load(base_g + (i + lanes), mask=mask, other=0), G)
            # counts are over all elements, sums over finite ones
            one = tl.where(g != 0, 1.0, 0.0)
            few = finite & is_finite(g)
            kept = tl.where(few, g, 0.0)
            odd = one - tl.where(kept != 0, 1.0, 0.0)
            totals = add(a, b, kept, same, totals, True)
            top, saa, sbb, sab, suu, su, unchanged, sgg, sug, nonzero, stuck = totals
            nonzero += odd
            stuck += tl.where(same, odd, 0.0)
            totals = top, saa, sbb, sab, suu, su, unchanged, sgg, sug, nonzero, stuck
        else:
            totals = add(a, b, g, same, totals, False)
    return totals, tl.sum(nan).to(tl.float64), tl.sum(posinf).to(tl.float64), tl.sum(neginf).to(tl.float64)


@triton.jit(do_not_specialize=["first_chunk", "num_tensors", "num_chunks"])
def _pairs_kernel(
    pointers_ptr,  # (3 * T,) int64, of a, b and g; (2 * T,) without G
    table_ptr,  # see ops/launch_plans.py
    partials_ptr,  # (14, N) float64, see PAIR_PARTIALS
    first_chunk: tl.int32,
    num_tensors: tl.int32,
    num_chunks: tl.int32,
    A: tl.constexpr,
    B: tl.constexpr,
    G: tl.constexpr,
    SIZE_A: tl.constexpr,
    SIZE_B: tl.constexpr,
    SIZE_G: tl.constexpr,
    BITS_A: tl.constexpr,  # integers of these sizes
    BITS_B: tl.constexpr,
    BITS_G: tl.constexpr,
    TILE: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
    COMPENSATED: tl.constexpr,  # the lanes of compensated totals, one a thread; 0 for fp64
    # not a global constant, see finalize.py
    LEAST_SQUARE: tl.constexpr = LEAST_SQUARE,
):
    chunk = first_chunk + tl.program_id(0)
    row = row_of(chunk, table_ptr, num_tensors)
    size = tl.load(table_ptr + num_tensors + row)
    index = chunk - tl.load(table_ptr + 2 * num_tensors + row)
    n = tl.minimum(tl.load(table_ptr + row) - index * size, size).to(tl.int32)
    # elements from one chunk's beginning to the next; the rows of chunks precede them
    pitches = table_ptr + 4 * num_tensors + (num_chunks // 2 + 1) + row
    at_a = tl.load(pointers_ptr + row) + index * tl.load(pitches) * SIZE_A
    at_b = tl.load(pointers_ptr + num_tensors + row) + index * tl.load(pitches + num_tensors) * SIZE_B
    at_g = at_a
    if G is not None:
        at_g = tl.load(pointers_ptr + 2 * num_tensors + row)
        at_g += index * tl.load(pitches + 2 * num_tensors) * SIZE_G

    # two numbers of 2 bytes are read as one word: see moments.py
    PAIRS: tl.constexpr = SIZE_A == 2 and A == B and (G is None or G == A)
    LANES: tl.constexpr = TILE // 2 if PAIRS else TILE
    WORD_A: tl.constexpr = tl.int32 if PAIRS else BITS_A
    WORD_B: tl.constexpr = tl.int32 if PAIRS else BITS_B
    lanes = tl.arange(0, LANES)
    EXACT_PRODUCT: tl.constexpr = SIZE_A == 2 and SIZE_B == 2 and SIZE_G <= 2
    if COMPENSATED:
        none = tl.zeros((COMPENSATED,), tl.float32)
        sum3 = none, none, none
        totals = (none, none), sum3, sum3, sum3, sum3, sum3, none, sum3, sum3, none, none, none, none
    else:
        wide = tl.zeros((LANES,), tl.float64)
        none = tl.zeros((LANES,), tl.float32)
        totals = wide, wide, wide, wide, wide, wide, none, wide, wide, none, none  # type: ignore[assignment]
    base_a, base_b = at_a.to(tl.pointer_type(BITS_A)), at_b.to(tl.pointer_type(BITS_B))
    base_g = base_a if G is None else at_g.to(tl.pointer_type(BITS_G))

    # the elements before the first 16-byte boundary are read separately; where the boundaries of a, b and g
    # are at different elements, all are
    head = tl.minimum((-at_a & 15).to(tl.int32) // SIZE_A, n)
    odd = (at_b + head * SIZE_B) & 15
    if G is not None:
        odd |= (at_g + head * SIZE_G) & 15
    full = tl.where(odd == 0, (n - head) // (TILE * UNROLL), 0)

    # no mask: it would split the loads
    ptr_a = tl.multiple_of((at_a + head * SIZE_A).to(tl.pointer_type(WORD_A)), 16) + lanes
    ptr_b = tl.multiple_of((at_b + head * SIZE_B).to(tl.pointer_type(WORD_B)), 16) + lanes
    ptr_g = ptr_a
    if G is not None:
        WORD_G: tl.constexpr = tl.int32 if PAIRS else BITS_G
        ptr_g = tl.multiple_of((at_g + head * SIZE_G).to(tl.pointer_type(WORD_G)), 16) + lanes
    for _ in tl.range(0, full, num_stages=STAGES):
        for i in tl.static_range(UNROLL):
            word_a = tl.load(ptr_a + i * LANES)
            word_b = tl.load(ptr_b + i * LANES)
            word_g = word_a
            if G is not None:
                word_g = tl.load(ptr_g + i * LANES)
            if PAIRS:
                low_a, high_a = halves(word_a, A)
                low_b, high_b = halves(word_b, A)
                low_g, high_g = halves(word_g, A)
                other = word_a ^ word_b
                if COMPENSATED:
                    a, b, g = (
                        tl.interleave(low_a, high_a),
                        tl.interleave(low_b, high_b),
                        tl.interleave(low_g, high_g),
                    )
                    same = tl.interleave((other & 0xFFFF) == 0, (other & -65536) == 0)
                    totals = add_compensated(a, b, g, same, totals, EXACT_PRODUCT, G is not None)
                else:
                    totals = add(low_a, low_b, low_g, (other & 0xFFFF) == 0, totals, G is not None)
                    totals = add(high_a, high_b, high_g, (other & -65536) == 0, totals, G is not None)
            else:
                a, b = _number(word_a, A), _number(word_b, B)
                g = a if G is None else _number(word_g, G)
                same = _same(word_a, word_b, A, B)
                if COMPENSATED:
                    totals = add_compensated(a, b, g, same, totals, EXACT_PRODUCT, G is not None)
                else:
                    totals = add(a, b, g, same, totals, G is not None)
        ptr_a += UNROLL * LANES
        ptr_b += UNROLL * LANES
        if G is not None:
            ptr_g += UNROLL * LANES

    # the elements before and after the tiles
    tiles = full * (TILE * UNROLL)
    for i in range(0, n - tiles, LANES):
        mask = lanes < n - tiles - i
        place = i + lanes
        place = tl.where(place < head, place, place + tiles)
        word_a = tl.load(base_a + place, mask=mask, other=0)
        word_b = tl.load(base_b + place, mask=mask, other=0)
        a, b = _number(word_a, A), _number(word_b, B)
        g = a
        if G is not None:
            g = _number(tl.load(base_g + place, mask=mask, other=0), G)
        same = _same(word_a, word_b, A, B) & mask
        if COMPENSATED:
            totals = add_compensated(a, b, g, same, totals, EXACT_PRODUCT, G is not None)
        else:
            totals = add(a, b, g, same, totals, G is not None)

    if COMPENSATED:
        sums, must_read = compensated_sums(totals, n, LEAST_SQUARE)
        top, saa, sbb, sab, suu, su, unchanged, sgg, sug, nonzero, stuck = sums
    else:
        top, saa, sbb, sab, suu, su, unchanged, sgg, sug, nonzero, stuck = sums_of(totals)
        must_read = is_finite(suu + sgg) == 0
    nan = tl.zeros((), tl.float64)
    posinf, neginf = nan, nan
    if must_read:
        # fewer lanes, or their totals would take registers from the main loop
        again, nan, posinf, neginf = _read_again(base_a, base_b, base_g, n, A, B, G, LANES // 2)
        top, saa, sbb, sab, suu, su, unchanged, sgg, sug, nonzero, stuck = sums_of(again)

    # the order of PAIR_PARTIALS
    out = partials_ptr + chunk
    stride = num_chunks.to(tl.int64)
    tl.store(out, saa)
    tl.store(out + stride, sbb)
    tl.store(out + 2 * stride, sab)
    tl.store(out + 3 * stride, suu)
    tl.store(out + 4 * stride, su)
    tl.store(out + 5 * stride, unchanged)
    tl.store(out + 6 * stride, sgg)
    tl.store(out + 7 * stride, sug)
    tl.store(out + 8 * stride, nonzero)
    tl.store(out + 9 * stride, stuck)
    tl.store(out + 10 * stride, nan)
    tl.store(out + 11 * stride, posinf)
    tl.store(out + 12 * stride, neginf)
    tl.store(out + 13 * stride, top)


@triton.jit(do_not_specialize=["num_tensors", "num_chunks"])
def _finalize_pairs_kernel(
    table_ptr,  # as above
    partials_ptr,  # (14, N) float64
    columns_ptr,  # (T, P) float64
    num_tensors: tl.int32,
    num_chunks: tl.int32,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(table_ptr + 2 * num_tensors + row)
    count = tl.load(table_ptr + 3 * num_tensors + row).to(tl.int32)
    part, offs = tl.arange(0, PARTS), tl.arange(0, TILE)
    # the last column is the only maximum
    TOP: tl.constexpr = COLUMNS - 2
    rows = partials_ptr + first + part[:, None] * num_chunks.to(tl.int64) + offs[None, :]
    sums = tl.zeros((PARTS, TILE), tl.float64)
    for i in range(0, count, TILE):
        x = tl.load(rows + i, mask=(part <= TOP)[:, None] & (offs < count - i)[None, :], other=0.0)
        sums = tl.where(part[:, None] == TOP, tl.maximum(sums, x), sums + x)
    values = tl.where(part == TOP, tl.max(sums, 1), tl.sum(sums, 1))
    out = columns_ptr + row * COLUMNS
    tl.store(out, tl.load(table_ptr + row).to(tl.float64))
    tl.store(out + 1 + part, values, mask=part <= TOP)


def pairs(
    pointers: torch.Tensor,
    table: torch.Tensor,
    partials: torch.Tensor,
    dtypes: tuple[torch.dtype | None, ...],
    first_chunk: int,
    num_chunks: int,
    num_tensors: int,
) -> None:
    """Write the partials of one group's chunks. ``dtypes``: of a, b and g; None or nothing for no g."""
    a, b, g = (*dtypes, None)[:3]
    sizes = [0 if dtype is None else dtype.itemsize for dtype in (a, b, g)]
    tile, unroll, threads, registers = tuning.PAIRS[max(sizes), g is not None]
    compensated = torch.float64 not in dtypes and tuning.has_few_fp64_units(partials.device)
    if compensated:
        registers = tuning.COMPENSATED_REGISTERS
    _pairs_kernel[(num_chunks,)](
        pointers,
        table,
        partials,
        first_chunk,
        num_tensors,
        partials.shape[1],
        A=DTYPES.get(a),
        B=DTYPES.get(b),
        G=DTYPES.get(g),
        SIZE_A=sizes[0],
        SIZE_B=sizes[1],
        SIZE_G=sizes[2],
        BITS_A=WORDS.get(sizes[0]),
        BITS_B=WORDS.get(sizes[1]),
        BITS_G=WORDS.get(sizes[2]),
        TILE=tile,
        UNROLL=unroll,
        STAGES=tuning.stages(partials.device),
        COMPENSATED=threads if compensated else 0,
        **tuning.options(threads, registers, partials.device),
    )


def finalize_pairs(table: torch.Tensor, partials: torch.Tensor, num_tensors: int) -> torch.Tensor:
    """Merge the partials of all chunks into a row for each pair, columns ``(T, P) float64``."""
    kernel, tuned = _finalize_pairs_kernel, tuning.FINALIZE_PAIRS
    return merge_chunks(kernel, table, partials, num_tensors, SCHEMA.width, tuned, PARTS=_PARTS)
