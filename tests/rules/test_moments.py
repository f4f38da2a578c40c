"""An optimizer's state that is loaded in another order: the second moments of another parameter."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.columns import TENSORS
from gradiometer.recorder import Kind
from gradiometer.recorder.table import Table
from gradiometer.rules import MisplacedMoments, Severity

BEFORE, AFTER = 90, 34


class Net(nn.Module):
    """Three layers of one shape, whose gradients differ by 20, and one of another shape."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))
        self.out = nn.Linear(16, 8)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        hidden = (20.0 * self.a(x)).tanh() + 0.2 * self.b(x).tanh() + self.c(x).tanh()
        return self.out(self.drop(hidden))


def train(order=None, *, make=torch.optim.AdamW, lr=1e-3, batch=32, warm_up=False, state=True, seed=0):
    """Train, save, and go on with new objects; return the findings after the resume."""
    torch.manual_seed(seed)
    truth = torch.randn(16, 8) / 4

    def go(model, optimizer, steps, batch, monitor):
        for step in range(steps):
            if warm_up and steps == AFTER:
                optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 30)
            x = torch.randn(batch, 16)
            loss = (model(x) - (x @ truth).tanh()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            monitor.note(loss=loss)
            optimizer.step()

    model = Net()
    optimizer = make(model.parameters(), lr=lr)
    with gm.watch(model, optimizer, updates=True, rules=[MisplacedMoments()]) as monitor:
        go(model, optimizer, BEFORE, 32, monitor)
        saved = model.state_dict(), optimizer.state_dict(), monitor.state_dict()
    torch.manual_seed(seed + 1)
    model = Net()
    model.load_state_dict(saved[0])
    parameters = list(model.parameters())
    optimizer = make(parameters if order is None else [parameters[i] for i in order], lr=lr)
    if state:
        optimizer.load_state_dict(saved[1])
    monitor = gm.watch(model, optimizer, updates=True, rules=[MisplacedMoments()])
    monitor.load_state_dict(saved[2])
    with monitor:
        go(model, optimizer, AFTER, batch, monitor)
    assert monitor.failures == {}
    return monitor.findings


SWAPPED, CYCLE = (2, 3, 0, 1, 4, 5, 6, 7), (2, 3, 4, 5, 0, 1, 6, 7)


@pytest.mark.parametrize("order", [SWAPPED, CYCLE], ids=["swapped", "cycle"])
@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, partial(torch.optim.RMSprop, alpha=0.999)], ids=["adamw", "rms"]
)
def test_a_state_that_is_assigned_in_another_order(order, make):
    (found,) = train(order, make=make)
    assert (found.rule, found.severity, found.first_step) == ("misplaced_moments", Severity.WARNING, BEFORE)
    assert found.message.startswith(f"since the run was resumed at step {BEFORE}, the updates of ")
    assert "as if the optimizer's state had been assigned in another order: " in found.message
    assert "times less than before, as with the second moments of " in found.message
    assert found.tensor.split(".")[0] in "abc"
    assert "model.named_parameters()" in found.advice


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch": 4},
        {"batch": 256},
        {"warm_up": True},
        {"state": False},
        {"make": torch.optim.SGD, "lr": 0.05},
        {"make": torch.optim.SGD, "lr": 0.05, "order": SWAPPED},
    ],
    ids=["same", "smaller", "larger", "warm-up", "new state", "sgd", "sgd swapped"],
)
def test_a_healthy_resume_is_quiet(options):
    assert train(**options) == []


def test_without_a_restored_history_there_is_no_finding():
    torch.manual_seed(0)
    rule = MisplacedMoments()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with gm.watch(model, optimizer, updates=True, rules=[rule]):
        for _ in range(5):
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
    assert rule.resumed == -1
    other = MisplacedMoments()
    other.load_state_dict(rule.state_dict())
    assert torch.equal(other.speeds.mean, rule.speeds.mean)
    with pytest.raises(ValueError, match="resumed"):
        other.load_state_dict(rule.state_dict() | {"resumed": 1.0})


def with_moments(record, moments):
    """Return a record that has second moments, too."""
    rows = record.catalog.parameters
    values = torch.zeros(len(rows), TENSORS.width, dtype=torch.float64)
    names = [column.name for column in TENSORS.columns]
    for place, v in enumerate(moments):
        values[place, names.index("numel")] = v.numel()
        values[place, names.index("sum")] = v.double().sum()
    kind = Kind("exp_avg_sq", TENSORS, "exp_avg_sq", ".exp_avg_sq", order=5.0)
    return replace(record, tables={**record.tables, "exp_avg_sq": Table(kind, rows, values)})


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("order", [None, SWAPPED, CYCLE], ids=["same", "swapped", "cycle"])
@pytest.mark.parametrize("reset", [False, True])
def test_recorded_second_moments_tell_at_once(order, every, reset):
    torch.manual_seed(0)
    truth = torch.randn(16, 8) / 4
    rule, found = MisplacedMoments(), []
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parameters = list(model.parameters())
    seen = []
    with gm.watch(model, optimizer, rules=(), sinks=[seen.append]) as monitor:
        for step in range(60):
            if step == 40:
                state = {p: optimizer.state[p] for p in parameters}
                optimizer.state.clear()
                for p, q in zip(parameters, [parameters[i] for i in order or range(8)], strict=True):
                    optimizer.state[p] = {} if reset else state[q]
                other = MisplacedMoments()
                other.load_state_dict(rule.state_dict())
                rule = other
            x = torch.randn(32, 16)
            (model(x) - (x @ truth).tanh()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.flush()
            record = seen[-1]
            if step % every == 0:
                record = with_moments(record, [optimizer.state[p]["exp_avg_sq"] for p in parameters])
            found += [(step, x) for x in rule.check(record)]
    if order is None or reset:
        assert found == []
        return
    ((step, only),) = found
    assert (step, only.first_step, only.severity) == (40, 40, Severity.WARNING)
    if order == SWAPPED:
        assert only.message.split("another order: ")[1].startswith(("b.weight moves", "b.bias moves"))
        assert "as with the second moments of a." in only.message
