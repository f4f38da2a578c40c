"""Histograms of magnitudes on a real device: the counts of the CPU, and captured graphs."""

from __future__ import annotations

import pytest
import torch

import gradiometer as gm
from gradiometer.ops import exponent_reference
from gradiometer.recorder.recorder import Recorder
from support.gpu import (
    DEVICE,
    DTYPES,
    FEW,
    SIZES,
    compiled,
    no_waits,
    no_waits_on_a_gpu,
    record,
    small_model,
    values,
)
from support.recording import new_gradients, step_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("_dynamo"), pytest.mark.filterwarnings("default")]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def assert_counts(rows, tensors):
    assert torch.equal(rows.cpu(), exponent_reference.exponent_stats([x.cpu() for x in tensors]))


def measured(tensors):
    with no_waits():
        return torch.ops.gradiometer.exponent_stats(tensors)


@every_dtype
def test_the_kernel_counts_what_the_cpu_counts(dtype):
    tensors = [values(size + i % 3, dtype)[i % 3 :] for i, size in enumerate(SIZES)]
    assert_counts(measured(tensors), tensors)
    # elements of all magnitudes, and any bits
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    info = torch.iinfo(kind)
    bits = torch.randint(info.min, info.max, (5_003 if FEW else 100_003,), dtype=kind, device=DEVICE).view(
        dtype
    )
    zeros = torch.zeros(40_000, dtype=dtype, device=DEVICE)
    zeros[20_000:] = 2.0**-13
    assert_counts(measured([bits, bits[1:], zeros]), [bits, bits[1:], zeros])


def test_a_graph_counts_what_it_finds_at_each_replay():
    tensors = [values(3_000 if FEW else 70_000, dtype) for dtype in DTYPES]
    measured(tensors)
    graph, rows = record(lambda: torch.ops.gradiometer.exponent_stats(tensors))
    for factor in (1.0, 0.25):
        for x in tensors:
            x.mul_(factor)
        graph.replay()
        assert_counts(rows, tensors)


# recorded inside a step

STEPS = 4 if FEW else 8


def counts(model):
    named = {name: p.grad for name, p in model.named_parameters()}
    return gm.collect_exponents(named).columns.cpu()


def check(recorder, step, expected):
    found = recorder.read_exponents(step)
    assert bool(found) == (step % 3 == 0)
    if found:
        assert torch.equal(found["grad_exponents"].stats().columns, expected)


def test_only_due_steps_are_counted_and_nothing_waits():
    model = small_model()
    recorder = Recorder(model, precision=3, weights=True)
    for step in range(STEPS):
        new_gradients(model)
        with no_waits():
            recorder.record()
        check(recorder, step, counts(model))
        with no_waits():
            recorder.advance()


@pytest.mark.compiles
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_step_counts_its_own_gradients(mode):
    model = small_model()
    recorder = Recorder(model, precision=3)
    step = compiled(step_of(recorder, model), mode)
    width = next(model.parameters()).shape[-1]
    for i in range(STEPS):
        torch.compiler.cudagraph_mark_step_begin()
        _, stats = step(torch.randn(5, width, device=DEVICE))
        found = recorder.read_exponents(i)
        assert bool(found) == (i % 3 == 0)
        if found:
            assert found["grad_exponents"].stats().numel.tolist() == stats.numel.tolist()


def test_a_captured_step_counts_at_each_replay():
    model = small_model()
    recorder = Recorder(model, precision=3)
    sources = [torch.zeros_like(p) for p in model.parameters()]
    for p, source in zip(model.parameters(), sources, strict=True):
        p.grad = source
    graph, _ = record(recorder.record)
    recorder.configure_(step=0)
    for step in range(STEPS):
        for source in sources:
            source.normal_()
        graph.replay()
        check(recorder, step, counts(model))
        recorder.advance()


def test_a_due_step_is_copied_before_a_later_one_overwrites_it():
    model, seen, expected = small_model(), [], {}
    with gm.Monitor(model, precision=1, rules=(), sinks=[seen.append], capacity=64) as monitor:
        for step in range(STEPS):
            new_gradients(model)
            expected[step] = counts(model)
            with no_waits_on_a_gpu():
                monitor.record()
                monitor.advance()
    assert [record.step for record in seen] == list(expected)
    for found in seen:
        assert torch.equal(found.tables["grad_exponents"].stats().columns, expected[found.step])
