"""Copies of tied weights, as adapters make them, and copies that are meant to part."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradiometer as gm
from gradiometer.rules import Severity, Untied


class Saved(nn.Module):
    """A frozen module and a trained copy, as PEFT makes them of `modules_to_save`."""

    def __init__(self, original):
        super().__init__()
        self.copy = copy.deepcopy(original).requires_grad_()
        self.original_module = original.requires_grad_(requires_grad=False)

    def forward(self, x):
        return self.copy(x)


class Language(nn.Module):
    def __init__(self, *, tied=True):
        super().__init__()
        self.embed, self.body = nn.Embedding(24, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 24, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.body(self.embed(tokens))))


def both():
    model = Language().requires_grad_(requires_grad=False)
    model.embed, model.head = Saved(model.embed), Saved(model.head)
    return model, model


def shared():
    model, _ = both()
    model.head.copy.weight = model.embed.copy.weight
    return model, model


def one(*, tied=True):
    model = Language(tied=tied).requires_grad_(requires_grad=False)
    model.head = Saved(model.head)
    return model, model


def teacher(*, tied):
    student = Language(tied=tied)
    if not tied:
        student.head.weight.data.copy_(student.embed.weight)
    average = copy.deepcopy(student).requires_grad_(requires_grad=False)
    return nn.ModuleDict({"average": average, "student": student}), student


def findings(watched, model):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with gm.watch(watched, optimizer, weights=True, rules=[Untied()]) as monitor:
        for _ in range(6):
            tokens = torch.randint(0, 24, (32,))
            loss = functional.cross_entropy(model(tokens), tokens)
            loss.backward()
            monitor.note(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    return monitor.findings


def test_two_trained_copies_of_one_tied_weight():
    (found,) = findings(*both())
    assert found.severity is Severity.WARNING
    assert found.message == (
        "embed.copy.weight and head.copy.weight had equal values at the start, and differ now: they are "
        "copies, not tied weights, though both are copies of one weight, embed.original_module.weight and "
        "head.original_module.weight"
    )
    assert "ensure_weight_tying" in found.advice


def test_one_trained_copy_of_a_frozen_tied_weight_is_info():
    (found,) = findings(*one())
    assert (found.severity, found.tensor) == (Severity.INFO, "head.copy.weight")
    assert (
        "is a copy of embed.weight and head.original_module.weight, one weight that is frozen"
        in found.message
    )


def test_an_average_does_not_hide_a_copy_that_is_not_tied():
    (found,) = findings(*teacher(tied=False))
    assert "student.embed.weight and student.head.weight had equal values" in found.message


@pytest.mark.parametrize(
    ("make", "options"), [(shared, {}), (one, {"tied": False}), (teacher, {"tied": True})]
)
def test_copies_that_are_meant_to_part_are_quiet(make, options):
    assert findings(*make(**options)) == []


def test_layers_that_start_as_copies_of_one_are_quiet():
    first = nn.Linear(16, 16)
    model = nn.Sequential(nn.Embedding(24, 16), *(copy.deepcopy(first) for _ in range(4)), nn.Linear(16, 24))
    assert findings(model, model) == []
