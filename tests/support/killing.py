"""Train in a process that gets killed: each input line, JSON, names a run to begin and when to kill it.

The process is killed ``delay`` seconds after its record has taken ``steps`` steps, however long they take.

torch is imported once, and each training is a fork of this process, which starts no threads itself.
"""

from __future__ import annotations

import json
import os
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


def loss_of(step):
    return 1.0 + step / 64


class Telling(RunRecord):
    """A run record that reports its last step: a separate sink would be ahead of it."""

    def __init__(self, pipe, *args, **options):
        super().__init__(*args, **options)
        self.pipe = pipe

    def write(self, records, findings):
        super().write(records, findings)
        os.write(self.pipe, struct.pack("q", records[-1].step))


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


def last_of(told):
    """Return the last reported step; a write of 8 bytes to a pipe is atomic."""
    return max((step for (step,) in struct.iter_unpack("q", told)), default=-1)


def main():
    torch.set_num_threads(1)
    # with its first array, pyarrow imports pandas if it is installed
    pyarrow.array(["once"])
    for line in sys.stdin:
        order = json.loads(line)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(reader)
                train(order["run"], order["first"], writer)
            finally:
                os._exit(1)
        os.close(writer)
        told = b""
        last = order["first"] + order["steps"] - 1
        while order["steps"] and last_of(told) < last and (part := os.read(reader, 1 << 16)):
            told += part
        time.sleep(order["delay"])
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        while part := os.read(reader, 1 << 16):
            told += part
        os.close(reader)
        killed = os.WIFSIGNALED(status)
        sys.stdout.write(json.dumps({"killed": killed, "last": last_of(told) if told else None}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
