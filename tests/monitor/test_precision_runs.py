"""``Monitor(precision=N)``: histograms of the due steps reach the run record, whatever happens to the run."""

from __future__ import annotations

import json
import signal

import pytest
import torch
from torch import nn

pytest.importorskip("pyarrow")

import gradiometer as gm
from gradiometer.monitor import pipeline
from gradiometer.runs import verify
from support.compiling import graphs, inductor, no_recompile
from support.processes import python
from support.transfers import count_transfers


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def grads_at(model, step):
    """Give the model gradients that depend on the step alone; return what they count as."""
    g = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=g) * 2.0**-step
    return gm.collect_exponents({name: p.grad for name, p in model.named_parameters()})


def train(monitor, model, steps):
    for _ in range(steps):
        grads_at(model, monitor.step)
        monitor.record()
        monitor.advance(loss=1.0)


def check(run, steps):
    assert run.precision_steps == steps
    model = small_model()
    for step in steps:
        found, expected = run.precision(step).stats, grads_at(model, step)
        assert found.names == expected.names
        assert torch.equal(found.columns, expected.columns), step


def files(path):
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize("every", [1, 7, 3])
@pytest.mark.parametrize("capacity", [2, 64])
def test_the_cadence_is_its_own(every, capacity, tmp_path):
    model, seen = small_model(), []
    options = {"every": every, "capacity": capacity, "rules": (), "sinks": [seen.append]}
    with gm.Monitor(model, run_dir=tmp_path, precision=3, **options) as monitor:
        train(monitor, model, 20)
    assert monitor.failures == {}
    run = gm.read_run(tmp_path)
    check(run, [0, 3, 6, 9, 12, 15, 18])
    assert [record.step for record in seen if record.has("grad_exponents")] == run.precision_steps
    assert [record.step for record in seen if record.recorded] == list(range(0, 20, every))
    assert run.info["precision"] == 3
    assert verify(tmp_path).whole


@pytest.mark.usefixtures("_dynamo")
@pytest.mark.parametrize("backend", ["aot_eager", inductor])
def test_in_a_fullgraph_step(backend, tmp_path):
    model = small_model()
    with gm.Monitor(model, run_dir=tmp_path, precision=4, every=3, weights=True, rules=()) as monitor:

        @torch.compile(fullgraph=True, backend=backend)
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            monitor.record()
            stats = gm.collect_exponents({name: p.grad for name, p in model.named_parameters()})
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0.1 * p.grad)
                    p.grad = None
            return loss.detach(), stats

        expected = []
        with no_recompile():
            for _ in range(10):
                loss, stats = step(torch.randn(5, 4))
                expected.append(stats)
                monitor.advance(loss=loss)
    assert graphs() == 1
    assert monitor.failures == {}
    run = gm.read_run(tmp_path)
    assert run.precision_steps == [0, 4, 8]
    for i in run.precision_steps:
        assert torch.equal(run.precision(i).stats.columns, expected[i].columns)
        assert run.precision(i, "weights").total.numel == 37


def test_on_a_device_only_due_steps_are_copied_and_nothing_waits():
    copied = []

    def steps(away, loss):
        monitor = gm.Monitor(away, rules=(), capacity=100, precision=4)
        monitor._pipeline._start = lambda: None
        monitor._pipeline.is_started = True
        monitor._pipeline._next = float("inf")
        # a fake device has no pinned memory
        monitor._recorder.exponents.copy = lambda: copied.append(monitor.step) or []
        for _ in range(10):
            monitor.record()
            monitor.advance(loss=loss)
        assert monitor.failures == {}

    model = small_model()
    grads_at(model, 0)
    assert count_transfers(steps, model) == 0
    assert copied == [0, 4, 8]


def test_a_run_without_precision_has_no_trace_of_it(tmp_path):
    model = small_model()
    with gm.Monitor(model, run_dir=tmp_path, rules=()) as monitor:
        train(monitor, model, 3)
    steps, tensors = "steps/steps-0001-0000000000.parquet", "tensors/tensors-0001-0000000000.parquet"
    assert files(tmp_path) == [".lock", "run.json", steps, tensors]
    assert "precision" not in json.loads((tmp_path / "run.json").read_text())
    assert b'"exponents"' not in (tmp_path / steps).read_bytes()
    run = gm.read_run(tmp_path)
    assert run.precision_steps == []
    assert len(run.exponents()) == 0
    with pytest.raises(gm.RunError, match=r"no histograms of exponents; Monitor\(model, precision=100\)"):
        run.precision()


def test_a_resumed_run_goes_on(tmp_path):
    model = small_model()
    with gm.Monitor(model, run_dir=tmp_path, precision=3, rules=()) as monitor:
        train(monitor, model, 11)
        state = monitor.state_dict()
        train(monitor, model, 4)
    assert gm.read_run(tmp_path).precision_steps == [0, 3, 6, 9, 12]
    with gm.Monitor(model, run_dir=tmp_path, precision=4, rules=()) as monitor:
        monitor.load_state_dict(state)
        train(monitor, model, 6)
    run = gm.read_run(tmp_path)
    # step 12 is that of the second attempt
    check(run, [0, 3, 6, 9, 12, 16])
    assert gm.read_run(tmp_path, attempt=1).precision_steps == [0, 3, 6, 9, 12]
    assert [gm.read_run(tmp_path, attempt=k).info["precision"] for k in (1, 2)] == [3, 4]
    # a third attempt records none
    with gm.Monitor(model, run_dir=tmp_path, rules=()) as monitor:
        monitor.step = 15
        train(monitor, model, 3)
    check(gm.read_run(tmp_path), [0, 3, 6, 9, 12])
    assert verify(tmp_path).whole


def test_back_to_a_checkpoint_in_the_middle_of_a_run(tmp_path):
    model = small_model()
    with gm.Monitor(model, run_dir=tmp_path, precision=2, rules=()) as monitor:
        train(monitor, model, 3)
        state = monitor.state_dict()
        for _ in range(4):
            for p in model.parameters():
                p.grad = torch.ones(p.shape)
            monitor.record()
            monitor.advance()
        monitor.load_state_dict(state)
        train(monitor, model, 2)
    check(gm.read_run(tmp_path), [0, 2, 4])


def test_a_step_without_record_has_none(tmp_path):
    model = small_model()
    with gm.Monitor(model, run_dir=tmp_path, precision=2, rules=()) as monitor:
        train(monitor, model, 2)
        monitor.advance()
        train(monitor, model, 2)
    check(gm.read_run(tmp_path), [0, 4])


def test_what_is_no_cadence_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"Recorder\(precision=0\): precision must be an integer"):
        gm.Monitor(small_model(), run_dir=tmp_path / "run", precision=0)
    assert not (tmp_path / "run").exists()


def test_a_failed_copy_is_said_once_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    model = small_model()
    with gm.Monitor(model, run_dir=tmp_path, precision=2, rules=()) as monitor:
        train(monitor, model, 2)
        stores = monitor._recorder.exponents
        with monkeypatch.context() as patch:
            patch.setattr(type(stores), "copy", lambda _: 1 / 0)
            train(monitor, model, 4)
        train(monitor, model, 1)
    assert monitor.failures == {"precision": 2}
    check(gm.read_run(tmp_path), [0, 6])
    assert len(gm.read_run(tmp_path).steps) == 7
    assert "division by zero" in caplog.text


def test_slow_copies_keep_the_order(tmp_path, monkeypatch):
    """A step is delivered only when its histograms have arrived, and no later step before it."""
    from gradiometer.recorder import exponent_stores

    model, made = small_model(), []

    class Slow(exponent_stores.Pending):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.looks = 0
            made.append(self)

        def ready(self):
            self.looks += 1
            return self.looks > 3

    monkeypatch.setattr(exponent_stores, "Pending", Slow)
    monkeypatch.setattr(pipeline, "INTERVAL", 0.0)
    seen = []
    options = {"rules": (), "sinks": [seen.append], "capacity": 4}
    with gm.Monitor(model, run_dir=tmp_path, precision=5, **options) as monitor:
        train(monitor, model, 21)
    assert [record.step for record in seen] == list(range(21))
    assert len(made) == 5
    check(gm.read_run(tmp_path), [0, 5, 10, 15, 20])


# of a process that ends


TRAIN = """
import os
from gradiometer.monitor import pipeline
from monitor.test_precision_runs import gm, small_model, train
pipeline.INTERVAL = 0.0
model = small_model()
with gm.Monitor(model, run_dir={run!r}, precision=3, every=2, rules=()) as monitor:
    train(monitor, model, 20)
    assert monitor.flush(30)
    {end}
"""


def end_in(tmp_path, end):
    return python("-c", TRAIN.format(run=str(tmp_path / "run"), end=end))


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills")
def test_a_killed_process_leaves_its_histograms(tmp_path):
    done = end_in(tmp_path, "os.kill(os.getpid(), 9)")
    assert done.returncode == -signal.SIGKILL, done.stderr
    run = tmp_path / "run"
    assert list(run.glob("journal-*.bin"))
    check(gm.read_run(run), [0, 3, 6, 9, 12, 15, 18])
    # the next attempt moves them from the journal to a file
    model = small_model()
    with gm.Monitor(model, run_dir=run, rules=()) as monitor:
        monitor.step = 20
        train(monitor, model, 1)
    assert not list(run.glob("journal-*.bin"))
    assert (run / "exponents").is_dir()
    check(gm.read_run(run), [0, 3, 6, 9, 12, 15, 18])
    assert verify(run).whole


def test_an_exception_leaves_them_too(tmp_path):
    done = end_in(tmp_path, "raise OSError('bad batch')")
    assert done.returncode == 1
    assert "bad batch" in done.stderr
    check(gm.read_run(tmp_path / "run"), [0, 3, 6, 9, 12, 15, 18])


def test_watch_passes_it_on(tmp_path):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    with gm.watch(model, optimizer, run_dir=tmp_path, precision=2, rules=()) as monitor:
        for _ in range(5):
            model(torch.randn(3, 4)).square().sum().backward()
            expected.append(gm.collect_exponents({n: p.grad for n, p in model.named_parameters()}).columns)
            optimizer.step()
            optimizer.zero_grad()
    assert monitor.failures == {}
    run = gm.read_run(tmp_path)
    assert run.precision_steps == [0, 2, 4]
    for step in run.precision_steps:
        assert torch.equal(run.precision(step).stats.columns, expected[step])


def test_several_optimizers_each_record_their_own_parameters(tmp_path):
    model = small_model()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    with gm.watch(model, optimizers, run_dir=tmp_path, precision=1, rules=()) as monitor:
        model(torch.randn(3, 4)).square().sum().backward()
        expected = gm.collect_exponents({n: p.grad for n, p in model.named_parameters()}).columns
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert monitor.failures == {}
    assert torch.equal(gm.read_run(tmp_path).precision(0).stats.columns, expected)


def test_taps_and_updates_beside_it(tmp_path):
    model = small_model()
    taps = gm.Taps(model, {"all": nn.Linear})
    options = {"taps": taps, "updates": True, "weights": True, "fingerprint": True, "rules": ()}
    with gm.Monitor(model, run_dir=tmp_path, precision=2, **options) as monitor:
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(3, 4)).sum().backward()
            monitor.record()
            monitor.advance()
    taps.remove()
    assert monitor.failures == {}
    run = gm.read_run(tmp_path)
    assert run.precision_steps == [0, 2]
    assert run.precision(2, "weights").names == tuple(name for name, _ in model.named_parameters())
    assert run.record(2).measured("activations").sum() == 2
    assert run.record(2).report("grad_exponents").names == run.precision(2).names
    with pytest.raises(gm.RunError, match="no histograms of activations in step 2"):
        run.precision(kind="activations")
