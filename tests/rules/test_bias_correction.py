"""An Adam of one's own, with and without bias correction."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.rules import BiasCorrection, Severity


class Adam(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.999), *, corrects=False, weight_decay=0.0):
        options = {"lr": lr, "betas": betas, "corrects": corrects, "weight_decay": weight_decay}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            one, two = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                state["step"] += 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                mean = state["exp_avg"].lerp_(p.grad, 1 - one)
                square = state["exp_avg_sq"].lerp_(p.grad.square(), 1 - two)
                if group["corrects"]:
                    mean, square = mean / (1 - one ** state["step"]), square / (1 - two ** state["step"])
                p.sub_(group["lr"] * mean / (square.sqrt() + 1e-8))


def train(make, *, warm_up=0, steps=25, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)).to(
        dtype
    )
    optimizer = make(model.parameters())
    rates = [group["lr"] for group in optimizer.param_groups]
    rules = [BiasCorrection()]
    with gm.watch(model, optimizer, updates=True, rules=rules, **options) as monitor:
        for step in range(steps):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * min(1.0, (step + 1) / max(warm_up, 1))
            optimizer.zero_grad()
            model(torch.randn(16, 8, dtype=dtype)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    assert monitor.failures == {}
    return monitor


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_without_correction_the_first_updates_are_found(decay):
    (found,) = train(lambda p: Adam(p, 1e-3, weight_decay=decay)).findings
    assert (found.rule, found.severity, found.first_step) == ("bias_correction", Severity.WARNING, 0)
    assert found.message == (
        "the first update moves each element by 3.16 times the learning rate, as by Adam without bias "
        "correction: the first updates are 3.2 times as large, or more"
    )


def test_a_warm_up_makes_it_info():
    (found,) = train(lambda p: Adam(p, 1e-3), warm_up=10).findings
    assert found.severity is Severity.INFO


HEALTHY = {
    "corrected": lambda p: Adam(p, 1e-3, corrects=True),
    # these betas make no difference in the first step
    "0.9, 0.99": lambda p: Adam(p, 1e-3, (0.9, 0.99)),
    "Adam": lambda p: torch.optim.Adam(p, 1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=1.0),
    "AMSGrad": lambda p: torch.optim.Adam(p, 1e-3, amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p, 1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, 1e-3),
    "Adamax": lambda p: torch.optim.Adamax(p, 1e-3),
    "SGD": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-3),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_other_optimizers_are_quiet(name):
    assert train(HEALTHY[name]).findings == []


def test_without_updates_there_is_nothing_to_say():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = Adam(model.parameters(), 1e-3)
    with gm.watch(model, optimizer, rules=[BiasCorrection()]) as monitor:
        for _ in range(25):
            model(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
    assert monitor.findings == []
    assert monitor.failures == {}


def test_it_goes_on_after_a_resume():
    state = train(lambda p: Adam(p, 1e-3), steps=10).state_dict()
    ((_, kept),) = state["rules"]
    rule = BiasCorrection()
    rule.load_state_dict(kept)
    assert rule.factor == pytest.approx(3.162, abs=1e-3)
    assert rule.seen == 10
