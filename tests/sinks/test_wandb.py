"""Weights & Biases, offline: the contents of the file that `wandb sync` would send."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from gradiometer.rules.fault import Fault
from gradiometer.rules.finding import Finding, Severity
from gradiometer.sinks import Selection, WeightsAndBiases
from gradiometer.sinks.protocol import Sink
from support.synthetic_run import make_catalog, make_info, make_records

CATALOG = make_catalog(4)
INFO = make_info(CATALOG)
STEP = "gradiometer/step"
SEEN = Finding("dead", Severity.WARNING, 3, 5, "grads", "a.w", 1.0, 1.0, "a.w.grad is zero", "do this")


def written(folder):
    """Yield the records of the one run in a folder: blocks of 32 KiB, as in LevelDB's log."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # waits until its process has written everything
    (path,) = Path(folder).glob("wandb/offline-run-*/*.wandb")
    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:  # no room for another header in this block
            at += 2**15 - at % 2**15
            continue
        _, length, part = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if part in {1, 4}:  # a whole record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def history(folder):
    rows = [row.history.item for row in written(folder) if row.WhichOneof("record_type") == "history"]
    return [{x.key or "/".join(x.nested_key): json.loads(x.value_json) for x in row} for row in rows]


def ours(rows):
    """Return the rows with our step axis, without wandb's own columns."""
    return [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows if STEP in row]


def log(records, findings=(), catalog=CATALOG, **options):
    """Log to a new run, and finish it."""
    sink = WeightsAndBiases("project", **options)
    sink.start(make_info(catalog))
    sink.write(list(records), findings)
    sink.close()


def test_without_a_run_it_makes_one_and_finishes_it(wandb, tmp_path):
    sink = WeightsAndBiases("project", init={"name": "mine"}, tensors=r"0\.w", every=2)
    assert isinstance(sink, Sink)
    assert (wandb.run.name, wandb.run.project) == ("mine", "project")
    steps = list(make_records(CATALOG, 6))
    sink.start(make_info(make_catalog(4, ("grads", "weights", "activations"))))
    sink.write(steps, [SEEN])
    sink.close()
    assert wandb.run is None
    selection = Selection(tensors=r"0\.w")
    assert ours(history(tmp_path)) == [{STEP: s.step, **selection.values(s)} for s in steps[::2]]
    metrics = [r.metric for r in written(tmp_path) if r.WhichOneof("record_type") == "metric"]
    groups = ("grads/*", "weights/*", "activations/*", "train/*")
    assert {m.glob_name: m.step_metric for m in metrics if m.glob_name} == dict.fromkeys(groups, STEP)


def test_what_is_not_finite_arrives(wandb, tmp_path):
    del wandb
    log(make_records(CATALOG, 1, nonfinite_at=0), tensors="")
    (row,) = ours(history(tmp_path))
    assert math.isnan(row["train/loss"])
    assert math.isnan(row["grads/total_norm"])
    assert row["grads/blocks.0.bias/norm"] == math.inf


def test_an_active_run_is_used_and_left_open_and_its_scalars_are_left_alone(wandb, tmp_path):
    run = wandb.init(project="theirs")
    sink = WeightsAndBiases("ours")
    sink.start(INFO)
    for record in make_records(CATALOG, 3):
        wandb.log({"train/loss": float(record.step)})
        sink.write([record], [])
    sink.close()
    assert wandb.run is run
    wandb.log({"train/loss": 99.0})
    run.finish()
    rows = history(tmp_path)
    assert [row[STEP] for row in ours(rows)] == [0, 1, 2]
    assert [row["train/loss"] for row in rows if "train/loss" in row] == [0, 1, 2, 99]
    assert not any("train/loss" in row and STEP in row for row in rows)
    metrics = [r.metric.glob_name for r in written(tmp_path) if r.WhichOneof("record_type") == "metric"]
    assert "train/*" not in metrics


def test_with_commit_false_no_row_of_yours_is_refused(wandb, tmp_path):
    run = wandb.init(project="theirs")
    sink = WeightsAndBiases(commit=False)
    sink.start(INFO)
    steps = list(make_records(CATALOG, 12))
    for i in range(4):
        wandb.log({"mine": float(i)}, step=i)
        sink.write(steps[3 * i : 3 * i + 3], [])
    sink.close()
    run.finish()
    rows = history(tmp_path)
    assert [row["mine"] for row in rows if "mine" in row] == [0, 1, 2, 3]
    # the newest of every three steps, with its own number
    assert [row[STEP] for row in ours(rows)] == [2, 5, 8, 11]


def test_half_of_a_surrogate_pair_is_written_by_its_number():
    class Active:
        def __init__(self):
            self.logged, self.summary, self.alerts = [], {}, []

        def log(self, values, **_):
            self.logged.append(values)

        def alert(self, **values):
            self.alerts.append(values)

    pytest.importorskip("wandb")
    active = Active()
    catalog = make_catalog(names=["w\ud800"])
    sink = WeightsAndBiases(run=active, tensors="", alerts=Severity.INFO)
    found = replace(SEEN, message="w\ud800 is zero")
    sink.write(list(make_records(catalog, 1)), [found])
    sink.fault(Fault("exception", "w\ud800", 6, None, [], []))
    assert r"grads/w\ud800/norm" in active.logged[0]
    json.dumps([active.logged, active.summary, active.alerts], ensure_ascii=False).encode()


def test_findings_and_a_fault_are_in_the_summary_and_alerts_only_if_asked(wandb, monkeypatch):
    alerts = []
    monkeypatch.setattr(wandb.Run, "alert", lambda _, **said: alerts.append(said))
    for alert in (None, Severity.WARNING):
        sink = WeightsAndBiases("project", alerts=alert)
        run = wandb.run
        sink.start(INFO)
        sink.write(list(make_records(CATALOG, 2)), [SEEN])
        sink.write([], [SEEN])
        assert list(run.summary["gradiometer/findings"]) == [str(SEEN)]
        assert run.summary["gradiometer/n_findings"] == 1
        sink.fault(Fault("exception", "boom", 6, "step 5, a.w.grad", [SEEN], []))
        said = "exception in step 6: boom; first non-finite: step 5, a.w.grad"
        assert run.summary["gradiometer/fault"] == said
        sink.close()
    assert alerts == [{"title": "gradiometer: dead", "text": "a.w.grad is zero", "level": "WARN"}]


def test_a_run_that_failed_says_so(wandb, tmp_path):
    del wandb
    sink = WeightsAndBiases("project")
    sink.start(INFO)
    sink.fault(Fault("exception", "boom", 0, None, [], []))
    sink.fault(Fault("exit", "", 0, None, [], []))
    sink.close()
    (end,) = [r.exit for r in written(tmp_path) if r.WhichOneof("record_type") == "exit"]
    assert end.exit_code == 1


def test_a_run_may_be_given(wandb, tmp_path):
    run = wandb.init(project="theirs")
    sink = WeightsAndBiases(run=run, scalars="lr")
    sink.start(INFO)
    sink.write(list(make_records(CATALOG, 1)), [])
    run.finish()
    (row,) = ours(history(tmp_path))
    assert row.keys() == {STEP, "train/lr", "grads/total_norm", "grads/n_nonfinite"}


def test_names_are_keys_as_they_are(wandb, tmp_path):
    del wandb
    names = ["a b<c>[0]", "ü/中", "x" * 300, "a.b:c//d"]
    catalog = make_catalog(names=names)
    log(make_records(catalog, 1), catalog=catalog, tensors="")
    assert {f"grads/{name}/norm" for name in names} <= ours(history(tmp_path))[0].keys()


def test_without_a_run_or_a_project_it_says_what_to_do(wandb):
    del wandb
    with pytest.raises(ValueError, match=r"no active run; call wandb.init first, or pass project="):
        WeightsAndBiases()


def test_an_error_of_the_run_comes_out_of_write(wandb):
    run = wandb.init(project="theirs")
    sink = WeightsAndBiases()
    sink.start(INFO)
    run.finish()
    with pytest.raises(wandb.errors.UsageError):
        sink.write(list(make_records(CATALOG, 1)), [])
