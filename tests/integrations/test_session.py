"""The code shared by the callbacks of the integrations, without any framework."""

from __future__ import annotations

import importlib
import math
import sys

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradiometer.integrations.session import Session, scaler_of, while_running
from support.watching import Sink


class NoReads(TorchDispatchMode):
    """Fails if the host reads the value of a tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        del types
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


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
    from gradiometer.columns.schema import Flag, Thresholds

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
            msg = "no such attribute"
            raise AttributeError(msg)

    callback = Callback()
    callback.hook()
    callback.hook()
    assert callback.calls == 1
    assert len(caplog.records) == 1
    assert (
        caplog.records[0].getMessage()
        == "it: AttributeError: no such attribute; training continues without the monitor"
    )


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
