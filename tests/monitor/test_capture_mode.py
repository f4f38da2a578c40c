"""Background threads and the training thread, while a CUDA graph is captured on one of them."""

from __future__ import annotations

import gc
import threading
from typing import ClassVar

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.monitor import capture_mode, pipeline, ring_reader

GLOBAL, THREAD_LOCAL, RELAXED = range(3)


class Cuda:
    """The rules of the driver: which calls of which threads invalidate which captures."""

    def __init__(self):
        self.captures = {}  # mode of each capturing thread
        self.modes = {}
        self.invalid = False

    def exchange(self, pointer):
        here = threading.get_ident()
        mode = pointer._obj
        self.modes[here], mode.value = mode.value, self.modes.get(here, GLOBAL)
        return 0

    def query(self):
        here = threading.get_ident()
        mode = self.modes.get(here, GLOBAL)
        own = here in self.captures and self.captures[here] != RELAXED and mode != RELAXED
        others = mode == GLOBAL and GLOBAL in [x for thread, x in self.captures.items() if thread != here]
        if own or others:
            self.invalid = True
            raise RuntimeError("operation not permitted when stream is capturing")

    def is_capturing(self, _):
        return threading.get_ident() in self.captures


class Copies:
    """Replaces `Pending`: a copy that has arrived, and asks the device whether it has."""

    cuda: ClassVar[Cuda]

    def __init__(self, tensors, build):
        if self.cuda.is_capturing(None):
            raise RuntimeError("a copy to the host cannot be part of a CUDA graph")
        self.host, self.build = [tensor.clone() for tensor in tensors], build

    def ready(self):
        # as the real one: not on the thread that captures
        if self.cuda.is_capturing(None):
            return False
        self.cuda.query()
        return True

    def result(self):
        return self.build(self.host)


@pytest.fixture
def cuda(monkeypatch):
    Copies.cuda = found = Cuda()
    monkeypatch.setattr(ring_reader, "Pending", Copies)
    monkeypatch.setattr(pipeline, "is_capturing", found.is_capturing)
    monkeypatch.setattr(capture_mode, "_exchange", lambda: found.exchange)
    return found


def monitor_with_a_copy_under_way():
    model, seen = nn.Linear(2, 1), []
    model(torch.ones(1, 2)).sum().backward()
    monitor = gm.Monitor(model, rules=(), sinks=[seen.append])
    monitor._pipeline._device = torch.device("cuda")
    monitor.record()
    monitor._pipeline._next = float("inf")
    monitor.advance(loss=1.0)
    monitor._pipeline.reader.start()
    return monitor, seen


def in_a_thread(call):
    errors = []

    def run():
        try:
            call()
        except Exception as error:  # noqa: BLE001 raised below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert errors == []


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_a_poll_in_the_background_does_not_disturb_a_capture(cuda, mode):
    monitor, _ = monitor_with_a_copy_under_way()
    cuda.captures[threading.get_ident()] = mode
    in_a_thread(monitor._pipeline._poll)
    assert not cuda.invalid
    assert monitor.last.step == 0
    assert monitor.failures == {}
    # each thread is in the mode that it was in
    assert set(cuda.modes.values()) == {GLOBAL}
    cuda.captures.clear()
    monitor.close()


def test_without_the_driver_only_the_training_thread_polls(cuda, monkeypatch):
    monkeypatch.setattr(capture_mode, "_exchange", lambda: None)
    monitor, seen = monitor_with_a_copy_under_way()
    cuda.captures[threading.get_ident()] = GLOBAL
    in_a_thread(monitor._pipeline._poll)
    assert not cuda.invalid
    assert monitor.last is None
    cuda.captures.clear()
    monitor.close()
    assert [record.step for record in seen] == [0]


def test_a_call_inside_a_capture_is_reported_and_loses_nothing(cuda):
    monitor, seen = monitor_with_a_copy_under_way()
    cuda.captures[threading.get_ident()] = GLOBAL
    monitor.advance(loss=2.0)
    assert monitor.flush(10) is False
    assert not cuda.invalid
    assert monitor.failures == {"capture": 1}
    assert monitor.step == 1
    cuda.captures.clear()
    monitor.advance(loss=3.0)
    monitor.close()
    assert [(record.step, record.loss) for record in seen] == [(0, 1.0), (1, 3.0)]
    assert monitor.dropped == 0


def test_a_monitor_that_is_collected_during_a_capture_ends_with_the_process(cuda):
    monitor, seen = monitor_with_a_copy_under_way()
    last = monitor._pipeline
    cuda.captures[threading.get_ident()] = GLOBAL
    del monitor
    gc.collect()
    assert not cuda.invalid
    assert seen == []
    cuda.captures.clear()
    assert last in pipeline._open
    last.end()
    assert [record.step for record in seen] == [0]


def test_a_monitor_that_another_thread_collects_does_not_disturb_a_capture(cuda):
    monitor, seen = monitor_with_a_copy_under_way()
    cuda.captures[threading.get_ident()] = GLOBAL
    held = [monitor]
    del monitor
    in_a_thread(held.clear)
    gc.collect()
    assert not cuda.invalid
    assert [record.step for record in seen] == [0]


def test_without_a_device_nothing_is_exchanged(monkeypatch):
    monkeypatch.setattr(capture_mode, "_exchange", lambda: pytest.fail("exchanged"))
    with capture_mode.beside_captures(torch.device("cpu")) as may:
        assert may


def test_a_machine_without_the_driver_has_no_such_mode(monkeypatch):
    def missing(_):
        raise OSError

    monkeypatch.setattr(capture_mode.ctypes, "CDLL", missing)
    capture_mode._exchange.cache_clear()
    with capture_mode.beside_captures(torch.device("cuda")) as may:
        assert not may
    capture_mode._exchange.cache_clear()
