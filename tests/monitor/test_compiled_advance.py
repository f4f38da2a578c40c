"""`advance` and `note` inside a compiled function: left out of the graph, with one warning."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from gradiometer.monitor.monitor import Monitor
from support.compiling import every_backend, graphs, no_recompile

pytestmark = pytest.mark.usefixtures("_dynamo")


def compiled(model, monitor, backend, *, fullgraph=True):
    @torch.compile(backend=backend, fullgraph=fullgraph)
    def step(x, lr):
        loss = model(x).square().mean()
        loss.backward()
        monitor.record()
        monitor.note(extra=loss.detach())
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
                p.grad = None
        loss = loss.detach()
        monitor.advance(loss=loss, lr=lr, double=2 * lr)
        return loss

    return step


@every_backend
@pytest.mark.parametrize("fullgraph", [True, False])
def test_inside_a_compiled_step_they_are_left_out_with_one_warning(backend, fullgraph, caplog):
    model = nn.Linear(4, 2)
    monitor = Monitor(model, rules=())
    step = compiled(model, monitor, backend, fullgraph=fullgraph)
    # a number that changes recompiles once, as it does without a monitor
    step(torch.randn(3, 4), 0.1)
    step(torch.randn(3, 4), 0.2)
    with no_recompile():
        for i in range(20):
            step(torch.randn(3, 4), 0.1 * i)

    assert graphs() <= 2
    assert monitor.step == 0
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "do nothing inside a compiled function: call them outside" in warnings[0]
    assert set(monitor.failures) == {"compiled"}
    monitor.close()


def test_outside_of_the_same_step_it_works(caplog):
    model, losses = nn.Linear(4, 2), []
    with Monitor(model, rules=(), sinks=[lambda record: losses.append(record.loss)]) as monitor:
        step = compiled(model, monitor, "aot_eager")
        expected = []
        for _ in range(5):
            expected.append(step(torch.randn(3, 4), 0.1).item())
            monitor.advance(loss=expected[-1])

    assert losses == expected
    assert caplog.text.count("inside a compiled function") == 1
    assert len(monitor.last.report()) == 2


def test_before_it_is_compiled_the_mark_needs_no_compiler():
    # as torch.compiler.assume_constant_result would set it
    assert Monitor._say_compiled._dynamo_marked_constant is True

    def function(): ...

    assert vars(torch.compiler.assume_constant_result(function)) == vars(Monitor._say_compiled)
