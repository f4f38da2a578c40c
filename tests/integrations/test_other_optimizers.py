"""Optimizers that are not watched, but that update watched parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.rules import LoopOrder


def train(step_of, *, steps=10, watched=0, count=2, **options):
    """Train with optimizers; ``step_of(optimizers)`` is a step of the loop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for _ in range(count)]
    with gm.watch(model, optimizers[watched], rules=[LoopOrder()], **options) as monitor:
        for _ in range(steps):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            step_of(optimizers)
    assert monitor.failures == {}
    return monitor.findings


def test_another_optimizer_of_the_same_parameters_is_found():
    (found,) = train(lambda both: [optimizer.step() for optimizer in both])
    assert found.severity == gm.Severity.WARNING
    assert (
        "outside of the watched optimizer since step 1: SGD updates 0.weight and 3 more, too" in found.message
    )


def test_an_optimizer_of_other_parameters_is_none_of_ours():
    other = nn.Linear(2, 1)
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)

    def step(optimizers):
        optimizers[0].step()
        other(torch.ones(1, 2)).sum().backward()
        theirs.step()

    assert train(step, count=1) == []


def test_an_optimizer_that_steps_once_is_no_mistake():
    left = [3]

    def step(optimizers):
        optimizers[0].step()
        if left:
            left.pop()
            optimizers[1].step()

    assert train(step) == []


class Around(torch.optim.SGD):
    """Steps another optimizer of its parameters inside of its own step, before or after it."""

    def __init__(self, parameters, inner):
        super().__init__(parameters, lr=0.01)
        self.inner = inner

    def step(self, closure=None):
        self.inner.step()
        return super().step(closure)


@pytest.mark.parametrize("is_inner_watched", [False, True])
def test_an_optimizer_inside_of_another_is_a_part_of_it(is_inner_watched):
    model = nn.Linear(4, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    outer = Around(model.parameters(), inner)
    with gm.watch(model, inner if is_inner_watched else outer, rules=[LoopOrder()]) as monitor:
        for _ in range(8):
            outer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            outer.step()
    assert monitor.findings == []


def test_the_hooks_are_gone_after_the_watch():
    from torch.optim import optimizer

    before = len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)
    train(lambda both: both[0].step())
    assert (
        len(optimizer._global_optimizer_pre_hooks),
        len(optimizer._global_optimizer_post_hooks),
    ) == before


def test_another_optimizer_may_be_compiled():
    model, other = nn.Linear(4, 1), nn.Linear(2, 1)
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.watch(model, ours, rules=[LoopOrder()]) as monitor:
        other(torch.ones(1, 2)).sum().backward()
        before = other.weight.detach().clone()
        torch.compile(theirs.step, backend="aot_eager")()
        assert not torch.equal(before, other.weight)
        for _ in range(5):
            ours.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            ours.step()
    assert monitor.findings == []
