"""The monitor: what it records and delivers, and that it never blocks or breaks training."""

from __future__ import annotations

import copy
import gc
import logging
import math
import os
import random
import statistics
import threading
import time
import weakref
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.columns import Cursor
from gradiometer.monitor import pipeline, ring_reader
from gradiometer.monitor.monitor import Monitor
from gradiometer.runs.reader import read_run
from support.transfers import count_transfers
from support.watching import Counter, Stateless


class SlowCopies:
    """Replaces `transfer.Pending`: a snapshot that arrives when the test allows it."""

    made: ClassVar[list[SlowCopies]] = []
    # whether later ones arrive at once
    arrive = False

    def __init__(self, tensors, build):
        self.host = [tensor.detach().clone() for tensor in tensors]
        self.build = build
        self.arrived = SlowCopies.arrive
        SlowCopies.made.append(self)

    def ready(self):
        return self.arrived

    def result(self):
        assert self.arrived, "the host would wait for the device"
        return self.build(self.host)

    @classmethod
    def all_arrive(cls):
        cls.arrive = True
        for made in cls.made:
            made.arrived = True


@pytest.fixture
def copies(monkeypatch):
    SlowCopies.made, SlowCopies.arrive = [], False
    monkeypatch.setattr(ring_reader, "Pending", SlowCopies)
    return SlowCopies


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    monkeypatch.setattr(pipeline, "PATIENCE", 5.0)


def small(*sizes):
    sizes = sizes or (4, 3, 2)
    return nn.Sequential(*[nn.Linear(a, b) for a, b in pairwise(sizes)])


def backward(model, factor=1.0):
    (model(torch.ones(2, next(model.parameters()).shape[1])).square().sum() * factor).backward()


def monitor_of(model, **options):
    seen = []
    return Monitor(model, **{"rules": (), "sinks": [seen.append]} | options), seen


def train(monitor, model, steps, **scalars):
    for _ in range(steps):
        model.zero_grad()
        backward(model)
        monitor.record()
        monitor.advance(**scalars)


def recorded(seen):
    return [record.step for record in seen if record.recorded]


# delivered steps


def test_every_step_arrives_with_its_numbers():
    model = small()
    monitor, seen = monitor_of(model, weights=True, capacity=8)
    norms = []
    with monitor:
        for step in range(50):
            model.zero_grad()
            backward(model, factor=step)
            monitor.record()
            norms.append(gm.grad_norm(model))
            monitor.advance(loss=torch.tensor(float(step), requires_grad=True), lr=0.1, tokens=7)
        assert monitor.flush(20)
        assert monitor.last.step == 49
        assert monitor.step == 50
    assert [record.step for record in seen] == recorded(seen) == list(range(50))
    # one sum over all gradients against a sum of sums
    assert [record.total("norm") for record in seen] == pytest.approx(norms, rel=1e-13)
    assert seen[3].scalars == {"loss": 3.0, "lr": 0.1, "tokens": 7.0}
    assert seen[3].total("norm", "weights") == float(gm.collect_weights(model).total_norm)
    assert monitor.failures == {}
    assert monitor.dropped == 0


class Clock:
    """The time module of the pipeline, which may be set forward."""

    def __init__(self):
        self.ahead = 0.0

    def monotonic(self):
        return time.monotonic() + self.ahead


@pytest.mark.parametrize("seed", range(12))
def test_no_step_is_lost_or_twice_whatever_arrives_when(copies, monkeypatch, seed):
    clock = Clock()
    monkeypatch.setattr(pipeline, "time", clock)
    choose = random.Random(seed)  # noqa: S311 the same every time
    model = nn.Linear(1, 1, bias=False)
    capacity = choose.choice([1, 2, 3, 5, 8])
    monitor, seen = monitor_of(model, capacity=capacity, every=choose.choice([1, 2, 3]))
    monitor.skips = True
    expected = {}
    for step in range(120):
        clock.ahead += choose.choice([0.0, pipeline.INTERVAL])
        if choose.random() < 0.05:
            monitor.every = choose.choice([1, 2, 4])
        if choose.random() < 0.9:
            model.weight.grad = torch.full((1, 1), math.nan if choose.random() < 0.1 else float(step))
            for _ in range(choose.choice([1, 1, 2])):
                monitor.record()
            if step % monitor.every == 0 or bool(model.weight.grad.isnan()):
                expected[step] = model.weight.grad.item()
        if choose.random() < 0.3:
            for made in copies.made[: choose.randrange(len(copies.made) + 1)]:
                made.arrived = True
        if choose.random() < 0.05:
            copies.all_arrive()
            assert monitor.flush(20)
            copies.arrive = choose.random() < 0.3
        monitor.advance(loss=float(step))
    copies.all_arrive()
    monitor.close()
    assert [record.step for record in seen] == list(range(120))
    assert [record.loss for record in seen] == list(range(120))
    assert monitor.dropped == 0
    assert recorded(seen) == list(expected)
    for record in seen:
        if record.recorded:
            value = expected[record.step]
            assert record.total("norm") == abs(value) or math.isnan(value)
            assert record.total("n_nan") == math.isnan(value)
            assert record.skipped == math.isnan(value)


def test_a_step_cut_short_comes_with_the_end_and_one_that_goes_on_does_not():
    model = small()
    monitor, seen = monitor_of(model)
    train(monitor, model, 2, loss=1.0)
    monitor.record()
    assert monitor.flush(20)
    assert len(seen) == 2
    monitor.advance(loss=2.0)
    assert monitor.flush(20)
    assert [record.loss for record in seen] == [1.0, 1.0, 2.0]
    assert recorded(seen) == [0, 1, 2]
    monitor.record()
    monitor.close()
    assert recorded(seen) == [0, 1, 2, 3]
    assert seen[3].scalars == {}


def test_every_may_change_and_bad_steps_are_always_there():
    model = small()
    monitor, seen = monitor_of(model, every=10)
    for step in range(40):
        if step == 20:
            monitor.every = 5
        model.zero_grad()
        backward(model, math.inf if step == 13 else 1.0)
        monitor.record()
        monitor.advance(loss=0.5)
    monitor.close()
    assert recorded(seen) == [0, 10, 13, 20, 25, 30, 35]
    assert [record.step for record in seen] == list(range(40))
    assert monitor.every == 5
    with pytest.raises(ValueError, match="every=0"):
        monitor.every = 0


def test_numbers_that_are_none_are_said_once_and_the_rest_goes_on(caplog):
    model = small()
    monitor, seen = monitor_of(model)
    with monitor:
        for _ in range(3):
            monitor.advance(loss=torch.ones(2), lr="fast", momentum=0.9, nothing=None)
    assert [record.scalars for record in seen] == [{"momentum": 0.9}] * 3
    assert monitor.failures == {"scalar 'loss'": 3, "scalar 'lr'": 3, "scalar 'nothing'": 3}
    assert caplog.text.count("scalar 'lr': ") == 1


# no waits


def test_advance_waits_for_no_copy(copies):
    model = small()
    monitor, seen = monitor_of(model, capacity=4)
    train(monitor, model, 40, loss=1.0)
    # at least one copy for each half of the ring, without waiting for any
    assert len(copies.made) >= 19
    assert seen == []
    copies.all_arrive()
    monitor.close()
    assert recorded(seen) == list(range(40))


def test_time_alone_starts_no_copies_without_end(copies, monkeypatch):
    monkeypatch.setattr(pipeline, "INTERVAL", 0.0)
    model = small()
    monitor, _ = monitor_of(model, capacity=1000)
    for _ in range(50):
        monitor.advance()
    assert len(copies.made) == pipeline.UNDER_WAY
    copies.all_arrive()
    monitor.close()


def test_on_a_device_a_step_asks_for_nothing():
    """Only the copy is started; scalars given as tensors travel with it."""

    def steps(away, loss):
        monitor = Monitor(away, rules=(), capacity=100, updates=True)
        monitor._pipeline._start = lambda: None
        monitor._pipeline.is_started = True
        monitor._pipeline._next = math.inf
        for _ in range(5):
            monitor.record()
            _ = torch.where(monitor.skip_step, 0.0, 1.0)
            monitor.advance(loss=loss, lr=loss, other=1.0)
        assert monitor.failures == {}
        assert len(monitor._pipeline.reader._taken) == 5
        assert sorted(monitor._pipeline.reader._away) == ["loss", "lr"]

    model = small()
    backward(model)
    assert count_transfers(steps, model) == 0
    assert count_transfers(lambda away, loss: (steps(away, loss), loss.item()), model) == 1


def test_a_sink_that_sleeps_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(pipeline, "INTERVAL", 0.0)
    release, entered, woken = threading.Event(), threading.Event(), []

    def sleeps(_):
        entered.set()
        woken.append(release.wait(120))

    model = small()
    monitor, seen = monitor_of(model, sinks=[sleeps], queue=16)
    monitor.advance()
    assert entered.wait(60)
    train(monitor, model, 300)
    assert monitor.dropped > 0
    assert monitor.last.step > 200
    assert not monitor.flush(0.01)
    release.set()
    monitor.close()
    # through the event, not through its time-out
    assert all(woken)
    # its first batch and the newest sixteen; every other step is counted as dropped
    assert monitor.dropped == sum(n for what, n in monitor.failures.items() if what.startswith("queue of "))
    assert seen == []


def test_advance_takes_little_time_of_the_host():
    model, x = small(), torch.ones(2)
    monitor, _ = monitor_of(model, sinks=())
    times, others = [], []
    for _ in range(1000):
        began = time.perf_counter()
        monitor.advance(loss=1.0, lr=0.1)
        between = time.perf_counter()
        for _ in range(10):
            x + x
        times.append(between - began)
        others.append(time.perf_counter() - between)
    monitor.close()
    # about as long as ten of torch's smallest operations
    assert statistics.median(times) < 10 * statistics.median(others)


# no exceptions


def test_errors_of_the_telemetry_are_said_once_and_training_goes_on(caplog, monkeypatch):
    def bad_sink(_):
        raise OSError(28, "No space left on device")

    model = small()
    good = []
    monitor, _ = monitor_of(model, sinks=[bad_sink, good.append])

    def broken(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gm.Recorder, "record", broken)
    with monitor:
        for _ in range(5):
            monitor.record()
            monitor.advance(loss=1.0)
            monitor.flush(20)
    assert [record.loss for record in good] == [1.0] * 5
    assert monitor.failures["record"] == 5
    assert monitor.failures[next(name for name in monitor.failures if "bad_sink" in name)] == 5
    assert caplog.text.count("illegal memory access") == 1
    assert caplog.text.count("No space left") == 1


@pytest.mark.parametrize("where", ["ready", "result", "__init__"])
def test_a_dead_device_leaves_the_original_error_and_what_the_host_knows(copies, monkeypatch, where):
    model = small()
    copies.arrive = True
    monitor, seen = monitor_of(model, capacity=4)

    def dead(*_):
        raise RuntimeError("CUDA error: device-side assert triggered")

    class TrainingError(Exception):
        pass

    def run():
        with monitor:
            train(monitor, model, 10, loss=1.0)
            monkeypatch.setattr(SlowCopies, where, dead)
            monkeypatch.setattr(gm.Recorder, "advance", dead)
            train(monitor, model, 10, loss=2.0)
            raise TrainingError("the real one")

    with pytest.raises(TrainingError, match="the real one"):
        run()
    assert [record.loss for record in seen] == [1.0] * 10 + [2.0] * 10
    assert len(recorded(seen)) >= 8
    assert monitor.failures["ring reader"] >= 1
    assert monitor.failures["advance"] == 10


@pytest.mark.usefixtures("copies")
def test_a_device_that_never_answers_is_left_at_the_end(monkeypatch):
    monkeypatch.setattr(pipeline, "PATIENCE", 0.3)
    model = small()
    monitor, seen = monitor_of(model)
    train(monitor, model, 3, loss=1.0)
    assert not monitor.flush(0.01)
    monitor.close()
    assert monitor.failures == {"ring reader": 1}
    assert [record.loss for record in seen] == [1.0] * 3
    assert recorded(seen) == []


NO_SINK = r"got 7, .* it has no start, write, fault, close; pass sinks from"
NOT_RULES = [[3], 3, gm.Thresholds(), [gm.rules.NonFinite], ["nonfinite"]]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"queue": 0}, ValueError, "queue=0"),
        ({"sinks": [list]}, TypeError, "list"),
        *[({"sinks": sinks}, TypeError, NO_SINK) for sinks in (7, [7])],
        ({"run_dir": 5}, TypeError, r"\(run_dir=...\): expected the path of a folder or True, got int"),
        ({"run_dir": False}, TypeError, "expected the path of a folder or True, got bool"),
        ({"run_dir": ""}, ValueError, "pass the path of a folder"),
        ({"rules": "nonfinite"}, TypeError, "got 'nonfinite', not a rule"),
        *[({"rules": rules}, TypeError, r"rules=\.\.\.\): got") for rules in NOT_RULES],
        ({"model": nn.GELU()}, ValueError, "no parameters"),
    ],
    ids=str,
)
def test_a_bad_argument_is_refused_at_once(options, error, said):
    with pytest.raises(error, match=said):
        Monitor(**{"model": small(), "rules": ()} | options)


def test_one_sink_need_not_be_a_list():
    model, seen = small(), []
    with Monitor(model, rules=(), sinks=seen.append) as monitor:
        train(monitor, model, 2)
    assert [record.step for record in seen] == [0, 1]


# inside a compiled step


def compiled_step(model, monitor, **options):
    @torch.compile(fullgraph=True, backend="aot_eager", **options)
    def step(x, lr):
        loss = model(x).square().mean()
        loss.backward()
        monitor.record()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(torch.where(monitor.skip_step, 0.0, lr * p.grad))
                    p.grad = None
        return loss.detach()

    return step


@pytest.mark.usefixtures("_dynamo")
def test_in_a_fullgraph_step_it_records_decides_and_compiles_once():
    model = small()
    monitor, seen = monitor_of(model, capacity=8, updates=True)
    eager = copy.deepcopy(model)
    step = compiled_step(model, monitor)
    with monitor:
        for i in range(30):
            if i == 12:
                monitor.every = 4
            x = torch.randn(3, 4)
            if i == 17:
                x[0, 0] = math.nan
            before = [p.detach().clone() for p in model.parameters()]
            eager.load_state_dict(model.state_dict())
            monitor.advance(loss=step(x, torch.tensor(0.1)), lr=0.1)
            kept = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            assert kept == (i == 17)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert recorded(seen) == [*range(12), 12, 16, 17, 20, 24, 28]
    assert [record.step for record in seen if record.skipped] == [17]
    eager(x).square().mean().backward()
    assert monitor.last.step == 29
    assert monitor.failures == {}


@pytest.mark.usefixtures("_dynamo")
def test_updates_of_parameters_that_are_unfrozen_between_compiled_steps():
    model = small()
    model[0].weight.requires_grad_(requires_grad=False)
    monitor, seen = monitor_of(model, updates=True)

    @torch.compile(fullgraph=True, backend="eager")
    def step(x):
        model(x).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(0.1 * p.grad)
        monitor.record_updates()
        for p in model.parameters():
            p.grad = None

    expected = []
    with monitor:
        for i in range(20):
            if i >= 3:
                # again and again, as with two models
                model[0].weight.requires_grad_(i % 2 == 1)
            before = model[0].weight.detach().double()
            step(torch.randn(3, 4))
            expected.append((model[0].weight.detach().double() - before).abs().max().item())
            monitor.advance()
    found = [record.value("abs_max", "updates")[0].item() for record in seen]
    # from the step after
    assert [bool(record.measured("updates")[0]) for record in seen] == [False] * 4 + [True] * 16
    assert found[4:] == expected[4:]
    # frozen or not, and with or without its copy
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4
    assert monitor.failures == {}


@pytest.mark.usefixtures("_dynamo")
def test_parameters_frozen_and_unfrozen_between_compiled_steps():
    model = small()
    monitor, seen = monitor_of(model)
    step = compiled_step(model, monitor)
    with monitor:
        for frozen in (False, False, True, True, False):
            model[0].weight.requires_grad_(not frozen)
            monitor.advance(loss=step(torch.randn(3, 4), torch.tensor(0.1)))
    assert [bool(record.measured()[0]) for record in seen] == [True, True, False, False, True]
    assert all(bool(record.measured()[1:].all()) for record in seen)


# kinds of training


def test_a_model_that_is_frozen_altogether():
    model = small().requires_grad_(requires_grad=False)
    monitor, seen = monitor_of(model, weights=True, updates=True)
    with monitor:
        for _ in range(3):
            monitor.record()
            monitor.advance(loss=1.0)
    assert [int(record.measured().sum()) for record in seen] == [0, 0, 0]
    assert int(seen[0].measured("weights").sum()) == 4
    assert int(seen[0].measured("updates").sum()) == 0
    assert monitor.failures == {}


def test_gradient_accumulation_is_one_row():
    model = small()
    monitor, seen = monitor_of(model)
    for _ in range(3):
        model.zero_grad()
        for _ in range(4):
            backward(model)
            monitor.record()
        total = gm.grad_norm(model)
        monitor.advance()
    monitor.close()
    assert recorded(seen) == [0, 1, 2]
    assert seen[-1].total("norm") == total


def test_two_models_and_two_optimizers():
    models = {"generator": small(3, 3), "critic": small(3, 1)}
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models.values()]
    monitor, seen = monitor_of(models, updates=True)
    with monitor:
        for _ in range(3):
            for model, optimizer in zip(models.values(), optimizers, strict=True):
                optimizer.zero_grad()
                backward(model)
                monitor.record()
                optimizer.step()
                optimizer.zero_grad()
            monitor.advance(loss=1.0)
    names = [f"{name}.0.{part}" for name in models for part in ("weight", "bias")]
    assert list(seen[0].catalog.names) == names
    assert [int(record.measured().sum()) for record in seen] == [4, 4, 4]
    for record in seen:
        expected = 0.1 * record.value("norm")
        torch.testing.assert_close(record.value("norm", "updates"), expected, rtol=1e-5, atol=0)


def test_updates_are_those_of_the_step_and_only_of_due_ones():
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    monitor, seen = monitor_of(model, updates=True, every=3)
    with monitor:
        for step in range(10):
            with torch.no_grad():
                model.weight += 2.0**-step
            monitor.advance()
    found = {r.step: r.total("abs_max", "updates") for r in seen if r.recorded}
    assert found == {step: 2.0**-step for step in (0, 3, 6, 9)}


@pytest.mark.parametrize("now", [torch.float32, torch.float16])
def test_updates_after_the_model_was_cast_are_not_those_of_rounding(now):
    model = small().bfloat16()
    monitor, seen = monitor_of(model, updates=True)
    with monitor:
        monitor.advance()
        model.to(now)
        for _ in range(3):
            with torch.no_grad():
                model[0].weight.fill_(1 + 2.0**-10)
            monitor.advance()
    assert [record.total("norm", "updates") == 0 for record in seen] == [True, False, True, True]
    assert monitor.failures == {}


def test_updates_after_weights_got_another_shape_are_said_once_and_go_on(caplog):
    model = nn.Linear(2, 1, bias=False)
    monitor, seen = monitor_of(model, updates=True)
    with monitor:
        monitor.advance()
        model.weight.data = torch.ones(5, 2)
        monitor.advance()
        monitor.advance()
        with torch.no_grad():
            model.weight += 1
        monitor.advance()
    assert monitor.failures == {"updates": 1}
    assert seen[-1].total("abs_max", "updates") == 1.0
    assert caplog.text.count(" updates: ") == 1


def test_parameters_replaced_after_the_monitor_was_made_are_named_once(caplog, monkeypatch):
    monkeypatch.setattr("gradiometer.monitor.monitor._PARAMETER_CHECK", 0.0)
    model = small()
    monitor, _ = monitor_of(model)
    model[1].weight = nn.Parameter(torch.zeros(2, 3))
    with monitor:
        for _ in range(3):
            monitor.advance()
    assert monitor.failures == {"parameters": 1}
    said, _ = [r.message for r in caplog.records]
    assert "1.weight was replaced or added after the monitor was created" in said


def test_the_same_parameters_are_no_news():
    model = small()
    model.tied = model[0].weight
    named = dict(model.named_parameters())
    for what in (model, {"a": model, "b": model[0]}, named, list(named.values())):
        monitor, _ = monitor_of(what)
        monitor.advance()
        monitor.close()
        assert monitor.failures == {}
    assert monitor_of(torch.compile(model))[0]._pipeline._describe(0).model == "Sequential"


# life cycle


def test_without_with_and_closed_twice(caplog):
    model = small()
    monitor, seen = monitor_of(model)
    train(monitor, model, 3)
    monitor.close()
    monitor.close()
    assert recorded(seen) == [0, 1, 2]
    # calls that a compiled step still makes have no effect
    monitor.record()
    monitor.advance()
    monitor.advance()
    assert monitor.flush()
    assert monitor.step == 3
    assert monitor.failures == {"closed": 2}
    assert len(caplog.records) == 1


def test_a_monitor_that_did_nothing_leaves_nothing():
    with Monitor(small(), rules=(), sinks=[lambda _: None]):
        pass
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gradiometer")]


def test_several_monitors_at_once():
    models = [small(), small(2, 2)]
    (one, seen_one), (two, seen_two) = (monitor_of(model) for model in models)
    with one, two:
        for _ in range(5):
            train(one, models[0], 1)
            train(two, models[1], 2)
    assert len(seen_one) == 5
    assert len(seen_two) == 10


def test_a_forgotten_monitor_is_closed_and_lets_go_of_the_model():
    model = small()
    monitor, seen = monitor_of(model)
    train(monitor, model, 3, loss=1.0)
    gone = weakref.ref(model)
    del monitor, model
    gc.collect()
    assert recorded(seen) == [0, 1, 2]
    assert gone() is None
    assert not pipeline._open


def test_a_forked_process_leaves_it_alone():
    model = small()
    monitor, seen = monitor_of(model)
    train(monitor, model, 2)
    assert monitor.flush(20)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            logging.disable()
            monitor.record()
            monitor.advance()
            monitor.flush()
            monitor.close()
            code = 0 if monitor.failures == {"fork": 1} and len(seen) == 2 else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    train(monitor, model, 1)
    monitor.close()
    assert recorded(seen) == [0, 1, 2]


class Adds(Counter):
    """Adds up the numbers of the steps."""

    def check(self, record):
        self.seen += record.step
        return []


def test_state_to_resume():
    model = small()
    monitor, _ = monitor_of(model, rules=[Adds()], every=2)
    train(monitor, model, 7)
    state = monitor.state_dict()
    monitor.close()
    assert state["step"] == 7

    rule = Adds()
    again, seen = monitor_of(model, rules=[rule], updates=True)
    with torch.no_grad():
        model[0].weight += 100  # as loading a checkpoint would
    again.load_state_dict(state | {"step": 8})
    assert (again.step, again.every, rule.seen) == (8, 2, 21)
    with again:
        train(again, model, 3, loss=1.0)
    assert [record.step for record in seen] == [8, 9, 10]
    assert recorded(seen) == [8, 10]
    # loading the checkpoint does not count as an update
    assert seen[0].total("numel", "updates") > 0
    assert seen[0].total("norm", "updates") == 0
    assert rule.seen == 21 + 27


def test_back_to_a_checkpoint_in_the_middle_of_a_run():
    model = small()
    monitor, seen = monitor_of(model, capacity=8)
    with monitor:
        train(monitor, model, 3, loss=1.0)
        state = monitor.state_dict()
        train(monitor, model, 5, loss=2.0)
        monitor.record()
        monitor.load_state_dict(state)
        train(monitor, model, 3, loss=3.0)
        # a step with the same number as the one recorded last
        monitor.load_state_dict(state | {"step": 5})
        train(monitor, model, 1, loss=4.0)
    steps = [(record.step, record.loss) for record in seen]
    assert steps == [
        *((i, 1.0) for i in range(3)),
        *((i, 2.0) for i in range(3, 8)),
        *((i, 3.0) for i in range(3, 6)),
        (5, 4.0),
    ]
    assert recorded(seen) == [step for step, _ in steps]
    assert int(monitor._recorder.cursor[Cursor.STEP]) == monitor.step == 6


# on disk


def test_a_run_is_kept_and_its_end_with_it(tmp_path):
    pytest.importorskip("pyarrow")
    model = small()

    def run():
        with Monitor(model, run_dir=tmp_path / "run", rules=(), weights=True) as monitor:
            train(monitor, model, 5, loss=1.0, lr=0.1)
            with torch.no_grad():
                model[0].weight[0, 0] = math.inf
            train(monitor, model, 2, loss=math.inf)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    kept = read_run(tmp_path / "run")
    assert kept.steps["step"].to_pylist() == list(range(7))
    assert kept.info["closed"]
    assert kept.blackbox["reason"] == "interrupt"
    assert kept.blackbox["first_nonfinite"].startswith("step 5, 0.weight, 1 Inf of 12")
    assert [row["step"] for row in kept.blackbox["last"]] == list(range(7))
    assert kept.record(4).total("norm", "weights") > 0


# missing calls, and options that are off


@pytest.mark.parametrize("how", ["nothing", "skip_step", "inv_scale"])
def test_a_step_is_skipped_only_where_something_skips_it(how):
    model = nn.Linear(2, 1)
    monitor, seen = monitor_of(model)
    with monitor:
        for value in (1.0, math.nan, 1.0):
            for p in model.parameters():
                p.grad = torch.full_like(p, value)
            monitor.record(inv_scale=torch.tensor(1.0) if how == "inv_scale" else None)
            if how == "skip_step":
                assert bool(monitor.skip_step) == math.isnan(value)
            monitor.advance()
    assert [r.skipped for r in seen] == [False, how != "nothing", False]


def test_a_step_without_record_and_a_run_without_advance_are_told(caplog):
    model = nn.Linear(2, 1)
    monitor, _ = monitor_of(model)
    with monitor:
        for _ in range(19):
            monitor.advance(loss=1.0)
        monitor.flush()
        assert monitor.failures == {}
        monitor.advance(loss=1.0)
        monitor.flush()
    assert monitor.failures == {"record": 1}
    assert "none of the first 20 steps was recorded: call record()" in caplog.text

    monitor, _ = monitor_of(model)
    with monitor:
        model(torch.ones(1, 2)).sum().backward()
        monitor.record()
    assert monitor.failures == {"advance": 1}
    assert "call advance() once per step" in caplog.text


def test_findings_of_a_long_cadence_are_one():
    class Always(Stateless):
        name = "always"

        def check(self, record):
            step = record.step
            if record.recorded:
                yield gm.Finding("always", gm.Severity.INFO, step, step, None, None, 1.0, 0.0, "", "")

    model = nn.Linear(2, 1)
    with Monitor(model, rules=[Always()], every=200) as monitor:
        for _ in range(1000):
            monitor.record()
            monitor.advance()
        monitor.flush()
        (found,) = monitor.findings
        assert (found.first_step, found.last_step, found.count) == (0, 800, 5)
        monitor.every = 500
        for _ in range(1500):
            monitor.record()
            monitor.advance()
    assert len(monitor.findings) == 1
