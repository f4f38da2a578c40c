"""Steps, advances and copies to the host on several streams: all uses of the ring are in order."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import gradiometer as gm
from gradiometer.monitor.failures import Failures
from gradiometer.monitor.ring_reader import RingReader
from gradiometer.recorder import Recorder, Updates
from support.fake_device import Model, device_of
from support.streams import RaceError, Stream, streams

CALLS = (
    "record",
    "record stats",
    "record updates",
    "updates",
    "advance",
    "take",
    "start",
    "rewind",
    "configure",
)


@example([(0, "record"), (1, "start")])
@example([(1, "updates"), (2, "updates")])
@example([(1, "record updates"), (2, "record updates")])
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(CALLS)), min_size=1, max_size=12))
def test_uses_of_the_ring_are_in_order_on_any_streams(calls):
    with device_of("cuda") as d, streams() as seen:
        model = Model(d, 3)
        recorder = Recorder(model, capacity=64, updates=True)
        updates, failures = Updates(recorder), Failures()
        pairs = gm.compare({"w1": model.w1.detach()}, {"w1": torch.zeros_like(model.w1)})
        reader = RingReader(recorder, lambda _: None, failures)
        sides = [seen.current, Stream(), Stream()]
        stats, loss = gm.collect_grads(model), torch.ones((), device=d)
        # the model, its gradients and the loss are the user's to order
        for side in sides[1:]:
            side.wait_stream(seen.current)
        for side, call in calls:
            with seen.on(sides[side]):
                if call == "record":
                    recorder.record()
                elif call == "record stats":
                    recorder.record(stats)
                elif call == "advance":
                    recorder.advance()
                elif call == "take":
                    reader.take({"loss": loss})
                elif call == "start":
                    reader.start(in_step=True)
                elif call == "rewind":
                    reader.rewind(3)
                elif call == "record updates":
                    recorder.record_updates(pairs)
                elif call == "updates":
                    updates.measure(updates.step)
                    updates.keep(updates.step + 1)
                else:
                    recorder.configure_(every=2)
        assert not failures.counts


def test_a_use_without_an_order_is_detected():
    with device_of("cuda") as d, streams() as seen:
        x, side = torch.zeros(3, device=d), Stream()
        with pytest.raises(RaceError, match="add_"), seen.on(side):
            x.add_(1)
        side.wait_stream(seen.current)
        with seen.on(side):
            x.add_(1)


def test_a_recorder_can_be_copied_and_pickled_after_use():
    with device_of("cuda") as d, streams():
        recorder = Recorder(Model(d, 1))
        recorder.record()
        for other in (copy.deepcopy(recorder._order), pickle.loads(pickle.dumps(recorder._order))):  # noqa: S301
            with other.on(torch.device("cuda")):
                pass


def test_a_read_comes_after_the_steps_of_another_stream(monkeypatch):
    def fetch(tensors):
        tensors[0].clone()
        raise EOFError

    monkeypatch.setattr("gradiometer.recorder.step_ring.fetch", fetch)
    with device_of("cuda") as d, streams() as seen:
        recorder = Recorder(Model(d, 1), capacity=2)
        recorder.record()
        with seen.on(Stream()), pytest.raises(EOFError):
            recorder.read()
