"""The contract of normalization."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradiometer.checks import check_model


class Model(nn.Module):
    """Tokens, a linear layer and a norm."""

    def __init__(self, norm):
        super().__init__()
        self.embedding, self.mix, self.norm = nn.Embedding(20, 8), nn.Linear(8, 8), norm
        self.head = nn.Linear(8, 20)

    def forward(self, tokens):
        return self.head(self.norm(self.mix(self.embedding(tokens))))


def result(norm, dtype=torch.float32):
    torch.manual_seed(0)
    model = Model(norm).to(dtype)
    return check_model(model, torch.randint(0, 20, (3, 6)), only=["normalization"])["normalization"]


def rms_norm(compute, kind="RMSNorm"):
    """Return a layer of a class of its own that computes a normalized x."""

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return self.weight * compute(x)

    return type(kind, (Norm,), {})()


def mean_square(x, dim=-1, eps=1e-6):
    return x.square().mean(dim, keepdim=True) + eps


@pytest.mark.parametrize(
    ("compute", "text"),
    [
        (lambda x: x / mean_square(x, 1).sqrt(), "normalizes over tokens, dimension 1"),
        (lambda x: x / mean_square(x, 0).sqrt(), "normalizes over examples, dimension 0"),
        (lambda x: x / mean_square(x, (1, 2)).sqrt(), "normalizes over tokens, dimensions 1 and 2"),
        (lambda x: x / mean_square(x, (0, 1, 2)).sqrt(), "over examples, dimensions 0 and 1 and 2"),
        (lambda x: x / mean_square(x), "divides by the variance"),
        (lambda x: x * mean_square(x).sqrt(), "multiplies the output by 4"),
        (lambda x: x - x.mean(-1, keepdim=True), "does not divide"),
        (lambda x: x, "does not normalize"),
        (lambda x: x * 0, "the same number everywhere"),
        (lambda x: x / mean_square(x, eps=1.0).sqrt(), "eps is about 1"),
        (lambda x: x / x.square().sum(-1, keepdim=True).sqrt(), "the root of the sum of squares"),
        (lambda x: x / x.abs().mean(-1, keepdim=True), "divides by another value"),
        (lambda x: x / x.abs().amax(-1, keepdim=True), "divides by another value"),
        (lambda x: x / x.std(-1, keepdim=True), "divides by another value"),
        (lambda x: x / (mean_square(x).sqrt() + 1.0), "times their normalized size"),
    ],
    ids=range(15),
)
def test_a_fault_is_told(compute, text):
    found = result(rms_norm(compute))
    assert found.is_failure, found
    assert text in found.text
    assert found.evidence[0].name == "norm"


class OnePlus(nn.Module):
    """As in Gemma: the weight is 1 + a parameter that starts at 0."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return x / mean_square(x).sqrt() * (1 + self.weight)


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(8),
        nn.RMSNorm(8),
        nn.LayerNorm(8, elementwise_affine=False),
        rms_norm(lambda x: x / mean_square(x).sqrt()),
        rms_norm(lambda x: x / mean_square(x).sqrt(), "T5LayerNorm"),
        rms_norm(lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6), "LayerNorm"),
        rms_norm(lambda x: functional.normalize(x, dim=-1) * 8**0.5),
        type("RMSNorm", (OnePlus,), {})(),
    ],
    ids=range(8),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_healthy_layers_hold(norm, dtype):
    assert result(norm, dtype).status == "holds"


def test_a_weight_that_starts_at_zero_holds():
    norm = nn.LayerNorm(8)
    nn.init.zeros_(norm.weight)
    nn.init.zeros_(norm.bias)
    assert result(norm).status == "holds"


def test_weights_that_differ_hold():
    norm = nn.LayerNorm(8)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    assert result(norm).status == "holds"


def test_a_layer_norm_whose_forward_does_not_subtract_the_mean():
    norm = nn.LayerNorm(8)
    norm.forward = lambda x: functional.rms_norm(x, (8,), norm.weight) + norm.bias
    found = result(norm)
    assert found.is_failure
    assert "norm does not subtract the mean, unlike a LayerNorm" in found.text


def test_a_layer_called_layer_norm_that_is_none():
    class Named(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer_norm, self.embedding = layer, nn.Embedding(20, 8)

        def forward(self, tokens):
            return self.layer_norm(self.embedding(tokens))

    tokens = torch.randint(0, 20, (3, 8))
    found = check_model(Named(nn.BatchNorm1d(8)), tokens, only=["normalization"])["normalization"]
    assert "layer_norm does not normalize" in found.text
    for layer in (nn.Identity(), nn.GroupNorm(2, 8)):
        found = check_model(Named(layer), tokens, only=["normalization"])["normalization"]
        assert found.status == "does not apply"


def test_a_layer_norm_of_channels_that_come_first():
    class LayerNorm2d(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.movedim(1, -1)).movedim(-1, 1)

    model = nn.Sequential(nn.Conv2d(3, 8, 2, 2), LayerNorm2d(8), nn.Flatten(), nn.Linear(8 * 16, 3))
    found = check_model(model, torch.randn(2, 3, 8, 8), only=["normalization"])["normalization"]
    assert found.status == "holds"


def test_a_norm_that_is_given_tokens_as_channels_is_told():
    class Mixed(Model):
        def forward(self, tokens):
            return self.head(self.norm(self.mix(self.embedding(tokens)).mT).mT)

    found = check_model(Mixed(nn.LayerNorm(6)), torch.randint(0, 20, (3, 6)), only=["normalization"])
    assert "normalizes over the tokens, dimension 2" in found["normalization"].text


def test_a_norm_with_a_second_input_does_not_apply():
    class GateLayerNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x, gate):
            return x * gate

    class Gated(Model):
        def forward(self, tokens):
            x = self.embedding(tokens)
            return self.head(self.norm(x, self.mix(x)))

    found = check_model(Gated(GateLayerNorm()), torch.randint(0, 20, (3, 6)), only=["normalization"])
    assert found["normalization"].status == "does not apply"


def test_models_without_norms_and_norms_that_are_not_called_do_not_apply():
    assert result(nn.Identity()).status == "does not apply"
    assert result(nn.BatchNorm1d(6)).status == "does not apply"
    model = Model(nn.Identity())
    model.unused = nn.LayerNorm(8)
    found = check_model(model, torch.randint(0, 20, (3, 6)), only=["normalization"])["normalization"]
    assert found.status == "does not apply"


def test_modes_are_as_before():
    model = Model(nn.LayerNorm(8))
    model.norm.eval()
    check_model(model, torch.randint(0, 20, (3, 6)), only=["normalization"])
    assert model.training
    assert not model.norm.training
