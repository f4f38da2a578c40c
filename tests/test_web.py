"""The report page without a browser: what it holds, that it is closed to the outside, and its size."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import sys
from html.parser import HTMLParser

import pytest
import torch

pytest.importorskip("pyarrow")
pytest.importorskip("plotly")

from gradiometer.findings import Finding, Severity
from gradiometer.run import RunError, read_run
from gradiometer.web import data, write_page
from synthetic_page import Dense, read_cells
from synthetic_run import write_run

NAMES = (
    "<b>x</b>",
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "a\u2028b\u2029c",
    "\"'`&amp;",
    "é" * 2000,
)


class Scripts(HTMLParser):
    """The scripts of a page, as a browser would part them: (attributes, text)."""

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


def held(path):
    """What the JSON of a page holds."""
    scripts = Scripts(path.read_text(encoding="utf-8"))
    return json.loads(next(text for attributes, text in scripts.found if attributes.get("id") == "data"))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "small", tensors=6, steps=40, nonfinite_at=30)


def expected(run, statistic):
    """The same matrix by way of `Run.matrix`: what is not finite is so in every statistic."""
    norm, value = run.matrix("norm")[1], run.matrix(statistic)[1]
    return torch.where(norm.isfinite(), value, norm).T


@pytest.mark.parametrize("statistic", ["norm", "abs_max", "zero_fraction"])
def test_cells_are_the_runs_values_to_the_rounding_that_is_stated(small, statistic):
    run = read_run(small)
    page = data.page_of(run)
    entry = page.values["matrices"]["grads"][statistic]
    # half a code: the codes are even in the logarithm, or in the share
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
    monkeypatch.setattr(data, "MOST_COLUMNS", 16)
    monkeypatch.setattr(data, "_WINDOW", 1)  # and however it is read
    page = data.page_of(run)
    assert page.values["binned"] == 3
    assert page.values["columns"]["first"] == list(range(0, 40, 3))
    assert page.values["columns"]["last"] == [*range(2, 39, 3), 39]
    want = expected(run, "norm")
    for c, (first, last) in enumerate(zip(*page.values["columns"].values(), strict=True)):
        block, got = want[:, first : last + 1], read_cells(page, "norm")[:, c]
        for values, cell in zip(block, got, strict=True):
            worst = math.nan if values.isnan().any() else values.max()
            torch.testing.assert_close(
                cell, torch.as_tensor(worst, dtype=torch.float64), rtol=1e-3, atol=0, equal_nan=True
            )


def test_what_is_said_of_a_tensor_over_the_run(small):
    run = read_run(small)
    summary = data.page_of(run).values["summary"]["grads"]
    norm = expected(run, "norm")
    for i in range(6):
        finite = torch.where(norm[i].isfinite(), norm[i], -1)
        assert summary["norm"][i] == pytest.approx(float(finite.max()), rel=1e-5)
        assert summary["at"][i] == int(finite.argmax())
    assert summary["broken"] == [1, 1, 0, 0, 0, 0]
    assert summary["flags"][:3] == [{"NaN": 1}, {"Inf": 1}, {}]


def test_only_recorded_steps_are_columns_and_all_steps_have_a_loss(tmp_path):
    page = data.page_of(read_run(write_run(tmp_path / "run", tensors=2, steps=50, every=10)))
    assert page.values["columns"]["first"] == [0, 10, 20, 30, 40]
    assert page.values["lines"]["norm"]["x"] == [0, 10, 20, 30, 40]
    assert page.values["lines"]["loss"]["x"] == list(range(50))
    assert page.values["range"] == [0, 49]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_of_no_step_or_one_is_a_page(tmp_path, steps):
    values = held(write_page(write_run(tmp_path / "run", tensors=2, steps=steps)))
    assert values["range"] == ([0, 0] if steps else None)
    assert len(values["columns"]["first"]) == steps
    assert ["Steps", "one, number 0" if steps else "none yet"] in values["facts"]


def test_all_kinds_have_their_matrices(tmp_path):
    run = write_run(tmp_path / "run", tensors=2, steps=5, kinds=("grads", "weights", "updates"))
    values = held(write_page(run))
    assert values["kinds"] == ["grads", "weights", "updates"]
    assert list(values["matrices"]) == list(values["summary"]) == values["kinds"]


def test_findings_come_worst_first_with_the_place_of_their_tensor(tmp_path):
    def finding(severity, step, tensor):
        return Finding(
            "dead", severity, step, step, "grads", tensor, math.nan, math.inf, "m" * 9999, "try this"
        )

    found = [
        finding(Severity.INFO, 1, "blocks.0.weight"),
        finding(Severity.ERROR, 7, "blocks.0.bias"),
        finding(Severity.ERROR, 3, None),
        finding(Severity.WARNING, 2, "not.in.the.roster"),
    ]
    values = held(write_page(write_run(tmp_path / "run", tensors=2, steps=9, findings=found)))
    assert [(f["severity"], f["first_step"], f["tensor"]) for f in values["findings"]] == [
        ("error", 3, None),
        ("error", 7, 1),
        ("warning", 2, None),
        ("info", 1, 0),
    ]
    assert max(len(f["message"]) for f in values["findings"]) == data.MOST_LETTERS


def test_the_head_tells_a_closed_run_from_one_that_was_killed_and_from_a_fault(tmp_path):
    run = write_run(tmp_path / "run", tensors=2, steps=5, close=False)
    assert held(write_page(run))["state"]["mood"] == "open"
    (run / "blackbox.json").write_text(
        json.dumps(
            {"reason": "SIGTERM", "step": 4, "message": "", "first_nonfinite": "step 4, <w>.grad, 1 NaN"}
        )
    )
    values = held(write_page(run))
    assert values["state"] == {"text": "✖ SIGTERM", "mood": "broken"}
    assert values["fault"] == ["Black box: SIGTERM at step 4", "First non-finite: step 4, <w>.grad, 1 NaN"]
    assert held(write_page(write_run(tmp_path / "other", steps=5)))["state"]["mood"] == "good"


def test_names_are_data_whatever_is_in_them(tmp_path):
    path = write_page(write_run(tmp_path / "<b>&<script>", names=NAMES, steps=3))
    scripts = Scripts(path.read_text(encoding="utf-8"))
    # the data, three matrices, ours, plotly; and no other
    kinds = [attributes.get("type", "code") for attributes, _ in scripts.found]
    assert kinds == ["application/json", *["application/octet-stream"] * 3, "code", "code"]
    assert held(path)["names"] == list(NAMES)
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
    assert not re.search(r"https?:", "".join(text for text in code if "plotly.js v" not in text[:200]))


def test_the_page_is_where_it_is_asked_for_and_whole(small, tmp_path):
    assert write_page(str(small)) == small / "report.html"
    assert write_page(read_run(small), tmp_path / "page.html") == tmp_path / "page.html"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_no_run_and_no_plotly_are_one_clear_line(tmp_path, small, monkeypatch):
    with pytest.raises(RunError, match="no such folder"):
        write_page(tmp_path / "nothing")
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ImportError, match=r"report page needs plotly.*gradiometer\[monitor\]"):
        write_page(small)


@pytest.mark.parametrize(("kinds", "steps"), [(("grads",), 5000), (("grads", "weights", "updates"), 1600)])
def test_noise_of_1000_tensors_stays_below_25_mb(tmp_path, kinds, steps):
    # of more steps than there are columns a page has no more cells
    page = write_page(Dense(tmp_path, 1000, steps, kinds))
    assert held(page)["binned"] > 1
    assert page.stat().st_size < 25e6


def test_a_long_line_keeps_its_extremes():
    values = torch.rand(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values[777], values[54_321], values[99_999] = 50.0, -50.0, math.nan
    line = data._line(torch.arange(100_000), values)
    assert len(line["x"]) <= data.MOST_POINTS
    assert line["x"] == sorted(line["x"])
    assert (line["y"][line["x"].index(777)], line["y"][line["x"].index(54_321)]) == (50.0, -50.0)


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
