"""Writing the run record: what is lost, and what is not, when one of its files cannot be written."""

from __future__ import annotations

import inspect
import logging
import math
import shutil
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from torch import nn

import gradiometer as gm
from gradiometer.columns import TENSORS
from gradiometer.runs import RunError, parquet, read_run, writer
from gradiometer.runs.directory import is_at
from gradiometer.runs.format import fields_of
from gradiometer.runs.journal import list_journals
from gradiometer.runs.writer import RunRecord
from support.findings import finding
from support.synthetic_run import make_catalog, make_records, open_run, same_records, steps_of, write_run

pytest.importorskip("pyarrow")
CATALOG = make_catalog(3)


@pytest.mark.parametrize("name", ["findings", "run"])
@pytest.mark.parametrize("seconds", [math.inf, 0])
def test_a_json_file_that_cannot_be_written_holds_up_no_step(tmp_path, full, name, seconds):
    records = list(make_records(CATALOG, 25))
    sink = open_run(tmp_path, CATALOG, segment_steps=10, segment_seconds=seconds)
    full.add(name)
    errors = 0
    for record in records:
        try:
            sink.write([record], [finding(record.step)])
        except OSError as error:
            assert error.filename == str(tmp_path / f"{name}.json")  # noqa: PT017 most calls pause
            errors += 1
    assert errors >= 1
    assert steps_of(tmp_path) == list(range(25))
    # full segments are closed
    assert len(sink._segment) == 5
    assert len(list((tmp_path / "steps").iterdir())) == (3 if seconds == 0 else 2)
    # the other JSON file is up to date
    assert len(read_run(tmp_path).findings) == (0 if name == "findings" else 25 if seconds == 0 else 20)
    full.clear()
    sink.close()
    run = read_run(tmp_path)
    assert run.steps["step"].to_pylist() == list(range(25))
    assert (len(run.findings), run.info["closed"], sink.lost) == (25, True, 0)


def test_a_segment_that_cannot_be_written_holds_up_no_finding(tmp_path, full):
    sink = open_run(tmp_path, CATALOG, segment_steps=10)
    full.add("steps")
    with pytest.raises(OSError, match="No space left"):
        sink.write(list(make_records(CATALOG, 12)), [finding()])
    assert read_run(tmp_path).findings == [finding()]
    full.clear()
    sink.close()
    assert steps_of(tmp_path) == list(range(12))


@pytest.mark.parametrize("odd", [None, finding(value={1}), finding(tensor=b"w"), finding(message=object())])
def test_a_finding_that_cannot_be_written_holds_up_neither_steps_nor_the_others(tmp_path, odd):
    sink = open_run(tmp_path, CATALOG, segment_steps=10)
    for record in make_records(CATALOG, 25):
        with pytest.raises(TypeError):
            sink.write([record], [odd, finding()])
    assert len(steps_of(tmp_path)) == 25
    sink.close()
    run = read_run(tmp_path)
    assert run.steps["step"].to_pylist() == list(range(25))
    assert run.findings == [finding()]
    assert (run.info["closed"], sink.lost) == (True, 0)


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records]


@pytest.mark.parametrize("recovers", [True, False])
def test_one_line_says_how_many_steps_were_lost_and_why(tmp_path, full, caplog, recovers):
    sink = open_run(tmp_path, CATALOG, segment_steps=10)
    full.update(("steps", "journal"))
    for record in make_records(CATALOG, 100):
        try:
            sink.write([record], [])
        except OSError:
            assert caplog.text == ""
    if recovers:
        full.clear()
        sink.close()
    else:
        with pytest.raises(OSError, match="No space left"):
            sink.close()
    (line,) = warnings_of(caplog)
    lost = 61 if recovers else 100
    assert line.startswith(f"{tmp_path}: {lost} steps are lost, because they could not be written (OSError: ")
    assert "No space left on device" in line
    assert sink.lost == read_run(tmp_path).info["attempts"][0]["lost"] == lost
    assert steps_of(tmp_path) == (list(range(61, 100)) if recovers else [])


@pytest.mark.parametrize("removed", [".", "steps", "tensors", "*"])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_removed_folder_is_made_again_and_the_run_goes_on(tmp_path, caplog, removed, goes_on):
    run_dir = tmp_path / "run"
    records = list(make_records(CATALOG, 50))
    sink = open_run(run_dir, CATALOG, segment_steps=10)
    sink.write(records[:24], [finding()])
    sink.fault(SimpleNamespace(to_dict=dict))  # writes the open segment, too
    assert steps_of(run_dir) == list(range(24))
    for path in list(run_dir.glob("*")) if removed == "*" else [run_dir / removed]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if goes_on:
        sink.write(records[24:45], [])
        # the lock is held again
        with pytest.raises(RunError, match="is already being written by this process"):
            open_run(run_dir, CATALOG)
        assert is_at(run_dir / ".lock", sink._lock)
        run = read_run(run_dir)
        assert [s for s in run.steps["step"].to_pylist() if s >= 20] == list(range(20, 45))
        assert run.findings == [finding()]
        sink.write(records[45:], [])
    sink.close()
    run = read_run(run_dir)
    left = [step for step in run.steps["step"].to_pylist() if step >= 20]
    assert left == list(range(20, 50 if goes_on else 24))
    assert same_records(run.records(20), records[20 : 50 if goes_on else 24])
    # full segments that were in the folder are gone
    assert sink.lost == run.info["attempts"][0]["lost"] == 20
    assert run.info["closed"]
    (line,) = warnings_of(caplog)
    said = "was removed while the run went on: it is made again, and 20 steps that"
    assert line.startswith(f"{run_dir} {said}")
    open_run(run_dir, CATALOG).close()


def test_a_removed_folder_on_a_full_disk_is_made_again_when_there_is_room(tmp_path, full, caplog):
    run_dir = tmp_path / "run"
    sink = open_run(run_dir, CATALOG, segment_steps=10)
    sink.write(list(make_records(CATALOG, 10)), [])
    shutil.rmtree(run_dir)
    full.add("")
    with pytest.raises(OSError, match="No space left"):
        sink.write(list(make_records(CATALOG, 15, first=10)), [])
    full.clear()
    sink.write(list(make_records(CATALOG, 1, first=25)), [])
    sink.close()
    assert steps_of(run_dir) == list(range(10, 26))
    assert sink.lost == 10
    assert len(warnings_of(caplog)) == 1


# without torch, whose import takes seconds
OTHER = """
import fcntl, os, sys
file = open(sys.argv[1], "a+")
fcntl.lockf(file, fcntl.LOCK_EX)
file.write("another run")
file.flush()
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_removed_folder_that_another_run_has_taken_is_left_to_it(tmp_path):
    run_dir = tmp_path / "run"
    sink = open_run(run_dir, CATALOG, segment_steps=10)
    sink.write(list(make_records(CATALOG, 10)), [])
    shutil.rmtree(run_dir)
    run_dir.mkdir()
    command, pipe = [sys.executable, "-c", OTHER, str(run_dir / ".lock")], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout.readline() == "locked\n"
        (run_dir / "run.json").write_text("its own")
        with pytest.raises(RunError, match="is already being written by another run"):
            sink.write(list(make_records(CATALOG, 10, first=10)), [])
        with pytest.raises(RunError, match="is already being written by another run"):
            sink.close()
    assert sink.lost == 20
    assert (run_dir / "run.json").read_text() == "its own"
    assert not list(run_dir.glob("*/*"))


def test_a_change_of_the_working_directory_moves_no_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sink = open_run("run", CATALOG, segment_steps=10)
    sink.write(list(make_records(CATALOG, 10)), [])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    sink.write(list(make_records(CATALOG, 10, first=10)), [])
    sink.close()
    assert steps_of(tmp_path / "run") == list(range(20))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_steps_that_a_restart_supersedes_are_not_lost_with_the_folder(tmp_path):
    sink = open_run(tmp_path / "run", CATALOG, segment_steps=10)
    sink.write([*make_records(CATALOG, 30), *make_records(CATALOG, 7, first=12)], [])
    shutil.rmtree(tmp_path / "run")
    sink.close()
    assert steps_of(tmp_path / "run") == list(range(12, 19))
    assert sink.lost == 12


# seen from the monitor


def train(monitor, steps):
    for _ in range(steps):
        monitor.record()
        monitor.advance(loss=1.0)
        monitor.flush(60)


def end_of(caplog):
    (record,) = [r for r in caplog.records if " ended: " in r.getMessage()]
    return record.levelno, record.getMessage()


def test_the_end_of_a_run_says_what_was_recorded(tmp_path, caplog):
    caplog.set_level(logging.INFO, "gradiometer")
    with gm.Monitor(nn.Linear(2, 1), run_dir=tmp_path, rules=(), every=2) as monitor:
        train(monitor, 5)
    monitor.close()
    said = "the run ended: 5 steps, 3 of them with tensors; no findings"
    said += f"; gradiometer show {tmp_path}"
    assert end_of(caplog) == (logging.INFO, said)


def test_dropped_counts_steps_that_the_disk_lost_and_the_end_says_so(tmp_path, full, caplog):
    sink = RunRecord(tmp_path, fsync=False, segment_steps=2)
    with gm.Monitor(nn.Linear(2, 1), sinks=[sink], rules=()) as monitor:
        train(monitor, 2)
        full.update(("steps", "tensors", "journal"))
        train(monitor, 20)
        # more than four segments wait for the disk
        assert monitor.dropped == sink.lost == 13
        full.clear()
    assert monitor.dropped == sink.lost == 13
    run = read_run(tmp_path)
    assert run.steps["step"].to_pylist() == [0, 1, *range(15, 22)]
    failed = monitor.failures["sink RunRecord"]
    said = (
        "the run ended: 22 steps, 22 of them with tensors; no findings; dropped: 13 steps; "
        f"failures: sink RunRecord ({failed}); gradiometer show {tmp_path}"
    )
    assert end_of(caplog) == (logging.WARNING, said)
    assert caplog.text.count("13 steps are lost, because they could not be written (OSError") == 1
    # the first failure, the loss, the end
    assert len(warnings_of(caplog)) == 3


def test_a_run_goes_on_in_a_monitor_whose_folder_was_removed(tmp_path):
    sink = RunRecord(tmp_path / "run", fsync=False, segment_steps=2)
    with gm.Monitor(nn.Linear(2, 1), sinks=[sink], rules=()) as monitor:
        train(monitor, 5)
        shutil.rmtree(tmp_path / "run")
        train(monitor, 3)
        assert read_run(tmp_path / "run").steps["step"].to_pylist() == [4, 5, 6, 7]
    assert (monitor.dropped, monitor.failures) == (4, {})


def test_steps_of_a_run_that_cannot_be_opened_are_dropped(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with gm.Monitor(nn.Linear(2, 1), run_dir=tmp_path / "file", rules=()) as monitor:
        train(monitor, 4)
    assert monitor.dropped == 4
    said = "the run ended: 4 steps, 4 of them with tensors; no findings; dropped: 4 steps; "
    said += f"failures: sink RunRecord (1); gradiometer show {tmp_path / 'file'}"
    assert end_of(caplog) == (logging.WARNING, said)


class Slow:
    """A rule that does not return until it may."""

    name = "slow"

    def __init__(self):
        self.go = threading.Event()

    def check(self, record):
        assert self.go.wait(60)
        return [finding(record.step, rule="slow")]

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_a_slow_rule_holds_up_no_step_of_the_run_record(tmp_path):
    rule = Slow()
    with gm.Monitor(nn.Linear(2, 1), run_dir=tmp_path, rules=[rule]) as monitor:
        for _ in range(20):
            monitor.record()
            monitor.advance(loss=1.0)
        monitor.flush(0.1)
        end = time.monotonic() + 60
        while time.monotonic() < end and not (list_journals(tmp_path) and len(steps_of(tmp_path)) == 20):
            time.sleep(0.01)
        assert steps_of(tmp_path) == list(range(20))
        assert read_run(tmp_path).findings == []
        rule.go.set()
    (found,) = read_run(tmp_path).findings
    assert (found.rule, found.first_step, found.last_step) == ("slow", 0, 19)


def test_the_report_of_a_fault_is_written_when_the_disk_works_again(tmp_path, full):
    sink = open_run(tmp_path, CATALOG, segment_seconds=0)
    full.add("blackbox")
    with pytest.raises(OSError, match="No space left"):
        sink.fault(SimpleNamespace(to_dict=lambda: {"reason": "exception"}))
    assert read_run(tmp_path).blackbox is None
    full.clear()
    sink.write(list(make_records(CATALOG, 1)), [])
    assert read_run(tmp_path).blackbox == {"reason": "exception", "attempt": 1}
    sink.close()


def test_a_run_with_a_damaged_run_json_goes_on_with_a_new_one(tmp_path, caplog):
    path = write_run(tmp_path, 3, 5) / "run.json"
    damaged = path.read_bytes()[:-9]
    path.write_bytes(damaged)
    with pytest.raises(RunError, match=r"run.json cannot be read \(.*\): restore it from a copy, or set its"):
        read_run(tmp_path)
    write_run(tmp_path, 3, 3, first=5)
    (kept,) = tmp_path.glob("run-damaged-*.json")
    assert kept.read_bytes() == damaged
    assert f"It is now {kept.name}, and the run goes on with a new one" in caplog.text
    assert steps_of(tmp_path) == list(range(8))


@pytest.mark.parametrize("table", ["steps", "both"])
def test_rows_that_a_missing_segment_superseded_do_not_come_back(tmp_path, table):
    for first, steps in ((0, 10), (5, 3)):
        write_run(tmp_path, 3, steps, first=first)
    for name in ("steps", "tensors") if table == "both" else ("steps",):
        (tmp_path / name / f"{name}-0002-0000000005.parquet").unlink()
    assert steps_of(tmp_path) == list(range(5))


def test_what_waited_for_the_disk_can_be_read_however_well_it_compresses():
    # up to four full segments are one file then; a row counts 8 bytes for each column
    rows = inspect.signature(RunRecord).parameters["segment_rows"].default
    assert writer._WAITING * rows * 8 * len(fields_of(TENSORS, fingerprints=True)) <= parquet._LARGEST
