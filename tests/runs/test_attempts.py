"""A second run in one folder is an attempt beside the first, and what it supersedes can still be read."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("pyarrow")

from gradiometer.recorder import Catalog
from gradiometer.rules.fault import Fault
from gradiometer.rules.finding import Finding, Severity
from gradiometer.runs import RunError, read_run, verify
from support.synthetic_run import make_records, same_records, write_records, write_run

NAN = Finding("nonfinite", Severity.ERROR, 3, 3, "grads", "blocks.0.weight", 1.0, 0.0, "in the first", "")


def same(a, b):
    return a.steps.drop(["attempt"]) == b.steps.drop(["attempt"]) and same_records(a.records(), b.records())


@pytest.mark.parametrize("close", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize(("first", "steps"), [(0, 5), (0, 50), (12, 4)], ids=["fewer", "more", "resumed"])
def test_the_first_attempt_can_be_read_as_it_was(tmp_path, first, steps, close):
    alone = read_run(write_run(tmp_path / "alone", steps=20, findings=[NAN], close=close))
    write_run(tmp_path / "run", steps=20, findings=[NAN], close=close)
    again = replace(NAN, message="in the second")
    write_run(tmp_path / "run", steps=steps, first=first, seed=1, findings=[again] if not first else [])

    run = read_run(tmp_path / "run", attempt=1)
    assert same(run, alone)
    assert run.findings == alone.findings == [NAN]
    assert run.info["closed"] is close
    assert [entry["attempt"] for entry in run.info["attempts"]] == [1]
    last = read_run(tmp_path / "run")
    assert last.steps["step"].to_pylist() == list(range(first + steps))
    assert [x.message for x in last.findings] == ["in the first" if first else "in the second"]
    assert same(last, read_run(tmp_path / "run", attempt=2))
    assert [(x.number, x.first_step, x.superseded) for x in last.attempts] == [
        (1, 0, first),
        (2, first, None),
    ]
    assert verify(tmp_path / "run").whole


def test_an_attempt_with_another_model_hides_nothing_of_the_first(tmp_path):
    alone = read_run(write_run(tmp_path / "alone", names=["a", "b", "c"], steps=20, every=2))
    write_run(tmp_path / "run", names=["a", "b", "c"], steps=20, every=2)
    catalog = Catalog.of(["c", "d"], [(3,), (4,)], ["float32"] * 2)
    # and a third, of the second's model
    for first, steps in ((0, 3), (3, 1)):
        records = make_records(catalog, steps, first=first)
        info = {"model": "Other", "device": "cuda:0"}
        write_records(tmp_path / "run", catalog, records, first, info=info)

    run = read_run(tmp_path / "run", attempt=1)
    assert (run.catalog, run.info["model"], run.info["device"]) == (alone.catalog, "Synthetic", "cpu")
    assert run.info["every"] == 2
    assert same(run, alone)
    for attempt, steps in ((2, 3), (3, 4), (None, 4)):
        run = read_run(tmp_path / "run", attempt=attempt)
        assert (run.catalog, run.info["model"], len(run.steps)) == (catalog, "Other", steps)


def test_the_fault_of_each_attempt_is_kept(tmp_path):
    for message in ("first", "second"):
        write_run(tmp_path, tensors=2, steps=3, fault=Fault("exception", message, 2, None, (), ()))
    write_run(tmp_path, tensors=2, steps=3)

    assert read_run(tmp_path).blackbox["message"] == "second"
    assert read_run(tmp_path, attempt=2).blackbox["message"] == "second"
    assert read_run(tmp_path, attempt=1).blackbox["message"] == "first"
    assert "blackbox-0001.json" in {file.name for file in verify(tmp_path).of("whole")}


def test_a_damaged_fault_of_an_earlier_attempt_does_not_hold_up_the_next(tmp_path):
    write_run(tmp_path, tensors=2, steps=3)
    (tmp_path / "blackbox.json").write_text("{")
    write_run(tmp_path, tensors=2, steps=0, fault=Fault("exception", "second", 2, None, (), ()))

    assert read_run(tmp_path).blackbox["message"] == "second"
    assert (tmp_path / "blackbox-damaged-2.json").read_text() == "{"


def test_an_attempt_that_is_not_there_is_one_line(tmp_path):
    write_run(tmp_path, tensors=2, steps=3)

    with pytest.raises(RunError, match="has no attempt 2; it has 1 to 1"):
        read_run(tmp_path, attempt=2)


def test_show_says_which_attempt_it_shows(tmp_path, call):
    write_run(tmp_path, tensors=2, steps=20)
    code, out, _ = call("show", tmp_path)
    assert code == 0
    assert "attempts: " not in out
    write_run(tmp_path, tensors=2, steps=5, seed=1)

    code, out, _ = call("show", tmp_path)
    assert code == 0
    assert out.startswith("step 4 ")
    said = "attempts: 1 from step 0, 2 from step 0; attempt 2 wrote this step; --attempt N shows"
    assert said in " ".join(out.split())
    assert call("show", tmp_path, "--attempt", 1)[1].startswith("step 19 ")
    found = json.loads(call("show", tmp_path, "--attempt", 1, "--json")[1])
    assert found["attempt"] == 1
    assert [x["superseded"] for x in found["attempts"]] == [0, None]


def test_a_refreshed_run_stays_at_its_attempt(tmp_path):
    write_run(tmp_path, tensors=2, steps=20)
    run = read_run(tmp_path, attempt=1)
    write_run(tmp_path, tensors=2, steps=5, seed=1)

    assert run.refresh()
    assert len(run.steps) == 20
    assert [x.number for x in run.attempts] == [1, 2]
