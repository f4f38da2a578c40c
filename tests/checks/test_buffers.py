"""The contract of buffers: values, dtypes, devices, and those of parameters."""

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.rules import Severity
from support.small_models import Transformer


class Model(nn.Module):
    """A layer, a norm with running statistics, and buffers."""

    def __init__(self, **buffers):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        for name, x in buffers.items():
            self.register_buffer(name, x)

    def forward(self, x):
        return self.norm(self.layer(x))


def result(model, batch=None):
    batch = torch.randn(3, 4) if batch is None else batch
    return gm.check_model(model, batch, only=["buffers"])["buffers"]


CAUSAL = torch.ones(5, 5, dtype=torch.bool).tril()
LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    "buffers",
    [
        {},
        {"mask": CAUSAL},
        {"bias": CAUSAL[None, None]},
        {"mask": ~CAUSAL},
        {"mask": torch.zeros(5, 5).masked_fill(~CAUSAL, -torch.inf)},
        {"mask": torch.zeros(5, 5).masked_fill(~CAUSAL, LOWEST)},
        {"mask": CAUSAL & CAUSAL.mT},
        {"mask": CAUSAL & ~torch.ones(5, 5, dtype=torch.bool).tril(-3)},
        {"mask": torch.ones(5, 5, dtype=torch.bool)},
        {"mask": torch.eye(5)},
        {"alibi": -torch.arange(5.0).flip(0).masked_fill(torch.arange(5) > 2, torch.inf)},
        {"scale": torch.ones(2, dtype=torch.float64)},
        {"codes": torch.zeros(3, dtype=torch.int8)},
        {"inv_freq": torch.tensor([1.0, 0.1, 0.01])},
        {"inv_freq": torch.tensor([1.0, 0.1, 0.0, 0.0])},
        {"nothing": None},
    ],
)
def test_healthy_buffers(buffers):
    assert result(Model(**buffers)).status == "holds"


@pytest.mark.parametrize(
    ("buffers", "text"),
    [
        ({"scale": torch.tensor([1.0, torch.nan])}, "scale has 1 nan of 2 values"),
        ({"scale": torch.tensor([1.0, torch.inf])}, "scale has 1 inf of 2 values"),
        ({"scale": torch.tensor([1.0, -torch.inf])}, "scale has 1 inf of 2 values"),
        ({"mask": torch.full((5, 5), -torch.inf)}, "mask has 25 inf of 25 values"),
        ({"scale": torch.ones(2, dtype=torch.bfloat16)}, "scale is bfloat16, narrower than the parameters"),
        ({"inv_freq": torch.tensor([1.0, 0.1], dtype=torch.bfloat16)}, "inv_freq is bfloat16: the angles"),
        ({"inv_freq": torch.ones(3)}, "inv_freq does not decrease"),
        ({"inv_freq": torch.tensor([0.01, 0.1, 1.0])}, "inv_freq does not decrease"),
        ({"scale": torch.ones(2, requires_grad=True)}, "scale is a buffer that requires a gradient"),
        ({"scale": torch.ones(0)}, "scale is an empty buffer"),
        ({"scale": torch.ones(2, device="meta")}, "scale is on meta, but the parameters are on cpu"),
        ({"mask": torch.ones(5, 5).tril(1)}, "mask lets position 0 attend to position 1"),
        ({"causal_mask": CAUSAL.tril(-1)}, "causal_mask masks all positions for position 0"),
        ({"bias": CAUSAL.clone().index_put((torch.tensor(1), torch.tensor(4)), torch.tensor(True))}, "bias"),
    ],
)
def test_broken_buffers(buffers, text):
    found = result(Model(**buffers))
    assert found.is_failure
    assert any(text in each.text for each in found.evidence)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda norm: norm.running_var.fill_(-1.0), "norm.running_var is as low as -1"),
        (lambda norm: norm.running_var.zero_(), "norm.running_var is 0 everywhere"),
        (lambda norm: norm.num_batches_tracked.fill_(-1), "norm.num_batches_tracked is -1 of int64"),
        (
            lambda norm: setattr(norm, "num_batches_tracked", torch.tensor(0.0)),
            "norm.num_batches_tracked is 0.0 of float32",
        ),
    ],
)
def test_running_statistics(change, text):
    model = Model()
    change(model.norm)
    assert text in result(model).text


def test_a_channel_that_was_always_0_is_no_fault():
    model = Model()
    model.norm.running_var[1] = 0.0
    assert result(model).status == "holds"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_parameters_are_finite(value):
    model = Model()
    with torch.no_grad():
        model.layer.weight[1, 2] = value
    found = result(model)
    assert found.is_failure
    assert found.evidence[0].name == "layer.weight"


def test_dtypes_of_siblings():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x.to(layer[0].weight.dtype))
            return x

    model = Mixed()
    assert result(model).status == "holds"
    model.layers[1].to(torch.bfloat16)
    found = result(model)
    assert found.is_failure
    assert "layers.1.0.weight is bfloat16, but layers.0.0.weight is float32" in found.text
    assert result(model.to(torch.bfloat16)).status == "holds"


def test_wider_buffers_of_a_narrow_model_are_fine():
    model = Model(inv_freq=torch.tensor([1.0, 0.1])).to(torch.bfloat16)
    model.norm.float()
    model.inv_freq = model.inv_freq.float()
    assert result(model.to(torch.float64)).status == "holds"


def test_frequencies_of_a_model_that_was_cast_are_noted():
    model = Model(inv_freq=torch.tensor([1.0, 0.1]))
    model.norm.register_buffer("running_var", None)
    model.norm.register_buffer("running_mean", None)
    found = result(model.to(torch.bfloat16))
    assert (found.status, found.severity) == ("broken", Severity.INFO)
    assert "inv_freq is bfloat16" in found.text


def test_a_narrow_constant_is_noted():
    found = result(Model(normalizer=torch.tensor(2.0, dtype=torch.bfloat16)))
    assert (found.status, found.severity) == ("broken", Severity.INFO)


def test_a_model_without_anything():
    assert result(nn.Identity()).status == "does not apply"


def test_a_transformer_in_bfloat16():
    tokens = torch.arange(8).view(2, 4)
    assert result(Transformer(causal=True).to(torch.bfloat16), tokens).status == "holds"
