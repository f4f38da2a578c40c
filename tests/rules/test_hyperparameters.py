"""Options of optimizers and clips that are far from all that are in use."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.rules import Hyperparameters

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


def train(kind, *, clip=None, steps=30, **options):
    """Train a layer; return the findings."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters(), **options)
    with gm.watch(model, optimizer, rules=[Hyperparameters()]) as monitor:
        for _ in range(steps):
            optimizer.zero_grad()
            (10.0 * model(torch.randn(8, 4))).square().mean().backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    assert monitor.failures == {}
    return monitor.findings


FAULTS = {
    "betas": (Adam, {"betas": (0.999, 0.9)}, "the optimizer's betas are (0.999, 0.9)", 0),
    "momentum": (SGD, {"momentum": 0.999}, "momentum is 0.999: each update adds up about 1,000 gradients", 0),
    "decay": (AdamW, {"weight_decay": 20.0}, "weight decay takes 2.0% of the weights away in each step", 0),
    "clip": (SGD, {"clip": 1e-5}, "clipping leaves", 0),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_option_that_is_far_from_all_in_use_is_a_warning(name):
    kind, options, text, first = FAULTS[name]
    (found,) = train(kind, lr=1e-3, **options)
    assert (found.severity, found.first_step, found.last_step) == (gm.Severity.WARNING, first, 29)
    assert text in found.message


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Adam, {}),
        (Adam, {"betas": (0.5, 0.9)}),
        (Adam, {"betas": (0.0, 0.99)}),
        (Adam, {"betas": (0.95, 0.95)}),
        (AdamW, {"weight_decay": 0.3}),
        (SGD, {"momentum": 0.99, "nesterov": True}),
        (SGD, {"momentum": 0.999, "dampening": 0.999}),
        (SGD, {"clip": 1.0}),
        (torch.optim.RMSprop, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Rprop, {}),
    ],
)
def test_usual_options_have_no_finding(kind, options):
    assert train(kind, lr=1e-3, **options) == []


def test_a_tiny_limit_is_info_for_adam_and_nothing_after_few_steps():
    (found,) = train(Adam, lr=1e-3, clip=1e-5)
    assert found.severity == gm.Severity.INFO
    assert train(Adam, lr=1e-3, clip=1e-5, steps=15) == []


def test_what_a_monitor_knows_without_an_optimizer_is_nothing():
    model = nn.Linear(2, 2)
    with gm.Monitor(model, rules=[Hyperparameters()]) as monitor:
        for _ in range(30):
            model.weight.grad = torch.ones(2, 2)
            monitor.record()
            monitor.advance(lr=1.0)
    assert monitor.findings == []


def trained_with(kind, decay, **options):
    """Train two layers whose first one hardly matters; return the findings."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1))
    optimizer = kind(model.parameters(), lr=1e-4, weight_decay=decay, **options)
    with gm.watch(model, optimizer, rules=[Hyperparameters()], weights=True) as monitor:
        for _ in range(30):
            optimizer.zero_grad()
            x = torch.randn(16, 6)
            (1e-3 * model(x) + x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
    assert monitor.failures == {}
    return monitor.findings


def test_a_decay_that_outweighs_the_gradients_in_adam_is_a_warning():
    (found,) = trained_with(Adam, 0.1)
    assert (found.severity, found.first_step) == (gm.Severity.WARNING, 0)
    assert "the weight_decay of 0.1 outweighs the gradients of" in found.message


@pytest.mark.parametrize(
    ("kind", "decay", "options"),
    [(AdamW, 0.1, {}), (Adam, 1e-3, {}), (SGD, 0.1, {}), (Adam, 0.1, {"decoupled_weight_decay": True})],
)
def test_a_decay_that_is_small_or_not_divided_by_the_gradients_is_none(kind, decay, options):
    assert trained_with(kind, decay, **options) == []
