"""Adaptive clipping on a real device: the kernel's bits, no waits, and states that graphs change."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import gradiometer as gm
from support.gpu import DEVICE, DTYPES, SIZES, compiled, fewer, no_waits, record, small_model, values

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("_dynamo"), pytest.mark.filterwarnings("default")]

CLIPS = {
    "z-score": lambda _: gm.ZScoreClip(warmup_steps=2, z_threshold=0.5, device=DEVICE),
    "per tensor": lambda model: gm.PerTensorClip(model, warmup_steps=1),
    "weight norm": gm.WeightNormClip,
    "unitwise": lambda model: gm.WeightNormClip(model, unitwise=True),
}
every_kind = pytest.mark.parametrize("kind", CLIPS)


def grads_of(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters()]


def with_grads(model: nn.Module) -> nn.Module:
    for i, p in enumerate(model.parameters()):
        p.grad = values(p.numel() + i)[i:].view_as(p)
    return model


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_tensor_has_the_bits_that_its_factor_gives_it(dtype):
    parameters = [nn.Parameter(torch.empty(size, dtype=dtype, device=DEVICE)) for size in SIZES]
    for i, p in enumerate(parameters):
        p.grad = values(len(p), dtype)
        # norms from far below the gradient's, whose factors are subnormal in fp32, to far above it
        p.detach().fill_(0.0 if dtype == torch.float16 else 10.0 ** (i % 3 * 15 - 30))
    clip = gm.WeightNormClip(parameters, eps=1e-38)
    before = [p.grad.clone().cpu() for p in parameters]
    for _ in range(2):
        for p, old in zip(parameters, before, strict=True):
            p.grad.copy_(old)
        with no_waits():
            gm.collect_and_clip_(parameters, clip)
    for p, old, factor in zip(parameters, before, clip.factor.cpu(), strict=True):
        if dtype == torch.float64:
            expected = old * factor
        else:
            below = factor < 2.0**-126
            high = torch.where(below, factor * 2.0**126, factor).float()
            expected = (old.float() * high * (2.0**-126 if below else 1.0)).to(dtype)
        assert torch.equal(p.grad.cpu(), expected)


@every_kind
def test_it_never_waits_and_agrees_with_the_host(kind):
    model = with_grads(small_model())
    twin = with_grads(copy.deepcopy(model)).cpu()
    clip, host = CLIPS[kind](model), CLIPS[kind](twin).cpu()
    fresh = [grad.clone() for grad in grads_of(model)]
    for size in (1.0, 1.2, 9.0, float("nan"), 1.0):
        for grad, theirs, new in zip(grads_of(model), grads_of(twin), fresh, strict=True):
            grad.copy_(new).mul_(size)
            theirs.copy_(grad)
        with no_waits():
            gm.collect_and_clip_(model, clip)
        gm.collect_and_clip_(twin, host)
        for grad, theirs in zip(grads_of(model), grads_of(twin), strict=True):
            torch.testing.assert_close(grad.cpu(), theirs, rtol=2**-22, atol=0.0, equal_nan=True)
    for x, y in zip(clip.buffers(), host.buffers(), strict=True):
        torch.testing.assert_close(x.cpu(), y, rtol=1e-11, atol=1e-15)


@every_kind
def test_a_replayed_graph_changes_the_state(kind):
    model = with_grads(small_model())
    clip = CLIPS[kind](model)
    fresh = [grad.clone() for grad in grads_of(model)]
    graph, _ = record(lambda: gm.collect_and_clip_(model, clip))
    twin = copy.deepcopy(clip)
    for size in (1.0, 1.1, 20.0, 0.9):
        for grad, new in zip(grads_of(model), fresh, strict=True):
            grad.copy_(new * size)
        eager = with_grads(copy.deepcopy(model))
        for grad, new in zip(grads_of(eager), fresh, strict=True):
            grad.copy_(new * size)
        graph.replay()
        gm.collect_and_clip_(eager, twin)
        for a, b in zip(grads_of(model), grads_of(eager), strict=True):
            assert torch.equal(a, b)
        for x, y in zip(clip.buffers(), twin.buffers(), strict=True):
            assert torch.equal(x, y)


@pytest.mark.compiles
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@every_kind
def test_a_compiled_step_decides_as_an_eager_one(kind, mode):
    model = small_model()
    clip = CLIPS[kind](model)
    twin = copy.deepcopy(model)
    eager = CLIPS[kind](twin)

    def step(x: Tensor) -> list[Tensor]:
        model(x).square().mean().backward()
        before = [p.grad.clone() for p in model.parameters()]
        gm.collect_and_clip_(model, clip)
        for p in model.parameters():
            p.grad = None
        return before

    run = compiled(step, mode)
    for size in fewer([1.0, 1.1, 3.0, 1.0, 0.9, 5.0]):
        torch.compiler.cudagraph_mark_step_begin()
        before = run(torch.randn(8, 16, device=DEVICE) * size)
        for p, grad in zip(twin.parameters(), before, strict=True):
            p.grad = grad.clone()
        gm.collect_and_clip_(twin, eager)
        # contracted multiplications and additions may differ in the last bit
        for x, y in zip(clip.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-15)
