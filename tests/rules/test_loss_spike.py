"""Spikes of the loss: few false ones amid noise of many kinds, and the real ones."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.recorder import Catalog, StepRecord
from gradiometer.rules import LossSpike, NormSpike, Severity
from support.losses import HEALTHY, ONSET, SPIKES

CATALOG = Catalog.of(("w",), ((2, 2),), ("float32",))
# what may still happen: a tail without a variance, and a first hard batch above all losses so far
RARELY = {"Student's t of 2", "rare hard batches", "epochs"}


def findings(losses):
    rule = LossSpike()
    records = (StepRecord(step, 0.0, {"loss": loss}, CATALOG) for step, loss in enumerate(losses))
    return [found for record in records for found in rule.check(record)]


def warnings(losses):
    return [found for found in findings(losses) if found.severity > Severity.INFO]


@pytest.mark.parametrize("kind", HEALTHY)
def test_noise_is_no_spike(kind):
    runs = [warnings(HEALTHY[kind](random.Random(seed))) for seed in range(4)]  # noqa: S311
    assert sum(map(bool, runs)) <= 2 * (kind in RARELY), runs


@pytest.mark.parametrize("kind", SPIKES)
def test_spikes_are_found_soon_after_they_begin(kind):
    found = [warnings(SPIKES[kind](random.Random(seed))) for seed in range(4)]  # noqa: S311
    assert sum([bool(one) and ONSET <= one[0].last_step <= ONSET + 30 for one in found]) >= 3, found
    assert all(one.last_step >= ONSET for run in found for one in run)


def test_one_high_loss_is_info_unless_it_is_above_all_others():
    usual = [4.0 - step / 20 if step < 60 else 1.0 + 0.02 * (step % 3) for step in range(100)]
    (hard,) = findings([*usual, 3.0, 1.0])
    assert hard.severity is Severity.INFO
    (poisoned, *_) = findings([*usual, 6.0, 1.0])
    assert (poisoned.severity, poisoned.first_step) == (Severity.WARNING, 100)
    *_, stays = findings([*usual, 3.0, 2.9, 3.1, 3.0, 2.8])
    assert (stays.severity, stays.first_step, stays.last_step) == (Severity.WARNING, 100, 104)
    assert (
        stays.message
        == "loss 2.8, 2.7 times its usual 1.02, and it has been high for 5 steps, since step 100"
    )


def test_the_update_of_a_target_network_is_no_problem():
    torch.manual_seed(0)
    online = nn.Linear(4, 1)
    model = nn.ModuleDict(
        {"online": online, "target": copy.deepcopy(online).requires_grad_(requires_grad=False)}
    )
    optimizer = torch.optim.SGD(online.parameters(), lr=0.05)
    with gm.Monitor(model, weights=True, rules=[LossSpike()]) as monitor:
        for step in range(150):
            x = torch.randn(64, 4)
            with torch.no_grad():
                goal = 10.0 + model["target"](x)
            loss = (online(x) - goal).square().mean() + 0.1
            optimizer.zero_grad()
            loss.backward()
            monitor.record()
            optimizer.step()
            monitor.advance(loss=loss)
            if step % 60 == 59:
                model["target"].load_state_dict(online.state_dict())
    meant, *others = monitor.findings
    assert (meant.first_step, meant.severity) == (60, Severity.INFO)
    assert "such as a target network" in meant.message
    assert others == []


@pytest.mark.parametrize("is_updated", [True, False])
def test_gradients_that_stay_large_after_an_update_of_a_target_network_are_no_problem(is_updated):
    model = nn.ModuleDict({"online": nn.Linear(4, 1, bias=False), "target": nn.Linear(4, 1, bias=False)})
    model["target"].requires_grad_(requires_grad=False)
    with gm.Monitor(model, weights=True, rules=[NormSpike()]) as monitor:
        for step in range(90):
            if step == 60 and is_updated:
                nn.init.constant_(model["target"].weight, 2.0)
            model["online"].weight.grad = torch.full((1, 4), 20.0 if 60 <= step < 72 else 1.0)
            monitor.record()
            monitor.advance()
    (found,) = monitor.findings
    # the finding lasts for longer than an update alone would excuse
    assert found.last_step > 66
    assert found.severity == (Severity.INFO if is_updated else Severity.WARNING)
