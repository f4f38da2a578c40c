"""The code shared by the callbacks of the integrations, without any framework."""

from __future__ import annotations

import gc
import importlib
import math
import sys
import weakref

import pytest
import torch
from torch import nn

from gradiometer import distributed
from gradiometer.integrations.frameworks import scaler_of
from gradiometer.integrations.session import Session, while_running
from gradiometer.monitor import Monitor
from support.watching import NoReads, Sink, time_limit


def watching(model, **options):
    sink = Sink()
    session = Session("it", {"rules": (), "sinks": [sink]} | options)
    session.begin(model, scaler=None, step=0, state=None)
    return session, sink


def test_scalars_stay_where_they_are_and_are_those_of_their_moment():
    model = nn.Linear(2, 1)
    session, sink = watching(model)
    model(torch.ones(1, 2)).sum().backward()
    lr, losses = torch.tensor(0.5), [torch.tensor(1.0, requires_grad=True), torch.tensor(2.0)]
    with NoReads():
        for loss in losses:
            session.add_loss(loss)
        session.note(lr=lr, other=3, nothing=None)
        # as a scheduler might
        lr.mul_(0.0)
    with pytest.raises(AssertionError), NoReads():
        lr.item()
    session.record()
    session.advance()
    session.end()
    assert dict(sink.records[0].scalars) == {"loss": 3.0, "lr": 0.5, "other": 3.0}


def test_a_step_without_gradients_measured_is_none():
    model = nn.Linear(2, 1)
    session, sink = watching(model)
    session.advance()
    session.record()
    session.advance()
    session.advance()
    session.end()
    assert sink.steps == [0]


def test_of_some_parameters_the_others_keep_what_was_measured_and_thresholds_hold():
    from gradiometer.columns import Flag, Thresholds

    model = nn.Linear(2, 1)
    session, sink = watching(model, thresholds=Thresholds(exploding=0.5), fingerprint=True)
    model(torch.ones(1, 2)).sum().backward()
    session.record(only=[model.weight])
    model.weight.grad.mul_(10)
    session.record(only=[model.bias, nn.Parameter(torch.ones(1))])
    session.advance()
    session.end()
    (record,) = sink.records
    assert record.value("norm").tolist() == [math.sqrt(2), 1.0]
    assert record.flags().tolist() == [Flag.EXPLODING] * 2
    assert record.fingerprints()[:, 0].tolist() == [8, 4]


def test_what_the_model_cannot_offer_ends_the_watching_alone(caplog):
    session, sink = watching(nn.Linear(2, 1, device="meta"))
    assert "'weight' is on the meta device" in caplog.text
    assert "training continues without the monitor" in caplog.text
    assert not session.running
    assert session.state_dict() == {}
    assert sink.info is None


def test_a_hook_that_fails_is_the_last(caplog):
    class Callback:
        def __init__(self):
            self._session, self.sink = watching(nn.Linear(2, 1))
            self.calls = 0

        @while_running
        def hook(self):
            self.calls += 1
            raise AttributeError("no such attribute")

    callback = Callback()
    callback.hook()
    callback.hook()
    assert callback.calls == 1
    said = "it: AttributeError: no such attribute; training continues without the monitor"
    assert [record.getMessage() for record in caplog.records] == [said]


class Holder:
    def __init__(self, session):
        self._session = session

    @while_running
    def hook(self):
        self._session.record()


def begin(session, state=None):
    session.begin(nn.Linear(2, 1), scaler=None, step=0, state=state)


STATE = {"step": 0, "every": 1, "black_box": {}, "rules": {}, "findings": []}
PLACES = {
    "begin": (Monitor, "set_driver", begin),
    "resume": (Monitor, "load_state_dict", lambda s: begin(s, STATE)),
    "ranks": (distributed, "rendezvous", begin),
    "hook": (Monitor, "record", lambda s: Holder(s).hook()),
    "checkpoint": (Monitor, "state_dict", Session.state_dict),
    "end": (Monitor, "close", Session.end),
    "give up": (Monitor, "close", lambda s: s.give_up("it failed")),
    "end by an error": (Monitor, "__exit__", lambda s: s.end(ValueError("no data"))),
}


@pytest.mark.parametrize("place", PLACES)
def test_what_a_signal_handler_raises_is_for_the_program(place, monkeypatch, caplog):
    owner, name, call = PLACES[place]
    session, sink = watching(nn.Linear(2, 1))
    if place in {"begin", "resume", "ranks"}:
        session.end()
    with time_limit() as interrupted, monkeypatch.context() as patches:
        patches.setattr(owner, name, interrupted)
        if place == "ranks":
            patches.setattr(distributed, "is_active", lambda: True)
            patches.setattr(distributed, "group_of", lambda _: None)
            patches.setattr(distributed, "ranks_of", lambda _: (0, [0]))
            session._options["ranks"] = True
            alone = lambda model, **options: Monitor(model, **options | {"ranks": False})  # noqa: E731
            patches.setattr("gradiometer.integrations.session.Monitor", alone)
        with pytest.raises(TimeoutError, match="the time is up") as caught:
            call(session)
    assert "TimeoutError" not in caplog.text
    # as a trainer does with an exception
    session.end(caught.value)
    assert session.monitor.closed
    assert not session.running
    (fault,) = sink.faults
    assert (fault.reason, fault.message) == ("exception", "TimeoutError: the time is up")


def test_after_the_end_the_model_is_free():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session, _ = watching(model, updates=True)
    session.record(only=[model.weight])
    session.record_updates_after(optimizer)
    session.add_loss(model(torch.ones(1, 2)).sum())
    session.end()
    assert not optimizer._optimizer_step_post_hooks
    weight = weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    assert weight() is None


def test_an_optimizer_without_hooks_is_measured_at_the_end_of_the_step():
    class Wrapper(torch.optim.Optimizer):
        """Does not call `Optimizer.__init__`."""

        def __init__(self, inner):
            self.inner = inner

        def step(self):
            self.inner.step()

    model = nn.Linear(2, 1, bias=False)
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.5))
    session, sink = watching(model, updates=True)
    model(torch.ones(1, 2)).sum().backward()
    session.record()
    session.begin_updates()
    session.record_updates_after(optimizer)
    optimizer.step()
    session.advance()
    session.end()
    assert sink.records[0].total("norm", "updates") == pytest.approx(math.sqrt(0.5))


def test_options_are_those_of_a_monitor():
    with pytest.raises(TypeError, match="capcity"):
        Session("it", {"capcity": 3})
    with pytest.raises(ValueError, match="capacity"):
        watching(nn.Linear(2, 1), capacity=0)


@pytest.mark.parametrize(
    ("module", "extra", "missing"),
    [
        ("huggingface", "transformers", ["transformers"]),
        ("lightning", "lightning", ["lightning", "lightning.pytorch", "pytorch_lightning"]),
    ],
)
def test_without_the_library_it_says_what_to_install(module, extra, missing, monkeypatch):
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"gradiometer.integrations.{module}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'gradiometer\[{extra}\]'"):
        importlib.import_module(f"gradiometer.integrations.{module}")


def test_a_scaler_counts_if_it_scales():
    class Owner:
        scaler = torch.amp.GradScaler("cpu")

    assert scaler_of(Owner()) is Owner.scaler
    Owner.scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert scaler_of(Owner()) is None
    assert scaler_of(object()) is None
