"""Numbers against the oracle: exact counts, error bounds, flags by a plain formula."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import gradiometer as gm
from conftest import INTERPRETED, KERNELS
from gradiometer import Flag, Thresholds
from support import oracle, strategies
from support.strategies import Recipe, recipes

RAW = tuple(column.name for column in gm.COLUMNS)
DERIVED = ("n_inf", "n_nonfinite", "finite_norm", "norm", "rms", "mean", "std", "zero_fraction")

# the interpreter takes a second for 2**20 elements
CONSTANT_NUMEL = 2**17 + 5 if KERNELS else 2**24


def measure(tensor, **options):
    stats = gm.collect({"x": tensor}, **options)
    return {name: getattr(stats, name).item() for name in RAW + DERIVED} | {"flags": stats.flags.item()}


def close(a, b, relative):
    return abs(a - b) <= relative * abs(b)


@given(recipes())
def test_counts_and_the_largest_magnitude_are_exact(recipe):
    x = recipe.tensor()
    oracle.assert_same_counts(measure(x), oracle.exact(x))


@given(recipes())
def test_norm_and_sum_are_within_their_bounds(recipe):
    x = recipe.tensor()
    oracle.assert_within_bounds(measure(x), oracle.exact(x))


@given(recipes(strategies.FLOATS + strategies.COMPLEX[:1], layouts=("contiguous",), largest=2**12))
def test_a_sparse_tensor_is_measured_with_its_zeros(recipe):
    x = recipe.tensor()
    assume(x.dim() > 0)
    expected = oracle.exact(x)
    # the conversion drops zeros, so that all of them are implicit
    measured = measure(x.to_sparse())
    oracle.assert_same_counts(measured, expected)
    oracle.assert_within_bounds(measured, expected)
    assert measured["flags"] == measure(x)["flags"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [0.1, 1.0, -1 / 3, 300.0])
def test_a_large_constant_tensor_has_the_norm_of_the_closed_form(dtype, value):
    n = CONSTANT_NUMEL if dtype in {torch.float32, torch.bfloat16} else CONSTANT_NUMEL // 16
    x = torch.full((n,), value, dtype=dtype)
    measured = measure(x)
    element = Fraction(x[0].item())
    # one rounding of the exact rational each, and one of the root
    assert close(measured["finite_norm"], math.sqrt(n * element**2), oracle.NORM_BOUND)
    assert close(measured["sum"], float(n * element), oracle.SUM_BOUND)
    assert measured["abs_max"] == abs(float(element))


@pytest.mark.parametrize("values", ["normal", "wide", "some zeros"])
def test_a_large_tensor_of_repeated_blocks_adds_up_like_one_block_many_times(values):
    # a NaN or Inf in each block would make the slow counting path run for each piece
    block = Recipe(torch.float32, (2**12 + 3,), values=values).tensor()
    times = CONSTANT_NUMEL // len(block)
    measured, one = measure(block.repeat(times)), oracle.exact(block)
    for name in oracle.COUNTS:
        assert measured[name] == times * getattr(one, name)
    assert measured["abs_max"] == one.abs_max
    # U for the rounding of the oracle's own sum, and U for the product
    assert close(measured["sumsq"], times * one.sumsq, 2 * oracle.NORM_BOUND + 2 * oracle.U)
    bound = (oracle.SUM_BOUND + 2 * oracle.U) * times * one.abs_sum
    assert abs(measured["sum"] - times * one.sum) <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_of_1e20_do_not_overflow(dtype):
    x = torch.full((5000,), 1e20, dtype=dtype)
    measured = measure(x)
    assert close(measured["norm"], math.sqrt(5000) * x[0].item(), oracle.NORM_BOUND + 2 * oracle.U)
    assert measured["flags"] == Flag.EXPLODING


def test_the_norm_of_large_fp16_gradients_is_exact():
    # 300**2 overflows fp16, and so does the sum of 40000; integers of this size are exact in fp64
    assert measure(torch.full((40_000,), 300.0, dtype=torch.float16))["norm"] == 300.0 * 200.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_1e_minus_10_beside_1e15_is_measured_as_both(dtype):
    x = torch.tensor([1e-10, 1e15] * 3000, dtype=dtype)
    expected = oracle.exact(x)
    oracle.assert_within_bounds(measure(x), expected)
    oracle.assert_within_bounds(measure(x[::2]), oracle.exact(x[::2]))
    oracle.assert_same_counts(measure(x), expected)


@pytest.mark.parametrize("magnitude", [1e-150, 1e150])
@pytest.mark.parametrize("n", [7, 5001])
def test_fp64_is_exact_to_the_bound_at_the_ends_of_its_range(magnitude, n):
    spread = 1 + torch.arange(n, dtype=torch.float64) / n
    x = magnitude * spread if magnitude < 1 else magnitude / spread
    x[::3] *= -1
    measured = measure(x)
    oracle.assert_within_bounds(measured, oracle.exact(x))
    assert measured["flags"] == (Flag.VANISHING if magnitude < 1 else Flag.EXPLODING)


@pytest.mark.parametrize("n", [9, 5001])
@pytest.mark.parametrize("value", [5e-324, 1e-310, 1.7e308, 1e200])
def test_counts_of_fp64_hold_where_its_squares_leave_the_range(value, n):
    x = torch.full((n,), value, dtype=torch.float64)
    x[::3] = 0.0
    x[1], x[4] = -math.inf, math.nan
    measured = measure(x)
    assert [measured[name] for name in oracle.COUNTS] == [n, len(x[::3]), 1, 0, 1]
    assert measured["abs_max"] == value
    assert measured["flags"] == Flag.NAN | Flag.INF | Flag.EXPLODING


@pytest.mark.parametrize("dtype", strategies.FLOATS)
def test_subnormal_numbers_are_no_zeros(dtype):
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter flushes subnormal bf16 to 0")
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    x = torch.full((40,), smallest, dtype=dtype)
    measured = measure(x)
    assert measured["n_zero"] == 0
    assert measured["abs_max"] == smallest
    assert measured["sum"] == 40 * smallest
    assert not measured["flags"] & Flag.DEAD


# subnormal numbers of each format by their bits: conversions may flush them
SUBNORMAL = {
    torch.float64: (torch.int64, 1 << 51),
    torch.float32: (torch.int32, 1 << 22),
    torch.bfloat16: (torch.int16, 1 << 6),
    torch.float16: (torch.int16, 1 << 9),
    torch.float8_e4m3fn: (torch.uint8, 4),
    torch.float8_e4m3fnuz: (torch.uint8, 4),
    torch.float8_e5m2: (torch.uint8, 2),
    torch.float8_e5m2fnuz: (torch.uint8, 2),
    torch.float8_e8m0fnu: (torch.uint8, 0),
}
# exponents of the numbers above; fp16 and these formats of fp8 are read as fp32, where they are normal
EXPONENTS = dict(zip(SUBNORMAL, [-1023, -127, -127, -15, -7, -8, -15, -16, -127], strict=True))


@pytest.mark.parametrize(
    ("mode", "n"), [*itertools.product(["eager", "flushed"], [1, 40, 5000]), ("compiled", 40)]
)
def test_a_subnormal_number_is_measured_unless_the_cpu_or_the_interpreter_flushes_it(mode, n):
    tensors = {
        str(dtype): torch.full((n,), code, dtype=raw).view(dtype) for dtype, (raw, code) in SUBNORMAL.items()
    }
    collect = torch.compile(gm.collect, backend="eager", fullgraph=True) if mode == "compiled" else gm.collect
    if mode == "flushed" and KERNELS and not INTERPRETED:
        # where the compiler compares integers to find zeros, the executor does not flush either
        pytest.skip("a GPU does not flush subnormal numbers")
    try:
        if mode == "flushed" and not torch.set_flush_denormal(True):
            pytest.skip("this CPU cannot flush subnormal numbers")
        stats = collect(tensors)
    finally:
        torch.set_flush_denormal(False)
    for dtype, (n_zero, top, total) in zip(SUBNORMAL, _counted(stats), strict=True):
        is_flushed = mode == "flushed" and EXPONENTS[dtype] in {-127, -1023}
        if INTERPRETED and dtype in {torch.bfloat16, torch.float8_e8m0fnu}:
            # the interpreter's own conversion of bf16, which only the elements beside whole tiles go through
            assert (n_zero > 0) or is_flushed
            continue
        value = 0.0 if is_flushed else 2.0 ** EXPONENTS[dtype]
        assert (n_zero, top, total) == (n * is_flushed, value, n * value), dtype


def _counted(stats):
    places = [RAW.index(name) for name in ("n_zero", "abs_max", "sum")]
    return stats.columns[:, places].tolist()


@given(recipes())
def test_derived_values_follow_from_the_oracle(recipe):
    x = recipe.tensor()
    measured, expected = measure(x), oracle.exact(x)
    for name in ("n_inf", "n_nonfinite", "zero_fraction"):
        assert measured[name] == getattr(expected, name), name
    # a quotient and a root of values within their bounds: two more roundings each, here and in the oracle
    slack = 4 * oracle.U
    assert close(measured["finite_norm"], expected.finite_norm, oracle.NORM_BOUND + slack)
    assert close(measured["rms"], expected.rms, oracle.NORM_BOUND + slack)
    mean_of_magnitudes = expected.abs_sum / max(expected.n_finite, 1)
    assert abs(measured["mean"] - expected.mean) <= (oracle.SUM_BOUND + slack) * mean_of_magnitudes
    if expected.n_nonfinite == 0:
        assert measured["norm"] == measured["finite_norm"]


@given(recipes())
def test_std_is_that_of_the_population(recipe):
    x = recipe.tensor()
    expected = oracle.exact(x)
    # variance = rms**2 - mean**2: the error of the first is 2 * 1e-13 of rms**2; so is that of the second,
    # since |mean| <= mean |x| <= rms; then some roundings of numbers not above rms**2
    bound = (2 * oracle.NORM_BOUND + 2 * oracle.SUM_BOUND + 16 * oracle.U) * expected.rms**2
    assert abs(measure(x)["std"] ** 2 - oracle.std(x) ** 2) <= bound


def expected_flags(exact, thresholds):
    if exact.numel == 0:
        return 0
    finite = exact.n_nonfinite == 0
    flags = Flag.NAN if exact.n_nan else 0
    flags |= Flag.INF if exact.n_inf else 0
    flags |= Flag.VANISHING if finite and exact.finite_norm < thresholds.vanishing else 0
    flags |= Flag.EXPLODING if not finite or exact.finite_norm > thresholds.exploding else 0
    return flags | (Flag.DEAD if exact.zero_fraction >= thresholds.dead else 0)


@given(recipes())
def test_flags_follow_the_default_thresholds(recipe):
    x = recipe.tensor()
    expected = oracle.exact(x)
    for border in (gm.DEFAULT_VANISHING_THRESHOLD, gm.DEFAULT_EXPLODING_THRESHOLD):
        assume(not close(expected.finite_norm, border, oracle.NORM_BOUND))
    assert measure(x)["flags"] == expected_flags(expected, Thresholds())


# beyond the bound of the norm, and far below the resolution of fp32
FACTORS = st.sampled_from([0.0, 0.5, 1 - 1e-10, 1 - 2e-13, 1 + 2e-13, 1 + 1e-10, 2.0])


@given(recipes(values=("normal", "some zeros", "constant", "wide", "tiny")), FACTORS, FACTORS, FACTORS)
def test_flags_follow_thresholds_that_the_norm_nearly_meets(recipe, below, above, share):
    x = recipe.tensor()
    exact = oracle.exact(x)
    thresholds = Thresholds(
        vanishing=exact.finite_norm * below,
        exploding=exact.finite_norm * above,
        dead=exact.zero_fraction * share or 1.0,
    )
    assert measure(x, thresholds=thresholds)["flags"] == expected_flags(exact, thresholds)


@given(recipes(values=("some zeros",)))
def test_a_share_of_zeros_equal_to_the_threshold_is_dead(recipe):
    x = recipe.tensor()
    share = oracle.exact(x).zero_fraction
    assume(share > 0)
    assert measure(x, thresholds=Thresholds(dead=share))["flags"] & Flag.DEAD
    above = Thresholds(dead=math.nextafter(share, 2))
    assert not measure(x, thresholds=above)["flags"] & Flag.DEAD


@pytest.mark.parametrize("dtype", strategies.FLOATS)
def test_a_norm_equal_to_the_threshold_is_neither_vanishing_nor_exploding(dtype):
    x = torch.tensor([3.0, 4.0], dtype=dtype)

    def flags(border):
        return measure(x, thresholds=Thresholds(vanishing=border, exploding=border))["flags"]

    assert flags(5.0) == 0
    assert flags(math.nextafter(5.0, 6)) == Flag.VANISHING
    assert flags(math.nextafter(5.0, 4)) == Flag.EXPLODING


@pytest.mark.parametrize(
    ("values", "thresholds", "flags"),
    [
        # in fp32, 1e-7 is 1.0000000117e-7
        ([1.00000001e-7], Thresholds(vanishing=1e-7), 0),
        ([0.99999999e-7], Thresholds(vanishing=1e-7), Flag.VANISHING),
        # in fp32, 0.1 is 0.1000000015
        ([0.1000000007], Thresholds(exploding=0.1), Flag.EXPLODING),
        ([0.1], Thresholds(exploding=0.1), 0),
        ([1.0] * 9 + [0.0], Thresholds(dead=0.1), Flag.DEAD),
        # in fp32, 1e-46 is 0 and 1e39 is inf
        ([0.0], Thresholds(vanishing=1e-46, dead=2.0), Flag.VANISHING),
        ([2e39], Thresholds(exploding=1e39), Flag.EXPLODING),
    ],
)
def test_thresholds_are_compared_in_double_precision(values, thresholds, flags):
    assert measure(torch.tensor(values, dtype=torch.float64), thresholds=thresholds)["flags"] == flags


@pytest.mark.parametrize(
    ("thresholds", "values", "flags"),
    [
        (Thresholds(vanishing=0.0), [0.0, 0.0], Flag.DEAD),
        (Thresholds(dead=1.5), [0.0, 0.0], Flag.VANISHING),
        (Thresholds(exploding=math.inf), [1e38, 1e38], 0),
        (Thresholds(exploding=math.inf), [1e38, math.inf], Flag.INF | Flag.EXPLODING),
        (Thresholds(vanishing=math.inf), [1e38, math.nan], Flag.NAN | Flag.EXPLODING),
        (Thresholds(exploding=0), [1e-30, 0.0], Flag.VANISHING | Flag.EXPLODING),
    ],
)
def test_thresholds_at_their_limits_switch_flags_off_and_on(thresholds, values, flags):
    assert measure(torch.tensor(values), thresholds=thresholds)["flags"] == flags


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5, 2)])
@pytest.mark.parametrize("dtype", strategies.ALL_DTYPES)
def test_a_tensor_with_no_elements_has_norm_0_and_no_flag(dtype, shape):
    extreme = Thresholds(vanishing=math.inf, exploding=0.0, dead=1e-300)
    for thresholds in (Thresholds(), extreme):
        measured = measure(torch.empty(shape, dtype=dtype), thresholds=thresholds)
        assert set(measured.values()) == {0}


@given(
    recipes(strategies.FLOATS, values=("moderate", "nonfinite"), layouts=("contiguous", "transposed")),
    st.integers(-6, 6),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, None]),
)
def test_inv_scale_by_a_power_of_two_equals_measuring_the_scaled_tensor(recipe, power, dtype):
    x, scale = recipe.tensor(), 2.0**power
    thresholds = Thresholds(vanishing=1.0, exploding=10.0)
    inv_scale = scale if dtype is None else torch.tensor([scale], dtype=dtype)
    ours = gm.collect([x], inv_scale=inv_scale, thresholds=thresholds)
    theirs = gm.collect([x * scale], thresholds=thresholds)
    assert ours.columns.tolist() == theirs.columns.tolist()
    assert torch.equal(ours.flags, theirs.flags)


@given(recipes((torch.float32, torch.bfloat16, torch.float16)), st.floats(1e-6, 1e6))
def test_inv_scale_scales_norm_sum_and_largest_magnitude(recipe, scale):
    x = recipe.tensor()
    measured, expected = measure(x, inv_scale=scale), oracle.exact(x)
    for name in oracle.COUNTS:
        assert measured[name] == getattr(expected, name)
    # two products for sumsq, one for the others; then the oracle's own product below
    slack = 4 * oracle.U
    assert close(measured["finite_norm"], expected.finite_norm * scale, oracle.NORM_BOUND + slack)
    bound = (oracle.SUM_BOUND + slack) * expected.abs_sum * scale
    assert abs(measured["sum"] - expected.sum * scale) <= bound
    assert measured["abs_max"] == expected.abs_max * scale


# a tensor beyond 2**27 elements has longer chunks instead of more


@pytest.mark.skipif(not KERNELS, reason="the eager path has no chunks")
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, id=str(dtype), marks=() if dtype == torch.bfloat16 else (pytest.mark.deep,))
        for dtype in strategies.FLOATS
    ],
)
def test_longer_chunks_measure_the_same(monkeypatch, dtype):
    from gradiometer.kernels import tuning

    g = torch.Generator().manual_seed(0)
    x = torch.randn(5 * tuning.CHUNK + 1029, generator=g, dtype=torch.float64).to(dtype)
    x[::7] = -0.0
    x[2 * tuning.CHUNK + 1] = math.nan
    x[-1] = -math.inf
    monkeypatch.setattr(tuning, "MAX_CHUNKS", 2)
    finite, other = measure(x[: 2 * tuning.CHUNK]), measure(x)
    oracle.assert_same_counts(finite, oracle.exact(x[: 2 * tuning.CHUNK]))
    oracle.assert_within_bounds(finite, oracle.exact(x[: 2 * tuning.CHUNK]))
    oracle.assert_same_counts(other, oracle.exact(x))
    oracle.assert_within_bounds(other, oracle.exact(x))
