import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gradiometer.checks import check_model

torch.set_num_threads(1)
TOKENS = torch.randint(0, 10, (2, 6), generator=torch.Generator().manual_seed(0))
VALUES = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def result(model, batch=TOKENS, **options):
    return check_model(model, batch, only=["tied_weights"], **options)["tied_weights"]


class Language(nn.Module):
    """Has what a model of Hugging Face says of its embeddings."""

    def __init__(self, *, tied=True, config=True):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        if config is not None:
            self.config = SimpleNamespace(model_type="test", tie_word_embeddings=config)

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.head

    def forward(self, tokens, labels=None):
        logits = self.logits(self.body(self.embedding(tokens)))
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}

    def logits(self, x):
        return self.head(x)


class Detached(Language):
    def logits(self, x):
        return x @ self.head.weight.detach().T


def test_weights_that_the_config_ties():
    assert str(result(Language()).status) == "holds"
    assert str(result(Language(tied=False, config=False)).status) == "holds"
    found = result(Language(tied=False))
    assert found.text == "head.weight and embedding.weight are separate tensors, but the config ties them"
    found = result(Language(config=False))
    assert found.text == "head.weight is embedding.weight, though config.tie_word_embeddings is False"
    assert found.is_failure


def test_weights_that_a_model_says_are_tied():
    model = Language(config=None, tied=False)
    model.all_tied_weights_keys = {"head.weight": "embedding.weight"}
    assert result(model).is_failure
    model.head.weight = model.embedding.weight
    assert str(result(model).status) == "holds"


@pytest.mark.parametrize("how", ["data", "clone"])
def test_copies_of_an_embedding(how):
    model = Language(tied=False, config=None)
    weight = model.embedding.weight
    if how == "data":
        # one storage, and two gradients
        model.head.weight.data = weight.data
    else:
        model.head.weight = nn.Parameter(weight.detach().clone())
    found = result(model)
    assert found.text == "embedding.weight and head.weight are separate tensors with equal values"
    assert found.is_failure


def test_the_output_trains_a_tied_weight():
    labels = {"tokens": TOKENS, "labels": TOKENS}
    assert str(result(Language(), labels).status) == "holds"
    found = result(Detached(), labels)
    assert found.is_failure
    assert found.text.startswith("the output does not train embedding.weight")


def test_layers_that_are_copies_by_design():
    layer = nn.Linear(8, 8)
    model = nn.Sequential(*(copy.deepcopy(layer) for _ in range(3)))
    assert str(result(model, VALUES).status) == "holds"


def test_equal_values_that_are_not_random():
    model = nn.ModuleDict({"first": nn.Linear(8, 8), "second": nn.Linear(8, 8)})
    for layer in model.values():
        nn.init.eye_(layer.weight)

    def forward(model, x):
        return model["second"](model["first"](x))

    assert str(result(model, VALUES, forward=forward).status) == "holds"


def test_a_layer_that_is_twice_in_a_list():
    layer = nn.Linear(8, 8)
    found = result(nn.Sequential(*[layer] * 3), VALUES)
    assert found.text == "layers 0, 1, 2 of the model are the same module"
    assert found.is_failure
    relu = nn.ReLU()
    assert str(result(nn.Sequential(nn.Linear(8, 8), relu, nn.Linear(8, 8), relu), VALUES).status) == "holds"


def test_a_parameter_of_two_layers():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    assert result(model, VALUES).text == "0.weight and 1.weight are the same tensor"


def test_a_layer_that_is_called_twice():
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.alias = self.layer

        def forward(self, x):
            return self.layer(self.layer(x).relu())

    assert str(result(Recursive(), VALUES).status) == "holds"
