"""Histograms of magnitudes: what they say about a cast is what a cast does, and the op itself.

These tests run on the eager path and on interpreted kernels.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradiometer as gm
from conftest import KERNELS
from gradiometer.columns import (
    EXPONENTS,
    FORMATS,
    HIGHEST_BINADE,
    LOWEST_BINADE,
    best_scales,
    bin_of,
    losses,
    of_binades,
    quantile,
)
from gradiometer.columns.exponents import MAX_SCALE, MIN_SCALE
from gradiometer.ops import exponent_codes
from support import strategies

NAMES = list(FORMATS)
SCALES = range(MIN_SCALE, MAX_SCALE + 1)
# whether a cast to e4m3fn makes numbers that are too large 448, as since torch 2.13, or NaN
SATURATES = not torch.tensor(1e6).to(torch.float8_e4m3fn).float().isnan().item()


def call(tensors):
    return torch.ops.gradiometer.exponent_stats(tensors)


def numbers(x):
    """Return the elements as float64; widening is exact."""
    x = torch.view_as_real(x.resolve_conj().resolve_neg()) if x.is_complex() else x
    x = x.resolve_neg() if x.is_neg() else x
    return (x.float() if x.itemsize < 4 else x).double().reshape(-1)


def lost_in_cast(x, name, log2):
    """Return how many elements a real cast rounds to 0, and how many it makes overflow."""
    x = numbers(x)
    x = x[x.isfinite() & (x != 0)]
    product = x * 2.0**log2
    y = product.to(getattr(torch, name)).float()
    if name == "float8_e4m3fn" and SATURATES:
        # halfway between 448 and 480, which has the mantissa of NaN, is a tie to the even 448
        over = (y.abs() == 448) & (product.float().abs() > 464)
    else:
        over = ~y.isfinite()
    return int((y == 0).sum()), int(over.sum())


def check(tensors, scales):
    rows = call(tensors)
    assert (rows.shape, rows.dtype) == ((len(tensors), EXPONENTS.width), torch.int64)
    for row, x in zip(rows, tensors, strict=True):
        wide = numbers(x)
        assert row.sum() == wide.numel()
        assert row[[0, -2, -1]].tolist() == [
            int(which.sum()) for which in (wide == 0, wide.isinf(), wide.isnan())
        ]
        for name, log2 in itertools.product(NAMES, scales):
            flushed, _, over = losses(row, FORMATS[name], log2)
            assert (int(flushed), int(over)) == lost_in_cast(x, name, log2), (name, log2, x.dtype)
    return rows


@given(
    st.lists(
        strategies.recipes(dtypes=strategies.ALL_DTYPES, largest=2**12 if KERNELS else math.inf),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.sampled_from(SCALES), min_size=1, max_size=4),
)
def test_losses_are_those_of_a_real_cast(recipes, scales):
    check([recipe.tensor() for recipe in recipes], [0, *scales])


def borders(dtype):
    """Return, in every binade, ties and ends of formats, and their neighbors in float32 and in float64."""
    fractions = torch.tensor(
        [0, 2**-16, 0.5, 0.75, 0.8125, 0.875, 1 - 2**-7, 1 - 2**-8, 1 - 2**-10, 1 - 2**-11, 1 - 2**-12],
        dtype=torch.float64,
    )
    steps = torch.tensor([0, 2**-23, -(2**-23), 2**-24, -(2**-24)], dtype=torch.float64)
    steps = torch.cat([steps, steps + 2**-52, steps - 2**-52]).unique()
    mantissas = (1 + fractions[:, None] + steps).view(-1)
    exponents = torch.exp2(torch.arange(-205, 165, dtype=torch.float64))
    x = (exponents[:, None] * mantissas).view(-1)
    return torch.cat([x, -x]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_edge_of_every_format_at_every_scale(dtype):
    x = borders(dtype)
    # also as small tensors, which are put together
    parts = [x, *x.split(1000)[::7]] if not KERNELS else [x[::3]]
    # the counts do not depend on the scale, so one dtype with all of them is enough
    check(parts[:1], SCALES if dtype == torch.float32 and not KERNELS else SCALES[::8])
    if parts[1:]:
        check(parts[1:4], (0, 15))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *strategies.FP8], ids=str)
def test_every_number_of_a_narrow_dtype(dtype):
    kind = torch.uint8 if dtype.itemsize == 1 else torch.int16
    everything = torch.arange(2 ** (8 * dtype.itemsize)).to(kind).view(dtype)
    check([everything], (-30, -15, -1, 0, 1, 8, 40, 64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_any_bits(dtype):
    kind = {4: torch.int32, 8: torch.int64}[dtype.itemsize]
    g = torch.Generator().manual_seed(0)
    info = torch.iinfo(kind)
    bits = torch.randint(info.min, info.max, (20_000,), generator=g, dtype=kind)
    # the largest payload of NaN, either sign, and infinities
    bits[:4] = torch.tensor([info.max, -1, *torch.tensor([math.inf, -math.inf], dtype=dtype).view(kind)])
    check([bits.view(dtype)], (-32, 0, 9, 64))


SIZES = [0, 1, 2, 999, 2**16 - 1, 2**16, 2**16 + 1, 2**18 + 3, 2**20 + 5]


def test_a_row_is_the_same_whichever_tensors_share_the_call():
    g = torch.Generator().manual_seed(0)
    sizes = [0, 1, 3, 700, 5000] if KERNELS else SIZES
    tensors = [torch.randn(n, generator=g).to(dtype) for dtype in strategies.FLOATS for n in sizes]
    tensors += [torch.randn(700, 5, generator=g).t(), torch.randn(300, 9, generator=g)[:, ::2]]
    # rare numbers that are looked up
    tensors[4][:3] = torch.tensor([1e-44, -1e-33, 1e30])
    together = call(tensors)
    for x, row in zip(tensors, together, strict=True):
        assert torch.equal(call([x])[0], row)
        columns = bin_of(exponent_codes.magnitudes_of(numbers(x)))
        expected = torch.bincount(columns, minlength=EXPONENTS.width)
        assert torch.equal(row, expected), (x.dtype, x.shape)


@pytest.mark.parametrize("dtype", strategies.FLOATS, ids=str)
def test_elements_far_from_the_first_ones_are_counted(dtype):
    # a kernel guesses which binades a chunk has
    rows = []
    for first, later in ((0.0, 0.5), (0.0, 2.0**-14), (2.0**-14, 2.0**13), (1.0, 2.0**-13), (math.inf, 1.0)):
        x = torch.full((5000,), first, dtype=dtype)
        x[2500:] = later
        rows.append(x)
    wide = torch.ones(3000, dtype=torch.float64)
    wide[2000:] = 1e-30
    rows.append(wide)
    check(rows, (0, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_known_list_is_measured_like_a_new_one(dtype):
    g = torch.Generator().manual_seed(0)
    for scale in (1.0, 1e-20, 1.0):
        # the sizes of earlier calls, with other numbers and addresses, and views of other strides
        tensors = [(torch.randn(n, 2, generator=g) * scale).to(dtype) for n in (30, 7, 30, 400)]
        tensors[0][0] = 0
        for views in (tensors, [x[:, 0] for x in tensors], [x.t() for x in tensors]):
            stats = gm.collect_exponents(views)
            for x, row in zip(views, stats.columns, strict=True):
                columns = bin_of(exponent_codes.magnitudes_of(numbers(x)))
                assert torch.equal(row, torch.bincount(columns, minlength=EXPONENTS.width))
    with pytest.raises(TypeError, match=r"'1' .*int32"):
        gm.collect_exponents([tensors[0], tensors[1].int(), *tensors[2:]])


def test_hundreds_of_small_tensors_are_counted_each():
    tensors = [torch.full((1 + i % 3,), 2.0 ** (i % 40 - 20)) for i in range(60 if KERNELS else 900)]
    binades = of_binades(call(tensors))
    for i, x in enumerate(tensors):
        assert binades[i, i % 40 - 20 - LOWEST_BINADE + 1] == len(x) == binades[i].sum()


# derived values


def columns_of(values):
    return call([torch.tensor(values, dtype=torch.float64)])


def test_subnormal_numbers_are_those_below_the_smallest_normal_one():
    values = [2.0**-26, 2.0**-24, 2.0**-14 * 0.999, 2.0**-14, 1.0]
    _, subnormal, _ = losses(columns_of(values), FORMATS["float16"])
    assert subnormal.tolist() == [2]
    _, subnormal, _ = losses(columns_of(values), FORMATS["float16"], 3)
    # times 8: 2**-23, 2**-21; the others are normal
    assert subnormal.tolist() == [2]


@given(
    st.lists(
        st.floats(allow_nan=False, allow_infinity=False, width=32).filter(lambda x: abs(x) < 2.0**100),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from(NAMES),
)
def test_no_scale_is_better_than_the_best(values, name):
    rows = columns_of(values)
    (best,) = best_scales(rows, FORMATS[name]).tolist()

    def badness(log2):
        flushed, subnormal, over = (int(x) for x in losses(rows[0], FORMATS[name], log2))
        return over, flushed, subnormal, abs(log2), -log2

    assert best == min(SCALES, key=badness)


@given(
    st.lists(
        st.floats(allow_nan=False, allow_infinity=False, width=32).filter(lambda x: x == 0 or abs(x) > 1e-40),
        min_size=1,
        max_size=30,
    ),
    st.floats(0, 1),
)
def test_quantiles_are_within_a_factor_of_two(values, q):
    found = quantile(columns_of(values), q).item()
    magnitudes = sorted(map(abs, values))
    exact = magnitudes[math.floor(q * (len(values) - 1))]
    assert found <= exact < 2 * found or found == exact == 0


def test_exponents_and_quantiles_of_nothing():
    stats = gm.collect_exponents([torch.empty(0), torch.tensor([math.nan, 0.0]), torch.tensor([0.3, 5.0])])
    assert stats.min_exponent.tolist() == [0, 0, -2]
    assert stats.max_exponent.tolist() == [0, 0, 2]
    assert stats.quantile(0.5).tolist()[1:] == [0.0, 0.25]
    assert stats.quantile(0.5)[0].isnan()
    assert stats.best_scale("float16").tolist() == [1.0, 1.0, 1.0]
    assert (LOWEST_BINADE, HIGHEST_BINADE) == (-198, 159)
    assert stats.binades.shape == (3, 360)


# the op


def test_it_works_inside_a_compiled_function():
    model = torch.nn.Linear(20, 30)

    def step(x):
        loss = model(x).square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        stats = gm.collect_exponents({"weight": grads[0], "bias": grads[1]})
        return stats, stats.n_flushed("float8_e4m3fn", 2.0), stats.best_scale("float16")

    x = torch.randn(8, 20)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        compiled, *derived = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    eager, *expected = step(x)
    assert compiled.names == eager.names
    # the graph may round gradients in another way
    assert compiled.numel.tolist() == eager.numel.tolist()
    assert compiled.report().total.numel == 630
    assert [value.shape for value in derived] == [value.shape for value in expected]


@pytest.mark.parametrize(
    ("call_", "message"),
    [
        (lambda s: s.n_flushed("int8"), "'int8' is not one of the formats float16, bfloat16"),
        (lambda s: s.n_flushed("float16", 3.0), r"scale=3\.0; pass a power of two from 2\*\*-32 to 2\*\*64"),
        (lambda s: s.n_overflowed("float16", 2.0**65), r"scale=3\.68\d+e\+19; pass"),
        (lambda s: s.n_overflowed("float16", math.nan), "scale=nan; pass"),
        (lambda s: s.n_subnormal("float16", -1.0), r"scale=-1\.0; pass"),
        (lambda s: s.quantile(1.5), r"q=1\.5; pass a number from 0 to 1"),
        (lambda s: s.report(["float32"]), "'float32' is not one of the formats"),
    ],
)
def test_other_formats_scales_and_quantiles_are_refused(call_, message):
    with pytest.raises(ValueError, match=message):
        call_(gm.collect_exponents([torch.ones(3)]))


def test_what_cannot_be_measured_is_named():
    with pytest.raises(TypeError, match=r"collect_exponents: 'ids' has dtype torch\.int64"):
        gm.collect_exponents({"w": torch.ones(2), "ids": torch.ones(2, dtype=torch.int64)})
    with pytest.raises(ValueError, match="two tensors have the name 'w'"):
        gm.collect_exponents([("w", torch.ones(2)), ("w", torch.ones(2))])
    with pytest.raises(TypeError, match="merge: expected ExponentStats, got int"):
        gm.collect_exponents([torch.ones(2)]).merge(3)
    assert gm.collect_exponents([]).columns.shape == (0, EXPONENTS.width)
