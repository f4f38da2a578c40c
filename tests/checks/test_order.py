"""The contract of positions."""

import pytest
import torch
from torch import nn

import gradiometer as gm
from support.small_models import Transformer, text


def result(model, batch, **options):
    return gm.check_model(model, batch, only=["order"], **options)["order"]


def made(**rest):
    torch.manual_seed(1)
    return Transformer(**rest)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_positions_that_are_not_added(causal, padded):
    batch = text(padded=padded, shifted=causal)
    assert result(made(causal=causal), batch).status == "holds"
    found = result(made(causal=causal, positions=False), batch)
    assert (found.status, found.severity) == ("broken", gm.Severity.WARNING)
    assert "does not change the outputs" in found.text
    assert "positions.weight" in found.text


def test_a_bag_of_words_is_only_noted():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.EmbeddingBag(13, 8)

        def forward(self, tokens):
            return self.embedding(tokens)

    found = result(Bag(), {"tokens": text()["tokens"]})
    assert (found.status, found.severity) == ("broken", gm.Severity.INFO)
    assert "the model has no positions" in found.text


class Rotary(nn.Module):
    """Causal attention with rotary positions; ``mistake`` is made with the keys or everywhere."""

    def __init__(self, mistake=""):
        super().__init__()
        self.mistake = mistake
        self.embedding, self.qkv = nn.Embedding(13, 8), nn.Linear(8, 24)
        self.rotary_speed, self.head = 1.0, nn.Linear(8, 13)

    def add_rotary(self):
        self.rotary = nn.Identity()
        return self

    def rotate(self, x, places, kind):
        angles = places[..., None] * torch.tensor([1.0, 0.3, 0.1, 0.03], dtype=x.dtype)
        if kind == "neighbors":
            a, b = x[..., ::2], x[..., 1::2]
            return torch.stack(
                [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1
            ).flatten(-2)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def forward(self, tokens, position_ids=None):
        places = torch.arange(tokens.shape[1]).expand(tokens.shape) if position_ids is None else position_ids
        q, k, v = self.qkv(self.embedding(tokens)).chunk(3, 2)
        q = self.rotate(q, places, "halves")
        if self.mistake != "queries only":
            k = self.rotate(k, places, "neighbors" if self.mistake == "mixed" else "halves")
        scores = (q @ k.mT / 8**0.5).masked_fill(
            ~torch.ones(2 * tokens.shape[1:], dtype=torch.bool).tril(), -torch.inf
        )
        return self.head(scores.softmax(-1) @ v)


def rotary(mistake=""):
    torch.manual_seed(2)
    return Rotary(mistake).add_rotary()


def test_rotary_positions_are_relative():
    assert result(rotary(), text()).status == "holds"
    assert "not relative" in result(rotary("mixed"), text()).text
    assert "not relative" in result(rotary("queries only"), text()).text


def test_rotary_positions_without_an_argument_or_a_mask():
    class Fixed(Rotary):
        def forward(self, tokens):
            return super().forward(tokens)

    def made(mistake=""):
        torch.manual_seed(2)
        return Fixed(mistake).add_rotary()

    assert result(made(), text(length=6)).status == "holds"
    assert "scores at equal distances differ" in result(made("mixed"), text(length=6)).text
    assert "scores at equal distances differ" in result(made("queries only"), text(length=6)).text


def test_a_layer_that_does_not_see_the_order_is_named():
    class Shifted(nn.Module):
        """Each layer adds the token before."""

        def __init__(self, *, sees):
            super().__init__()
            self.mix, self.out, self.sees = nn.Linear(8, 8), nn.Linear(8, 8), sees

        def forward(self, x):
            y = self.mix(x)
            before = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], 1) if self.sees else y.cumsum(1)
            return x + self.out(before.tanh())

    class Model(nn.Module):
        def __init__(self, blind=None):
            super().__init__()
            self.embedding = nn.Embedding(13, 8)
            self.layers = nn.ModuleList(Shifted(sees=i != blind) for i in range(3))

        def forward(self, tokens):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            return x

    assert result(Model(), text()).status == "holds"
    assert "layers.1 ignores the order" in result(Model(blind=1), text()).text


def test_patches_of_pictures():
    class Patches(nn.Module):
        def __init__(self, *, positions):
            super().__init__()
            self.patches, self.head = nn.Conv2d(3, 8, 4, stride=4), nn.Linear(8, 5)
            self.position_embeddings = nn.Parameter(torch.randn(16, 8))
            self.has_positions = positions
            self.mix = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

        def forward(self, x):
            x = self.patches(x).flatten(2).mT
            if self.has_positions:
                x = x + self.position_embeddings
            return self.head(self.mix(x).mean(1))

    x = torch.randn(2, 3, 16, 16)
    assert result(Patches(positions=True), x).status == "holds"
    assert result(Patches(positions=False), x).status == "broken"


def test_one_token_does_not_apply():
    assert result(made(), torch.arange(3).view(3, 1)).status == "does not apply"
