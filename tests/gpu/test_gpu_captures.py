"""Captured steps that record histograms, measure partial sums and clip by units, on a real device."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

import gradiometer as gm
from gradiometer import ops
from gradiometer.ops import exponent_reference
from support.activations import agree, columns_of
from support.gpu import DEVICE, FEW, compiled, no_waits, no_waits_on_a_gpu, record

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("_dynamo"), pytest.mark.filterwarnings("default")]

STEPS = 3 if FEW else 7


class Model(nn.Module):
    """A convolution and a linear layer; partial sums can measure the tapped activation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv1d(3, 8, 3, padding=1), nn.Linear(8 * 16, 64)
        self.to(DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        return gm.tap(self.head(self.conv(x).flatten(1)), "head")


def batch() -> Tensor:
    return torch.randn(6, 3, 16, device=DEVICE)


def histograms(tensors: list[Tensor]) -> Tensor:
    return exponent_reference.exponent_stats([x.detach().cpu() for x in tensors])


def grads_of(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters()]


def captured_step(model: nn.Module, x: Tensor, after: Callable[[], None]) -> Callable[[], None]:
    """Return a step whose gradients are allocated by the capture, and keep their addresses."""

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()
        after()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.01 * p.grad)

    return step


@pytest.mark.parametrize("precision", [2, 1])
def test_a_recorder_counts_only_due_steps_of_a_captured_step(precision):
    model, x = Model(), batch()
    recorder = gm.Recorder(model, precision=precision, weights=True, capacity=4)
    graph, _ = record(captured_step(model, x, recorder.record))
    recorder.configure_(step=0)
    for i in range(STEPS):
        x.copy_(batch())
        before = [p.detach().clone() for p in model.parameters()]
        graph.replay()
        found = recorder.read_exponents(i)
        assert bool(found) == (i % precision == 0)
        if found:
            assert torch.equal(found["grad_exponents"].stats().columns, histograms(grads_of(model)))
            # those that the step began with
            assert torch.equal(found["weight_exponents"].stats().columns, histograms(before))
        with no_waits():
            recorder.advance()


def test_a_monitor_keeps_the_histograms_of_each_replay():
    model, x, seen, expected = Model(), batch(), [], {}
    with gm.Monitor(model, precision=2, weights=True, rules=(), sinks=[seen.append], capacity=64) as monitor:
        graph, _ = record(captured_step(model, x, monitor.record))
        monitor.advance()
        for i in range(1, STEPS + 1):
            x.copy_(batch())
            before = [p.detach().clone() for p in model.parameters()]
            graph.replay()
            if i % 2 == 0:
                expected[i] = histograms(grads_of(model)), histograms(before)
            # the host reads a loss that is on the CPU
            with no_waits_on_a_gpu():
                monitor.advance(loss=torch.full((), float(i), device=DEVICE))
        monitor.flush()
        assert (monitor.failures, monitor.dropped) == ({}, 0)
    found = {step.step: step.tables for step in seen if step.step and step.has("grad_exponents")}
    assert list(found) == list(expected)
    for i, (grads, weights) in expected.items():
        assert torch.equal(found[i]["grad_exponents"].stats().columns, grads)
        assert torch.equal(found[i]["weight_exponents"].stats().columns, weights)


@pytest.mark.compiles
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_step_with_all_of_them(mode):
    """Histograms, partial sums and a clip by units in one graph, each compared with what it was given."""
    model = Model()
    taps = gm.Taps(model, names=["head"], fused=True)
    clip = gm.WeightNormClip(model, unitwise=True, max_ratio=0.01)
    recorder = gm.Recorder(model, precision=2, taps=taps)

    def step(x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        y = model(x)
        y.square().mean().backward()
        recorder.record()
        before = [p.grad.clone() for p in model.parameters()]
        gm.collect_and_clip_(model, clip)
        after = [p.grad.clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = None
        return y.detach(), before, after

    run = compiled(step, mode)
    twin = copy.deepcopy(model)
    host = gm.WeightNormClip(twin, unitwise=True, max_ratio=0.01)
    for i in range(STEPS):
        torch.compiler.cudagraph_mark_step_begin()
        y, before, after = run(batch())
        found = recorder.read_exponents(i)
        assert bool(found) == (i % 2 == 0)
        if found:
            assert torch.equal(found["grad_exponents"].stats().columns, histograms(before))
        agree(taps.stats().columns[0].cpu(), columns_of(y.cpu()))
        for p, grad in zip(twin.parameters(), before, strict=True):
            p.grad = grad.clone()
        gm.collect_and_clip_(twin, host)
        for p, grad in zip(twin.parameters(), after, strict=True):
            torch.testing.assert_close(grad, p.grad, rtol=2**-20, atol=0.0)
        recorder.advance()
    taps.remove()


def units(x: Tensor) -> Tensor:
    """Return the norm of each output unit, by its definition, in float64 on the host."""
    x = x.detach().cpu().double()
    return x.flatten(1).norm(dim=1) if x.squeeze().dim() > 1 else x.norm().expand(len(x))


def test_a_captured_clip_by_units_is_that_of_the_definition():
    model = Model()
    clip = gm.WeightNormClip(model, unitwise=True, max_ratio=0.02)
    fresh = [torch.randn_like(p) for p in model.parameters()]
    for p, new in zip(model.parameters(), fresh, strict=True):
        p.grad = new.clone()
    graph, _ = record(lambda: gm.collect_and_clip_(model, clip))
    for size in (1.0, 1e-3, 1e3):
        for p, new in zip(model.parameters(), fresh, strict=True):
            p.grad.copy_(new * size)
        before = [grad.clone().cpu() for grad in grads_of(model)]
        graph.replay()
        for p, old in zip(model.parameters(), before, strict=True):
            limit = 0.02 * units(p).clamp(min=1e-3)
            norm = units(old)
            factor = torch.where(norm > limit, limit / norm.clamp(min=1e-6), 1.0)
            expected = old.double() * factor.view(-1, *[1] * (old.dim() - 1))
            # fp32 factors and products
            torch.testing.assert_close(p.grad.cpu().double(), expected, rtol=2**-21, atol=1e-300)
        assert math.isfinite(float(clip.factor.min()))


@pytest.mark.parametrize("fused", [True, False], ids=["partial sums", "op"])
def test_captured_taps_of_a_recorder_are_those_of_the_replay(fused, monkeypatch):
    if fused:
        # eager code uses the op alone; this is what a graph gets
        tap = torch.ops.gradiometer.tap
        monkeypatch.setattr(ops, "tap", lambda *args, **_: tap(*args, fused=True))
    model, x = Model(), batch()
    taps = gm.Taps(model, names=["head"])
    recorder = gm.Recorder(model, taps=taps, capacity=8)

    def step() -> Tensor:
        model.zero_grad()
        y = model(x)
        y.square().mean().backward()
        recorder.record()
        return y.detach()

    graph, y = record(step)
    recorder.advance()
    expected = []
    for i in range(4):
        x.copy_(batch())
        if i == 2:
            x[3] = math.nan
        graph.replay()
        value, grad = taps.stats().columns.cpu()
        expected.append((columns_of(y.cpu()), grad))
        agree(value, expected[-1][0])
        with no_waits():
            recorder.advance()
    taps.remove()
    kept = recorder.read()[-4:]
    place = kept[0].names("activations").index("head")
    for found, (columns, grad) in zip(kept, expected, strict=True):
        assert torch.equal(found.columns("activation_grads")[place], grad)
        for name in ("numel", "n_zero", "n_nan", "abs_max"):
            assert found.value(name, "activations")[place] == columns[name]
