"""Clipping: torch's results where torch is right, and finite gradients where it is not.

The cases of torch's own tests of `torch.nn.utils.clip_grad_norm_` are included. The oracle
is torch on fp64 copies. Under the interpreter the same tests run the kernel.
"""

from __future__ import annotations

import json
import math
import warnings
from contextlib import nullcontext
from decimal import Decimal
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_ as torchs_clip
from torch.overrides import TorchFunctionMode

import gradiometer as gm
from conftest import KERNELS
from gradiometer import clip_coefficient, clip_grad_norm_, clip_grads_with_norm_, collect_and_clip_, ops
from gradiometer.control import scale
from gradiometer.ops import launch_plans
from support.compiling import inductor_if_deep, needs_compiler
from support.fake_device import DEVICES, HostWaitError, Model, device_of, watch
from support.gradients import assert_unchanged, bits, grads_of, real, with_grads
from support.strategies import ALL_DTYPES, COMPLEX, FLOATS, FP8, LAYOUTS, VALUES, recipes

INF, NAN = math.inf, math.nan
ORDERS = (0, 0.1, 0.5, 1, 1.5, 2, 3.5, 4, INF, "inf", -0.1, -1, -2, -3.5, -INF)
# the kernels sum squares: norms of other orders are PyTorch's own
every_order = pytest.mark.parametrize(
    "order",
    [order if order in {2, INF} else pytest.param(order, marks=pytest.mark.once) for order in ORDERS],
    ids=repr,
)
# the constant that torch adds to the norm before dividing
EPS = 1e-6
IN_PLACE = tuple(layout for layout in LAYOUTS if layout not in {"expanded", "overlapping"})
FINITE = tuple(values for values in VALUES if values != "nonfinite")
# a format without zero, sign and subnormals needs its own rounding bounds
SCALED_DTYPES = tuple(dtype for dtype in ALL_DTYPES if dtype != torch.float8_e8m0fnu)


def fill(model, *grads):
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        parameter.grad = grad.clone().view_as(parameter)


def wide(x):
    """Return all numbers in fp64."""
    return real(x.detach()).reshape(-1).to(torch.float64, copy=True)


def norm_of(tensors, order=2.0):
    return torch.linalg.vector_norm(torch.cat([wide(x) for x in tensors]), float(order))


def rounding(dtype):
    """Return the largest relative rounding error of a format, and its smallest number."""
    info = torch.finfo(dtype)
    # torch's finfo is wrong for one of them
    eps = 0.25 if dtype in {torch.float8_e5m2, torch.float8_e5m2fnuz} else info.eps
    return eps / 2, info.smallest_normal * eps


def linear():
    return nn.Linear(10, 10)


# torch's own cases: test_clip_grad_norm and related tests in test_nn.py

LARGE = torch.arange(1.0, 101).view(10, 10), torch.ones(10) / 1000
torchs_orders = pytest.mark.parametrize("order", [0.5, 1.5, 2, 4, "inf"])
either_foreach = pytest.mark.parametrize("foreach", [False, True, None])


@torchs_orders
@either_foreach
def test_large_gradients_are_scaled_to_the_norm_by_one_factor(order, foreach):
    model = linear()
    fill(model, *LARGE)
    before = norm_of(LARGE, order)
    norm = clip_grad_norm_(model.parameters(), 2, norm_type=order, foreach=foreach)
    torch.testing.assert_close(norm, before, rtol=1e-14, atol=0.0)
    after = norm_of(grads_of(model.parameters()), order)
    torch.testing.assert_close(after, torch.tensor(2.0).double(), rtol=1e-6, atol=0.0)
    pairs = zip(grads_of(model.parameters()), LARGE, strict=True)
    factors = torch.cat([(grad / g.view_as(grad)).view(-1) for grad, g in pairs])
    torch.testing.assert_close(factors, factors[:1].expand(110), rtol=2**-22, atol=0.0)


@torchs_orders
@either_foreach
def test_small_gradients_are_left_unchanged(order, foreach):
    model = linear()
    grads = torch.rand(10, 10) / 10_000, torch.ones(10) / 500
    fill(model, *grads)
    norm = clip_grad_norm_(model.parameters(), 2, norm_type=order, foreach=foreach)
    torch.testing.assert_close(norm, norm_of(grads, order), rtol=1e-14, atol=0.0)
    assert_unchanged(grads_of(model.parameters()), [bits(g.view_as(g)) for g in grads])


@torchs_orders
@either_foreach
def test_one_tensor_is_taken_like_a_list_of_one(order, foreach):
    tensors = torch.randn(10, 10), torch.randn(10, 10)
    for x in tensors:
        x.grad = LARGE[0].clone()
    a = clip_grad_norm_(tensors[0], 2, norm_type=order, foreach=foreach)
    b = clip_grad_norm_([tensors[1]], 2, norm_type=order, foreach=foreach)
    assert torch.equal(a, b)
    assert torch.equal(tensors[0].grad, tensors[1].grad)
    assert not torch.equal(tensors[0].grad, LARGE[0])


def test_an_exhausted_generator_is_warned_of_and_an_empty_list_is_not():
    exhausted = linear().parameters()
    list(exhausted)
    said = "`parameters` is an empty generator, no gradient clipping will occur."
    with pytest.warns(UserWarning, match=said) as record:
        assert clip_grad_norm_(exhausted, 2) == 0
    # the warning points at the caller's line
    assert [warning.filename for warning in record] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert clip_grad_norm_([], 2) == 0
        assert clip_grad_norm_(iter([]), 2) == 0


POSITIVE, NEGATIVE = (0.1, 1, 2, 3.5, INF), (-0.1, -1, -2, -3.5)
BUT_0, ALL = (*POSITIVE, *NEGATIVE), (*POSITIVE, *NEGATIVE, 0)
# the kernels only compute these orders
ORDERS = (0, 2, INF) if KERNELS else ALL
# (whether only 1 of 10 elements has the value, whether a gradient of 1 comes first, values, orders whose
# norm is not finite)
NONFINITE = [
    (False, False, (INF, -INF), BUT_0),
    (False, True, (INF, -INF), POSITIVE),
    (True, False, (INF, -INF), POSITIVE),
    (True, True, (INF, -INF), POSITIVE),
    *((one, first, (NAN,), BUT_0) for one in (False, True) for first in (False, True)),
    *((one, first, (2e22, -2e22), ()) for one in (False, True) for first in (False, True)),
    # torch's powers overflow fp64 for order 3.5, and if all elements are this large, for -2 and -3.5
    *((one, first, (2e200, -2e200), (2,)) for one in (False, True) for first in (False, True)),
]


# neither a preceding tensor nor the number of non-finite elements changes the norm's error
@pytest.mark.parametrize(
    ("one", "first", "numbers", "nonfinite"),
    [pytest.param(*case, marks=pytest.mark.once if case[0] or case[1] else []) for case in NONFINITE],
)
def test_a_norm_that_is_not_finite_raises_where_that_is_asked_for(one, first, numbers, nonfinite):
    for order, number, asked in product(ORDERS, numbers, (False, True)):
        grad = torch.zeros(10, dtype=torch.float64)
        grad[slice(1, 2) if one else slice(None)] = number
        grads = ([torch.ones(1, dtype=torch.float64)] if first else []) + [grad]
        before = [bits(x) for x in grads]
        if asked and order in nonfinite:
            with pytest.raises(RuntimeError, match=f"^The total norm of order {float(order)} for gradients"):
                clip_grad_norm_(with_grads(*grads), 1, norm_type=order, error_if_nonfinite=True)
            assert_unchanged(grads, before)
        else:
            norm = clip_grad_norm_(with_grads(*grads), 1, norm_type=order, error_if_nonfinite=asked)
            assert norm.isfinite() == (order not in nonfinite)


@torchs_orders
def test_measuring_and_scaling_apart_is_clipping(order):
    model, twin = linear(), linear()
    fill(model, *LARGE)
    fill(twin, *LARGE)
    clip_grad_norm_(model, 2, norm_type=order)
    total = norm_of(grads_of(twin.parameters()), order)
    torch.nn.utils.clip_grads_with_norm_(twin.parameters(), 2, total)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=2**-22, atol=0.0)
    if float(order) in {2.0, INF}:
        coefficient = clip_coefficient(gm.collect(LARGE), 2, norm_type=order)
        torch.testing.assert_close(coefficient, 2 / (total + EPS), rtol=1e-15, atol=0.0)


# comparison with torch on fp64 copies


@every_order
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "max_norm", [1e-3, *[pytest.param(value, marks=pytest.mark.once) for value in (1.0, 1e9, INF, 0.0)]]
)
def test_it_does_what_torch_does_in_fp64(order, dtype, max_norm):
    grads = [torch.randn(shape).to(dtype) for shape in ((31, 7), (7,), (), (4097,))]
    twins = with_grads(*(g.double().clone() for g in grads))
    said = torchs_clip(twins, max_norm, norm_type=order)
    norm = clip_grad_norm_(with_grads(*grads), max_norm, norm_type=order)
    # ours adds in another order; torch multiplies with the inverse
    torch.testing.assert_close(norm, said, rtol=1e-12, atol=0.0)
    # one rounding of c to the format, and one of the product
    tolerance = 1e-12 if dtype == torch.float64 else 2**-23 * 1.01
    for ours, theirs in zip(grads, twins, strict=True):
        least = 2.0**-1074 if dtype == torch.float64 else 2.0**-149
        torch.testing.assert_close(ours.double(), theirs.grad, rtol=tolerance, atol=least)


@every_order
def test_complex_gradients_have_the_norms_that_torch_gives_them(order):
    grads = [torch.randn(31, 7, dtype=torch.complex64).conj(), torch.randn(5, dtype=torch.complex128)]
    grads.append(torch.randn(3))
    twins = [g.clone().to(torch.complex128 if g.is_complex() else torch.float64) for g in grads]
    norms = [torch.linalg.vector_norm(x, float(order)) for x in twins]
    total = torch.linalg.vector_norm(torch.stack(norms), float(order))
    norm = clip_grad_norm_(with_grads(*grads), 0.01, norm_type=order)
    torch.testing.assert_close(norm, total, rtol=1e-12, atol=0.0)
    factor = min(1.0, 0.01 / (total.item() + EPS))
    for ours, twin in zip(grads, twins, strict=True):
        torch.testing.assert_close(wide(ours), wide(twin) * factor, rtol=2**-22, atol=0.0)


@pytest.mark.parametrize("max_norm", [0.05, 100.0])
def test_a_model_is_clipped_as_by_torch_in_fp32(max_norm):
    model = nn.Sequential(nn.Linear(20, 60), nn.GELU(), nn.Linear(60, 3))
    model(torch.randn(8, 20)).square().mean().backward()
    before = [p.grad.clone() for p in model.parameters()]
    said = torchs_clip(model.parameters(), max_norm)
    theirs = [p.grad.clone() for p in model.parameters()]
    for parameter, grad in zip(model.parameters(), before, strict=True):
        parameter.grad.copy_(grad)
    norm = clip_grad_norm_(model.parameters(), max_norm)
    # torch adds about 1500 squares in fp32, in SIMD lanes
    torch.testing.assert_close(norm.float(), said, rtol=1e-5, atol=0.0)
    for ours, other in zip(model.parameters(), theirs, strict=True):
        torch.testing.assert_close(ours.grad, other, rtol=2e-5, atol=0.0)


# finite gradients that torch clips to 0 or NaN

# a gradient, how often there is one, the bound and the norm
HUGE = {
    "the norm leaves fp16": (torch.full((40_000,), 300.0).half(), 4, 1.0, 1.2e5),
    "the norm leaves fp32": (torch.full((1000,), 1e38), 3, 1.0, 1e38 * math.sqrt(3e3)),
    "squares leave fp32": (torch.full((100,), 1e20), 1, 1.0, 1e21),
    "the coefficient is below fp16": (torch.full((1000,), 65504.0).half(), 1, 0.05, 65504 * math.sqrt(1000)),
    "the coefficient is below normal fp32": (torch.full((10_000,), 3e38), 1, 1e-3, 3e40),
    "the coefficient is below all fp32": (torch.full((10_000,), 3e38), 4, 1e-6, 6e40),
    "squares leave fp64": (torch.full((100,), 1e200, dtype=torch.float64), 1, 1.0, INF),
    "the norm leaves fp64": (torch.full((100,), 1.7e308, dtype=torch.float64), 1, 1.0, INF),
}


@pytest.mark.parametrize("case", HUGE)
@pytest.mark.parametrize("order", [2, 4])
def test_finite_gradients_are_not_clipped_to_zero(case, order):
    grad, times, max_norm, expected = HUGE[case]
    grads = [grad.clone() for _ in range(times)]
    norm = clip_grad_norm_(with_grads(*grads), max_norm, norm_type=order)
    if order == 2:
        assert norm.item() == pytest.approx(expected, rel=1e-3)
    after = norm_of(grads, order)
    assert all(g.count_nonzero() == g.numel() and g.isfinite().all() for g in grads)
    if case == "the norm leaves fp64":
        # the largest finite number is used as the norm
        assert after <= max_norm * math.sqrt(100)
    else:
        assert after <= max_norm * (1 + 2**-8)
        assert after == pytest.approx(max_norm, rel=2**-8)


@pytest.mark.parametrize(
    ("order", "value", "dtype"),
    [
        (10, 1e35, torch.float32),
        (8.1, 1e38, torch.float32),
        (-10, 1e35, torch.float32),
        (10, 1e-40, torch.float64),
        (0.3, 1e-3, torch.float32),
        (3, 1e300, torch.float64),
        (1, 6e4, torch.float16),
    ],
)
def test_powers_of_other_orders_leave_no_range(order, value, dtype):
    g = torch.tensor([value, value / 2, -value, value], dtype=dtype)
    numbers = g.double().abs().div(value).tolist()
    expected = math.fsum(x**order for x in numbers) ** (1 / order) * value
    norm = clip_grad_norm_(with_grads(g), expected / 4, norm_type=order)
    # torch's own powers overflow here
    assert norm.item() == pytest.approx(expected, rel=1e-13)
    # torch's formula adds 1e-6 to the norm
    factor = expected / 4 / (expected + 1e-6)
    found = g.double().abs().div(value).tolist()
    assert found == pytest.approx([factor * x for x in numbers], rel=1e-3, abs=0)


def test_a_coefficient_that_fp32_has_no_number_for_loses_no_digit():
    x = torch.rand(1000) * 3e38
    before = x.double()
    norm = clip_grad_norm_(with_grads(x), 1e-5)
    factor = 1e-5 / norm.item()
    assert factor < 2**-140
    torch.testing.assert_close(x.double(), before * factor, rtol=2**-22, atol=0.0)


# properties


@given(recipes(SCALED_DTYPES, FINITE, IN_PLACE, specials=False), st.floats(1e-3, 2.0), st.booleans())
def test_clipped_gradients_are_within_the_norm_and_keep_their_direction(recipe, share, with_inf_norm):
    x = recipe.tensor()
    order = INF if with_inf_norm else 2.0
    before, start = wide(x), bits(x)
    stats = gm.collect([x])
    top = stats.abs_max.max() if with_inf_norm else stats.total_norm
    max_norm = share * top.item()
    if with_inf_norm and x.is_complex():
        # the largest magnitude of a complex number differs from that of its parts
        norm = clip_grad_norm_(with_grads(x), max_norm, norm_type=order)
        c = (max_norm / (norm + EPS)).clamp(max=1.0)
    else:
        c = clip_coefficient(stats, max_norm, order)
        said = collect_and_clip_(with_grads(x), max_norm, norm_type=order)
        assert torch.equal(said.columns, stats.columns)
    if c == 1.0:
        assert_unchanged([x], [start])
    after, (u, smallest) = wide(x), rounding(x.dtype)
    # one rounding to the format, one of c to fp32, one of the product; fp64 adds the error of the comparison
    u += 2 * 2**-53 if u == 2**-53 else 2 * 2**-24
    assert not after.isnan().any()
    assert torch.all((after - before * c).abs() <= u * (before * c).abs() + smallest)
    if c < 1 and x.numel():
        roundings = smallest * (1 if with_inf_norm else math.sqrt(x.numel()))
        largest = max_norm * (1 + 2 * u) * (math.sqrt(2) if x.is_complex() else 1)
        assert norm_of([x], order) <= largest + roundings


@given(recipes(FLOATS, FINITE, IN_PLACE, specials=False, largest=3000), st.floats(1e-6, 1e6))
def test_what_is_within_the_norm_keeps_its_bits(recipe, slack):
    x = recipe.tensor()
    start = bits(x)
    norm = clip_grad_norm_(with_grads(x), (gm.collect([x]).total_norm.item() + EPS) * (1 + 1e-15) + slack)
    assert norm.isfinite()
    assert_unchanged([x], [start])


@given(
    recipes(FLOATS + COMPLEX[:2], FINITE, IN_PLACE, largest=3000),
    st.sampled_from(ORDERS),
    st.floats(1e-3, 2.0),
)
def test_nan_and_inf_stay_where_they_are_and_nobody_else_notices(recipe, order, share):
    x = recipe.tensor()
    y = torch.randn(50)
    finite = wide(x).isfinite()
    alone, twin = torch.where(x.isfinite(), x, 0.0 if float(order) >= 0 else INF), y.clone()
    max_norm = share * float(gm.collect([x, y]).finite_norm.norm())
    before, odd = wide(x), wide(x)[~finite]
    clip_grad_norm_(with_grads(x, y), max_norm, norm_type=order)
    after = wide(x)
    torch.testing.assert_close(after[~finite], odd, rtol=0.0, atol=0.0, equal_nan=True)
    assert after[finite].isfinite().all()
    assert (after[finite].abs() <= before[finite].abs()).all()
    clip_grad_norm_(with_grads(alone, twin), max_norm, norm_type=order)
    if not x.is_complex():
        assert torch.equal(wide(alone)[finite], after[finite])
        assert torch.equal(twin, y)


@given(recipes(FLOATS + COMPLEX + FP8, VALUES, IN_PLACE, largest=2**16), st.integers(-160, 0))
def test_every_path_leaves_the_same_bits(recipe, power):
    class Watching(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            del types
            return func(*args, **(kwargs or {}))

    x, y = recipe.tensor(), recipe.tensor()
    max_norm = gm.collect([x]).total_norm.nan_to_num(1.0, 1.0).item() * 0.7 * 2.0**power
    clip_grad_norm_(with_grads(x), max_norm)
    with Watching():
        clip_grad_norm_(with_grads(y), max_norm)
    a, b = wide(x), wide(y)
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a.nan_to_num(0.5), b.nan_to_num(0.5))


# NaN and Inf


@pytest.mark.parametrize("odd", [NAN, INF, -INF])
@pytest.mark.parametrize("order", [2, INF, 1.5])
def test_a_gradient_that_is_not_finite_spares_the_others(odd, order):
    grads = {"good": torch.tensor([3.0, 4.0]), "bad": torch.tensor([odd, 12.0])}
    parameters = dict(zip(grads, with_grads(*grads.values()), strict=True))
    norm = clip_grad_norm_(parameters, 1.0, norm_type=order)
    assert norm.isnan() if odd != odd else norm.item() == INF  # noqa: PLR0124
    factor = 1.0 / (norm_of([torch.tensor([3.0, 4.0, 12.0])], order).item() + EPS)
    torch.testing.assert_close(grads["good"], torch.tensor([3.0, 4.0]) * factor)
    torch.testing.assert_close(grads["bad"], torch.tensor([odd, 12.0 * factor]), equal_nan=True)


def test_with_an_infinite_bound_nothing_is_clipped_and_nothing_is_nan():
    grads = [torch.tensor([INF, 1.0, -INF]), torch.tensor([1e38, 2.0])]
    grads.append(torch.full((9,), 1.7e308, dtype=torch.float64))
    before = [bits(g) for g in grads]
    for order in (2, INF, 4):
        clip_grad_norm_(with_grads(*grads), INF, norm_type=order)
        assert_unchanged(grads, before)


def test_a_bound_of_zero_makes_zeros():
    grads = [torch.tensor([3.0, -1e38]), torch.tensor([1e-3]).half(), torch.zeros(3)]
    assert clip_grad_norm_(with_grads(*grads), 0.0) > 0
    assert all((g == 0).all() for g in grads)


def test_the_error_names_what_is_not_finite():
    grads = {f"layer.{i}": torch.ones(4) for i in range(20)}
    for i in range(3, 17):
        grads[f"layer.{i}"][: i % 3 + 1] = NAN
    grads["layer.3"][2:] = INF
    parameters = dict(zip(grads, with_grads(*grads.values()), strict=True))
    before = [bits(g) for g in grads.values()]
    for call in (clip_grad_norm_, collect_and_clip_):
        with pytest.raises(RuntimeError) as caught:
            call(parameters, 1.0, error_if_nonfinite=True)
        said = str(caught.value)
        begins = "The total norm of order 2.0 for gradients from `parameters` is non-finite, so "
        assert said.startswith(begins)
        assert "'layer.3' has 1 NaN and 2 Inf of 4, 'layer.4' has 2 NaN and 0 Inf of 4" in said
        assert "'layer.12'" in said
        assert "'layer.13'" not in said
        assert "4 more" in said
        assert_unchanged(grads.values(), before)


def test_the_error_says_where_only_the_norm_is_not_finite():
    x = torch.full((9,), 1e300, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="All elements are finite"):
        clip_grad_norm_(with_grads(x), 1.0, error_if_nonfinite=True)
    assert (x == 1e300).all()
    assert clip_grad_norm_(with_grads(torch.ones(4)), 1.0, error_if_nonfinite=True) == 2


# scaled gradients


def test_gradients_of_every_dtype_and_layout_are_scaled_together():
    grads = [torch.randn(50).to(dtype) for dtype in (*FLOATS, *FP8[:4])]
    grads += [torch.randn(20, dtype=torch.complex64), torch.randn(4, 3, 2, dtype=torch.complex128).conj()]
    grads += [torch.randn(20, dtype=torch.complex64).to(torch.complex32), torch.randn(())]
    grads += [torch.randn(30, 20).T, torch.randn(40, 40)[3:-3, 5:-5], torch.randn(99)[::3], torch.randn(0, 3)]
    grads += [torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.randn(5000)[1:]]
    before = [wide(g) for g in grads]
    norm = clip_grad_norm_(with_grads(*grads), 0.5)
    torch.testing.assert_close(norm, torch.cat(before).norm(), rtol=1e-12, atol=0.0)
    for g, old in zip(grads, before, strict=True):
        u, smallest = rounding(g.dtype)
        new = old * (0.5 / (norm + EPS))
        assert torch.all((wide(g) - new).abs() <= (u + 2**-23) * new.abs() + smallest)


@pytest.mark.parametrize("coalesced", [False, True])
@pytest.mark.parametrize("order", [2, INF, 1.5, -1])
def test_a_sparse_gradient_is_scaled_by_what_it_stores(coalesced, order):
    indices, values = torch.tensor([[0, 2, 2]]), torch.tensor([[3.0, 1.0], [1.0, 0.5], [1.0, 3.5]])
    grad = torch.sparse_coo_tensor(indices, values.clone(), (5, 2))
    grad = grad.coalesce() if coalesced else grad
    dense = grad.to_dense()
    table = nn.Parameter(torch.zeros(5, 2))
    table.grad = grad
    norm = clip_grad_norm_([table], 0.25, norm_type=order)
    torch.testing.assert_close(norm, norm_of([dense], order))
    assert table.grad.is_coalesced() == coalesced
    torch.testing.assert_close(table.grad.to_dense(), dense * min(1.0, 0.25 / (norm.item() + EPS)))


def test_an_embedding_that_makes_sparse_gradients_is_clipped():
    table = nn.Embedding(10, 3, sparse=True)
    table(torch.tensor([1, 1, 4])).sum().backward()
    assert clip_grad_norm_(table, 0.5).item() == pytest.approx(math.sqrt(15))
    assert table.weight.grad.to_dense().norm() == pytest.approx(0.5, rel=1e-5)


SHARED = {
    "one tensor": lambda g: (g, g),
    "two of one memory": lambda g: (g, g.detach()),
    "two complex": lambda g: (torch.view_as_complex(g.view(2, 2)),) * 2,
    "of other shapes": lambda g: (g.view(2, 2), g.view(2, 2).t()),
    "an empty one beside": lambda g: (g, g[:0], g.view(1, 4)),
}


@pytest.mark.parametrize("default_device", [False, True])
@pytest.mark.parametrize("kind", SHARED)
def test_a_gradient_of_two_parameters_counts_twice_and_is_scaled_once(kind, default_device):
    g = torch.tensor([3.0, 4.0, 0.0, 0.0])
    with torch.device("cpu") if default_device else nullcontext():
        norm = clip_grad_norm_(with_grads(*SHARED[kind](g)), 1.0)
    assert norm.item() == pytest.approx(5 * math.sqrt(2))
    torch.testing.assert_close(g, torch.tensor([3.0, 4.0, 0.0, 0.0]) / (5 * math.sqrt(2)))


def test_gradients_that_share_a_part_of_their_memory_are_refused_by_name():
    g = torch.arange(6.0)
    model = {"a": nn.Parameter(torch.zeros(4)), "b": nn.Parameter(torch.zeros(4))}
    model["a"].grad, model["b"].grad = g[:4], g[2:]
    said = r"^clip_grad_norm_: the gradients of 'a' and 'b' share part of their"
    with pytest.raises(TypeError, match=said):
        clip_grad_norm_(model, 1.0)
    assert g.tolist() == list(range(6))


def test_pieces_of_one_buffer_are_gradients_like_others():
    flat, matrix = torch.full((8,), 3.0), torch.full((4, 2), 3.0)
    grads = [flat[:3], flat[3:], matrix[:, 0], matrix[:, 1]]
    clip_grad_norm_(with_grads(*grads), 2.0)
    for whole in (flat, matrix):
        torch.testing.assert_close(whole, torch.full_like(whole, 0.5))


def test_a_default_device_changes_nothing_about_the_way():
    # a default device is a function mode; modes that observe dispatched calls are different
    g = torch.full((4,), 0.1)
    with torch.device("cpu"):
        clip_grad_norm_(with_grads(g), 1e9)
        assert g._version == 0 or KERNELS
        clip_grad_norm_(with_grads(g), 0.1)
    torch.testing.assert_close(g, torch.full((4,), 0.05))


def test_a_tied_parameter_counts_once():
    model = nn.Module()
    model.a, model.b = linear(), linear()
    model.b.weight = model.a.weight
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for source in (model, [model.a.weight, model.b.weight, model.a.bias, model.b.bias]):
        assert clip_grad_norm_(source, 1e9).item() == pytest.approx(math.sqrt(120))


@pytest.mark.parametrize("source", ["module", "parameters", "named", "mapping", "list", "tuple", "generator"])
def test_parameters_come_in_many_ways(source):
    model = linear()
    fill(model, *LARGE)
    named = dict(model.named_parameters())
    ways = {
        "module": model,
        "parameters": model.parameters(),
        "named": model.named_parameters(),
        "mapping": named,
        "list": list(named.values()),
        "tuple": tuple(named.values()),
        "generator": (p for p in named.values()),
    }
    assert clip_grad_norm_(ways[source], 2).item() == pytest.approx(norm_of(LARGE).item())
    assert norm_of(grads_of(model.parameters())).item() == pytest.approx(2, rel=1e-6)


def test_parameters_without_a_gradient_are_left_out():
    model = linear()
    norm = clip_grad_norm_(model, 1.0)
    assert (norm.item(), norm.dtype, norm.shape, norm.device.type) == (0.0, torch.float64, (), "cpu")
    assert not collect_and_clip_(model, 1.0).measured
    assert clip_coefficient(gm.collect([]), 1.0) == 1
    assert clip_grad_norm_(model, 1.0, norm_type=4, error_if_nonfinite=True) == 0
    assert clip_grad_norm_(with_grads(torch.zeros(0)), 1.0, norm_type=4) == 0
    model.bias.grad = torch.full((10,), 3.0)
    assert clip_grad_norm_(model, 1.0).item() == pytest.approx(math.sqrt(90))
    assert model.weight.grad is None


def test_the_norm_is_a_snapshot_and_needs_no_gradient():
    x = torch.ones(4, requires_grad=True)
    (x.grad,) = torch.autograd.grad((x * x).sum(), [x], create_graph=True)
    assert x.grad.requires_grad
    norm = clip_grad_norm_([x], 1.0)
    assert not norm.requires_grad
    assert norm == 4
    clip_grad_norm_([x], 0.5)
    assert norm == 4


def test_autograd_hears_of_the_write():
    x = torch.full((4,), 2.0)
    (parameter,) = with_grads(x)
    before = x._version
    clip_grad_norm_([parameter], 1.0)
    assert x._version > before


def test_gradients_of_inference_mode_are_clipped_there():
    with torch.inference_mode():
        grad = torch.full((4,), 2.0)
        parameter = torch.zeros(4)
        parameter.grad = grad
        assert clip_grad_norm_([parameter], 1.0) == 4
    assert grad[0].item() == pytest.approx(0.5)


# clip_grads_with_norm_: by a precomputed norm


@pytest.mark.parametrize("max_norm", [0.05, 1e6, 0.0, INF])
@pytest.mark.parametrize("order", [2, INF, 1])
def test_by_its_own_norm_it_is_clip_grad_norm(max_norm, order):
    grads = [torch.randn(31, 7), torch.randn(5).bfloat16(), torch.randn(40).double()]
    twins = [g.clone() for g in grads]
    assert clip_grads_with_norm_(with_grads(*grads), max_norm, gm.total_norm(grads, order)) is None
    clip_grad_norm_(with_grads(*twins), max_norm, norm_type=order)
    assert_unchanged(grads, [bits(twin) for twin in twins])


NUMBERS = {
    "float": float,
    "int": int,
    "numpy": np.float32,
    "fraction": Fraction,
    "tensor": lambda x: torch.tensor(float(x)),
    "bf16 tensor": lambda x: torch.tensor(x).bfloat16(),
    "int tensor": torch.tensor,
    "one element": lambda x: torch.tensor([x]).double(),
    "one element of bf16": lambda x: torch.tensor([x]).bfloat16(),
    "parameter": lambda x: nn.Parameter(torch.tensor(float(x))),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_any_number_is_a_norm(kind):
    x, y = torch.tensor([3.0, -8.0]), torch.tensor([1.0]).half()
    theirs = with_grads(x.clone(), y.clone())
    norm = NUMBERS[kind](10)
    clip_grads_with_norm_(with_grads(x, y), 5.0, norm)
    torch.nn.utils.clip_grads_with_norm_(theirs, 5.0, torch.tensor(10.0))
    for ours, other in zip((x, y), grads_of(theirs), strict=True):
        torch.testing.assert_close(ours, other)
    # a single tensor is treated like a list of one
    theirs[0].grad = torch.tensor([3.0, -8.0])
    clip_grads_with_norm_(theirs[0], 5.0, norm)
    assert torch.equal(theirs[0].grad, x)


@pytest.mark.parametrize("norm", [NAN, INF, -INF, torch.tensor(NAN), torch.tensor(INF), torch.tensor(-3.0)])
@pytest.mark.parametrize("max_norm", [1.0, 0.0])
def test_by_a_norm_that_tells_nothing_nothing_is_clipped(norm, max_norm):
    x = torch.tensor([3.0, 4.0, NAN, INF])
    before = bits(x)
    if isinstance(norm, float) and norm < 0:
        said = r"^clip_grads_with_norm_: total_norm must be a non-negative number, .* got -inf"
        with pytest.raises(ValueError, match=said):
            clip_grads_with_norm_(with_grads(x), max_norm, norm)
    else:
        clip_grads_with_norm_(with_grads(x), max_norm, norm)
    assert_unchanged([x], [before])


def test_by_a_norm_elements_that_are_not_finite_stay():
    x = torch.tensor([3.0, NAN, -INF, 4.0])
    clip_grads_with_norm_(with_grads(x), 1.0, 5.0)
    torch.testing.assert_close(x, torch.tensor([0.6, NAN, -INF, 0.8]), equal_nan=True)


def test_by_a_norm_finite_gradients_are_not_clipped_to_zero():
    # torch's formula in fp16 has a coefficient of 0
    x = torch.full((1000,), 6e4).half()
    clip_grads_with_norm_(with_grads(x), 0.05, gm.total_norm([x]))
    assert norm_of([x]).item() == pytest.approx(0.05, rel=2**-8)
    y = torch.full((10_000,), 3e38)
    clip_grads_with_norm_(with_grads(y), 1e-3, gm.total_norm([y]))
    assert norm_of([y]).item() == pytest.approx(1e-3, rel=1e-6)


@pytest.mark.skipif(KERNELS, reason="the kernel decides on the device")
def test_by_a_norm_within_the_bound_nothing_is_written():
    x = torch.ones(4)
    before = x._version
    clip_grads_with_norm_(with_grads(x), 5.0, 2.0)
    assert x._version == before
    clip_grads_with_norm_(with_grads(x), 1.0, 2.0)
    assert x._version > before


def test_by_a_norm_without_gradients_nothing_happens():
    for parameters in ([], linear(), linear().parameters(), iter([])):
        assert clip_grads_with_norm_(parameters, 1.0, 5.0) is None


@pytest.mark.parametrize("device", DEVICES)
def test_clipping_by_a_norm_never_waits(device):
    with device_of(device) as d:
        norm = torch.ones((), device=d)
        with watch() as seen:
            clip_grads_with_norm_(Model(d), 0.5, norm)
            clip_grads_with_norm_(Model(d).parameters(), norm, 3.0)
        assert (seen.to_host, seen.to_device) == ([], [])


@pytest.mark.once
@inductor_if_deep
def test_clipping_by_a_norm_is_in_the_graph_of_a_step(backend):
    torch._dynamo.reset()
    counters.clear()
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))

    def clip(grads, max_norm, norm):
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad
        norm = gm.total_norm(grads, 1) if norm is None else norm
        clip_grads_with_norm_(model, max_norm, norm)
        return [parameter.grad for parameter in model.parameters()]

    for norm in (None, torch.tensor(7.0)):
        compiled = torch.compile(clip, fullgraph=True, backend=backend)
        for max_norm in [0.5, 1e9, *(0.1 * i for i in range(1, 10))]:
            grads = [torch.randn_like(p) for p in model.parameters()]
            ours = compiled([g.clone() for g in grads], torch.tensor(max_norm), norm)
            for a, b in zip(ours, clip([g.clone() for g in grads], max_norm, norm), strict=True):
                torch.testing.assert_close(a, b, rtol=2**-22, atol=0.0)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    torch._dynamo.reset()


# statistics and clipping from one read


def test_stats_are_those_before_clipping():
    model = linear()
    fill(model, *LARGE)
    expected = gm.collect_grads(model)
    limits = gm.Thresholds(exploding=10.0)
    stats = collect_and_clip_(model, 2.0, thresholds=limits)
    assert stats.names == ("weight", "bias")
    assert stats.thresholds == limits
    assert torch.equal(stats.columns, expected.columns)
    assert stats.materialize().exploding == ["weight"]
    assert gm.grad_norm(model) == pytest.approx(2.0, rel=1e-6)


def test_clipping_reads_the_gradients_once(monkeypatch):
    calls = []
    inner = ops.measure

    def counted(tensors, *args, **options):
        calls.append(len(tensors))
        return inner(tensors, *args, **options)

    monkeypatch.setattr(ops, "measure", counted)
    model = linear()
    fill(model, *LARGE)
    collect_and_clip_(model, 2.0)
    clip_grad_norm_(model, 2.0, norm_type="inf")
    assert calls == [2, 2]


@pytest.mark.parametrize("order", [2, INF, 3, 0])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_with_an_inv_scale_the_bound_is_that_of_unscaled_gradients(order, as_tensor):
    grads = [torch.randn(40), torch.randn(8, 5)]
    scaled = [g * 1024 for g in grads]
    inv_scale = torch.tensor([1 / 1024]) if as_tensor else 1 / 1024
    stats = collect_and_clip_(with_grads(*scaled), 0.5, inv_scale=inv_scale, norm_type=order)
    clip_grad_norm_(with_grads(*grads), 0.5, norm_type=order)
    assert stats.total_norm.item() < 100
    for a, b in zip(scaled, grads, strict=True):
        torch.testing.assert_close(a / 1024, b, rtol=2**-22, atol=0.0)


def test_a_step_that_a_scaler_skips_is_not_exploding():
    grads = torch.tensor([INF, 1.0]), torch.tensor([3.0, 4.0])
    flags = gm.collect(grads, skip_nonfinite=True).flags
    stats = collect_and_clip_(with_grads(*grads), 1.0, skip_nonfinite=True)
    assert bool(stats.skipped)
    assert stats.materialize().exploding == []
    assert torch.equal(stats.flags, flags)


@pytest.mark.parametrize("kind", NUMBERS)
def test_the_bound_may_be_any_number(kind):
    model = linear()
    fill(model, *LARGE)
    bound = NUMBERS[kind](2)
    clip_grad_norm_(model, bound)
    assert gm.grad_norm(model) == pytest.approx(2.0, rel=1e-6)
    assert clip_coefficient(gm.collect([torch.ones(16)]), bound).item() == pytest.approx(0.5)


@pytest.mark.parametrize(("bound", "factor"), [(NAN, 1.0), (INF, 1.0), (-1.0, 0.0)])
def test_a_bound_in_a_tensor_that_is_no_bound_makes_no_nan(bound, factor):
    x = torch.ones(4)
    clip_grad_norm_(with_grads(x), torch.tensor(bound))
    assert (x == factor).all()


# refused arguments: nothing is written


BY_NORM = "^clip_grads_with_norm_: .*"
TOTAL = BY_NORM + "total_norm .* "
REFUSED = {
    "negative": (lambda p: clip_grad_norm_(p, -1.0), ValueError, "max_norm must be a non-negative number"),
    "nan": (lambda p: clip_grad_norm_(p, NAN), ValueError, "clip_grad_norm_: max_norm .* got nan"),
    "string": (lambda p: clip_grad_norm_(p, "2.0"), ValueError, "max_norm .* got '2.0'"),
    "none": (lambda p: collect_and_clip_(p, None), ValueError, "collect_and_clip_: max_norm .* got None"),
    "complex": (lambda p: clip_grad_norm_(p, 1j), ValueError, "got 1j"),
    "list": (lambda p: clip_grad_norm_(p, [1.0]), ValueError, r"got \[1.0\]"),
    "decimal": (lambda p: clip_grad_norm_(p, Decimal(1)), ValueError, "got Decimal"),
    "tensor of two": (lambda p: clip_grad_norm_(p, torch.ones(2)), ValueError, r"a tensor of shape \(2,\)"),
    "tensor on meta": (
        lambda p: clip_grad_norm_(p, torch.ones(1, device="meta")),
        ValueError,
        r"max_norm .* got a tensor of shape \(1,\) and dtype torch.float32 on the meta device",
    ),
    "sparse": (lambda p: clip_grad_norm_(p, torch.ones(1).to_sparse()), ValueError, "torch.sparse_coo"),
    "too large": (lambda p: clip_grad_norm_(p, 10**400), ValueError, "max_norm .* got an integer beyond the"),
    "tensor of bool": (lambda p: clip_grad_norm_(p, torch.tensor(True)), ValueError, "torch.bool"),
    "order": (lambda p: clip_grad_norm_(p, 1.0, norm_type="two"), ValueError, "norm_type .* got 'two'"),
    "order nan": (lambda p: clip_grad_norm_(p, 1.0, norm_type=NAN), ValueError, "norm_type .* got nan"),
    "order none": (lambda p: clip_grad_norm_(p, 1.0, norm_type=None), ValueError, "norm_type .* got None"),
    "coefficient": (
        lambda p: clip_coefficient(gm.collect_grads(p), 1.0, norm_type=4),
        ValueError,
        "clip_coefficient: norm_type must be 2 or inf.* got 4; use clip_grad_norm_ for other orders",
    ),
    "inv_scale": (lambda p: collect_and_clip_(p, 1.0, inv_scale=-1.0), ValueError, "inv_scale"),
    "thresholds": (lambda p: collect_and_clip_(p, 1.0, thresholds=3), TypeError, "thresholds"),
    "no stats": (lambda p: clip_coefficient(p, 1.0), TypeError, "expected the TensorStats that"),
    "module list": (
        lambda p: clip_grad_norm_([*p, linear()], 1.0),
        TypeError,
        "'2' is a module.*; pass one module by itself",
    ),
    "number": (lambda _: clip_grad_norm_(3, 1.0), TypeError, "expected a module"),
    "norm": (lambda p: clip_grads_with_norm_(p, 1.0, -1.0), ValueError, TOTAL + "got -1.0"),
    "string norm": (lambda p: clip_grads_with_norm_(p, 1.0, "5"), ValueError, TOTAL + "got '5'"),
    "no norm": (lambda p: clip_grads_with_norm_(p, 1.0, None), ValueError, TOTAL + "got None"),
    "two": (lambda p: clip_grads_with_norm_(p, 1.0, torch.ones(2)), ValueError, TOTAL + "of shape"),
    "1j": (lambda p: clip_grads_with_norm_(p, 1.0, torch.ones(()) * 1j), ValueError, TOTAL),
    "max_norm": (lambda p: clip_grads_with_norm_(p, -1.0, 5.0), ValueError, BY_NORM + "max_norm .* got -1.0"),
    "gradients": (lambda p: clip_grads_with_norm_(grads_of(p), 1.0, 5.0), TypeError, BY_NORM + "has a .grad"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_in_one_line_and_changes_nothing(case):
    call, error, said = REFUSED[case]
    grads = torch.full((4,), 5.0), torch.full((3,), 7.0)
    before = [bits(g) for g in grads]
    with pytest.raises(error, match=said) as caught:
        call(with_grads(*grads))
    assert "\n" not in str(caught.value)
    assert_unchanged(grads, before)


UNFIT = {
    "expanded": (lambda: torch.ones(1, 3).expand(5, 3), "may have elements that share memory"),
    "overlapping": (lambda: torch.ones(9).as_strided((4, 3), (1, 2)), "may have elements that share memory"),
    "complex, expanded": (lambda: torch.ones(1).mul(1j).expand(4), "may have elements that share memory"),
    "from inference": (torch.inference_mode()(lambda: torch.ones(3)), "was made in inference mode"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2)]), "is a nested tensor"),
    "csr": (lambda: torch.ones(2, 2).to_sparse_csr(), "has layout"),
}


@pytest.mark.parametrize("case", UNFIT)
@pytest.mark.parametrize("place", [0, 1])
def test_a_gradient_that_cannot_be_scaled_is_named_before_the_first_is(case, place):
    make, said = UNFIT[case]
    if KERNELS and case == "from inference":
        pytest.skip("the kernel can write any memory")
    good, bad = torch.full((40,), 5.0), nn.Module()
    bad.grad = make()
    before = bits(good)

    class Holder(Tensor):
        """A parameter with a gradient that torch would refuse to assign."""

        @property
        def grad(self):
            return self.held

    holder = torch.zeros(1).as_subclass(Holder)
    holder.held = bad.grad
    pairs = [("fine", with_grads(good)[0])]
    pairs.insert(place, ("unfit", holder))
    for order in (2, 3):
        with pytest.raises(TypeError, match=f"'unfit' {said}"):
            clip_grad_norm_(pairs, 1.0, norm_type=order)
        assert_unchanged([good], [before])


def test_a_refusal_says_what_to_do():
    (parameter,) = with_grads(torch.ones(1, 3).expand(5, 3))
    with pytest.raises(TypeError, match=r"parameter\.grad = parameter\.grad\.clone\(\)"):
        clip_grad_norm_([parameter], 1.0)
    parameter.grad = parameter.grad.clone()
    assert clip_grad_norm_([parameter], 1.0).item() == pytest.approx(math.sqrt(15))


# waits for the device


@pytest.mark.once
@pytest.mark.parametrize("device", DEVICES)
def test_clipping_never_waits(device):
    with device_of(device) as d:
        bound = torch.ones((), device=d)
        with watch() as seen:
            for order in (2, INF, 3, 0, -1):
                norm = clip_grad_norm_(Model(d), 1.0, norm_type=order)
                clip_grad_norm_(Model(d).parameters(), bound, norm_type=order)
            stats = collect_and_clip_(Model(d), bound, inv_scale=bound)
            clip_coefficient(stats, 1.0)
            clip_grad_norm_(with_grads(torch.ones(4, 3, device=d).T, torch.ones(3, device=d) * 1j), 1.0)
        assert (norm.device.type, norm.dtype, norm.shape) == (device, torch.float64, ())
        assert (seen.to_host, seen.to_device) == ([], [])


def test_asking_for_an_error_takes_one_transfer():
    with device_of("cuda") as d, watch() as seen, pytest.raises(HostWaitError):
        clip_grad_norm_(Model(d), 1.0, error_if_nonfinite=True)
    # the error's details are then read on the host
    assert len(seen.to_host) == 1


def test_the_coefficient_travels_to_other_devices_without_a_wait():
    with device_of("cuda"):
        grads = [torch.ones(3, device=d) for d in ("cuda:0", "cuda:1", "cuda:0")]
        with watch() as seen:
            norm = clip_grad_norm_(with_grads(*grads), 1.0)
        assert norm.device == torch.device("cuda:0")
        assert (seen.to_host, seen.to_device) == ([], [])


def test_a_gradient_on_the_host_beside_others_waits_for_the_coefficient():
    with device_of("cuda"):
        grads = [torch.ones(3, device=d) for d in ("cpu", "cuda")]
        with watch() as seen:
            norm = clip_grad_norm_(with_grads(*grads), 1.0)
        assert norm.device.type == "cuda"
        # a blocking copy, since the coefficient is used at once
        assert seen.to_host == [(True, False)]


# the kernel


@pytest.fixture
def scalings(monkeypatch):
    """The dtypes of all launches of the scale kernel."""
    kernels = pytest.importorskip("gradiometer.kernels")
    seen = []
    inner = kernels.scale

    def noted(pointers, table, factor, dtype, *args):
        seen.append(dtype)
        inner(pointers, table, factor, dtype, *args)

    monkeypatch.setattr(kernels, "scale", noted)
    launch_plans.clear()
    yield seen
    launch_plans.clear()


needs_kernels = pytest.mark.skipif(not KERNELS, reason="needs kernels")


@needs_kernels
def test_there_is_one_launch_a_dtype_from_the_first_call_on(scalings):
    grads = [torch.full((100,), 1.0 + i).to(FLOATS[i % 2]) for i in range(20)]
    parameters = with_grads(*grads)
    for _ in range(3):
        clip_grad_norm_(parameters, 1.0)
    # what was measured last comes first
    assert scalings == [FLOATS[1], FLOATS[0]] * 3
    # non-contiguous memory is scaled by torch's operators
    clip_grad_norm_(with_grads(torch.ones(40, 40)[3:-3, 5:-5]), 1.0)
    assert len(scalings) == 6


@needs_kernels
def test_the_kernels_path_never_waits(scalings, monkeypatch):
    parameters = with_grads(torch.full((100,), 5.0), torch.full((100,), 5.0).half())
    clip_grad_norm_(parameters, 1e9)
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "nonzero"):
        monkeypatch.setattr(Tensor, name, lambda *_, name=name: pytest.fail(f"Tensor.{name} was called"))
    clip_grad_norm_(parameters, 1.0)
    monkeypatch.undo()
    assert scalings
    assert parameters[0].grad[0] < 0.5


@needs_kernels
@pytest.mark.usefixtures("scalings")
def test_memory_is_compared_again_at_other_addresses(monkeypatch):
    compared = []
    once = scale._once
    monkeypatch.setattr(scale, "_once", lambda *args: compared.append(1) or once(*args))
    memory = torch.full((12,), 3.0)
    separate = with_grads(memory[:4], memory[4:8])
    for _ in range(3):
        clip_grad_norm_(separate, 1.0)
    # compared when the list is first recognized
    assert len(compared) <= 2
    memory.fill_(3.0)
    same = with_grads(memory[:4], memory[:4])
    clip_grad_norm_(same, 1.0)
    torch.testing.assert_close(memory[:4], torch.full((4,), 1 / math.sqrt(8)))
    overlapping = with_grads(memory[4:8], memory[6:10])
    with pytest.raises(TypeError, match="share part of their memory"):
        clip_grad_norm_(overlapping, 1.0)
    assert memory[4:].tolist() == [3.0] * 8


@needs_kernels
def test_the_kernel_touches_nothing_where_nothing_is_clipped(scalings):
    # any multiplication turns a signalling NaN into a quiet one
    x = torch.full((5000,), 0x7FA00001, dtype=torch.int32).view(torch.float32)
    before = bits(x)
    clip_grad_norm_(with_grads(x), INF)
    assert scalings == [torch.float32]
    assert_unchanged([x], [before])
    clip_grad_norm_(with_grads(torch.tensor([1e3]), x), 1.0)
    assert not torch.equal(bits(x), before)
    assert x.isnan().all()


@needs_kernels
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 7, 8, 9, 2047, 2049, 4095, 4097, 2**15 + 5])
def test_the_kernel_writes_what_it_should_and_nothing_beside(scalings, dtype, first, size):
    memory = torch.randn(first + size + 40).to(dtype)
    before = memory.clone()
    x = memory[first : first + size]
    norm = clip_grad_norm_(with_grads(x), 0.01)
    assert scalings == [dtype]
    factor = (torch.full((), 0.01, dtype=torch.float64) / (norm + EPS)).clamp(max=1.0)
    factor = factor if dtype == torch.float64 else factor.float()
    expected = (before[first : first + size].to(factor.dtype) * factor).to(dtype)
    assert torch.equal(x, expected)
    assert torch.equal(memory[:first], before[:first])
    assert torch.equal(memory[first + size :], before[first + size :])


# compiled steps

COMPILED = torch.compile(clip_grad_norm_, fullgraph=True, backend="aot_eager")


def train_step(model, x, y, max_norm, clip):
    loss = mse_loss(model(x), y)
    loss.backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    out = clip(model, max_norm)
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * parameter.grad)
    for parameter in model.parameters():
        parameter.grad = None
    return out, before, grads


CLIPS = {
    "clip_grad_norm_": lambda model, m: clip_grad_norm_(model.parameters(), m),
    "inf": lambda model, m: clip_grad_norm_(model.named_parameters(), m, norm_type="inf"),
    "4": lambda model, m: clip_grad_norm_(model, m, norm_type=4.0),
    "collect_and_clip_": lambda model, m: collect_and_clip_(model, m).total_norm,
}


@pytest.mark.usefixtures("_dynamo")
@pytest.mark.parametrize(
    ("backend", "clip", "as_tensor"),
    [
        ("aot_eager", "collect_and_clip_", True),
        *(
            pytest.param(
                "aot_eager", clip, as_tensor, marks=pytest.mark.once if as_tensor else pytest.mark.deep
            )
            for clip, as_tensor in product(CLIPS, [False, True])
            if (clip, as_tensor) != ("collect_and_clip_", True)
        ),
        # Inductor takes long, and generates its own code only for the scaling
        pytest.param("inductor", "clip_grad_norm_", True, marks=[needs_compiler, pytest.mark.deep]),
        pytest.param("inductor", "collect_and_clip_", True, marks=[needs_compiler, pytest.mark.once]),
    ],
)
def test_a_compiled_step_clips_as_an_eager_one(backend, clip, as_tensor):
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))
    step = torch.compile(train_step, fullgraph=True, backend=backend)
    rtol = 0.0 if clip != "4" else 1e-6
    for i in range(5):
        bound = torch.tensor(0.1 * (i + 1)) if as_tensor else 0.1
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            said, before, grads = step(model, torch.randn(5, 4), torch.randn(5, 3), bound, CLIPS[clip])
        twin = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))
        for name, parameter in twin.named_parameters():
            parameter.grad = before[name]
        expected = CLIPS[clip](twin, bound)
        torch.testing.assert_close(said, expected, rtol=1e-14, atol=0.0)
        for name, parameter in twin.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=rtol, atol=0.0)
        assert norm_of(grads.values()) > 0
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.usefixtures("_dynamo")
@pytest.mark.parametrize(
    "max_norm", [pytest.param(0.5, marks=pytest.mark.deep), 1e-42, pytest.param(INF, marks=pytest.mark.deep)]
)
def test_compiled_or_not_it_leaves_the_same_bits(max_norm):
    dtypes = (*FLOATS, torch.complex64)
    grads = [x.to(dtype) for dtype in dtypes for x in (torch.randn(300), torch.randn(40, 8).T)]
    twins = [g.clone() for g in grads]
    bound = torch.tensor(max_norm).double()
    said = COMPILED(with_grads(*grads), bound)
    assert torch.equal(said, clip_grad_norm_(with_grads(*twins), bound))
    for g, twin in zip(grads, twins, strict=True):
        assert torch.equal(bits(g), bits(twin))


@pytest.mark.once
@pytest.mark.usefixtures("_dynamo")
def test_inductor_keeps_a_coefficient_that_fp32_has_no_number_for():
    x = torch.rand(1000) * 3e38
    twin = x.clone()
    torch.compile(clip_grad_norm_, fullgraph=True)(with_grads(x), torch.tensor(1e-5).double())
    clip_grad_norm_(with_grads(twin), 1e-5)
    assert torch.equal(x, twin)
    assert (x > 0).all()


@pytest.mark.usefixtures("_dynamo")
def test_a_graph_does_not_ask_for_the_driver(monkeypatch):
    def trace(device):
        raise AssertionError(f"Dynamo cannot trace how Triton loads its driver for {device}")

    monkeypatch.setattr(ops, "uses_kernels", trace)
    g = torch.tensor([3.0, 4.0])
    assert torch.compile(collect_and_clip_, fullgraph=True, backend="aot_eager")(with_grads(g), 1.0).norm == 5
    torch.testing.assert_close(g, torch.tensor([0.6, 0.8]))


@pytest.mark.usefixtures("_dynamo")
def test_a_shared_gradient_is_scaled_once_in_a_graph_too():
    g = torch.tensor([3.0, 4.0])
    norm = COMPILED(with_grads(g, g), 1.0)
    assert norm.item() == pytest.approx(5 * math.sqrt(2))
    torch.testing.assert_close(g, torch.tensor([3.0, 4.0]) / (5 * math.sqrt(2)))


@pytest.mark.usefixtures("_dynamo")
def test_a_compiled_step_cannot_raise_for_a_value_and_says_what_to_look_at():
    x = torch.ones(3)
    with pytest.raises(Exception, match=r"error_if_nonfinite=True .* stats\.found_inf"):
        COMPILED(with_grads(x), 1.0, error_if_nonfinite=True)
    assert (x == 1).all()


@pytest.mark.usefixtures("_dynamo")
def test_no_op_of_ours_but_the_measurement_and_its_roots_is_in_the_graph():
    names = []

    def keep(graph, _):
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd

    # plain operators measure fewer tensors
    parameters = with_grads(*torch.ones(20, 3))
    backend = aot_autograd(fw_compiler=keep)
    torch.compile(clip_grad_norm_, fullgraph=True, backend=backend)(parameters, 1.0)
    ours = [name for name in names if "gradiometer" in name and "sqrt" not in name]
    assert ours == ["gradiometer.tensor_stats.default"]
    assert any("mul" in name for name in names)


# the benchmark


@pytest.mark.once
def test_the_benchmark_of_clipping_runs(monkeypatch, capsys, tmp_path):
    from kernels_bench import cases, clip

    tiny = cases.Case("tiny", "", torch.float32, (((40, 30), 3), ((7,), 2)))
    monkeypatch.setitem(cases.CASES, "tiny", tiny)
    figures = tmp_path / "new" / "clip.json"
    arguments = ["clip", "--device", "cpu", "--rounds", "2", "--cases", "tiny", "--json", str(figures)]
    monkeypatch.setattr("sys.argv", arguments)
    clip.main()
    assert "ours / torch" in capsys.readouterr().out
    rows = json.loads(figures.read_text(encoding="utf-8"))["rows"]
    assert [row["what"] for row in rows] == ["clipped", "not clipped"]
    for row in rows:
        assert row["norms"]["ours"] == pytest.approx(row["norms"]["torch"], rel=1e-5)
    monkeypatch.setattr("sys.argv", ["clip", "--cases", "tinny"])
    with pytest.raises(SystemExit, match="no case 'tinny'; there are gpt2"):
        clip.main()


@pytest.mark.parametrize("order", [2, 3, 0, INF])
def test_an_inv_scale_of_another_device_serves_every_order(order):
    with device_of("cuda:0"):
        parameters, inv_scale = with_grads(torch.ones(3, device="cuda:1")), torch.ones((), device="cuda:0")
        with watch():
            stats = collect_and_clip_(parameters, 1.0, norm_type=order, inv_scale=inv_scale)
        assert stats.columns.device == torch.device("cuda:1")


@pytest.mark.parametrize("order", [2, 3])
def test_a_copy_to_the_host_while_a_graph_is_captured_is_refused(order, monkeypatch):
    for question in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, question, lambda: True)
    with device_of("cuda:0"):
        parameters = with_grads(torch.ones(3, device="cuda:0"))
        for wait in (
            lambda: collect_and_clip_(parameters, 1.0, norm_type=order, error_if_nonfinite=True),
            lambda: gm.collect_grads(parameters).materialize(),
            lambda: gm.materialize_async([gm.collect_grads(parameters)]),
        ):
            with pytest.raises(RuntimeError, match="a copy to the host cannot be part of a CUDA graph"):
                wait()
