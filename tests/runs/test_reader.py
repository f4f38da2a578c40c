"""Reading a run: tables, matrices, records, and errors that say what to do."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import replace
from itertools import product

import pytest
import torch

import gradiometer as gm
from gradiometer.columns import ACTIVATIONS, EXPONENTS, PAIRS, TENSORS, Thresholds
from gradiometer.recorder import StepRecord
from gradiometer.rules.finding import Finding, Severity
from gradiometer.runs import format as run_format
from gradiometer.runs import segments
from gradiometer.runs.digest import Claims, with_claims
from gradiometer.runs.files import RunError
from gradiometer.runs.format import arrow_schema, fields_of
from gradiometer.runs.parquet import to_parquet
from gradiometer.runs.reader import read_run
from gradiometer.runs.schema_table import schema_table
from support.pages import code_of, execute, text
from support.synthetic_run import make_catalog, make_records, make_table, open_run, write_records, write_run

pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    kinds = ("grads", "weights")
    return write_run(path, 9, 50, kinds=kinds, every=2, nonfinite_at=20, segment_steps=16)


@pytest.fixture
def own(path, tmp_path):
    """A copy that the test may damage."""
    shutil.copytree(path, tmp_path / "own")
    return tmp_path / "own"


def test_a_matrix_is_nan_where_nothing_was_measured_or_the_norm_is(tmp_path):
    catalog = make_catalog(3)
    values = next(make_records(catalog, 1, nonfinite_at=0)).columns().clone()
    values[2] = 0.0
    tables = [{"grads": make_table(catalog, x)} for x in (values, torch.zeros_like(values))]
    measured = {4: tables[0], 5: {}, 6: tables[1]}
    records = [StepRecord(step, 0.0, {}, catalog, found) for step, found in measured.items()]
    run = read_run(write_records(tmp_path, catalog, records))
    assert repr(run.matrix("norm")[1].tolist()) == "[[nan, inf, nan], [nan, nan, nan]]"
    assert repr(run.matrix("n_nan")[1].tolist()) == "[[3.0, 0.0, nan], [nan, nan, nan]]"
    assert run.matrix("finite_norm")[1].isnan().tolist() == [[False, False, True], [True] * 3]
    assert run.matrix("norm")[0] == [4, 6]


@pytest.mark.parametrize(
    ("first", "last"), [(None, None), (15, 33), (16, 16), (17, 17), (48, 900), (60, 70), (9, 3)]
)
def test_a_range_of_steps_is_read_whichever_segments_it_is_in(path, first, last):
    run = read_run(path)
    wanted = [s for s in range(50) if (first is None or s >= first) and (last is None or s <= last)]
    recorded = [s for s in wanted if s % 2 == 0]
    assert [record.step for record in run.records(first, last)] == wanted
    for statistic in ("norm", "rms"):
        steps, matrix = run.matrix(statistic, first=first, last=last)
        assert steps == recorded
        assert matrix.shape == (len(recorded), 9)
        assert matrix.isnan().sum() == (statistic == "norm" and 20 in recorded)
    table = run.tensors(first=first, last=last, columns=["step"])
    assert table["step"].to_pylist() == [s for s in recorded for _ in range(18)]


def test_rows_of_tensors_are_in_order_and_picked_by_kind_name_and_column(path):
    run = read_run(path)
    everything = run.tensors()
    assert everything.schema.equals(arrow_schema(fields_of(TENSORS)))
    places = [(row["step"], row["kind"], row["name"]) for row in everything.to_pylist()]
    assert places == [*product(range(0, 50, 2), run.catalog.kinds, run.catalog.names)]
    some = run.tensors(columns=["norm", "name"], kind="weights", names=["blocks.1.bias", "blocks.0.weight"])
    assert some.column_names == ["norm", "name"]
    assert some["name"].to_pylist() == ["blocks.0.weight", "blocks.1.bias"] * 25
    assert some["norm"].to_pylist() == run.matrix("norm", "weights")[1][:, [0, 3]].flatten().tolist()
    alone = run.tensors(names="blocks.1.bias", columns=["step", "name"])
    assert alone.equals(run.tensors(names=["blocks.1.bias"], columns=["step", "name"]))
    assert alone["name"].unique().to_pylist() == ["blocks.1.bias"]
    assert run.tensors(names=["none"]).num_rows == 0
    assert run.tensors(columns=[]).num_columns == 0


def files_read(monkeypatch):
    """Return a list that gets the name of each Parquet file that is read."""
    read, real = [], segments.read_table

    def read_table(path, *rest, **more):
        read.append(path.name)
        return real(path, *rest, **more)

    monkeypatch.setattr(segments, "read_table", read_table)
    return read


def test_several_matrices_are_those_of_one_each(path, monkeypatch):
    run = read_run(path)
    wanted = ["rms", "flags", "norm", "n_zero"]
    ones = {name: run.matrix(name, first=3, last=40) for name in wanted}
    read = files_read(monkeypatch)
    steps, found = run.matrices(wanted, first=3, last=40)
    assert list(found) == wanted
    for name, (own_steps, values) in ones.items():
        assert steps == own_steps
        assert torch.equal(found[name].nan_to_num(nan=-1.0), values.nan_to_num(nan=-1.0))
    # each file is read once
    assert len(read) == len(set(read)) > 0
    assert run.matrices([])[1] == {}
    with pytest.raises(RunError, match="no statistic 'x'"):
        run.matrices(["norm", "x"])


def test_a_finding_ends_where_its_attempt_is_superseded(tmp_path):
    found = Finding("dead", Severity.WARNING, 10, 190, "grads", "w", 1.0, 1.0, "dead", "", count=150)
    write_run(tmp_path, 3, 200, findings=[found])
    write_run(tmp_path, 3, 20, first=50)
    assert read_run(tmp_path).findings == [replace(found, last_step=49, count=40)]


def test_one_step_is_a_record(path):
    run = read_run(path)
    record = run.record(20)
    assert record.skipped
    assert math.isnan(record.loss)
    assert record.report().nan == ["blocks.0.weight"]
    assert not run.record(21).recorded
    with pytest.raises(RunError, match="has no step 50; it has 50, from 0 to 49"):
        run.record(50)


def test_a_run_of_no_steps_is_empty(tmp_path):
    run = read_run(write_run(tmp_path, 3, 0))
    assert (run.steps.num_rows, run.tensors().num_rows, list(run.records())) == (0, 0, [])
    assert run.matrix("norm")[1].shape == (0, 3)
    assert (run.findings, run.blackbox) == ([], None)
    with pytest.raises(RunError, match="has no step 0; it has none yet"):
        run.record(0)


def test_thresholds_come_back(tmp_path):
    for thresholds in (Thresholds(0.5, 2.0, 0.25), Thresholds(exploding=math.inf)):
        open_run(tmp_path, make_catalog(1), info={"thresholds": thresholds}).close()
        assert read_run(tmp_path).thresholds == thresholds


def test_refresh_reads_what_is_new_and_nothing_else(tmp_path, monkeypatch):
    read = files_read(monkeypatch)
    catalog = make_catalog(2)
    records = list(make_records(catalog, 30))
    sink = open_run(tmp_path, catalog, segment_steps=10, segment_seconds=0)
    sink.write(records[:13], [])
    run = read_run(tmp_path)
    assert len(run.steps) == 13
    assert not run.refresh()
    assert read == ["steps-0001-0000000000.parquet", "steps-0001-0000000010.parquet"]
    read.clear()
    sink.write(records[13:22], [])
    assert len(run.steps) == 13  # until it is asked to refresh
    assert run.refresh()
    assert len(run.steps) == 22
    assert not run.refresh()
    assert read == ["steps-0001-0000000010.parquet", "steps-0001-0000000020.parquet"]
    assert run.matrix("norm")[1].shape == (22, 2)
    sink.close()
    assert run.refresh()
    assert run.info["closed"]
    # an attempt that starts at an earlier step supersedes rows
    write_run(tmp_path, 2, 1, first=15)
    assert run.refresh()
    assert run.steps["step"].to_pylist() == list(range(16))


def test_tensors_of_steps_that_were_not_written_are_left_out(own):
    # killed after the tensors were moved into place, and before the steps were
    catalog = make_catalog(9, ("grads", "weights"))
    records = list(make_records(catalog, 10, first=48))
    path = own / "tensors" / "tensors-0001-0000000048.parquet"
    claims = Claims("tensors", 1, 48, len(records))
    path.write_bytes(with_claims(to_parquet(schema_table(TENSORS, records, 1, catalog)), claims)[0])
    run = read_run(own)
    assert run.tensors(first=48)["step"].unique().to_pylist() == [48, 49]
    assert run.matrix("norm", first=40)[0] == [40, 42, 44, 46, 48]
    assert len(list(run.records(48))) == 2


def test_a_torn_segment_hides_no_other(own):
    for table in ("steps", "tensors"):
        file = own / table / f"{table}-0001-0000000016.parquet"
        file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(RunError, match=r"to read the other steps, move its segment's files away"):
        read_run(own).steps  # noqa: B018
    for table in ("steps", "tensors"):
        (own / table / f"{table}-0001-0000000016.parquet").unlink()
    assert read_run(own).matrix("norm")[0] == [*range(0, 16, 2), *range(32, 50, 2)]


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda run: run.matrix("median"), "there is no statistic 'median'; choose from numel, .*rms"),
        (
            lambda run: run.matrix("norm", "updates"),
            "has no 'updates'; choose from grads, weights, or record more with Monitor",
        ),
        (lambda run: run.tensors(kind="updates"), "has no 'updates'"),
        (
            lambda run: run.tensors(columns=["rms"]),
            "there is no column 'rms' of tensors; choose from step, attempt",
        ),
    ],
)
def test_what_there_is_not_is_said(path, ask, said):
    with pytest.raises(RunError, match=said):
        ask(read_run(path))


def test_opening_a_run_reads_no_table(path, monkeypatch):
    monkeypatch.setattr(segments, "read_table", None)
    run = read_run(str(path))
    assert repr(run) == f"<Run: {path}, 4 segments, 9 tensors>"


PAGE = text("docs/reference/run-record.md")


@pytest.mark.parametrize(
    ("table", "fields"),
    [
        ("`steps`", run_format.STEPS),
        ("`tensors`", fields_of(TENSORS)),
        ("`pairs`", fields_of(PAIRS)[len(run_format.ROW) :]),
        ("`activations`", fields_of(ACTIVATIONS)[len(run_format.ROW) :]),
        ("Fingerprints", run_format.FINGERPRINTS),
        ("`exponents`", fields_of(EXPONENTS)),
    ],
)
def test_the_page_documents_every_column(table, fields):
    body = re.search(rf"^## {table}\n(.*?)^## ", PAGE, flags=re.MULTILINE | re.DOTALL)[1]
    rows = re.findall(r"^\| `(.*?)` \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", body, flags=re.MULTILINE)
    types = {run_format.NAMES: "dictionary of strings"}
    assert rows == [
        (f.name, types.get(f.type, f.type), f.unit, "yes" if f.nullable else "", f.meaning) for f in fields
    ]
    assert [(f.name, f.type) for f in fields] == [(f.name, str(f.type)) for f in arrow_schema(fields)]


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """A run of two attempts with a bad step, in a folder of its own."""
    path = write_run(tmp_path_factory.mktemp("several"), 6, 40, segment_steps=16, nonfinite_at=12)
    return write_run(path, 6, 10, first=30, seed=1)


def test_the_page_reads_a_run_as_it_says(tmp_path, several):
    for name in ("pandas", "polars", "duckdb"):
        pytest.importorskip(name)
    code = code_of(PAGE)
    scope = execute(*code, run_dir=write_run(tmp_path, 6, 40, nonfinite_at=12))
    run = scope["run"]
    assert torch.equal(
        torch.tensor(scope["norms"][list(run.catalog.names)].to_numpy()).nan_to_num(-1.0),
        run.matrix("norm")[1].nan_to_num(-1.0),
    )
    assert scope["counted"]["attempt"].tolist() == [1] * 40
    assert scope["worst"]["name"].to_list() == ["blocks.0.weight"]
    assert scope["worst"]["step"].to_list() == [12]
    assert scope["largest"][0][:2] == ("blocks.0.bias", math.inf)
    assert str(scope["when"].dtype).startswith("datetime64")
    # a run of several attempts
    blocks = [code[1].replace("norms =", "# norms ="), code[3].split("\n")[0], *code[4:]]
    scope = execute(*blocks, run_dir=several, gm=gm)
    assert scope["steps"].index.tolist() == sorted([*range(40), *range(30, 40)])
    assert scope["first"].steps["step"].to_pylist() == list(range(40))
    kept = read_run(several).steps
    assert scope["counted"]["attempt"].tolist() == kept["attempt"].to_pylist() == [1] * 30 + [2] * 10
    assert [row[:2] for row in scope["counted_sql"]] == list(scope["counted"]["attempt"].items())


def test_no_reader_is_surprised_by_the_types(several):
    pd, pl, duckdb = (pytest.importorskip(name) for name in ("pandas", "polars", "duckdb"))
    rows = 6 * 50
    everything = [several / table for table in ("tensors", "steps")]
    frames = [pd.read_parquet(folder) for folder in everything]
    assert [len(frame) for frame in frames] == [rows, 50]
    assert frames[0]["name"].dtype == "category"
    lazy = [pl.scan_parquet(folder).collect() for folder in everything]
    assert [len(frame) for frame in lazy] == [rows, 50]
    wanted = {"step": pl.Int64, "attempt": pl.Int32, "norm": pl.Float64, "n_nan": pl.Int64, "flags": pl.Int32}
    assert {name: lazy[0].schema[name] for name in wanted} == wanted
    types = {}
    for folder in everything:
        described = duckdb.sql(f"DESCRIBE FROM read_parquet('{folder}/*.parquet')").fetchall()
        types[folder.name] = {name: kind for name, kind, *_ in described}
    assert types["tensors"]["name"] == types["tensors"]["kind"] == "VARCHAR"
    assert types["tensors"]["numel"] == "BIGINT"
    assert types["steps"]["scalars"] == "MAP(VARCHAR, DOUBLE)"
    # all readers give the same sums
    sums = [frames[0]["numel"].sum(), lazy[0]["numel"].sum()]
    total = f"SELECT sum(numel)::BIGINT FROM read_parquet('{everything[0]}/*.parquet')"  # noqa: S608
    sums += duckdb.sql(total).fetchall()[0]
    assert len(set(sums)) == 1
    nan = f"SELECT step FROM read_parquet('{everything[1]}/*.parquet') WHERE isnan(loss)"  # noqa: S608
    assert duckdb.sql(nan).fetchall() == [(12,)]
