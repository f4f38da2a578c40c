"""Parameters that the loss depends on, but the model does not have."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradiometer as gm
from gradiometer.rules import NotRegistered, NotUpdated, Severity


class Net(nn.Module):
    """A model that keeps its hidden layers in a container."""

    def __init__(self, keep=list):
        super().__init__()
        self.hidden = keep([nn.Linear(4, 8), nn.Linear(8, 4)])
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        layers = self.hidden.values() if isinstance(self.hidden, dict) else self.hidden
        for layer in layers:
            x = layer(x).tanh()
        return self.head(x)


def named(layers):
    return {"a": layers[0], "b": [layers[1]]}


class Nested(Net):
    """The same in a dict with a list."""

    def __init__(self):
        super().__init__(named)

    def forward(self, x):
        return self.head(self.hidden["b"][0](self.hidden["a"](x)))


class InForward(nn.Module):
    """A model that creates a layer in each forward."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        return nn.Linear(4, 1)(self.first(x))


def train(model, loss_of=None, *, held=(), steps=20, watched=None, optimizers=None, **options):
    torch.manual_seed(0)
    optimizer = torch.optim.Adam([*model.parameters(), *held], lr=1e-3)
    options.setdefault("rules", [NotRegistered()])
    with gm.watch(watched or model, optimizers or optimizer, **options) as monitor:
        for _ in range(steps):
            x = torch.randn(8, 4)
            loss = model(x).square().mean() if loss_of is None else loss_of(x)
            loss.backward()
            monitor.note(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            del loss
    assert monitor.failures == {}
    return monitor.findings


@pytest.mark.parametrize("make", [Net, lambda: Net(tuple), Nested], ids=["list", "tuple", "dict"])
def test_layers_in_a_container_are_named(make):
    (found,) = train(make(), steps=3)
    assert (found.rule, found.severity, found.first_step) == ("not_registered", Severity.WARNING, 0)
    assert "not registered in the model: 4 parameters with 76 elements in the " in found.message
    assert " hidden: model.parameters() does not return them" in found.message
    assert "nn.ModuleList" in found.advice


def test_a_wrapped_model_has_the_name_of_the_attribute_alone():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.ModuleDict({"body": Net()})

        def forward(self, x):
            return self.module["body"](x)

    (found,) = train(Wrapper(), steps=2)
    assert "in the list body.hidden" in found.message


@pytest.mark.parametrize("steps", [1, 12])
def test_registered_layers_are_quiet(steps):
    assert train(Net(nn.ModuleList), steps=steps) == []


def test_what_an_optimizer_holds_or_nothing_trains_is_quiet():
    model = Net()
    assert train(model, held=[p for layer in model.hidden for p in layer.parameters()]) == []
    model = Net()
    for layer in model.hidden:
        layer.requires_grad_(requires_grad=False)
    assert train(model) == []
    # a teacher that forward() does not use
    model = Net(nn.ModuleList)
    model.teacher = [nn.Linear(4, 4)]
    assert train(model) == []


def test_an_input_that_requires_a_gradient_is_no_parameter():
    model = Net(nn.ModuleList)

    def loss_of(x):
        model.seen = [x.requires_grad_()]
        return model(x).square().mean()

    assert train(model, loss_of) == []


def test_another_model_is_info_unless_its_optimizer_is_known():
    discriminator = nn.Linear(1, 1)
    model = Net(nn.ModuleList)

    def loss_of(x):
        return discriminator(model(x)).mean()

    (found,) = train(model, loss_of)
    assert (found.severity, found.first_step) == (Severity.INFO, 0)
    assert "2 parameters that are not in the model or a watched optimizer" in found.message
    assert train(model, loss_of, held=discriminator.parameters()) == []
    assert train(model, loss_of, watched={"g": model, "d": discriminator}) == []


def test_layers_that_are_created_in_each_forward():
    (found,) = [x for x in train(InForward()) if x.severity >= Severity.WARNING]
    assert "gone some steps later: they are created anew in each step" in found.message
    assert "__init__()" in found.advice


def test_a_graph_that_is_not_complete_tells_nothing():
    model = Net()

    def loss_of(x):
        hidden = checkpoint(model.hidden[0], x.requires_grad_(), use_reentrant=True)
        return model.head(model.hidden[1](hidden)).square().mean()

    assert train(model, loss_of) == []


def test_a_loss_without_its_graph_tells_nothing():
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with gm.watch(model, optimizer, rules=[NotRegistered()]) as monitor:
        for _ in range(3):
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            monitor.note(loss=loss.detach())
            optimizer.step()
    assert monitor.findings == []


def test_what_the_optimizer_leaves_out_is_told_after_five_steps():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    seen = []
    options = {"weights": True, "updates": True, "rules": [rule := NotUpdated()], "sinks": [seen.append]}
    with gm.watch(model, optimizer, **options) as monitor:
        for _ in range(12):
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    (found,) = monitor.findings
    assert "no watched optimizer holds" in found.message
    rule = NotUpdated()
    first = next(record.step for record in seen if list(rule.check(record)))
    # in the first step it is not known whether something else has written them before
    assert first == found.first_step + 4 <= 5


def test_its_history_is_saved():
    rule = NotRegistered()
    train(Net(), rules=[rule], steps=2)
    other = NotRegistered()
    other.load_state_dict(rule.state_dict())
    assert other.since == rule.since == 0
