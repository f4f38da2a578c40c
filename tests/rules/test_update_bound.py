"""An update that is larger than the optimizer's formula allows is written by something else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.rules import Severity, UpdateBound, UpdateSpike, headlines
from gradiometer.rules.update_bound import largest_step

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, betas=(0.8, 0.99), weight_decay=0.1, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
}


def train(make, change=None, at=(), *, steps=60, dtype=torch.float32, rules=None, rate=None, **options):
    """Train with gradients of a heavy tail; ``change`` the weights inside ``step()``. Return the findings."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)
    optimizer = make(list(model.parameters()))
    step = -1

    def write(*_):
        if step in at:
            change(model)

    # before the monitor's own hook, so that it is a part of the update
    optimizer.register_step_post_hook(write)
    rules = [UpdateBound()] if rules is None else rules
    options = {"updates": True} | options
    with gm.watch(model, optimizer, rules=rules, **options) as monitor:
        for step in range(steps):
            scale = math.exp(2 * math.sin(7 * step))
            loss = scale * model(torch.randn(16, 8, dtype=dtype)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            monitor.note(loss=loss)
            if rate is not None:
                optimizer.param_groups[0]["lr"] = rate(step)
            optimizer.step()
    assert monitor.failures == {}
    return monitor.findings


@torch.no_grad()
def doubled(model):
    for parameter in model[2].parameters():
        parameter.mul_(2.0)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("options", [{"updates": True}, {"updates": False, "weights": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_optimizer_exceeds_its_own_bound(name, options, dtype):
    assert train(OPTIMIZERS[name], dtype=dtype, **options) == []


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_that_are_written_inside_a_step(name):
    (found,) = train(OPTIMIZERS[name], doubled, {55})
    assert (found.rule, found.severity, found.first_step) == ("update_bound", Severity.WARNING, 55)
    assert found.kind == "updates"
    # a gradient with a heavy tail and a momentum may have moved the bias as far
    assert found.message.startswith(("2 (2 tensors): the update moves", "2.weight: the update moves"))
    assert found.message.endswith("can do in a step: something else writes them, inside optimizer.step()")
    assert found.value > 2.0


def test_the_number_is_exact_for_adagrad():
    # lr / 1 for each element of a tensor whose gradient is 1 in the first step only
    weight = nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.Adagrad([weight], lr=0.5)
    optimizer.register_step_post_hook(lambda *_: weight.data.mul_(30.0))
    with gm.watch([("w", weight)], optimizer, updates=True, rules=[UpdateBound()]) as monitor:
        weight.sum().backward()
        optimizer.step()
    (found,) = monitor.findings
    assert found.value == pytest.approx(30.0, rel=1e-6)
    assert (
        "w: the update moves them by up to 30 times what Adagrad with learning rate 0.5 can do"
        in found.message
    )


def test_weights_alone_show_the_change_of_the_norm():
    (found,) = train(OPTIMIZERS["adamw"], doubled, {30}, updates=False, weights=True)
    assert (found.kind, found.first_step) == ("weights", 31)
    assert "between steps 30 and 31 their norms change by up to" in found.message


def test_what_happens_often_is_info():
    found = train(OPTIMIZERS["adamw"], doubled, range(2, 60, 4), rules=[UpdateBound(severity=Severity.INFO)])
    assert {x.severity for x in found} == {Severity.INFO}
    rule, seen = UpdateBound(), []
    train(OPTIMIZERS["adamw"], doubled, range(2, 60, 4), rules=[rule], sinks=[seen.append])
    again = UpdateBound()
    severities = [x.severity for record in seen for x in again.check(record)]
    # only the first one could still be alone
    assert severities == [Severity.WARNING] + 14 * [Severity.INFO]


def test_a_learning_rate_that_is_set_after_the_recording_is_not_compared():
    # by a clip, the gradients and the learning rate are read before this loop sets the rate of the step
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)
    with gm.watch(model, optimizer, updates=True, weights=True, rules=[UpdateBound()]) as monitor:
        for step in range(30):
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.param_groups[0]["lr"] = 1e-9 * 4**step if step < 10 else 1e-3
            optimizer.step()
    assert monitor.findings == []


class Sign(torch.optim.SGD):
    """An optimizer of unknown formula."""

    @torch.no_grad()
    def step(self, closure=None):
        del closure
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign())


OTHERS = {
    "subclass": lambda p: Sign(p, lr=1e-6),
    "centered": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True),
    "betas": lambda p: torch.optim.Adam(p, lr=1e-3, betas=(0.99, 0.9)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_formulas_have_no_bound(name):
    assert train(OTHERS[name], doubled, {30}) == []


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.5, 0.9), (0.0, 0.99)])
def test_the_largest_step_of_adam_is_reached_and_not_exceeded(betas):
    bound = largest_step("Adam", {"beta1": betas[0], "beta2": betas[1]})
    # the gradients for which the inequality is an equality: g_k ~ (beta1 / beta2)**(t - k)
    steps = 3000
    ratio = betas[0] / betas[1]
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.Adam([weight], lr=1.0, betas=betas, eps=0.0)
    largest = 0.0
    for k in range(steps):
        before = weight.item()
        weight.grad = torch.full_like(weight, max(ratio ** (steps - k), 1e-100))
        optimizer.step()
        largest = max(largest, abs(weight.item() - before))
    assert largest <= bound * (1 + 1e-9)
    if betas[0]:
        assert largest > 0.5 * bound


class Masters(torch.optim.Optimizer):
    """Updates float32 copies, and writes them to the parameters."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.copies = [p.detach().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        del closure
        for p, copy in zip(self.param_groups[0]["params"], self.copies, strict=True):
            copy.sub_(self.param_groups[0]["lr"] * p.grad.sign())
            p.copy_(copy)


@pytest.mark.parametrize("stale", [False, True])
def test_stale_master_weights_are_in_the_first_update(stale):
    def make(parameters):
        optimizer = Masters(parameters, lr=1e-4)
        if stale:
            for p in parameters:
                p.data = torch.randn_like(p)
        return optimizer

    found = train(make, rules=[UpdateSpike()], steps=12)
    assert len(found) == stale
    if stale:
        assert (found[0].rule, found[0].first_step, found[0].severity) == (
            "update_spike",
            0,
            Severity.WARNING,
        )
        assert found[0].message.startswith("the first update, at step 0, moved the weights by ")
        assert "master weights" in found[0].advice


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_usual_first_update_is_quiet(name):
    def rate(step):
        return 1e-4 * (step + 1)

    assert train(OPTIMIZERS[name], rules=[UpdateSpike()], steps=15) == []
    assert train(OPTIMIZERS[name], rules=[UpdateSpike()], steps=15, rate=rate) == []


def test_it_explains_the_spikes_that_follow():
    found = train(OPTIMIZERS["adamw"], doubled, {40}, rules=[UpdateBound(), UpdateSpike()])
    first, *others = headlines(found)
    assert (first.rule, others) == ("update_bound", [])
    assert [x.rule for x in first.explained] == ["update_spike"]


def test_its_history_is_saved():
    rule, other = UpdateBound(), UpdateBound()
    train(OPTIMIZERS["momentum"], rules=[rule])
    other.load_state_dict(rule.state_dict())
    assert other.count == rule.count == 60
    assert torch.equal(other.steepest, rule.steepest)
    with pytest.raises(ValueError, match="before_step"):
        other.load_state_dict(rule.state_dict() | {"before_step": "x"})
