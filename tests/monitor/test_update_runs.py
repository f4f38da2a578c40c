"""Updates from the monitor to the run record and back: exact values, whenever gradients are cleared."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

pytest.importorskip("pyarrow")
import gradiometer as gm
from gradiometer.columns import PAIRS
from gradiometer.runs import read_run, verify
from support.compiling import needs_compiler

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn)
STEP_SIZE = 2.0**-6


def model_of(dtypes=DTYPES):
    """Weights of which STEP_SIZE changes some: those of 4 stay the same in bf16 and fp8."""
    model = nn.Module()
    for i, dtype in enumerate(dtypes):
        values = torch.tensor([0.0, 0.25, 4.0, 4.0, -4.0, 1.0, 0.0, 0.5])
        model.register_parameter(f"w{i}", nn.Parameter(values.to(dtype)))
    return model


def gradients(step):
    """Of 4 steps that differ, some of whose elements are 0."""
    g = torch.tensor([1.0, -1.0, 1.0, 0.0, 1.0, 0.0, -1.0, 1.0])
    return g.roll(step)


def as_fp64(x):
    return x.detach().to(torch.float64)


def oracle(before, after, g):
    """The columns of updates by the obvious formulas, from fp64 values."""
    u = [a - b for a, b in zip(after, before, strict=True)]
    g = [0.0] * len(u) if g is None else g
    still = [a == b for a, b in zip(after, before, strict=True)]
    return {
        "numel": len(u),
        "sumsq_a": math.fsum(x * x for x in after),
        "sumsq_b": math.fsum(x * x for x in before),
        "dot_ab": math.fsum(x * y for x, y in zip(after, before, strict=True)),
        "sumsq_u": math.fsum(x * x for x in u),
        "sum_u": math.fsum(u),
        "n_unchanged": sum(still),
        "n_nan": 0,
        "abs_max_u": max(map(abs, u)),
        "sumsq_g": math.fsum(x * x for x in g),
        "dot_ug": math.fsum(x * y for x, y in zip(u, g, strict=True)),
        "n_nonzero_g": sum(x != 0 for x in g),
        "n_stuck": sum(x != 0 and same for x, same in zip(g, still, strict=True)),
    }


def train(monitor, model, steps, *, clears, calls=True, first=0, skipped=()):
    """Train by hand, as 8-bit parameters have no arithmetic; return what each step is expected to record."""
    expected = {}
    for step in range(first, first + steps):
        if clears == "start":
            for p in model.parameters():
                p.grad = None
        g = gradients(step)
        for p in model.parameters():
            p.grad = g.to(p.dtype)
        monitor.record()
        before = {name: as_fp64(p).tolist() for name, p in model.named_parameters()}
        if step not in skipped:
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_((as_fp64(p) - STEP_SIZE * g).to(p.dtype))
        if calls:
            monitor.record_updates()
        has_grads = calls or clears == "start"
        if clears == "none":
            for p in model.parameters():
                p.grad = None
        elif clears == "zeros":
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
        monitor.advance(loss=1.0, lr=STEP_SIZE)
        expected[step] = {
            name: oracle(before[name], as_fp64(p).tolist(), g.tolist() if has_grads else None)
            for name, p in model.named_parameters()
        }
    return expected


def assert_recorded(run, expected):
    """All numbers are dyadic and short, so every sum is exact."""
    for step, rows in expected.items():
        record = run.record(step)
        for i, name in enumerate(record.names()):
            for column, value in rows[name].items():
                assert record.value(column, "updates")[i] == value, (step, name, column)
        table = run.tensors(kind="updates", first=step, last=step).to_pylist()
        assert {row["name"]: {key: row[key] for key in rows[row["name"]]} for row in table} == rows
        ratio = [math.sqrt(row["sumsq_u"]) / math.sqrt(row["sumsq_b"]) for row in rows.values()]
        assert record.value("update_ratio", "updates").tolist() == pytest.approx(ratio, rel=1e-15)
        total = {key: math.fsum(row[key] for row in rows.values()) for key in next(iter(rows.values()))}
        whole = math.sqrt(total["sumsq_u"]) / math.sqrt(total["sumsq_b"])
        assert record.total("update_ratio", "updates") == pytest.approx(whole, rel=1e-15)
        (row,) = run.steps.filter([x == step for x in run.steps["step"].to_pylist()]).to_pylist()
        assert row["update_ratio"] == record.total("update_ratio", "updates")
        has_grads = total["n_nonzero_g"] > 0
        stuck = total["n_stuck"] / total["n_nonzero_g"] if has_grads else None
        assert row["stuck_fraction"] == stuck
        cosine = record.value("descent_cosine", "updates")
        assert bool(cosine.isnan().all()) != (has_grads and total["sumsq_u"] > 0)


@pytest.mark.parametrize("clears", ["start", "none", "zeros"])
@pytest.mark.parametrize("calls", [True, False])
def test_every_number_is_exact_for_every_dtype(tmp_path, clears, calls):
    model = model_of()
    with gm.Monitor(model, run_dir=tmp_path, rules=(), updates=True) as monitor:
        expected = train(monitor, model, 4, clears=clears, calls=calls)
    assert monitor.failures == {}
    run = read_run(tmp_path)
    assert_recorded(run, expected)
    assert expected[0]["w1"]["n_unchanged"] > expected[0]["w0"]["n_unchanged"]  # bf16 has lost some
    assert verify(tmp_path).whole
    steps, found = run.matrices(PAIRS.names, "updates")
    assert steps == list(expected)
    for name, values in found.items():
        for step, row in zip(steps, values, strict=True):
            value = run.record(step).value(name, "updates")
            torch.testing.assert_close(row, value, rtol=0, atol=0, equal_nan=True)


def test_a_skipped_step_changes_nothing(tmp_path):
    model = model_of()
    with gm.Monitor(model, run_dir=tmp_path, rules=(), updates=True) as monitor:
        expected = train(monitor, model, 3, clears="start", skipped={1})
    assert_recorded(read_run(tmp_path), expected)
    assert read_run(tmp_path).record(1).total("unchanged_fraction", "updates") == 1.0


# the values of the first elements of a weight after a step -> n_nan, n_posinf, n_neginf, and the finding
NONFINITE = {
    "inf": ([math.inf] * 4, (0, 4, 0), "4 Inf of 16"),
    "-inf": ([-math.inf] * 3, (0, 0, 3), "3 Inf of 16"),
    "nan": ([math.nan] * 2, (2, 0, 0), "2 NaN of 16"),
    "mixed": ([math.inf, math.nan, -math.inf, -math.inf], (1, 1, 2), "1 NaN and 3 Inf of 16"),
}


@pytest.mark.parametrize("kind", NONFINITE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_elements_that_are_not_finite_count_as_what_they_are(tmp_path, capsys, monkeypatch, kind, dtype):
    monkeypatch.setenv("COLUMNS", "200")
    values, expected, text = NONFINITE[kind]
    weight = nn.Parameter(torch.ones(4, 4, dtype=dtype))
    seen, names = [], ("n_nan", "n_posinf", "n_neginf", "n_inf", "n_nonfinite")
    rules = [gm.rules.NonFinite()]
    with gm.Monitor({"w": weight}, run_dir=tmp_path, rules=rules, updates=True, sinks=[seen.append]) as run:
        for step in range(3):
            weight.grad = torch.ones_like(weight)
            run.record()
            with torch.no_grad():
                # after step 1 the infinities stay
                weight.sub_(0.5)
                if step == 1:
                    weight.view(-1)[: len(values)] = torch.tensor(values, dtype=dtype)
            run.record_updates()
            run.advance(loss=1.0)
    assert run.failures == {}
    (found,) = run.findings
    assert (found.first_step, found.message) == (1, f"w.update, {text}")
    assert found.value == len(values)
    counts = [*expected, sum(expected[1:]), len(values)]
    read = read_run(tmp_path)
    for step, row in enumerate([[0] * 5, counts, counts]):
        for record in (seen[step], read.record(step)):
            assert [record.value(name, "updates").item() for name in names] == row
            assert [record.total(name, "updates") for name in names] == row
            report = record.report("updates")
            assert [getattr(report["w"], name) for name in names] == row
            # a norm is NaN with any NaN, else inf with any Inf
            norm = torch.tensor([math.nan if row[0] else math.inf if row[3] else 2.0], dtype=torch.float64)
            torch.testing.assert_close(record.value("norm", "updates"), norm, rtol=0, atol=0, equal_nan=True)
            assert report["w"].rms_u == 0.5
            flags = gm.Flag(int(record.flags("updates"))) & (gm.Flag.NAN | gm.Flag.INF)
            expected = {name for name, n in (("NAN", row[0]), ("INF", row[3])) if n}
            assert {flag.name for flag in flags} == expected
        (stored,) = read.tensors(kind="updates", first=step, last=step).to_pylist()
        assert [stored[name] for name in names[:3]] == row[:3]
    for name, count in zip(names, counts, strict=True):
        assert read.matrix(name, "updates")[1][:, 0].tolist() == [0, count, count]
    cli = pytest.importorskip("gradiometer.cli.app")
    assert cli.main(["show", str(tmp_path), "--step", "1", "--kind", "updates"]) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("w ")]
    cells = [str(n) if n else "-" for n in (counts[0], counts[3])]
    assert line.split()[8:10] == cells


def test_accumulated_gradients_are_compared_with_the_update(tmp_path):
    model = nn.Linear(4, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with gm.Monitor(model, run_dir=tmp_path, rules=(), updates=True) as monitor:
        for _ in range(2):
            for _ in range(3):
                model(torch.randn(2, 4)).square().mean().backward()
                monitor.record()
            optimizer.step()
            monitor.record_updates()
            optimizer.zero_grad()
            monitor.advance()
    for record in read_run(tmp_path).records():
        # float32 weights hold the update up to half an ulp of theirs
        assert record.total("descent_cosine", "updates") == pytest.approx(1.0, abs=1e-6)
        assert record.total("sumsq_g", "updates") == record.total("sumsq")


def test_a_resumed_run_measures_from_its_first_step(tmp_path):
    model = model_of()
    with gm.Monitor(model, run_dir=tmp_path, rules=(), updates=True) as monitor:
        expected = train(monitor, model, 4, clears="none")
        state = monitor.state_dict()
    with gm.Monitor(model, run_dir=tmp_path, rules=(), updates=True) as monitor:
        monitor.load_state_dict(state)
        expected |= train(monitor, model, 3, clears="none", first=4)
    run = read_run(tmp_path)
    assert [attempt.number for attempt in run.attempts] == [1, 2]
    assert_recorded(run, expected)


def compiled(model, monitor):
    @torch.compile(fullgraph=True)
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        monitor.record()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.5 * p.grad)
        monitor.record_updates()
        for p in model.parameters():
            p.grad = None
        return loss.detach()

    return step


@needs_compiler
@pytest.mark.usefixtures("_dynamo")
def test_a_compiled_step_measures_them_before_its_gradients_are_gone():
    model, seen = nn.Linear(4, 3), []
    with gm.Monitor(model, rules=(), updates=True, every=2, sinks=[seen.append]) as monitor:
        step = compiled(model, monitor)
        for _ in range(5):
            before = [p.detach().clone() for p in model.parameters()]
            monitor.advance(loss=step(torch.randn(2, 4)))
            u = [a.detach().double() - b.double() for a, b in zip(model.parameters(), before, strict=True)]
            monitor.flush()
            if monitor.last.recorded:
                norms = [float(x.norm()) for x in u]
                assert monitor.last.value("norm", "updates").tolist() == pytest.approx(norms, rel=1e-12)
                assert monitor.last.total("descent_cosine", "updates") == pytest.approx(1.0, abs=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert monitor.failures == {}
    assert [record.step for record in seen if record.recorded] == [0, 2, 4]


def test_parameters_that_are_unfrozen_or_cleared_later():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(requires_grad=False)
    seen = []
    with gm.Monitor(model, rules=(), updates=True, sinks=[seen.append]) as monitor:
        for step in range(4):
            if step == 1:
                model.requires_grad_()
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(1.0)
            monitor.record_updates()
            monitor.advance()
    found = [record.measured("updates").tolist() for record in seen]
    assert found == [[False, False, True, True]] * 2 + [[True] * 4] * 2
    assert monitor.failures == {}


def test_updates_that_are_not_recorded_are_a_failure_and_no_error():
    with gm.Monitor(nn.Linear(2, 1), rules=()) as monitor:
        monitor.record_updates()
        monitor.advance()
    assert monitor.failures == {"updates": 1}


def test_runs_whose_updates_alone_differ_are_not_identical(tmp_path):
    runs = []
    for i, skipped in enumerate(((), (), (3,))):
        model = model_of()
        options = {"rules": (), "updates": True, "fingerprint": True}
        with gm.Monitor(model, run_dir=tmp_path / str(i), **options) as monitor:
            train(monitor, model, 4, clears="none", skipped=skipped)
        runs.append(read_run(tmp_path / str(i)))
    assert gm.compare_runs(runs[0], runs[1]).identical
    # the last step has the same gradients, and its weights are those before the update
    found = gm.compare_runs(runs[0], runs[2])
    assert (found.identical, found.same, found.bits) == (False, False, None)
    assert {(difference.step, difference.kind) for difference in found.first} == {(3, "updates")}
    assert found.verdict == "bits: identical for 4 steps; updates differ first at step 3"
