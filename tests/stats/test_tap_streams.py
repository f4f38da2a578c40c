"""Taps that are used on several streams: all uses of their stores and scratch are in order."""

from __future__ import annotations

import copy
import pickle
import threading
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import gradiometer as gm
from support.activations import Calls
from support.fake_device import device_of
from support.streams import RaceError, Stream, streams

CALLS = ("value", "gradient", "stats", "advance", "every", "record", "recorder's advance", "clear", "rewind")


class Tapped:
    """A model with taps and a recorder on a fake device; a gradient is that of the last value."""

    def __init__(self, device: torch.device) -> None:
        self.model = Calls("a", "b")
        # of a fake device, autograd has no thread
        self.model.weight = nn.Parameter(torch.ones(3, device=device), requires_grad=False)
        self.taps = gm.Taps(self.model, names=("a", "b"))
        self.x = torch.ones(4, 3, device=device)
        self.hooks: list = []

    def value(self) -> None:
        with (
            patch.object(Tensor, "is_leaf", new=False, create=True),
            patch.object(Tensor, "requires_grad", new=True, create=True),
            patch.object(Tensor, "register_hook", lambda _, hook: self.hooks.append(hook)),
        ):
            self.model(self.x)

    def gradient(self) -> None:
        for hook in self.hooks:
            hook(self.x)


@contextmanager
def tapped():
    with device_of("cuda") as d, streams() as seen:
        yield Tapped(d), seen


@example([(0, "value"), (1, "value")])
@example([(0, "value"), (1, "gradient"), (2, "gradient")])
@example([(0, "value"), (0, "gradient"), (1, "stats"), (2, "value"), (1, "gradient"), (0, "advance")])
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(CALLS)), min_size=1, max_size=12))
def test_uses_of_the_stores_are_in_order_on_any_streams(calls):
    with tapped() as (one, seen):
        recorder = gm.Recorder({"w": nn.Parameter(torch.ones(2, device=one.x.device))}, taps=one.taps)
        run = {
            "value": one.value,
            "gradient": one.gradient,
            "stats": one.taps.stats,
            "advance": one.taps.advance,
            "every": lambda: one.taps.configure_(every=2),
            "record": recorder.record,
            "recorder's advance": recorder.advance,
            "clear": lambda: recorder.clear_taps(3),
            "rewind": lambda: recorder.configure_(step=3),
        }
        sides = [seen.current, Stream(), Stream()]
        # the activation is the user's to order
        for side in sides[1:]:
            side.wait_stream(seen.current)
        for side, call in calls:
            with seen.on(sides[side]):
                run[call]()


@pytest.mark.parametrize("first", ["value", "gradient"])
def test_a_forward_and_a_backward_pass_do_not_wait_for_each_other(first):
    with tapped() as (one, seen):
        one.value()
        side = Stream()
        side.wait_stream(seen.current)
        streams_of = {"value": seen.current, "gradient": side}
        with seen.on(streams_of[first]):
            getattr(one, first)()
        (second,) = {*streams_of} - {first}
        with seen.on(streams_of[second]):
            getattr(one, second)()
        main, other = streams_of["value"], streams_of["gradient"]
        assert other.clock[main] < main.clock[main]
        assert main.clock.get(other, 0) < other.clock[other]


def test_a_capture_waits_for_nothing_outside_of_it_and_nothing_waits_for_it():
    with tapped() as (one, seen):
        side = Stream()
        side.wait_stream(seen.current)
        for stream in (side, seen.current):
            one.value()
            with seen.on(stream), seen.capturing():
                one.value()
                one.gradient()
                one.taps.stats()
                one.taps.advance()
        with seen.on(side):
            one.value()


def test_a_use_without_an_order_is_detected():
    with tapped() as (one, seen):
        one.value()
        side = Stream()
        with seen.on(side), pytest.raises(RaceError, match="add_"):
            one.taps.values.add_(1)


def test_taps_can_be_copied_and_pickled_after_use():
    with tapped() as (one, _):
        one.value()
        for copied in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):  # noqa: S301
            for order in copied(one.taps._orders):
                with order.on(one.x.device):
                    pass


def test_threads_queue_their_uses_one_after_the_other():
    with tapped() as (one, _):
        order, done = one.taps._orders[0], threading.Event()

        def use() -> None:
            with order.on(torch.device("cuda")):
                done.set()

        thread = threading.Thread(target=use)
        with order.on(torch.device("cuda")):
            thread.start()
            assert not done.wait(0.05)
        thread.join()
        assert done.is_set()
