"""Histograms of exponents in the run record: on disk as they were, checked, and read back."""

from __future__ import annotations

import math
import shutil
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

pytest.importorskip("pyarrow")
import pyarrow as pa
import pyarrow.parquet as pq

import gradiometer as gm
from gradiometer.columns import NUM_EXPONENT_COLUMNS
from gradiometer.recorder import StepExponents
from gradiometer.runs import RunRecord, exponents, verify
from gradiometer.runs.format import EXPONENTS
from gradiometer.runs.journal import JournalWriter, journal_path, read_journal
from support.synthetic_run import as_without_digests, fail_writes, make_info, make_records, make_roster

KINDS = ("grads", "weights")


def counts_of(step, tensors=4, kinds=2):
    """Histograms that depend on the step: some tensors have only zeros, only NaN, or nothing."""
    g = torch.Generator().manual_seed(step)
    counts = torch.zeros(kinds, tensors, NUM_EXPONENT_COLUMNS, dtype=torch.int64)
    for k in range(kinds):
        place = int(torch.randint(1, 900, (), generator=g))
        counts[k, 0, place : place + 40] = torch.randint(0, 5, (40,), generator=g)
        counts[k, 0, place] = 2**40
        counts[k, 1, 0] = 17
        counts[k, 2, -1], counts[k, 2, -2] = 3, 2
    # the first and the last bin
    counts[0, 0, 1] = counts[0, 0, -3] = 1
    return counts


def records_of(roster, steps, *, first=0, precision=3, every=2):
    names = roster.names
    for record in make_records(roster, steps, first=first, every=every):
        if record.step % precision:
            yield record
        else:
            found = StepExponents(KINDS, names, counts_of(record.step))
            yield replace(record, exponents=found)


def write(path, steps=10, *, first=0, close=True, **options):
    """Write a run; with ``close=None``, leave it as a live process does after it has written its files."""
    roster = make_roster(4, KINDS)
    sink = RunRecord(path, **({"segment_seconds": math.inf, "fsync": False} | options))
    sink.start(make_info(roster, first, every=2, precision=3))
    for record in records_of(roster, steps, first=first):
        sink.write([record], [])
    if close:
        sink.close()
    elif close is None:
        sink._flush(now=True)
        sink._free()
    else:
        sink._free()
    return path


def check(run, steps):
    assert run.precision_steps == steps
    for step in steps:
        for k, kind in enumerate(KINDS):
            found, expected = run.precision(step, kind).stats, counts_of(step)[k, :3]
            assert found.names == run.roster.names[:3], "the fourth tensor was not measured"
            assert torch.equal(found.columns, expected)


def file_of(path, table="exponents"):
    (file,) = sorted((path / table).glob("*.parquet"))
    return file


def test_they_come_back_as_they_were(tmp_path):
    run = gm.read_run(write(tmp_path))
    check(run, [0, 3, 6, 9])
    assert [step for step, _ in run.precisions("weights", first=3, last=6)] == [3, 6]
    assert run.precision().step == 9
    # also of steps without tensors
    assert run.steps["recorded"].to_pylist()[3] is False
    assert verify(tmp_path).whole


def test_small_segments_and_a_killed_writer(tmp_path):
    write(tmp_path / "small", segment_steps=4)
    assert len(list((tmp_path / "small/exponents").glob("*.parquet"))) == 3
    check(gm.read_run(tmp_path / "small"), [0, 3, 6, 9])
    # a histogram counts as many rows, so that a segment stays small
    write(tmp_path / "rows", segment_rows=200)
    assert len(list((tmp_path / "rows/exponents").glob("*.parquet"))) > 1
    check(gm.read_run(tmp_path / "rows"), [0, 3, 6, 9])
    write(tmp_path / "killed", close=False, segment_steps=7, segment_seconds=1e9)
    assert list((tmp_path / "killed").glob("journal-*.bin"))
    check(gm.read_run(tmp_path / "killed"), [0, 3, 6, 9])
    write(tmp_path / "killed", 5, first=8)
    check(gm.read_run(tmp_path / "killed"), [0, 3, 6, 9, 12])
    assert verify(tmp_path / "killed").whole


def test_what_a_failing_disk_drops_goes_together(tmp_path, monkeypatch):
    roster = make_roster(4, KINDS)
    sink = RunRecord(tmp_path, segment_steps=2, segment_seconds=math.inf, fsync=False)
    sink.start(make_info(roster, precision=3))
    with monkeypatch.context() as patch:
        fail_writes(patch, lambda _: (_ for _ in ()).throw(OSError("disk full")))
        for record in records_of(roster, 13):
            with suppress(OSError):
                sink.write([record], [])
    sink.close()
    run = gm.read_run(tmp_path)
    left = run.steps["step"].to_pylist()
    assert 0 < len(left) < 13
    check(run, [step for step in (0, 3, 6, 9, 12) if step in left])
    assert sink.lost == 13 - len(left)


def test_later_attempts_supersede_earlier_ones(tmp_path):
    write(tmp_path, 10)
    roster = make_roster(4, KINDS)
    sink = RunRecord(tmp_path, segment_seconds=math.inf, fsync=False)
    sink.start(make_info(roster, 5))
    for record in make_records(roster, 3, first=5):
        sink.write([record], [])
    sink.close()
    check(gm.read_run(tmp_path), [0, 3])
    check(gm.read_run(tmp_path, attempt=1), [0, 3, 6, 9])


def test_a_kill_between_the_replacements_of_files_is_no_damage(tmp_path):
    earlier, later = (write(tmp_path / str(steps), steps, close=None) for steps in (7, 10))
    shutil.copy(file_of(later), file_of(earlier))
    check(gm.read_run(earlier), [0, 3, 6])
    assert verify(earlier).whole
    # of a segment that had no histogram before
    first = write(tmp_path / "1", 2, first=1, close=None)
    assert not list((first / "exponents").iterdir())
    more = write(tmp_path / "2", 6, first=1, close=None)
    shutil.copy(file_of(more), first / "exponents")
    check(gm.read_run(first), [])
    assert verify(first).whole


def test_the_table_is_as_documented(tmp_path):
    write(tmp_path)
    table = pq.read_table(file_of(tmp_path))
    assert table.column_names == [field.name for field in EXPONENTS]
    run = gm.read_run(tmp_path)
    assert run.exponents().schema.equals(pa.schema(table.schema))
    rows = run.exponents("grads", first=3, last=3).to_pylist()
    assert [(row["step"], row["name"], row["kind"]) for row in rows] == [
        (3, name, "grads") for name in run.roster.names[:3]
    ]
    # from the first to the last bin that is not empty
    assert rows[0]["first_bin"] == 0
    assert len(rows[0]["counts"]) == NUM_EXPONENT_COLUMNS - 3
    assert rows[1] | {"name": ""} == rows[1] | {
        "name": "",
        "n_zero": 17,
        "n_inf": 0,
        "n_nan": 0,
        "first_bin": 0,
        "counts": [],
    }
    assert (rows[2]["n_inf"], rows[2]["n_nan"]) == (2, 3)
    assert run.exponents(columns=["step"]).column_names == ["step"]
    with pytest.raises(gm.RunError, match="there is no column 'norm' of exponents; choose from step"):
        run.exponents(columns=["norm"])


def test_the_report_prints_and_answers_for_other_formats_and_scales(tmp_path):
    model = torch.nn.Linear(3, 2, bias=False)
    with gm.Monitor(model, run_dir=tmp_path, precision=1, rules=()) as monitor:
        model.weight.grad = torch.tensor([[1e-9, 1e-3, 1.0], [3e5, 0.0, math.nan]])
        monitor.record()
        monitor.advance()
    found = gm.read_run(tmp_path).precision(formats=["fp16"])
    expected = gm.precision_report({"weight": model.weight.grad}, ["fp16"])
    assert str(found) == f"grads of step 0: {expected}"
    assert dict(found) == dict(expected)
    assert found.stats.n_overflowed("float16", 2.0**-8).tolist() == [0]
    assert found.stats.n_flushed("float8_e4m3fn", 2.0**30).tolist() == [0]
    with pytest.raises(ValueError, match="'fp64' is not one of the formats"):
        gm.read_run(tmp_path).precision(formats=["fp64"])


@pytest.mark.parametrize(
    ("step", "kind", "words"),
    [
        (4, "grads", "no histograms of step 4; there are 4, from 0 to 9, and the nearest is that of step 3"),
        (3, "updates", r"no histograms of updates in step 3; Monitor\(weights=True\)"),
        (None, "updates", r"no histograms of updates in step 9"),
    ],
)
def test_what_is_not_there_is_said(step, kind, words, tmp_path):
    run = gm.read_run(write(tmp_path))
    with pytest.raises(gm.RunError, match=words):
        run.precision(step, kind)


# damage


def flip(file, place=0.5):
    data = bytearray(file.read_bytes())
    data[int(place * len(data))] ^= 64
    file.write_bytes(data)


def test_a_damaged_file_is_noticed_and_can_be_left_out(tmp_path, caplog):
    write(tmp_path, segment_steps=5)
    first, second = sorted((tmp_path / "exponents").glob("*.parquet"))
    flip(first)
    run = gm.read_run(tmp_path)
    with pytest.raises(gm.RunError, match=r"exponents-0001-0000000000\.parquet cannot be read"):
        run.precision(0)
    run.record(0), run.precision(6)
    assert [(f.name, f.state) for f in verify(tmp_path).of("damaged", "missing")] == [
        (f"exponents/{first.name}", "damaged")
    ]
    left = gm.read_run(tmp_path, skip_damaged=True)
    assert list(left.damaged) == [f"exponents/{first.name}"]
    assert left.precision_steps == [6, 9]
    # the segment's other rows are there
    assert len(left.steps) == 10
    assert left.record(0).recorded
    assert "left out" in caplog.text
    second.unlink()
    assert [f.state for f in verify(tmp_path).of("damaged", "missing")] == ["damaged", "missing"]
    with pytest.raises(gm.RunError, match="cannot be read"):
        gm.read_run(tmp_path).precision(6)


def test_a_file_of_another_version_is_noticed(tmp_path):
    write(tmp_path / "a", 7)
    older = file_of(tmp_path / "a").read_bytes()
    shutil.rmtree(tmp_path / "a")
    write(tmp_path / "a", 10)
    file_of(tmp_path / "a").write_bytes(older)
    assert not verify(tmp_path / "a").whole
    with pytest.raises(gm.RunError, match=r"it is not the version that steps-0001-0000000000\.parquet"):
        gm.read_run(tmp_path / "a").precision_steps  # noqa: B018 it reads the file


@pytest.mark.parametrize(
    "change",
    [
        {"first_bin": [900]},
        {"first_bin": [-1]},
        {"counts": [[1] * 958]},
        {"counts": [[-1]]},
        {"n_zero": [-5]},
        {"first_bin": [2**31 - 1], "counts": [[1]]},
    ],
    ids=str,
)
def test_counts_outside_of_the_bins_are_refused(change, tmp_path):
    write(tmp_path)
    as_without_digests(tmp_path)
    file = file_of(tmp_path)
    table = pq.read_table(file)
    values = {name: table[name].to_pylist() for name in table.column_names}
    for name, (value,) in change.items():
        values[name][0] = value
    pq.write_table(pa.table(values, schema=table.schema), file)
    with pytest.raises(gm.RunError, match="it has counts outside of the bins"):
        gm.read_run(tmp_path).precision(0)


def test_rows_that_nobody_can_read_are_refused(tmp_path):
    write(tmp_path)
    as_without_digests(tmp_path)
    table = pq.read_table(file_of(tmp_path))
    pq.write_table(table.drop_columns(["counts"]), file_of(tmp_path))
    with pytest.raises(gm.RunError, match="it has no column counts"):
        gm.read_run(tmp_path).precision(0)


# the journal


def journal_of(path, steps=7):
    roster = make_roster(4, KINDS)
    writer = JournalWriter(path, 1, 0, roster)
    records = list(records_of(roster, steps))
    # in two frames
    writer.append(records[:4])
    writer.append(records[4:])
    writer.close(remove=False)
    return journal_path(path, 1, 0), records


def test_a_journal_keeps_them(tmp_path):
    _, records = journal_of(tmp_path)
    found = read_journal(tmp_path, 1, 0)
    assert found.error is None
    for record, expected in zip(found.records, records, strict=True):
        assert record.recorded == expected.recorded
        assert (record.exponents is None) == (expected.exponents is None)
        if record.exponents is not None:
            assert record.exponents.kinds == KINDS
            assert torch.equal(record.exponents.dense(), expected.exponents.dense())
        if record.values is not None:
            assert torch.equal(record.values, expected.values)


@pytest.mark.parametrize(
    "entry",
    [
        [["grads"], 959, 1],
        [["grads"], NUM_EXPONENT_COLUMNS, -1],
        [["grads"], NUM_EXPONENT_COLUMNS, 10**12],
        [["grads"], NUM_EXPONENT_COLUMNS, 2],
        [["other"], NUM_EXPONENT_COLUMNS, 1],
        [["grads", "grads"], NUM_EXPONENT_COLUMNS, 1],
        ["grads"],
        3,
    ],
    ids=str,
)
def test_a_journal_with_other_content_is_damaged(entry, tmp_path, monkeypatch):
    from gradiometer.runs import journal

    roster = make_roster(2)
    step = replace(
        next(iter(make_records(roster, 1))),
        exponents=StepExponents.of_places(("grads",), roster.names, torch.tensor([5]), torch.tensor([1])),
    )
    monkeypatch.setattr(journal, "_entry", lambda r: [r.step, r.time, r.recorded, r.skipped, {}, entry])
    writer = JournalWriter(tmp_path, 1, 0, roster)
    writer.append([step])
    writer.close(remove=False)
    found = read_journal(tmp_path, 1, 0)
    assert found.records == []
    assert "unexpected content" in str(found.error)


@pytest.mark.parametrize(
    ("places", "counts"),
    [
        ([5, 5], [1, 1]),
        ([-1, 3], [1, 1]),
        ([5, 2 * 960], [1, 1]),
        ([5, 6], [1, 0]),
        ([5, 6], [1, 2**53 + 1]),
        # differences that wrap around to positive ones
        ([0, 2**62, -(2**63), -(2**62), 5], [1] * 5),
    ],
)
def test_a_journal_with_counts_outside_of_the_bins_is_damaged(places, counts, tmp_path):
    roster = make_roster(2)
    found = StepExponents.of_places(("grads",), roster.names, torch.tensor(places), torch.tensor(counts))
    writer = JournalWriter(tmp_path, 1, 0, roster)
    writer.append([replace(next(iter(make_records(roster, 1))), exponents=found)])
    writer.close(remove=False)
    assert "unexpected content" in str(read_journal(tmp_path, 1, 0).error)


# sizes


def test_a_histogram_takes_little_space(tmp_path):
    roster = make_roster(100)
    sink = RunRecord(tmp_path, segment_seconds=math.inf, fsync=False)
    sink.start(make_info(roster, precision=1))
    g = torch.Generator().manual_seed(0)
    for record in make_records(roster, 20):
        tensors = {name: torch.randn(4096, generator=g) for name in roster.names}
        counts = gm.collect_exponents(tensors).columns.unsqueeze(0)
        sink.write([replace(record, exponents=StepExponents(("grads",), roster.names, counts))], [])
    sink.close()
    # 960 counts of 8 bytes; a float32 tensor of normal numbers has some 30 of 100 bins that are not empty
    assert file_of(tmp_path).stat().st_size < 200 * 20 * 100
    check_one = gm.read_run(tmp_path).precision()
    assert int(check_one.stats.numel.sum()) == 100 * 4096


def test_the_table_of_no_steps_has_its_columns():
    table = exponents.exponents_table([], 1)
    assert table.column_names == [field.name for field in EXPONENTS]
    assert exponents.histograms(table).shape == (0, NUM_EXPONENT_COLUMNS)
