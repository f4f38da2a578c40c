"""Ours against home-grown telemetry: equal where that is right, and different for a known reason elsewhere.

For n elements of an fp32 or narrower dtype, home-grown code sums in fp32 and then rounds to that
dtype: the error is at most n * 2**-24, plus the dtype's eps.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradiometer as gm
from gradiometer import EMA, check_finite, clip_grad_norm_
from support import home_grown
from support.home_grown import GradientCollector, MovingAverage, with_grads
from support.oracle import NORM_BOUND, exact

CASES = home_grown.cases()
# inputs for which no home-grown total norm overflows, underflows, or has visible rounding errors
RIGHT = (
    "random",
    "a million",
    "no gradient",
    "zero elements",
    "1e15, 1e-10",
    "dtypes",
    "NaN",
    "Inf",
    "frozen, tied",
)

# ways to compute a total norm
NORMS = {
    "norm_by_item": home_grown.norm_by_item,
    "norm_of_squares": lambda model: float(home_grown.norm_of_squares(model.parameters())),
    "norm_of_flat": lambda model: home_grown.norm_of_flat(model).item(),
    "collect": lambda model: GradientCollector().collect(model)["total_norm"],
    "optimizer_monitor": lambda model: home_grown.optimizer_monitor(model)["l2_norm/grad/global"],
    "get_total_norm": lambda model: torch.nn.utils.get_total_norm(grads_of(model).values()).item(),
}
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def grads_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same(value, expected, rounding=NORM_BOUND):
    if not math.isfinite(expected):
        return value == expected or (math.isnan(value) and math.isnan(expected))
    return abs(value - expected) <= rounding * abs(expected)


def rounding(grads):
    return max((g.numel() * 2.0**-24 + torch.finfo(g.dtype).eps for g in grads), default=0.0)


# where they are right


@pytest.mark.parametrize("case", CASES)
def test_ours_is_exact(case):
    grads, report = grads_of(CASES[case]), gm.collect_grads(CASES[case]).materialize()
    assert same(gm.grad_norm(CASES[case]), exact(*grads.values()).norm if grads else 0.0)
    for name, grad in grads.items():
        assert same(report[name].norm, exact(grad).norm), name


@pytest.mark.parametrize("case", RIGHT)
@pytest.mark.parametrize("way", NORMS)
def test_total_norms_agree(way, case):
    model = CASES[case]
    if (way, case) == ("norm_of_flat", "no gradient"):
        with pytest.raises(ValueError, match="non-empty"):
            NORMS[way](model)
        return
    assert same(NORMS[way](model), gm.grad_norm(model), rounding(grads_of(model).values()))


@pytest.mark.parametrize("case", ["random", "a million", "1e15, 1e-10", "dtypes", "frozen, tied"])
def test_collectors_agree_in_all_they_say(case):
    model = CASES[case]
    theirs, ours = GradientCollector().collect(model), gm.collect_grads(model).materialize()
    error = rounding(grads_of(model).values())
    assert list(theirs["layer_norms"]) == list(ours.names)
    for name, norm in theirs["layer_norms"].items():
        assert same(norm, ours[name].norm, error)
    for key in ("min_norm", "max_norm", "zero_fraction"):
        assert same(theirs[key], getattr(ours, key), error), key
    assert same(theirs["norm_ratio"], ours.norm_ratio, 3 * error)
    assert (theirs["vanishing"], theirs["exploding"]) == (len(ours.vanishing), len(ours.exploding))
    assert (theirs["nan_count"], theirs["inf_count"]) == (ours.n_nan, ours.n_inf)
    assert theirs["health"] == pytest.approx(ours.health, rel=1e-15)


@pytest.mark.parametrize("case", CASES)
def test_the_two_collectors_are_one(case):
    collector = GradientCollector()
    sync = collector.collect(CASES[case])
    assert str(collector.materialize(collector.collect_async(CASES[case]))) == str(sync)


@st.composite
def models(draw):
    parts = draw(st.lists(st.tuples(st.integers(1, 300), st.sampled_from(FLOATS)), min_size=1, max_size=6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([1e-2, 1.0, 50.0]))
    grads = {}
    for i, (numel, dtype) in enumerate(parts):
        grad = torch.randn(numel, generator=generator) * scale
        # squares below the smallest fp16 number would lose more than rounding
        grad = grad.sign() * grad.abs().clamp(min=1e-2 * scale, max=4 * scale)
        grad[torch.rand(numel, generator=generator) < draw(st.sampled_from([0.0, 0.5]))] = 0.0
        grads[f"{'host' if i % 2 else 'seed'}.{i}"] = grad.to(dtype)
    return with_grads(grads)


@given(models())
def test_any_model_of_moderate_gradients_is_measured_alike(model):
    theirs, ours = GradientCollector().collect(model), gm.collect_grads(model).materialize()
    error = rounding(grads_of(model).values())
    assert same(home_grown.norm_by_item(model), ours.total_norm, error)
    assert same(theirs["total_norm"], ours.total_norm, error)
    assert all(same(norm, ours[name].norm, error) for name, norm in theirs["layer_norms"].items())
    assert same(theirs["zero_fraction"], ours.zero_fraction, 2.0**-23)
    ratio = home_grown.host_seed_ratio(model)["ratio"]
    grouped = gm.collect_grads(model).group({"host": r"^host\.", "seed": r"^seed\."})
    assert same(ratio, gm.group_ratio(grouped, "seed", "host").item(), 3 * error)


# where they are wrong


@pytest.mark.parametrize("way", NORMS)
def test_squares_of_1e20_overflow_in_fp32(way):
    model = CASES["1e20"]
    assert NORMS[way](model) == math.inf
    assert same(gm.grad_norm(model), math.sqrt(100 * 1e40 + 9 * 1e36), 2**-24)


def test_a_square_of_300_overflows_in_fp16():
    model = CASES["fp16, 300"]
    assert NORMS["norm_of_squares"](model) == math.inf
    # the norm fits, rounded to multiples of 32, also in between: this depends on the number of threads
    assert NORMS["norm_of_flat"](model) == pytest.approx(60000.0, abs=32)
    assert gm.grad_norm(model) == pytest.approx(300 * math.sqrt(40016), rel=NORM_BOUND)


# a sum of squares is added up in a tree, a norm sequentially
@pytest.mark.parametrize("way", sorted({*NORMS} - {"norm_of_squares"}))
def test_a_million_equal_elements_show_the_rounding_of_fp32(way):
    model = CASES["constant"]
    true = exact(*grads_of(model).values()).norm
    assert 1e-5 < abs(NORMS[way](model) / true - 1) < rounding(grads_of(model).values())
    assert same(gm.grad_norm(model), true)


@pytest.mark.parametrize("way", NORMS)
def test_squares_of_1e_25_are_zero_in_fp32(way):
    assert NORMS[way](CASES["tiny"]) == 0.0
    assert gm.grad_norm(CASES["tiny"]) == pytest.approx(1e-24, rel=2**-23)


def test_a_nan_passes_every_comparison():
    model = CASES["NaN"]
    theirs, ours = GradientCollector().collect(model), gm.collect_grads(model).materialize()
    assert home_grown.is_stable(model)
    assert (theirs["exploding"], theirs["health"]) == (0, 1.0)
    assert math.isfinite(theirs["min_norm"])
    assert math.isfinite(theirs["max_norm"])
    assert (ours.nan, ours.exploding, ours.health) == (["host.w"], ["host.w"], 0.0)
    assert math.isnan(ours.min_norm)
    assert math.isnan(ours.max_norm)
    assert not ours.is_healthy


def test_max_of_python_says_another_thing_when_the_nan_comes_first():
    a, b = torch.tensor([math.nan]), torch.tensor([3.0])
    first = GradientCollector().collect(with_grads({"a": a, "b": b}))
    last = GradientCollector().collect(with_grads({"b": b, "a": a}))
    assert math.isnan(first["max_norm"])
    assert last["max_norm"] == 3.0


def test_one_inf_is_a_third_of_three_layers_to_a_score():
    model = CASES["Inf"]
    assert GradientCollector().collect(model)["health"] == pytest.approx(1 - 0.8 / 3)
    assert gm.collect_grads(model).materialize().health == 0.0


def test_a_layer_without_elements_is_no_vanishing_one():
    model = CASES["zero elements"]
    theirs, ours = GradientCollector().collect(model), gm.collect_grads(model).materialize()
    assert (theirs["vanishing"], theirs["min_norm"]) == (1, 0.0)
    assert (ours.vanishing, ours.health) == ([], 1.0)
    assert ours.min_norm == ours["seed.w"].norm
    with pytest.raises(RuntimeError, match="reduction dim"):
        home_grown.stability_issues(model)
    assert not check_finite(model).has_issues


def test_nothing_to_measure_has_many_types():
    model = CASES["no gradient"]
    assert home_grown.norm_of_squares([]) is None
    assert home_grown.norm_of_squares(model.parameters()) == 0.0
    assert isinstance(home_grown.norm_of_squares(CASES["random"].parameters()), torch.Tensor)
    assert set(GradientCollector().collect(model)) < set(GradientCollector().collect(CASES["random"]))
    for parameters in ([], model.parameters(), CASES["random"].parameters()):
        assert isinstance(gm.grad_norm(list(parameters)), float)
    empty, full = (gm.collect_grads(m).materialize() for m in (model, CASES["random"]))
    assert empty.to_dict().keys() == full.to_dict().keys()
    assert gm.grad_norm(model, empty=None) is None


@pytest.mark.parametrize(
    ("case", "theirs", "ours"),
    [
        # the host's norm is inf in fp32
        ("1e20", 0.0, 1e18 / 1e20),
        # rounded sums of a million and of a thousand elements
        ("constant", pytest.approx(1.0, abs=1e-3), 1.0),
        # below the floor in both
        ("1e15, 1e-10", 0.0, 0.0),
        ("no gradient", 0.0, 0.0),
        ("NaN", 0.0, math.nan),
        ("fp16, 300", 1.0, 1.0),
    ],
)
def test_ratios_of_host_and_seed(case, theirs, ours):
    assert home_grown.host_seed_ratio(CASES[case])["ratio"] == theirs
    grouped = gm.collect_grads(CASES[case]).group({"host": r"^host\.", "seed": r"^seed\."})
    assert gm.group_ratio(grouped, "seed", "host").item() == pytest.approx(ours, rel=1e-6, nan_ok=True)


def test_a_clip_by_an_overflowed_norm_makes_zeros_of_finite_gradients():
    theirs, ours = (home_grown.cases()["1e20"] for _ in range(2))
    assert torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0) == math.inf
    assert all((grad == 0).all() for grad in grads_of(theirs).values())
    clip_grad_norm_(ours.parameters(), 1.0)
    assert gm.grad_norm(ours) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("case", ["random", "NaN", "Inf", "dtypes", "frozen, tied"])
def test_stability_checks_name_the_same_tensors(case):
    model, loss = CASES[case], torch.tensor(math.inf)
    issues = home_grown.stability_issues(model, loss)
    found = check_finite(model, loss)
    for word, names in (("NaN", found.nan_grads), ("Inf", found.inf_grads)):
        assert [f"{word} in gradient {name}" for name in names] == [
            issue for issue in issues if issue.startswith(f"{word} in gradient")
        ]
    assert (found.nan_weights, found.inf_weights) == ([], [])
    assert "Inf in loss" in issues
    assert not found.loss_is_finite


def test_a_moving_average_is_lost_at_the_first_nan():
    theirs, ours = MovingAverage(decay=0.9), EMA(decay=0.9)
    for x in (2.0, 2.0, math.nan, 2.0):
        theirs.update(x)
        mean, drift = ours(torch.tensor(x))
    assert math.isnan(theirs.mean)
    assert math.isnan(theirs.drift)
    assert (mean, drift) == (2.0, 0.0)


def test_a_moving_average_that_begins_at_its_first_value_stays_near_it():
    theirs, ours = MovingAverage(decay=0.9), EMA(decay=0.9)
    values = [10.0, *[1.0] * 9]
    for x in values:
        theirs.update(x)
        mean, _ = ours(torch.tensor(x))
    # the weight of the first of ten values
    assert theirs.mean == pytest.approx(1 + 9 * 0.9**9)
    assert mean == pytest.approx(1 + 9 * 0.1 * 0.9**9 / (1 - 0.9**10))
