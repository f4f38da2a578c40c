"""The recorder on a real device: exact in eager, compiled and replayed steps, without waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

import gradiometer as gm
from gradiometer.columns import Cursor
from gradiometer.recorder.recorder import Recorder
from support.gpu import DEVICE, LONG, REHEARSED, compiled, no_waits, on_a_gpu, small_model
from support.gpu import record as capture
from support.recording import new_gradients, packed, step_of, written

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.gpu,
    # shown, not raised: drivers and Inductor give advice that depends on the machine
    pytest.mark.filterwarnings("default"),
]

STEPS = 11


@pytest.fixture(autouse=True)
def _clean(_dynamo: None) -> Iterator[None]:
    yield
    if not REHEARSED:
        torch.cuda.synchronize()


def check(recorder: Recorder, expected: dict[int, Tensor], skipped: set[int]) -> None:
    records = recorder.read()
    assert [record.step for record in records] == list(expected)[-recorder.capacity :]
    for record in records:
        assert torch.equal(written(record), expected[record.step].cpu())
        assert record.skipped == (record.step in skipped)


@pytest.mark.parametrize("gated", [False, True])
def test_the_last_steps_are_there_and_exact(gated):
    model = small_model()
    recorder = Recorder(model, capacity=4, every=2, skip_nonfinite=not gated)
    expected = {}
    for step in range(STEPS):
        new_gradients(model)
        if step == 5:
            next(model.parameters()).grad.view(-1)[0] = float("inf")
        with no_waits():
            recorder.record()
        if step % 2 == 0 or (step == 5 and not gated):
            expected[step] = packed(gm.collect_grads(model))
        with no_waits():
            recorder.advance()
    check(recorder, expected, {5})


@pytest.mark.compiles
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("weights", [False, True])
def test_a_compiled_step_records_what_it_collects(mode, weights):
    model = small_model()
    recorder = Recorder(model, capacity=3, weights=weights)
    step = compiled(step_of(recorder, model), mode)
    width = next(model.parameters()).shape[-1]
    expected = {}
    for i in range(STEPS):
        if i == 7:
            recorder.configure_(every=2)
        x = torch.randn(5, width, device=DEVICE)
        torch.compiler.cudagraph_mark_step_begin()
        _, stats = step(x * float("nan") if i == 9 else x)
        if i < 7 or i % 2 == 0 or i == 9:
            expected[i] = packed(stats).clone()
    check(recorder, expected, {9})


def test_a_captured_step_goes_on_at_every_replay():
    model = small_model()
    recorder = Recorder(model, capacity=3)
    sources = [torch.zeros_like(p) for p in model.parameters()]
    for p, source in zip(model.parameters(), sources, strict=True):
        p.grad = source

    def step() -> None:
        recorder.record()
        recorder.advance()

    graph, _ = capture(step)
    recorder.configure_(step=0)
    expected = {}
    for i in range(STEPS):
        for source in sources:
            source.normal_()
        if i == 9:
            sources[0].view(-1)[0] = float("nan")
        expected[i] = packed(gm.collect_grads(model))
        graph.replay()
        assert bool(recorder.skip_step) == (i == 9)
    check(recorder, expected, {9})
    assert recorder.cursor[Cursor.STEP] == STEPS


@on_a_gpu
@pytest.mark.parametrize("weights", [False, True])
def test_steps_on_one_stream_and_advances_on_another_are_in_order(weights):
    """Nothing but the monitor makes the streams wait for one another."""
    model, seen, expected = small_model(), [], []
    side = torch.cuda.Stream()
    with gm.Monitor(model, weights=weights, rules=(), sinks=[seen.append], capacity=4) as monitor:
        for i in range(STEPS):
            torch.cuda._sleep(LONG // 50)
            new_gradients(model)
            expected.append(packed(gm.collect_grads(model)))
            loss = torch.full((), float(i), device=DEVICE)
            monitor.record()
            with torch.cuda.stream(side):
                monitor.advance(loss=loss)
        torch.cuda.synchronize()
    assert [record.loss for record in seen] == list(range(STEPS))
    for record, values in zip(seen, expected, strict=True):
        assert torch.equal(written(record), values.cpu())


@on_a_gpu
def test_it_lives_where_the_model_lives():
    recorder = Recorder(nn.Linear(3, 2, device=DEVICE))
    assert recorder.ring.device == recorder.cursor.device == recorder.skip_step.device
    assert recorder.ring.is_cuda
