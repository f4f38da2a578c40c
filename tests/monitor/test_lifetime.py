"""What a closed or forgotten monitor leaves behind: no hook, no ring, no copy of weights, no model."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from functools import partial

import pytest
import torch
from torch import nn

import gradiometer as gm


def model_of(size=256):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(size, size), nn.Linear(size, 1))


def train(model, optimizer, steps=3, monitor=None):
    for _ in range(steps):
        loss = model(torch.ones(2, 256)).sum()
        loss.backward()
        if monitor is not None:
            monitor.record()
        optimizer.step()
        if monitor is not None:
            monitor.advance(loss=loss)
        optimizer.zero_grad()


def buffers_of(monitor):
    """Return weak references to what a monitor keeps on the device: ring, histograms, copies of weights."""
    recorder = monitor._recorder
    kept = [recorder.ring, *recorder.exponents.buffers(), *monitor._updates.parts[0].snapshot.buffers()]
    return [weakref.ref(x) for x in kept]


OPTIONS = {"capacity": 1024, "weights": True, "updates": True, "precision": 1, "rules": ()}


@pytest.mark.parametrize("how", ["close", "with", "exception"])
def test_a_closed_watch_removes_its_hooks_and_frees_its_memory(how):
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    held, buffers = [], []
    for _ in range(3):
        monitor = gm.watch(model, optimizer, **OPTIONS)
        train(model, optimizer)
        buffers += buffers_of(monitor)
        if how == "close":
            monitor.close()
        elif how == "with":
            with monitor:
                pass
        else:
            with pytest.raises(RuntimeError, match="of the loop"), monitor:
                raise RuntimeError("of the loop")
        held.append(monitor)
        del monitor
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    gc.collect()
    assert [buffer() for buffer in buffers] == [None] * len(buffers)
    assert len(buffers) > 12
    for monitor in held:
        assert "3 steps, 3 with tensors" in str(monitor.summary())
        assert (monitor.step, monitor.last.step, monitor.failures, monitor.closed) == (3, 2, {}, True)
        assert monitor.state_dict()["step"] == 3
        assert repr(monitor)
        monitor.close()
    train(model, optimizer)
    assert held[0].step == 3


def test_a_closed_monitor_that_is_held_holds_neither_model_nor_weights():
    held = []
    for _ in range(3):
        model = model_of()
        monitor = gm.Monitor(model, taps=gm.Taps(model, {"linear": nn.Linear}), **OPTIONS)
        train(model, torch.optim.SGD(model.parameters(), lr=0.0), monitor=monitor)
        monitor.close()
        held += [(monitor, weakref.ref(model[0].weight), weakref.ref(monitor._recorder.ring))]
        taps = weakref.ref(model)
        del model, monitor
    gc.collect()
    assert [weight() for _, weight, _ in held] == [None] * 3
    assert taps() is None
    assert all(len(ring()) == 0 for _, _, ring in held)


def test_the_loop_goes_on_after_close():
    model = model_of()
    monitor = gm.Monitor(model, **OPTIONS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    compiled = torch.compile(monitor.record, backend="eager", fullgraph=True)
    train(model, optimizer, monitor=monitor)
    compiled()
    monitor.advance()
    monitor.close()
    compiled()
    monitor.record_updates()
    monitor.begin_updates()
    monitor.keep(1)
    monitor.record(gm.collect_grads(model))
    assert monitor.failures == {}
    monitor.note(loss=1.0)
    monitor.advance()
    assert monitor.failures == {"closed": 1}
    assert not monitor.skip_step


def test_skip_step_still_answers_after_close_if_the_loop_uses_it():
    model = model_of()
    monitor = gm.Monitor(model, rules=())
    model(torch.ones(2, 256)).sum().backward()
    monitor.record()
    assert not monitor.skip_step
    monitor.advance()
    monitor.close()
    model[0].weight.grad.fill_(torch.nan)
    monitor.record()
    assert monitor.skip_step


def test_a_compiled_step_that_reads_skip_step_goes_on_after_close():
    model = model_of()
    monitor = gm.Monitor(model, **OPTIONS)
    skip = torch.compile(lambda: (monitor.record(), monitor.skip_step)[1], backend="eager", fullgraph=True)
    updates = torch.compile(monitor.record_updates, backend="eager", fullgraph=True)
    for step in range(4):
        if step == 2:
            monitor.close()
            assert len(monitor._recorder.ring) == 1
            assert monitor._recorder.exponents is None
        model(torch.ones(2, 256)).sum().backward()
        if step == 3:
            model[0].weight.grad.fill_(torch.nan)
        assert bool(skip()) == (step == 3)
        updates()
        if step < 2:
            monitor.advance()
    monitor.record_updates()
    assert monitor.failures == {}


def scaled():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return model, optimizer, torch.amp.GradScaler("cpu", init_scale=2.0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])  # noqa: S301
def test_a_copy_of_a_watched_scaler_has_its_own_step(copied):
    model, optimizer, scaler = scaled()
    with gm.watch(model, optimizer, scaler=scaler, rules=()) as monitor:
        other = copied(scaler)
        assert other.step.__self__ is other
        assert other.step.__func__ is torch.amp.GradScaler.step
    assert monitor.step == 0


def test_monitors_of_one_scaler_may_close_in_any_order():
    model, scaler = model_of(), torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.0) for layer in model]
    monitors = [
        gm.watch(layer, x, scaler=scaler, rules=()) for layer, x in zip(model, optimizers, strict=True)
    ]
    monitors[0].close()
    scaler.scale(model(torch.ones(2, 256)).sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert [monitor.step for monitor in monitors] == [0, 1]
    refs = [weakref.ref(x) for x in (*optimizers, *monitors)]
    monitors[1].close()
    scaler.update()
    del optimizers, optimizer, monitors, model
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4


def test_close_restores_the_step_of_a_scaler():
    model, optimizer, scaler = scaled()
    for _ in range(3):
        with gm.watch(model, optimizer, scaler=scaler, rules=()) as monitor:
            scaler.scale(model(torch.ones(2, 256)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert monitor.step == 1
        assert "step" not in vars(scaler)
    # wrapped by somebody else in the meantime: theirs stays
    with gm.watch(model, optimizer, scaler=scaler, rules=()):
        step = scaler.step
        scaler.step = partial(step)
        theirs = scaler.step
    assert scaler.step is theirs


def _watched():
    model, optimizer, scaler = scaled()
    monitor = gm.watch(model, optimizer, scaler=scaler, **OPTIONS)
    train(model, optimizer)
    return model, optimizer, scaler, monitor


def _monitored():
    model = model_of()
    monitor = gm.Monitor(model, **OPTIONS)
    train(model, torch.optim.SGD(model.parameters(), lr=0.0), monitor=monitor)
    return model, monitor


def _located():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = gm.locate_nonfinite(lambda: train(model, optimizer, 1))
    with gm.locate_nonfinite(model) as block:
        train(model, optimizer, 1)
    return model, optimizer, found, block


def _deterministic():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return model, optimizer, gm.check_deterministic(lambda: train(model, optimizer, 1), [model, optimizer])


@pytest.mark.parametrize("make", [_watched, _monitored, _located, _deterministic])
def test_nothing_is_alive_once_everything_is_forgotten(make):
    refs = [weakref.ref(x) for x in make()]
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


@pytest.mark.parametrize("make", [_located, _deterministic])
def test_no_hook_is_left_behind(make):
    model, optimizer, *_ = make()
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert all(not (p._backward_hooks or p._post_accumulate_grad_hooks) for p in model.parameters())


@pytest.mark.parametrize("ends", ["close", "forgotten", "skip_step"])
def test_taps_belong_to_one_monitor_until_it_ends(ends):
    model = model_of()
    taps = gm.Taps(model, {"linear": nn.Linear})
    monitor = gm.Monitor(model, taps=taps, rules=())
    with pytest.raises(ValueError, match="close that Monitor, or make other Taps"):
        gm.Monitor(model, taps=taps)
    if ends == "skip_step":
        model(torch.ones(2, 256)).sum().backward()
        monitor.record()
        assert not monitor.skip_step
    if ends != "forgotten":
        monitor.close()
        monitor.record()
        assert monitor.failures.keys() <= {"advance"}
    else:
        del monitor
        gc.collect()
    records = []
    with gm.Monitor(model, taps=taps, rules=(), sinks=[records.append]) as other:
        train(model, torch.optim.SGD(model.parameters(), lr=0.0), monitor=other)
    assert all(record.measured("activations")[-2:].all() for record in records)
