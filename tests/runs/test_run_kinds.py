"""The table of every kind in a run: its rows are read as they were, in files, journals and attempts."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace

import pytest
import torch

pytest.importorskip("pyarrow")
import pyarrow as pa
import pyarrow.parquet as pq
from torch import nn

import gradiometer as gm
from gradiometer.columns import EXPONENTS, TENSORS
from gradiometer.recorder import KINDS
from gradiometer.runs import RunError, read_run, verify
from gradiometer.runs.format import FINGERPRINTS, arrow_schema, fields_of, list_segments, step_fields
from gradiometer.runs.journal import list_journals
from gradiometer.runs.schema_table import columns_of, schema_table
from support.synthetic_run import (
    NEGATIVES,
    flip_bit,
    make_catalog,
    make_records,
    make_table,
    open_run,
    same_bits,
    same_records,
    seal,
    steps_of,
    write_each,
    write_run,
)

# kinds beside the gradients, and one that is not registered
OTHERS = {
    "weights": ("weights",),
    "updates": ("updates",),
    "activations": ("activations", "activation_grads"),
    "exponents": ("weights", "grad_exponents", "weight_exponents"),
    "negatives": (NEGATIVES,),
}
EVERY, PRECISION = 2, 3


@pytest.fixture(params=OTHERS.values(), ids=OTHERS.keys())
def catalog(request):
    return make_catalog(4, ("grads", *request.param))


def schema_of(catalog):
    """The schema of the last kind."""
    return list(catalog.kinds.values())[-1].schema


def step_size(catalog):
    """The steps between two that have the last kind."""
    return PRECISION if schema_of(catalog).storage == "sparse" else EVERY


def records_of(catalog, steps, *, first=0, **options):
    return list(make_records(catalog, steps, first=first, every=EVERY, precision=PRECISION, **options))


def opened(path, catalog, first=0, *, fingerprint=False, **options):
    info = {"every": EVERY, "fingerprint": fingerprint, "precision": PRECISION}
    return open_run(path, catalog, first, info, **options)


def write(path, catalog, steps=10, *, first=0, close=True, **options):
    """Write a run; with ``close=None``, leave it as a live process does after it has written its files."""
    sink = opened(path, catalog, first, **options)
    for record in records_of(catalog, max(10, steps), first=first)[:steps]:
        sink.write([record], [])
    if close is None:
        sink._flush(now=True)
    (sink.close if close else sink._free)()
    return path


def check(path, records, **options):
    run = read_run(path, **options)
    assert same_records(run.records(), records)
    return run


def files_of(path, schema):
    return sorted((path / schema.name).glob("*.parquet"))


@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize("fingerprint", [True, False])
def test_rows_come_back_as_they_were(tmp_path, catalog, close, fingerprint):
    records = records_of(catalog, 24, nonfinite_at=4, fingerprint=fingerprint)
    sink = opened(tmp_path, catalog, fingerprint=fingerprint, segment_steps=10)
    for record in records:
        sink.write([record], [])
    # two segments, and a journal
    assert list(list_journals(tmp_path)) == [(1, 20)]
    (sink.close if close else sink._free)()
    run = check(tmp_path, records)
    assert verify(tmp_path).whole
    for kind in catalog.kinds.values():
        schema = run.catalog.kinds[kind.name].schema
        measured = [record for record in records if record.has(kind.name)]
        names = [*schema.index, "numel", *schema.names][:: 60 if len(schema.index) > 100 else 1]
        for statistic in [*names, *(["flags"] if schema.flags else [])]:
            steps, matrix = run.matrix(statistic, kind.name)
            assert steps == [record.step for record in measured]
            assert matrix.dtype == torch.float64
            tables = [record.tables[kind.name] for record in measured]
            values = [x.flags if statistic == "flags" else x.value(statistic) for x in tables]
            pairs = zip(tables, values, strict=True)
            expected = torch.stack([torch.where(x.measured, y.double(), torch.nan) for x, y in pairs])
            torch.testing.assert_close(matrix, expected, rtol=0, atol=0, equal_nan=True)
    # an attempt after a kill moves the journal to files
    write(tmp_path, catalog, 4, first=22)
    assert list_journals(tmp_path) == {}
    assert len(list_segments(tmp_path)) == 4
    check(tmp_path, records, attempt=1)
    assert verify(tmp_path).whole


def test_the_table_is_as_documented(tmp_path, catalog):
    write(tmp_path, catalog)
    schema, run = schema_of(catalog), read_run(tmp_path)
    (file,) = files_of(tmp_path, schema)
    assert pq.read_schema(file).equals(arrow_schema(fields_of(schema)))
    assert pq.read_schema(files_of(tmp_path, TENSORS)[0]).equals(arrow_schema(fields_of(TENSORS)))
    assert run.steps.schema.equals(arrow_schema(step_fields(catalog)))
    table = run.table(schema.name)
    assert table.schema.equals(arrow_schema(fields_of(schema)))
    kinds = [kind for kind in catalog.kinds.values() if kind.schema is schema]
    places = [(row["step"], row["kind"], row["name"]) for row in table.to_pylist()]
    assert places == [
        (record.step, kind.name, name)
        for record in records_of(catalog, 10)
        for kind in kinds
        if record.has(kind.name)
        for name, there in zip(record.names(kind.name), record.tables[kind.name].measured, strict=True)
        if there
    ]
    assert run.tensors(kind=kinds[0].name).equals(run.table(schema.name, kind=kinds[0].name))
    assert run.table(schema.name, columns=["step"]).column_names == ["step"]
    with pytest.raises(RunError, match=rf"there is no column 'x' of {schema.name}; choose from step"):
        run.table(schema.name, columns=["x"])
    with pytest.raises(RunError, match=r"has no table 'x'; choose from tensors"):
        run.table("x")
    empty = schema_table(schema, [], 1, catalog)
    assert empty.schema.equals(arrow_schema(fields_of(schema)))
    assert columns_of(schema, empty).shape == (0, schema.width)


def test_a_segment_has_a_file_only_of_the_tables_that_it_has_rows_of(tmp_path, catalog):
    schema, size = schema_of(catalog), step_size(catalog)
    write(tmp_path, catalog, 10, segment_steps=1)
    assert len(list_segments(tmp_path)) == 10
    assert [int(file.stem[-10:]) for file in files_of(tmp_path, schema)] == list(range(0, 10, size))
    run = check(tmp_path, records_of(catalog, 10))
    kinds = [set(kinds) for kinds in run.steps["kinds"].to_pylist()]
    assert kinds == [{*record.tables} for record in records_of(catalog, 10)]


def test_a_full_segment_counts_rows_of_all_tables(tmp_path, catalog):
    sparse = schema_of(catalog).storage == "sparse"
    # a sparse row counts as many
    write(tmp_path, catalog, 20, segment_rows=200 if sparse else 40)
    assert 1 < len(list_segments(tmp_path)) < 20
    check(tmp_path, records_of(catalog, 20))


def test_what_a_failing_disk_drops_goes_together(tmp_path, full, catalog):
    records = records_of(catalog, 13)
    sink = opened(tmp_path, catalog, segment_steps=2)
    full.add("")
    assert write_each(sink, records)
    full.clear()
    sink.close()
    left = steps_of(tmp_path)
    assert 0 < len(left) == 13 - sink.lost < 13
    check(tmp_path, [records[step] for step in left])


def test_a_later_attempt_without_the_kind_supersedes_it(tmp_path, catalog):
    write(tmp_path, catalog, 10)
    other = make_catalog(4)
    write(tmp_path, other, 3, first=5)
    run = read_run(tmp_path)
    assert [*run.catalog.kinds] == [*catalog.kinds]
    found = list(run.records())
    assert all(map(same_bits, found[:5], records_of(catalog, 10)))
    for one, expected in zip(found[5:], records_of(other, 10, first=5)[:3], strict=True):
        assert [*one.tables] == [*expected.tables]
        if one.recorded:
            assert torch.equal(one.columns(), expected.columns())
    check(tmp_path, records_of(catalog, 10), attempt=1)


def test_a_kill_between_the_replacements_of_files_is_no_damage(tmp_path, catalog):
    schema, first = schema_of(catalog), 1
    for steps in (7, 10):
        write(tmp_path / str(steps), catalog, steps, close=None)
    shutil.copy(files_of(tmp_path / "10", schema)[0], files_of(tmp_path / "7", schema)[0])
    check(tmp_path / "7", records_of(catalog, 10)[:7])
    assert verify(tmp_path / "7").whole
    # of a segment that had no rows before
    for steps in (1, 6):
        write(tmp_path / f"from {steps}", catalog, steps, first=first, close=None)
    assert files_of(tmp_path / "from 1", schema) == []
    shutil.copy(files_of(tmp_path / "from 6", schema)[0], tmp_path / "from 1" / schema.name)
    check(tmp_path / "from 1", records_of(catalog, 10, first=first)[:1])
    assert verify(tmp_path / "from 1").whole


def test_a_damaged_file_is_noticed_and_can_be_left_out(tmp_path, catalog, caplog):
    schema = schema_of(catalog)
    write(tmp_path, catalog, segment_steps=5)
    first, second = files_of(tmp_path, schema)
    flip_bit(first, first.stat().st_size // 2)
    run, name = read_run(tmp_path), f"{schema.name}/{first.name}"
    for ask in (
        lambda: run.table(schema.name),
        lambda: [x.columns(k) for x in run.records() for k in x.tables],
    ):
        with pytest.raises(RunError, match=rf"{first.name} cannot be read"):
            ask()
    assert [(f.name, f.state) for f in verify(tmp_path).of("damaged", "missing")] == [(name, "damaged")]
    left = read_run(tmp_path, skip_damaged=True)
    assert list(left.damaged) == [name]
    assert min(left.table(schema.name)["step"].to_pylist()) >= 5
    # of a table that is stored sparsely, only its rows are left out
    is_sparse = schema.storage == "sparse"
    assert left.steps["step"].to_pylist() == list(range(0 if is_sparse else 5, 10))
    assert {left.record(step).recorded for step in left.steps["step"].to_pylist()[::2]} <= {True, False}
    if is_sparse:
        assert run.record(0).has("grads")
        assert run.precision(6).step == 6
        assert not left.record(0).has("grad_exponents")
        assert left.precision_steps == [6, 9]
    assert "left out" in caplog.text
    second.unlink()
    assert [f.state for f in verify(tmp_path).of("damaged", "missing")] == ["damaged", "missing"]
    with pytest.raises(RunError, match="cannot be read"):
        read_run(tmp_path).table(schema.name, first=5)


def test_a_file_of_another_version_is_noticed(tmp_path, catalog):
    schema, path = schema_of(catalog), tmp_path / "run"
    write(path, catalog, 7)
    older = files_of(path, schema)[0].read_bytes()
    shutil.rmtree(path)
    write(path, catalog, 10)
    files_of(path, schema)[0].write_bytes(older)
    assert not verify(path).whole
    with pytest.raises(RunError, match=r"it is not the version that steps-0001-0000000000\.parquet"):
        read_run(path).table(schema.name)


def change_column(path, name, change):
    """Change a column of a file, and return what is wrong with it then."""
    table = pq.read_table(path)
    words = pa.array(["x"] * len(table))
    changed, message = {
        "missing": (table.drop_columns([name]), f"it has no column {name}"),
        "type": (
            table.set_column(table.column_names.index(name), name, words),
            f"column {name} has the type string",
        ),
        "twice": (table.append_column(name, table[name]), f"it has 2 columns {name}"),
    }[change]
    pq.write_table(changed, path)
    seal(path.parents[1])
    return message


@pytest.mark.parametrize("change", ["missing", "type", "twice"])
def test_columns_that_nobody_can_read_are_refused(tmp_path, catalog, change):
    schema = schema_of(catalog)
    write(tmp_path, catalog)
    message = change_column(files_of(tmp_path, schema)[0], fields_of(schema)[5].name, change)
    with pytest.raises(RunError, match=message):
        read_run(tmp_path).table(schema.name)


# a kind of a user's own


def test_derived_values_of_a_kind_are_known_where_it_is_registered(tmp_path, monkeypatch):
    catalog = make_catalog(3, ("grads", NEGATIVES))
    write(tmp_path, catalog)
    run = read_run(tmp_path)
    assert run.catalog.kinds["negatives"] != NEGATIVES
    with pytest.raises(RunError, match="there is no statistic 'negative_fraction'; choose from numel, n_neg"):
        run.matrix("negative_fraction", "negatives")
    monkeypatch.setitem(KINDS, "negatives", NEGATIVES)
    run = read_run(tmp_path)
    assert run.catalog == catalog
    _, found = run.matrices(["negative_fraction", "n_negative", "numel"], "negatives")
    assert torch.equal(found["negative_fraction"], found["n_negative"] / found["numel"])
    # not of other columns under the same name
    other = replace(NEGATIVES, schema=replace_columns(NEGATIVES.schema), measure=lambda tensors: tensors)
    monkeypatch.setitem(KINDS, "negatives", other)
    assert "negative_fraction" not in read_run(tmp_path).catalog.kinds["negatives"].schema


def replace_columns(schema):
    changed = replace(schema.columns[1], name="n_below")
    columns = (schema.columns[0], changed, *schema.columns[2:])
    return type(schema)(schema.name, columns, schema.derived)


def test_a_schema_with_other_columns_is_refused_unless_nothing_of_the_earlier_is_left(tmp_path):
    write(tmp_path, make_catalog(3, ("grads", NEGATIVES)))
    other = make_catalog(3, ("grads", replace(NEGATIVES, name="n", schema=replace_columns(NEGATIVES.schema))))
    with pytest.raises(RunError, match=r"has other tables .*'negatives': there are two of this name"):
        opened(tmp_path, other, 5)
    write(tmp_path, other, 3)
    check(tmp_path, records_of(other, 10)[:3])
    check(tmp_path, records_of(make_catalog(3, ("grads", NEGATIVES)), 10), attempt=1)


@pytest.mark.parametrize("name", ["steps", "../up", "a b", ""])
def test_a_schema_whose_name_is_none_of_a_folder_is_refused(tmp_path, name):
    schema = type(NEGATIVES.schema)(name, NEGATIVES.schema.columns)
    with pytest.raises(RunError, match=r"cannot hold these tables .*a name has letters"):
        opened(tmp_path, make_catalog(2, ("grads", replace(NEGATIVES, schema=schema))))


@pytest.mark.parametrize(
    ("column", "value"), [("n_negative", -1), ("n_negative", math.nan), ("numel", 2.0**60)]
)
def test_numbers_that_readers_would_refuse_are_left_out(tmp_path, column, value):
    kind = replace(NEGATIVES, measure=lambda tensors: tensors)
    catalog = make_catalog(2, ("grads", kind))
    bad, good = records_of(catalog, 3)[::2]
    values = bad.columns("negatives").clone()
    values[0, kind.schema.index[column]] = value
    sink = opened(tmp_path, catalog)
    bad = replace(bad, tables=bad.tables | {"negatives": make_table(catalog, values, "negatives")})
    with pytest.raises(ValueError, match=f"negatives of step 0 are left out: column {column}"):
        sink.write([bad], [])
    sink.write([good], [])
    sink.close()
    check(tmp_path, [replace(bad, tables={"grads": bad.tables["grads"]}), good])
    assert sink.lost == 0


# fingerprints

CATALOG = make_catalog(3, ("grads", "weights", "updates"))


def with_fingerprints(steps=24):
    """Steps with the largest sums, an unmeasured tensor, and one without a fingerprint."""
    records = records_of(CATALOG, steps, fingerprint=True)
    grads, weights = [records[4].tables[kind] for kind in ("grads", "weights")]
    grads.fingerprints[:2, 1:] = torch.tensor([[2**63 - 1, -(2**63)], [-1, 0]])
    weights.fingerprints[2] = torch.tensor([-1, 0, 0])
    weights.values[0], weights.fingerprints[0] = 0, 0
    return records


@pytest.mark.parametrize("close", [True, False])
def test_fingerprints_are_read_bit_by_bit_and_null_without_one(tmp_path, close):
    records, sink = with_fingerprints(), opened(tmp_path, CATALOG, fingerprint=True, segment_steps=10)
    for record in records:
        sink.write([record], [])
    (sink.close if close else sink._free)()
    run = check(tmp_path, records)
    assert run.has_fingerprints
    assert run.record(4).fingerprints("updates") is run.record(5).fingerprints() is None
    largest = run.record(4).report()["blocks.0.weight"].fingerprint
    assert (largest.word_sum, largest.weighted_sum) == (2**63 - 1, 2**63)
    assert run.record(4).report("weights")["blocks.1.weight"].fingerprint is None
    assert run.record(4).report().to_dict()["tensors"]["blocks.0.bias"]["fingerprint"] == "f" * 16 + "0" * 16
    table = run.tensors(first=4, last=4)
    assert table.schema.equals(arrow_schema(fields_of(TENSORS, fingerprints=True)))
    rows = {(row["kind"], row["name"]): row for row in table.to_pylist()}
    assert len(rows) == 5  # one was not measured
    names = [field.name for field in FINGERPRINTS]
    assert [rows["grads", "blocks.0.weight"][name] for name in names] == [4 * 64 * 64, 2**63 - 1, 2**63]
    assert [rows["grads", "blocks.0.bias"][name] for name in names] == [4 * 64, 2**64 - 1, 0]
    assert [rows["weights", "blocks.1.weight"][name] for name in names] == [None] * 3
    some = run.tensors(columns=["word_sum", "step"], kind="grads", first=6, last=8)
    assert (some.column_names, some["step"].to_pylist()) == (["word_sum", "step"], [6] * 3 + [8] * 3)
    for file in files_of(tmp_path, TENSORS):
        assert pq.read_schema(file).equals(table.schema)


def test_without_fingerprints_their_columns_are_null(tmp_path):
    run = read_run(write_run(tmp_path, 3, 24, segment_steps=10))
    assert not run.has_fingerprints
    assert run.tensors(columns=["step", "word_sum"])["word_sum"].null_count == 3 * 24
    assert run.record(23).fingerprints() is None


@pytest.mark.parametrize("before", [True, False])
def test_a_resumed_run_may_begin_or_cease_to_record_fingerprints(tmp_path, before):
    first, second = (
        records_of(CATALOG, 12, first=start, fingerprint=has, seed=start)
        for start, has in ((0, before), (8, not before))
    )
    for records, has in ((first, before), (second, not before)):
        sink = opened(tmp_path, CATALOG, records[0].step, fingerprint=has)
        sink.write(records, [])
        sink.close()
    run = check(tmp_path, [*first[:8], *second])
    assert run.has_fingerprints
    assert run.tensors()["n_bytes"].null_count == 6 * (6 if before else 4)
    assert check(tmp_path, first, attempt=1).has_fingerprints is before


@pytest.mark.parametrize("has", [True, False])
def test_a_step_that_is_not_as_the_run_was_started_is_refused(tmp_path, has):
    sink = opened(tmp_path, CATALOG, fingerprint=not has)
    (record,) = records_of(CATALOG, 1, fingerprint=has)
    with pytest.raises(ValueError, match=r"step 0 has (no )?fingerprints, but the run was started with"):
        sink.write([record, replace(record, step=1, tables={})], [])
    sink.close()
    assert sink.lost == 1
    assert read_run(tmp_path).steps["step"].to_pylist() == [1]


def test_a_monitor_records_the_fingerprints_that_collect_computes(tmp_path):
    torch.manual_seed(0)
    model, expected = nn.Linear(3, 2), []
    options = {"rules": (), "weights": True, "updates": True, "fingerprint": True}
    with gm.Monitor(model, run_dir=tmp_path, **options) as monitor:
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
    assert same_bits(run.record(2), monitor.last)


@pytest.mark.parametrize("change", ["type", "twice", "missing"])
def test_columns_of_fingerprints_are_checked_and_without_one_there_are_none(tmp_path, change):
    path = write_run(tmp_path, 2, 4, fingerprint=True)
    message = change_column(files_of(path, TENSORS)[0], "word_sum", change)
    if change == "missing":
        assert read_run(path).record(1).fingerprints() is None
    else:
        with pytest.raises(RunError, match=message):
            read_run(path).record(1)


# histograms of exponents

HISTOGRAMS = make_catalog(4, ("grads", "weights", "grad_exponents", "weight_exponents"))


def test_histograms_are_read_by_step_and_kind(tmp_path):
    run = read_run(write(tmp_path, HISTOGRAMS, segment_steps=4))
    records = records_of(HISTOGRAMS, 10)
    assert run.precision_steps == [0, 3, 6, 9]
    assert [step for step, _ in run.precisions("weights", first=3, last=6)] == [3, 6]
    assert run.precision().step == 9
    for step in run.precision_steps:
        for kind, name in (("grads", "grad_exponents"), ("weights", "weight_exponents")):
            stats = run.precision(step, kind).stats
            assert stats.names == run.catalog.names[:3], "the fourth tensor was not measured"
            assert torch.equal(stats.columns, records[step].columns(name)[:3])
    rows = run.exponents("grads", first=3, last=3).to_pylist()
    assert [row["kind"] for row in rows] == ["grad_exponents"] * 3
    assert (rows[1]["positions"], rows[1]["values"]) == ([0], [17])
    assert (rows[2]["positions"], rows[2]["values"]) == ([958, 959], [2, 3])
    assert len(run.exponents()) == 2 * len(run.exponents("weights")) == 24
    without = read_run(write_run(tmp_path / "without", 2, 3))
    assert (without.precision_steps, len(without.exponents())) == ([], 0)


@pytest.mark.parametrize(
    ("step", "kind", "words"),
    [
        (4, "grads", "no histograms of step 4; there are 4, from 0 to 9, and the nearest is that of step 3"),
        (3, "updates", r"no histograms of updates in step 3; Monitor\(weights=True\)"),
        (None, "updates", r"no histograms of updates in step 9"),
    ],
)
def test_histograms_that_are_not_there_are_named(step, kind, words, tmp_path):
    run = read_run(write(tmp_path, HISTOGRAMS))
    with pytest.raises(RunError, match=words):
        run.precision(step, kind)


def test_the_report_prints_and_answers_for_other_formats_and_scales(tmp_path):
    model = nn.Linear(3, 2, bias=False)
    with gm.Monitor(model, run_dir=tmp_path, precision=1, rules=()) as monitor:
        model.weight.grad = torch.tensor([[1e-9, 1e-3, 1.0], [3e5, 0.0, math.nan]])
        monitor.record()
        monitor.advance()
    found = read_run(tmp_path).precision(formats=["fp16"])
    expected = gm.precision_report({"weight": model.weight.grad}, ["fp16"])
    assert str(found) == f"grads of step 0: {expected}"
    assert dict(found) == dict(expected)
    assert found.stats.n_overflowed("float16", 2.0**-8).tolist() == [0]
    assert found.stats.n_flushed("float8_e4m3fn", 2.0**30).tolist() == [0]
    with pytest.raises(ValueError, match="'fp64' is not one of the formats"):
        read_run(tmp_path).precision(formats=["fp64"])


def test_a_histogram_takes_little_space(tmp_path):
    catalog = make_catalog(100, ("grads", "grad_exponents"))
    sink, g = opened(tmp_path, catalog), torch.Generator().manual_seed(0)
    for record in make_records(catalog, 20):
        tensors = {name: torch.randn(4096, generator=g) for name in catalog.names}
        counts = make_table(catalog, gm.collect_exponents(tensors).columns, "grad_exponents")
        sink.write([replace(record, tables=record.tables | {"grad_exponents": counts})], [])
    sink.close()
    # 960 counts of 8 bytes; a float32 tensor of normal numbers has some 30 bins that are not empty
    assert files_of(tmp_path, EXPONENTS)[0].stat().st_size < 60 * 20 * 100
    assert (tmp_path / "run.json").stat().st_size < 12_000
    assert int(read_run(tmp_path).precision().stats.numel.sum()) == 100 * 4096
