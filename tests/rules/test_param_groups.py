"""Param groups whose learning rates or weight decays do not fit each other."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

import gradiometer as gm
from gradiometer.rules import DecayedNorms, GroupRates, LearningRate, NotUpdated, Severity, headlines


class Decay:
    """Multiplies the rates of the groups that it was created with, as older schedulers of PyTorch."""

    def __init__(self, optimizer):
        self.groups = list(optimizer.param_groups)
        for group in self.groups:
            group["initial_lr"] = group["lr"]

    def step(self):
        for group in self.groups:
            group["lr"] *= 0.95


def train(rates, *, schedule=None, steps=60, added=None, rate_of=None, rules=None, **options):
    """Train a layer for each rate; ``added``: the step at which another group is added."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(len(rates) + (added is not None))])
    groups = [{"params": list(model[i].parameters()), "lr": rate} for i, rate in enumerate(rates)]
    optimizer = torch.optim.Adam(groups)
    schedule = None if schedule is None else schedule(optimizer)
    rules = [GroupRates()] if rules is None else rules
    with gm.watch(model, optimizer, rules=rules, **options) as monitor:
        for step in range(steps):
            if step == added:
                optimizer.add_param_group({"params": list(model[-1].parameters()), "lr": 1e-3})
            if rate_of is not None:
                for group, rate in zip(optimizer.param_groups, rate_of(step), strict=False):
                    group["lr"] = rate
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
    assert monitor.failures == {}
    return monitor.findings


HEALTHY = {
    "one rate": [1e-3, 1e-3],
    "lora+": [1e-4, 16e-4],
    "head": [1e-5, 1e-3],
    "muP": [1e-2, 1e-2 / 64],
    "layer by layer": [1e-3 * 0.5**i for i in range(16)],
    "gaussian splatting": [1.6e-6, 1.25e-4, 1e-3, 2.5e-3, 5e-3, 0.05],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_rates_in_use_are_quiet(name):
    assert train(HEALTHY[name]) == []
    assert train(HEALTHY[name], schedule=lambda o: CosineAnnealingLR(o, 60), weights=True) == []


def test_a_rate_far_from_the_others():
    (found,) = train([1e-3, 1e-8])
    assert (found.rule, found.severity, found.tensor) == ("group_lr", Severity.WARNING, "1.weight")
    assert "the param group of 1 (2 tensors) is 1e-08 at most" in found.message
    assert "that of the param group of 0 (2 tensors) 0.001, 100,000 times as high" in found.message
    (found,) = train([1e-3, 4e-7, 5e-4])
    assert (found.severity, found.tensor) == (Severity.INFO, "1.weight")
    # a number as text, as of a YAML file without a point, is a number
    (found,) = train([1e-3, 1e-3], rate_of=lambda _: (1e-3, torch.tensor(1e-8)))
    assert found.severity == Severity.WARNING


def test_a_warm_up_of_one_group_is_quiet():
    assert train([1e-2, 0.0], rate_of=lambda step: (1e-2, 1e-8 * (step + 1)), weights=True) == []
    assert train([1e-2, 0.0], rate_of=lambda step: (1e-2, 1e-9 * 1.5**step), weights=True) == []


def test_a_schedule_that_ends_at_nothing_is_quiet():
    def rate_of(step):
        return 1e-3, 1e-3 * 0.7**step

    found = train([1e-3, 1e-3], rate_of=rate_of)
    assert {x.severity for x in found} <= {Severity.INFO}


def test_a_group_that_was_added_after_the_scheduler():
    def schedule(optimizer):
        return Decay(optimizer)

    (found,) = train([1e-3], schedule=schedule, added=10)
    assert (found.severity, found.tensor, found.first_step) == (Severity.WARNING, "1.weight", 10)
    assert "stays 0.001, while that of the param group of 0 (2 tensors) has fallen from " in found.message
    assert "added after the scheduler was created" in found.message
    # one that is known to it
    assert train([1e-3, 1e-3], schedule=schedule) == []
    # this one multiplies the rates of all groups
    assert train([1e-3], schedule=lambda optimizer: CosineAnnealingLR(optimizer, 60), added=10) == []


def test_a_schedule_of_one_group_alone_is_info():
    def schedule(optimizer):
        return LambdaLR(optimizer, [lambda step: 0.9**step, lambda _: 1.0])

    (found,) = train([1e-3, 1e-3], schedule=schedule)
    assert (found.severity, found.tensor) == (Severity.INFO, "1.weight")


def test_a_rate_of_0_is_info_and_told_once():
    (found,) = train([1e-3, 0.0])
    assert (found.severity, found.tensor, found.value) == (Severity.INFO, "1.weight", 0.0)
    rules = [GroupRates(), NotUpdated(), LearningRate()]
    found = train([1e-3, 0.0], rules=rules, weights=True)
    assert [x.rule for x in found] == ["not_updated"]


def test_frozen_groups_do_not_count():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(requires_grad=False)
    groups = [{"params": model[0].parameters(), "lr": 1e-9}, {"params": model[1].parameters(), "lr": 1e-2}]
    optimizer = torch.optim.Adam(groups)
    with gm.watch(model, optimizer, rules=[GroupRates()]) as monitor:
        for _ in range(40):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    assert monitor.findings == []


def test_it_explains_updates_that_are_lost():
    found = train([1e-2, 1e-30], rules=[GroupRates(), NotUpdated()], weights=True)
    assert {x.rule for x in found} == {"group_lr", "not_updated"}
    (first,) = headlines(found)
    assert first.rule == "group_lr"


def test_norms_with_weight_decay_beside_biases_without():
    def found(split):
        model = nn.ModuleDict({"ln_1": nn.LayerNorm(4), "fc": nn.Linear(4, 4), "bn": nn.BatchNorm1d(4)})
        spared = [p for name, p in model.named_parameters() if split(name)]
        others = [p for name, p in model.named_parameters() if not split(name)]
        groups = [{"params": others, "weight_decay": 0.1}]
        groups += [{"params": spared, "weight_decay": 0.0}] if spared else []
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        with gm.watch(model, optimizer, rules=[DecayedNorms()]) as monitor:
            for _ in range(3):
                model["bn"](model["fc"](model["ln_1"](torch.randn(8, 4)))).square().mean().backward()
                optimizer.step()
        return monitor.findings

    (only,) = found(lambda name: "bias" in name or "LayerNorm" in name)
    assert (only.rule, only.severity, only.count) == ("decayed_norms", Severity.INFO, 1)
    assert (
        "ln_1.weight, bn.weight (2 tensors): scales or shifts of norms have weight decay 0.1" in only.message
    )
    assert found(lambda name: "bias" in name or "ln" in name or "bn" in name) == []
    # all of them, as for convolutional networks
    assert found(lambda _: False) == []


def test_its_history_is_saved():
    rule = GroupRates()
    train([1e-3, 1e-8], rules=[rule], steps=30)
    other = GroupRates()
    other.load_state_dict(rule.state_dict())
    assert torch.equal(other.steady, rule.steady)
    with pytest.raises(ValueError, match="highest"):
        other.load_state_dict(rule.state_dict() | {"highest": torch.zeros(1)})
