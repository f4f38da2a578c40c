"""The EMA on the device: Adam's, element by element, in eager and compiled steps; a NaN does not persist."""

from __future__ import annotations

import copy
import math
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gradiometer as gm
from gradiometer import EMA, Smoothed
from support.compiling import batch, graphs, inductor_if_deep, no_recompile, small_model
from support.fake_device import DEVICES, device_of, watch

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.usefixtures("_dynamo")

NAN, INF = math.nan, math.inf
F64 = torch.float64
EPS = 2.0**-53
# products of subnormal numbers are rounded to multiples of this
TINY = Fraction(2) ** -1074


def tensor(x: float | Sequence[float]) -> Tensor:
    return torch.tensor(x, dtype=F64)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=-7.0), b.nan_to_num(nan=-7.0)) and torch.equal(a.isnan(), b.isnan())


def assert_same(a: Smoothed, b: Smoothed) -> None:
    assert same(a.value, b.value)
    assert same(a.drift, b.drift)


def exact_mean(xs: Sequence[float], decay: float) -> Fraction | None:
    """Adam's average: the moments of all finite values, divided by the sum of their weights."""
    finite = [Fraction(x) for x in xs if math.isfinite(x)]
    weights = [(1 - Fraction(decay)) * Fraction(decay) ** i for i in range(len(finite))][::-1]
    if not finite:
        return None
    return sum((w * x for w, x in zip(weights, finite, strict=True)), Fraction(0)) / sum(weights)


def near(value: float, exact: Fraction | None, scale: float, count: int) -> bool:
    if exact is None:
        return math.isnan(value)
    # In units of roundoff of the scale, an update adds an error of 2 for the difference, which is up to 2
    # scales, 2 for its product and 1 for the sum; and twice that of the weight: 4, plus 2 per earlier weight.
    bound = count * ((13 + 4 * count) * Fraction(EPS) * Fraction(scale) + 4 * TINY)
    return math.isfinite(value) and abs(Fraction(value) - exact) <= bound


values = st.floats(-1e6, 1e6) | st.sampled_from([NAN, INF, -INF, 0.0, 1e150, -1e-150])
decays = st.floats(0, 0.999999) | st.sampled_from([0.0, 0.5, 0.9, 0.99])


# values


@given(st.lists(values, min_size=1, max_size=12), decays)
def test_it_is_the_average_with_bias_correction_of_the_finite_values(xs, decay):
    ema = EMA(decay=decay, eps=1e-3)
    for i, x in enumerate(xs):
        scale = max([abs(y) for y in xs[: i + 1] if math.isfinite(y)], default=0.0)
        before = ema.value.item()
        value, drift = (y.item() for y in ema(tensor(x)))
        assert near(value, exact_mean(xs[: i + 1], decay), scale, i + 1)
        if math.isnan(before):
            # no history yet
            assert drift == 0.0 if math.isfinite(x) else math.isnan(drift)
        else:
            expected = abs(x - before) / (abs(before) + 1e-3)
            assert drift == expected or (math.isnan(x) and math.isnan(drift))
        assert ema.steps.item() == sum(map(math.isfinite, xs[: i + 1]))


@given(st.lists(st.lists(values, min_size=3, max_size=3), min_size=1, max_size=12), decays)
def test_every_element_is_an_average_of_its_own(rows, decay):
    together, each = EMA(3, decay=decay), [EMA(decay=decay) for _ in range(3)]
    for row in rows:
        value, drift = together(tensor(row))
        alone = [ema(tensor(x)) for ema, x in zip(each, row, strict=True)]
        assert_same(Smoothed(value, drift), Smoothed(*map(torch.stack, zip(*alone, strict=True))))


@given(st.floats(-1e300, 1e300), decays)
def test_a_constant_gives_that_constant_from_the_first_step_on(x, decay):
    ema = EMA(decay=decay)
    for _ in range(20):
        value, drift = ema(tensor(x))
        assert (value.item(), drift.item()) == (x, 0.0)


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=5))
def test_without_decay_it_is_the_last_value(xs):
    ema = EMA(decay=0)
    assert [ema(tensor(x)).value.item() for x in xs] == xs


def test_the_first_steps_are_those_worked_out_by_hand():
    ema = EMA(decay=0.5, eps=1.0)
    assert_same(ema(tensor(1.0)), Smoothed(tensor(1.0), tensor(0.0)))
    # (0.25 * 1 + 0.5 * 4) / 0.75, and |4 - 1| / (1 + 1)
    assert_same(ema(tensor(4.0)), Smoothed(tensor(3.0), tensor(1.5)))
    assert_same(ema(tensor(NAN)), Smoothed(tensor(3.0), tensor(NAN)))
    assert_same(ema(tensor(-INF)), Smoothed(tensor(3.0), tensor(INF)))
    # (0.125 * 1 + 0.25 * 4 + 0.5 * 3) / 0.875
    assert_same(ema(tensor(3.0)), Smoothed(tensor(3.0), tensor(0.0)))
    assert ema.state.tolist() == [3.0, 0.875, 3.0]


def test_a_difference_that_overflows_does_not_stick():
    ema = EMA(decay=0.5)
    ema(tensor(1.7e308))
    assert_same(ema(tensor(-1.7e308)), Smoothed(tensor(1.7e308), tensor(INF)))


def test_without_history_there_is_no_value_and_reset_forgets_it_in_place():
    ema = EMA((2, 1))
    assert ema.value.isnan().all()
    ema(torch.ones(2, 1))
    address = ema.state.data_ptr()
    assert ema.reset_() is ema
    assert ema.state.data_ptr() == address
    assert ema.value.isnan().all()
    assert ema.steps.tolist() == [[0.0], [0.0]]


def test_results_are_snapshots_and_carry_no_gradient():
    ema = EMA()
    x = torch.tensor(1.0, requires_grad=True)
    first, steps = ema(x), ema.steps
    ema(3 * x)
    assert (first.value.item(), first.drift.item(), steps.item()) == (1.0, 0.0, 1.0)
    assert not any([y.requires_grad for y in (*first, *ema(x), ema.value)])
    assert list(ema.parameters()) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 1, 3)], ids=str)
def test_any_floating_dtype_and_shape(dtype, shape):
    ema = EMA(shape)
    x = torch.full(shape, 1.1, dtype=dtype)
    for _ in range(2):
        value, drift = ema(x)
        assert torch.equal(value, x.double())
        assert torch.equal(drift, torch.zeros(shape, dtype=F64))
    assert ema.value.dtype == F64


def test_it_takes_what_stats_give():
    stats = gm.collect({"host.w": torch.ones(9), "seed.w": torch.ones(4), "b": torch.tensor([NAN])})
    grouped = stats.group({"host": r"^host", "seed": r"^seed"})
    assert EMA()(stats.total_norm).value.isnan()
    assert same(EMA(3)(stats.norm).value, stats.norm)
    assert EMA()(gm.group_ratio(grouped, "seed", "host")).value == 1.0


# without bias correction: the common hand-written loop


def classical(xs: Sequence[float], decay: float) -> Fraction:
    mean = Fraction(0)
    for x in xs:
        if math.isfinite(x):
            mean = Fraction(decay) * mean + (1 - Fraction(decay)) * Fraction(x)
    return mean


@given(st.lists(values, min_size=1, max_size=12), decays)
def test_without_bias_correction_it_is_the_average_that_starts_at_zero(xs, decay):
    ema, corrected = EMA(decay=decay, eps=1e-3, bias_correction=False), EMA(decay=decay, eps=1e-3)
    assert (ema.value.item(), ema.steps.item()) == (0.0, 0.0)
    for i, x in enumerate(xs):
        scale = max([abs(y) for y in xs[: i + 1] if math.isfinite(y)], default=0.0)
        before = ema.value.item()
        value, drift = (y.item() for y in ema(tensor(x)))
        # the bound of the corrected mean, plus that of a weight and a product
        bound = (i + 1) * ((16 + 4 * (i + 1)) * Fraction(EPS) * Fraction(scale) + 4 * TINY)
        assert abs(Fraction(value) - classical(xs[: i + 1], decay)) <= bound
        expected = abs(x - before) / (abs(before) + 1e-3)
        assert drift == expected or (math.isnan(x) and math.isnan(drift))
        # both kinds share one state
        corrected(tensor(x))
        assert same(ema.state, corrected.state)


def test_the_first_steps_without_correction_are_those_worked_out_by_hand():
    ema = EMA(decay=0.5, eps=1.0, bias_correction=False)
    # from 0: |1 - 0| / (0 + 1)
    assert_same(ema(tensor(1.0)), Smoothed(tensor(0.5), tensor(1.0)))
    # 0.5 * 0.5 + 0.5 * 4, and |4 - 0.5| / (0.5 + 1)
    assert_same(ema(tensor(4.0)), Smoothed(tensor(2.25), tensor(3.5 / 1.5)))
    assert_same(ema(tensor(NAN)), Smoothed(tensor(2.25), tensor(NAN)))
    assert_same(ema(tensor(-INF)), Smoothed(tensor(2.25), tensor(INF)))
    assert ema(tensor(3.0)).value.item() == pytest.approx(2.625, rel=1e-15)
    assert ema.reset_().value.item() == 0.0
    first = EMA(bias_correction=False)(tensor(NAN))
    assert_same(first, Smoothed(tensor(0.0), tensor(NAN)))
    assert "bias_correction=False" in repr(ema)
    assert "bias_correction" not in repr(EMA())


def test_a_state_of_one_kind_loads_into_the_other():
    classic, corrected = EMA(2, decay=0.9, bias_correction=False), EMA(2, decay=0.9)
    for x in ([1.0, 2.0], [3.0, NAN], [0.5, 4.0]):
        classic(tensor(x))
    corrected.load_state_dict(classic.state_dict())
    weights = 1.0 - 0.9**classic.steps
    torch.testing.assert_close(corrected.value * weights, classic.value, rtol=1e-14, atol=0.0)
    again = EMA(2, decay=0.9, bias_correction=False)
    again.load_state_dict(corrected.state_dict())
    assert_same(again(tensor([1.0, 1.0])), classic(tensor([1.0, 1.0])))
    assert same(copy.deepcopy(again).value, again.value)


@inductor_if_deep
def test_without_correction_it_is_updated_inside_a_compiled_step(backend):
    ema, twin = EMA(2, decay=0.9, bias_correction=False), EMA(2, decay=0.9, bias_correction=False)
    compiled = torch.compile(ema, fullgraph=True, backend=backend)
    mean = torch.zeros(2, dtype=F64)
    with no_recompile():
        for i in range(8):
            x = torch.rand(2, dtype=F64) + i
            found, expected = compiled(x), twin(x)
            mean = 0.9 * mean + (1 - 0.9) * x
            torch.testing.assert_close(found.value, mean, rtol=1e-14, atol=0.0)
            # Inductor may fuse a multiplication and an addition
            torch.testing.assert_close(tuple(found), tuple(expected), rtol=1e-14, atol=0.0)
    assert graphs() == 1


# refused arguments


REFUSED = [
    ("decay", [1.0, -0.1, NAN, INF, 2, "0.9", None], ValueError, r"decay must be a number in \[0, 1\)"),
    ("eps", [0.0, -1e-12, NAN, INF, "1"], ValueError, "eps must be a positive finite number"),
    ("bias_correction", [None, 0, "no"], TypeError, "bias_correction must be True or False"),
    ("shape", [0.99, "x", -1, (2, -1), (1.5,), None], ValueError, "shape must be .* by keyword"),
]


@pytest.mark.parametrize(
    ("name", "value", "error", "words"), [(n, x, e, w) for n, xs, e, w in REFUSED for x in xs]
)
def test_an_argument_that_is_none_is_refused(name, value, error, words):
    with pytest.raises(error, match=words):
        EMA(**{name: value})


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (
            torch.ones(3),
            ValueError,
            r"x has shape \(3,\), but this average has shape \(2,\); .*EMA\(\(3,\)",
        ),
        (torch.ones(()), ValueError, r"x has shape \(\), but this average has shape \(2,\)"),
        (torch.ones(2, dtype=torch.int64), TypeError, "floating-point tensor, got torch.int64"),
        (torch.ones(2) * 1j, TypeError, "floating-point tensor, got torch.complex64"),
        (1.0, TypeError, "floating-point tensor, got float"),
        (torch.ones(2, device="meta"), ValueError, "x is on meta, but this average is on cpu"),
    ],
    ids=["shape", "0-d", "int", "complex", "number", "device"],
)
def test_a_value_that_does_not_fit_is_refused_and_changes_nothing(x, error, words):
    ema = EMA(2)
    ema(torch.ones(2))
    before = ema.state.clone()
    with pytest.raises(error, match=words):
        ema(x)
    assert torch.equal(ema.state, before)


# as part of another module

SERIES = ([1.0, NAN], [2.0, 3.0], [INF, 4.0], [0.5, 0.1])


def owner_of(ema: EMA) -> nn.Module:
    owner = nn.Linear(3, 2)
    owner.ema = ema
    return owner


def continued(ema: EMA) -> list[Smoothed]:
    return [ema(tensor(x)) for x in SERIES]


CASTS = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "float": lambda m: m.half().float(),
    "to dtype": lambda m: m.to(torch.float16),
    "to device and dtype": lambda m: m.to("cpu", torch.bfloat16),
    "type": lambda m: m.type(torch.float16),
    "double": lambda m: m.double(),
}


@pytest.mark.parametrize("name", CASTS)
def test_a_cast_of_its_owner_leaves_it_as_it_is(name):
    ema, twin = EMA(2), EMA(2)
    owner = owner_of(ema)
    continued(ema), continued(twin)
    address = ema.state.data_ptr()
    CASTS[name](owner)
    assert owner.weight.dtype != torch.float32 or name == "float"
    assert ema.state.dtype == F64
    assert ema.state.data_ptr() == address
    for a, b in zip(continued(ema), continued(twin), strict=True):
        assert_same(a, b)


def test_it_moves_with_its_owner():
    owner = owner_of(EMA(2)).to("meta", torch.float16)
    assert (owner.ema.state.device.type, owner.ema.state.dtype) == ("meta", F64)
    owner.to_empty(device="cpu").ema.reset_()
    assert owner.ema(torch.ones(2)).value.tolist() == [1.0, 1.0]
    assert EMA(2, device="meta").state.device.type == "meta"


@pytest.mark.parametrize("copied", ["state_dict", "assign", "deepcopy"])
def test_a_copy_goes_on_identically(copied):
    ema = EMA(2, decay=0.9)
    continued(ema)
    owner = owner_of(ema)
    if copied == "deepcopy":
        again = copy.deepcopy(owner)
    else:
        again = owner_of(EMA(2, decay=0.9))
        again.load_state_dict(copy.deepcopy(owner.state_dict()), assign=copied == "assign")
    for a, b in zip(continued(again.ema), continued(ema), strict=True):
        assert_same(a, b)
    # and independently
    again.ema(torch.ones(2))
    assert not torch.equal(again.ema.state, ema.state)


def test_its_repr_says_what_it_is():
    assert repr(EMA(3, decay=0.9)) == "EMA(shape=(3,), decay=0.9, eps=1e-12)"


# on the device


@pytest.mark.parametrize("device", DEVICES)
def test_an_update_never_waits(device):
    with device_of(device) as d:
        ema = EMA(3, device=d)
        x = torch.ones(3, device=d)
        with watch() as seen:
            smoothed = ema(x)
            later = torch.where(smoothed.drift > 5, 0.0, smoothed.value)
            ema.value.add(ema.steps)
            ema.reset_()
        assert later.device.type == device
        assert (seen.to_host, seen.to_device) == ([], [])


@inductor_if_deep
@pytest.mark.parametrize("shape", [(), (2,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_in_a_compiled_step_it_gives_the_numbers_of_an_eager_one(backend, shape, dtype):
    ema, twin = EMA(shape, decay=0.9), EMA(shape, decay=0.9)
    step = torch.compile(lambda x: ema(2 * x), fullgraph=True, backend=backend)

    def compare(x: float) -> None:
        value = torch.full(shape, x, dtype=dtype)
        assert_same(step(value), twin(2 * value))
        assert torch.equal(ema.state, twin.state)

    compare(NAN)
    address = ema.state.data_ptr()
    with no_recompile():
        for x in (1.0, 3.5, NAN, INF, 0.3, 1e30, 0.7):
            compare(x)
        saved = {name: t.clone() for name, t in ema.state_dict().items()}
        compare(5.0)
        for each in (ema, twin):
            each.load_state_dict(saved)
        compare(0.1)
        for each in (ema, twin):
            each.reset_()
        compare(0.2)
    assert graphs() == 1
    assert ema.state.data_ptr() == address


def test_a_compiled_reset_is_one():
    ema = EMA()
    ema(torch.tensor(2.0))
    torch.compile(lambda: ema.reset_().value, fullgraph=True, backend="aot_eager")()
    assert ema.state.tolist() == [0.0, 0.0, 0.0]


class Watched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = small_model()
        self.total, self.each = EMA(decay=0.9), EMA(4, decay=0.9)


def guarded_step(model: Watched, x: Tensor, y: Tensor) -> tuple[Tensor, Smoothed, Smoothed]:
    nn.functional.mse_loss(model.body(x), y).backward()
    stats = gm.collect_grads(model.body)
    total, each = model.total(stats.total_norm), model.each(stats.norm)
    with torch.no_grad():
        # skip the update at a jump of the norm or a non-finite value, decided on the device
        rate = torch.where(total.drift <= 5, 0.1, 0.0)
        for parameter in model.body.parameters():
            parameter.copy_(torch.where(rate > 0, parameter - rate * parameter.grad, parameter))
    for parameter in model.body.parameters():
        parameter.grad = None
    return rate, total, each


@inductor_if_deep
def test_a_compiled_training_step_skips_a_jump_and_a_nan(backend):
    model, twin = Watched(), Watched()
    step = torch.compile(guarded_step, fullgraph=True, backend=backend)
    rates = []

    def run(factor: float) -> None:
        x, y = batch()
        before = [p.detach().clone() for p in model.body.parameters()]
        found, expected = step(model, factor * x, y), guarded_step(twin, factor * x, y)
        rates.append(found[0].item())
        if backend == "aot_eager":
            # the operators of an eager step, so its bits too
            assert_same(found[1], expected[1])
            assert_same(found[2], expected[2])
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)
        moved = [not torch.equal(a, b) for a, b in zip(before, model.body.parameters(), strict=True)]
        assert all(moved) if rates[-1] else not any(moved)

    run(1.0)
    with no_recompile():
        for factor in (1.0, 1.0, 1e4, NAN, 1.0):
            run(factor)
    assert [rate > 0 for rate in rates] == [True, True, True, False, False, True]
    assert graphs() == 1
    assert model.total.steps == 5


@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_that_was_cast_is_loaded_into_float64(assign):
    ema = EMA((2,), decay=0.9)
    ema(torch.tensor([1.0, 2.0]))
    halved = {name: value.half() for name, value in ema.state_dict().items()}
    again = EMA((2,), decay=0.9)
    again.load_state_dict(halved, assign=assign)
    assert again.state.dtype == torch.float64
    assert again(torch.ones(2)).value.dtype == torch.float64


@pytest.mark.parametrize("assign", [False, True])
def test_a_complex_state_is_refused(assign):
    ema = EMA((2,), decay=0.9)
    ema(torch.tensor([1.0, 2.0]))
    saved = {name: value.to(torch.complex128) for name, value in ema.state_dict().items()}
    again = EMA((2,), decay=0.9)
    with pytest.raises(ValueError, match=r"EMA.*'state' cannot be loaded, because it is torch.complex128"):
        again.load_state_dict(saved, assign=assign)
    assert again.state.dtype == torch.float64
    assert again.steps.tolist() == [0.0, 0.0]
