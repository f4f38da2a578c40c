"""What the reports of every schema do alike: a mapping, exports, and the table as text and HTML."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
import sys
from html.parser import HTMLParser

import pytest
import torch

import gradiometer as gm
from gradiometer.columns import TENSORS
from gradiometer.stats import TableReport, report_of
from support.kinds import COLLECT, NAMES, SCHEMAS, report_of_kind, stats_of_kind

ROWS = {
    "tensors": gm.TensorReport,
    "pairs": gm.PairRow,
    "exponents": gm.PrecisionRow,
    "activations": gm.ActivationRow,
}
NOUNS = {"pairs": "pair", "activations": "activation", "signs": "row"}
RULE = "─"


@pytest.fixture(params=SCHEMAS)
def kind(request):
    return request.param


@pytest.fixture
def report(kind):
    return report_of_kind(kind)


def cells_of(line):
    return re.split(r" {2,}", line.strip())


def plain(x):
    if type(x) is dict:
        return all(type(key) is str and plain(value) for key, value in x.items())
    if type(x) is list:
        return all(plain(value) for value in x)
    return x is None or type(x) in {str, int, float, bool}


def equal(a, b):
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


# the mapping


def test_it_is_a_mapping_from_names_to_rows(kind, report):
    assert isinstance(report, TableReport)
    assert report.schema is SCHEMAS[kind]
    assert list(report) == list(report.keys()) == list(report.names) == list(NAMES)
    rows = report.rows()
    assert [row.name for row in rows] == list(NAMES)
    assert rows == list(report.values()) == [report[name] for name in NAMES]
    assert dict(report) == dict(zip(NAMES, rows, strict=True))
    assert (len(report), report.measured) == (3, True)
    assert [name in report for name in ("a.b", "x", 3)] == [True, False, False]
    assert report.get("x") is None
    with pytest.raises(
        KeyError, match=f"no {NOUNS.get(kind, 'tensor')} 'x' in this report; see report.names"
    ):
        report["x"]
    if kind in ROWS:
        assert {type(row) for row in rows} == {ROWS[kind]}
        with pytest.raises(AttributeError):
            rows[0].name = "y"


def test_rows_have_the_values_of_the_stats(kind, report):
    schema, stats = SCHEMAS[kind], stats_of_kind(kind)
    rows = [*report.rows(), report.total]
    assert report.total.name == "total"
    checked = 0
    for name in schema.attributes:
        if not hasattr(rows[0], name):
            continue
        values = [*getattr(stats, name).tolist(), stats.total_value(name).item()]
        for row, value in zip(rows, values, strict=True):
            found = getattr(row, name)
            if found is not None:
                # a magnitude that there is not is None in reports of formats
                assert equal(found, value), name
                assert type(found) is (
                    int if schema[name].is_count or schema.dtype == torch.int64 else float
                ), name
        checked += 1
    assert checked >= 5


def test_rows_of_a_schema_without_a_class_have_every_value(kind):
    schema, stats = SCHEMAS[kind], stats_of_kind(kind)
    report = TableReport(stats.names, stats.columns, schema=schema)
    for name in schema.attributes:
        assert equal(getattr(report["a.w"], name), getattr(stats, name)[0].item()), name
    assert list(report.to_dict()["rows"]["a.w"]) == list(schema.attributes)
    assert "a.w" in str(report)
    assert "a.w" in report._repr_html_()


def test_without_rows(kind):
    schema = SCHEMAS[kind]
    report = report_of(schema, (), torch.zeros((0, schema.width), dtype=schema.dtype))
    assert (list(report), report.rows(), report.measured) == ([], [], False)
    assert str(report).startswith("nothing measured: no ")
    assert report._repr_html_() == f"<p>{report}</p>"
    assert repr(report).startswith(f"<{type(report).__name__}: nothing measured: no ")
    assert plain(report.to_dict())


# flags, ranks


def test_flags_of_any_schema(kind):
    flags = torch.tensor([0, int(gm.Flag.DEAD), int(gm.Flag.NAN | gm.Flag.INF)], dtype=torch.int32)
    report = report_of_kind(kind, flags=flags)
    assert report.flagged(gm.Flag.NAN) == ["b.w"]
    assert report.flagged(gm.Flag.DEAD | gm.Flag.INF) == ["a.b", "b.w"]
    assert report.flagged(gm.Flag(0)) == []
    rows = report.to_dict()[f"{NOUNS.get(kind, 'tensor')}s"]
    if kind != "exponents":
        assert [rows[name]["flags"] for name in NAMES] == [[], ["DEAD"], ["NAN", "INF"]]
        lines = {cells_of(line)[0]: cells_of(line)[-1] for line in str(report).splitlines()[4:]}
        assert (lines["a.b"], lines["b.w"]) == ("DEAD", "NAN INF")
        assert lines.get("total", "2 flagged") == "2 flagged"
    for flag in ("NAN", 1, None):
        with pytest.raises(TypeError, match=r"flag must be a gm\.Flag"):
            report.flagged(flag)


def test_ranks_and_local_shards(kind, report):
    assert (report.is_reduced, report.is_local, report.ranks) == (False, False, {})
    reduced = report_of_kind(kind, ranks={"b.w": 3})
    assert (reduced.is_reduced, reduced.ranks) == (True, {"b.w": 3})
    exported = reduced.to_dict()
    assert (exported["ranks"], exported["is_reduced"], exported["is_local"]) == ({"b.w": 3}, True, False)
    exported["ranks"].clear()
    assert reduced.ranks == {"b.w": 3}
    header = next(line for line in str(reduced).splitlines() if line.startswith("name "))
    assert "rank" in cells_of(header)
    assert " of all ranks, " in str(reduced)
    assert "rank" not in str(report_of_kind(kind, ranks={})).splitlines()[2]
    assert ", this rank's shards only" in repr(report_of_kind(kind, is_local=True))


# exports


def test_it_exports_plain_python(kind, report):
    exported = report.to_dict()
    assert plain(exported)
    rows = exported[f"{NOUNS.get(kind, 'tensor')}s"]
    assert list(rows) == list(NAMES)
    for name, row in [*rows.items(), ("total", exported["total"])]:
        source = report.total if name == "total" else report[name]
        assert "name" not in row
        for key, value in row.items():
            if key not in {"flags", "formats"}:
                assert equal(value, getattr(source, key)), key
    again = json.loads(json.dumps(exported))
    assert repr(again) == repr(exported)
    rows["a.w"].clear()
    assert repr(again) == repr(report.to_dict())


def test_a_frame_has_a_row_for_each_name(kind, report):
    pd = pytest.importorskip("pandas")
    frame = report.to_frame()
    assert isinstance(frame, pd.DataFrame)
    assert (list(frame.index), frame.index.name) == (list(NAMES), "name")
    exported = report.to_dict()[f"{NOUNS.get(kind, 'tensor')}s"]
    flat = {}
    for name, row in exported.items():
        formats = row.pop("formats", {})
        flat[name] = row | {f"{form}.{key}": x for form, fit in formats.items() for key, x in fit.items()}
    assert list(frame.columns) == list(flat["a.w"])
    for name, row in flat.items():
        assert all(
            equal(frame.loc[name, key], value) or (value is None and pd.isna(frame.loc[name, key]))
            for key, value in row.items()
        )
    counts = [x.name for x in (*SCHEMAS[kind].columns, *SCHEMAS[kind].derived) if x.is_count]
    assert {str(frame[name].dtype) for name in counts if name in frame} == {"int64"}
    empty = report_of(SCHEMAS[kind], (), report._columns[:0]).to_frame()
    assert (empty.shape, list(empty.columns)) == ((0, frame.shape[1]), list(frame.columns))
    reduced = report_of_kind(kind, ranks={"b.w": 3}).to_frame()
    assert list(reduced.columns) == [*frame.columns, "rank"]
    assert reduced["rank"].to_dict() == {"a.w": -1, "a.b": -1, "b.w": 3}
    assert reduced["rank"].dtype == "int64"


def test_without_pandas_the_error_says_what_to_install(monkeypatch, report):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"^to_frame needs pandas: pip install 'gradiometer\[frame\]'$"):
        report.to_frame()
    # everything else works without it
    assert report.to_dict()
    assert str(report)


def test_copies_are_the_same_report(kind, report):
    reduced = report_of_kind(kind, ranks={"b.w": 3})
    pickles = [] if kind == "signs" else [lambda x: pickle.loads(pickle.dumps(x))]  # noqa: S301
    for each in (report, reduced):
        # cached rows are copied too
        for again in [copied(each) for copied in (*pickles, copy.deepcopy, copy.copy) for _ in range(2)]:
            assert type(again) is type(each)
            assert (str(again), again.names) == (str(each), each.names)
            assert repr(again.to_dict()) == repr(each.to_dict())


# the table


def table_of(text):
    """Return the headline, the header, the lines of rows, and the last line."""
    headline, rule, header, _, *lines = text.splitlines()
    assert set(rule) == {RULE}
    end = lines.index(rule) if rule in lines else len(lines)
    return headline, cells_of(header), lines[:end], lines[end + 1 :]


def test_every_value_stands_under_the_heading_of_its_schema(kind, report):
    schema = SCHEMAS[kind]
    headline, header, rows, last = table_of(str(report))
    noun = NOUNS.get(kind, "tensor")
    assert headline.startswith(f"3 {noun}s, ")
    assert repr(report) == f"<{type(report).__name__}: {headline}>"
    if kind != "exponents":
        headings = [schema[name].heading or name.replace("_", " ") for name in schema.shown]
        assert header[: len(headings) + 1] == ["name", *headings]
        for line in (*rows, *last):
            cells = cells_of(line)
            row = report.total if cells[0] == "total" else report[cells[0]]
            for name, cell in zip(schema.shown, cells[1:], strict=False):
                value, style = getattr(row, name), schema[name].style
                if style == "fraction":
                    assert cell in {"-", "<0.1"} or abs(float(cell) - 100 * value) <= 0.05
                elif cell != "-":
                    assert equal(float(cell.split(" of ")[0].replace(",", "")), float(f"{value:.2e}"))
                else:
                    assert value == 0 or math.isnan(value) or style == "finite"
    assert sorted(cells_of(line)[0] for line in rows) == sorted(NAMES)
    assert [cells_of(line)[0] for line in last[:1]] == ["total"] * (kind != "activations")


@pytest.mark.parametrize("max_rows", [0, 1, 2, 3, None])
def test_a_table_is_as_long_as_asked(report, max_rows):
    everything = table_of(report.to_string(None))[2]
    headline, _, rows, last = table_of(report.to_string(max_rows))
    shown = 3 if max_rows is None else max_rows
    assert headline == str(report).splitlines()[0]
    assert [cells_of(line)[0] for line in rows[:shown]] == [cells_of(x)[0] for x in everything[:shown]]
    if shown < 3:
        assert rows[shown].startswith(f"… {3 - shown} more")
    assert len(rows) == shown + (shown < 3)
    assert [cells_of(x) for x in last] == [cells_of(x) for x in table_of(str(report))[3]]


@pytest.mark.parametrize("rows", [-1, 2.5, "a"])
def test_a_number_of_rows_that_is_none_is_refused(report, rows):
    with pytest.raises(ValueError, match="max_rows must be a non-negative integer, or None"):
        report.to_string(rows)


def test_a_long_table_is_abridged(kind):
    stats = COLLECT[kind]({f"layers.{i}": torch.ones(2) for i in range(50)})
    report = report_of(SCHEMAS[kind], stats.names, stats.columns)
    most = 40 if kind in {"activations", "exponents"} else 20
    assert f"\n… {50 - most} more" in str(report)
    assert " more" not in report.to_string(None)


def test_the_table_in_html_has_the_same_cells(kind):
    stats = COLLECT[kind]({"<b>&a": torch.tensor([3.0, -4.0]), "x\ny": torch.zeros(3), "b.w": torch.ones(2)})
    report = report_of(SCHEMAS[kind], stats.names, stats.columns, ranks={"<b>&a": 1})
    page = report._repr_html_()
    tags, texts = [], []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, _: tags.append(tag)
    parser.handle_data = lambda data: texts.append(data.strip())
    parser.feed(page)
    foot = ["tfoot"] * (kind != "activations")
    assert set(tags) == {"p", "table", "thead", "tbody", *foot, "tr", "th", "td"}
    headline, header, rows, last = table_of(str(report))
    assert texts[0] == headline
    assert "<b>&a" in texts
    assert "x\\ny" in texts
    found = [text for text in texts if text]
    cells = [*header, *[x for line in rows for x in cells_of(line)], *(cells_of(last[0]) if last else [])]
    assert found[1 : len(cells) + 1] == cells


def test_modules_in_html():
    report = gm.collect({"<a>.w": torch.ones(2), "b.w": torch.ones(3)}).materialize()
    page = report.by_module(1)._repr_html_()
    assert re.search(r">&lt;a&gt;</td><td [^>]*>1</td><td [^>]*>2</td>", page)
    assert page.count("<tr>") == 3
    assert "nothing measured" in gm.collect({}).materialize().by_module()._repr_html_()


def test_thresholds_and_fingerprints_of_a_recorded_table():
    stats = gm.collect({"w": torch.tensor([3.0, 4.0])}, fingerprint=True)
    report = report_of(
        TENSORS,
        stats.names,
        stats.columns,
        thresholds=gm.Thresholds(exploding=4.0),
        fingerprints=stats.fingerprints,
    )
    # without flags they are computed
    assert report.exploding == ["w"]
    assert report["w"].fingerprint == stats.materialize()["w"].fingerprint
    assert report.to_dict()["thresholds"]["exploding"] == 4.0
