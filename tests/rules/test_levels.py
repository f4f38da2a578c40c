"""Losses at chance level, losses and norms that stay high, and gradients that fade."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.rules import ChanceLevel, FadingGradients, StaysHigh
from support.losses import HEALTHY


def run(rule, losses, norms=None, classes=8):
    """Give a rule losses and gradient norms; return its findings."""
    torch.manual_seed(0)
    model = nn.Linear(4, classes, bias=False)
    with gm.Monitor(model, rules=[rule]) as monitor:
        for step, loss in enumerate(losses):
            model.weight.grad = torch.zeros_like(model.weight)
            model.weight.grad[0, 0] = 1.0 if norms is None else norms[step]
            monitor.record()
            monitor.advance(loss=loss)
    assert monitor.failures == {}
    return monitor.findings


def noisy(values, share=0.02):
    """Multiply values by noise."""
    noise = torch.randn(len(values), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return [float(value * math.exp(share * x)) for value, x in zip(values, noise, strict=True)]


GUESS = math.log(8)


def test_a_loss_that_stays_at_chance_level_is_found_with_the_number_of_classes():
    (found,) = run(ChanceLevel(), noisy([GUESS] * 200))
    assert found.severity == gm.Severity.WARNING
    assert found.first_step == 19 + 99
    assert "since step 19" in found.message
    assert "among 8 classes is log(8) = 2.08" in found.message


def test_a_loss_that_rises_above_chance_level_is_found():
    (found,) = run(ChanceLevel(), noisy([GUESS * (1.0 + step / 20) for step in range(200)]))
    assert "the loss has risen to 2" in found.message
    # but not if it did not begin as that of a classifier
    assert run(ChanceLevel(), [GUESS * (0.1 + step / 20) for step in range(200)]) == []


@pytest.mark.parametrize(
    "losses",
    [
        [GUESS] * 110,
        [GUESS * 0.995**step for step in range(300)],
        [GUESS * (1 - 1e-3 * step) for step in range(50)] + [GUESS * 0.9] * 200,
        [1.6 * GUESS] * 200,
        [None] * 200,
        [math.nan] * 200,
    ],
    ids=["short", "falling", "below", "above", "none", "nan"],
)
def test_other_losses_are_not_at_chance_level(losses):
    assert run(ChanceLevel(), losses) == []


def test_few_classes_have_no_chance_level_and_many_need_more_steps():
    assert run(ChanceLevel(), [math.log(2)] * 200, classes=2) == []
    assert run(ChanceLevel(), [math.log(500)] * 400, classes=500) == []
    assert len(run(ChanceLevel(), [math.log(500)] * 600, classes=500)) == 1


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("growth", [1.05, 1000.0])
def test_a_loss_that_rises_and_stays_is_found_at_any_scale(scale, growth):
    low, high = (
        [scale] * 50,
        [scale * min(growth ** min(step, 200 if growth < 2 else 2), 5e3) for step in range(300)],
    )
    (found,) = run(StaysHigh(), noisy(low + high))
    assert found.kind is None
    assert "the loss stays near" in found.message
    assert " times its lowest level" in found.message
    assert 50 < found.first_step < 250


def test_a_norm_that_rises_and_stays_is_found_with_a_constant_loss():
    (found,) = run(StaysHigh(), [1.0] * 200, noisy([1.0] * 60 + [1e4] * 140))
    assert "the total gradient norm stays near" in found.message
    assert found.kind == "grads"


@pytest.mark.parametrize(
    ("losses", "norms"),
    [
        # learned by heart, and noisy there
        ([0.9**step for step in range(150)] + [1e-3] * 150, None),
        # a spike
        ([1e-3] * 100 + [10.0] * 30 + [1e-3] * 100, None),
        # converged, and the next task
        ([1.0] * 400, [0.95**step for step in range(200)] + [1.0] * 200),
        ([0.0] * 300, [0.0] * 300),
    ],
    ids=["memorized", "spike", "next task", "zero"],
)
def test_levels_of_healthy_runs_do_not_stay_high(losses, norms):
    assert run(StaysHigh(), losses, norms) == []


@pytest.mark.parametrize("kind", sorted(HEALTHY))
@pytest.mark.parametrize("rule", [ChanceLevel, StaysHigh])
def test_healthy_losses_have_no_finding(kind, rule):
    losses = list(itertools.islice(HEALTHY[kind](random.Random(1)), 400))  # noqa: S311
    assert run(rule(), losses) == []


def test_gradients_that_fade_while_the_loss_does_not_fall_are_found():
    norms = [max(0.9**step, 1e-6) for step in range(200)]
    (found,) = run(FadingGradients(), noisy([2.0] * 200), norms)
    assert "the loss has not fallen meanwhile" in found.message
    # also while the loss rises
    assert len(run(FadingGradients(), [2.0 + step / 100 for step in range(200)], norms)) == 1


def test_gradients_that_fade_because_the_loss_has_fallen_are_healthy():
    norms = [max(0.9**step, 1e-6) for step in range(200)]
    assert run(FadingGradients(), [0.25 + 0.9**step for step in range(200)], norms) == []
    assert run(FadingGradients(), [2.0] * 200, [max(0.97**step, 2e-3) for step in range(200)]) == []


@pytest.mark.parametrize("rule", [ChanceLevel, StaysHigh, FadingGradients])
def test_a_restored_history_finds_the_same(rule):
    losses = noisy([GUESS] * 150) if rule is ChanceLevel else [1e-4] * 60 + [1.0] * 140
    norms = None
    if rule is FadingGradients:
        losses, norms = [2.0] * 200, [max(0.9**step, 1e-6) for step in range(200)]
    whole = run(rule(), losses, norms)

    class Restored(rule):
        def check(self, record):
            other = rule()
            other.load_state_dict(self.state_dict())
            self.load_state_dict(other.state_dict())
            return super().check(record)

    assert len(whole) == 1
    assert run(Restored(), losses, norms) == whole
