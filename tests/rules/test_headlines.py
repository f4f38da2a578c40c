"""Headlines: one cause, one line, and the earliest cause first."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradiometer.recorder import Roster, StepRecord
from gradiometer.rules import Finding, LearningRate, LossSpike, Severity, headlines

ROSTER = Roster(("w",), ((2,),), ("float32",))


def finding(rule, step, tensor=None, *, severity=Severity.WARNING, last=None, kind="grads", value=1.0):
    last = step if last is None else last
    text = f"{rule} of {tensor} at {step}"
    return Finding(rule, severity, step, last, kind, tensor, value, 0.5, text, f"advice of {rule}")


def test_findings_of_one_rule_that_begin_together_are_one_headline():
    found = [finding("dead", 68 + i // 2, f"blocks.{i}.weight", last=200) for i in range(5)]
    later = finding("dead", 150, "head.weight", last=200)
    first, second = headlines([later, *found])
    assert first.findings == tuple(found)
    assert (first.first_step, first.last_step, first.severity) == (68, 200, Severity.WARNING)
    assert first.message.startswith(
        "5 tensors, blocks.0.weight, blocks.1.weight, blocks.2.weight and 2 more; "
    )
    assert second.findings == (later,)


def test_a_diverged_run_has_its_cause_first_and_few_headlines():
    rules = ["loss_spike", "norm_spike", "exploding", "update_spike", "vanishing", "dead", "imbalance"]
    found = [finding(rule, 121 + i, f"l.{i}.w") for i, rule in enumerate(rules * 3)]
    found += [finding("nonfinite", 125, "w", severity=Severity.ERROR, last=400)]
    cause = finding("learning_rate", 120, kind=None)
    (headline,) = headlines([*found, cause])
    assert headline.findings == (cause,)
    assert len(headline.explained) == len(found)
    assert headline.severity == Severity.ERROR
    assert str(headline) == ("error    step 120: learning_rate of None at 120 (explains 22 later findings)")
    # without the cause, the loss is the first to leave its course
    assert [one.rule for one in headlines(found)] == ["loss_spike"]


def test_of_two_causes_the_nearer_one_explains():
    skipped, jump = finding("nonfinite", 100, "w"), finding("learning_rate", 134, kind=None)
    spike, late = finding("loss_spike", 135), finding("nonfinite", 160)
    first, second = headlines([skipped, jump, spike, late])
    assert (first.rule, first.explained) == ("nonfinite", ())
    assert (second.rule, second.explained) == ("learning_rate", (spike, late))


def test_of_one_step_the_loss_comes_before_its_gradients_and_these_before_the_update():
    found = [finding(rule, 50) for rule in ("update_spike", "exploding", "norm_spike", "loss_spike")]
    (headline,) = headlines(found)
    assert headline.rule == "loss_spike"
    assert [one.rule for one in headline.explained] == ["norm_spike", "exploding", "update_spike"]


def test_an_info_explains_no_warning_and_comes_last():
    info = finding("exploding", 10, "w", severity=Severity.INFO)
    bad = finding("nonfinite", 50, "w", severity=Severity.ERROR)
    assert [one.rule for one in headlines([info, bad])] == ["nonfinite", "exploding"]
    jump = finding("learning_rate", 10, severity=Severity.INFO, kind=None)
    (headline,) = headlines([jump, bad])
    assert (headline.rule, headline.severity) == ("learning_rate", Severity.ERROR)


def test_findings_long_after_a_cause_and_those_of_custom_rules_stand_alone():
    spike, late = finding("loss_spike", 50), finding("dead", 151)
    assert [one.rule for one in headlines([spike, late])] == ["loss_spike", "dead"]
    assert [one.rule for one in headlines([spike, finding("mine", 50), finding("mine", 51)])] == [
        *("loss_spike", "mine", "mine")
    ]


RULES = ("loss_spike", "learning_rate", "nonfinite", "dead", "no_gradients", "update_ratio", "mine")


@given(
    st.lists(
        st.builds(
            finding,
            st.sampled_from(RULES),
            st.integers(0, 300),
            st.sampled_from([None, "a", "b"]),
            severity=st.sampled_from(list(Severity)),
        ),
        max_size=20,
    )
)
def test_every_finding_is_in_exactly_one_headline(found):
    made = headlines(found)
    inside = [one for headline in made for one in (*headline.findings, *headline.explained)]
    assert sorted(inside, key=repr) == sorted(found, key=repr)
    bad = [headline.severity >= Severity.WARNING for headline in made]
    assert bad == sorted(bad, reverse=True)
    for part in (True, False):
        steps = [headline.first_step for headline, is_bad in zip(made, bad, strict=True) if is_bad == part]
        assert steps == sorted(steps)


def of_losses(losses):
    rule = LossSpike()
    records = (StepRecord(step, 0.0, {"loss": loss}, ROSTER, None) for step, loss in enumerate(losses))
    return [one for record in records for one in rule.check(record) if one.severity > Severity.INFO]


@pytest.mark.parametrize("tau", [3, 8, 15])
def test_jumps_of_the_loss_are_found_from_step_20_on_and_descents_are_quiet(tau):
    jumps = {40: 6.3, 100: 6.3, 200: 6.3, 300: 4.7}
    for seed in range(20):
        numbers = random.Random(seed)  # noqa: S311 no secret
        # 2.6 with a deviation of 0.15, within 3 deviations, after a descent from 11
        noise = [max(-0.45, min(0.45, numbers.gauss(0.0, 0.15))) for _ in range(400)]
        losses = [2.6 + 8.4 * math.exp(-step / tau) + noise[step] for step in range(400)]
        assert of_losses(losses) == []
        spiked = [jumps.get(step, loss) for step, loss in enumerate(losses)]
        assert [one.first_step for one in of_losses(spiked)] == list(jumps), seed


def test_a_slow_descent_and_a_loss_of_single_examples_are_quiet():
    for seed in range(10):
        numbers = random.Random(seed)  # noqa: S311 no secret
        slow = [11.0 - step / 40 + numbers.gauss(0.0, 0.1) for step in range(400)]
        assert of_losses(slow) == []
        # the logarithms of heavy-tailed losses are nearly normal
        heavy = [math.exp(numbers.gauss(0.0, 0.7)) for _ in range(400)]
        assert of_losses(heavy) == []


def rates(values, name="lr"):
    rule = LearningRate()
    records = (StepRecord(step, 0.0, {name: value}, ROSTER, None) for step, value in enumerate(values))
    return [one for record in records for one in rule.check(record)]


@pytest.mark.parametrize(
    "values",
    [
        [1e-3 * min(1.0, (step + 1) / 1000) for step in range(1200)],
        [1e-3 * step / 50 for step in range(50)] + [1e-3 * (1 - step / 100) for step in range(101)],
        [5e-4 * (1 + math.cos(math.pi * (step % 50) / 50)) for step in range(200)],
        [1e-4] * 50 + [4e-4] * 50,
        [0.0] + [1e-3] * 50 + [0.0],
        [1e-3] * 2,
    ],
    ids=["warm-up", "linear to 0", "restarts", "a higher level", "0 at both ends", "short"],
)
def test_usual_schedules_are_quiet(values):
    assert rates(values) == []


def test_a_jump_of_the_rate_is_reported_at_its_step_and_for_a_while():
    (found,) = rates([1e-3] * 120 + [1.0] + [1e-3] * 20)
    assert (found.first_step, found.value, found.severity) == (120, 1.0, Severity.WARNING)
    assert found.message == "lr was 1 at step 120, usually 0.001 at most"
    assert [one.first_step for one in rates([1e-3] * 50 + [0.1] * 50)] == list(range(50, 60))
    (info,) = rates([1e-3] * 50 + [8e-3] + [1e-3] * 9)
    assert info.severity == Severity.INFO


def test_a_rate_of_0_or_no_number_is_named_for_every_scalar_that_is_a_rate():
    found = rates([1e-3] * 60 + [0.0] * 12, "lr/encoder")
    assert {(one.first_step, one.tensor) for one in found} == {(60, "lr/encoder")}
    assert found[0].message.startswith("lr/encoder has fallen to 0 at step 60 (before, 0.001)")
    assert [one.message for one in rates([math.nan, -1.0])] == [
        "lr is nan, which is not a learning rate",
        "lr is -1, which is not a learning rate",
    ]
    # other scalars
    assert rates([1.0] * 50 + [1000.0], "color") == []
