"""check_gradients, end to end: planted faults are named, healthy steps agree, and nothing changes."""

import random
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradiometer as gm
from gradiometer.checks import random_replay, reference_runs
from support.compiling import needs_compiler


def wrong_square(x):
    """Return squares whose gradient is 1.5 times the right one."""
    square = x * x
    return square + 0.5 * (square - square.detach())


class Model(nn.Module):
    """A perceptron whose activation has a wrong backward if it is compiled."""

    def __init__(self, *, compiled_is_wrong=False):
        super().__init__()
        self.inner, self.outer, self.is_wrong = nn.Linear(8, 16), nn.Linear(16, 4), compiled_is_wrong

    def forward(self, x):
        x = self.inner(x)
        x = wrong_square(x) if self.is_wrong and torch.compiler.is_compiling() else x * x
        return self.outer(x)


def data(seed=0):
    torch.manual_seed(seed)
    return torch.randn(16, 8), torch.randn(16, 4)


def step_of(model, called=None, optimizer=None):
    called = model if called is None else called

    def step(x, y):
        loss = functional.mse_loss(called(x), y)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def whole(model):
    """Return a step with backward in one graph."""

    def step(x, y):
        for p in model.parameters():
            p.grad = None
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        return loss.detach()

    return step


@contextmanager
def traced_backward():
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield


@pytest.mark.usefixtures("_dynamo")
@pytest.mark.parametrize("how", ["function", "module", "in place", "whole"])
def test_a_fault_in_compiled_code_is_named(how):
    x, y = data()
    model = Model(compiled_is_wrong=True)
    if how == "whole":
        step = torch.compile(whole(model), fullgraph=True, backend="aot_eager")
    elif how == "function":
        step = torch.compile(step_of(model), backend="aot_eager")
    elif how == "module":
        step = step_of(model, torch.compile(model, backend="aot_eager"))
    else:
        model.compile(backend="aot_eager")
        step = step_of(model)
    with traced_backward():
        report = gm.check_gradients(step, x, y, model=model)
        again = gm.check_gradients(step, x, y, model=model)
    assert not report
    assert {row.name for row in report.failures} == {"inner.weight", "inner.bias"}
    assert report.first.module == "Linear"
    assert "1.5 times" in report.first.text
    assert [row.error for row in report] == [row.error for row in again]
    model.is_wrong = False
    with traced_backward():
        assert gm.check_gradients(step, x, y, model=model)


def test_a_fault_of_eager_mode_shows_against_float64():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x):
            return self.outer(wrong_square(self.inner(x)))

    model = Wrong()
    step = step_of(model)
    assert gm.check_gradients(step, *data(), model=model)
    # its formula is wrong in float64, too: only a function can tell
    assert gm.check_gradients(step, *data(), model=model, against="float64")

    def right(x, y):
        functional.mse_loss(model.outer(model.inner(x) ** 2), y).backward()

    report = gm.check_gradients(step, *data(), model=model, against=right)
    assert {row.name for row in report.failures} == {"inner.weight", "inner.bias"}
    assert report.against == "right"


class Coarse(torch.autograd.Function):
    """A backward that loses digits, if its input has few."""

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, grad):
        return grad.half().to(grad.dtype) * 1.5 if grad.dtype == torch.float32 else grad


def test_against_float64_says_that_eager_mode_is_wrong_too():
    model = Model()
    step = step_of(model, lambda x: model.outer(Coarse.apply(model.inner(x))))
    report = gm.check_gradients(step, *data(), model=model, against="float64")
    assert report.first.name in {"inner.weight", "inner.bias"}
    assert any("in eager mode, too" in note for note in report.notes)


def test_a_function_may_return_gradients():
    model, other = Model(), Model()
    other.load_state_dict(model.state_dict())

    def gradients(x, y, scale=1.0):
        loss = functional.mse_loss(other(x), y) * scale
        names, parameters = zip(*other.named_parameters(), strict=True)
        return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))

    step = step_of(model)
    assert gm.check_gradients(step, *data(), model=model, against=gradients)
    report = gm.check_gradients(step, *data(), model=model, against=lambda *x: gradients(*x, scale=0.5))
    assert len(report.failures) == 4
    assert "2 times" in report.kind


# random numbers


class Dropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.dropout = nn.Linear(8, 32), nn.Linear(32, 4), nn.Dropout(0.2)

    def forward(self, x):
        x = functional.gelu(self.dropout(self.inner(x)))
        return self.outer(functional.dropout(x, 0.1, self.training))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_block_recomputed_with_other_random_numbers_is_named(use_reentrant):
    model = Dropout()
    is_kept = True

    def forward(x):
        x = model.inner(x)
        options = {"preserve_rng_state": is_kept, "use_reentrant": use_reentrant}
        return model.outer(checkpoint(lambda x: functional.dropout(x, 0.5) ** 2, x, **options))

    step = step_of(model, forward)
    assert gm.check_gradients(step, *data(), model=model)
    is_kept = False
    report = gm.check_gradients(step, *data(), model=model)
    assert {row.name for row in report.failures} == {"inner.weight", "inner.bias"}


@needs_compiler
def test_compiled_dropout_is_compared_in_three_ways():
    model = Dropout()
    step = step_of(model, torch.compile(model), torch.optim.SGD(model.parameters()))
    report = gm.check_gradients(step, *data(), model=model)
    assert report
    told = "\n".join(report.notes)
    assert "draws other random numbers than eager mode" in told
    assert "fallback_random, which is another program, it agrees" in told
    assert "without dropout, which is another program, it agrees" in told
    assert "as it trains, its gradients are those of its loss" in told
    assert report["the loss"].what == "slope"
    # and once more with what is compiled by now
    with torch._dynamo.config.patch(error_on_recompile=True):
        again = gm.check_gradients(step, *data(), model=model)
    assert [(row.name, row.error) for row in report] == [(row.name, row.error) for row in again]


@pytest.mark.usefixtures("_dynamo")
@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_compiled_step_that_does_not_return_its_loss_may_draw_the_same_numbers(is_wrong):
    model = Model(compiled_is_wrong=is_wrong)

    def forward(x):
        return functional.dropout(model(x), 0.2)

    step = step_of(model, torch.compile(forward, backend="aot_eager"))

    def without_loss(x, y):
        step(x, y)

    report = gm.check_gradients(without_loss, *data(), model=model)
    assert bool(report) is not is_wrong
    told = [note for note in report.notes if "other random numbers" in note]
    assert len(told) == is_wrong
    assert all(note.startswith("cannot tell whether") and "return the loss" in note for note in told)


class Budget(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        hidden = functional.dropout(functional.gelu(self.up(self.norm(x))), 0.2, self.training)
        return x + functional.dropout(self.down(hidden), 0.2, self.training)


@needs_compiler
def test_a_memory_budget_that_recomputes_with_other_random_numbers_is_named():
    # pytorch#190758
    torch.manual_seed(0)
    model = nn.Sequential(Budget())
    x = torch.randn(32, 32)
    with torch._functorch.config.patch(activation_memory_budget=0.0):
        step = step_of(model, torch.compile(model))
        report = gm.check_gradients(step, x, torch.zeros(32, 32), model=model)
    # of torch 2.11 to 2.14
    assert {"0.down.weight", "0.up.weight"} <= {row.name for row in report.failures}
    assert report.first.what == "slope"
    assert "the backward pass may have used other random numbers" in report.first.text


@pytest.mark.parametrize("micro_batches", [2, 8])
def test_a_loss_that_is_not_divided_by_the_micro_batches_is_named(micro_batches):
    model = Model()
    x, y = data()

    def step(x, y):
        for part in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
            functional.mse_loss(model(part[0]), part[1]).backward()

    report = gm.check_gradients(step, x, y, model=model, against=step_of(model))
    assert len(report.failures) == 4
    assert f"{micro_batches} times" in report.kind


# what the check leaves behind


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.calls, self.seen = nn.BatchNorm1d(8), nn.Linear(8, 4), 0, []

    def forward(self, x):
        self.calls += 1
        self.seen.append(x)
        return functional.dropout(self.linear(self.norm(x)), 0.1)


_TOTAL = 0


class Trainer:
    def __init__(self):
        torch.manual_seed(0)
        self.model = Stateful()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=1)
        self.losses, self.number, self.scratch = [], 0, torch.zeros(4)
        self.fails = False

    def train(self, x, y):
        global _TOTAL  # noqa: PLW0603
        count = 0

        def closure():
            nonlocal count
            count += 1

        closure()
        x.mul_(1.5)
        random.random(), np.random.rand()  # noqa: NPY002, S311
        loss = functional.mse_loss(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.losses.append(loss.item())
        self.number += 1
        self.scratch += 1
        _TOTAL += 1
        if self.fails:
            message = "out of data"
            raise KeyError(message)
        return loss


def everything(trainer, x):
    parameters = list(trainer.model.parameters())
    return [
        [p.detach().clone() for p in parameters],
        [id(p) for p in parameters],
        [id(p.grad) for p in parameters],
        [None if p.grad is None else p.grad.clone() for p in parameters],
        [b.clone() for b in trainer.model.buffers()],
        trainer.optimizer.state_dict(),
        trainer.schedule.state_dict(),
        trainer.scaler.state_dict(),
        (trainer.losses[:], trainer.number, trainer.scratch.clone(), trainer.model.calls, _TOTAL),
        len(trainer.model.seen),
        (random.getstate(), np.random.get_state(), torch.get_rng_state()),  # noqa: NPY002
        x.clone(),
        [len(p._post_accumulate_grad_hooks or ()) for p in parameters],
        len(trainer.optimizer._optimizer_step_pre_hooks),
        trainer.model.training,
    ]


def assert_same(a, b):
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, np.ndarray):
        assert (a == b).all()
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("has_trained", [False, True])
def test_nothing_is_changed(has_trained):
    trainer = Trainer()
    x, y = data()
    if has_trained:
        trainer.train(x, y)
    before = everything(trainer, x)
    report = gm.check_gradients(trainer.train, x, y, model=trainer.model)
    assert report, report
    assert_same(before, everything(trainer, x))


def test_nothing_is_changed_by_a_step_that_raises():
    trainer = Trainer()
    x, y = data()

    trainer.fails = True
    before = everything(trainer, x)
    with pytest.raises(KeyError, match="out of data"):
        gm.check_gradients(trainer.train, x, y, model=trainer.model)
    assert_same(before, everything(trainer, x))


@needs_compiler
def test_training_goes_on_as_without_the_check():
    def train(*, checked):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Dropout()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step = step_of(model, torch.compile(model), optimizer)
        x, y = data()
        for number in range(4):
            step(x, y)
            if number == 1 and checked:
                assert gm.check_gradients(step, x, y, model=model)
        return [p.detach() for p in model.parameters()], torch.get_rng_state()

    assert_same(train(checked=False), train(checked=True))


def test_gradients_from_before_take_part():
    model = Model()
    x, y = data()
    step = step_of(model)
    step(x, y)
    grads = [p.grad for p in model.parameters()]
    values = [g.clone() for g in grads]
    assert gm.check_gradients(step, x, y, model=model)
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert_same(values, grads)

    def twice(x, y):
        for p in model.parameters():
            p.grad *= 2.0
        step_of(model)(x, y)

    report = gm.check_gradients(twice, x, y, model=model, against=step)
    assert len(report.failures) == 4


def test_a_monitor_does_not_record_these_runs(tmp_path):
    pytest.importorskip("pyarrow")
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = step_of(model, optimizer=optimizer)
    x, y = data()
    with gm.watch(model, optimizer, run_dir=tmp_path):
        step(x, y)
        assert gm.check_gradients(step, x, y, model=model)
        step(x, y)
    assert len(gm.read_run(tmp_path).steps) == 2


# a saved reference


def test_a_saved_reference_names_a_fault(tmp_path):
    torch.manual_seed(0)
    model = Model(compiled_is_wrong=True)
    x, y = data()
    step = step_of(model)
    path = tmp_path / "reference.json"
    step(x, y)
    gm.save_reference(path, step, x, y, model=model)
    report = gm.check_gradients(step, x, y, model=model, against=path)
    assert report, report
    assert report.precision == "float64"
    compiled = step_of(model, torch.compile(model, backend="aot_eager"))
    report = gm.check_gradients(compiled, x, y, model=model, against=str(path))
    assert {row.name for row in report.failures} == {"inner.weight", "inner.bias"}
    assert "1.5 times" in report.first.text
    with torch.no_grad():
        model.outer.bias += 1.0
    report = gm.check_gradients(step, x, y, model=model, against=path)
    assert not report
    assert not report.failures
    assert "load the same" in report["inner.weight"].text


# errors


def test_what_cannot_be_checked_is_an_error():
    model = Model()
    x, y = data()
    step = step_of(model)
    with pytest.raises(TypeError, match="must be a function, got Tensor"):
        gm.check_gradients(step(x, y), model=model)
    with pytest.raises(TypeError, match="model must be a module, got list"):
        gm.check_gradients(step, x, y, model=[model])
    with pytest.raises(ValueError, match="Identity has no parameters"):
        gm.check_gradients(step, x, y, model=nn.Identity())
    with pytest.raises(ValueError, match="against='float32'"):
        gm.check_gradients(step, x, y, model=model, against="float32")

    def cleared(x, y):
        step(x, y)
        model.zero_grad()

    with pytest.raises(ValueError, match=r"no gradient.* clear gradients at its start"):
        gm.check_gradients(cleared, x, y, model=model)
    step(x, y)
    with pytest.raises(ValueError, match="no gradient"):
        gm.check_gradients(model, x, model=model)
    model.zero_grad()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="requires a gradient"):
        gm.check_gradients(model, x, model=model)


def test_numbers_that_a_kernel_keeps_to_itself(monkeypatch):
    """As with attention on a GPU: while random numbers are recorded, others are drawn."""
    model = Dropout()
    is_recording = False

    @contextmanager
    def recording():
        nonlocal is_recording
        is_recording = True
        with random_replay.recording() as draws:
            yield draws
        is_recording = False

    def forward(x):
        if is_recording:
            functional.dropout(torch.ones(3))
        return model(x)

    monkeypatch.setattr(reference_runs, "recording", recording)
    report = gm.check_gradients(step_of(model, forward), *data(), model=model)
    assert report, report
    told = "\n".join(report.notes)
    assert "inside of a kernel" in told
    assert "without dropout it agrees" in told
    assert "as it trains, its gradients are those of its loss" in told

    def without_loss(x, y):
        step_of(model, forward)(x, y)

    report = gm.check_gradients(without_loss, *data(), model=model)
    assert not report
    assert not report.failures
    assert "as it trains: its random numbers could not be compared in any way" in report.summary
    assert any("the step does not return its loss" in note for note in report.notes)


def test_a_fault_of_1e_4_in_a_float32_step_is_named():
    model = Model()

    def scaled(factor):
        def step(x, y):
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            model.inner.weight.grad *= factor
            return loss

        return step

    report = gm.check_gradients(scaled(1.0001), *data(), model=model, against=scaled(1.0))
    assert [row.name for row in report.failures] == ["inner.weight"]
    assert report.first.text == "all elements are 1.0001 times the reference"
    text = str(report).splitlines()
    assert text[0] == "differs from step: 1 of 5 tensors is wrong, judged by float64"
    assert text[1].startswith("first: gradient inner.weight (Linear): error 1e-4 of its norm, allowed ")
    assert max(map(len, text)) <= 110
