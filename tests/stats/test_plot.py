"""Reports drawn with matplotlib."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

import gradiometer as gm
from gradiometer import extras

TENSORS = {
    "fine": torch.full((4,), 2.0),
    "zero": torch.zeros(3),
    "nan": torch.tensor([1.0, math.nan]),
    "big": torch.tensor([1e8]),
    "$\\bad{$ \x1b[31m": torch.full((9,), 0.5),
}


@pytest.fixture
def plt():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    yield plt
    plt.close("all")


@pytest.fixture
def report():
    return gm.collect(TENSORS).materialize()


def dots_of(ax):
    """Return the x of the dots inside of the axes by the name of their row, and the colors of all dots."""
    names = [label.get_text() for label in ax.get_yticklabels()]
    inside, colors = {}, {}
    for line in ax.lines:
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True):
            colors[names[y]] = line.get_color()
            if line.get_transform() == ax.transData:
                inside[names[y]] = x
    return inside, colors


@pytest.mark.usefixtures("plt")
def test_each_row_is_a_dot_worst_first(report):
    ax = report.plot()
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == ["nan", "big", "zero", "fine", "$\\bad{$ \\x1b[31m"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # the first at the top
    inside, colors = dots_of(ax)
    # 0 and NaN have no place on a logarithmic axis, and are drawn at its ends
    assert inside == {"big": pytest.approx(1e8), "fine": 4.0, labels[4]: 1.5}
    assert ax.get_xscale() == "log"
    assert {text.get_text().strip() for text in ax.texts} == {"0", "nan"}
    assert len(set(colors.values())) == 4
    assert colors["fine"] == colors[labels[4]]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["NaN or Inf", "exploding", "dead"]
    assert ax.get_title(loc="left").startswith("5 tensors, 19 elements, total norm nan")
    ax.figure.canvas.draw()  # names are no formulas


def test_a_value_an_axis_and_the_number_of_rows(plt, report):
    figure, ax = plt.subplots()
    assert report.plot("zero_fraction", ax=ax, max_rows=3) is ax
    assert ax.get_xscale() == "linear"
    assert dots_of(ax)[0] == {"nan": 0.0, "big": 0.0, "zero": 100.0}
    assert ax.get_xlabel() == "zero %"
    assert ax.get_title(loc="left").endswith("2 more are not drawn")
    figure.canvas.draw()
    assert len(report.plot("mean", max_rows=None).get_yticklabels()) == 5
    with pytest.raises(ValueError, match=r"value must be one of .*'norm'.*, got 'median'"):
        report.plot("median")


@pytest.mark.parametrize(
    "report",
    [
        gm.collect({}).materialize(),
        gm.collect({"none": torch.empty(0), "nan": torch.tensor([math.nan])}).materialize(),
        gm.compare({"w": torch.ones(3)}, {"w": torch.zeros(3)}).materialize(),
    ],
    ids=["empty", "nothing finite", "pairs"],
)
@pytest.mark.usefixtures("plt")
def test_any_report_is_drawn(report):
    report.plot().figure.canvas.draw()


@pytest.mark.usefixtures("plt")
def test_losses_in_a_format_are_drawn_in_percent():
    report = gm.precision_report({"all": torch.full((4,), 1e-30), "half": torch.tensor([1.0, 1e9])})
    ax = report.plot("float16")
    assert dots_of(ax)[0] == {"all": 100.0, "half": 50.0}
    assert ax.get_xlabel() == "fp16 lost %"
    with pytest.raises(ValueError, match=r"value must be one of 'float16', .*, got 'norm'"):
        report.plot("norm")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, report):
    def missing(module):
        raise ModuleNotFoundError(f"No module named {module!r}", name="matplotlib")

    monkeypatch.setattr(extras.importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"pip install 'gradiometer\[plot\]'"):
        report.plot()


def test_matplotlib_is_not_imported_before_it_is_needed():
    code = "import sys, gradiometer, gradiometer.runs, gradiometer.stats; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
