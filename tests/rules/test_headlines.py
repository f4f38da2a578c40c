"""Headlines: one cause, one line, and the earliest cause first."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradiometer.recorder import Catalog, StepRecord
from gradiometer.rules import Finding, LearningRate, LossSpike, Severity, headlines

CATALOG = Catalog.of(("w",), ((2,),), ("float32",))


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
    which = "5 tensors, blocks.0.weight, blocks.1.weight, blocks.2.weight and 2 more; "
    assert first.message.startswith(which)
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
    assert str(headline) == ("error    step 120: learning_rate of None at 120 (explains 22 other findings)")
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
    mine = [finding("mine", 50), finding("mine", 51)]
    assert [one.rule for one in headlines([spike, *mine])] == ["loss_spike", "mine", "mine"]


# cause, effect, and whether the cause explains it
INFO, WARNING = Severity.INFO, Severity.WARNING
PAIRS = [
    # a weight that starts at 0 and a frozen layer have nothing to do with one another, in one module or not
    (("initialization", "l.0.b.weight", INFO), ("no_gradient_flow", "l.0.base.weight", INFO), False),
    (("initialization", "l.0.b.weight", INFO), ("no_gradient_flow", "head.weight", WARNING), False),
    # what is only worth knowing of one tensor explains nothing elsewhere
    (("initialization", "l.0.b.weight", INFO), ("exploding", "head.weight", INFO), False),
    (("initialization", "l.0.b.weight", INFO), ("update_ratio", "l.0.b.weight", INFO), True),
    # a layer that is far too large upsets the whole model
    (("initialization", "l.0.b.weight", WARNING), ("exploding", "head.weight", WARNING), True),
    # a gradient that stops in one layer is missing before it, not behind it or in another branch
    (("dead", "body.4.weight", WARNING), ("vanishing", "body.2.weight", WARNING), True),
    (("dead", "body.4.weight", WARNING), ("vanishing", "body.6.weight", WARNING), False),
    (("dead_units", "conv2.out", WARNING), ("dead", "conv1.weight", WARNING), True),
    (("dead_units", "conv2.out", WARNING), ("dead", "conv2.weight", WARNING), True),
    (("dead_units", "encoder.out", WARNING), ("dead", "decoder.weight", WARNING), False),
    (("dead", "encoder.3.mlp.up.weight", WARNING), ("vanishing", "encoder.3.attn.q.weight", WARNING), True),
    (("dead", "policy.weight", WARNING), ("vanishing", "value.weight", WARNING), False),
    (("no_gradient_flow", "encoder.weight", INFO), ("dead", "head.weight", INFO), False),
    (("stuck", "encoder.weight", WARNING), ("update_ratio", "encoder.weight", INFO), True),
    (("stuck", "encoder.weight", WARNING), ("update_ratio", "head.weight", INFO), False),
    (("not_updated", "a.weight", INFO), ("accumulating", None, WARNING), False),
    # experts without tokens get no gradient; other frozen parts are not the router's fault
    (("collapsing_router", "moe.expert_load", WARNING), ("no_gradient_flow", "moe.experts.1.w", INFO), True),
    (("collapsing_router", "moe.expert_load", WARNING), ("no_gradient_flow", "embed.weight", INFO), False),
    # a NaN is no reason for a part that is detached from the first step on
    (("nonfinite", "head.weight", WARNING), ("no_gradient_flow", "encoder.weight", WARNING), False),
    (("nonfinite", "head.weight", WARNING), ("dead", "encoder.weight", WARNING), True),
]


@pytest.mark.parametrize(
    ("cause", "effect", "explains"), PAIRS, ids=[f"{a[0]}-{b[0]}-{i}" for i, (a, b, _) in enumerate(PAIRS)]
)
def test_a_finding_that_begins_with_another_is_explained_only_if_it_follows_from_it(cause, effect, explains):
    # both begin in step 10, or the effect in the next, if it is otherwise taken for the cause
    steps = 10, 10 + (cause[0] in {"dead", "collapsing_router"})
    pairs = zip((cause, effect), steps, strict=True)
    found = [finding(rule, step, tensor, severity=severity) for (rule, tensor, severity), step in pairs]
    first, *others = headlines(found)
    if explains:
        assert (first.findings, first.explained, others) == ((found[0],), (found[1],), [])
    else:
        assert {one.rule for one in (first, *others)} == {cause[0], effect[0]}
        assert not first.explained


def test_of_findings_that_began_together_a_cause_explains_those_that_are_related():
    dead = finding("dead", 10, "body.4.weight", last=20)
    before, behind = finding("vanishing", 12, "body.2.weight"), finding("vanishing", 12, "body.6.weight")
    first, second = headlines([dead, before, behind])
    assert (first.findings, first.explained) == ((dead,), (before,))
    assert (second.findings, second.explained) == ((behind,), ())


def test_a_learning_rate_of_0_explains_that_nothing_changes_and_no_spike():
    zero = finding("learning_rate", 10, kind=None, value=0.0)
    still, spike = finding("stuck", 12, "w"), finding("loss_spike", 13, kind=None)
    first, second = headlines([zero, still, spike])
    assert (first.explained, second.findings) == ((still,), (spike,))
    jump = finding("learning_rate", 10, kind=None, value=1.0)
    explained = {one.rule: one.explained for one in headlines([jump, still, spike])}
    assert explained == {"learning_rate": (spike,), "stuck": ()}


@pytest.mark.parametrize(
    ("last", "tensor", "explains"),
    [(12, "body.weight", False), (12, None, False), (12, "head.weight", True), (40, "body.weight", True)],
)
def test_a_nan_that_is_over_explains_nothing_of_how_other_tensors_are_set_up(last, tensor, explains):
    nan = finding("nonfinite", 12, "head.weight", last=last, severity=Severity.ERROR)
    for rule in ("no_gradient_flow", "not_updated"):
        first, *_ = headlines([nan, finding(rule, 25, tensor)])
        assert (first.rule, bool(first.explained)) == ("nonfinite", explains)


def test_updates_below_their_band_explain_nothing():
    below = finding("update_ratio", 10, "w", severity=INFO, value=0.1)
    assert all(not one.explained for one in headlines([below, finding("exploding", 10, "w", severity=INFO)]))


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
    records = (StepRecord(step, 0.0, {"loss": loss}, CATALOG) for step, loss in enumerate(losses))
    return [one for record in records for one in rule.check(record) if one.severity > Severity.INFO]


@pytest.mark.parametrize("tau", [3, 8, 15])
def test_jumps_of_the_loss_are_found_from_step_20_on_and_descents_are_quiet(tau):
    # each lasts 6 steps
    jumps = {40: 9.0, 100: 6.3, 200: 6.3, 300: 6.0}
    for seed in range(20):
        numbers = random.Random(seed)  # noqa: S311 no secret
        # 2.6 with a deviation of 0.15, within 3 deviations, after a descent from 11
        noise = [max(-0.45, min(0.45, numbers.gauss(0.0, 0.15))) for _ in range(400)]
        losses = [2.6 + 8.4 * math.exp(-step / tau) + noise[step] for step in range(400)]
        assert of_losses(losses) == []
        spiked = [jumps.get(step, loss) for step, loss in enumerate(losses)]
        # a single one may be a hard batch
        assert of_losses(spiked) == []
        for step, loss in jumps.items():
            spiked[step : step + 6] = [loss] * 6
        assert sorted({one.first_step for one in of_losses(spiked)}) == list(jumps), seed


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
    records = (StepRecord(step, 0.0, {name: value}, CATALOG) for step, value in enumerate(values))
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
    said = [f"lr is {value}, which is not a learning rate" for value in ("nan", "-1")]
    assert [one.message for one in rates([math.nan, -1.0])] == said
    # other scalars
    assert rates([1.0] * 50 + [1000.0], "color") == []
