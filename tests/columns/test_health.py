"""The health of a step, on the device and in the report: the same values, by the obvious formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradiometer as gm
from gradiometer.columns.health import HEALTH

VALUES = st.sampled_from([0.0, 1e-12, 1e-9, 0.5, 3.0, 99.0, 1e4, 1e20, math.nan, math.inf, -math.inf])
TENSORS = st.lists(st.lists(VALUES, max_size=4).map(torch.tensor), max_size=6)
# columns that have another name in the report
REPORTED = {"total_zero_fraction": "zero_fraction", "total_n_nan": "n_nan", "total_n_inf": "n_inf"}


def norm_of(tensor):
    values = tensor.double().tolist()
    if any(math.isnan(x) for x in values):
        return math.nan
    return math.sqrt(math.fsum(x * x for x in values))


def expected_of(tensors):
    """Compute every value from Python lists, without tensors."""
    count = len(tensors)
    norms = [norm_of(x) for x in tensors]
    filled = [norm for norm, x in zip(norms, tensors, strict=True) if len(x)]
    everything = [value for x in tensors for value in x.tolist()]
    n_nan, n_inf = sum(map(math.isnan, everything)), sum(map(math.isinf, everything))
    vanishing = sum(norm < 1e-7 for norm in filled)
    exploding = sum(not norm <= 100.0 for norm in norms)
    has_nan = any(map(math.isnan, norms))
    least = math.nan if has_nan else min(filled, default=0.0)
    most = math.nan if has_nan else max(norms, default=0.0)
    ratio = math.nan if has_nan or least == most == math.inf else most / max(least, 1e-10)
    total = math.inf if n_inf else math.sqrt(math.fsum(x * x for x in everything if math.isfinite(x)))
    zeros = sum(x == 0 for x in everything) / max(len(everything), 1)
    health = 1.0 - (0.5 * vanishing + 0.8 * exploding) / max(count, 1)
    return {
        "health": 0.0 if n_nan + n_inf else min(max(health, 0.0), 1.0),
        "has_vanishing": vanishing > 0,
        "has_exploding": exploding > 0,
        "min_norm": least,
        "max_norm": most,
        "norm_ratio": ratio,
        "is_healthy": n_nan + n_inf == 0 and ratio < 1000 and zeros < 0.5 and exploding == 0,
        "total_norm": math.nan if n_nan else total,
        "total_zero_fraction": zeros,
        "total_n_nan": n_nan,
        "total_n_inf": n_inf,
    }


@given(TENSORS)
def test_health_is_what_its_formulas_say_on_the_device_and_in_the_report(tensors):
    stats = gm.collect(tensors)
    report, expected = stats.materialize(), expected_of(tensors)
    assert set(expected) == set(HEALTH)
    for name, value in expected.items():
        on_device, reported = getattr(stats, name), getattr(report, REPORTED.get(name, name))
        assert on_device.shape == ()
        assert on_device.dtype == (torch.bool if isinstance(value, bool) else torch.float64), name
        assert type(reported) is type(value), name
        # norms and fractions may differ by a few roundings
        assert reported == pytest.approx(value, rel=1e-14, abs=1e-300, nan_ok=True), name
        assert on_device.item() == pytest.approx(float(reported), rel=0, abs=0, nan_ok=True), name


def test_with_no_tensors_every_value_has_its_type_and_none_alarms():
    report = gm.collect_grads(torch.nn.Linear(2, 1)).materialize()
    assert (report.measured, report.skipped) == (False, False)
    assert report.health_score(vanishing=9.0) == 1.0
    measured = gm.collect([torch.ones(1)]).materialize().to_dict()
    empty = report.to_dict()
    assert {key: type(value) for key, value in empty.items()} == {
        key: type(value) for key, value in measured.items()
    }


def test_a_tensor_without_elements_is_not_the_smallest():
    report = gm.collect([torch.empty(0), torch.full((4,), 2.0)]).materialize()
    assert (report.min_norm, report.max_norm, report.norm_ratio, report.is_healthy) == (4.0, 4.0, 1.0, True)


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ([[1.0], [1000.0 / 1.001]], "exploding"),
        ([[1e-3], [1.0]], "ratio"),
        ([[0.0, 1.0]], "zeros"),
        ([[1.0, math.nan]], "nan"),
        ([[1.0, -math.inf]], "inf"),
    ],
)
def test_each_condition_of_a_healthy_step_counts(tensors, why):
    thresholds = gm.Thresholds(exploding=100.0 if why == "exploding" else 1e9)
    stats = gm.collect(
        [torch.tensor(values, dtype=torch.float64) for values in tensors], thresholds=thresholds
    )
    assert not stats.is_healthy
    assert stats.materialize().is_healthy is False


def test_just_inside_of_each_condition_a_step_is_healthy():
    inside = [[1e-3, 1.0 / 3.0], [0.0, 99.0, 1.0]]
    assert gm.collect([torch.tensor(values) for values in inside]).is_healthy


LIMITS = (
    ({}, True),
    ({"norm_ratio": 3.0}, True),
    ({"norm_ratio": 2.9}, False),
    ({"zero_fraction": 0.25}, False),
    ({"zero_fraction": 0.26}, True),
    ({"norm_ratio": 3, "zero_fraction": math.inf}, True),
    ({"norm_ratio": math.inf, "zero_fraction": 0}, False),
)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_limits_of_a_healthy_step_can_be_chosen(compiled):
    # norms of 2 and 5.9, and two of eight elements are 0
    tensors = [torch.full((4,), 1.0), torch.tensor([0.0, 0.0, 5.9, 0.1])]

    def decide(tensors, limits):
        return gm.collect(tensors).is_healthy_within(**limits)

    function = torch.compile(decide, fullgraph=True, backend="aot_eager") if compiled else decide
    for limits, expected in LIMITS:
        found = function(tensors, limits)
        assert (found.dtype, found.shape, found.item()) == (torch.bool, (), expected)
        assert gm.collect(tensors).materialize().is_healthy_within(**limits) is expected
    # NaN, Inf and exploding tensors are unhealthy whatever the limits
    for bad in (math.nan, math.inf, 1e9):
        stats = gm.collect([torch.tensor([bad])])
        limits = {"norm_ratio": math.inf, "zero_fraction": math.inf}
        assert not function([torch.tensor([bad])], limits)
        assert stats.materialize().is_healthy_within(**limits) is False
    torch._dynamo.reset()


def test_a_nan_on_a_replica_that_is_not_counted_is_unhealthy():
    stats = gm.collect([torch.ones(3), torch.ones(2)])
    for flag in (gm.Flag.NAN, gm.Flag.INF):
        # as after a reduction: the flag and the rank are known, the columns are those of another replica
        flags, origin = torch.tensor([int(flag), 0], dtype=torch.int32), torch.tensor([1, -1])
        found = replace(stats, flags=flags, origin=origin)
        assert found.found_inf
        for one in (found, found.materialize()):
            assert not one.is_healthy
            assert float(one.health) == 0.0
    assert stats.is_healthy
    assert stats.health == 1.0


@pytest.mark.parametrize("limit", [-0.1, math.nan, "0.5", None])
@pytest.mark.parametrize("name", ["norm_ratio", "zero_fraction"])
def test_a_limit_that_is_none_is_refused(name, limit):
    stats = gm.collect([torch.ones(1)])
    for within in (stats.is_healthy_within, stats.materialize().is_healthy_within):
        with pytest.raises(ValueError, match=rf"^is_healthy_within: {name} must be a non-negative number"):
            within(**{name: limit})


def test_the_weights_of_health_can_be_chosen():
    tensors = [torch.ones(1), torch.tensor([1e-9]), torch.tensor([1e3]), torch.ones(2)]
    stats = gm.collect(tensors)
    for weights, expected in (
        ({}, 1.0 - 0.5 / 4 - 0.8 / 4),
        ({"vanishing": 0.0}, 1.0 - 0.8 / 4),
        ({"exploding": 0}, 1.0 - 0.5 / 4),
        ({"vanishing": 1.0, "exploding": 2.0}, 0.25),
        ({"vanishing": 100.0}, 0.0),
    ):
        assert stats.health_score(**weights).item() == pytest.approx(expected, rel=1e-15)
        assert stats.materialize().health_score(**weights) == stats.health_score(**weights).item()


@pytest.mark.parametrize("weight", [-0.1, math.nan, math.inf, "0.5", None])
@pytest.mark.parametrize("name", ["vanishing", "exploding"])
def test_a_weight_that_is_none_is_refused(name, weight):
    stats = gm.collect([torch.ones(1)])
    for health_score in (stats.health_score, stats.materialize().health_score):
        with pytest.raises(ValueError, match=rf"health_score\({name}=.*must be a finite non-negative number"):
            health_score(**{name: weight})


def test_an_overflow_of_float64_itself_is_no_health():
    stats = gm.collect([torch.full((2,), 1e200, dtype=torch.float64)])
    assert stats.total_norm.item() == math.inf
    assert (stats.health.item(), stats.materialize().health) == (0.0, 0.0)


def test_decisions_are_made_inside_a_compiled_step():
    def decide(x, y):
        stats = gm.collect({"x": x, "y": y}, skip_nonfinite=True)
        factor = torch.where(stats.is_healthy, stats.health, 0.0)
        return factor, {name: getattr(stats, name) for name in (*HEALTH, "skipped")}

    compiled = torch.compile(decide, fullgraph=True, backend="aot_eager")
    for x in (torch.ones(3), torch.full((3,), 1e9), torch.tensor([1.0, math.nan, 0.0])):
        for a, b in zip(
            torch.utils._pytree.tree_leaves(compiled(x, torch.ones(2))),
            torch.utils._pytree.tree_leaves(decide(x, torch.ones(2))),
            strict=True,
        ):
            assert torch.equal(a.nan_to_num(nan=-1.0), b.nan_to_num(nan=-1.0))
    torch._dynamo.reset()


# a step that is skipped


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_skipped_does_not_explode(compiled):
    tensors = {
        "inf": torch.tensor([math.inf, 1e9]),
        "nan": torch.tensor([math.nan]),
        "large": torch.full((4,), 1e3),
        "fine": torch.ones(1),
        "none": torch.empty(0),
    }

    def measure(tensors):
        return gm.collect(tensors, skip_nonfinite=True)

    stats = (torch.compile(measure, backend="aot_eager") if compiled else measure)(tensors)
    torch._dynamo.reset()
    report = stats.materialize()
    assert (stats.skipped.item(), report.skipped) == (True, True)
    assert (report.nan, report.inf, report.exploding) == (["nan"], ["inf"], ["large"])
    assert report.has_exploding is True
    assert "exploding" not in str(stats.group({"bad": "inf|nan"}).materialize())
    assert report.total_norm != report.total_norm  # NaN: nothing is hidden
    assert "step skipped: 1 with NaN, 1 with Inf, 1 exploding" in str(report)
    # without skipping, the same tensors explode
    plain = gm.collect(tensors).materialize()
    assert (plain.skipped, plain.exploding) == (False, ["inf", "nan", "large"])
    assert "skipped" not in str(plain)


def test_a_finite_step_is_not_skipped_and_its_flags_are_those_of_any():
    tensors = [torch.tensor([1e3]), torch.zeros(2), torch.ones(1)]
    stats, plain = gm.collect(tensors, skip_nonfinite=True), gm.collect(tensors)
    assert torch.equal(stats.flags, plain.flags)
    assert torch.equal(stats.columns, plain.columns)
    assert (stats.skipped.item(), stats.materialize().skipped) == (False, False)


def test_what_is_made_of_skipping_stats_skips_too():
    stats = gm.collect({"a.x": torch.tensor([math.nan]), "b.x": torch.ones(1)}, skip_nonfinite=True)
    leaves, structure = torch.utils._pytree.tree_flatten(stats)
    again = torch.utils._pytree.tree_unflatten(leaves, structure)
    for made in (stats.group({"all": ""}), stats.merge(stats), stats.by_module(1), again):
        report = made.materialize()
        assert (made.skip_nonfinite, report.skipped, report.exploding) == (True, True, [])
    modules = stats.materialize().by_module(1)
    assert [(report.skipped, report.exploding) for report in modules.values()] == [(True, []), (False, [])]


def test_a_skipped_step_of_scaled_gradients_by_collect_grads():
    model = torch.nn.Linear(1, 1)
    model(torch.tensor([[2.0]])).sum().backward()
    model.bias.grad.fill_(math.inf)
    report = gm.collect_grads(model, inv_scale=0.5, skip_nonfinite=True).materialize()
    assert (report.skipped, report.exploding, report.inf) == (True, [], ["bias"])
    assert report["weight"].norm == 1.0
