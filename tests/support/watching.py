"""Sinks, rules and handlers of signals, shared by the tests of the monitor and of the integrations."""

from __future__ import annotations

import signal
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Sink:
    """Keeps all its input."""

    def __init__(self):
        self.info, self.records, self.faults, self.closed = None, [], [], 0

    def start(self, info):
        self.info = info

    def write(self, records, findings):
        del findings
        self.records += records

    def fault(self, fault):
        self.faults.append(fault)

    def close(self):
        self.closed += 1

    @property
    def steps(self):
        return [record.step for record in self.records]

    @property
    def totals(self):
        return [record.total() for record in self.records]

    def scalars(self, name):
        return [record.scalars[name] for record in self.records]


class NoReads(TorchDispatchMode):
    """Fails if the host reads the value of a tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        del types
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@contextmanager
def handled(number, handler):
    """Install a handler of a signal."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def time_limit():
    """Install a signal handler that raises TimeoutError; yield a function that causes the signal."""

    def stop(*_):
        raise TimeoutError("the time is up")

    with handled(signal.SIGINT, stop):
        yield lambda *_, **__: signal.raise_signal(signal.SIGINT)


class Counter:
    """A rule that counts the steps it has seen."""

    name = "counter"

    def __init__(self):
        self.seen = 0

    def check(self, record):
        del record
        self.seen += 1
        return []

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Stateless:
    """A rule without a history."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass
