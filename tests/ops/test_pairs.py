"""Statistics of pairs of tensors: every column against exact sums, and the op itself.

These tests run on the eager path and on interpreted kernels; tests/kernels/test_compiled_kernels.py executes
compiled ones.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradiometer as gm
from conftest import INTERPRETED, KERNELS
from gradiometer.columns import PAIRS
from gradiometer.ops import eager_plan, openmp, pair_reference, streaming
from support import pair_oracle, strategies
from support.gradients import bit_patterns
from support.oracle import numbers
from support.pair_oracle import assert_pair, exact_pair
from support.strategies import Recipe

NAMES = tuple(column.name for column in gm.PAIR_COLUMNS)
REAL = strategies.FLOATS + strategies.FP8
needs_kernels = pytest.mark.skipif(not KERNELS, reason="needs kernels")
only_eager = pytest.mark.skipif(KERNELS, reason="the kernels have no pieces, batches or threads of the host")


def call(a, b, g=None):
    return torch.ops.gradiometer.pair_stats(a, b, g)


def rows(columns):
    return [dict(zip(NAMES, row, strict=True)) for row in columns.tolist()]


def check(a, b, g=None):
    """Measure pairs and compare every column of every row with the oracle; return the columns."""
    columns = call(a, b, g)
    assert (columns.shape, columns.dtype) == ((len(a), len(NAMES)), torch.float64)
    for row, x, y, z in zip(rows(columns), a, b, g or [None] * len(a), strict=True):
        assert_pair(row, x, y, z)
    return columns


# pairs of recipes


@dataclass(frozen=True)
class Pair:
    """The description of a pair: two tensors of one shape, and perhaps a gradient.

    ``kept``: which share of b's elements are those of a, as b's dtype has them.
    """

    a: Recipe
    b: Recipe
    g: Recipe | None
    kept: float

    def tensors(self):
        """Make a, b, and g, which is empty if there is none; the same bits each time."""
        a, b = self.a.tensor(), self.b.tensor()
        if self.kept and self.b.layout not in {"expanded", "overlapping"}:
            _keep(a, b, self.kept, self.b.seed)
        return a, b, torch.empty(0) if self.g is None else self.g.tensor()


def _keep(a, b, share, seed):
    wide = torch.complex128 if a.is_complex() else torch.float64
    chosen = torch.rand(b.shape, generator=torch.Generator().manual_seed(seed)) < share
    old = a.to(wide)
    if INTERPRETED and b.dtype == torch.bfloat16:
        # the interpreter flushes subnormal bf16 to 0
        old = torch.where((old != 0) & (old.abs() < 2.0**-126), 1.0, old)
    b.copy_(torch.where(chosen, old, b.to(wide)))


@st.composite
def pairs(draw, largest=math.inf, values=strategies.VALUES, layouts=strategies.LAYOUTS):
    dtypes = draw(st.sampled_from([REAL, REAL, REAL, strategies.COMPLEX]))
    options = {"dtypes": dtypes, "values": values, "layouts": layouts}
    a = draw(strategies.recipes(largest=largest, **options))
    same = draw(st.booleans())

    def like(recipe):
        return Recipe(
            dtype=recipe.dtype if same else draw(st.sampled_from(dtypes)),
            shape=recipe.shape,
            layout=recipe.layout if same else draw(st.sampled_from(layouts)),
            values=draw(st.sampled_from(values)),
            specials=draw(st.sampled_from((0, 0, 1, 2, 9))),
            seed=draw(st.integers(0, 2**16)),
        )

    b = like(a)
    g = like(a) if draw(st.booleans()) else None
    return Pair(a, b, g, draw(st.sampled_from((0.0, 0.5, 1.0))))


def pair_lists(**options):
    small = {**options, "largest": 64}
    return st.one_of(
        st.lists(pairs(**options), min_size=1, max_size=3), st.lists(pairs(**small), min_size=1, max_size=20)
    )


def sides_of(some):
    return [list(side) for side in zip(*[pair.tensors() for pair in some], strict=True)]


@given(pair_lists())
def test_every_column_is_that_of_the_exact_formula(some):
    check(*sides_of(some))


@given(pair_lists())
def test_a_row_has_the_same_bits_whichever_pairs_share_the_call(some):
    a, b, g = sides_of(some)
    together = call(a, b, g)
    backward = call(a[::-1], b[::-1], g[::-1])
    assert bit_patterns([backward]) == bit_patterns([together.flip(0)])
    for i, one in enumerate(zip(a, b, g, strict=True)):
        alone = call(*[[x] for x in one])
        assert bit_patterns([alone[0]]) == bit_patterns([together[i]])
        if not one[2].numel():
            assert bit_patterns([call([one[0]], [one[1]])[0]]) == bit_patterns([together[i]])


@needs_kernels
@given(pair_lists())
def test_kernels_and_reference_agree(some):
    a, b, g = sides_of(some)
    ours, theirs = rows(call(a, b, g)), rows(pair_reference.pair_stats(a, b, g))
    for mine, other, *one in zip(ours, theirs, a, b, g, strict=True):
        _, magnitudes = exact_pair(*one)
        lost = len(one[0].reshape(-1)) * pair_oracle.lost_by_a_product(*one)
        for name in NAMES:
            # each is within its bound of the exact value
            bound = 2 * pair_oracle.SUM_BOUND * magnitudes.get(name, 0.0) + lost * name.startswith("dot")
            assert abs(mine[name] - other[name]) <= bound, name


# laws


def swapped(columns):
    """Return the columns of the pairs (b, a) from those of (a, b)."""
    exchanged = {"sumsq_a": "sumsq_b", "n_posinf": "n_neginf"}
    exchanged |= {other: name for name, other in exchanged.items()}
    order = [NAMES.index(exchanged.get(name, name)) for name in NAMES]
    signs = torch.tensor([-1.0 if name in {"sum_u", "dot_ug"} else 1.0 for name in NAMES])
    return columns[:, order] * signs.double()


@given(pair_lists(largest=2**12, layouts=("contiguous", "misaligned")))
def test_the_reverse_pair_has_the_opposite_difference(some):
    a, b, g = sides_of(some)
    expected = swapped(call(a, b, g))
    for row, x, y in zip(expected, map(numbers, a), map(numbers, b), strict=True):
        # an infinity that stays is the same in both
        more = int(((x == y) & (x == INF)).sum()) - int(((x == y) & (x == -INF)).sum())
        row[NAMES.index("n_posinf")] += more
        row[NAMES.index("n_neginf")] -= more
    # -0 and 0 are equal
    assert call(b, a, g).tolist() == expected.tolist()


@given(pair_lists(largest=2**12))
def test_a_tensor_and_itself_are_unchanged(some):
    a, _, g = sides_of(some)
    columns = call(a, [x.clone() for x in a], g)
    for row in rows(columns):
        assert row["sumsq_u"] == row["sum_u"] == row["dot_ug"] == row["abs_max_u"] == 0.0
        assert row["sumsq_a"] == row["sumsq_b"] == row["dot_ab"]
        # NaN too, if its bits are the same
        assert row["n_unchanged"] == row["numel"]
        assert row["n_stuck"] == row["n_nonzero_g"]


@given(pairs(largest=2**12), st.floats(0, 1))
def test_merging_two_parts_is_measuring_the_whole(pair, share):
    a, b, g = [x.reshape(-1) for x in pair.tensors()]
    at = round(share * len(a))
    parts = [call([a[cut]], [b[cut]], [g[cut]]) for cut in (slice(at), slice(at, None))]
    stats = [gm.PairStats(("x",), columns) for columns in parts]
    (merged,) = rows(stats[0].merge(stats[1]).columns)
    # two sums that are within their bounds, rounded once
    assert_pair(merged, a, b, g, slack=2.0**-52)


# the definitions of single columns, in numbers that everyone can check


def one_row(a, b, g=None, dtypes=(torch.float32,) * 3):
    given_ = [
        torch.tensor(x, dtype=dtype) for x, dtype in zip((a, b, g), dtypes, strict=True) if x is not None
    ]
    (row,) = rows(call(*[[x] for x in given_]))
    return row


@pytest.mark.parametrize("times", [1, 2000, pytest.param(20_000, marks=pytest.mark.once)])
def test_the_columns_of_a_few_numbers(times):
    row = one_row([3.0, -1.0, 2.0, 0.0] * times, [1.0, -1.0, 2.5, 0.0] * times, [-4.0, 2.0, 1.0, 0.0] * times)
    expected = {
        "numel": 4,
        "sumsq_a": 14,
        "sumsq_b": 8.25,
        "dot_ab": 9,
        "sumsq_u": 4.25,
        "sum_u": 1.5,
        "n_unchanged": 2,
        "sumsq_g": 21,
        "dot_ug": -8.5,
        "n_nonzero_g": 3,
        "n_stuck": 1,
        "n_nan": 0,
        "n_posinf": 0,
        "n_neginf": 0,
    }
    assert row == {name: times * value for name, value in expected.items()} | {"abs_max_u": 2}


NAN, INF = math.nan, math.inf
# a, b, g -> sumsq_u, n_unchanged, sumsq_g, n_nonzero_g, n_stuck, n_nan, n_posinf, n_neginf of this element
SPECIAL = {
    "NaN stays NaN": (NAN, NAN, 2.0, 0.0, 1, 0.0, 1, 1, 1, 0, 0),
    "a number becomes NaN": (NAN, 1.0, 2.0, 0.0, 0, 0.0, 1, 0, 1, 0, 0),
    "NaN becomes a number": (1.0, NAN, 2.0, 0.0, 0, 0.0, 1, 0, 1, 0, 0),
    "NaN becomes inf": (INF, NAN, 2.0, 0.0, 0, 0.0, 1, 0, 1, 0, 0),
    "-inf becomes NaN": (NAN, -INF, 2.0, 0.0, 0, 0.0, 1, 0, 1, 0, 0),
    "a number becomes inf": (INF, 1.0, 2.0, 0.0, 0, 0.0, 1, 0, 0, 1, 0),
    "a number becomes -inf": (-INF, 1.0, 0.0, 0.0, 0, 0.0, 0, 0, 0, 0, 1),
    "inf becomes a number": (1.0, INF, 2.0, 0.0, 0, 0.0, 1, 0, 0, 0, 1),
    "-inf becomes a number": (1.0, -INF, 2.0, 0.0, 0, 0.0, 1, 0, 0, 1, 0),
    # there is no NaN, though a - b would be one
    "inf stays inf": (INF, INF, 2.0, 0.0, 1, 0.0, 1, 1, 0, 1, 0),
    "-inf stays -inf": (-INF, -INF, 2.0, 0.0, 1, 0.0, 1, 1, 0, 0, 1),
    "inf becomes -inf": (-INF, INF, 0.0, 0.0, 0, 0.0, 0, 0, 0, 0, 1),
    "-inf becomes inf": (INF, -INF, 0.0, 0.0, 0, 0.0, 0, 0, 0, 1, 0),
    "the gradient is NaN": (3.0, 1.0, NAN, 4.0, 0, 0.0, 1, 0, 0, 0, 0),
    "the gradient is inf, and nothing changes": (3.0, 3.0, -INF, 0.0, 1, 0.0, 1, 1, 0, 0, 0),
    "all are NaN": (NAN, NAN, NAN, 0.0, 1, 0.0, 1, 1, 1, 0, 0),
    "zero changes its sign": (-0.0, 0.0, 2.0, 0.0, 0, 4.0, 1, 0, 0, 0, 0),
    "the gradient is -0": (1.0, 1.0, -0.0, 0.0, 1, 0.0, 0, 0, 0, 0, 0),
}


@pytest.mark.parametrize("n", [1, 7, 1500, pytest.param(9000, marks=pytest.mark.once)])
@pytest.mark.parametrize("dtype", strategies.FLOATS, ids=str)
def test_special_values_count_as_documented(dtype, n):
    cases = list(SPECIAL.values())
    sides = []
    for i in range(3):
        side = []
        for case in cases:
            x = torch.full((n,), 2.0, dtype=dtype)
            x[n // 2] = case[i]
            side.append(x)
        sides.append(side)
    found = rows(check(*sides))
    names = ("sumsq_u", "n_unchanged", "sumsq_g", "n_nonzero_g", "n_stuck", "n_nan", "n_posinf", "n_neginf")
    rest = (0.0, n - 1, 4.0 * (n - 1), n - 1, n - 1, 0, 0, 0)
    for row, case in zip(found, cases, strict=True):
        assert [row[name] for name in names] == [x + y for x, y in zip(case[3:], rest, strict=True)], case


@pytest.mark.parametrize("n", [1, 9, 3000])
def test_nan_of_other_bits_has_changed(n):
    a = torch.full((n,), math.nan)
    b = (a.view(torch.int32) + 1).view(torch.float32)
    (row,) = rows(check([a], [b]))
    assert row["n_unchanged"] == 0
    assert (row["n_nan"], row["n_posinf"], row["n_neginf"]) == (n, 0, 0)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float64),
        (torch.float8_e4m3fn, torch.float16),
        (torch.float8_e4m3fn, torch.float8_e5m2),
        (torch.float8_e5m2, torch.float8_e5m2fnuz),
        (torch.float8_e8m0fnu, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("n", [1, 40, pytest.param(2500, marks=pytest.mark.once)])
def test_two_dtypes_are_unchanged_where_they_are_the_same_number(one, other, n):
    numbers = torch.tensor([1.0, 2.0, 0.5, math.nan], dtype=torch.float32)
    a, b = (numbers.to(dtype).repeat(n) for dtype in (one, other))
    found = rows(check([a, b, a[:1]], [b, a, b[:1]], [torch.ones(4 * n)] * 2 + [torch.ones(1)]))
    # NaN of two dtypes has no bits in common
    assert [row["n_unchanged"] for row in found] == [3 * n, 3 * n, 1]
    assert [row["n_stuck"] for row in found] == [3 * n, 3 * n, 1]


EIGHT_BITS = torch.tensor([0, 1, 0x3C, 0x7D, 0x7E, 0x7F, 0x80, 0x81, 0xFD, 0xFE, 0xFF], dtype=torch.uint8)


@pytest.mark.parametrize("one", strategies.FP8, ids=str)
def test_fp8_is_compared_by_bits_or_by_numbers(one):
    # several NaNs of one format become the same NaN in a wider one
    n = len(EIGHT_BITS)
    sides = [], []
    for other in (*strategies.FP8, torch.float16, torch.bfloat16):
        a = EIGHT_BITS.view(one).repeat_interleave(n)
        b = EIGHT_BITS.view(other) if other.itemsize == 1 else EIGHT_BITS.view(one).to(other)
        for side, x in zip(sides, (a, b.repeat(n)), strict=True):
            side.append(x)
        # rows of other strides may be converted by another loop
        sides[0].append(torch.stack([a, a], dim=1)[:, 0])
        sides[1].append(b.repeat(n))
    check(*sides)
    check(*sides[::-1])


def test_a_bf16_weight_and_its_fp32_master():
    master = torch.randn(5000)
    weight = master.bfloat16()
    (row,) = rows(check([weight], [master], [torch.randn(5000, dtype=torch.float16)]))
    # rounding to 8 bits changes an element by at most half a unit in its last place
    assert 0 < row["abs_max_u"] <= 2.0**-8 * master.abs().max().item()
    assert row["n_unchanged"] == (weight.float() == master).sum().item()


@pytest.mark.parametrize(
    ("dtype", "old", "new"),
    [
        # the difference is half a unit in the last place of fp32, and squares are beyond its range
        (torch.float64, 2.0**50, 2.0**50 + 0.25),
        (torch.float32, 1e30, 1e30 + 1e23),
        (torch.bfloat16, 1e30, 1.01e30),
    ],
    ids=str,
)
def test_differences_keep_what_fp32_would_lose(dtype, old, new):
    b = torch.full((3000,), old, dtype=dtype)
    a = b.clone()
    a[::3] = new
    assert (a != b).any()
    check([a, b], [b, a], [b, a])


def test_sums_beyond_the_range_of_fp64_are_infinite():
    a = torch.full((3000,), 1e200, dtype=torch.float64)
    a[1], a[2] = math.nan, 1.0
    b = torch.zeros_like(a)
    for n in (3000, 1):
        (row,) = rows(call([a[:n]], [b[:n]], [a[:n]]))
        assert row["sumsq_a"] == row["sumsq_u"] == row["sumsq_g"] == row["dot_ug"] == math.inf
        assert (row["sumsq_b"], row["dot_ab"], row["abs_max_u"]) == (0.0, 0.0, 1e200)
        assert (row["n_nan"], row["n_posinf"], row["n_neginf"]) == (int(n > 1), 0, 0)


@pytest.mark.parametrize("n", [1, 40, 3000])
def test_a_difference_beyond_the_range_of_fp64_is_not_a_nonfinite_element(n):
    a = torch.full((n,), 1.7e308, dtype=torch.float64)
    for x, y in ((a, -a), (-a, a)):
        (row,) = rows(call([x], [y]))
        assert (row["n_nan"], row["n_posinf"], row["n_neginf"]) == (0, 0, 0)
        assert row["abs_max_u"] == math.inf


@pytest.mark.parametrize(
    ("one", "other"),
    [(torch.float64, torch.float32), (torch.bfloat16, torch.float64), (torch.float16, torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("n", [1, 9, 2500])
def test_elements_of_two_dtypes_count_by_kind(one, other, n):
    # the largest of fp64 must not become infinite in a narrower dtype
    values = [1.0, NAN, INF, -INF, *(torch.finfo(dtype).max for dtype in (one, other))]
    pairs = [pair for pair in itertools.product(values, values) if not all(map(math.isfinite, pair))]
    sides = zip(*pairs, strict=True)
    a, b = (
        [torch.full((n,), x, dtype=torch.float64).to(dtype) for x in side]
        for side, dtype in zip(sides, (one, other), strict=True)
    )
    check(a, b)
    check(b, a)


# sizes, alignment, strides


def near(*borders):
    return [border + step for border in borders for step in (-1, 0, 1)]


def borders():
    if not KERNELS:
        return (*eager_plan.WIDTHS[:3], eager_plan.SMALL, eager_plan.BATCH, streaming.PIECE // 2)
    from gradiometer.kernels import tuning

    found = {size for way in tuning.PAIRS.values() for size in (way.tile, way.tile * way.unroll)}
    return sorted(found) + ([] if INTERPRETED else [tuning.CHUNK])


def small_integers(n, dtype, start, seed):
    """Return integers, whose sums are exact; ``start`` elements past an aligned address."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, (n + start,), generator=g).to(dtype)[start:]


@pytest.mark.parametrize("dtype", strategies.FLOATS, ids=str)
def test_every_size_and_alignment(dtype):
    # all three begin at the same element of a 16-byte word, or one or each at another
    starts = ((0, 0, 0), (3, 3, 3), (0, 0, 1), (0, 1, 0), (2, 0, 0), (0, 1, 2))
    sides = [], [], []
    sizes = near(*borders())
    for n, each in (
        itertools.product(sizes, starts) if KERNELS else zip(sizes, itertools.cycle(starts), strict=False)
    ):
        for i, (side, start) in enumerate(zip(sides, each, strict=True)):
            side.append(small_integers(n, dtype, start, 3 * len(side) + i))
    columns = call(*sides)
    for row, *one in zip(rows(columns), *sides, strict=True):
        # in any order of additions
        assert row == exact_pair(*one)[0], (len(one[0]), dtype)
    a, b, _ = sides
    for row, *one in zip(rows(call(a, b)), a, b, strict=True):
        assert row == exact_pair(*one)[0], (len(one[0]), dtype)


@pytest.mark.parametrize("dtypes", list(itertools.product(strategies.FLOATS, repeat=2)), ids=str)
def test_every_two_dtypes(dtypes):
    n = 2500
    a, b = (small_integers(n, dtype, i, i) for i, dtype in enumerate(dtypes))
    g = small_integers(n, dtypes[0], 1, 7)
    found = rows(call([a, a], [b, b], [g, torch.empty(0)]))
    assert found == [exact_pair(a, b, g)[0], exact_pair(a, b)[0]]


def rows_of_2048(x):
    return x[:, 512:2560]


def chunks_of_4096(x):
    return x.view(-1).unfold(0, 4096, 2 * 4096)


STRIDED = {
    "rows of a wider matrix": rows_of_2048,
    "every other chunk": chunks_of_4096,
    "short rows": lambda x: x[:, 5:105],
    "rows of an odd length": lambda x: x[:, 3:1204],
    "one row": lambda x: x[2:3, 100:3000],
    "transposed": lambda x: x[:, :40].t(),
    "every other column": lambda x: x[:, ::2],
    "a row, repeated": lambda x: x[3].expand(7, -1),
}


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.once)], ids=str
)
@pytest.mark.parametrize("which", STRIDED)
def test_views_with_gaps(which, dtype):
    make = STRIDED[which]
    whole = [small_integers(8 * 3072, dtype, 0, seed).view(8, 3072) for seed in range(3)]
    views = [make(x) for x in whole]
    dense = [x.clone(memory_format=torch.contiguous_format) for x in views]
    expected = exact_pair(*views)[0]
    # each of them strided or not
    for chosen in itertools.product((False, True), repeat=3):
        sides = [v if strided else d for v, d, strided in zip(views, dense, chosen, strict=True)]
        columns = call(*[[x] for x in sides])
        assert rows(columns) == [expected], chosen
    assert rows(call([views[0], views[0]], [dense[1], views[1]])) == [exact_pair(*views[:2])[0]] * 2


@pytest.mark.parametrize("n", [3, pytest.param(2**10 + 1, marks=pytest.mark.once)])
def test_memory_in_other_orders(n):
    a, b, g = (small_integers(2 * 3 * 5 * n, torch.float32, 0, seed).view(2, 3, 5, n) for seed in range(3))
    orders = [
        lambda x: x,
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    ]
    expected = exact_pair(a, b, g)[0]
    for one, two, three in itertools.product(orders, repeat=3):
        assert rows(call([one(a)], [two(b)], [three(g)])) == [expected]


@only_eager
@pytest.mark.parametrize("other", ["the same", "transposed", "every other row", "bfloat16"])
def test_large_tensors_go_through_pieces(other):
    shape = 3 * 128 + 1, streaming.PIECE // 128
    a, b, g = (small_integers(math.prod(shape), torch.float32, 0, seed).view(shape) for seed in range(3))
    if other == "transposed":
        b = b.t().contiguous().t()
    elif other == "every other row":
        b = b.repeat_interleave(2, dim=0)[::2]
    elif other == "bfloat16":
        b = b.bfloat16()
    plain, with_g = exact_pair(a, b)[0], exact_pair(a, b, g)[0]
    assert rows(call([a, a], [b, b], [g, torch.empty(0)])) == [with_g, plain]
    a[100, 3], g[200, 5] = math.nan, math.inf
    assert rows(call([a], [b], [g])) == [exact_pair(a, b, g)[0]]


@only_eager
@pytest.mark.parametrize("n", [100, 9000, streaming.PIECE // 2 + 5])
def test_differences_of_all_sizes_in_one_call(n):
    g = torch.Generator().manual_seed(0)
    a, noise, grads = [[torch.randn(n, generator=g) for _ in range(5)] for _ in range(3)]
    # the dot product of the first ones follows from the squares
    b = [x + size * y for x, y, size in zip(a, noise, (0.0, 1e-4, 0.2, 0.3, 10.0), strict=True)]
    together = check(a, b, grads)
    for row, *one in zip(together, a, b, grads, strict=True):
        assert bit_patterns([call(*[[x] for x in one])[0]]) == bit_patterns([row])


@only_eager
@pytest.mark.parametrize("threads", [1, 3])
def test_the_number_of_threads_does_not_matter(threads, number_of_threads):
    g = torch.Generator().manual_seed(0)
    sides = [[torch.randn(2**20 + 3, generator=g), torch.randn(5000, generator=g)] for _ in range(3)]
    expected = call(*sides)
    number_of_threads(threads)
    assert bit_patterns([call(*sides)]) == bit_patterns([expected])


@only_eager
def test_where_threads_cannot_be_limited_pieces_are_smaller(monkeypatch):
    monkeypatch.setattr(openmp, "can_run_alone", lambda: False)
    monkeypatch.setattr(streaming, "MOST_BLOCKS", 2)
    for n in (3 * eager_plan.BATCH, 9 * eager_plan.BATCH + 5, 100):
        check(*[[torch.randn(n)] for _ in range(3)])


def test_many_pairs_of_all_sizes_and_dtypes_in_one_call():
    g = torch.Generator().manual_seed(0)
    sides = [], [], []
    for n in (0, 1, 2, 16, 17, 700, 1025, *([] if KERNELS else [9000])):
        for a, b in itertools.product(strategies.FLOATS, repeat=2):
            for side, dtype in zip(sides, (a, b, a), strict=True):
                side.append(torch.randn(n, generator=g).to(dtype))
    sides[2][::3] = [torch.empty(0)] * len(sides[2][::3])
    first = check(*sides)
    # a list that was measured before is recognized
    assert bit_patterns([call(*sides)]) == bit_patterns([first])


def test_nothing_to_measure_is_zero():
    empty = torch.empty(0)
    sides = [[empty, torch.empty(3, 0), empty.bfloat16(), torch.ones(2)] for _ in range(2)]
    for g in (None, [empty] * 4):
        columns = call(*sides, g)
        assert columns[:3].abs().sum() == 0
        assert columns[3, NAMES.index("n_unchanged")] == 2


# the op


def test_tensors_that_were_measured_in_another_way_are_not_taken_for_pairs():
    tensors = [torch.ones(n) for n in (3, 4, 5, 6)]
    # so that the list is recognized
    for _ in range(2):
        gm.collect(tensors)
    with pytest.raises(ValueError, match=r"compare: '0' is float32 \(3,\) on cpu in a, but float32 \(5,\)"):
        gm.compare(tensors[:2], tensors[2:])
    # two pairs with gradients, and three pairs of the same tensors without
    six = [torch.ones(n) for n in (3, 4, 3, 4, 3, 4)]
    for _ in range(2):
        call(six[:2], six[2:4], six[4:])
    with pytest.raises(ValueError, match="compare: '0' is float32"):
        gm.compare(six[:3], six[3:])


# derived values


def derived(name, **values):
    columns = torch.zeros(len(NAMES), dtype=torch.float64)
    for column, value in values.items():
        columns[NAMES.index(column)] = value
    return PAIRS.value(columns, name).item()


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("update_ratio", {"sumsq_u": 9.0, "sumsq_b": 16.0}, 0.75),
        ("update_ratio", {"sumsq_u": 0.0, "sumsq_b": 0.0}, 0.0),
        ("update_ratio", {"sumsq_u": 9.0, "sumsq_b": 0.0}, INF),
        ("rms_u", {"sumsq_u": 18.0, "numel": 6.0, "n_nan": 2.0, "n_posinf": 1.0, "n_neginf": 1.0}, 3.0),
        ("rms_u", {"numel": 3.0, "n_nan": 3.0}, 0.0),
        ("n_inf", {"n_nan": 1.0, "n_posinf": 2.0, "n_neginf": 4.0}, 6.0),
        ("n_nonfinite", {"n_nan": 1.0, "n_posinf": 2.0, "n_neginf": 4.0}, 7.0),
        ("cosine", {"dot_ab": 6.0, "sumsq_a": 9.0, "sumsq_b": 16.0}, 0.5),
        ("cosine", {"dot_ab": -1e200, "sumsq_a": 1e200, "sumsq_b": 1e200}, -1.0),
        ("cosine", {"sumsq_b": 16.0}, NAN),
        # rounding must not make a cosine larger than 1
        ("cosine", {"dot_ab": 1.0 + 1e-15, "sumsq_a": 1.0, "sumsq_b": 1.0}, 1.0),
        ("descent_cosine", {"dot_ug": -6.0, "sumsq_u": 9.0, "sumsq_g": 16.0}, 0.5),
        ("descent_cosine", {"sumsq_u": 9.0}, NAN),
        ("unchanged_fraction", {"n_unchanged": 3.0, "numel": 4.0}, 0.75),
        ("unchanged_fraction", {}, 0.0),
        ("stuck_fraction", {"n_stuck": 1.0, "n_nonzero_g": 4.0, "numel": 100.0}, 0.25),
        ("stuck_fraction", {}, 0.0),
        ("norm_u", {"sumsq_u": 2.25}, 1.5),
    ],
)
def test_derived_values(name, values, expected):
    found = derived(name, **values)
    assert found == expected or (math.isnan(expected) and math.isnan(found))
