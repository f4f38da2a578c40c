"""States of optimizers: which are measured, when, and that the numbers are those of the tensors."""

from __future__ import annotations

import copy
import gc
import math
import weakref

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.columns import TENSORS
from gradiometer.recorder import KINDS, OptimizerStates, state_names
from gradiometer.recorder.kinds import state_kind

OPTIMIZERS = {
    "adam": (torch.optim.Adam, {}, ["exp_avg", "exp_avg_sq"]),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}, ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
    "nadam": (torch.optim.NAdam, {}, ["exp_avg", "exp_avg_sq"]),
    "radam": (torch.optim.RAdam, {}, ["exp_avg", "exp_avg_sq"]),
    "adamax": (torch.optim.Adamax, {}, ["exp_avg", "exp_inf"]),
    "sgd": (torch.optim.SGD, {"lr": 0.1}, []),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, ["momentum_buffer"]),
    "rmsprop": (torch.optim.RMSprop, {}, ["square_avg"]),
    "centered": (
        torch.optim.RMSprop,
        {"centered": True, "momentum": 0.9},
        ["grad_avg", "momentum_buffer", "square_avg"],
    ),
    "adagrad": (torch.optim.Adagrad, {}, ["sum"]),
    "adadelta": (torch.optim.Adadelta, {}, ["acc_delta", "square_avg"]),
    "asgd": (torch.optim.ASGD, {}, ["ax"]),
    "rprop": (torch.optim.Rprop, {}, ["prev", "step_size"]),
}


def model_of(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).to(dtype)


def train(model, optimizers, steps, monitor=None, first=0):
    for step in range(first, first + steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).to(
            next(model.parameters()).dtype
        )
        model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        if monitor is not None:
            monitor.flush()


def watched(model, optimizer, steps=1, **options):
    """Train; return the monitor and the records."""
    records = []
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    with gm.watch(model, optimizer, rules=(), sinks=[records.append], **options) as monitor:
        train(model, optimizers, steps)
    assert monitor.failures == {}
    return monitor, records


def due(records, kind):
    return [record.step for record in records if record.has(kind)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_states_of_each_optimizer_are_those_of_its_tensors(name):
    make, options, expected = OPTIMIZERS[name]
    model = model_of()
    optimizer = make(model.parameters(), **options)
    assert sorted(state_names(optimizer)) == expected
    _, (record,) = watched(model, optimizer)
    assert list(record.tables) == ["grads", *expected]
    # known before the first step, and present after it
    assert sorted(state_names(optimizer)) == expected
    for kind in expected:
        table = record.tables[kind]
        assert table.kind.schema is TENSORS
        assert table.kind.label("w") == f"w.{kind}"
        tensors = [optimizer.state[p][kind] for p in model.parameters()]
        stats = gm.collect(dict(zip(table.rows.names, tensors, strict=True)))
        torch.testing.assert_close(table.values, stats.columns, rtol=1e-14, atol=0)
        assert not table.flags.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_states_in_other_dtypes(dtype):
    model = model_of(dtype)
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-4)
    _, (record,) = watched(model, optimizer)
    moment = optimizer.state[model[0].weight]["exp_avg_sq"]
    assert moment.dtype == dtype
    assert record.value("sum", "exp_avg_sq")[0] == moment.double().sum()
    assert record.value("zero_fraction", "exp_avg_sq")[0] == (moment == 0).double().mean()
    known = record.model.optimizers
    assert known.dtypes == (str(dtype).removeprefix("torch."),) * 4
    assert known.updates == (1.0,) * 4


def test_lbfgs_and_adafactor_have_no_state_of_the_shape_of_a_matrix():
    model = model_of()
    assert state_names(torch.optim.LBFGS(model.parameters())) == []
    optimizer = torch.optim.Adafactor([p for p in model.parameters() if p.dim() == 2])
    _, (record,) = watched(model, optimizer)
    assert list(record.tables) == ["grads"]


class Odd(torch.optim.Optimizer):
    """An optimizer of its own class, with states that are not measured beside one that is."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self):
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            state["exp_avg"] = p.grad.clone()
            state["exp_avg_sq"] = torch.zeros(p.shape, dtype=torch.uint8)
            state["row"] = torch.zeros(p.shape[0] + 1)
            state["momentum_buffer"] = None
            state["slow"] = p.detach().clone()
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.1)


def test_an_unknown_optimizer_has_the_usual_names_and_those_that_are_there():
    model = model_of()
    optimizer = Odd(model.parameters())
    assert state_names(optimizer) == ["exp_avg", "exp_avg_sq", "momentum_buffer"]
    _, (record,) = watched(model, optimizer)
    assert list(record.tables) == ["grads", "exp_avg"]
    assert record.model.optimizers.updates == (1.0,) * 4
    # the same optimizer when a run is resumed
    assert state_names(optimizer) == ["exp_avg", "exp_avg_sq", "momentum_buffer", "slow"]
    _, (record,) = watched(model, optimizer, state_names="slow")
    assert list(record.tables) == ["grads", "slow"]


def test_a_wrapper_and_a_subclass_have_the_states_of_the_class_inside():
    class Mine(torch.optim.RMSprop):
        pass

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

        state = property(lambda self: self.optimizer.state)
        param_groups = property(lambda self: self.optimizer.param_groups)

    optimizer = Mine(model_of().parameters())
    assert state_names(optimizer) == state_names(Wrapper(optimizer)) == ["square_avg"]


def test_several_optimizers_and_frozen_parameters():
    model = model_of()
    model[2].bias.requires_grad_(False)
    adam = torch.optim.Adam(model[0].parameters())
    sgd = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
    _, (record,) = watched(model, [adam, sgd])
    measured = {kind: record.measured(kind).tolist() for kind in record.tables}
    assert measured["exp_avg"] == measured["exp_avg_sq"] == [True, True, False, False]
    assert measured["momentum_buffer"] == [False, False, True, False]


def test_master_weights_have_the_states():
    model = model_of(torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.Adam(masters)
    records = []
    with gm.watch(model, optimizer, rules=(), sinks=[records.append]) as monitor:
        model(torch.ones(3, 4, dtype=torch.bfloat16)).sum().backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad = p.grad.float()
        optimizer.step()
    assert monitor.failures == {}
    moment = optimizer.state[masters[0]]["exp_avg"].double()
    assert records[0].value("sum", "exp_avg")[0] == pytest.approx(float(moment.sum()), rel=1e-12)
    assert records[0].model.optimizers.dtypes == ("float32",) * 4


# when


@pytest.mark.parametrize(
    ("every", "states", "expected"),
    [(1, 10, [0, 1, 10, 20]), (1, 1, list(range(24))), (3, 4, [0, 3, 12]), (10, 5, [0, 10, 20])],
)
def test_steps_that_both_cadences_allow_are_due_and_the_first_two(every, states, expected):
    model = model_of()
    _, records = watched(model, torch.optim.Adam(model.parameters()), 24, every=every, states=states)
    assert due(records, "exp_avg") == expected
    assert all(records[step].has("grads") for step in expected)


def test_the_first_steps_after_a_resume_are_due():
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters())
    records = []
    with gm.watch(model, optimizer, rules=(), sinks=[records.append], states=100) as monitor:
        train(model, [optimizer], 5)
        state = monitor.state_dict()
        monitor.step = 57
        train(model, [optimizer], 5)
        monitor.load_state_dict(state)
        train(model, [optimizer], 3)
    assert due(records, "exp_avg") == [0, 1, 57, 58, 5, 6]


def test_states_none_measures_nothing_but_the_hyperparameters_are_known():
    model = model_of()
    _, (record,) = watched(model, torch.optim.Adam(model.parameters()), states=None)
    assert list(record.catalog.kinds) == ["grads"]
    assert record.scalars["optimizer/beta2"] == 0.999


def test_states_are_not_in_the_ring():
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters())
    states = OptimizerStates([optimizer], ["exp_avg"], 1)
    plain, recorder = gm.Recorder(model), gm.Recorder(model, states=states)
    assert recorder.ring.shape == plain.ring.shape
    assert list(recorder.catalog.kinds) == ["grads", "exp_avg"]


def test_a_monitor_keeps_no_optimizer_alive_and_measures_nothing_after_it_is_gone():
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters())
    records = []
    with gm.Monitor(model, optimizer=optimizer, states=1, rules=(), sinks=[records.append]) as monitor:
        for _ in range(2):
            train(model, [optimizer] if optimizer is not None else [], 1)
            monitor.record()
            monitor.advance()
            gone, optimizer = optimizer and weakref.ref(optimizer), None
            gc.collect()
            assert gone is None or gone() is None
    assert monitor.failures == {}
    assert due(records, "exp_avg") == [0]


def test_a_state_that_is_not_finite_comes_after_the_gradients_and_is_named():
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters())
    records = []
    with gm.watch(model, optimizer, states=1, sinks=[records.append]) as monitor:
        train(model, [optimizer], 2)
        optimizer.state[model[0].weight]["exp_avg_sq"][0, 0] = math.nan
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert monitor.failures == {}
    assert records[2].flags("exp_avg_sq").tolist() == [int(gm.Flag.NAN), 0, 0, 0]
    (found,) = [finding for finding in monitor.findings if finding.rule == "nonfinite"]
    assert (found.kind, found.tensor) == ("exp_avg_sq", "0.weight")
    assert "0.weight.exp_avg_sq, 1 NaN of 24" in found.message


# what is refused


def test_arguments_that_do_not_fit():
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match=r"states=0\): states must be an integer, at least 1"):
        gm.Monitor(model, optimizer=optimizer, states=0)
    with pytest.raises(ValueError, match=r"Monitor\(states=5\) needs optimizer="):
        gm.Monitor(model, states=5)
    with pytest.raises(TypeError, match=r"optimizer=\.\.\.\): expected a torch.optim.Optimizer, or several"):
        gm.Monitor(model, optimizer="adam")
    for name in ("no name", "total", 3):
        with pytest.raises(ValueError, match="cannot be the name of a state"):
            gm.Monitor(model, optimizer=optimizer, states=5, state_names=[name])
    with pytest.raises(ValueError, match="there is another kind 'grads'"):
        state_kind("grads")


def test_a_state_is_a_registered_kind_whose_description_can_be_read():
    kind = state_kind("max_exp_avg_sq")
    assert kind is KINDS["max_exp_avg_sq"] is state_kind("max_exp_avg_sq")
    assert type(kind).from_dict(kind.to_dict(), {"tensors": TENSORS}) is kind
    assert copy.copy(kind) == kind
