"""What check_model restores beyond weights: containers, objects, plain tensors, generators and the batch."""

import random
from collections import UserDict, deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import gradiometer as gm
from gradiometer.checks.kept_objects import same_bits


class Memory:
    def __init__(self):
        self.keys = []


class Slotted(nn.Module):
    __slots__ = ("calls",)

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.last = x
        return x


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.slotted = nn.Linear(8, 8), Slotted()
        self.keys, self.counts, self.seen, self.recent = [], {"calls": 0}, set(), deque(maxlen=2)
        self.mean, self.array, self.memory = torch.zeros(8), np.zeros(3), Memory()
        self.generator, self.numbers = torch.Generator().manual_seed(3), np.random.RandomState(0)
        self.new, self.plain = np.random.default_rng(0), random.Random(0)  # noqa: S311
        self.hidden = [nn.BatchNorm1d(8)]

    def forward(self, x):
        self.keys.append(x)
        self.counts["calls"] += 1
        self.seen.add(len(self.keys))
        self.recent.append(x)
        self.memory.keys.append(x)
        self.mean.add_(x.detach().float().mean(0))
        self.array += 1
        self.hidden[0].train()(x.detach().float())
        torch.rand(1, generator=self.generator)
        self.numbers.rand(), self.new.random(), self.plain.random()
        x.mul_(0.5)
        return self.slotted(self.layer(x))


def test_what_a_forward_keeps_is_forgotten():
    model, x = Stateful(), torch.randn(4, 8)
    own, values = model.generator.get_state(), x.clone()
    gm.check_model(model, x)
    assert (model.keys, model.counts, model.seen) == ([], {"calls": 0}, set())
    assert not model.recent
    assert not model.memory.keys
    assert model.slotted.calls == 0
    assert not hasattr(model.slotted, "last")
    assert not bool(model.mean.any())
    assert not model.array.any()
    assert int(model.hidden[0].num_batches_tracked) == 0
    assert torch.equal(model.generator.get_state(), own)
    assert model.numbers.rand() == np.random.RandomState(0).rand()
    assert model.new.random() == np.random.default_rng(0).random()
    assert model.plain.random() == random.Random(0).random()  # noqa: S311
    assert torch.equal(x, values)


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_loss_may_take_entries_out_of_the_batch(kind):
    batch = kind({"x": torch.randn(4, 8), "labels": torch.tensor([0, 1, 2, 0])})

    def loss(model, given):
        return functional.cross_entropy(model(given.pop("x")), given.pop("labels"))

    report = gm.check_model(
        nn.Linear(8, 3), batch, forward=lambda model, given: model(given.pop("x")), loss=loss
    )
    assert report["parameter_gradients"].status == "holds"
    assert report["registered"].status == "holds"
    assert set(batch) == {"x", "labels"}


def test_gradients_are_restored_if_the_loss_runs_the_backward():
    model, x = nn.Linear(8, 3), torch.randn(4, 8)
    model(x).square().mean().backward()
    before = model.weight.grad.clone()

    def loss(given, batch):
        found = given(batch).square().mean()
        found.backward(retain_graph=True)
        return found

    gm.check_model(model, x, loss=loss)
    assert torch.equal(model.weight.grad, before)


def test_an_input_that_is_made_to_require_a_gradient():
    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def forward(self, x):
            with torch.enable_grad():
                energy = self.layer(x.requires_grad_()).tanh().sum()
                return torch.autograd.grad(energy, x, create_graph=True)[0]

    x = torch.randn(4, 8)
    gm.check_model(Force(), x)
    assert not x.requires_grad


def test_bits_of_one_element_with_a_stride():
    x = torch.arange(9)[::4][:1]
    assert same_bits(x, x.clone())
    assert not same_bits(x, x + 1)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_script_module():
    model = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)))
    report = gm.check_model(model, torch.randn(4, 8))
    assert report
    assert report["parameter_gradients"].status == "holds"
    assert report["registered"].status == "holds"


def test_inside_inference_mode_gradients_are_still_computed():
    with torch.inference_mode():
        report = gm.check_model(nn.Linear(8, 8), torch.randn(4, 8), only=["input_gradients"])
    assert report["input_gradients"].status == "holds"


def test_objects_of_other_packages_are_left_alone():
    import logging

    class Logged(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.log = nn.Linear(2, 2), logging.LoggerAdapter(logging.getLogger("x"), {})

        def forward(self, x):
            # as a thread of its own does meanwhile
            self.log.seen = getattr(self.log, "seen", 0) + 1
            return self.linear(x)

    model = Logged()
    gm.check_model(model, torch.randn(3, 2), only=["examples"])
    assert model.log.seen > 1
