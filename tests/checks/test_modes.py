"""The contract of modes: training, evaluation, and what sets them."""

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.rules import Severity
from support.small_models import Transformer, text


def model(**rest):
    torch.manual_seed(0)
    return Transformer(**{"blocks": 3, "causal": True, "dropout": 0.1} | rest)


def result(module, batch=None):
    batch = text() if batch is None else batch
    return gm.check_model(module, batch, only=["modes"])["modes"]


def test_a_model_in_training_mode():
    assert result(model()).status == "holds"


def test_modes_are_those_that_were_given():
    m = model()
    m.blocks[1].dropout.eval()
    before = [x.training for x in m.modules()]
    assert result(m).is_failure
    assert [x.training for x in m.modules()] == before


@pytest.mark.parametrize("path", ["blocks.1", "blocks.0.dropout", "blocks.2.mlp", "head", "blocks"])
def test_a_part_in_evaluation_mode_is_named(path):
    m = model()
    m.get_submodule(path).eval()
    found = result(m)
    assert found.is_failure
    assert found.evidence[0].name == path


@pytest.mark.parametrize("path", ["blocks.1.mlp.1", "blocks.1.dropout"])
def test_parts_that_evaluation_mode_does_not_change(path):
    m = model(dropout=0.0)
    m.get_submodule(path).eval()
    assert result(m).status == "holds"


def test_dropout_that_is_off_everywhere_is_noted():
    m = model()
    for block in m.blocks:
        block.dropout.eval()
    found = result(m)
    assert (found.status, found.severity) == ("broken", Severity.INFO)


def test_a_frozen_part_in_evaluation_mode_is_noted():
    m = model()
    m.blocks[0].eval().requires_grad_(False)
    found = result(m)
    assert (found.status, found.severity) == ("broken", Severity.INFO)
    assert "blocks.0: frozen" in found.text


def test_frozen_batch_norm_is_noted():
    m = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    m[1].eval()
    found = result(m, torch.randn(3, 4))
    assert (found.status, found.severity) == ("broken", Severity.INFO)
    assert "BatchNorm in evaluation mode" in found.text


def test_a_model_in_evaluation_mode_is_noted():
    found = result(model().eval())
    assert (found.status, found.severity) == ("broken", Severity.INFO)
    assert "call model.train()" in found.evidence[0].advice


def test_a_new_head_of_a_model_in_evaluation_mode_is_noted():
    m = model().eval()
    m.head = nn.Linear(8, 13)
    found = result(m)
    assert (found.status, found.severity) == ("broken", Severity.INFO)
    assert "apart from head" in found.text


def test_one_layer_in_training_mode_in_a_model_in_evaluation_mode():
    m = model().eval()
    m.blocks[1].train()
    found = result(m)
    assert found.is_failure
    assert found.evidence[0].name == "blocks.1"


class Stubborn(Transformer):
    """A model whose `train` forgets its modules."""

    def train(self, mode=True):
        self.training = mode
        return self


class Deaf(Transformer):
    def train(self, mode=True):  # noqa: ARG002
        return self


class Partial(nn.Module):
    """A backbone whose norm stays in evaluation mode, on purpose."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.layer, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        self.rate = 1.0
        return self

    def forward(self, x):
        return self.dropout(self.norm(self.layer(x)))


@pytest.mark.parametrize(
    ("kind", "word"),
    [(Stubborn, "blocks.0.dropout stays in training"), (Deaf, "the model stays in training")],
)
def test_train_that_does_not_set_modes(kind, word):
    m = kind(blocks=2, dropout=0.1)
    found = result(m)
    assert found.is_failure
    assert f"{word} mode after model.eval()" in found.text


def test_an_override_that_keeps_a_norm_in_evaluation_mode():
    m = Partial().train()
    before = {name: (x.training, dict(vars(x))) for name, x in m.named_modules()}
    found = result(m, torch.randn(3, 4))
    assert found.severity is Severity.INFO
    assert {name: (x.training, dict(vars(x))) for name, x in m.named_modules()}.keys() == before.keys()
    assert m.training
    assert m.dropout.training


@pytest.mark.parametrize("frozen", [False, True])
def test_a_forward_that_sets_modes(frozen):
    m = model()
    block, forward = m.blocks[1], m.blocks[1].forward

    def evaluated(x, kept):
        block.eval()
        return forward(x, kept)

    block.forward = evaluated
    block.requires_grad_(not frozen)
    found = result(m)
    assert found.is_failure is not frozen
    assert frozen or "the forward sets blocks.1," in found.text
    assert block.training


def test_gradients_that_are_off():
    with torch.no_grad():
        found = result(model())
    assert found.is_failure
    assert "torch.no_grad is on" in found.text
    assert result(model()).status == "holds"


def test_weights_made_in_inference_mode():
    with torch.inference_mode():
        m = nn.Linear(4, 2)
    found = result(m, torch.randn(3, 4))
    assert found.is_failure
    assert "weight, bias were created in inference mode" in found.text


def test_a_pretrained_model_inside_a_new_one_is_noted():
    class Pretrained(nn.Sequential):
        @classmethod
        def _from_config(cls, config):
            raise NotImplementedError

    m = nn.Sequential(Pretrained(nn.Linear(4, 4), nn.Dropout(0.1)).eval(), nn.Linear(4, 2))
    found = result(m, torch.randn(3, 4))
    assert (found.status, found.severity) == ("broken", Severity.INFO)
    assert "from_pretrained" in found.evidence[0].advice
