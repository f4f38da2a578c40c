"""Writing the run record: the files on disk after faults of every kind."""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice, pairwise
from types import SimpleNamespace

import pytest
import torch

from gradiometer.columns import TENSORS
from gradiometer.recorder import Catalog, StepRecord
from gradiometer.rules.finding import Finding, Severity
from gradiometer.runs import RunError, read_run, verify
from gradiometer.runs.format import arrow_schema, fields_of, step_fields
from gradiometer.runs.writer import RunRecord
from support.findings import finding
from support.processes import PATH, python
from support.synthetic_run import (
    STARTED,
    make_catalog,
    make_records,
    make_table,
    open_run,
    same_bits,
    same_records,
    steps_of,
    write_each,
    write_records,
    write_run,
)

pq = pytest.importorskip("pyarrow.parquet")

# names that cause trouble elsewhere
NAMES = ["a.b/c", "<b>&amp;</b>", 'quo"te\n', "größe.重み.🔥", "", "NaN", "x" * 300]


def steps_in_parquet(path):
    return sum(pq.read_metadata(file).num_rows for file in (path / "steps").iterdir())


@pytest.mark.parametrize("kinds", [("grads",), ("grads", "weights"), ("grads", "updates")])
@pytest.mark.parametrize("every", [1, 3])
def test_what_is_read_is_what_was_written(tmp_path, kinds, every):
    names = [*NAMES, *(f"w{i}" for i in range(10))]
    path = write_run(tmp_path, 0, 40, names=names, kinds=kinds, every=every, nonfinite_at=9, segment_steps=17)
    catalog = make_catalog(names=names, kinds=kinds)
    run = read_run(path)
    assert run.catalog == catalog
    assert run.info["every"] == every
    assert run.info["closed"]
    assert run.info["created"] == run.info["attempts"][0]["started"] == STARTED
    assert run.info["attempts"][0]["ended"] > STARTED
    assert same_records(run.records(), make_records(catalog, 40, every=every, nonfinite_at=9))
    assert len(list((path / "tensors").iterdir())) == len(list((path / "steps").iterdir())) == 3


def test_every_number_survives_and_what_was_not_measured_is_zero(tmp_path):
    catalog = make_catalog(6, kinds=("grads", "weights"))
    extremes = torch.tensor([0.0, -0.0, 5e-324, 1.7e308, math.inf, math.nan], dtype=torch.float64)
    values = torch.zeros(6, TENSORS.width, dtype=torch.float64)
    values[:, 0] = torch.tensor([1.0, 2.0**53, 0.0, 3.0, 0.0, 7.0])
    for name in ("sumsq", "sum", "abs_max"):
        values[:, TENSORS.index[name]] = extremes.roll(len(name))
    flags = torch.full((6,), 31, dtype=torch.int32)
    tables, nothing = [
        {kind: make_table(catalog, x, kind, flags=flags) for kind in catalog.kinds}
        for x in (values, torch.zeros_like(values))
    ]
    scalars = {"loss": math.nan, "lr": -math.inf, "tokens/s": 1e300, "": 0.0}
    records = [
        StepRecord(2**40, 1.5, scalars, catalog, tables),
        StepRecord(2**40 + 7, 2.5, {}, catalog, nothing),
        StepRecord(2**40 + 8, 3.5, {"é": math.inf}, catalog, skipped=True),
    ]
    write_records(tmp_path, catalog, records)
    values[values[:, 0] == 0] = 0.0
    flags[values[:, 0] == 0] = 0
    run = read_run(tmp_path)
    first, second, third = run.records()
    assert same_bits(first, records[0])
    assert not second.flags().any()
    assert same_bits(replace(second, tables=nothing), records[1])
    assert same_bits(third, records[2])
    # NaN and null differ
    assert repr(run.steps["loss"].to_pylist()) == "[nan, None, None]"
    assert run.steps["n_measured"].to_pylist() == [4, 0, None]
    assert run.steps["total_norm"].to_pylist()[1:] == [0.0, None]
    assert run.tensors().num_rows == 8


def test_totals_of_a_step_are_those_of_its_record(tmp_path):
    run = read_run(write_run(tmp_path, 12, 20, kinds=("grads", "weights"), nonfinite_at=7))
    for row, record in zip(run.steps.to_pylist(), run.records(), strict=True):
        norms = [row[name] for name in ("total_norm", "weights_norm", "update_ratio")]
        assert repr(norms) == repr([record.total(), record.total("norm", "weights"), None])
        for name in ("finite_norm", "abs_max", "numel", "n_zero", "n_nan", "n_inf"):
            assert row[name] == record.total(name)
        assert row["n_flagged"] == (record.flags() != 0).sum()
    assert run.steps["n_nan"].to_pylist()[7] == 3


def test_all_segments_have_the_documented_schema(tmp_path):
    path = write_run(tmp_path, 3, 10, segment_steps=4, every=5)
    write_run(tmp_path, 900, 4, first=10, kinds=("grads", "weights"))
    catalogs = [make_catalog(3)] * 3 + [make_catalog(900, ("grads", "weights"))]
    files = sorted((path / "steps").iterdir())
    for file, catalog in zip(files, catalogs, strict=True):
        assert pq.read_schema(file).equals(arrow_schema(step_fields(catalog)))
    # a segment without tensors has no file of them
    for file in (path / "tensors").iterdir():
        assert pq.read_schema(file).equals(arrow_schema(fields_of(TENSORS)))
    assert read_run(path).steps.column_names == arrow_schema(step_fields(catalogs[-1])).names


def test_a_segment_is_full_by_steps_or_by_rows_and_grows_until_then(tmp_path):
    def sizes(name, **options):
        catalog = make_catalog(10)
        sink = open_run(tmp_path / name, catalog, **options)
        seen = []
        for record in make_records(catalog, 25):
            sink.write([record], [])
            seen.append(steps_in_parquet(tmp_path / name))
            assert steps_of(tmp_path / name) == list(range(len(seen)))
        sink.close()
        counts = [pq.read_metadata(p).num_rows for p in sorted((tmp_path / name / "steps").iterdir())]
        return seen, counts

    assert sizes("steps", segment_steps=10) == ([0] * 9 + [10] * 10 + [20] * 6, [10, 10, 5])
    assert sizes("rows", segment_rows=80)[1] == [8, 8, 8, 1]
    # each step is written at once, and there are still three files
    assert sizes("seconds", segment_steps=10, segment_seconds=0) == (list(range(1, 26)), [10, 10, 5])


def test_steps_wait_no_longer_than_the_seconds_that_were_given(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    catalog = make_catalog(3)
    sink = open_run(tmp_path, catalog, segment_seconds=10)
    seen = []
    for record in make_records(catalog, 8):
        now[0] += 4
        sink.write([record], [])
        seen.append(steps_in_parquet(tmp_path))
        assert len(steps_of(tmp_path)) == len(seen)
    assert seen == [0, 0, 3, 3, 3, 6, 6, 6]
    now[0] += 4
    sink.write([], [])  # no steps, but time has passed
    assert steps_in_parquet(tmp_path) == 8
    sink.close()


WRITER = """
import math, os, sys
from support.synthetic_run import *
catalog = make_catalog(30)
sink = RunRecord(sys.argv[1], segment_steps=7, segment_seconds=math.inf, fsync=False)
sink.start(make_info(catalog, int(sys.argv[2])))
print("started", flush=True)
for record in make_records(catalog, 10**6, first=int(sys.argv[2]), batch=7):
    sink.write([record], [])
    print(record.step, flush=True)
"""


def start_writer(path, first=0):
    command = [sys.executable, "-c", WRITER, str(path), str(first)]
    return subprocess.Popen(command, env=os.environ | PATH, stdout=subprocess.PIPE, text=True)


def test_a_killed_writer_leaves_whole_segments_and_its_lock_is_taken_over(tmp_path):
    first = 0
    for _ in range(2):
        with start_writer(tmp_path, first) as writer:
            lines = [writer.stdout.readline() for _ in range(40)]
            assert lines[0] == "started\n", lines
            with pytest.raises(
                RunError,
                match=f"is already being written by process {writer.pid} on .*: end that process, or",
            ):
                open_run(tmp_path, make_catalog(30))
            writer.send_signal(signal.SIGKILL)
            done = int([*lines, *writer.stdout][-1])
        run = read_run(tmp_path)
        steps = run.steps["step"].to_pylist()
        assert steps == list(range(len(steps)))
        # nothing that was written is missing
        assert done <= steps[-1] <= done + 1
        written = make_records(run.catalog, len(steps) - first + 7, first=first, batch=7)
        assert same_records(run.records(first), islice(written, len(steps) - first))
        first = len(steps)
    (tmp_path / ".steps-0001-0000000000.parquet.77.tmp").write_bytes(b"PAR1")
    sink = open_run(tmp_path, run.catalog, first)
    assert not list(tmp_path.glob(".*.tmp"))
    sink.close()
    assert [entry["ended"] is None for entry in read_run(tmp_path).info["attempts"]] == [True, True, False]


def test_two_writers_in_one_process_are_refused(tmp_path):
    catalog = make_catalog(2)
    sink = open_run(tmp_path / "run", catalog)
    said = "run is already being written by this process: close that Monitor, or"
    with pytest.raises(RunError, match=said):
        open_run(tmp_path / "run", catalog)
    with pytest.raises(RunError, match="already"):
        open_run(tmp_path / "x" / ".." / "run", catalog)
    sink.close()
    sink.close()
    open_run(tmp_path / "run", catalog).close()
    # a writer that was dropped without closing it
    sink = open_run(tmp_path / "run", catalog)
    del sink
    gc.collect()
    open_run(tmp_path / "run", catalog).close()


@pytest.fixture
def small_disk():
    """Limit the size of files, to simulate a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))

    yield limit
    limit(None)
    signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("saved", [0, 6])
def test_a_disk_that_fails_costs_nothing_if_it_recovers(tmp_path, small_disk, saved):
    catalog = make_catalog(50)
    records = list(make_records(catalog, 35))
    sink = open_run(tmp_path, catalog, segment_steps=10)
    sink.write(records[:saved], [])
    sink.fault(SimpleNamespace(to_dict=dict))
    files = sorted(tmp_path.rglob("*"))
    small_disk(5000)
    with pytest.raises(OSError, match="File too large"):
        sink.write(records[saved:12], [finding(5, value=math.nan, threshold=math.inf)])
    with pytest.raises(OSError, match="File too large"):
        sink.write(records[12:13], [])
    sink.write(records[13:30], [])  # a pause between tries: it neither writes nor raises
    # a segment is too large for this disk, and the findings are not
    assert sorted(tmp_path.rglob("*")) == sorted([*files, tmp_path / "findings.json"])
    assert len(steps_of(tmp_path)) == saved
    small_disk(None)
    sink.write(records[30:], [])
    assert len(steps_of(tmp_path)) == saved
    sink.close()
    run = read_run(tmp_path)
    assert same_records(run.records(), records)
    assert len(run.findings) == 1
    assert sink.lost == run.info["attempts"][0]["lost"] == 0


@pytest.mark.parametrize("saved", [0, 6])
@pytest.mark.parametrize("total", [42, 100])
def test_a_disk_that_fails_for_long_loses_the_oldest_and_counts_them(tmp_path, small_disk, saved, total):
    catalog = make_catalog(50)
    records = list(make_records(catalog, total))
    sink = open_run(tmp_path, catalog, segment_steps=10)
    sink.write(records[:saved], [])
    sink.fault(SimpleNamespace(to_dict=dict))
    small_disk(5000)
    assert write_each(sink, records[saved:])
    small_disk(None)
    sink.close()
    left = steps_of(tmp_path)
    assert left == [*range(saved), *range(max(saved, total - 39), total)]
    assert sink.lost == total - len(left) == read_run(tmp_path).info["attempts"][0]["lost"]
    # and no step is there twice
    assert steps_in_parquet(tmp_path) == len(left)


@pytest.mark.parametrize("journaled", [12, 0])
def test_what_cannot_be_written_at_the_end_is_counted_and_the_folder_is_free(tmp_path, small_disk, journaled):
    catalog = make_catalog(50)
    records = list(make_records(catalog, 20))
    sink = open_run(tmp_path, catalog)
    sink.write(records[:journaled], [])
    small_disk(5000)
    with pytest.raises(OSError, match="too large"):
        sink.write(records[journaled:], [])
    with pytest.raises(OSError, match="too large"):
        sink.close()
    small_disk(None)
    assert sink.lost == 20 - journaled
    run = read_run(tmp_path)
    assert run.info["attempts"][0]["lost"] == 20 - journaled
    assert same_records(run.records(), records[:journaled])
    # what is in the journal gets into Parquet files
    open_run(tmp_path, catalog, 20).close()
    assert steps_in_parquet(tmp_path) == journaled
    assert same_records(read_run(tmp_path).records(), records[:journaled])


def test_the_pauses_between_tries_grow(tmp_path, full, monkeypatch):
    now, tries = [time.monotonic()], []
    catalog = make_catalog(3)
    sink = open_run(tmp_path, catalog, segment_seconds=0)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    full.add("tensors")
    for record in make_records(catalog, 200):
        try:
            sink.write([record], [])
        except OSError:
            tries.append(now[0])
        now[0] += 1
    gaps = [round(b - a) for a, b in pairwise(tries)]
    assert gaps == [1, 1, 2, 4, 8, 16, 32, 60, 60]
    full.clear()
    sink.close()
    assert len(steps_of(tmp_path)) == 200


def test_a_step_that_cannot_be_written_stops_no_other(tmp_path):
    catalog = make_catalog(3)
    records = list(make_records(catalog, 5))
    other = Catalog.of(("b",), ((),), ("float32",))
    bad = StepRecord(2, 0.0, {}, other)
    sink = open_run(tmp_path, catalog)
    with pytest.raises(ValueError, match="step 2 has other tensors than the run was started with"):
        sink.write([*records[:2], bad, *records[3:]], [finding(5)])
    sink.close()
    assert steps_of(tmp_path) == [0, 1, 3, 4]
    assert (sink.lost, len(read_run(tmp_path).findings)) == (1, 1)


def test_a_later_attempt_supersedes_from_its_first_step_on(tmp_path):
    catalog = make_catalog(4)
    write_run(tmp_path, 4, 30, segment_steps=8, findings=[finding(3), finding(20, last_step=29)])
    begun = open_run(tmp_path, catalog, 10)
    # an attempt without steps supersedes nothing
    assert len(steps_of(tmp_path)) == 30
    assert not read_run(tmp_path).info["closed"]
    begun.close()
    write_run(tmp_path, 4, 10, first=12, seed=1, findings=[finding(15)])
    run = read_run(tmp_path)
    assert run.steps["step"].to_pylist() == list(range(22))
    assert run.steps["attempt"].to_pylist() == [1] * 12 + [3] * 10
    assert [found.first_step for found in run.findings] == [3, 15]
    assert same_records(run.records(12), make_records(catalog, 10, first=12, seed=1))
    assert [entry["first_step"] for entry in run.info["attempts"]] == [0, 10, 12]
    steps, norms = run.matrix("norm", first=9, last=14)
    assert steps == list(range(9, 15))
    assert norms[0].tolist() == run.record(9).value("norm").tolist()
    assert set(run.tensors(columns=["step", "attempt"]).to_pandas().itertuples(index=False, name=None)) == {
        (step, 1 if step < 12 else 3) for step in range(22)
    }
    # back beyond the start of the previous attempt
    write_run(tmp_path, 4, 1, first=5)
    assert steps_of(tmp_path) == list(range(6))
    # no file was deleted
    assert sum(pq.read_metadata(p).num_rows for p in (tmp_path / "steps").iterdir()) == 41


def test_going_back_in_one_process_is_another_attempt(tmp_path):
    catalog = make_catalog(4)
    sink = open_run(tmp_path, catalog)
    sink.write([*make_records(catalog, 20), *make_records(catalog, 5, first=8, seed=1)], [])
    sink.close()
    run = read_run(tmp_path)
    assert run.steps["step"].to_pylist() == list(range(13))
    assert same_records(run.records(8), make_records(catalog, 5, first=8, seed=1))
    assert [(e["attempt"], e["first_step"]) for e in run.info["attempts"]] == [(1, 0), (2, 8)]


@pytest.mark.parametrize("journal", [True, False])
def test_going_back_while_the_disk_fails_is_another_attempt_all_the_same(tmp_path, full, journal):
    catalog = make_catalog(4)
    sink = open_run(tmp_path, catalog, segment_steps=10)
    full |= set() if journal else {"journal-0001-0000000010.bin"}
    with nullcontext() if journal else pytest.raises(OSError, match="No space left"):
        sink.write(list(make_records(catalog, 15)), [])
    again = list(make_records(catalog, 9, first=5, seed=1))
    full.add("")
    with pytest.raises(OSError, match="No space left"):
        sink.write(again[:1], [])
    full.clear()
    sink.write(again[1:], [])
    sink.close()
    run = read_run(tmp_path)
    # the step that was written with the failure is kept; the steps that waited are superseded, and are lost
    # if they were not in the journal
    assert run.steps["step"].to_pylist() == list(range(14))
    assert same_records(run.records(5), again)
    assert [(e["attempt"], e["first_step"]) for e in run.info["attempts"]] == [(1, 0), (2, 5)]
    assert sink.lost == run.info["attempts"][1]["lost"] == (0 if journal else 5)
    assert verify(tmp_path).whole
    open_run(tmp_path, catalog, 14).close()
    assert steps_in_parquet(tmp_path) == 10 + 9 + (5 if journal else 0)
    assert same_records(read_run(tmp_path).records(5), again)


def test_run_json_is_written_again_if_it_failed(tmp_path, full):
    write_run(tmp_path, 4, 20)
    catalog = make_catalog(4)
    sink = open_run(tmp_path, catalog, 9)
    sink.write(list(make_records(catalog, 1, first=12)), [])
    full.add("run.json")
    with pytest.raises(OSError, match="No space left"):
        sink.fault(SimpleNamespace(to_dict=dict))
    full.clear()
    assert [e["first_step"] for e in read_run(tmp_path).info["attempts"]] == [0, 9]
    sink.fault(SimpleNamespace(to_dict=dict))  # no step has come since
    assert [e["first_step"] for e in read_run(tmp_path).info["attempts"]] == [0, 12]
    sink.close()


def test_a_disk_that_is_full_at_the_start_leaves_the_folder_free(tmp_path, full):
    full.add("")
    with pytest.raises(OSError, match="No space left"):
        open_run(tmp_path, make_catalog(2))
    full.clear()
    open_run(tmp_path, make_catalog(2)).close()


def test_a_file_where_the_folder_should_be_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RunError, match=r"cannot be created, because .*: pass another run_dir"):
            open_run(path, make_catalog(2))


def test_half_of_a_surrogate_pair_is_written_by_its_number(tmp_path):
    catalog = make_catalog(names=["w\ud800", "b"])
    found = Finding("dead", Severity.INFO, 1, 1, "grads", "w\ud800", 1.0, 1.0, "w\ud800 is dead", "")
    for first in (0, 3):
        sink = open_run(tmp_path, catalog, first)
        record = next(make_records(catalog, 1, first=first))
        sink.write([replace(record, scalars={"x\udfff": 1.0})], [found])
        sink.close()
    run = read_run(tmp_path)
    assert run.catalog.names == (r"w\ud800", "b")
    assert run.matrix("norm")[1].isfinite().all()
    assert [dict(record.scalars) for record in run.records()] == [{r"x\udfff": 1.0}] * 2
    assert run.findings[0].tensor in run.catalog.names


def test_a_run_gone_on_with_other_tensors_has_both(tmp_path):
    write_run(tmp_path, 2, 10)
    write_run(tmp_path, 0, 5, first=10, names=["new", "blocks.0.bias"], kinds=("grads", "weights"))
    run = read_run(tmp_path)
    assert run.catalog.names == ("new", "blocks.0.bias", "blocks.0.weight")
    assert [*run.catalog.kinds] == ["grads", "weights"]
    steps, numel = run.matrix("numel")
    assert steps == list(range(15))
    assert numel.isnan().tolist() == [[True, False, False]] * 10 + [[False, False, True]] * 5
    assert [r.measured("weights").tolist() for r in run.records(9, 10)] == [[False] * 3, [True, True, False]]
    # an attempt that starts from step 0 has only its own tensors
    write_run(tmp_path, 3, 5)
    assert read_run(tmp_path).catalog == make_catalog(3)


def test_a_fault_is_on_disk_with_all_before_it(tmp_path):
    catalog = make_catalog(4)
    sink = open_run(tmp_path, catalog)
    found = finding(5, last_step=9, value=math.nan, threshold=math.inf)
    sink.write(list(make_records(catalog, 9)), [finding(5), found])
    report = {"reason": "non-finite loss", "last": [{"loss": math.nan, "norm": -math.inf}], "step": 8}
    sink.fault(SimpleNamespace(to_dict=lambda: report))
    run = read_run(tmp_path)  # the writer was not closed
    assert len(run.steps) == 9
    assert repr(run.blackbox) == repr(report | {"attempt": 1})
    assert repr(run.findings) == repr([found])
    for name in ("findings", "blackbox", "run"):

        def refuse(constant):
            raise AssertionError(constant)

        json.loads((tmp_path / f"{name}.json").read_text(), parse_constant=refuse)
    sink.close()


@pytest.mark.parametrize("fsync", [True, False])
def test_files_are_synced_before_they_are_put_in_place_if_asked(tmp_path, monkeypatch, fsync):
    events = []
    real_sync, real_replace = os.fsync, type(tmp_path).replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append("sync"), real_sync(fd)))
    monkeypatch.setattr(
        type(tmp_path),
        "replace",
        lambda path, target: (events.append(f"put {target.name[:5]}"), real_replace(path, target)),
    )
    catalog = make_catalog(4)
    sink = open_run(tmp_path, catalog, fsync=fsync)
    events.clear()
    sink.write(list(make_records(catalog, 9)), [])
    sink.fault(SimpleNamespace(to_dict=dict))
    puts = ["put tenso", "put steps", "put run.j", "put black"]
    synced = "sync sync put-tenso sync put-steps sync sync put-run.j sync sync put-black sync"
    assert events == ([word.replace("-", " ") for word in synced.split()] if fsync else puts)
    sink.close()


def test_nothing_of_it_needs_numpy(tmp_path):
    code = """
import sys, warnings
warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch says so of itself
sys.modules["numpy"] = None
from support.synthetic_run import *
from gradiometer.runs.reader import read_run
run = read_run(write_run(sys.argv[1], 5, 20, kinds=("grads", "weights"), segment_steps=8))
print(len(run.steps), run.matrix("rms")[1].shape, run.tensors().num_rows, len(list(run.records())))
"""
    done = python("-X", "faulthandler", "-c", code, tmp_path)
    assert (done.returncode, done.stdout) == (0, "20 torch.Size([20, 5]) 200 20\n"), done.stderr


def test_without_pyarrow_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for use in (lambda: RunRecord(tmp_path), lambda: read_run(tmp_path)):
        with pytest.raises(ImportError, match=r"A run record needs pyarrow, .*'gradiometer\[monitor\]'"):
            use()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"segment_steps": 0}, "segment_steps=0.: segment_steps must be a positive integer"),
        ({"segment_rows": 1.5}, "segment_rows=1.5.: segment_rows must be a positive integer"),
        ({"segment_seconds": math.nan}, "segment_seconds=nan.: segment_seconds must be a number >= 0"),
        ({"segment_seconds": -1}, "segment_seconds=-1"),
    ],
)
def test_numbers_out_of_range_are_refused(tmp_path, option, said):
    with pytest.raises(ValueError, match=said):
        RunRecord(tmp_path, **option)


def test_a_folder_with_something_else_in_it_is_not_touched(tmp_path):
    (tmp_path / "run.json").write_text('{"other": 1}')
    with pytest.raises(RunError, match="does not have the format gradiometer-run"):
        open_run(tmp_path, make_catalog(2))
    (tmp_path / "run.json").unlink()
    open_run(tmp_path, make_catalog(2)).close()


def test_ten_thousand_names_are_stored_once(tmp_path):
    names = [f"model.layers.{i}.self_attention.projection.weight" for i in range(10_000)]
    path = write_run(tmp_path, 0, 6, names=names)
    run = read_run(path)
    assert run.catalog.names == tuple(names)
    (file,) = (path / "tensors").iterdir()
    column = pq.ParquetFile(file).metadata.row_group(0).column(3)
    assert column.path_in_schema == "name"
    assert column.total_uncompressed_size < 2 * sum(map(len, names))  # of 60 thousand rows
    assert run.tensors(names=names[7:8], columns=["name", "step"])["name"].to_pylist() == names[7:8] * 6


def test_what_it_costs_is_printed(tmp_path, monkeypatch, capsys):
    pytest.importorskip("rich")
    from kernels_bench.monitoring import run_record as bench

    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(bench.pa, "set_cpu_count", lambda _: None)
    out = tmp_path / "out.json"
    sizes = ["--tensors", "4", "--steps", "50", "--trained-steps", "3", "--seconds", "0.2"]
    monkeypatch.setattr(sys, "argv", ["run_record", *sizes, "--json", str(out)])
    bench.main()
    result = json.loads(out.read_text())
    assert result["made_up"]["rows_per_step"] == 4
    assert result["trained"]["steps"] == 3
    assert f"{result['made_up']['bytes_per_row']:.1f}" in capsys.readouterr().out
    assert bench.over(result | {"share": 0.6, "read_s": {"matrix_norm": 1.9}}, 5_000_000) == ["share"]
    assert bench.over(result | {"share": 0.1, "read_s": {"matrix_norm": 1.9}}, 4_000_000) == ["matrix_norm"]


def test_writing_keeps_up_with_a_thousand_tensors(tmp_path):
    # 50 steps/s take 4 % of a core (kernels_bench.monitoring.run_record); this fails above a whole core
    catalog = make_catalog(1000)
    records = list(make_records(catalog, 300))
    sink = open_run(tmp_path, catalog, segment_steps=150)
    began = time.thread_time()
    for record in records:
        sink.write([record], [])
    assert time.thread_time() - began < len(records) / 50
    sink.close()
    size = sum(file.stat().st_size for file in (tmp_path / "tensors").iterdir())
    assert size < 40 * 1000 * len(records)


def test_a_run_that_hides_an_earlier_one_says_so(tmp_path, caplog):
    write_run(tmp_path, tensors=2, steps=5)
    assert caplog.text == ""
    write_run(tmp_path, tensors=2, steps=3)
    assert "holds an earlier run; this one is attempt 2 in the folder. Nothing is deleted" in caplog.text
    assert read_run(tmp_path).steps.num_rows == 3
