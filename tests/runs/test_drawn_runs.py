"""Runs in notebooks, and drawn with matplotlib."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

pytest.importorskip("pyarrow")

from gradiometer.rules import Severity
from gradiometer.runs import read_run
from support.findings import finding
from support.synthetic_run import make_catalog, make_records, write_records, write_run


@pytest.fixture
def plt():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    yield plt
    plt.close("all")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two causes of findings, and a NaN in step 30."""
    found = [finding(30), finding(20, "blocks.1.<b>", Severity.WARNING, "dead", message="<b>dead</b>")]
    return read_run(
        write_run(tmp_path_factory.mktemp("runs") / "<i>a", steps=40, nonfinite_at=30, findings=found)
    )


@pytest.fixture(scope="module")
def clipped(tmp_path_factory):
    catalog = make_catalog(4)

    def scalars(step):
        limit = 0.5 if step >= 10 else math.inf
        return {"loss": 1.0, "clip_max_norm": limit, "clip_factor": 0.25 if step < 37 else 1.0}

    records = [replace(one, scalars=scalars(one.step)) for one in make_records(catalog, 50)]
    return read_run(write_records(tmp_path_factory.mktemp("runs") / "clipped", catalog, records))


def drawn(ax):
    return {line.get_label(): line for line in ax.lines}


@pytest.mark.usefixtures("plt")
def test_norm_loss_and_lr_are_drawn_with_the_findings(run):
    figure = run.plot()
    assert [ax.get_ylabel() for ax in figure.axes] == ["total norm", "loss", "lr"]
    for ax, column in zip(figure.axes, ("total_norm", "loss", "lr"), strict=True):
        line = ax.lines[0]
        values = run.steps[column].to_pylist()
        assert list(line.get_xdata()) == list(range(40))
        finite = [x if math.isfinite(x) else None for x in values]
        assert [None if math.isnan(y) else y for y in line.get_ydata()] == finite
    marks = drawn(figure.axes[0])
    assert list(marks["NaN or Inf"].get_xdata()) == [30]
    assert list(marks["error"].get_xdata()) == [30]
    assert list(marks["warning"].get_xdata()) == [20]
    assert figure.axes[0].get_title(loc="left") == "<i>a"
    figure.canvas.draw()


@pytest.mark.usefixtures("plt")
def test_the_limit_of_the_clip_is_drawn_with_the_norm(clipped):
    norm, factor = clipped.plot("total_norm", "clip_factor").axes
    (label,) = [name for name in drawn(norm) if name.startswith("clip")]
    assert label == "clip_max_norm 0.5, clipped in 37 of 50 steps"
    assert label in [text.get_text() for text in norm.get_legend().get_texts()]
    limits = list(drawn(norm)[label].get_ydata())
    assert all(map(math.isnan, limits[:10]))  # a limit of infinity clips nothing
    assert limits[10:] == [0.5] * 40
    assert len(factor.lines) == 1


def test_one_line_on_given_axes(plt, run):
    figure, ax = plt.subplots()
    assert run.plot("loss", ax=ax) is figure
    assert ax.get_ylabel() == "loss"
    with pytest.raises(ValueError, match=r"ax= has room for one line, got .loss., .lr.$"):
        run.plot("loss", "lr", ax=ax)
    with pytest.raises(ValueError, match=r"the run has no 'losses'; it has 'total_norm', "):
        run.plot("losses")


@pytest.mark.usefixtures("plt")
def test_a_run_without_steps_is_drawn(tmp_path):
    run = read_run(write_run(tmp_path, steps=0))
    run.plot().canvas.draw()
    assert "0 steps" in run._repr_html_()


def test_a_run_in_a_notebook(run):
    page = run._repr_html_()
    assert "40 steps, 0 to 39" in page
    assert "&lt;i&gt;a, Synthetic, closed" in page
    assert "findings: 1 error, 1 warning" in page
    assert "&lt;b&gt;dead&lt;/b&gt;" in page
    assert not re.search(r"<[bi]>", page)
    paths = re.findall(r'<path d="([^"]*)"', page)
    # of the norm and the loss, each with a gap
    assert [path.count("M") for path in paths] == [2, 2]
    numbers = [float(x) for path in paths for x in re.findall(r"[\d.]+", path)]
    assert all(0 <= x <= 320 for x in numbers)


def test_a_long_run_has_a_small_picture(tmp_path):
    page = read_run(write_run(tmp_path, steps=3000, tensors=1))._repr_html_()
    assert len(page) < 20_000


def test_a_damaged_run_is_shown_as_the_error(tmp_path):
    path = write_run(tmp_path / "run", steps=10)
    run = read_run(path)
    for file in path.glob("steps/*"):
        file.write_bytes(b"")
    page = run._repr_html_()
    assert page.startswith("<pre>&lt;Run: ")
    assert ".parquet" in page
