"""The journal: every step that was appended is read, whatever else happens to the file or beside it."""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import struct
import threading
import time
import zlib
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from conftest import PROFILE
from gradiometer.columns import TENSORS
from gradiometer.recorder import StepRecord
from gradiometer.runs import journal, open_segment, verify
from gradiometer.runs.files import RunError
from gradiometer.runs.format import list_segments
from gradiometer.runs.journal import Journal, JournalWriter, frame, journal_path, list_journals, read_journal
from gradiometer.runs.reader import read_run
from support.synthetic_run import (
    flip_bit,
    make_catalog,
    make_records,
    make_table,
    open_run,
    same_records,
    steps_of,
    write_each,
    write_run,
)

pa = pytest.importorskip("pyarrow")
DEEP = PROFILE == "deep"
CATALOG = make_catalog(3, ("grads", "weights"))


def write_and_die(path, records, first=0, **options):
    """Write these records one by one, and leave the run as a killed process does."""
    sink = open_run(path, CATALOG, first, **options)
    for record in records:
        sink.write([record], [])
    sink._free()


def odd_records():
    values = torch.randn(2, 3, TENSORS.width, dtype=torch.float64)
    values[0, 0] = torch.tensor([0.0, -0.0, 5e-324, 1.7e308, math.inf, -math.inf, math.nan, 1.0])
    flags = torch.tensor([[31, 0, 1], [2, 4, 8]], dtype=torch.int32)
    bits = torch.tensor([[-1, 0, 0], [1, 2**63 - 1, -(2**63)], [0, 0, 0]])

    def tables(values, fingerprints=None):
        return {
            kind: make_table(CATALOG, values[i], kind, flags=flags[i], fingerprints=fingerprints)
            for i, kind in enumerate(CATALOG.kinds)
        }

    strided = values.transpose(0, 1).contiguous().transpose(0, 1)
    scalars = {"loss": math.nan, "lr": -math.inf, "tokens/s": 1e300, "": 0.1, "é\n\ud800": 3.0}
    yield StepRecord(0, 1.5, scalars, CATALOG, tables(values))
    yield StepRecord(3, math.inf, {}, CATALOG, tables(strided, bits))
    yield StepRecord(2**53 + 1, 0.1, {}, CATALOG, skipped=True)
    yield StepRecord(2**63 - 1, 0.1, {}, CATALOG, {"weights": tables(values.flip(1))["weights"]})


def test_what_is_read_is_what_was_appended_bit_by_bit(tmp_path):
    records = list(odd_records())
    out = JournalWriter(tmp_path, 2, 0, CATALOG)
    out.append(records[:1])
    out.append(records[1:3])
    out.append(records[3:])
    found = read_journal(tmp_path, 2, 0)
    assert found.catalog == CATALOG
    assert found.error is None
    escaped = {k.replace("\ud800", "\\ud800"): v for k, v in records[0].scalars.items()}
    assert same_records(found.records, [replace(records[0], scalars=escaped), *records[1:]])
    out.close(remove=True)
    assert read_journal(tmp_path, 2, 0) is None
    assert list(tmp_path.iterdir()) == []


def test_no_tensors_and_no_columns_are_steps_too(tmp_path):
    catalog = make_catalog(0)
    tables = {"grads": make_table(catalog, torch.zeros(0, TENSORS.width, dtype=torch.float64))}
    out = JournalWriter(tmp_path, 1, 5, catalog)
    out.append([StepRecord(5, 1.0, {}, catalog, tables), StepRecord(6, 1.0, {}, catalog)])
    out.close(remove=False)
    found = read_journal(tmp_path, 1, 5)
    assert [(x.step, x.recorded) for x in found.records] == [(5, True), (6, False)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a journal with four batches, its records, and where each batch ends."""
    path = tmp_path_factory.mktemp("journal")
    records = list(make_records(CATALOG, 7, every=3, nonfinite_at=3))
    out, ends = JournalWriter(path, 1, 0, CATALOG), []
    for begin, end in pairwise([0, 2, 3, 6, 7]):
        out.append(records[begin:end])
        ends.append((journal_path(path, 1, 0).stat().st_size, end))
    out.close(remove=False)
    return journal_path(path, 1, 0).read_bytes(), records, ends


def reread(path, data):
    journal_path(path, 1, 0).write_bytes(data)
    return read_journal(path, 1, 0)


def test_of_a_journal_that_was_cut_off_all_whole_batches_are_read(tmp_path, whole):
    data, records, ends = whole
    for size in range(len(data) + 1):
        found = reread(tmp_path, data[:size])
        left = max([n for end, n in ends if end <= size], default=0)
        assert found.error is None
        assert same_records(found.records, records[:left])
        # a power failure may leave zeros
        if size in {0, *(end for end, _ in ends)}:
            found = reread(tmp_path, data[:size] + bytes(5000))
            assert found.error is None
            assert same_records(found.records, records[:left])


def test_every_changed_byte_is_noticed_and_the_steps_before_it_are_kept(tmp_path, whole):
    data, records, ends = whole
    choose = random.Random(0)  # noqa: S311
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 << choose.randrange(8)
        found = reread(tmp_path, changed)
        assert found.error is not None, place
        left = max([n for end, n in ends if end <= place], default=0)
        assert same_records(found.records, records[:left])


def test_batches_in_another_order_or_of_another_journal_are_noticed(tmp_path, whole):
    data, records, ends = whole
    cuts = [0, *(end for end, _ in ends)]
    parts = [data[a:b] for a, b in pairwise(cuts)]
    for order in ([0, 2, 1, 3], [0, 1, 1, 2, 3], [0, 1, 3], [1, 2, 3], [0, 1, 2, 3, 3]):
        found = reread(tmp_path, b"".join([parts[i] for i in order]))
        assert found.error is not None, order
        assert same_records(found.records, records[: len(found.records)])
    journal_path(tmp_path, 2, 9).write_bytes(data)
    found = read_journal(tmp_path, 2, 9)
    assert found.records == []
    assert "its content is that of journal-0001-0000000000.bin" in str(found.error)


HEAD = {"attempt": 1, "first_step": 0, "catalog": make_catalog(1, ("grads", "grad_exponents")).to_dict()}
OTHER = HEAD["catalog"] | {"names": ["a", "a"], "shapes": [[], []], "dtypes": ["", ""]}
STEP = [0, 1.0, False, {}, []]
GRADS = bytes(8 * (TENSORS.width + 1))


def counts(positions, values):
    return torch.tensor([*positions, *values]).numpy().tobytes()


HEADS = [
    *({}, None, []),
    *[HEAD | {"catalog": x} for x in ({}, None, OTHER, HEAD["catalog"] | {"shapes": 3})],
    *[HEAD | {"attempt": x} for x in ("1", 2**31)],
]
BATCHES = [
    *(5, {"a": 1}, [[]], [STEP[:4]], [STEP, STEP], [[0, None, False, {}, []]]),
    *[[[step, *STEP[1:]]] for step in ("0", True, -1, 2**63, 10**30)],
    *[[[0, 1.0, False, scalars, []]] for scalars in ([], {"loss": "much"}, {"loss": {}})],
    eval("[" * 60 + "]" * 60),  # noqa: S307
]
TABLES = [
    (3, b""),
    (["grads"], b""),
    ([["grads", 1, False]], b""),
    ([["grads", 1, False]], GRADS[1:]),
    ([["grads", 1, True]], GRADS),
    ([["grads", 2, False]], 2 * GRADS),
    ([["grads", True, False]], GRADS),
    ([["grads", 1, False]] * 2, 2 * GRADS),
    ([["other", 1, False]], GRADS),
    ([[["grads"], 1, False]], GRADS),
    ([["grad_exponents", 1]], counts([5], [1])),
    ([["grad_exponents", -1, False]], b""),
    ([["grad_exponents", 10**12, False]], counts([5], [1])),
    ([["grad_exponents", 2, False]], counts([5], [1])),
    ([["grad_exponents", 2, False]], counts([5, 5], [1, 1])),
    ([["grad_exponents", 2, False]], counts([-1, 3], [1, 1])),
    ([["grad_exponents", 2, False]], counts([5, 960], [1, 1])),
    ([["grad_exponents", 2, False]], counts([5, 6], [1, 0])),
    ([["grad_exponents", 2, False]], counts([5, 6], [1, 2**53 + 1])),
    # differences that wrap around to positive ones
    ([["grad_exponents", 5, False]], counts([0, 2**62, -(2**63), -(2**62), 5], [1] * 5)),
]


@pytest.mark.parametrize(
    ("entries", "numbers"),
    [
        *[([head], b"") for head in HEADS],
        *[([HEAD, batch], b"") for batch in BATCHES],
        ([HEAD, [STEP], [STEP]], b""),
        ([HEAD, [STEP]], bytes(8)),
        *[([HEAD, [[0, 1.0, False, {}, tables]]], numbers) for tables, numbers in TABLES],
    ],
)
def test_content_that_is_no_journal_is_refused_though_its_digest_is_right(tmp_path, entries, numbers):
    data, digest = b"", b""
    for i, value in enumerate(entries):
        last = i == len(entries) - 1
        parts, digest = frame(value, [pa.py_buffer(numbers)] if last and numbers else [], digest)
        data += b"".join(bytes(part) for part in parts)
    found = reread(tmp_path, data)
    assert isinstance(found.error, RunError)
    (tmp_path / "run.json").write_text("{}")
    write_run(tmp_path / "run", 1, 4, segment_steps=4)
    journal_path(tmp_path / "run", 1, 0).write_bytes(data)
    with pytest.raises(RunError, match=r"journal-0001-0000000000.bin cannot be read \(.*\): to read"):
        read_run(tmp_path / "run")
    run = read_run(tmp_path / "run", skip_damaged=True)
    assert list(run.damaged) == ["journal-0001-0000000000.bin"]
    assert run.steps["step"].to_pylist() == [0, 1, 2, 3]
    assert [file.name for file in verify(tmp_path / "run").of("damaged")] == ["journal-0001-0000000000.bin"]


def test_a_batch_that_claims_more_than_the_file_has_takes_no_memory(tmp_path):
    sizes = struct.pack("<8sQQ", b"GRADJNL1", 10, 2**62)
    head = sizes + bytes(32)
    found = reread(tmp_path, head + zlib.crc32(head).to_bytes(4, "little") + b"x" * 100)
    # as if it had been cut off
    assert found == Journal(None, [])


# beside Parquet files


def test_the_steps_of_a_killed_process_are_read_and_get_into_parquet_files(tmp_path):
    records = list(make_records(CATALOG, 14, every=2, nonfinite_at=12))
    write_and_die(tmp_path, records, segment_steps=10)
    assert list(list_journals(tmp_path)) == [(1, 10)]

    def read():
        run = read_run(tmp_path)
        assert same_records(run.records(), records)
        some = run.tensors(first=9, last=12, kind="weights", names="blocks.0.bias", columns=["step"])
        assert some.to_pydict() == {"step": [10, 12]}
        steps, found = run.matrices(["norm", "n_nan"], first=8)
        assert steps == [8, 10, 12]
        assert found["norm"].shape == (3, 3)
        assert verify(tmp_path).whole
        return repr([run.steps.to_pydict(), run.tensors().to_pydict(), found])

    before = read()
    open_run(tmp_path, CATALOG, first=14).close()
    assert list_journals(tmp_path) == {}
    assert list(list_segments(tmp_path)) == [(1, 0), (1, 10)]
    assert read() == before


def test_an_attempt_that_has_only_a_journal_supersedes_and_is_superseded(tmp_path):
    write_run(tmp_path, 3, 20, kinds=CATALOG.kinds, segment_steps=8)
    second = list(make_records(CATALOG, 6, first=9, seed=1))
    write_and_die(tmp_path, second, first=9)
    run = read_run(tmp_path)
    assert run.steps["attempt"].to_pylist() == [1] * 9 + [2] * 6
    assert same_records(run.records(9), second)
    third = list(make_records(CATALOG, 2, first=12, seed=2))
    sink = open_run(tmp_path, CATALOG, first=12)
    sink.write(third, [])
    run = read_run(tmp_path)
    assert run.steps["attempt"].to_pylist() == [1] * 9 + [2] * 3 + [3] * 2
    assert same_records(run.records(9), [*second[:3], *third])
    sink.close()
    assert same_records(read_run(tmp_path).records(9), [*second[:3], *third])


def test_a_process_killed_between_parquet_and_journal_leaves_no_step_twice(tmp_path, monkeypatch):
    records = list(make_records(CATALOG, 12))
    sink = open_run(tmp_path, CATALOG, segment_steps=10)
    sink.write(records[:4], [])
    monkeypatch.setattr(JournalWriter, "close", lambda *_, **__: None)
    sink._flush(now=True)
    assert list(list_journals(tmp_path)) == list(list_segments(tmp_path)) == [(1, 0)]
    assert same_records(read_run(tmp_path).records(), records[:4])
    # it was not killed, but could not remove the journal
    sink.write(records[4:7], [])
    assert list(list_journals(tmp_path)) == [(1, 0), (1, 4)]
    assert same_records(read_run(tmp_path).records(), records[:7])
    sink.write(records[7:], [])
    assert same_records(read_run(tmp_path).records(), records)
    assert verify(tmp_path).whole
    sink._free()
    open_run(tmp_path, CATALOG, first=12).close()
    assert same_records(read_run(tmp_path).records(), records)
    assert sum(x.recorded for x in read_run(tmp_path).records()) == 12
    assert list_journals(tmp_path) == {}


def test_a_journal_that_was_removed_is_made_again(tmp_path, monkeypatch):
    records = list(make_records(CATALOG, 9))
    sink = open_run(tmp_path, CATALOG)
    sink.write(records[:4], [])
    journal_path(tmp_path, 1, 0).unlink()
    sink.write(records[4:6], [])
    assert same_records(read_run(tmp_path).records(), records[:6])
    # when the rows of its steps are made, these are all that is left
    monkeypatch.setattr(open_segment, "_BATCH", 1)
    sink.write(records[6:7], [])
    remove_journals(tmp_path)
    sink.write(records[7:8], [])
    assert same_records(read_run(tmp_path).records(), records[:8])
    sink.write(records[8:], [])
    sink.close()
    assert same_records(read_run(tmp_path).records(), records)
    assert sink.lost == 0


def test_steps_that_only_the_journal_could_take_stay_in_it(tmp_path, full):
    records = list(make_records(CATALOG, 60))
    sink = open_run(tmp_path, CATALOG, segment_steps=10)
    full.add("tensors")
    assert write_each(sink, records[:55])
    (key,) = list_journals(tmp_path)
    in_journal = [record.step for record in read_journal(tmp_path, *key).records]
    assert in_journal == list(range(len(in_journal)))
    assert len(in_journal) >= 9
    assert steps_of(tmp_path) == in_journal
    full.clear()
    sink.write(records[55:], [])
    sink.close()
    # the four segments that memory holds, and those in the journal
    found = steps_of(tmp_path)
    assert found[: len(in_journal)] == in_journal
    assert found[-39:] == list(range(21, 60))
    assert sink.lost == 60 - len(found)
    assert same_records(read_run(tmp_path).records(), [records[step] for step in found])
    open_run(tmp_path, CATALOG, first=60).close()
    assert list_journals(tmp_path) == {}
    assert steps_of(tmp_path) == found
    assert verify(tmp_path).whole


def test_a_damaged_journal_is_kept_and_the_run_goes_on_with_the_steps_before_the_damage(tmp_path, caplog):
    records = list(make_records(CATALOG, 6))
    write_and_die(tmp_path, records)
    path = journal_path(tmp_path, 1, 0)
    data = flip_bit(path, -40)
    with pytest.raises(RunError, match=r"does not match its digest.*skip_damaged=True"):
        read_run(tmp_path)
    left = read_run(tmp_path, skip_damaged=True)
    assert list(left.damaged) == [path.name]
    assert same_records(left.records(), records[:5])
    open_run(tmp_path, CATALOG, first=5).close()
    assert "It is now damaged-journal-0001-0000000000.bin" in caplog.text
    assert (tmp_path / "damaged-journal-0001-0000000000.bin").read_bytes() == data
    assert same_records(read_run(tmp_path).records(), records[:5])


def test_a_journal_beside_a_damaged_parquet_file_stays_where_it_is(tmp_path):
    records = list(make_records(CATALOG, 9))
    sink = open_run(tmp_path, CATALOG)
    sink.write(records[:5], [])
    sink._flush(now=True)
    sink.write(records[5:], [])
    sink._free()
    path = tmp_path / "steps" / "steps-0001-0000000000.parquet"
    data = flip_bit(path, 50)
    with pytest.raises(RunError, match="steps-0001-0000000000"):
        read_run(tmp_path).steps  # noqa: B018
    run = read_run(tmp_path, skip_damaged=True)
    assert run.steps["step"].to_pylist() == [5, 6, 7, 8]
    open_run(tmp_path, CATALOG, first=9).close()
    assert list(list_journals(tmp_path)) == [(1, 5)]
    assert path.read_bytes() == data


def test_no_link_is_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (tmp_path / "run").mkdir()
    sink = open_run(tmp_path / "run", CATALOG)
    journal_path(tmp_path / "run", 1, 0).symlink_to(outside)
    sink.write(list(make_records(CATALOG, 2)), [])
    assert outside.read_text() == "mine"
    assert steps_of(tmp_path / "run") == [0, 1]
    sink.close()


@pytest.mark.parametrize("seconds", [0.005, 0.05])
def test_who_reads_while_the_run_goes_on_sees_every_step_once(tmp_path, seconds):
    catalog = make_catalog(4)
    sink = open_run(tmp_path, catalog, segment_steps=40, segment_seconds=seconds)
    records = list(make_records(catalog, 1500 if DEEP else 400))
    written = [0]

    def write():
        choose = random.Random(0)  # noqa: S311
        at = 0
        while at < len(records):
            count = choose.randint(1, 9)
            sink.write(records[at : at + count], [])
            at += count
            time.sleep(0.001)
            written[0] = min(at, len(records))
        sink.close()

    thread = threading.Thread(target=write)
    run = read_run(tmp_path)
    thread.start()
    while thread.is_alive():
        least = written[0]
        run.refresh()
        steps = run.steps["step"].to_pylist()
        assert steps == list(range(len(steps)))
        assert len(steps) >= least
        for fresh in (run, read_run(tmp_path)):
            assert fresh.tensors(columns=["step"]).num_rows == 4 * fresh.steps.num_rows
    thread.join()
    run.refresh()
    assert same_records(run.records(), records)


# when the disk fails


def close(sink):
    with contextlib.suppress(OSError):
        sink.close()


def test_while_parquet_files_cannot_be_written_the_journal_has_every_step(tmp_path, full):
    records = list(make_records(CATALOG, 20))
    sink = open_run(tmp_path, CATALOG, segment_steps=5, segment_seconds=10.0)
    full.add("tensors")
    assert write_each(sink, records[:19])
    assert same_records(read_run(tmp_path).records(), records[:19])
    # going back to a checkpoint, and the end
    assert write_each(sink, [records[18]])
    close(sink)
    assert steps_of(tmp_path) == list(range(19))
    assert sink.lost == 0


def test_a_journal_that_failed_goes_on_when_its_disk_works_again(tmp_path, full, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    records = list(make_records(CATALOG, 8))
    sink = open_run(tmp_path, CATALOG, segment_seconds=0.001)
    full.update(("tensors", "journal"))
    for record in records[:5]:
        now[0] += 1
        write_each(sink, [record])
    assert steps_of(tmp_path) == []
    full.remove("journal")
    now[0] += 100
    write_each(sink, records[5:])
    assert same_records(read_run(tmp_path).records(), records)


def test_parquet_files_are_written_though_the_journal_fails(tmp_path, full, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    sink = open_run(tmp_path, CATALOG, segment_seconds=10.0)
    full.add("journal")
    for record in make_records(CATALOG, 6):
        now[0] += 100
        assert write_each(sink, [record]) <= 1
    assert steps_of(tmp_path) == list(range(6))


def remove_journals(run_dir):
    for path in run_dir.glob("journal-*"):
        path.unlink()


def remove_tensors(run_dir):
    shutil.rmtree(run_dir / "tensors")


@pytest.mark.parametrize(
    ("before", "remove", "recovers", "lost"),
    [
        (60, remove_journals, False, 60),
        # memory holds only some of them
        (55, remove_journals, True, None),
        (55, remove_tensors, True, 0),
        (20, remove_tensors, False, 0),
    ],
)
def test_lost_are_the_steps_that_are_not_on_disk(tmp_path, full, before, remove, recovers, lost):
    records = list(make_records(CATALOG, 60))
    sink = open_run(tmp_path, CATALOG, segment_steps=10 if recovers else 1000)
    full.add("tensors")
    write_each(sink, records[:before])
    remove(tmp_path)
    if recovers:
        full.clear()
    write_each(sink, records[before:])
    sink.close() if recovers else close(sink)
    steps = steps_of(tmp_path)
    assert sink.lost == 60 - len(steps) == (60 - len(steps) if lost is None else lost)
    assert same_records(read_run(tmp_path).records(), [records[step] for step in steps])


def test_superseded_steps_that_were_not_on_disk_any_more_are_lost(tmp_path, full):
    records = list(make_records(CATALOG, 60))
    sink = open_run(tmp_path, CATALOG)
    full.add("tensors")
    write_each(sink, records[:30])
    remove_journals(tmp_path)
    write_each(sink, [records[0]])
    full.clear()
    write_each(sink, records[1:])
    sink.close()
    assert sink.lost == 30
    assert same_records(read_run(tmp_path).records(), records)


def test_with_a_file_in_place_of_the_folder_all_steps_are_lost(tmp_path):
    sink = open_run(tmp_path / "run", CATALOG)
    write_each(sink, make_records(CATALOG, 60))
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").write_text("")
    close(sink)
    assert sink.lost == 60


def test_a_journal_that_cannot_be_read_for_now_is_left_for_the_next_attempt(tmp_path, monkeypatch):
    records = list(make_records(CATALOG, 5))
    write_and_die(tmp_path, records)
    with monkeypatch.context() as patch:

        def fail(_):
            raise OSError(24, "Too many open files")

        patch.setattr(journal, "open_file", fail)
        open_run(tmp_path, CATALOG, first=5).close()
    assert same_records(read_run(tmp_path).records(), records)
    open_run(tmp_path, CATALOG, first=5).close()
    assert list_journals(tmp_path) == {}
    assert same_records(read_run(tmp_path).records(), records)


def test_a_damaged_journal_does_not_bring_superseded_steps_back(tmp_path):
    write_run(tmp_path, 3, 20, kinds=CATALOG.kinds)
    write_and_die(tmp_path, make_records(CATALOG, 8, first=5, seed=1), first=5)
    path = journal_path(tmp_path, 2, 5)
    flip_bit(path, 100)  # the first frame
    assert read_run(tmp_path, skip_damaged=True).steps["step"].to_pylist() == [*range(5)]
    write_run(tmp_path, 3, 3, kinds=CATALOG.kinds, first=10, seed=2)
    assert steps_of(tmp_path) == [*range(5), 10, 11, 12]


def test_special_files_in_place_of_a_journal_stop_neither_readers_nor_the_next_attempt(tmp_path):
    for i, make in enumerate((lambda p: p.mkdir(), lambda p: p.symlink_to(p.name), os.mkfifo)):
        run_dir = write_run(tmp_path / str(i), 3, 4, kinds=CATALOG.kinds)
        make(journal_path(run_dir, 1, 4))
        (run_dir / "damaged-journal-0001-0000000004.bin").mkdir()
        with pytest.raises(RunError, match="journal-0001-0000000004"):
            read_run(run_dir)
        assert len(verify(run_dir).of("damaged")) == 1
        assert list(read_run(run_dir, skip_damaged=True).damaged) == ["journal-0001-0000000004.bin"]
        open_run(run_dir, CATALOG, first=4).close()
        assert read_run(run_dir, skip_damaged=True).steps.num_rows == 4


@pytest.mark.skipif(not hasattr(os, "SEEK_HOLE"), reason="no files with holes")
def test_a_file_with_terabytes_of_holes_is_refused(tmp_path):
    run_dir = write_run(tmp_path, 3, 4)
    path = journal_path(run_dir, 1, 4)
    path.touch()
    try:
        os.truncate(path, 1 << 40)
    except OSError:
        pytest.skip("the file system has no files of this size")
    with pytest.raises(RunError, match="it has large holes"):
        read_run(run_dir)


def test_many_small_steps_take_no_more_than_a_small_multiple_of_the_file(tmp_path):
    catalog = make_catalog(0)
    tables = {"grads": make_table(catalog, torch.zeros(0, TENSORS.width, dtype=torch.float64))}
    out = JournalWriter(tmp_path, 1, 0, catalog)
    out.append([StepRecord(step, 1.0, {}, catalog, tables) for step in range(20_000)])
    found = read_journal(tmp_path, 1, 0)
    assert len(found.records) == 20_000
    assert len({id(record.tables["grads"]) for record in found.records}) == 1
    out.close(remove=False)
