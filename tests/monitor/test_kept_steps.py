"""What a monitor keeps of a step repeats it: the random numbers, the batch, the weights."""

from __future__ import annotations

import math
import os
import random
import re
import stat
import struct
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.control import random_state
from gradiometer.monitor import kept_steps
from gradiometer.rules import Fault
from gradiometer.runs import RankBlackbox, plain_batch, write_kept_steps
from gradiometer.runs.directory import remove_leftovers

STEP = {"step": 3, "random": {}}
BATCHES = torch.randn(40, 8, 4, generator=torch.Generator().manual_seed(3))


class Loop:
    """A model whose layer ``1`` divides by a random number that is 0 in the step whose number is ``bad``.

    The number depends on the batch, the weights and all three generators, so only an exact repetition has it.
    """

    def __init__(self, bad=-1, loss=lambda y: y.square().mean()):
        torch.manual_seed(0)
        self.model = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1)])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.loss, self.bad = loss, bad
        self.numbers = []
        self.zero = math.nan

    def forward(self, x):
        for layer in self.model:
            x = layer(x)
        return x

    def step(self, x, scale=1.0):
        y = self.forward(x) * scale
        noise = random.random() + np.random.rand()  # noqa: NPY002, S311 the global ones
        number = float(y.sum().detach()) + noise
        self.numbers.append(number)
        if len(self.numbers) - 1 == self.bad:
            self.zero = number
        y = y / (number - self.zero) if self.numbers[-1] == self.zero else y  # here
        loss = self.loss(y)
        loss.backward()
        return loss

    def train(self, monitor, steps, keep=True, skip=False):
        for i in range(steps):
            x = BATCHES[i].clone()
            if keep:
                monitor.keep(x, scale=1.0)
            loss = self.step(x)
            monitor.record()
            if not skip or not monitor.skip_step:
                self.optimizer.step()
            self.optimizer.zero_grad()
            monitor.advance(loss=loss)


def test_a_step_is_repeated_after_a_crash(tmp_path):
    loop = Loop(bad=7)
    options = {"run_dir": tmp_path, "rules": (), "keep_weights": True}
    with suppress(FloatingPointError), gm.Monitor(loop.model, **options) as monitor:
        loop.train(monitor, 12)
        raise FloatingPointError
    assert not monitor.failures
    assert gm.load_kept_step(tmp_path, current=True).step == 12

    # another process, with another state
    kept = gm.load_kept_step(tmp_path)
    assert (kept.step, kept.weights_step, kept.note) == (7, 7, "")
    again = Loop()
    again.zero = loop.zero
    kept.restore(again.model)
    assert torch.equal(kept.args[0], BATCHES[7])
    found = gm.locate_nonfinite(again.step, *kept.args, **kept.kwargs)
    # equal to the bit, or there would be no division by 0
    assert again.numbers == [loop.zero]
    assert (found.operation, found.direction) == ("aten.div", "forward")
    assert found.code.endswith("# here")


def test_weights_are_those_before_the_bad_step_though_training_goes_on(tmp_path):
    loop, before = Loop(bad=3), []
    hook = loop.model[0].register_forward_pre_hook(lambda m, _: before.append(m.weight.detach().clone()))
    with gm.Monitor(loop.model, run_dir=tmp_path, rules=(), keep_weights=True) as monitor:
        loop.train(monitor, 10)
        monitor.flush()
    hook.remove()
    kept = gm.load_kept_step(tmp_path)
    assert (kept.step, kept.weights_step) == (3, 3)
    assert torch.equal(kept.weights["0.weight"], before[3])
    assert "1.running_mean" in kept.weights


def test_without_keep_the_random_numbers_repeat_the_step(tmp_path):
    loop = Loop(bad=5)
    with gm.Monitor(loop.model, run_dir=tmp_path, rules=()) as monitor:
        loop.train(monitor, 8, keep=False)
    kept = gm.load_kept_step(tmp_path)
    assert (kept.step, kept.args, kept.weights, kept.weights_step) == (5, (), {}, None)
    drawn = []
    for _ in range(2):
        kept.restore()
        drawn.append((torch.rand(3).tolist(), random.random(), np.random.rand()))  # noqa: NPY002, S311
    assert drawn[0] == drawn[1]
    # the very numbers of that step
    again = Loop()
    for i in range(5):
        again.step(BATCHES[i])
        again.optimizer.step()
        again.optimizer.zero_grad()
    kept.restore()
    again.step(BATCHES[5])
    assert again.numbers[-1] == loop.numbers[5]


def test_a_run_that_recovers_is_no_fault_and_writes_nothing(tmp_path):
    loop = Loop(bad=3)
    with gm.Monitor(loop.model, run_dir=tmp_path, rules=(), keep_weights=True) as monitor:
        # without the loss: a non-finite loss is a fault
        for i in range(8):
            monitor.keep(BATCHES[i])
            loop.step(BATCHES[i])
            monitor.record()
            if not monitor.skip_step:
                loop.optimizer.step()
            loop.optimizer.zero_grad()
            monitor.advance()
    assert not list(tmp_path.glob("*.pt"))
    with pytest.raises(gm.RunError, match="does not exist: it is written by a Monitor with a run_dir"):
        gm.load_kept_step(tmp_path)


@pytest.mark.parametrize("reason", ["SIGTERM", "interrupt", "exit"])
def test_an_end_without_a_fault_writes_nothing(tmp_path, reason):
    loop = Loop()
    monitor = gm.Monitor(loop.model, run_dir=tmp_path, rules=())
    loop.train(monitor, 2)
    monitor._pipeline.end((reason, ""))
    assert (tmp_path / "blackbox.json").exists()
    assert not list(tmp_path.glob("*.pt"))


def test_an_exception_in_a_step_keeps_that_step(tmp_path):
    loop = Loop()
    with suppress(IndexError), gm.Monitor(loop.model, run_dir=tmp_path, rules=()) as monitor:
        loop.train(monitor, 4)
        monitor.keep(torch.tensor([-1]), {"mask": [None, True]}, name="x")
        nn.functional.embedding(torch.tensor([-1]), torch.ones(2, 2))
    kept = gm.load_kept_step(tmp_path)
    assert (kept.step, kept.kwargs, kept.args[1]) == (4, {"name": "x"}, {"mask": [None, True]})
    assert kept.args[0].tolist() == [-1]


STATES = {
    "short": {"torch": torch.zeros(3, dtype=torch.uint8)},
    "garbage": {"torch": torch.full((5056,), 255, dtype=torch.uint8)},
    "meta": {"meta": torch.zeros(16, dtype=torch.uint8)},
    "cpu": {"cpu": torch.get_rng_state()},
    "unknown": {"x": torch.zeros(16, dtype=torch.uint8)},
    "python": {"python": (3, (1, 2), None)},
    "large": {"python": (3, (2**70,) * 625, None)},
    "numpy": {"numpy": ("x", b"0" * 2496, 0, 0, 0.0)},
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES.keys())
def test_a_random_state_that_no_generator_takes_changes_nothing(tmp_path, state):
    model = nn.Linear(2, 1)
    random_states = random_state() | state
    weights = {name: torch.full_like(x, 9.0) for name, x in model.state_dict().items()}
    write_kept_steps(tmp_path / "blackbox.pt", None, {"step": 3, "random": random_states}, weights, 3)
    kept = gm.load_kept_step(tmp_path)
    torch.rand(1)
    random.seed(5)
    before = repr((model.state_dict(), torch.get_rng_state().tolist(), random.getstate()))
    said = rf"restore: the state of the random numbers of '{next(iter(state))}'"
    with pytest.raises(ValueError, match=said):
        kept.restore(model)
    assert repr((model.state_dict(), torch.get_rng_state().tolist(), random.getstate())) == before


def test_a_weight_of_another_kind_of_number_changes_nothing(tmp_path):
    model = nn.Linear(2, 1)
    weights = {"weight": torch.full((1, 2), 9.0), "bias": torch.ones(1, dtype=torch.complex64)}
    write_kept_steps(tmp_path / "blackbox.pt", None, STEP, weights, 3)
    before = model.weight.tolist()
    with pytest.raises(ValueError, match=r"'bias', kept as torch.complex64, is torch.float32 in the model"):
        gm.load_kept_step(tmp_path).restore(model)
    assert model.weight.tolist() == before


def test_weights_restore_a_model_of_another_precision(tmp_path):
    weights = {"weight": torch.full((1, 2), 9.0), "bias": torch.ones(1)}
    write_kept_steps(tmp_path / "blackbox.pt", None, STEP, weights, 3)
    model = nn.Linear(2, 1, dtype=torch.float64)
    gm.load_kept_step(tmp_path).restore(model)
    assert model.weight.tolist() == [[9.0, 9.0]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA")
def test_random_numbers_of_a_device_that_is_not_here_are_left_out(tmp_path):
    states = random_state() | {"cuda:7": torch.zeros(16, dtype=torch.uint8)}
    write_kept_steps(tmp_path / "blackbox.pt", None, {"step": 3, "random": states}, None, None)
    expected = torch.rand(3)
    gm.load_kept_step(tmp_path).restore()
    assert torch.equal(torch.rand(3), expected)


def fail_after(steps, path, error=RuntimeError, **options):
    """Train a few steps with a monitor, which ends with an exception."""
    loop = Loop()
    with suppress(error), gm.Monitor(loop.model, run_dir=path, rules=(), ranks=False, **options) as monitor:
        loop.train(monitor, steps, keep=not options)
        raise error


@pytest.mark.parametrize("is_ended_by_a_signal", [False, True])
def test_a_later_attempt_that_writes_none_leaves_no_earlier_one_beside_its_report(
    tmp_path, is_ended_by_a_signal
):
    fail_after(4, tmp_path)
    earlier = (tmp_path / "blackbox.pt").read_bytes()
    (tmp_path / "blackbox.pt").chmod(0o644)
    # without a fault, it stays beside the report that it belongs to
    loop = Loop()
    with gm.Monitor(loop.model, run_dir=tmp_path, rules=(), redact=True) as monitor:
        loop.train(monitor, 2, keep=False)
    assert gm.load_kept_step(tmp_path).step == 4
    if is_ended_by_a_signal:
        loop = Loop()
        monitor = gm.Monitor(loop.model, run_dir=tmp_path, rules=())
        loop.train(monitor, 2)
        monitor._pipeline.end(("SIGTERM", ""))
    else:
        fail_after(2, tmp_path, redact=True)
    assert gm.read_run(tmp_path).blackbox["attempt"] == 3
    with pytest.raises(gm.RunError, match="does not exist"):
        gm.load_kept_step(tmp_path)
    moved = tmp_path / "blackbox-0001.pt"
    assert (tmp_path / "blackbox-0001.json").exists()
    assert moved.read_bytes() == earlier
    assert gm.load_kept_step(moved).step == 4
    if os.name == "posix":
        assert stat.S_IMODE(moved.stat().st_mode) == 0o600
    # the next one writes its own again
    fail_after(3, tmp_path)
    assert gm.load_kept_step(tmp_path).step == 3
    assert moved.read_bytes() == earlier


def test_a_rank_that_writes_none_removes_the_earlier_one(tmp_path):
    path = tmp_path / "blackbox.rank-00005.pt"
    for writes in (True, False):
        sink = RankBlackbox(tmp_path, 5)
        if writes:
            write_kept_steps(path, None, STEP, None, None)
        sink.fault(Fault("exception", "boom", 3, None, (), ()))
        assert path.exists() is writes


def test_a_batch_that_is_overwritten_is_not_written(tmp_path):
    loop = Loop()
    x = BATCHES[0].clone()
    with suppress(RuntimeError), gm.Monitor(loop.model, run_dir=tmp_path, rules=()) as monitor:
        for i in range(3):
            x.copy_(BATCHES[i])
            monitor.keep(x)
            if i == 2:
                x.zero_()
                raise RuntimeError
            loss = loop.step(x)
            monitor.record()
            loop.optimizer.zero_grad()
            monitor.advance(loss=loss)
    kept = gm.load_kept_step(tmp_path)
    assert (kept.step, kept.args) == (2, ())
    assert "was overwritten after Monitor.keep" in kept.note


def test_memory_is_bounded_while_the_rules_are_behind(tmp_path):
    loop = Loop()
    monitor = gm.Monitor(loop.model, run_dir=tmp_path, rules=())
    kept = monitor._pipeline.box.kept
    for step in range(300):
        kept.keep(step, (torch.zeros(1),), {})
    assert len(kept._waiting) == kept_steps._STEPS
    assert sum(one.batch is not None for one in kept._waiting) == kept_steps._BATCHES
    # Python's state has 625 objects: one for all steps
    assert len({id(one.random["python"]) for one in kept._waiting}) == 1
    kept.see(299, is_bad=False)
    assert not kept._waiting
    monitor.close()


def test_a_disk_that_fails_leaves_no_file_and_no_error(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    loop = Loop(bad=1)
    with gm.Monitor(loop.model, run_dir=tmp_path, rules=()) as monitor, monkeypatch.context() as patch:
        patch.setattr(kept_steps, "write_kept_steps", full)
        loop.train(monitor, 4)
        monitor.flush()
    assert monitor.failures == {"keep": 1}
    # the fault itself is written
    assert (tmp_path / "blackbox.json").exists()
    assert not [p for p in tmp_path.iterdir() if ".pt" in p.name]


def test_a_run_record_that_starts_in_the_meantime_removes_no_file(tmp_path, monkeypatch):
    path = tmp_path / "blackbox.pt"
    replace, calls = Path.replace, []

    def remove_first(self, target):
        if not calls:
            remove_leftovers(tmp_path)
        calls.append(target)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", remove_first)
    write_kept_steps(path, None, {"step": 3, "random": {}}, None, None)
    assert calls == [path, path]
    assert gm.load_kept_step(tmp_path).step == 3


def test_a_file_that_is_cut_off_is_refused(tmp_path):
    loop = Loop(bad=1)
    with gm.Monitor(loop.model, run_dir=tmp_path, rules=()) as monitor:
        loop.train(monitor, 4)
    path = tmp_path / "blackbox.pt"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(gm.RunError, match="cannot be read"):
        gm.load_kept_step(tmp_path)


def test_weights_of_another_model_are_refused(tmp_path):
    loop = Loop(bad=1)
    with gm.Monitor(loop.model, run_dir=tmp_path, rules=(), keep_weights=True) as monitor:
        loop.train(monitor, 4)
    kept = gm.load_kept_step(tmp_path)
    other = nn.ModuleList([nn.Linear(4, 5)])
    before = other[0].weight.clone()
    with pytest.raises(ValueError, match=r"'0.weight', kept with the shape \[4, 4\], has the shape \[5, 4\]"):
        kept.restore(other)
    assert torch.equal(other[0].weight, before)


def test_a_batch_of_other_objects_is_refused_and_training_goes_on(tmp_path):
    loop = Loop()
    with gm.Monitor(loop.model, run_dir=tmp_path, rules=()) as monitor:
        monitor.keep({"x": [object()]})
        loop.train(monitor, 1, keep=False)
    assert monitor.failures == {"keep": 1}
    with pytest.raises(TypeError, match=r"keep: the batch\['x'\]\[0\] has the type object; pass tensors"):
        plain_batch({"x": [object()]})


def test_keep_needs_a_folder(caplog):
    loop = Loop()
    with gm.Monitor(loop.model, rules=()) as monitor:
        monitor.keep(1)
    assert monitor.failures == {"keep": 1}
    assert "nothing is kept without a run_dir" in caplog.text
    with pytest.raises(ValueError, match="keep_weights=True\\) needs run_dir"):
        gm.Monitor(loop.model, keep_weights=True)


def test_keep_weights_needs_a_flag_on_the_device(tmp_path):
    with pytest.raises(ValueError, match="needs skip_nonfinite=True"):
        gm.Monitor(Loop().model, run_dir=tmp_path, keep_weights=True, skip_nonfinite=False)


def test_the_finding_says_how_to_go_on(tmp_path):
    loop = Loop(bad=2)
    with gm.Monitor(loop.model, run_dir=tmp_path) as monitor:
        loop.train(monitor, 4)
        monitor.flush()
        (finding,) = [f for f in monitor.findings if f.rule == "nonfinite"]
    assert "gm.locate_nonfinite(step, batch) names the operation" in finding.advice


# privacy


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777], ids=oct)
@pytest.mark.skipif(os.name != "posix", reason="modes of files")
def test_only_the_owner_may_read_the_file_from_its_first_byte_on(tmp_path, umask, monkeypatch):
    before, modes = os.umask(umask), []
    path = tmp_path / "run" / "blackbox.pt"
    path.parent.mkdir(mode=0o700)
    path.parent.chmod(0o755)
    monkeypatch.setattr(os, "fsync", lambda file: modes.append(os.fstat(file).st_mode))
    opened = os.open

    def opens(name, flags, mode=0o777, **options):
        if str(name).endswith(".tmp"):
            modes.append(stat.S_IFREG | mode)
        return opened(name, flags, mode, **options)

    monkeypatch.setattr(os, "open", opens)
    try:
        path.write_bytes(b"")
        path.chmod(0o644)
        write_kept_steps(path, None, {"step": 3, "random": {}}, {"w": torch.ones(2)}, 3)
    finally:
        os.umask(before)
    of_files = [mode for mode in modes if stat.S_ISREG(mode)]
    assert of_files == [stat.S_IFREG | 0o600] * 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert gm.load_kept_step(path.parent).weights["w"].tolist() == [1.0, 1.0]


def test_with_redact_no_file_has_batches_weights_or_random_numbers(tmp_path, caplog):
    secret = 0.123456789
    loop = Loop(bad=1)
    with torch.no_grad():
        loop.model[0].weight[0, 0] = secret
    options = {"run_dir": tmp_path, "rules": (), "redact": True, "ranks": False}
    with suppress(RuntimeError), gm.Monitor(loop.model, **options) as monitor:
        for i in range(3):
            monitor.keep(torch.full((8, 4), secret))
            loop.step(BATCHES[i])
            monitor.record()
            monitor.advance(loss=math.nan if i else 1.0)
        raise RuntimeError
    assert monitor.failures == {"keep": 3}
    assert "nothing is kept without a run_dir or with redact=True" in caplog.text
    needle = struct.pack("<f", secret)
    for file in tmp_path.rglob("*"):
        if file.is_file():
            assert needle not in file.read_bytes(), file
            assert file.suffix != ".pt"
    assert (tmp_path / "blackbox.json").exists()
    with pytest.raises(gm.RunError, match=r"does not exist: it is written .* unless redact=True"):
        gm.load_kept_step(tmp_path)


def test_with_redact_a_copy_of_the_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"redact=True, keep_weights=True\): a copy .* is not redacted"):
        gm.Monitor(nn.Linear(2, 1), run_dir=tmp_path / "run", redact=True, keep_weights=True)
    assert not list(tmp_path.iterdir())


# files from others

HOSTILE = {
    "step": STEP | {"step": "3"},
    "large step": STEP | {"step": 2**63},
    "negative step": STEP | {"step": -1},
    "args": STEP | {"args": [torch.ones(1)]},
    "kwargs": STEP | {"kwargs": {3: 1}},
    "note": STEP | {"note": None},
    "random": STEP | {"random": []},
    "python": STEP | {"random": {"python": (3, 4)}},
    "numpy": STEP | {"random": {"numpy": ("MT19937", b"0" * 2496, 10**6, 0, 0.0)}},
    "device": STEP | {"random": {"cuda:0": "x"}},
    "unknown": STEP | {"other": 1},
    "nothing": {},
    "none": None,
    "list": [1],
}


@pytest.mark.parametrize("entry", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_step_is_refused_in_one_line(tmp_path, entry):
    path = tmp_path / "blackbox.pt"
    write_kept_steps(path, None, entry, None, None)
    said = rf"^{re.escape(str(path))} cannot be read \(.*\): it was not "
    with pytest.raises(gm.RunError, match=said) as caught:
        gm.load_kept_step(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("weights", "step"), [({"w": 1}, 3), ({3: torch.ones(1)}, 3), ([torch.ones(1)], 3), (None, "3")], ids=str
)
def test_hostile_weights_are_refused(tmp_path, weights, step):
    write_kept_steps(tmp_path / "blackbox.pt", None, STEP, weights, step)
    with pytest.raises(gm.RunError, match=r"blackbox.pt cannot be read \(it has no valid (weights|step)\)"):
        gm.load_kept_step(tmp_path)


def test_a_file_that_takes_more_memory_than_its_bytes_is_refused(tmp_path):
    path = tmp_path / "blackbox.pt"
    write_kept_steps(path, None, STEP, {"w": torch.zeros(2**20)}, 3)
    with zipfile.ZipFile(path) as archive:
        parts = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for part in parts:
            archive.writestr(*part)
    assert path.stat().st_size < 2**16
    with pytest.raises(gm.RunError, match="its parts are larger than the file"):
        gm.load_kept_step(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_a_pipe_a_device_a_folder_or_another_file_is_refused(tmp_path):
    path = tmp_path / "blackbox.pt"
    makers = [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.write_bytes(b"x" * 99)]
    for make in makers:
        make(path)
        with pytest.raises(gm.RunError, match=r"blackbox.pt cannot be read"):
            gm.load_kept_step(tmp_path)
        path.unlink()
    path.mkdir()
    with pytest.raises(gm.RunError, match=r"blackbox.pt cannot be read"):
        gm.load_kept_step(tmp_path)
