"""Train in a process that ends: each input line, JSON, names a run to begin, and how or when to end it.

The process is killed ``delay`` seconds after ``steps`` of its steps, however long they take. With a ``rate``,
it trains at this rate, in steps/s; otherwise it writes small segments as fast as it can. With an ``end``, it
is not killed, but ends in this way.

torch is imported once, and each training is a fork of this process, which starts no threads itself.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import select
import signal
import struct
import sys
import time

import pyarrow.parquet
import torch

from gradiometer.monitor import pipeline
from gradiometer.monitor.monitor import Monitor
from gradiometer.runs.writer import RunRecord

# steps in a full segment
SEGMENT = 25
# of a report: the time, the last step, and the last one that has left the device; a pipe takes it at once
TOLD = struct.Struct("dqq")


def tell(pipe, last, left):
    os.write(pipe, TOLD.pack(time.monotonic(), last, left))


left_open = []


def loss_of(step):
    return 1.0 + step / 64


class Telling(RunRecord):
    """A run record that reports each step that it has written: a separate sink would be ahead of it."""

    def __init__(self, pipe, *args, **options):
        super().__init__(*args, **options)
        self.pipe = pipe

    def write(self, records, findings):
        super().write(records, findings)
        tell(self.pipe, records[-1].step, records[-1].step)


def train(run, first, pipe):
    # copy to the host at nearly every step, so that little is in flight at the end
    pipeline.INTERVAL = 0.002
    model = torch.nn.Linear(1, 2, bias=False)
    record = Telling(pipe, run, segment_steps=SEGMENT, segment_seconds=0.02, fsync=False)
    monitor = Monitor(model, rules=(), sinks=[record])
    state = Monitor(model, rules=()).state_dict()
    with monitor:
        monitor.load_state_dict(state | {"step": first})
        while True:
            # the value encodes the step
            model.weight.grad = torch.full((2, 1), float(monitor.step))
            monitor.record()
            monitor.advance(loss=loss_of(monitor.step))
            time.sleep(0.0003)


def train_at(rate, run, pipe, fsync):
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(6)])
    # the defaults, or a disk that makes nobody wait
    options = {"run_dir": run} if fsync else {"sinks": [RunRecord(run, fsync=False)]}
    with Monitor(model, **options) as monitor:
        began = time.monotonic()
        for step in range(10**6):
            time.sleep(max(0.0, began + step / rate - time.monotonic()))
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, float(step))
            monitor.record()
            monitor.advance(loss=loss_of(step))
            left = monitor._pipeline.last
            tell(pipe, step, -1 if left is None else left.step)


def train_and_end(run, end):
    """Train ten steps with the defaults, and end as a process does."""
    model = torch.nn.Linear(4, 4)
    signals = {"SIGTERM": signal.SIGTERM, "SIGHUP": signal.SIGHUP}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    monitor = Monitor(model, run_dir=run)
    left_open.append(monitor)  # it must not end by garbage collection

    def steps():
        for step in range(10):
            model.weight.grad = torch.full_like(model.weight, math.nan if step == 9 else float(step))
            monitor.record()
            monitor.advance(loss=loss_of(step))
            if step == 9 and end in signals:
                os.kill(os.getpid(), signals[end])
        if end == "exception":
            raise ValueError("the end")
        if end == "sys.exit":
            sys.exit(3)

    if end == "end of the process":
        steps()
    else:
        with monitor:
            steps()


def end(run, end):
    """Train in a process that ends by itself; return its exit status."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(2)
            train_and_end(run, end)
            code = 0
        except SystemExit as error:
            code = error.code
        finally:
            atexit._run_exitfuncs()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return {"status": status}


def last_of(told):
    return max([last for _, last, _ in TOLD.iter_unpack(told)], default=-1)


def kill(run, first=0, steps=1, delay=0.0, rate=None, lost=0.5, fsync=True):
    """Train and kill; return what the process had reported."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            if rate is None:
                train(run, first, writer)
            train_at(rate, run, writer, fsync)
        finally:
            os._exit(1)
    os.close(writer)
    told = b""
    while steps and last_of(told) < first + steps - 1 and (part := os.read(reader, 1 << 16)):
        told += part
    end = time.monotonic() + delay
    # a full pipe would stop the training
    while (left := end - time.monotonic()) > 0:
        if select.select([reader], [], [], left)[0]:
            part = os.read(reader, 1 << 16)
            told += part
            if not part:
                break
            time.sleep(min(left, 0.01))
    now = time.monotonic()
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    while part := os.read(reader, 1 << 16):
        told += part
    os.close(reader)
    # the last step that had left the device ``lost`` seconds before
    left = max([left for at, _, left in TOLD.iter_unpack(told) if at <= now - lost], default=-1)
    return {"killed": os.WIFSIGNALED(status), "last": last_of(told) if told else None, "left": left}


def main():
    torch.set_num_threads(1)
    # with its first array, pyarrow imports pandas if it is installed
    pyarrow.array(["once"])
    for line in sys.stdin:
        order = json.loads(line)
        sys.stdout.write(json.dumps((end if "end" in order else kill)(**order)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
