"""What the host reads of a model at the end of a step."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import gradiometer as gm
from gradiometer.checks import loss_graph
from gradiometer.monitor import model_reader
from gradiometer.monitor.model_reader import ModelReader
from gradiometer.recorder import Driver


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding(x))


def reader_of(model):
    return ModelReader(model, gm.Recorder(model))


def test_a_state_is_the_same_object_until_something_changes():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Dropout(0.0))
    reader = reader_of(model)
    state = reader.read(None, afresh=True)
    assert (state.requires_grad, state.evaluating, state.untied) == ((True,) * 4, "", ())
    assert reader.read(None, afresh=True) is reader.read(None, afresh=False) is state
    model.eval()
    # layers that never change anything are not named
    assert reader.read(None, afresh=False).evaluating == "1 BatchNorm1d, 1 Dropout"
    # frozen statistics on purpose
    model.train()
    model[1].eval()
    assert reader.read(None, afresh=True).evaluating == ""
    model[0].requires_grad_(False)
    assert reader.read(None, afresh=True).requires_grad == (False, False, True, True)


def test_parameters_that_are_tied_no_more_are_named_at_once():
    model = Tied()
    reader = reader_of({"a": model})
    assert reader.read(None, afresh=True).untied == ()
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    assert reader.read(None, afresh=False).untied == (("a.embedding.weight", "a.head.weight"),)


def test_the_first_loss_with_a_graph_tells_whether_it_depends_on_the_model(monkeypatch):
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    x = torch.ones(1, 2)
    for source, expected in ((model, True), (other, False)):
        reader = reader_of(model)
        assert reader.read(1.0, afresh=True).reached is None
        assert reader.read(source(x).sum().detach(), afresh=False).reached is None
        loss = source(x).sum()
        loss.backward()
        assert reader.read(loss, afresh=False).reached is expected
        assert reader.read(other(x).sum(), afresh=False).reached is expected
    # a graph that is too large is looked at once, in part
    reader, calls = reader_of(model), []
    real = model_reader.leaves_of
    monkeypatch.setattr(loss_graph, "_NODES", 3)
    monkeypatch.setattr(model_reader, "leaves_of", lambda *args: calls.append(1) or real(*args))
    deep = x
    for _ in range(10):
        deep = other(deep).expand(1, 2) + 1
    for _ in range(3):
        assert reader.read(deep.sum(), afresh=False).reached is None
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("clear", "writes"),
    [
        (lambda _: None, [0, 1, 1, 1]),
        (lambda p: setattr(p, "grad", None), [0, 0, 0, 0]),
        (lambda p: p.grad.zero_(), [0, 2, 2, 2]),
    ],
    ids=["never", "to none", "in place"],
)
def test_in_place_writes_of_the_first_gradient_are_counted(clear, writes):
    model = nn.Linear(2, 1)
    reader, found = reader_of(model), []
    for _ in range(4):
        model(torch.ones(1, 2)).sum().backward()
        found.append(reader.read(None, afresh=False).grad_writes)
        clear(model.weight)
    assert found == writes


def test_a_gradient_is_not_kept_alive():
    model = nn.Linear(2, 1)
    reader = reader_of(model)
    model(torch.ones(1, 2)).sum().backward()
    reader.read(None, afresh=False)
    grad, model.weight.grad = model.weight.grad, None
    model.bias.grad = None
    alive = weakref.ref(grad)
    del grad
    assert alive() is None
    assert reader.read(None, afresh=False).grad_writes == 0


def test_a_loss_under_a_reentrant_checkpoint_may_depend_on_the_model():
    model, x = nn.Linear(2, 1), torch.ones(1, 2, requires_grad=True)
    loss = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True).sum()
    # the graph inside is built in the backward
    assert reader_of(model).read(loss, afresh=True).reached is None
    other = torch.utils.checkpoint.checkpoint(nn.Linear(2, 1), x, use_reentrant=False).sum()
    assert reader_of(model).read(other, afresh=True).reached is False


def test_a_model_that_gets_no_gradient_is_not_trained_in_evaluation_mode():
    student, teacher = nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.5)), nn.Sequential(nn.Linear(2, 1))
    teacher.append(nn.Dropout(0.5)).eval()
    reader = reader_of({"student": student, "teacher": teacher})
    student(torch.ones(1, 2)).sum().backward()
    reader.note()
    assert reader.read(None, afresh=True).evaluating == ""
    teacher(torch.ones(1, 2)).sum().backward()
    reader.note()
    assert reader.read(None, afresh=True).evaluating == "1 Dropout"


def test_the_learning_rates_are_those_of_the_update_and_not_of_the_next():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    reader = reader_of(model)
    state = reader.read(None, afresh=True)
    assert (state.driver, state.optimizers) == ("loop", None)
    reader.set_driver(Driver("watch", (optimizer,)))
    reader.note()
    optimizer.param_groups[0]["lr"] = 0.0
    state = reader.read(None, afresh=False)
    assert (state.driver, state.optimizers.rates, state.optimizers.groups) == ("watch", (0.1,), (0, -1))
    reader.note()
    changed = reader.read(None, afresh=False)
    assert changed.optimizers.rates == (0.0,)
    assert changed.requires_grad is state.requires_grad
    reader.note()
    assert reader.read(None, afresh=True) is changed


def test_gradients_that_no_optimizer_clears_are_not_counted():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD([model.bias], lr=0.1)
    reader, found = reader_of(model), []
    reader.set_driver(Driver("watch", (optimizer,)))
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        found.append(reader.read(None, afresh=False).grad_writes)
        optimizer.zero_grad()
    # only the weight's gradient is written again
    assert found == [0, 0, 0]


def test_inputs_that_are_no_modules_have_a_state_too():
    weight = torch.ones(2, requires_grad=True)
    state = reader_of({"w": weight}).read(weight.sum(), afresh=True)
    assert (state.requires_grad, state.reached, state.evaluating) == ((True,), True, "")
