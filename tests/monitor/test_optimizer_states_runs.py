"""Hyperparameters and states of optimizers in a run: scalars, the run record, its page, and a resumed run."""

from __future__ import annotations

import pytest

pytest.importorskip("pyarrow")
import torch
from torch import nn

import gradiometer as gm
from gradiometer.runs import verify
from gradiometer.web.data import page_of


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def grouped(model, **options):
    groups = [{"params": model[0].parameters(), "weight_decay": 0.1}, {"params": model[2].parameters()}]
    return torch.optim.AdamW(groups, lr=0.01, **options)


def train(monitor, model, optimizer, first, last, schedule=None):
    for step in range(first, last):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        monitor.note(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule(step)


def test_hyperparameters_are_scalars_in_the_first_step_and_where_they_change():
    model, records = model_of(), []
    optimizer = grouped(model, weight_decay=0.0)

    def schedule(step):
        if step == 2:
            optimizer.param_groups[1].update(lr=0.001, betas=(0.8, 0.999))
        if step == 4:
            optimizer.param_groups[1]["lr"] = 0.01

    with gm.watch(model, optimizer, rules=(), sinks=[records.append]) as monitor:
        train(monitor, model, optimizer, 0, 6, schedule)
    assert monitor.failures == {}
    found = [
        {name.removeprefix("optimizer/"): x for name, x in record.scalars.items() if "/" in name}
        for record in records
    ]
    assert found == [
        {
            "beta1": 0.9,
            "beta2": 0.999,
            "eps": 1e-8,
            "weight_decay/group_0": 0.1,
            "weight_decay/group_1": 0.0,
        },
        {},
        {},
        {"lr/group_1": 0.001, "beta1/group_0": 0.9, "beta1/group_1": 0.8},
        {},
        {"lr/group_1": 0.01},
    ]
    assert [record.scalars["lr"] for record in records] == [0.01] * 6


def test_a_monitor_with_optimizers_records_their_rates_unless_they_are_given():
    model, records = model_of(), []
    optimizers = [
        torch.optim.SGD(model[0].parameters(), lr=0.1),
        torch.optim.SGD(model[2].parameters(), lr=0.2),
    ]
    with gm.Monitor(model, optimizer=optimizers, rules=(), sinks=[records.append]) as monitor:
        for given in ({}, {"lr": 5.0}):
            model(torch.ones(2, 4)).sum().backward()
            monitor.record()
            monitor.advance(**given)
    assert [(record.scalars["lr"], record.scalars["lr_1"]) for record in records] == [(0.1, 0.2), (5.0, 0.2)]
    assert records[0].model.optimizers.groups == (0, 0, 1, 1)


def test_the_learning_rate_rule_reads_no_rates_of_other_groups():
    model = model_of()
    optimizer = grouped(model)
    optimizer.param_groups[1]["lr"] = 0.0

    def schedule(step):
        optimizer.param_groups[1]["lr"] = 10.0**step

    with gm.watch(model, optimizer, rules=[gm.rules.LearningRate()]) as monitor:
        train(monitor, model, optimizer, 0, 20, schedule)
    assert monitor.findings == []


def test_the_page_draws_what_changes_and_the_states_that_were_measured(tmp_path):
    class Plain(torch.optim.Optimizer):
        # of an unknown class, without states
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.0})

        def step(self):
            self.param_groups[0]["weight_decay"] += 0.1

    model = model_of()
    optimizer = Plain(model.parameters())
    with gm.watch(model, optimizer, rules=(), run_dir=tmp_path / "a") as monitor:
        train(monitor, model, optimizer, 0, 5)
    run = gm.read_run(tmp_path / "a")
    assert list(run.catalog.kinds) == ["grads", "exp_avg", "exp_avg_sq", "momentum_buffer"]
    page = page_of(run).values
    assert [line["name"] for line in page["scalars"]] == ["loss", "lr", "optimizer/weight_decay"]
    assert [kind["name"] for kind in page["kinds"]] == ["grads"]
    model = model_of()
    optimizer = grouped(model)
    with gm.watch(model, optimizer, rules=(), run_dir=tmp_path / "b") as monitor:
        train(monitor, model, optimizer, 0, 12)
    page = page_of(gm.read_run(tmp_path / "b")).values
    assert [line["name"] for line in page["scalars"]] == ["loss", "lr"]
    assert [kind["name"] for kind in page["kinds"]] == ["grads", "exp_avg", "exp_avg_sq"]
    assert all(
        set(page["matrices"][kind["name"]]) == {"norm", "abs_max", "zero_fraction"} for kind in page["kinds"]
    )


def test_a_resumed_run_is_equal_to_one_that_was_not_interrupted(tmp_path):
    def run(folder, stops):
        model = model_of()
        optimizer = grouped(model)
        state = None
        for first, last in zip([0, *stops], [*stops, 24], strict=True):
            with gm.watch(model, optimizer, rules=(), run_dir=folder, states=4) as monitor:
                if state is not None:
                    monitor.load_state_dict(state)
                train(monitor, model, optimizer, first, last)
                state = monitor.state_dict()
        verify(folder)
        return gm.read_run(folder)

    once, twice = run(tmp_path / "once", []), run(tmp_path / "twice", [10])
    measured = [step for step in range(24) if twice.record(step).has("exp_avg")]
    assert measured == [0, 1, 4, 8, 10, 11, 12, 16, 20]
    assert "optimizer/eps" in twice.record(10).scalars
    # steps in which only one has measured states do not count
    found = gm.compare_runs(tmp_path / "once", tmp_path / "twice")
    assert (found.first, found.scalars) == ((), ())
    for step in (0, 4, 20):
        assert torch.equal(once.record(step).columns("exp_avg_sq"), twice.record(step).columns("exp_avg_sq"))


def test_an_attempt_may_record_other_kinds(tmp_path):
    for step, make in enumerate(
        [
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            torch.optim.Adam,
            lambda model: torch.optim.RMSprop(model.parameters()),
        ]
    ):
        model = model_of()
        optimizer = make(model.parameters()) if make is torch.optim.Adam else make(model)
        with gm.watch(model, optimizer, rules=(), run_dir=tmp_path / "run") as monitor:
            monitor.step = step
            train(monitor, model, optimizer, step, step + 1)
    run = gm.read_run(tmp_path / "run")
    assert [list(run.record(step).tables) for step in range(3)] == [
        ["grads"],
        ["grads", "exp_avg", "exp_avg_sq"],
        ["grads", "square_avg"],
    ]


def test_the_summary_names_what_no_optimizer_holds():
    model = model_of()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with gm.watch(model, optimizer, rules=()) as monitor:
        train(monitor, model, optimizer, 0, 2)
        monitor.flush()
        assert "no optimizer holds 2 of 4 parameters: 2.weight, 2.bias" in str(monitor.summary())
    with gm.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), rules=()) as monitor:
        train(monitor, model, optimizer, 0, 2)
        assert "no optimizer holds" not in str(monitor.summary())
