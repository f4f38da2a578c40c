"""Contracts of randomness: repeatable and dropout."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradiometer.checks import check_model
from gradiometer.rules import Severity
from kernels_bench.zoo.transformers.models import BERT, GPT, T5, ViT
from kernels_bench.zoo.transformers.tasks import causal, images, masked, translated


def results(model, batch):
    return check_model(model, batch, only=["repeatable", "dropout"])


class Block(nn.Module):
    """A residual block whose parts may be exchanged."""

    def __init__(self, p=0.2):
        super().__init__()
        self.norm, self.mix, self.dropout = nn.LayerNorm(16), nn.Linear(16, 16), nn.Dropout(p)

    def forward(self, x):
        return self.after(x + self.branch(x))

    def branch(self, x):
        return self.dropout(self.mix(self.norm(x)))

    def after(self, x):
        return x


class Model(nn.Module):
    """Residual blocks between an embedding and a head."""

    def __init__(self, blocks=3, kind=Block, **options):
        super().__init__()
        self.embedding, self.head = nn.Embedding(30, 16), nn.Linear(16, 30)
        self.start = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(kind(**options) for _ in range(blocks))
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens):
        x = self.start(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        return self.end(self.norm(x))

    def end(self, x):
        return self.head(x)


TOKENS = torch.arange(40).view(4, 10) % 30


class DropsStream(Block):
    def after(self, x):
        return self.dropout(x)


class DropsStreamBySteps(Block):
    def after(self, x):
        if not self.training:
            return x
        return x * (torch.rand_like(x) > 0.2) / 0.8


class DropsNormedStream(Block):
    def forward(self, x):
        return self.dropout(self.norm(x + self.mix(x)))


class Idle(Block):
    def branch(self, x):
        self.dropout.training = False
        return super().branch(x)


class Dropout(nn.Dropout):
    def forward(self, x):
        return functional.dropout(x, self.p, training=False)


class Overridden(Block):
    def __init__(self):
        super().__init__()
        self.dropout = Dropout(0.2)


class Scores(Block):
    def branch(self, x):
        x = self.norm(x)
        scores = self.dropout(self.mix(x) @ x.mT / 4)
        return scores.softmax(-1) @ x


class DropsLast(Model):
    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(self.start(x)))


class DropsLogits(Model):
    def end(self, x):
        return self.start(self.head(x))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Model(kind=DropsStream), "drops the residual stream itself"),
        (Model(kind=DropsStreamBySteps), "drops the residual stream itself"),
        (Model(kind=DropsNormedStream), "drops the residual stream itself"),
        (Model(kind=Idle), "has p=0.2, but drops nothing"),
        (Model(kind=Overridden), "blocks.0.dropout (and 2 more) has p=0.2, but drops nothing"),
        (Model(kind=Scores), "drops attention scores before the softmax"),
        (DropsLogits(), "drops the output of the model"),
        (DropsLast(), "drops the residual stream itself"),
        (Model(p=1.0), "drops everything"),
    ],
    ids=range(9),
)
def test_a_fault_of_dropout_is_told(model, text):
    report = results(model, TOKENS)
    found = report["dropout"]
    assert found.is_failure, found
    assert any(text in evidence.text for evidence in found.evidence), found.evidence
    assert report["repeatable"].status == "holds"


def test_dropout_that_is_the_same_in_each_forward():
    class Same(Model):
        def forward(self, tokens):
            torch.manual_seed(7)
            return super().forward(tokens)

    assert "whatever the seed" in results(Same(), TOKENS)["dropout"].text


def test_notes_do_not_fail():
    found = results(Model(p=0.9), TOKENS)["dropout"]
    assert found.severity == Severity.INFO
    assert "is p meant as the fraction that is kept?" in found.text
    model = Model()
    model.blocks[1].branch = lambda x: model.blocks[1].mix(model.blocks[1].norm(x))
    found = results(model, TOKENS)["dropout"]
    assert found.severity == Severity.INFO
    assert found.text == "blocks.1.dropout is never called, although similar modules are"


@pytest.mark.parametrize(
    ("make", "task"),
    [
        (lambda: GPT(dropout=0.1), causal(4)),
        (lambda: GPT(dropout=0.1, recompute=True), causal(4)),
        (lambda: BERT(dropout=0.2), masked(4)),
        (lambda: BERT(dropout=0.2, pre=True), masked(4)),
        (lambda: T5(dropout=0.1), translated()),
        (lambda: ViT(dropout=0.3), images()),
        (Model, (lambda: TOKENS,)),
    ],
    ids=range(7),
)
def test_healthy_models_hold(make, task):
    report = results(make(), task[0]())
    assert report["dropout"].status == "holds", report["dropout"]
    assert report["repeatable"].status == "holds"


def test_dropout_before_a_classifier_and_after_the_embedding_hold():
    class Classifier(Model):
        def end(self, x):
            return self.head(self.start(x))

    assert results(Classifier(), TOKENS)["dropout"].status == "holds"


def test_dropout_behind_a_weight_of_zero_holds():
    model = Model()
    for block in model.blocks:
        nn.init.zeros_(block.mix.weight)
        nn.init.zeros_(block.mix.bias)
    assert results(model, TOKENS)["dropout"].status == "holds"


def test_a_model_without_dropout():
    report = results(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0)), torch.randn(4, 3))
    assert report["dropout"].status == "does not apply"
    assert report["repeatable"].status == "holds"


class Random(Block):
    def branch(self, x):
        return functional.dropout(self.mix(self.norm(x)), 0.1)


class Noisy(Block):
    def after(self, x):
        return x + 1e-3 * torch.randn_like(x)


class Uninitialized(Block):
    def branch(self, x):
        y = torch.empty_like(x)
        y[:, 1:] = x[:, 1:]
        return y


class Counts(Block):
    calls = 0

    def branch(self, x):
        self.calls += 1
        return self.mix(x) * self.calls


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Random, "due to random numbers; first in blocks.0 (Random)"),
        (Noisy, "due to random numbers; first in blocks.0 (Noisy)"),
        (Counts, "kept state; first in blocks.0 (Counts)"),
        (Uninitialized, "uninitialized memory changes the output"),
    ],
)
def test_forwards_that_differ_are_told(kind, text):
    found = results(Model(kind=kind), TOKENS)["repeatable"]
    assert found.is_failure, found
    assert text in found.text


def test_a_model_that_samples_is_only_noted():
    class TinyVAE(Model):
        def end(self, x):
            return self.head(x + torch.randn_like(x))

    found = results(TinyVAE(), TOKENS)["repeatable"]
    assert found.status == "broken"
    assert found.severity == Severity.INFO


def test_random_states_and_hooks_are_as_before():
    model, state = Model(), torch.get_rng_state()
    results(model, TOKENS)
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert not any(x._forward_hooks or x._forward_pre_hooks for x in model.modules())


def test_one_example_of_bf16_with_dropout():
    report = results(Model().to(torch.bfloat16), TOKENS[:1])
    assert report["dropout"].status == "holds"
    assert report["repeatable"].status == "holds"
