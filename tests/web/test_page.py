"""The report page without a browser: its contents, its size, and that it loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

pytest.importorskip("pyarrow")

from gradiometer.columns import ACTIVATIONS, TENSORS
from gradiometer.recorder import KINDS
from gradiometer.rules.fault import Fault
from gradiometer.rules.finding import Severity
from gradiometer.runs.reader import Run, RunError, read_run
from gradiometer.web import data, matrices, write_page
from support.changed_records import changed, column
from support.findings import finding
from support.synthetic_page import Dense, dense_page, read_cells
from support.synthetic_run import NEGATIVES, TAPS, make_catalog, make_records, write_records, write_run

NAMES = (
    "<b>x</b>",
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "a\u2028b\u2029c",
    "\"'`&amp;",
    "é" * 2000,
)


class Scripts(HTMLParser):
    """The scripts of a page, as a browser separates them: (attributes, text)."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.found, self.tags, self.policy = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.found.append((dict(attrs), ""))
        if tag == "meta" and dict(attrs).get("http-equiv") == "Content-Security-Policy":
            self.policy = dict(attrs)["content"]

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] == "script":
            attributes, text = self.found[-1]
            self.found[-1] = attributes, text + data

    def handle_endtag(self, tag):
        self.tags.append((f"/{tag}", {}))


def whole(path):
    """Return the contents of a page's JSON."""
    scripts = Scripts(path.read_text(encoding="utf-8"))
    return json.loads(next(text for attributes, text in scripts.found if attributes.get("id") == "data"))


def held(path):
    """Return the values of the first run on a page."""
    return whole(path)["runs"][0]


PAIR = make_catalog(2)


def record(path, records, first_step=0, catalog=PAIR, **options):
    """Write these records, perhaps resuming a run, and read it."""
    return read_run(write_records(path, catalog, records, first_step, **options))


def line_of(page, name):
    """Return the points of a scalar."""
    found = next(one for one in page.values["scalars"] if one["name"] == name)
    return {key: found[key] for key in ("x", "y")}


def unmeasured(one, i):
    return changed(one, lambda table: table.values[i].zero_())


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "small", tensors=6, steps=40, nonfinite_at=30)


def expected(run, statistic):
    """Return the same matrix through `Run.matrix`: a non-finite tensor is so in every statistic."""
    norm, value = run.matrix("norm")[1], run.matrix(statistic)[1]
    return torch.where(norm.isfinite(), value, norm).T


@pytest.mark.parametrize("statistic", ["norm", "abs_max", "zero_fraction"])
def test_cells_are_the_runs_values_to_the_rounding_that_is_stated(small, statistic):
    run = read_run(small)
    page = data.page_of(run)
    entry = page.values["matrices"]["grads"][statistic]
    # half a code: codes are equidistant in the logarithm, or in the share
    half = (entry["high"] - entry["low"]) / 65531 / 2 * (1 + 1e-9)
    got, want = read_cells(page, statistic), expected(run, statistic)
    if entry["linear"]:
        torch.testing.assert_close(got, want, rtol=0, atol=half, equal_nan=True)
    else:
        torch.testing.assert_close(got, want, rtol=10**half - 1 + 1e-12, atol=0, equal_nan=True)
    assert got[0, 30].isnan()
    assert got[1, 30].isinf()


def test_rms_is_left_to_the_page_while_a_tensor_has_one_size(small):
    page = data.page_of(read_run(small))
    assert set(page.matrices) == {"grads-norm", "grads-abs_max", "grads-zero_fraction"}
    assert page.values["summary"]["grads"]["numel"] == [4096, 64] * 3


def test_a_column_of_several_steps_keeps_the_worst(small, monkeypatch):
    run = read_run(small)
    monkeypatch.setattr(matrices, "MOST_COLUMNS", 16)
    monkeypatch.setattr(matrices, "_WINDOW", 1)  # whatever the reading window
    page = data.page_of(run)
    assert page.values["binned"] == 3
    assert page.values["columns"]["first"] == list(range(0, 40, 3))
    assert page.values["columns"]["last"] == [*range(2, 39, 3), 39]
    want = expected(run, "norm")
    for c, (first, last) in enumerate(zip(*page.values["columns"].values(), strict=True)):
        block, got = want[:, first : last + 1], read_cells(page, "norm")[:, c]
        for values, cell in zip(block, got, strict=True):
            worst = math.nan if values.isnan().any() else values.max()
            assert float(cell) == pytest.approx(float(worst), rel=1e-3, abs=0, nan_ok=True)


def test_a_last_column_of_fewer_steps_invents_no_zero(tmp_path, monkeypatch):
    run = record(tmp_path / "run", [unmeasured(r, 1) if r.step >= 39 else r for r in make_records(PAIR, 40)])
    monkeypatch.setattr(matrices, "MOST_COLUMNS", 16)
    page = data.page_of(run)
    assert page.values["columns"]["last"][-2:] == [38, 39]  # three to a column, and one is left
    for statistic in page.values["matrices"]["grads"]:
        cells = read_cells(page, statistic)
        assert cells[1, -1] == -1, statistic
        assert (cells[1, :-1] >= 0).all(), statistic
        assert cells[0, -1] >= 0, statistic


def test_what_is_said_of_a_tensor_over_the_run(small):
    run = read_run(small)
    summary = data.page_of(run).values["summary"]["grads"]
    norm = expected(run, "norm")
    for i in range(6):
        finite = torch.where(norm[i].isfinite(), norm[i], -1)
        assert summary["largest"]["norm"][i] == pytest.approx(float(finite.max()), rel=1e-5)
        assert summary["at"][i] == int(finite.argmax())
    assert summary["broken"] == [1, 1, 0, 0, 0, 0]
    assert summary["flags"][:3] == [{"NaN": 1}, {"Inf": 1}, {}]


def test_only_recorded_steps_are_columns_and_all_steps_have_a_loss(tmp_path):
    page = data.page_of(read_run(write_run(tmp_path / "run", tensors=2, steps=50, every=10)))
    assert page.values["columns"]["first"] == [0, 10, 20, 30, 40]
    assert page.values["norm"]["x"] == [0, 10, 20, 30, 40]
    assert line_of(page, "loss")["x"] == list(range(50))
    assert page.values["range"] == [0, 49]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_of_no_step_or_one_is_a_page(tmp_path, steps):
    values = held(write_page(write_run(tmp_path / "run", tensors=2, steps=steps)))
    assert values["range"] == ([0, 0] if steps else None)
    assert len(values["columns"]["first"]) == steps
    assert ["Steps", "only step 0" if steps else "none yet"] in values["facts"]


def test_all_kinds_have_their_matrices(tmp_path):
    run = write_run(tmp_path / "run", tensors=2, steps=5, kinds=("grads", "weights", "updates"))
    values = held(write_page(run))
    assert [kind["name"] for kind in values["kinds"]] == ["grads", "weights", "updates"]
    assert list(values["matrices"]) == list(values["summary"]) == ["grads", "weights", "updates"]


def statistics_of(page):
    return {kind["name"]: [x["name"] for x in kind["statistics"]] for kind in page.values["kinds"]}


def test_kinds_rows_and_statistics_are_those_of_the_run(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", tensors=2, steps=5, kinds=("grads", "activations", NEGATIVES))
    found = {}
    for name in ("unknown", "registered"):
        if name == "registered":
            monkeypatch.setitem(KINDS, "negatives", replace(NEGATIVES, schema=NEGATIVES.schema))
        page = data.page_of(read_run(run))
        found[name] = statistics_of(page)["negatives"]
        assert statistics_of(page)["activations"] == list(ACTIVATIONS.drawn)
        found_rows = {kind["name"]: kind["rows"] for kind in page.values["kinds"]}
        assert found_rows == {"grads": "parameter", "activations": "tap", "negatives": "parameter"}
        rows = page.values["rows"]
        assert (rows["parameter"]["names"], rows["tap"]["names"]) == (read_run(run).catalog.names, TAPS)
    # without a choice, and where the schema is not registered, all raw columns
    names = list(NEGATIVES.schema.index)[1:]
    assert found == {"unknown": names, "registered": names}
    cells = read_cells(page, "abs_max_negative", "negatives")
    want = read_run(run).matrix("abs_max_negative", "negatives")[1].T
    torch.testing.assert_close(cells, want, rtol=1e-3, atol=0)
    kurtosis = next(x for x in page.values["kinds"][1]["statistics"] if x["name"] == "kurtosis")
    schema = ACTIVATIONS["kurtosis"]
    wanted = {"name": "kurtosis", "heading": "kurtosis", "meaning": schema.meaning, "style": schema.style}
    assert kurtosis == wanted
    assert page.values["kinds"][1]["flags"] == ["NaN", "Inf", "dead"]


def test_findings_come_by_headline_with_the_place_of_their_tensor(tmp_path):
    long = {"rule": "dead", "value": math.nan, "threshold": math.inf, "message": "m" * 9999}
    found = [
        finding(1, "blocks.0.weight", Severity.INFO, **long),
        finding(7, "blocks.0.bias", Severity.ERROR, **long),
        finding(3, None, Severity.ERROR, **long),
        finding(2, "not.in.the.catalog", Severity.WARNING, **long),
    ]
    values = held(write_page(write_run(tmp_path / "run", tensors=2, steps=9, findings=found)))
    assert [(f["severity"], f["first_step"], f["tensor"], f["under"]) for f in values["findings"]] == [
        ("error", 7, 1, None),
        ("warning", 2, None, 0),
        ("error", 3, None, None),
        ("info", 1, 0, None),
    ]
    assert max(len(f["message"]) for f in values["findings"]) == data.MOST_LETTERS


def test_the_head_tells_a_closed_run_from_one_that_was_killed_and_from_a_fault(tmp_path):
    run = write_run(tmp_path / "run", tensors=2, steps=5, close=False)
    assert held(write_page(run))["state"]["mood"] == "open"
    fault = {"reason": "SIGTERM", "step": 4, "message": "", "first_nonfinite": "step 4, <w>.grad, 1 NaN"}
    (run / "blackbox.json").write_text(json.dumps(fault | {"digest": None}))
    values = held(write_page(run))
    assert values["state"] == {"text": "✖ SIGTERM", "mood": "broken"}
    assert values["fault"] == ["Black box: SIGTERM at step 4", "First non-finite: step 4, <w>.grad, 1 NaN"]
    assert held(write_page(write_run(tmp_path / "other", steps=5)))["state"]["mood"] == "good"


def fault(reason, step):
    return Fault(reason, "ValueError: boom" if reason == "exception" else "", step, None, (), ())


def test_a_run_that_was_resumed_and_closed_after_a_fault_is_closed(tmp_path):
    path = tmp_path / "run"
    values = data.page_of(record(path, make_records(PAIR, 5), fault=fault("exception", 5))).values
    assert values["state"] == {"text": "✖ exception", "mood": "broken"}
    assert values["fault"] == ["Black box: exception at step 5", "ValueError: boom"]
    values = data.page_of(record(path, make_records(PAIR, 5, first=5), first_step=5)).values
    assert values["state"] == {"text": "✓ closed", "mood": "good"}
    first = "Black box of attempt 1: exception at step 5"
    assert values["fault"] == [first, "ValueError: boom", "Attempt 2 continued the run."]
    values = data.page_of(record(path, [], first_step=10, fault=fault("SIGTERM", 10))).values
    assert values["state"] == {"text": "✖ SIGTERM", "mood": "broken"}
    assert values["fault"][0] == "Black box of attempt 3: SIGTERM at step 10"


def test_a_run_that_goes_on_after_a_fault_is_not_closed(tmp_path):
    path = tmp_path / "run"
    record(path, make_records(PAIR, 5), fault=fault("exception", 5))
    write_run(path, tensors=2, steps=5, first=5, close=False)
    assert data.page_of(read_run(path)).values["state"]["mood"] == "open"


@pytest.mark.parametrize(
    ("losses", "mood"),
    [
        ([1.0, math.nan, 2.0], "good"),
        ([1.0, math.nan, None], "broken"),
        ([1.0, math.inf, math.inf], "broken"),
    ],
)
def test_a_loss_that_was_finite_again_ends_no_run(tmp_path, losses, mood):
    records = [
        replace(one, scalars={} if loss is None else {"loss": loss})
        for one, loss in zip(make_records(PAIR, 3), losses, strict=True)
    ]
    values = data.page_of(record(tmp_path / "run", records, fault=fault("non-finite loss", 1))).values
    assert values["state"]["mood"] == mood
    assert values["fault"][0] == "Black box: non-finite loss at step 1"
    assert (len(values["fault"]) == 2) == (mood == "good")


@pytest.mark.parametrize("blackbox", [[1], "x", 3, {}, {"step": [1], "reason": None, "attempt": "x"}])
def test_an_odd_black_box_is_a_page(small, monkeypatch, blackbox):
    monkeypatch.setattr(Run, "blackbox", blackbox)
    state = data.page_of(read_run(small)).values["state"]
    assert state["mood"] == "good"


@pytest.mark.parametrize("created", ["x", None, "NaN", math.nan, 1e300, -1e300, [1]])
def test_an_odd_date_is_a_page(small, created):
    run = read_run(small)
    run.info["created"] = created
    assert dict(data.page_of(run).values["facts"])["Started"].startswith("unknown")


@pytest.fixture
def half_by_default():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("default", ["float32", "float16"])
@pytest.mark.parametrize("size", [1e60, 1e45, 1.0, 1e-50])
def test_lines_hold_what_a_float64_holds(tmp_path, request, default, size):
    def put(table):
        column(table, "sumsq")[...] = torch.tensor([size**2, 0.0], dtype=torch.float64)

    def sized(one):
        return replace(changed(one, put), scalars={"loss": 3 * size})

    first = 2**24 + 1  # not exact in float32, let alone in float16
    run = record(tmp_path / "run", map(sized, make_records(PAIR, 4, first=first)), first_step=first)
    if default == "float16":
        request.getfixturevalue("half_by_default")
    page = data.page_of(run)
    steps = list(range(first, first + 4))
    assert page.values["norm"] == {"x": steps, "y": [pytest.approx(size, rel=1e-5)] * 4}
    assert line_of(page, "loss") == {"x": steps, "y": [pytest.approx(3 * size, rel=1e-5)] * 4}
    assert page.values["nonfinite"] == []
    assert page.values["columns"]["first"] == steps
    assert page.values["range"] == [first, first + 3]
    assert page.values["summary"]["grads"]["largest"]["norm"][0] == pytest.approx(size, rel=1e-5)
    cells = read_cells(page, "norm")[0]
    torch.testing.assert_close(cells, torch.full_like(cells, size), rtol=1e-3, atol=0)


def test_names_are_data_whatever_is_in_them(tmp_path):
    path = write_page(write_run(tmp_path / "<b>&<script>", names=NAMES, steps=3))
    scripts = Scripts(path.read_text(encoding="utf-8"))
    # the data, three matrices and our script; no others
    kinds = [attributes.get("type", "code") for attributes, _ in scripts.found]
    assert kinds == ["application/json", *["application/octet-stream"] * 3, "code"]
    assert held(path)["rows"]["parameter"]["names"] == list(NAMES)
    assert held(path)["title"] == "<b>&<script>"
    assert scripts.found[0][1].isascii()


def test_nothing_is_loaded_and_no_other_script_may_run(small):
    scripts = Scripts(write_page(small).read_text(encoding="utf-8"))
    policy = dict(part.split(" ", 1) for part in scripts.policy.split("; "))
    assert (
        policy["default-src"]
        == policy["connect-src"]
        == policy["base-uri"]
        == policy["form-action"]
        == "'none'"
    )
    code = [text for attributes, text in scripts.found if "type" not in attributes]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in code]
    assert sorted(policy["script-src"].split()) == sorted(f"'sha256-{text}'" for text in hashes)
    loads = [
        (tag, a) for tag, a in scripts.tags if "src" in a or not a.get("href", "data:").startswith("data:")
    ]
    assert loads == []
    # the name of a namespace, which browsers know
    assert re.findall(r"https?:[^\"]*", "".join(code)) == ["http://www.w3.org/2000/svg"]


def test_the_page_is_where_it_is_asked_for_and_whole(small, tmp_path):
    assert write_page(str(small)) == small / "report.html"
    assert write_page(read_run(small), tmp_path / "page.html") == tmp_path / "page.html"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_no_run_is_one_clear_line(tmp_path):
    with pytest.raises(RunError, match="no such folder"):
        write_page(tmp_path / "nothing")


@pytest.mark.parametrize(
    "kinds", [("grads",), pytest.param(("grads", "weights", "updates"), marks=pytest.mark.deep)]
)
def test_noise_of_1000_tensors_stays_below_25_mb(tmp_path_factory, tmp_path, kinds):
    # with more steps than columns, a page has no more cells
    is_shared = kinds == ("grads",)
    folder = tmp_path_factory.getbasetemp()
    page = dense_page(folder) if is_shared else write_page(Dense(tmp_path, 1000, 1600, kinds))
    assert held(page)["binned"] > 1
    assert page.stat().st_size < 25e6


def test_a_long_line_keeps_its_extremes():
    values = torch.rand(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values[777], values[54_321], values[99_999] = 50.0, -50.0, math.nan
    line = data.line_of(torch.arange(100_000), values, values.isnan())
    assert len(line["x"]) <= data.MOST_POINTS + 1
    assert (line["x"][-1], line["y"][-1]) == (99_999, None)
    assert line["x"] == sorted(line["x"])
    assert (line["y"][line["x"].index(777)], line["y"][line["x"].index(54_321)]) == (50.0, -50.0)


def test_the_limit_of_the_clip_is_a_line_of_its_own(tmp_path):
    def scalars(step):
        limits = {3: math.inf, 4: 0.5}
        return (
            {"clip_max_norm": limits.get(step, 1.0), "clip_factor": 0.25 if step < 3 else 1.0} if step else {}
        )

    run = record(tmp_path / "run", [replace(one, scalars=scalars(one.step)) for one in make_records(PAIR, 6)])
    values = data.page_of(run).values
    assert values["limit"] == {"x": [1, 2, 4, 5], "y": [1.0, 1.0, 0.5, 1.0]}
    assert values["clipped"] == [2, 5]
    assert [one["name"] for one in values["scalars"]] == ["clip_factor"]
    without = record(tmp_path / "none", make_records(PAIR, 3))
    values = data.page_of(without).values
    assert (values["limit"], values["clipped"]) == ({"x": [], "y": []}, None)


def test_a_line_has_a_gap_where_a_value_is_not_finite_and_none_where_there_was_no_value():
    values = torch.tensor([1.0, math.nan, 2.0, math.nan, math.inf, 3.0, math.nan], dtype=torch.float64)
    bad = torch.tensor([False, False, False, True, True, False, True])
    line = data.line_of(10 * torch.arange(7), values, bad)
    assert line == {"x": [0, 20, 30, 50, 60], "y": [1.0, 2.0, None, 3.0, None]}
    assert data.line_of(torch.arange(1), torch.tensor([math.nan]), torch.tensor([True])) == {"x": [], "y": []}


def test_ranges_are_exact_while_they_are_few_and_cover_all_when_they_are_many():
    step = torch.arange(0, 20_000, 2)
    few = torch.zeros(10_000, dtype=torch.bool)
    few[[0, 1, 2, 500, 9_999]] = True
    assert data._ranges(step, few) == [[0, 4], [1000, 1000], [19_998, 19_998]]
    assert data._ranges(step, torch.zeros(10_000, dtype=torch.bool)) == []
    many = torch.arange(10_000) % 2 == 0
    found = data._ranges(step, many)
    assert len(found) <= data.MOST_RANGES
    assert all(any(a <= s <= b for a, b in found) for s in step[many].tolist())


def with_scalars(path, given):
    """Write a run of one step per entry, a dict of scalars."""
    records = make_records(PAIR, len(given))
    return record(path, [replace(one, scalars=values) for one, values in zip(records, given, strict=True)])


def test_every_scalar_is_drawn_after_the_loss_and_the_learning_rate(tmp_path):
    given = [
        {"z": 1.0, "lr": 0.1},
        {"a": 0.0, "loss": 2.0},
        {"z": math.nan, "lr": 0.0},
        {"z": 4.0, "<b>accuracy</b>": 0.5},
    ]
    page = data.page_of(with_scalars(tmp_path / "run", given))
    assert [line["name"] for line in page.values["scalars"]] == ["loss", "lr", "z", "a", "<b>accuracy</b>"]
    assert line_of(page, "lr") == {"x": [0, 2], "y": [0.1, 0.0]}
    assert line_of(page, "z") == {"x": [0, 2, 3], "y": [1.0, None, 4.0]}
    # a scalar may be NaN where it was not computed; only the loss and the norm say that a step is not finite
    assert page.values["nonfinite"] == []


def test_a_run_of_too_many_scalars_says_how_many_are_not_drawn(tmp_path):
    given = [{f"x{k}": float(k) for k in range(data.MOST_SCALARS + 7)} for _ in range(3)]
    values = data.page_of(with_scalars(tmp_path / "run", given)).values
    assert len(values["scalars"]) == data.MOST_SCALARS
    assert values["more_scalars"] == 7


@pytest.mark.parametrize("binned", [1, 3])
def test_the_statistics_of_updates_are_those_of_each_step(tmp_path, monkeypatch, binned):
    nonfinite = {7: "n_nan", 8: "n_posinf", 9: "n_neginf"}
    catalog = make_catalog(3, ("grads", "updates"))

    def change(one):
        # values are 1 / 4 of the weight, cosines 1 to -1, and some elements are stuck
        def put(table):
            squares, numel = column(table, "sumsq_u"), column(table, "numel")
            column(table, "sumsq_b")[...] = column(table, "sumsq_a")[...] = 16.0 * squares
            column(table, "sumsq_g")[...] = squares
            column(table, "dot_ug")[...] = (one.step / 24.0 - 1.0) * squares
            column(table, "n_nonzero_g")[...] = numel
            column(table, "n_stuck")[...] = (one.step / 96.0 * numel).round()
            if one.step < 6:
                # without a gradient
                for name in ("sumsq_g", "dot_ug", "n_nonzero_g", "n_stuck"):
                    column(table, name)[2] = 0.0
            if one.step in nonfinite:
                column(table, nonfinite[one.step])[1] = 1.0

        return changed(one, put, "updates")

    run = record(tmp_path / "run", map(change, make_records(catalog, 48)), catalog=catalog)
    if binned > 1:
        monkeypatch.setattr(matrices, "MOST_COLUMNS", 16)
    page = data.page_of(run)
    assert page.values["binned"] == binned
    own = ("unchanged_fraction", "update_ratio", "descent_cosine", "stuck_fraction")
    assert statistics_of(page) == {"grads": list(TENSORS.drawn), "updates": ["norm", "rms", "abs_max", *own]}
    assert not {*own} & set(page.values["matrices"]["grads"])

    def worst(values, worst_of=torch.amax):
        return worst_of(values.view(3, -1, binned), -1)

    # a non-finite update has no ratio
    ratio = torch.full((3, 48), 0.25, dtype=torch.float64)
    for step, value in ((7, math.nan), (8, math.inf), (9, math.inf)):
        ratio[1, step] = value
    got = read_cells(page, "update_ratio", "updates")
    torch.testing.assert_close(got, worst(ratio), rtol=1e-3, atol=0, equal_nan=True)
    # half a code of 65,532 codes between 1 and -1
    rounding = 2.0 / 65531
    for name, worst_of in (("descent_cosine", torch.amin), ("stuck_fraction", torch.amax)):
        cells, values = read_cells(page, name, "updates"), worst(run.matrix(name, "updates")[1].T, worst_of)
        unknown = torch.zeros(cells.shape, dtype=torch.bool)
        unknown[2, : 6 // binned] = True
        assert (cells[unknown] == -1).all()
        torch.testing.assert_close(cells[~unknown], values[~unknown], rtol=0, atol=rounding)
    largest = page.values["summary"]["updates"]["largest"]
    assert largest["descent_cosine"] == pytest.approx([1.0 - 47 / 24] * 3, rel=1e-4)
    assert line_of(page, "update ratio")["y"] == pytest.approx([0.25] * 48)
    assert len(line_of(page, "stuck fraction")["x"]) == 48


def test_two_runs_are_one_page_that_says_where_they_first_differ(tmp_path):
    a = write_run(tmp_path / "a", tensors=4, steps=20)
    b = write_run(tmp_path / "b", tensors=4, steps=20, nonfinite_at=12)
    page = write_page(a, other=b)
    assert page == a / "comparison.html"
    values = whole(page)
    assert [run["title"] for run in values["runs"]] == ["a", "b"]
    assert [run["range"] for run in values["runs"]] == [[0, 19], [0, 19]]
    assert values["differ"]["step"] == 12
    assert values["differ"]["first"][0] == "loss"
    ids = [attributes["id"] for attributes, _ in Scripts(page.read_text(encoding="utf-8")).found[1:-1]]
    statistics = ("norm", "abs_max", "zero_fraction")
    assert ids == [f"{k}-grads-{name}" for k in (0, 1) for name in statistics]
    same = whole(write_page(a, tmp_path / "same.html", other=a))["differ"]
    assert same == {"same": True, "common": 20, "step": None, "first": [], "more": 0} | dict.fromkeys(
        ("bits", "apart"), ""
    ) | {"distances": None}


def test_the_page_of_two_runs_has_the_verdict_on_their_bits(tmp_path):
    a = write_run(tmp_path / "a", tensors=4, steps=20, fingerprint=True)
    b = write_run(tmp_path / "b", tensors=4, steps=20, fingerprint=True, seed=1)
    said = {other: whole(write_page(a, other=other))["differ"]["bits"] for other in (a, b)}
    assert said[a] == "bits: identical for 20 steps"
    assert said[b] == "bits differ first at step 0: blocks.1.bias.grad (gradient), 4 tensors"
