"""What is read of the weights, by rows and columns, when a monitor is created."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.monitor import initial_reader
from gradiometer.monitor.initial_reader import InitialReader
from gradiometer.rules import Initialization, Severity


class Net(nn.Module):
    def __init__(self, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 16), nn.Tanh()))
            for _ in range(layers)
        )
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def net():
    torch.manual_seed(0)
    return Net()


def train(model, steps=3, **rest):
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, 0.01)
    with gm.watch(model, optimizer, rules=[Initialization()], **rest) as monitor:
        for _ in range(steps):
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert monitor.failures == {}
    return monitor


def read(model):
    reader = InitialReader()
    reader.start({"": model}, gm.Recorder(model))
    return reader.read()


def test_weights_are_read_once():
    model = net()
    reader, recorder = InitialReader(), gm.Recorder(model)
    assert reader.read().weights == ()
    reader.start({"": model}, recorder)
    found = reader.read()
    assert [x.weight.name for x in found.weights] == [name for name, _ in model.named_parameters()]
    assert not found.is_pretrained
    with torch.no_grad():
        model.head.weight.zero_()
    reader.start({"": model}, recorder)
    assert reader.read() is found


def test_large_models_on_a_cpu_are_left_out(monkeypatch):
    monkeypatch.setattr(initial_reader, "_LARGE", 100)
    assert read(net()).weights == ()


def test_a_pretrained_model_is_recognized():
    model = net()
    model.config = type("Config", (), {"_name_or_path": "some/model"})()
    assert read(model).is_pretrained
    model.config._name_or_path = ""
    assert not read(model).is_pretrained
    model.head.weight.requires_grad_(requires_grad=False)
    assert read(model).is_pretrained
    model = net()
    with torch.no_grad():
        for layer in model.layers:
            layer[0].weight.normal_(1, 0.1)
    assert read(model).is_pretrained


def test_a_healthy_model_is_quiet():
    assert train(net()).findings == []


def equal_rows(model):
    model.layers[1][1][0].weight[3] = model.layers[1][1][0].weight[1]


def zero_column(model):
    model.layers[1][1][0].weight[:, 3] = 0


def norm(model):
    model.layers[2][0].weight.fill_(0.5)


def bias(model):
    model.layers[2][0].bias.fill_(0.5)


def spread(model):
    model.layers[1][1][0].weight.mul_(10)


FAULTS = [
    (equal_rows, "layers.1.1.0.weight", "row 3 equals row 1"),
    (zero_column, "layers.1.1.0.weight", "column 3 is 0"),
    (norm, "layers.2.0.weight", "starts with 0.5, and those of other layers with 1"),
    (bias, "layers.2.0.bias", "starts with 0.5, and those of other layers with 0"),
    (spread, "layers.1.1.0.weight", "weights start with rms"),
]


@pytest.mark.parametrize(("plant", "name", "text"), FAULTS, ids=[plant.__name__ for plant, *_ in FAULTS])
@pytest.mark.parametrize("weights", [False, True])
def test_what_is_wrong_at_the_start_is_reported_once(plant, name, text, weights):
    model = net()
    with torch.no_grad():
        plant(model)
    (found,) = train(model, weights=weights).findings
    assert (found.rule, found.tensor, found.severity) == ("initialization", name, Severity.WARNING)
    assert text in found.message
    assert found.message.startswith(name)


@pytest.mark.parametrize("plant", [plant for plant, *_ in FAULTS])
def test_of_a_pretrained_model_only_repeats_are_reported(plant):
    model = net()
    model.config = type("Config", (), {"name_or_path": "some/model"})()
    with torch.no_grad():
        plant(model)
    found = train(model).findings
    expected = ["layers.1.1.0.weight"] if plant in {equal_rows, zero_column} else []
    assert [x.tensor for x in found] == expected


def test_of_a_resumed_run_only_repeats_are_reported():
    model, state = net(), Initialization()
    record = train(net())
    assert record.findings == []
    # the state of a rule that has looked at the start of the run
    state.is_examined = True
    rule = Initialization()
    rule.load_state_dict(state.state_dict())
    with torch.no_grad():
        spread(model)
        equal_rows(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gm.watch(model, optimizer, rules=[rule]) as monitor:
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    (found,) = monitor.findings
    assert "row 3 equals row 1" in found.message
