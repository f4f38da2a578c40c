"""check_deterministic: a step is run twice from one state, and what differs is named."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import gradiometer as gm

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout()
        self.head = nn.Linear(6, 1)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x):
        # replaced, not written
        self.seen = self.seen + len(x)
        return self.head(self.drop(self.norm(self.emb(x))))


class Loop:
    """A model, its optimizer and a step; ``fault`` is called with the loop before the optimizer's step."""

    def __init__(self, fault=None, model=None, optimizer=torch.optim.AdamW, **options):
        self.model = Model() if model is None else model
        self.optimizer = optimizer(self.model.parameters(), lr=0.1, **options)
        self.fault = fault or (lambda _: None)
        self.runs = 0

    @property
    def state(self):
        return [self.model, self.optimizer]

    def step(self, x=X):
        self.runs += 1
        loss = self.model(x).square().mean()
        loss.backward()
        self.fault(self)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def check(self):
        return gm.check_deterministic(self.step, self.state, X)


def everything(loop):
    return gm.fingerprint({"model": loop.model.state_dict(), "optimizer": loop.optimizer.state_dict()})


# deterministic steps


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"amsgrad": True, "foreach": False}),
        (torch.optim.Adagrad, {}),
    ],
)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_step_with_dropout_and_batch_norm_passes(optimizer, options, steps_before):
    loop = Loop(optimizer=optimizer, **options)
    for _ in range(steps_before):
        loop.step()
    result = loop.check()

    assert result.differing == ()
    assert (result.deterministic, bool(result), result.first) == (True, True, None)
    assert str(result) == f"2 runs of the step are equal in all of {result.compared} tensors and values"
    # the output, 6 parameters with gradients, 4 buffers; and settings
    assert result.compared > 17


def test_afterwards_everything_is_as_after_one_step():
    torch.manual_seed(5)
    one, two = (Loop(model=model) for model in [Model()] for model in (model, copy.deepcopy(model)))
    torch.manual_seed(6)
    one.step()
    after = torch.rand(1)
    torch.manual_seed(6)
    assert two.check()
    assert torch.equal(torch.rand(1), after)
    assert everything(one) == everything(two)
    assert two.runs == 2
    assert two.model.seen == 8


def test_random_numbers_of_python_and_numpy_are_restored():
    def fault(loop):
        with torch.no_grad():
            loop.model.head.bias += random.random() + np.random.rand()  # noqa: NPY002, S311 the state is global

    assert Loop(fault).check()


def test_a_schedule_a_generator_and_tensors_are_restored():
    loop = Loop()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(loop.optimizer, 100)
    generator, counter = torch.Generator().manual_seed(3), torch.zeros(2)

    def step():
        loss = loop.step(X + torch.rand(8, 4, generator=generator))
        schedule.step()
        counter.add_(1)
        return {"loss": loss, "lr": schedule.get_last_lr()}

    state = {"model": loop.model, "optimizer": loop.optimizer, "schedule": schedule}
    state |= {"batches": generator, "counter": counter}
    assert str(gm.check_deterministic(step, state)).startswith("2 runs of the step are equal")
    assert counter.tolist() == [1, 1]
    assert schedule.last_epoch == 1
    # without the generator, and without the counter
    missing = gm.check_deterministic(step, {name: x for name, x in state.items() if name != "batches"})
    assert missing.first == "output.loss"
    assert not {name for name in missing.differing if name.startswith(("schedule", "counter"))}
    assert gm.check_deterministic(step, [loop.model, loop.optimizer, generator]).first == "output.lr"


def test_accumulated_gradients_are_restored():
    model = nn.Linear(4, 1)
    model(X).sum().backward()
    before = model.weight.grad.clone()
    kept = model.weight.grad

    def step():
        model(X).sum().backward()

    assert gm.check_deterministic(step, model)
    assert model.weight.grad is kept
    torch.testing.assert_close(kept, 2 * before)


def test_an_optimizer_alone_restores_its_parameters():
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.SGD(weights, lr=0.5)

    def step():
        sum(w.square().sum() for w in weights).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert gm.check_deterministic(step, optimizer)
    assert weights[0].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.usefixtures("_dynamo")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_model_and_a_compiled_step():
    loop = Loop(model=torch.compile(Model(), backend="aot_eager"))
    assert loop.check()

    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))

    # torch breaks the graph in the optimizer
    @torch.compile(backend="aot_eager")
    def inside(x, factor):
        loss = (model(x) * factor).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    factor = torch.ones(())
    assert gm.check_deterministic(inside, [model, optimizer], X, factor)

    def step():
        return inside(X, factor.add_(1))

    found = gm.check_deterministic(step, [model, optimizer])
    assert found.first == "output"
    # its gradients are gone when it ends
    assert found.differing[1] in {"0.weight", "2.bias.grad"}


def test_a_recorder_in_the_step():
    loop = Loop()
    recorder = gm.Recorder(loop.model, capacity=4)
    loop.fault = lambda _: recorder.record()

    def step():
        loop.step()
        recorder.advance()

    assert gm.check_deterministic(step, {"model": loop.model, "optimizer": loop.optimizer, "steps": recorder})


# planted faults


def test_a_gradient_is_named_before_what_follows_from_it():
    def fault(loop):
        loop.model.emb.bias.grad[2] += loop.runs

    result = Loop(fault, optimizer=torch.optim.SGD, momentum=0.9).check()

    assert result.differing == ("emb.bias.grad", "emb.bias", "emb.bias.momentum_buffer")
    assert (bool(result), result.first) == (False, "emb.bias.grad")
    said = f"2 runs of the step differ in 3 of {result.compared} tensors and values, first in the gradient of"
    assert str(result) == f"{said} 'emb.bias'"


def test_one_bit_of_one_weight_is_found():
    def fault(loop):
        if loop.runs == 2:
            loop.model.norm.weight.data.view(torch.int32)[3] ^= 1

    result = Loop(fault, optimizer=torch.optim.SGD).check()
    # 0.1 times the gradient is subtracted from both
    assert result.differing == ("norm.weight",)
    assert str(result).endswith(", first in 'norm.weight'")


def test_outputs_are_first_and_gradients_in_the_order_of_the_backward_pass():
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def step():
        loss = model(X + torch.rand(4, generator=generator)).square().sum()
        loss.backward()
        return {"loss": loss, "step": 3}

    result = gm.check_deterministic(step, model)
    assert result.differing == ("output.loss", "1.bias.grad", "1.weight.grad", "0.bias.grad", "0.weight.grad")
    assert result.compared == 10


def test_the_order_of_a_set():
    layers = [nn.Linear(4, 4) for _ in range(4)]
    model = nn.ModuleList(layers)
    orders = iter([(0, 1, 2, 3), (3, 1, 2, 0)])

    def step():
        x = X
        # as a set whose order depends on the hashes of its items
        for i in next(orders):
            x = layers[i](x)
        x.sum().backward()

    assert gm.check_deterministic(step, model).first == "3.bias.grad"


def test_a_buffer_and_a_gradient_that_is_sometimes_missing():
    def fault(loop):
        loop.model.norm.running_mean += loop.runs
        if loop.runs == 2:
            loop.model.head.bias.grad = None

    result = Loop(fault, optimizer=torch.optim.SGD).check()
    assert result.differing == ("head.bias.grad", "head.bias", "norm.running_mean")


def test_each_step_of_an_optimizer_is_compared():
    model = nn.Linear(4, 1)
    optimizer, runs = torch.optim.SGD(model.parameters(), lr=0.0), []

    def step():
        runs.append(0)
        # only the gradient of the first step differs
        for factor in (len(runs), 1):
            (model(X).sum() * factor).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert gm.check_deterministic(step, [model, optimizer]).differing == ("bias.grad", "weight.grad")


def test_the_extra_state_of_a_module_is_compared():
    class Counter(nn.Linear):
        runs = 0

        def get_extra_state(self):
            return {"runs": self.runs}

        def set_extra_state(self, state):
            self.runs = state["runs"]

    model, runs = Counter(4, 1), iter(range(10))

    def step():
        model.runs = next(runs)

    assert gm.check_deterministic(step, model).differing == ("_extra_state.runs",)


def test_equal_names_in_a_list_get_its_positions():
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    runs = []

    def step():
        runs.append(0)
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            (model(X).sum() * len(runs) ** i).backward()
            optimizer.step()
            optimizer.zero_grad()

    found = gm.check_deterministic(step, [*optimizers, *models])
    assert found.differing == ("3.bias.grad", "3.weight.grad", "3.weight", "3.bias")
    runs.clear()
    named = {"maker": models[0], "judge": models[1], "a": optimizers[0], "b": optimizers[1]}
    found = gm.check_deterministic(step, named)
    assert found.differing == ("judge.bias.grad", "judge.weight.grad", "judge.weight", "judge.bias")


# errors


def test_no_hook_is_left_behind():
    loop = Loop(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.check()
    assert not loop.optimizer._optimizer_step_pre_hooks


class Forgets:
    """Its state is not restored."""

    def __init__(self):
        self.calls = torch.zeros(())

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        pass


def test_a_state_that_cannot_be_restored():
    loop, counter = Loop(), Forgets()

    def step():
        loop.step()
        counter.calls += 1

    said = "load_state_dict does not restore 'counter.calls'; correct it, or leave its object out"
    with pytest.raises(RuntimeError, match=f"check_deterministic: {said}"):
        gm.check_deterministic(step, {"model": loop.model, "optimizer": loop.optimizer, "counter": counter})


@pytest.mark.parametrize(
    ("step", "state", "error", "said"),
    [
        (torch.ones(1), nn.Linear(1, 1), TypeError, "the step must be a function, got Tensor; pass"),
        (print, [], ValueError, "no tensor in the state, list; pass the model and the optimizer"),
        (print, nn.ReLU(), ValueError, "no tensor in the state, ReLU"),
        (print, {"m": nn.Linear(1, 1), "lr": 0.1}, TypeError, "'lr' of the state has type float, which"),
        (print, [nn.Linear(1, 1), print], TypeError, "an object of the state has type builtin_function"),
        (print, torch.ones(1, device="meta"), TypeError, "'0' is on the meta device"),
    ],
)
def test_what_cannot_be_checked_is_refused(step, state, error, said):
    with pytest.raises(error, match=f"check_deterministic: .*{said}"):
        gm.check_deterministic(step, state)


def test_a_buffer_that_the_first_run_creates_is_named():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("cos", None, persistent=False)

        def forward(self, x):
            if self.cos is None:
                self.cos = torch.ones(3)
            return self.layer(x) * self.cos

    model = Cached()

    def step():
        return model(torch.ones(1, 3)).sum()

    with pytest.raises(RuntimeError, match="the first run created 'cos'"):
        gm.check_deterministic(step, model)
    assert gm.check_deterministic(step, model)


def test_what_is_not_read_is_said():
    weight = nn.Parameter(torch.ones(3))
    result = gm.check_deterministic(lambda: {"loss": weight.sum(), "other": object()}, [weight])
    assert result.unread == ("output.other",)
    assert str(result).endswith("; not compared: 'output.other'")
