"""Buffers that are not finite, and parameters that cross 0."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.recorder import Catalog, ModelState, ModelValues, StepRecord
from gradiometer.rules import CrossedZero, NonFiniteBuffer, Severity, headlines

CATALOG = Catalog.of(("std",), ((2,),), ("float32",))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.register_buffer("mask", torch.full((3,), -torch.inf))
        self.register_buffer("position", torch.arange(4.0), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return self.head(self.norm(self.body(x)).relu())


def train(model, before=lambda _: None, steps=40, rules=None, lr=0.01):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with gm.watch(model, optimizer, rules=rules) as monitor:
        for step in range(steps):
            before(step)
            loss = model(torch.randn(16, 4)).square().mean()
            loss.backward()
            monitor.note(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    return monitor


@pytest.mark.parametrize(
    ("name", "value", "text"), [("norm.running_var", torch.nan, "NaN"), ("position", torch.inf, "Inf")]
)
def test_a_buffer_that_is_not_finite_is_named(name, value, text):
    model = Normed()

    def before(step):
        if step == 18:
            model.get_buffer(name)[1] = value

    (found,) = train(model, before, rules=[NonFiniteBuffer()]).findings
    assert (found.rule, found.tensor, found.severity) == ("nonfinite_buffer", name, Severity.WARNING)
    assert found.message.startswith(f"{name} holds {text} since step ")
    assert 18 <= found.first_step < 18 + 9
    assert found.last_step == 39


def test_finite_buffers_and_masks_of_inf_are_quiet():
    assert train(Normed(), rules=[NonFiniteBuffer()]).findings == []


class Policy(nn.Module):
    def __init__(self, name, value):
        super().__init__()
        self.mean, self.name = nn.Linear(4, 2), name
        self.register_parameter(name, nn.Parameter(torch.full((2,), value)))

    def forward(self, x):
        return self.mean(x) + 2.0 + getattr(self, self.name)


@pytest.mark.parametrize("name", ["std", "action_std", "log_std", "weight_sigma", "weight"])
def test_a_standard_deviation_that_falls_through_0_is_found_and_other_parameters_are_not(name):
    model = Policy(name, 1.0)
    monitor = train(model, rules=[CrossedZero()], lr=0.05)
    assert float(model.get_parameter(name).detach().min()) < 0
    found = monitor.findings
    assert [one.tensor for one in found] == (
        [name] if name.endswith(("n_std", "std")) and "log" not in name else []
    )
    assert all("has crossed 0" in one.message for one in found)


def test_one_that_stays_positive_is_quiet():
    model = Policy("std", 1.0)
    assert train(model, rules=[CrossedZero()], lr=1e-3).findings == []
    assert 0 < float(model.std.detach().min()) < 1


def steps_of(values):
    rule, found = CrossedZero(), []
    for step, value in enumerate(values):
        state = ModelState((True,), values=ModelValues(step, (), (("std", 1.0, value),)))
        found += rule.check(StepRecord(step, 0.0, {}, CATALOG, model=state))
    return found


def test_it_is_found_before_it_crosses_unless_its_fall_slows_down():
    found = steps_of([1.0 - step / 32 for step in range(40)])
    assert found[0].last_step == 29
    assert found[0].message == (
        "std is about to cross 0: its least element was 1 at the start, and has fallen to 0.0938, by "
        "0.031 in a step"
    )
    assert steps_of([0.02 + 0.98 * 0.9**step for step in range(200)]) == []


def test_it_explains_what_follows():
    crossed = steps_of([0.5, -0.1])
    assert crossed[0].severity is Severity.WARNING
    later = gm.rules.Finding(
        "exploding", Severity.WARNING, 4, 4, "grads", "mean.weight", 1e9, 1e3, "norm", ""
    )
    (head,) = headlines([*crossed, later])
    assert (head.rule, head.explained) == ("crossed_zero", (later,))
