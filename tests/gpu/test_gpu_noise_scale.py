"""The gradient noise scale on a real device: the oracle's value, no waits, captured and compiled steps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import gradiometer as gm
from support.gpu import DEVICE, FEW, compiled, no_waits, no_waits_on_a_gpu, record
from support.noise_oracle import least_squares

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("_dynamo"), pytest.mark.filterwarnings("default")]

F64 = torch.float64
BATCH, MICRO, DECAY = 4, 3, 0.5
GROUPS = {"first": r"^0\.", "second": r"^2\.", "all": ""}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(DEVICE, F64)


def inputs() -> Tensor:
    """Return the examples of each micro-batch; with a mean, so that the gradient is clear."""
    return 1 + torch.randn(MICRO, BATCH, 3, dtype=F64, device=DEVICE)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 4).square().mean()


class ByHand:
    """The noise scale of each group, from the gradients of the micro-batches of each step."""

    def __init__(self) -> None:
        self.weight, self.mean = 0.0, torch.zeros(len(GROUPS), 2, dtype=F64)

    def step(self, model: nn.Module, batches: Tensor) -> None:
        each = [torch.autograd.grad(loss_of(model, x), list(model.parameters())) for x in batches]
        rows = [[g.flatten().cpu() for g in grads] for grads in each]
        estimates = []
        for part in (slice(2), slice(2, None), slice(None)):
            sums = torch.stack([torch.cat(row[part]) for row in rows]).cumsum(0)
            squares = sums.square().sum(1)
            # the last norm is that of the one rank
            signal, noise = least_squares(squares, MICRO - 1, 1, MICRO)
            estimates.append(torch.stack([signal, noise * BATCH]))
        self.weight = DECAY * self.weight + 1 - DECAY
        self.mean += (1 - DECAY) / self.weight * (torch.stack(estimates) - self.mean)

    def check(self, noise: gm.NoiseScale, found: Tensor) -> None:
        """Compare the averages, and the noise scale that they give."""
        assert found.device.type == DEVICE
        # the condition number of the least squares is below 1e4 n²
        close = {"rtol": 1e-9, "atol": 1e-9 * self.mean.abs().max().item()}
        torch.testing.assert_close(noise.average.value.T.cpu(), self.mean, **close)
        for scale, (signal, trace) in zip(found.tolist(), noise.average.value.T.tolist(), strict=True):
            expected = max(trace, 0.0) / signal if signal > 0 else math.inf
            assert scale == pytest.approx(expected, rel=1e-12)


def zero(model: nn.Module) -> None:
    # in place, since a captured step reads these addresses
    model.zero_grad(set_to_none=False)


def accumulate(model: nn.Module, noise: gm.NoiseScale, batches: Tensor) -> Tensor:
    for x in batches:
        loss_of(model, x).div(MICRO).backward()
        noise.add(gm.collect_grads(model))
    return noise.step()


def test_it_is_the_value_computed_by_hand_and_never_waits():
    model, by_hand = model_of(), ByHand()
    noise = gm.NoiseScale(BATCH, groups=GROUPS, decay=DECAY, device=DEVICE)
    # the first calls compile and load kernels
    accumulate(model, noise, inputs())
    noise.reset_()
    for _ in range(3):
        zero(model)
        batches = inputs()
        with no_waits():
            found = accumulate(model, noise, batches)
        by_hand.step(model, batches)
        by_hand.check(noise, found)
    assert noise.steps.tolist() == [3.0] * 3


def test_a_captured_step_updates_the_averages_at_each_replay():
    model, by_hand = model_of(), ByHand()
    noise = gm.NoiseScale(BATCH, groups=GROUPS, decay=DECAY, device=DEVICE)
    batches = inputs()

    def step() -> Tensor:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.zero_()
        return accumulate(model, noise, batches)

    graph, found = record(step)
    noise.reset_()
    for _ in range(3):
        batches.copy_(inputs())
        graph.replay()
        by_hand.step(model, batches)
        by_hand.check(noise, found)
    # a gradient that is not finite leaves the averages unchanged
    before = noise.average.state.clone()
    batches[1, 0] = math.inf
    graph.replay()
    assert torch.equal(noise.average.state, before)
    assert noise.steps.tolist() == [3.0] * 3


@pytest.mark.compiles
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_calls_do_the_same(mode):
    model, by_hand = model_of(), ByHand()
    noise = gm.NoiseScale(BATCH, groups=GROUPS, decay=DECAY, device=DEVICE)

    def step(batches: Tensor) -> Tensor:
        for x in batches.unbind():
            loss_of(model, x).div(MICRO).backward()
            noise.add(gm.collect_grads(model))
        found = noise.step()
        for p in model.parameters():
            p.grad = None
        return found

    run = compiled(step, mode)
    for i in range(2 if FEW else 5):
        batches = inputs()
        torch.compiler.cudagraph_mark_step_begin()
        if i < 3:
            found = run(batches)
        else:
            with no_waits_on_a_gpu():
                found = run(batches)
        by_hand.step(model, batches)
        by_hand.check(noise, found)
