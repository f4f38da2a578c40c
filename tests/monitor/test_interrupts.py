"""Steps keep their own tensors and scalars: after interrupts, after repeats, and if the cursor is changed."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.columns import Cursor
from gradiometer.monitor import pipeline
from support.watching import handled

SOURCE = str(Path(gm.__file__).parent)
# what runs in a step; the first four in the first one
NAMES = (
    "monitor/monitor monitor/current_step monitor/pipeline monitor/ring_reader monitor/monitored_run "
    "monitor/failures monitor/dispatcher recorder/recorder recorder/updates recorder/exponent_stores "
    "recorder/settings integrations/training_loop"
)
FILES = tuple(f"{SOURCE}/{name}.py" for name in NAMES.split())


class Interrupt(BaseException):
    """Raised like KeyboardInterrupt."""


class At:
    """Raises an exception before the numbered line of some files; tells whether it did."""

    def __init__(self, line, files=FILES):
        self.left, self.files = line, files
        self.done = False

    def __enter__(self):
        self.before = sys.gettrace()
        # monitors of earlier tests, which are collected, have lines too
        gc.disable()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)
        gc.enable()

    def _trace(self, frame, event, _):
        if self.done or frame.f_code.co_filename not in self.files:
            return None
        if event == "line":
            self.left -= 1
            if self.left < 0:
                self.done = True
                self._act()
        return self._trace

    def _act(self):
        raise Interrupt


class Run:
    """A training whose gradient norm, loss and taps are known in each step: those of ``scale``."""

    def __init__(self, watch, **options):
        self.model = nn.Sequential(nn.Linear(1, 1, bias=False))
        with torch.no_grad():
            self.model[0].weight.fill_(1.0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.records = []
        options |= {"rules": (), "sinks": [self.records.append], "weights": True}
        self.taps = options.setdefault("taps", gm.Taps(self.model, {"linear": nn.Linear}))
        self.watch = watch
        if watch:
            self.monitor = gm.watch(self.model, self.optimizer, **options)
        else:
            self.monitor = gm.Monitor(self.model, **options)

    def backward(self, scale):
        loss = self.model(torch.tensor([[float(scale)]])).sum()
        loss.backward()
        return loss

    def step(self, scale):
        self.optimizer.zero_grad()
        loss = self.backward(scale)
        with torch.no_grad():
            self.model[0].weight.copy_(torch.ones(1, 1))
        if not self.watch:
            self.monitor.record()
        return loss

    def end(self, loss):
        if self.watch:
            self.monitor.note(loss=loss)
            self.optimizer.step()
        else:
            self.optimizer.step()
            self.monitor.advance(loss=loss)

    def check(self):
        """Every record has the tensors of its own loss, or none; no step comes twice."""
        steps = [record.step for record in self.records]
        assert steps == sorted(set(steps))
        found = 0
        for record in self.records:
            if not (record.recorded and record.measured("grads").any()):
                continue
            loss = record.scalars.get("loss")
            if loss is not None:
                found += 1
                assert record.total("norm", "grads") == loss, record
                if self.taps is not None and record.measured("activations")[-1]:
                    assert record.value("abs_max", "activations")[-1] == loss, record
            assert record.total("norm", "weights") == 1.0
        return found


def interrupted(call, line, files=FILES):
    """Call it, with an exception before this line; return whether there is such a line."""
    with suppress(Interrupt), At(line, files) as at:
        call()
    return at.done


@pytest.mark.parametrize("watch", [False, True])
def test_an_exception_at_any_line_of_advance_shifts_no_step(watch, monkeypatch):
    # each step is copied at once
    monkeypatch.setattr(pipeline, "INTERVAL", 0.0)
    run = Run(watch, updates=True, precision=1)
    whole = []
    for line in count():
        scale = 2 * line + 1
        is_done = interrupted(partial(run.end, run.step(scale)), line)
        run.end(run.step(scale + 1))
        whole.append(scale + 1.0)
        if not is_done:
            break
    run.monitor.close()
    run.check()
    assert line > 100
    assert set(run.monitor.failures) <= {"step", "advance"}
    # only exceptions in a delivery lose what it delivers, which is counted
    there = {record.scalars["loss"] for record in run.records if record.recorded}
    assert len({*whole} - there) <= run.monitor.dropped < 0.2 * line


@pytest.mark.parametrize("watch", [False, True])
def test_an_exception_at_any_line_of_the_first_advance_shifts_no_step(watch):
    for line in count():
        run = Run(watch)
        is_done = interrupted(partial(run.end, run.step(1)), line, FILES[:4])
        for scale in (2, 3):
            run.end(run.step(scale))
        run.monitor.close()
        assert run.check() >= 2
        assert [record.scalars["loss"] for record in run.records][-2:] == [2.0, 3.0]
        assert set(run.monitor.failures) <= {"advance"}
        if not is_done:
            break
    assert line > 20


@pytest.mark.parametrize("where", ["record", "begin_updates", "note"])
def test_an_exception_at_any_line_of_another_call_shifts_no_step(where):
    run = Run(watch=False, updates=True)
    for line in count():
        for scale in (2 * line + 1, 2 * line + 2):
            run.optimizer.zero_grad()
            loss = run.backward(scale)
            calls = {
                "record": run.monitor.record,
                "begin_updates": run.monitor.begin_updates,
                "note": lambda loss=loss: run.monitor.note(loss=loss),
            }
            for name, call in calls.items():
                if name == where and scale % 2:
                    is_done = interrupted(call, line)
                else:
                    call()
            run.optimizer.step()
            run.monitor.advance(loss=loss)
        if not is_done:
            break
    run.monitor.close()
    run.check()
    assert [record.scalars["loss"] for record in run.records] == [float(x + 1) for x in range(2 * line + 2)]
    assert all(record.recorded for record in run.records[1::2])
    assert run.monitor.failures == {}


def test_a_step_that_only_a_compiled_function_recorded_is_refused_if_it_may_be_another():
    # the interrupt comes before the device is set to the next step, and then the compiled step runs again
    run = Run(watch=False, taps=None)
    record = torch.compile(run.monitor.record, backend="eager", fullgraph=True)
    for scale in range(1, 7):
        run.optimizer.zero_grad()
        loss = run.backward(scale)
        record()
        if scale == 3:
            advance, run.monitor._recorder.advance = run.monitor._recorder.advance, _interrupted
            with pytest.raises(Interrupt):
                run.monitor.advance(loss=loss)
            run.monitor._recorder.advance = advance
        else:
            run.monitor.advance(loss=loss)
    run.monitor.close()
    run.check()
    # the third step's slot was overwritten by the fourth, which therefore has none
    assert [x.recorded for x in run.records] == [True, True, False, False, True, True]
    assert [x.scalars["loss"] for x in run.records] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert run.monitor.failures == {"step": 1, "advance": 1}
    assert run.monitor.dropped == 1


def _interrupted(*_):
    raise Interrupt


# repeats


@pytest.mark.parametrize("watch", [False, True])
@pytest.mark.parametrize("how", ["locate_nonfinite", "check_deterministic"])
def test_a_repeat_is_not_a_step_of_the_run(watch, how, tmp_path):
    run = Run(watch, updates=True, precision=1, run_dir=tmp_path)
    taps = run.taps
    own = gm.Recorder(run.model)

    def step(scale):
        loss = run.step(scale)
        own.record()
        own.advance()
        run.monitor.record()
        run.monitor.keep(scale)
        run.end(loss)
        run.monitor.record_updates()
        run.monitor.begin_updates()
        if not watch:
            run.optimizer.zero_grad()

    for scale in range(1, 21):
        step(scale)
        if scale in {5, 11, 12}:
            run.backward(0.5)  # what the taps have of the next step
            buffers = [x for module in (run.monitor._recorder, own, taps) for x in module.buffers()]
            before, number = [x.clone() for x in buffers], run.monitor.step
            if how == "locate_nonfinite":
                gm.locate_nonfinite(step, 100.0)
            else:
                assert gm.check_deterministic(step, [run.model, run.optimizer], 100.0)
            assert run.monitor.step == number
            assert all(torch.equal(x, y) for x, y in zip(buffers, before, strict=True))
            taps.advance()
            taps.configure_(step=number)
    run.monitor.close()
    assert run.check() == 20
    assert [record.scalars["loss"] for record in run.records] == [float(x) for x in range(1, 21)]
    assert run.monitor.failures == {}
    assert run.monitor.dropped == 0


def test_taps_and_recorders_of_other_models_go_on_during_a_repeat():
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    recorder = gm.Recorder(other)

    def step():
        other(torch.ones(1, 1)).sum().backward()
        recorder.record()
        recorder.advance()
        model(torch.ones(1, 1)).sum().backward()

    assert gm.check_deterministic(step, [model])
    assert len(recorder.read()) == 2


def test_a_repeat_in_a_compiled_step_leaves_the_ring_and_taps():
    model = nn.Linear(1, 1, bias=False)
    taps = gm.Taps(nn.Sequential(model), {"linear": nn.Linear})
    recorder = gm.Recorder(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    record = torch.compile(recorder.record, backend="eager", fullgraph=True)

    def step(x):
        model(x).sum().backward()
        record()
        optimizer.step()
        optimizer.zero_grad()

    step(torch.ones(1, 1))
    before = [x.clone() for x in [*recorder.buffers(), *taps.buffers()]]
    assert gm.check_deterministic(step, [model, optimizer], torch.ones(1, 1))
    after = [*recorder.buffers(), *taps.buffers()]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


# the cursor


def test_steps_of_another_cursor_are_refused_counted_and_reported_once(caplog):
    run = Run(watch=False)
    for scale in range(1, 11):
        loss = run.step(scale)
        if scale in {4, 6}:
            # as a checkpoint that is loaded into the recorder does
            run.monitor._recorder.cursor[Cursor.STEP] -= 1
            run.monitor.record()
        run.end(loss)
        if scale == 7:
            assert run.monitor.flush(60)
    run.monitor.close()
    run.check()
    assert [x.scalars["loss"] for x in run.records] == [float(x) for x in range(1, 11)]
    assert [x.recorded for x in run.records][7:] == [True] * 3
    assert 2 <= run.monitor.failures["step"] == run.monitor.dropped <= 8
    assert caplog.text.count("at another step than the host") == 1


def test_a_copied_cursor_that_differs_refuses_its_slots():
    run = Run(watch=False)
    for scale in range(1, 4):
        run.end(run.step(scale))
    assert run.monitor.flush(60)
    loss = run.step(4)
    run.monitor._recorder.cursor[Cursor.STEP] = 77
    run.monitor.flush(60)
    run.end(loss)
    for scale in range(5, 8):
        run.end(run.step(scale))
    run.monitor.close()
    run.check()
    assert [(x.step, x.recorded) for x in run.records] == [(i, i != 3) for i in range(7)]
    assert run.monitor.failures["step"] == 1
    assert run.monitor.dropped == 1


# signal handlers of the program


class ExpiredError(Exception):
    """What a timeout's handler raises."""


def _function(*_):
    raise ExpiredError


class _Object:
    def method(self, *_):
        self.raises()

    def raises(self):
        raise ExpiredError

    def __call__(self, *_):
        raise ExpiredError


HANDLERS = {
    "function": _function,
    "method": _Object().method,
    "object": _Object(),
    "partial": partial(_function, "more"),
}


@pytest.mark.parametrize("kind", HANDLERS)
@pytest.mark.parametrize("watch", [False, True])
def test_exceptions_of_signal_handlers_propagate(kind, watch):
    run = Run(watch, updates=True)
    raised = 0
    with handled(signal.SIGUSR1, HANDLERS[kind]):
        for line in range(0, 2000, 3):
            loss = run.step(line + 1)
            with suppress(ExpiredError), Deliver(line) as at:
                if not watch:
                    run.monitor.record()
                run.end(loss)
                assert not at.done
            raised += at.done
            if not at.done:
                break
    run.monitor.close()
    run.check()
    assert raised > 20
    assert set(run.monitor.failures) <= {"step", "advance"}


class Deliver(At):
    """Delivers a signal at a line, so that its handler runs there."""

    def _act(self):
        sys.settrace(None)
        signal.raise_signal(signal.SIGUSR1)


def test_other_exceptions_are_failures():
    model = nn.Linear(1, 1)
    monitor = gm.Monitor(model, rules=())
    with handled(signal.SIGUSR1, _function):
        monitor.record("not stats")
        monitor.advance(loss=object())
    assert monitor.failures == {"record": 1, "scalar 'loss'": 1}
    monitor.close()


def test_a_handler_that_replaces_itself_propagates_too():
    def once(number, _):
        signal.signal(number, signal.SIG_DFL)
        raise ExpiredError

    with handled(signal.SIGUSR1, once):
        run = Run(watch=False)
        run.step(1)
        with pytest.raises(ExpiredError), Deliver(5) as at:
            run.monitor.record()
    assert at.done
    assert run.monitor.failures == {}
    run.monitor.close()


def test_an_interrupted_advance_leaves_the_activations_of_the_next_step(monkeypatch):
    run = Run(watch=False, updates=True)
    for scale in range(1, 6):
        loss = run.step(scale)
        with monkeypatch.context() as patch, suppress(Interrupt):
            if scale == 3:
                patch.setattr(run.monitor._updates, "end_step", _interrupted)
            run.end(loss)
    run.monitor.close()
    assert run.check() == 5
    assert all(record.measured("activations")[-1] for record in run.records)
    assert run.monitor.failures == {"advance": 1}


def test_the_number_of_the_step_may_be_set_within_it():
    run = Run(watch=False, updates=True)
    for scale in range(1, 5):
        loss = run.step(scale)
        run.monitor.begin_updates()
        run.monitor.step = scale - 1
        run.end(loss)
    run.monitor.close()
    assert run.check() == 4
    assert run.monitor.failures == {}


@pytest.mark.parametrize("how", ["locate_nonfinite", "check_deterministic"])
def test_no_method_acts_in_a_repeat_on_any_thread(how):
    run = Run(watch=True, updates=True)
    for scale in range(1, 4):
        run.end(run.step(scale))
    monitor = run.monitor

    def step():
        loss = run.step(9)
        thread = threading.Thread(target=run.end, args=(loss,))
        thread.start()
        thread.join()
        monitor.step, monitor.every = 0, 7
        assert monitor.flush()
        monitor.close()

    if how == "locate_nonfinite":
        gm.locate_nonfinite(step)
    else:
        gm.check_deterministic(step, [run.model, run.optimizer])
    assert (monitor.step, monitor.every, monitor.closed) == (3, 1, False)
    run.end(run.step(4))
    monitor.close()
    assert run.check() == 4
    assert monitor.failures == {}


def test_a_repeat_between_forward_and_backward():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    loss = model(torch.ones(1, 2)).sum()
    gm.locate_nonfinite(step)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
