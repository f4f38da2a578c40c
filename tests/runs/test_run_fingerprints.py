"""The run record keeps fingerprints to the bit, and files of runs without them are as before."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

pytest.importorskip("pyarrow")
import pyarrow.parquet as pq

import gradiometer as gm
from gradiometer.columns import RING_WIDTH
from gradiometer.runs import verify
from gradiometer.runs.format import FINGERPRINTS, STEPS, TENSORS, arrow_schema, list_segments
from gradiometer.runs.journal import list_journals
from gradiometer.runs.reader import read_run
from gradiometer.runs.writer import RunRecord
from support.synthetic_run import as_without_digests, make_info, make_records, make_roster, write_run

KINDS = ("grads", "weights", "updates")
ROSTER = make_roster(3, KINDS)


def opened(path, first=0, *, fingerprint=True, **options):
    sink = RunRecord(path, **({"segment_seconds": math.inf, "fsync": False, "segment_steps": 10} | options))
    sink.start(make_info(ROSTER, first, fingerprint=fingerprint))
    return sink


def recorded(steps=24, **options):
    """Steps with the largest sums, an unmeasured tensor, and one without a fingerprint."""
    records = list(make_records(ROSTER, steps, fingerprint=True, every=2, **options))
    values = records[4].values
    bits = values[..., RING_WIDTH:].view(torch.int64)
    bits[0, 0, 1:] = torch.tensor([2**63 - 1, -(2**63)])
    bits[0, 1, 1:] = torch.tensor([-1, 0])
    bits[1, 2] = torch.tensor([-1, 0, 0])
    values[2, 0] = 0
    return records


def bits_of(records):
    return [
        (record.step, None if record.values is None else record.values.view(torch.int64).tolist())
        for record in records
    ]


def test_what_is_read_is_what_was_recorded_bit_by_bit(tmp_path):
    records, sink = recorded(), opened(tmp_path)
    for record in records:
        sink.write([record], [])
    # two segments, and a journal
    assert list(list_journals(tmp_path)) == [(1, 20)]
    assert bits_of(read_run(tmp_path).records()) == bits_of(records)
    sink.close()

    run = read_run(tmp_path)
    assert run.has_fingerprints
    assert bits_of(run.records()) == bits_of(records)
    assert torch.equal(run.record(4).fingerprints("updates"), records[4].fingerprints("updates"))
    assert run.record(5).fingerprints() is None
    largest = run.record(4).report()["blocks.0.weight"].fingerprint
    assert (largest.word_sum, largest.weighted_sum) == (2**63 - 1, 2**63)
    assert run.record(4).report("weights")["blocks.1.weight"].fingerprint is None
    assert run.record(4).report().to_dict()["tensors"]["blocks.0.bias"]["fingerprint"] == "f" * 16 + "0" * 16
    assert verify(tmp_path).whole


def test_rows_have_unsigned_sums_that_are_null_without_a_fingerprint(tmp_path):
    sink = opened(tmp_path)
    sink.write(recorded(), [])
    sink.close()
    run = read_run(tmp_path)

    table = run.tensors(first=4, last=4)
    assert table.schema.equals(arrow_schema((*TENSORS, *FINGERPRINTS)))
    rows = {(row["kind"], row["name"]): row for row in table.to_pylist()}
    assert len(rows) == 8  # one was not measured
    names = [field.name for field in FINGERPRINTS]
    assert [rows["grads", "blocks.0.weight"][name] for name in names] == [4 * 64 * 64, 2**63 - 1, 2**63]
    assert [rows["grads", "blocks.0.bias"][name] for name in names] == [4 * 64, 2**64 - 1, 0]
    assert [rows["weights", "blocks.1.weight"][name] for name in names] == [None] * 3
    some = run.tensors(columns=["word_sum", "step"], kind="grads", first=6, last=8)
    assert (some.column_names, some["step"].to_pylist()) == (["word_sum", "step"], [6] * 3 + [8] * 3)
    for file in (tmp_path / "tensors").iterdir():
        assert pq.read_schema(file).equals(table.schema)


def test_without_fingerprints_files_have_the_columns_that_they_had(tmp_path):
    path = write_run(tmp_path, 3, 24, segment_steps=10, close=False)
    for table, fields in (("steps", STEPS), ("tensors", TENSORS)):
        for file in (path / table).iterdir():
            assert pq.read_schema(file).equals(arrow_schema(fields))
    run = read_run(path)
    assert not run.has_fingerprints
    assert run.tensors().column_names == [field.name for field in TENSORS]
    assert run.tensors(columns=["step", "word_sum"])["word_sum"].null_count == 3 * 24
    assert {record.values.shape[2] for record in run.records()} == {RING_WIDTH}
    assert run.record(23).fingerprints() is None


def test_the_fingerprints_in_the_journal_of_a_killed_process_get_into_parquet_files(tmp_path):
    records, sink = recorded(14), opened(tmp_path)
    sink.write(records[:9], [])
    # step 9, without tensors, begins a segment
    for record in records[9:]:
        sink.write([record], [])
    sink._free()
    assert bits_of(read_run(tmp_path).records()) == bits_of(records)

    opened(tmp_path, first=14).close()
    assert list_journals(tmp_path) == {}
    assert len(list_segments(tmp_path)) == 2
    assert bits_of(read_run(tmp_path).records()) == bits_of(records)


@pytest.mark.parametrize("before", [True, False])
def test_a_resumed_run_may_begin_or_cease_to_record_them(tmp_path, before):
    first, second = (
        list(make_records(ROSTER, 12, first=start, fingerprint=has, seed=start))
        for start, has in ((0, before), (8, not before))
    )
    for records, has in ((first, before), (second, not before)):
        sink = opened(tmp_path, records[0].step, fingerprint=has)
        sink.write(records, [])
        sink.close()

    run = read_run(tmp_path)
    assert run.has_fingerprints
    assert bits_of(run.records()) == bits_of([*first[:8], *second])
    assert run.tensors()["n_bytes"].null_count == 9 * (12 if before else 8)
    assert read_run(tmp_path, attempt=1).has_fingerprints is before
    assert bits_of(read_run(tmp_path, attempt=1).records()) == bits_of(first)


@pytest.mark.parametrize("has", [True, False])
def test_a_step_that_is_not_as_the_run_was_started_is_refused(tmp_path, has):
    sink = opened(tmp_path, fingerprint=not has)
    (record,) = make_records(ROSTER, 1, fingerprint=has)
    with pytest.raises(ValueError, match=r"step 0 has (no )?fingerprints, but the run was started with"):
        sink.write([record, replace(record, step=1, values=None)], [])
    sink.close()
    assert sink.lost == 1
    assert read_run(tmp_path).steps["step"].to_pylist() == [1]


def test_a_monitor_records_what_collect_computes(tmp_path):
    torch.manual_seed(0)
    model, expected = nn.Linear(3, 2), []
    with gm.Monitor(
        model, run_dir=tmp_path, rules=(), weights=True, updates=True, fingerprint=True
    ) as monitor:
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(4, 3)).square().sum().backward()
            monitor.record()
            found = gm.collect_grads(model, fingerprint=True), gm.collect_weights(model, fingerprint=True)
            expected.append([stats.fingerprints.tolist() for stats in found])
            with torch.no_grad():
                model.weight.sub_(0.1 * model.weight.grad)
            monitor.advance()
    run = read_run(tmp_path)
    kinds = ("grads", "weights")
    assert [[r.fingerprints(kind).tolist() for kind in kinds] for r in run.records()] == expected
    assert [r.fingerprints("updates")[0, 0] for r in run.records()] == [-1] * 3
    assert bits_of([run.record(2)]) == bits_of([monitor.last])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda table: table.set_column(15, "word_sum", table["word_sum"].cast("int64")),
            "has the type int64",
        ),
        (lambda table: table.append_column("word_sum", table["word_sum"]), "it has 2 columns word_sum"),
        (lambda table: table.drop_columns(["word_sum"]), None),
    ],
)
def test_columns_of_another_type_are_refused_and_without_one_there_are_no_fingerprints(
    tmp_path, change, message
):
    path = write_run(tmp_path, 2, 4, fingerprint=True)
    as_without_digests(path)
    (file,) = (path / "tensors").iterdir()
    table = pq.read_table(file)
    small = table.set_column(15, "word_sum", [list(range(len(table)))])
    small = small.set_column(15, "word_sum", small["word_sum"].cast("uint64"))
    pq.write_table(change(small), file)
    if message is None:
        assert read_run(path).record(1).fingerprints() is None
    else:
        with pytest.raises(gm.RunError, match=message):
            read_run(path).record(1)
