import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from gradiometer.checks import check_model

torch.set_num_threads(1)
VALUES = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def loss(model, batch):
    return model(batch).square().mean()


def result(model, optimizer, name="optimizer", **options):
    return check_model(model, VALUES, optimizer=optimizer, only=[name], **({"loss": loss} | options))[name]


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def test_it_holds(model):
    parts = [SGD(model[0].parameters(), 0.1), Adam(model[1:].parameters())]
    for optimizer in (
        SGD(model.parameters(), 0.1),
        parts,
        SimpleNamespace(optimizer=SGD(model.parameters(), 0.1)),
        SimpleNamespace(optimizers=parts),
    ):
        assert str(result(model, optimizer).status) == "holds"
    assert "pass optimizer=" in result(model, None).text


def test_what_it_lacks(model):
    found = result(model, SGD([*model[0].parameters(), model[2].weight], 0.1))
    assert found.is_failure
    assert found.text == "the optimizer does not hold 1.weight, 1.bias, 2.bias"


def test_parameters_of_a_copy(model):
    found = result(model, SGD(copy.deepcopy(model).parameters(), 0.1))
    assert found.text.startswith(
        "the optimizer does not hold 0.weight, 0.bias, 1.weight and 3 more, but holds tensors"
    )


def test_a_parameter_that_was_replaced(model):
    optimizer = SGD(model.parameters(), 0.1)
    model[2] = nn.Linear(8, 2).requires_grad_(False)
    found = result(model, optimizer)
    assert found.is_failure
    assert found.text.startswith("the optimizer holds tensors unknown to the model, of shape (2, 8), (2,)")
    # without a loss of the caller, they may be that loss's
    assert not result(model, optimizer, loss=None).is_failure


def test_a_loss_with_parameters(model):
    scale = nn.Parameter(torch.ones(()))
    optimizer = SGD([*model.parameters(), scale], 0.1)
    found = result(model, optimizer, loss=lambda model, batch: loss(model, batch) * scale)
    assert str(found.status) == "holds"


def test_master_weights(model):
    model.to(torch.bfloat16)
    optimizer = SGD([nn.Parameter(p.detach().float()) for p in model.parameters()], 0.1)
    found = check_model(model, VALUES.bfloat16(), optimizer=optimizer, only=["optimizer"])
    assert str(found["optimizer"].status) == "holds"


def test_two_optimizers_of_one_parameter(model):
    found = result(model, [SGD(model.parameters(), 0.1), Adam(model[2].parameters())])
    assert found.text == "more than one parameter group holds 2.weight, 2.bias"


def test_odd_groups_are_noted(model):
    model[0].requires_grad_(False)
    groups = [{"params": list(layer.parameters())} for layer in model]
    optimizer = SGD(groups, 0.1)
    optimizer.param_groups[1]["lr"] = 0.0
    found = result(model, optimizer)
    assert not found.is_failure
    assert [each.text for each in found.evidence] == [
        "group 0 holds frozen parameters only: 0.weight, 0.bias",
        "the learning rate of group 1 is 0",
    ]
    # a schedule that starts at 0
    optimizer.param_groups[1]["initial_lr"] = 0.1
    assert len(result(model, optimizer).evidence) == 1


def test_weight_decay(model):
    found = result(model, AdamW(model.parameters()), "weight_decay")
    assert not found.is_failure
    assert (
        found.text
        == "weight decay also applies to 4 norms, biases and vectors: 0.bias, 1.weight, 1.bias and 1 more"
    )
    matrices = [p for p in model.parameters() if p.dim() > 1]
    assert str(result(model, AdamW(matrices), "weight_decay").status) == "holds"
    assert str(result(model, Adam(model.parameters()), "weight_decay").status) == "holds"
    found = result(model, Adam(matrices, weight_decay=0.1), "weight_decay")
    assert found.text == "Adam adds weight_decay=0.1 to the gradients, as L2 regularization"
    assert str(result(model, None, "weight_decay").status) == "does not apply"
