"""Healthy runs of different models, data and optimizers: no default rule reports more than info."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.recorder import Updates
from gradiometer.rules.finding import Severity
from support.real_runs import Recurrent, Run, Transformer, characters, convolutional, digits

pytestmark = pytest.mark.usefixtures("_one_thread")

STEPS = 160


def transformer(generator):
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Run(model, lambda: characters(12, 32, generator), optimizer, weights=True, updates=True)


def residual(generator):
    model = convolutional()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    return Run(model, lambda: digits(64, generator), optimizer, schedule=schedule, weights=True)


def recurrent(generator):
    model = Recurrent()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    return Run(model, lambda: characters(16, 32, generator), optimizer, schedule=schedule)


def loud(findings):
    return [str(found) for found in findings if found.severity > Severity.INFO]


@pytest.mark.parametrize("make", [transformer, pytest.param(residual, marks=pytest.mark.deep), recurrent])
def test_a_healthy_run_has_no_finding_above_info(make):
    run = make(torch.Generator().manual_seed(0))
    run.go(STEPS)
    losses = [record.loss for record in run.records]
    assert sum(losses[-20:]) < 0.75 * sum(losses[:20])  # it learns
    assert loud(run.ledger.findings) == []


def test_tiny_gradients_of_biases_before_a_norm_and_of_keys_are_no_findings():
    # pure rounding errors: 1e-11 and 1e-7, which differ between machines
    thresholds = gm.Thresholds(vanishing=2e-6)
    for make, name in ((transformer, "blocks.0.key.bias"), (residual, "3.body.0.bias")):
        run = make(torch.Generator().manual_seed(1))
        run.recorder = gm.Recorder(run.model, capacity=1, weights=True, updates=True, thresholds=thresholds)
        run.updates = Updates(run.recorder)
        run.go(15)
        assert run.records[-1].report()[name].norm < thresholds.vanishing  # in health
        assert run.ledger.findings == []


def test_a_run_that_ends_at_no_loss_is_quiet():
    fixed = digits(64, torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))
    run = Run(model, lambda: fixed, torch.optim.Adam(model.parameters(), lr=1e-2))
    run.go(300)
    assert run.records[-1].loss < 5e-3
    assert loud(run.ledger.findings) == []


def test_parameters_that_are_unfrozen_late_are_quiet():
    run = transformer(torch.Generator().manual_seed(2))
    body = [p for name, p in run.model.named_parameters() if not name.startswith(("head", "norm"))]
    for parameter in body:
        parameter.requires_grad_(False)
    run.go(40)
    for parameter in body:
        parameter.requires_grad_(True)
    run.go(40)
    assert loud(run.ledger.findings) == []
    assert not run.records[0].measured().all()
    assert run.records[-1].measured().all()


def test_an_expert_without_tokens_in_some_steps_is_quiet():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.flatten = nn.Flatten()
            self.experts = nn.ModuleList([nn.Linear(256, 10) for _ in range(8)])

        def forward(self, x):
            # a few tokens go to a few experts; the others have gradients of zeros
            x = self.flatten(x)
            chosen = torch.randint(8, (2,)).tolist()
            unused = sum(p.sum() for expert in self.experts for p in expert.parameters()) * 0.0
            return sum(self.experts[i](x) for i in chosen) + unused

    model = Experts()
    generator = torch.Generator().manual_seed(0)
    run = Run(model, lambda: digits(32, generator), torch.optim.SGD(model.parameters(), lr=0.05))
    run.go(150)
    zeros = torch.stack([record.value("zero_fraction")[0] for record in run.records])
    assert 0.5 < (zeros == 1.0).double().mean() < 1.0
    assert loud(run.ledger.findings) == []


def test_a_learning_rate_warm_up_that_begins_with_large_norms_is_quiet():
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 10))
    with torch.no_grad():
        model[3].weight.mul_(60.0)  # the first losses are large, the first norms above the threshold
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    run = Run(model, lambda: digits(64, generator), optimizer, schedule=schedule)
    run.go(120)
    totals = [record.total() for record in run.records]
    assert max(totals[:5]) > 10 * min(totals)
    assert math.isfinite(totals[-1])
    assert loud(run.ledger.findings) == []
