"""Projections in the ring of a recorder, in the steps that are due."""

from __future__ import annotations

import pytest
import torch

import gradiometer as gm


def model_of(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).to(dtype)


def backward(model, step):
    model.zero_grad()
    model(torch.full((2, 4), float(step + 1), dtype=model[0].weight.dtype)).sum().backward()


@pytest.mark.parametrize(
    ("options", "projected"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"projections_every": 2}, [0, 2, 4]),
        ({"every": 2, "projections_every": 3}, [0]),
    ],
)
def test_due_steps_have_projections(options, projected):
    model = model_of()
    recorder = gm.Recorder(model, projections=16, **options)
    expected = {}
    for step in range(6):
        backward(model, step)
        recorder.record()
        expected[step] = gm.collect_projections(model).columns
        recorder.advance()
    records = {record.step: record for record in recorder.read()}
    assert [step for step, record in records.items() if "grad_projections" in record.tables] == projected
    for step in projected:
        assert torch.equal(records[step].tables["grad_projections"].values, expected[step])
        assert records[step].tables["grad_projections"].stats().names == recorder.catalog.names


def test_weights_scales_and_missing_gradients():
    model = model_of(torch.float64)
    recorder = gm.Recorder(model, weights=True, projections=32)
    backward(model, 0)
    model[0].bias.grad = None
    recorder.record(inv_scale=torch.tensor(0.5))
    (record,) = recorder.read()
    grads, weights = (record.tables[name].stats() for name in ("grad_projections", "weight_projections"))
    assert "0.bias" not in grads.names
    expected = gm.collect_projections(model, projections=32)
    assert torch.equal(grads.projections * 2, expected.projections)
    named = dict(model.named_parameters())
    assert torch.equal(weights.columns, gm.collect_projections(named, projections=32).columns)


def test_a_step_that_is_kept_for_its_nan_is_not_projected():
    model = model_of()
    recorder = gm.Recorder(model, projections=16, projections_every=4)
    for step in range(2):
        backward(model, step)
        if step == 1:
            model[0].weight.grad[0] = torch.nan
        recorder.record()
        recorder.advance()
    assert [[*record.tables] for record in recorder.read()] == [["grads", "grad_projections"], ["grads"]]


def test_in_a_compiled_step():
    model = model_of()
    recorder = gm.Recorder(model, projections=16, projections_every=2)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def record():
        recorder.record()
        recorder.advance()

    for step in range(3):
        backward(model, step)
        record()
    records = recorder.read()
    assert ["grad_projections" in record.tables for record in records] == [True, False, True]
    expected = gm.collect_projections(model)
    assert torch.equal(records[-1].tables["grad_projections"].values, expected.columns)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"projections": 5}, "projections must be one of"),
        ({"projections_every": 2}, "pass projections=16"),
        ({"projections": 8, "projections_every": 0}, "projections_every must be an integer, at least 1"),
    ],
)
def test_numbers_out_of_range(options, message):
    for kind in (gm.Recorder, gm.Monitor):
        with pytest.raises(ValueError, match=message):
            kind(model_of(), **options)


def test_a_run_keeps_any_number_of_projections(tmp_path):
    pytest.importorskip("pyarrow")
    model = model_of()
    with gm.Monitor(model, run_dir=tmp_path, projections=64, rules=()) as monitor:
        backward(model, 0)
        monitor.record()
        monitor.advance()
    run = gm.read_run(tmp_path)
    found = run.record(0).tables["grad_projections"].stats()
    assert torch.equal(found.columns, gm.collect_projections(model, projections=64).columns)
    assert float(found.finite_norm[0]) == pytest.approx(float(model[0].weight.grad.norm()))
