"""The kernels' results are exact: compiled for GPUs and executed on this CPU, and interpreted.

The values are chosen so that sums are exact in any order: integers, or single numbers among zeros. So all
columns are equal to those of the oracle and of eager PyTorch, bit for bit. In the plain run
`support/ptx.py` executes what Triton compiles; it raises if a kernel does what a GPU forbids. In the
interpreted run Triton's interpreter computes the same cases.
"""

from __future__ import annotations

import math
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from conftest import INTERPRETED
from gradiometer import PerTensorClip, Thresholds, ZScoreClip
from gradiometer.columns import (
    COLUMNS,
    CURSOR_SIZE,
    DEFAULT_THRESHOLDS,
    HEADER_SECTIONS,
    PAIRS,
    TENSORS,
    Cursor,
    Section,
)
from gradiometer.columns.fingerprint import Fingerprint, geometric, power
from gradiometer.control import per_tensor_clip, z_score_clip
from gradiometer.control import scale as eager_scale
from gradiometer.control.adaptive_clip import AdaptiveClip, Gradients
from gradiometer.ops import clipping, dispatch, launch_plans, line_reference, measure_lines
from gradiometer.ops import tensors as tensor_ops
from gradiometer.ops.launch_plans import ChunkMap, chunk_map_of
from gradiometer.stats import norms_of
from support import fingerprints, oracle, pair_oracle

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from torch import Tensor

pytest.importorskip("triton")
if os.name != "posix" or os.uname().machine != "x86_64":
    pytest.skip("the executor reads this machine's memory by 47-bit addresses", allow_module_level=True)

from gradiometer.kernels import tuning
from support.kernel_cases import SPECIAL, each_level, in_eager, integers, kernels, same_bits, tensor_stats

# the interpreter uses NumPy, which warns about overflows that the kernel allows and counts
pytestmark = [
    pytest.mark.usefixtures("triton_cache"),
    pytest.mark.filterwarnings(
        "ignore:(overflow|invalid value|All-NaN slice|divide by zero) encountered:RuntimeWarning"
    ),
]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# sm_89 has few fp64 units, so kernels add fp32 numbers with compensation there
TARGETS = ("sm_89", "sm_90") if INTERPRETED else ("sm_80", "sm_89", "sm_90", "sm_100")
each_target = pytest.mark.parametrize("target", TARGETS)
# for kernels that are small and differ little between targets
chosen_target = pytest.mark.parametrize(
    "target", [pytest.param(name, marks=() if name == "sm_90" else pytest.mark.deep) for name in TARGETS]
)
FP64, FP32, BF16, FP16 = DTYPES
CHOSEN = {"sm_80": (FP64,), "sm_89": (FP32,), "sm_90": DTYPES, "sm_100": (BF16,)}
each_pair = pytest.mark.parametrize(
    ("target", "dtype"),
    [
        pytest.param(target, dtype, marks=() if dtype in CHOSEN[target] else pytest.mark.deep)
        for target in TARGETS
        for dtype in DTYPES
    ],
    ids=str,
)


def assert_exact(tensors: Sequence[Tensor], columns: Tensor, flags: Tensor) -> None:
    names = [column.name for column in COLUMNS]
    for i, x in enumerate(tensors):
        found = dict(zip(names, columns[i].tolist(), strict=True))
        expected = oracle.exact(x)
        assert found == {name: getattr(expected, name) for name in names}, (x.dtype, x.shape, i)
    expected_columns, expected_flags = in_eager(tensors)
    assert same_bits(columns, expected_columns)
    assert flags.tolist() == expected_flags.tolist()


def sizes_of(dtype: torch.dtype) -> list[int]:
    """Return sizes around those at which a kernel changes its method."""
    tile, unroll, *_ = tuning.MOMENTS[dtype]
    borders = {1, tile // 2, tile, tile * unroll}
    # the interpreter takes a second for each of these
    borders |= {tuning.CHUNK} if not INTERPRETED else set()
    near = {border + step for border in borders for step in (-1, 0, 1)}
    return sorted(near | ({3 * tuning.CHUNK + tile + 5} if not INTERPRETED else set()))


# statistics


@each_pair
def test_every_size_is_measured_exactly_and_read_once(target, dtype):
    tensors = [integers(n, dtype, i % 9) for i, n in enumerate(sizes_of(dtype))]
    with kernels(target) as launches:
        columns, flags = tensor_stats(tensors)
    assert_exact(tensors, columns, flags)
    if launches:
        moments = launches[0]
        assert moments.kernel == "_moments_kernel"
        assert {int(x.numel()) for x in tensors if (moments.reads(x) != 1).any()} == set()


@each_pair
def test_a_value_counts_in_whichever_lane_it_is(target, dtype):
    tensors = [x for value in (-3.0, *SPECIAL[:2]) for x in each_level(dtype, value)]
    with kernels(target):
        assert_exact(tensors, *tensor_stats(tensors))


def thousands_of_chunks(tile: int, kinds: int) -> tuple[list[int], ChunkMap, Tensor]:
    """Return the number of chunks of each tensor, their map, and partials of so many kinds, integers."""
    counts = [2 * tile + 5, tile, 0, *[tile] * (tile.bit_length() - 1)]
    chunk_map = chunk_map_of(tuple(count * 16 for count in counts), (torch.float32,) * len(counts), 16, 2**20)
    g = torch.Generator().manual_seed(0)
    partials = torch.randint(1, 2**20, (kinds, chunk_map.num_chunks), generator=g).double()
    for k, own in enumerate(partials.split(counts, dim=1)[3:]):
        # one chunk that each level of the reduction has to pass on
        own[:, [i for i in range(tile) if i != 2**k]] = 0
    return counts, chunk_map, partials


@chosen_target
def test_the_partials_of_thousands_of_chunks_are_merged(target):
    from gradiometer import kernels as launchers

    names = launchers.PARTIALS
    counts, chunk_map, partials = thousands_of_chunks(tuning.FINALIZE.tile, len(names))
    nonfinite, nan, posinf = [names.index(name) for name in ("n_nonfinite", "n_nan", "n_posinf")]
    # NaN and +Inf are among the elements that are not finite; the others are -Inf
    partials[nonfinite] += partials[nan] + partials[posinf]
    # all elements of the first tensor are finite
    partials[[nonfinite, nan, posinf], : counts[0]] = 0
    expected = []
    for count, own in zip(counts, partials.split(counts, dim=1), strict=True):
        sums = dict(zip(names, own.sum(1).tolist(), strict=True))
        sums["abs_max"] = own[names.index("abs_max")].max().item() if count else 0.0
        sums |= {"numel": count * 16, "n_neginf": sums["n_nonfinite"] - sums["n_nan"] - sums["n_posinf"]}
        expected.append([sums[column.name] for column in COLUMNS])
    with kernels(target):
        columns, flags = launchers.finalize(chunk_map.table, partials, len(counts), DEFAULT_THRESHOLDS)
    assert columns.tolist() == expected
    assert flags.tolist() == TENSORS.flags_of(columns, DEFAULT_THRESHOLDS).tolist()


@each_target
def test_tensors_of_several_dtypes_share_a_call(target):
    tensors = [integers(40 + 1021 * i, DTYPES[i % 4], i) for i in range(9)]
    with kernels(target):
        assert_exact(tensors, *tensor_stats(tensors))


@each_pair
def test_nan_and_infinities_are_counted_wherever_they_are(target, dtype):
    tile, unroll, *_ = tuning.MOMENTS[dtype]
    n = 2 * tile * unroll + tile + 7
    tensors = []
    for i, place in enumerate((0, 5, tile, tile * unroll + 3, n - tile, n - 1)):
        for j, value in enumerate(SPECIAL):
            x = integers(n, dtype, 3 * (i + j) % 8)
            x[place] = value
            tensors.append(x)
    every = integers(n, dtype, 1)
    every[::3], every[1::7], every[2::11] = SPECIAL
    tensors += [every, torch.full((n,), math.nan, dtype=dtype)]
    with kernels(target) as launches:
        columns, flags = tensor_stats(tensors)
    assert_exact(tensors, columns, flags)
    if launches:
        assert all((launches[0].reads(x) == 2).all() for x in tensors)


@each_pair
def test_the_extremes_of_a_dtype_are_measured(target, dtype):
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    values = [-0.0, info.max, info.min, info.smallest_normal, 1 / 3]
    if not (INTERPRETED and dtype == torch.bfloat16):  # the interpreter flushes subnormal bf16 to 0
        values += [least, -least, info.smallest_normal - least]
    tensors = []
    for i, value in enumerate(values):
        for n in (1, 40, 2**12 + 3):
            x = torch.zeros(n + i % 5, dtype=dtype)[i % 5 :]
            x[n // 2] = value
            tensors.append(x)
    with kernels(target):
        columns, flags = tensor_stats(tensors)
    if dtype != torch.float64:
        assert_exact(tensors, columns, flags)
    expected = in_eager(tensors)
    # -0 and 0 are equal: a sum of zeros may have either sign
    assert columns.tolist() == expected[0].tolist()
    assert flags.tolist() == expected[1].tolist()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_sums_of_fp32_numbers_keep_their_bounds_at_the_ends_of_its_range(dtype):
    # below 2**-51 squares lose bits in fp32, and from 2**63 on their sum overflows
    g = torch.Generator().manual_seed(0)
    values = torch.randn(500, generator=g, dtype=torch.float64)
    powers = [*range(-75, -45), *range(58, 68)]
    tensors = [(values * 2.0**power).to(dtype) for power in powers]
    # tiny elements beside larger ones
    tensors += [torch.cat([x, tensors[-9]]) for x in tensors[:30:10]]
    with kernels("sm_89"):
        columns, _ = tensor_stats(tensors)
    names = [column.name for column in COLUMNS]
    for x, row in zip(tensors, columns.tolist(), strict=True):
        measured, expected = dict(zip(names, row, strict=True)), oracle.exact(x)
        oracle.assert_same_counts(measured, expected)
        oracle.assert_within_bounds(measured, expected)


@chosen_target
@pytest.mark.parametrize(
    "scale_dtype", [FP64, *(pytest.param(dtype, marks=pytest.mark.deep) for dtype in DTYPES[1:])], ids=str
)
def test_an_inv_scale_multiplies_what_was_measured(target, scale_dtype):
    tensors = [integers(700 + 300 * i, DTYPES[i % 4], i) for i in range(5)]
    tensors[1][3], tensors[2][3] = math.nan, math.inf
    for value in (2.0**-5, -3.0, 0.3, 0.0):
        inv_scale = torch.tensor(value, dtype=scale_dtype)
        with kernels(target):
            columns, flags = tensor_stats(tensors, DEFAULT_THRESHOLDS, inv_scale)
        expected = in_eager(tensors, DEFAULT_THRESHOLDS, inv_scale)
        assert columns.tolist() == expected[0].tolist()
        assert flags.tolist() == expected[1].tolist()


@chosen_target
def test_flags_compare_with_thresholds_in_fp64(target):
    # norms of exactly 3 and 4, and neighbors of these numbers that fp32 does not have
    tensors = [torch.full((9,), 1.0), torch.full((16,), 1.0), torch.zeros(5), torch.empty(0)]
    for vanishing, exploding in ((3.0, 4.0), (math.nextafter(3, 4), math.nextafter(4, 3))):
        limits = Thresholds(vanishing, exploding, dead=1.0)
        with kernels(target):
            columns, flags = tensor_stats(tensors, limits)
        assert flags.tolist() == in_eager(tensors, limits)[1].tolist()
        assert columns[:, TENSORS.index["numel"]].tolist() == [9, 16, 5, 0]


# fingerprints


def assert_fingerprints(tensors: Sequence[Tensor]) -> None:
    """Check fingerprints, and that the statistics are those without them."""
    columns, flags, rows = tensor_ops.measure(tensors, DEFAULT_THRESHOLDS, None, None, fingerprint=True)
    assert rows is not None
    assert rows.tolist() == fingerprints.rows_of(tensors)
    expected = tensor_stats(tensors)
    # elements are added up in another order where they do not lie in row-major order
    same = [i for i, x in enumerate(tensors) if x.is_contiguous()]
    assert same_bits(columns[same], expected[0][same])
    assert flags.tolist() == expected[1].tolist()


@each_pair
def test_fingerprints_are_those_of_the_bits(target, dtype):
    # finite numbers, since a chunk with NaN is read again
    tensors = [integers(n, dtype, i % 9) for i, n in enumerate(sizes_of(dtype))]
    tile, unroll, *_ = tuning.MOMENTS[dtype]
    tensors += [fingerprints.random_bits(dtype, n, seed=n) for n in (1, 2, 3, 7, tile * unroll + tile + 5)]
    with kernels(target):
        assert_fingerprints(tensors)


@chosen_target
def test_fingerprints_of_several_dtypes_share_a_call(target):
    dtypes = (*DTYPES, torch.float8_e4m3fn, torch.complex64)
    tensors = [fingerprints.random_bits(dtype, 9 + 8 * i, 3) for i, dtype in enumerate(dtypes)]
    with kernels(target):
        assert_fingerprints([*tensors, *[x.t() for x in tensors], tensors[0], torch.empty(0)])


@chosen_target
def test_the_fingerprints_of_thousands_of_chunks_are_merged(target):
    from gradiometer import kernels as launchers

    tile, chunk = tuning.FINALIZE.tile, 16
    counts = [2 * tile + 5, tile, 0, 1]
    chunk_map = chunk_map_of(
        tuple(count * chunk for count in counts), (torch.float32,) * len(counts), chunk, 2**20
    )
    parts = [
        # far from each other in tensors of more than 2**32 bytes
        [(i * (2**20 + 1), Fingerprint(8, 2**63 + i * 3**30, 5**27 + i)) for i in range(count)]
        for count in counts
    ]
    rows = [[position, *part.row] for own in parts for position, part in own]
    partials = torch.tensor(rows, dtype=torch.int64).t().contiguous()
    expected = [
        Fingerprint(
            8 * len(own),
            sum(part.word_sum for _, part in own) % 2**64,
            sum(geometric(n) * part.word_sum + power(n) * part.weighted_sum for n, part in own) % 2**64,
        )
        for own in parts
    ]
    with kernels(target):
        found = launchers.finalize_fingerprints(chunk_map.table, partials, len(counts))
    assert found.tolist() == [part.row for part in expected]


# pairs


def pair_rows(sides: Sequence[Sequence[Tensor]]) -> list[dict[str, float]]:
    columns = torch.ops.gradiometer.pair_stats(*map(list, sides))
    names = [column.name for column in PAIRS.columns]
    return [dict(zip(names, row, strict=True)) for row in columns.tolist()]


def assert_exact_pairs(sides: Sequence[Sequence[Tensor]]) -> None:
    for row, *one in zip(pair_rows(sides), *sides, strict=True):
        assert row == pair_oracle.exact_pair(*one)[0], [(x.dtype, x.shape, x.data_ptr() % 16) for x in one]


def sizes_of_pairs(dtype: torch.dtype) -> list[int]:
    way = tuning.PAIRS[dtype.itemsize, True]
    borders = {1, way.tile // 2, way.tile, way.tile * way.unroll}
    borders |= {tuning.CHUNK} if not INTERPRETED else set()
    return sorted({border + step for border in borders for step in (-1, 0, 1)})


@each_pair
def test_every_size_of_a_pair_is_measured_exactly_and_read_once(target, dtype):
    # the same place in a 16-byte word, or another one for the gradient, or for each
    places = ((0, 0, 0), (3, 3, 3), (0, 0, 1), (4, 1, 2))
    chosen = [(n, place) for n in sizes_of_pairs(dtype) for place in places[: 2 + 2 * (n < 2**13)]]
    sides = [[integers(n + side, dtype, place[side])[:n] for n, place in chosen] for side in range(3)]
    for x in sides[2][::3]:
        x.zero_()
    for count in (2, 3):
        with kernels(target) as launches:
            assert_exact_pairs(sides[:count])
        if launches:
            assert launches[0].kernel == "_pairs_kernel"
            tensors = [x for side in sides[:count] for x in side]
            assert {int(x.numel()) for x in tensors if (launches[0].reads(x) != 1).any()} == set()


@chosen_target
def test_pairs_of_several_dtypes_and_strides_share_a_call(target):
    wide = [integers(5 * 2500, dtype, 3).view(5, 2500) for dtype in DTYPES]
    a = [x[:, :2048] for x in wide] + [wide[1][:1].expand(4, -1), wide[2].t(), wide[3][:, ::2]]
    b = [wide[1][:, 5:2053], *[x[:, :2048].contiguous() for x in wide[:3]]]
    b += [wide[0][1:], wide[3].t().contiguous(), wide[1][:, ::2]]
    g = [x.contiguous() for x in a]
    g[2] = torch.empty(0)
    with kernels(target):
        assert_exact_pairs([a, b, g])


@each_pair
def test_special_values_of_a_pair_count_wherever_they_are(target, dtype):
    way = tuning.PAIRS[dtype.itemsize, True]
    n = way.tile * way.unroll + way.tile + 7
    a, b, g = [], [], []
    for i, place in enumerate((0, way.tile * way.unroll + 3, n - 1)):
        for j, value in enumerate((*SPECIAL, -0.0)):
            for side, others in ((a, (b, g)), (b, (a, g)), (g, (a, b))):
                x = integers(n, dtype, 3 * (i + j) % 8)
                x[place] = value
                side.append(x)
                for other in others:
                    other.append(x.clone() if j % 2 else integers(n, dtype, j))
    with kernels(target) as launches:
        assert_exact_pairs([a, b, g])
    if launches:
        # once, and again if there is a NaN or Inf
        reads = {int(launches[0].reads(x).max()) for x in (*a, *b, *g)}
        assert reads <= {1, 2}


def scaled(x: Tensor, exponent: int, dtype: torch.dtype) -> Tensor:
    """Return finite numbers; infinities are tested elsewhere."""
    info = torch.finfo(dtype)
    scaled = (x * 2.0**exponent).clamp(info.min, info.max).to(dtype)
    if INTERPRETED and dtype == torch.bfloat16:  # the interpreter flushes subnormal bf16 to 0
        scaled[scaled.abs() < info.smallest_normal] = 0.0
    return scaled


MIXED = [(FP16,) * 3, (BF16, FP16, FP32)]


@pytest.mark.parametrize(
    "dtypes",
    [(FP32,) * 3, (BF16,) * 3, (FP32, BF16, BF16), *[pytest.param(x, marks=pytest.mark.deep) for x in MIXED]],
    ids=str,
)
def test_pairs_of_fp32_numbers_keep_their_bounds_at_the_ends_of_its_range(dtypes):
    # products lose bits below 2**-125, and sums of squares overflow from 2**63 on
    g = torch.Generator().manual_seed(0)
    powers = (-75, -60, -53, -51, -49, -13, 0, 61, 63, 64)
    sides: tuple[list[Tensor], ...] = [], [], []
    for kind in range(7):
        for exponent in powers[::2] if INTERPRETED else powers:
            a, b, c = (torch.randn(700, generator=g, dtype=torch.float64) for _ in range(3))
            if kind == 1:
                # differences of a few bits
                b = a * (1 + 2.0**-9 * b.sign())
            elif kind == 2:
                # differences with more bits than fp32 has
                b *= 2.0 ** (-3 * torch.arange(700).fmod(12)).double()
            elif kind == 3:
                # the products are much smaller than the squares
                a[::2], b[1::2] = a[::2] * 2.0**-40, b[1::2] * 2.0**-40
                c *= 2.0**-30
            elif kind == 4:
                a[::3], b[:], c[::2] = 0.0, 0.0, 0.0
            elif kind > 4:
                # the squares of one are much smaller than those of the difference
                (a if kind == 5 else b).mul_(2.0**-55)
            for side, x, dtype in zip(sides, (a, b, c), dtypes, strict=True):
                side.append(scaled(x, exponent, dtype))
    with kernels("sm_89"):
        for count in (2, 3):
            for row, *one in zip(pair_rows(sides[:count]), *sides[:count], strict=True):
                pair_oracle.assert_pair(row, *one)


def test_the_largest_difference_is_exact_where_fp32_rounds_it():
    # all differences round to the same fp32 number, or its negative
    low = torch.arange(1, 513) * 2.0**-35
    a, b = torch.ones(512), low
    a[303] = -1.0
    b[303] = 2.0**-26
    with kernels("sm_89"):
        (row,) = pair_rows([[a], [b]])
        pair_oracle.assert_pair(row, a, b)
    assert row["abs_max_u"] == 1 + 2.0**-26


@chosen_target
def test_the_partials_of_thousands_of_chunks_of_pairs_are_merged(target):
    from gradiometer import kernels as launchers

    names = launchers.PAIR_PARTIALS
    counts, chunk_map, partials = thousands_of_chunks(tuning.FINALIZE_PAIRS.tile, len(names))
    expected = []
    for count, own in zip(counts, partials.split(counts, dim=1), strict=True):
        values = dict(zip(names, own.sum(1).tolist(), strict=True)) | {"numel": count * 16}
        values["abs_max_u"] = own[names.index("abs_max_u")].max().item() if count else 0.0
        expected.append([values[column.name] for column in PAIRS.columns])
    with kernels(target):
        columns = launchers.finalize_pairs(chunk_map.table, partials, len(counts))
    assert columns.tolist() == expected


# rows and columns of matrices


@each_pair
def test_lines_are_measured_exactly_and_read_once(target, dtype):
    # of small integers, even projections are exact; views begin anywhere
    wide, tall, long = [
        integers(rows * columns, dtype, start).view(rows, columns)
        for rows, columns, start in ((9, 257, 1), (257, 3, 0), (1, 4100, 1))
    ]
    for x in (wide, wide[:, ::2], wide[:3, :5].t(), tall, long):
        with kernels(target) as launches:
            found = measure_lines([x])
        assert same_bits(found, line_reference.line_stats([x]))
        if launches:
            names = [launch.kernel for launch in launches]
            assert names == ["_lines_kernel", "_merge_lines_kernel", "_merge_lines_kernel"]
            reads = launches[0].reads(x)
            assert (reads.max(), reads.sum()) == (1, x.nbytes)


@each_pair
def test_equal_lines_have_equal_bits_wherever_they_are(target, dtype):
    x = torch.randn(20, 300, generator=torch.Generator().manual_seed(0))
    places = [0, 3, 7, 8, 19]
    x[:, 5] = math.nan
    x[places] = x[0].clone()
    x = x.to(dtype)
    with kernels(target):
        rows = measure_lines([x]).split([20, 300])[0]
        columns = measure_lines([x.t().contiguous()]).split([300, 20])[1]
    for lines in (rows, columns):
        bits = lines.view(torch.int64)
        assert [i for i in range(20) if torch.equal(bits[i], bits[0])] == places


# the ring


class Ring(SimpleNamespace):
    """A ring for some rows, and its cursor."""

    def __init__(self, rows: int, **cursor: float) -> None:
        values = torch.zeros(CURSOR_SIZE, dtype=torch.float64)
        for name, value in ({"EVERY": 1, "SKIP_ABOVE": math.inf} | cursor).items():
            values[Cursor[name]] = value
        section = Section(HEADER_SECTIONS, 1, HEADER_SECTIONS + 1, rows, HEADER_SECTIONS + 1)
        size = section.offset + rows * (TENSORS.width + 1)
        steps = torch.full((3, size), -1.0, dtype=torch.float64)
        super().__init__(steps=steps, cursor=values, section=section)

    def record(self, tensors: Sequence[Tensor], grads: int, *, gated: bool) -> None:
        limits = (DEFAULT_THRESHOLDS.vanishing, DEFAULT_THRESHOLDS.exploding, DEFAULT_THRESHOLDS.dead)
        ring = self.steps, self.cursor, self.section, False
        torch.ops.gradiometer.record_(list(tensors), *limits, None, grads, gated, *ring)

    def advance(self) -> None:
        self.cursor[Cursor.STEP] += 1


CURSORS = {
    "each step": {},
    "every third": {"EVERY": 3},
    "skips what is not finite": {"EVERY": 3, "SKIP_NONFINITE": 1},
    "skips above a norm": {"EVERY": 2, "SKIP_ABOVE": 40.0},
}


@chosen_target
@pytest.mark.parametrize(
    ("case", "gated"),
    [
        pytest.param(case, gated, marks=() if (case == "every third") == gated else pytest.mark.deep)
        for case in CURSORS
        for gated in (False, True)
    ],
)
def test_a_ring_has_the_same_bits_as_in_eager(target, case, gated):
    def fill(ring: Ring) -> None:
        for step in range(7):
            rows = [integers(70 * (step + 1), torch.float32), integers(9, torch.bfloat16, 1), torch.empty(0)]
            if step % 4 == 1:
                rows[0][5] = math.nan
            ring.record(rows, 2, gated=gated)
            if step % 2:
                # later in the same step, only the third row is measured
                ring.record([torch.empty(0), torch.empty(0), integers(5, torch.float16)], 0, gated=gated)
            ring.advance()

    executed, expected = Ring(3, **CURSORS[case]), Ring(3, **CURSORS[case])
    with kernels(target):
        fill(executed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "uses_kernels", lambda _: False)
        fill(expected)
    assert same_bits(executed.cursor, expected.cursor)
    # what a header does not use is not written
    assert same_bits(executed.steps, expected.steps)


@chosen_target
def test_a_ring_of_many_rows_has_them_all(target):
    # more than one program writes
    rows = 70
    tensors = [integers(i, DTYPES[i % 4]) for i in range(rows)]
    ring = Ring(rows)
    with kernels(target):
        ring.record(tensors, rows, gated=False)
    found = ring.steps[0, ring.section.offset :].view(rows, -1)
    assert_exact(tensors, found[:, : TENSORS.width].contiguous(), found[:, TENSORS.width].int())


# scaling


@each_pair
def test_scaling_has_the_same_bits_as_in_eager(target, dtype):
    tile = tuning.SCALE[dtype].tile
    sizes = [1, 7, tile - 1, tile, 2 * tile + 9] + ([] if INTERPRETED else [tuning.CHUNK + 1])
    info = torch.finfo(dtype)
    extremes = [math.nan, math.inf, -0.0, info.max, info.smallest_normal, info.smallest_normal * info.eps]
    for factor in (0.5, 1 / 3, 2.0**-140, 0.0, 1.0):
        tensors, expected = [], []
        for i, n in enumerate(sizes):
            x = torch.randn(n + 3 * i, dtype=torch.float64).to(dtype)[3 * i :]
            x[: len(extremes)] = torch.tensor(extremes[:n], dtype=dtype)
            if INTERPRETED and dtype == torch.bfloat16:
                x[x.abs() < info.smallest_normal] = 1.0
            tensors.append(x)
            expected.append(x.clone())
        c = torch.tensor(factor, dtype=torch.float64)
        eager_scale.scale_(eager_scale.Part(expected, range(len(expected)), None), c)
        with kernels(target) as launches:
            plan = dispatch.writable(tensors) or launch_plans.remember(tensors)
            clipping.scale_(tensors, c, plan)
        for x, y in zip(tensors, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(x.signbit() & ~x.isnan(), y.signbit() & ~y.isnan())
            if launches:
                # a coefficient of 1 is the usual one: nothing is read
                assert ((launches[0].reads(x) > 0) == (factor != 1.0)).all()


@pytest.mark.skipif(INTERPRETED, reason="observes the blocks of compiled kernels")
def test_scaling_begins_with_what_was_measured_last():
    from support import ptx

    # chunks of 64 to 256 KiB, of two dtypes
    tensors = [torch.ones(n, dtype=dtype) for n in (40, 2 * tuning.CHUNK, 9) for dtype in DTYPES[1:3]]
    spans = [(*ptx.span_of(x), x.itemsize * tuning.CHUNK) for x in tensors]
    pieces: dict[tuple[int, int], None] = {}
    load_global = ptx.Block.load_global

    def noted(block: ptx.Block, address: np.ndarray, *args: Any) -> list[np.ndarray]:
        found = int(address[0])
        pieces.update(
            {(i, (found - a) // size): None for i, (a, b, size) in enumerate(spans) if a <= found < b}
        )
        return load_global(block, address, *args)

    orders = []
    half = torch.tensor(0.5, dtype=torch.float64)
    with kernels("sm_90"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ptx.Block, "load_global", noted)
        for call in (tensor_stats, lambda x: clipping.scale_(x, half, dispatch.writable(x))):
            pieces.clear()
            call(tensors)
            orders.append(list(pieces))
    measured, scaled = orders
    assert len(measured) == 8
    assert scaled == measured[::-1]
    assert all((x == 0.5).all() for x in tensors)


# adaptive clipping


def clip_columns(size: int, generator: torch.Generator) -> Tensor:
    """Return columns whose sums are exact in any order: integers, some times a power of 2, or not finite."""
    columns = torch.zeros(size, TENSORS.width, dtype=torch.float64)
    sumsq, top = columns[:, TENSORS.index["sumsq"]], columns[:, TENSORS.index["abs_max"]]

    def draw(end: int) -> Tensor:
        return torch.randint(end, (size,), generator=generator).double()

    columns[:, TENSORS.index["numel"]] = draw(1000)
    sumsq.copy_(draw(50) + 1)
    # spikes and norms of 0, of single rows or of a whole step
    chance = int(draw(8)[0]) if size else 0
    sumsq.mul_(torch.where(draw(6) == 0, 2.0**20, 1.0) * (0.0 if chance == 1 else 1.0))
    sumsq.mul_(torch.where(draw(6) == 0, 0.0, 1.0))
    top.copy_(sumsq.sqrt())
    if chance == 2:
        # squares beyond fp64
        sumsq[0], top[0] = math.inf, 1e200
    elif chance == 3:
        columns[-1, TENSORS.index[("n_nan", "n_posinf", "n_neginf")[int(draw(3)[0])]]] = 2.0
    elif chance in {4, 5}:
        # gradients times a scale of NaN, or of Inf
        sumsq[size // 2], top[size // 2] = math.nan, math.nan if chance == 4 else math.inf
    return columns


def by_operators(clip: AdaptiveClip, names: tuple[str, ...], columns: Tensor) -> Tensor:
    """Decide in the way of compiled graphs, and of devices without kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdaptiveClip, "_uses_kernel", lambda *_: False)
        for module in (per_tensor_clip, z_score_clip):
            patch.setattr(module, "is_on_host", lambda _: False)
        return clip.decide(Gradients(names, columns, 2.0, lambda: norms_of(columns, 2.0)))


def by_kernel(clip: AdaptiveClip, names: tuple[str, ...], columns: Tensor) -> Tensor:
    unused = lambda: pytest.fail("the kernel reads the columns")  # noqa: E731
    return clip.decide(Gradients(names, columns, 2.0, unused))


CLIP_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "z-score": [
        {},
        {"warmup_steps": 2, "z_threshold": 0.5, "decay": 0.5},
        {"warmup_steps": 3, "max_norm": 30.0, "decay": 0.0},
    ],
    "per tensor": [
        {"warmup_steps": 3},
        {"warmup_steps": 0, "decay": 0.0},
        {"warmup_steps": 5, "max_norm": math.inf, "max_ratio": 0.7, "eps": 0.0},
        {"warmup_steps": 2, "max_norm": 0.0},
    ],
}


@chosen_target
@pytest.mark.parametrize("size", [0, 1, 3, tuning.FINALIZE.tile + 5])
@pytest.mark.parametrize("kind", CLIP_OPTIONS)
def test_the_decisions_of_clipping_are_those_of_its_operators(target, kind, size):
    generator = torch.Generator().manual_seed(size)
    names = tuple(map(str, range(size)))
    parameters = {name: torch.zeros(1) for name in names}
    factors = set()
    for options in CLIP_OPTIONS[kind]:
        clip, twin = [
            ZScoreClip(**options) if kind == "z-score" else PerTensorClip(parameters, **options)
            for _ in range(2)
        ]
        versions = [x._version for x in clip.buffers()]
        for _ in range(10 if INTERPRETED or size > 3 else 40):
            columns = clip_columns(size, generator)
            with kernels(target) as launches:
                found = by_kernel(clip, names, columns)
            assert launches is None or len(launches) == 1
            expected = by_operators(twin, names, columns)
            assert found.shape == expected.shape
            assert same_bits(found, expected)
            for x, y in zip(clip.buffers(), twin.buffers(), strict=True):
                assert same_bits(x, y)
            factors |= set(found.flatten().tolist())
        written = [x._version > before for x, before in zip(clip.buffers(), versions, strict=True)]
        assert written == [name != "key" for name, _ in clip.named_buffers()]
    assert len(factors) > 2 or size == 0


@chosen_target
def test_the_total_norm_of_clipping_is_a_sum_in_fp64(target):
    size = 2 * tuning.FINALIZE.tile + 9
    columns = torch.zeros(size, TENSORS.width, dtype=torch.float64)
    sumsq = columns[:, TENSORS.index["sumsq"]]
    sumsq.copy_(torch.rand(size, dtype=torch.float64) * 10.0 ** torch.arange(size).fmod(20))
    clip, again = ZScoreClip(), ZScoreClip()
    with kernels(target):
        for each in (clip, again):
            by_kernel(each, tuple(map(str, range(size))), columns)
    # The mean of a single norm is the norm. Fewer than size additions of numbers that are not negative have a
    # relative error of 2**-53 each; the root halves it, and adds one
    norm = math.sqrt(math.fsum(sumsq.tolist()))
    assert clip.mean.item() == pytest.approx(norm, rel=size * 2.0**-53, abs=0.0)
    assert same_bits(clip.state, again.state)


# how many instructions are executed


@pytest.mark.skipif(INTERPRETED, reason="counts instructions of compiled kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_view_that_begins_anywhere_costs_little_more(dtype):
    n = 2 * tuning.CHUNK
    aligned, elsewhere = torch.ones(n, dtype=dtype), torch.ones(n + 1, dtype=dtype)[1:]
    half = torch.tensor(0.5, dtype=torch.float64)
    moments, scale = [], []
    for x in (aligned, elsewhere):
        with kernels("sm_90") as launches:
            columns, _ = tensor_stats([x])
            clipping.scale_([x], half, dispatch.writable([x]))
        assert columns[0, TENSORS.index["sumsq"]] == n
        assert (x == 0.5).all()
        moments.append(launches[0].instructions)
        scale.append(launches[-1].instructions)
    # only the first chunk has elements before a 16-byte boundary, and only the last has some left
    assert moments[1] <= 1.1 * moments[0]
    assert scale[1] <= 1.1 * scale[0]


@pytest.mark.skipif(INTERPRETED, reason="counts instructions of compiled kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_chunk_with_nan_is_read_again_by_wide_loads(dtype):
    x = torch.ones(tuning.CHUNK, dtype=dtype)
    counts = []
    for _ in range(2):
        with kernels("sm_90") as launches:
            tensor_stats([x])
        counts.append(launches[0].instructions)
        x[-1] = math.nan
    # the second pass counts more; with loads of one element it would take 2.5 to 2.8 times the first
    assert counts[1] - counts[0] <= 2.4 * counts[0]
