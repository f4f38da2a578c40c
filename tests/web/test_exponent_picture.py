"""The data of the page's picture of exponents: shares of elements by binade, tensor and measured step."""

from __future__ import annotations

import base64
import math
import zlib

import pytest
import torch

pytest.importorskip("pyarrow")

import gradiometer as gm
from gradiometer.columns import FORMATS
from gradiometer.web import exponents
from gradiometer.web.data import page_of
from support.synthetic_run import write_run

STEPS = range(0, 30, 10)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Four elements of one binade each; the exponents fall with the step."""
    path = tmp_path_factory.mktemp("runs") / "a"
    model = torch.nn.ParameterDict({"a": torch.ones(4), "b": torch.ones(100), "none": torch.ones(1)})
    with gm.Monitor(model, run_dir=path, precision=10, weights=True, rules=()) as monitor:
        for step in range(25):
            model["a"].grad = torch.tensor([1.5, 0.75, 0.0, math.inf]) * 2.0 ** (-step // 10)
            model["b"].grad = torch.full((100,), 2.0**-20)
            model["b"].grad[0] = 1000.0
            monitor.record()
            monitor.advance()
    return gm.read_run(path)


def picture(page, kind="grads"):
    return next(x for x in page.values["exponents"]["pictures"] if x["of"] == kind)


def cells_of(page, kind="grads"):
    """Return the shares that the page shows, ``(T, columns, rows)``; -1 where there is none."""
    entry = picture(page, kind)
    raw = zlib.decompress(base64.b64decode(page.matrices[entry["id"]]))
    codes = torch.frombuffer(bytearray(raw), dtype=torch.uint8).double()
    shares = 10.0 ** (page.values["exponents"]["decades"] * ((codes - 1) / 254 - 1))
    return torch.where(codes > 0, shares, -1.0).view(-1, len(entry["first"]), entry["rows"])


def test_shares_are_those_of_the_histograms(run):
    page = page_of(run)
    entry = picture(page)
    assert (entry["first"], entry["last"], entry["binned"]) == ([0, 10, 20], [0, 10, 20], 1)
    # from 2**-20 to the binade of 1000, zeros and what is not finite
    assert (entry["low"], entry["rows"]) == (-20, 32)
    cells = cells_of(page)
    assert cells.shape == (4, 3, 32)
    rounding = 10 ** (4 / 254 / 2)
    for place, step in enumerate(STEPS):
        for name, tensor in (("a", 0), ("b", 1)):
            stats = run.precision(step).stats
            row = stats.names.index(name)
            binades, numel = stats.binades[row], int(stats.numel[row])
            found = cells[tensor, place]
            expected = [int(stats.n_zero[row]), *binades[-20 + 199 :][:30].tolist(), 1 if name == "a" else 0]
            for share, count in zip(found.tolist(), expected, strict=True):
                assert (share > 0) == (count > 0)
                if count:
                    assert count / numel / rounding <= share <= count / numel * rounding * 1.0001
    # the last tensor is the total
    assert cells[-1, 0, 1] == pytest.approx(99 / 104, rel=0.05)
    assert (cells[2] == -1).all(), "a tensor that was never measured"
    assert cells_of(page, "weights").shape == (4, 3, 3)


def test_limits_are_those_of_the_formats(run):
    limits = page_of(run).values["exponents"]["limits"]
    for limit, form in zip(limits, FORMATS.values(), strict=True):
        dtype = getattr(torch, form.name)
        info = torch.finfo(dtype)
        assert limit["high"] == math.log2(info.max)
        smallest = torch.tensor(2.0 ** limit["low"], dtype=torch.float64)
        assert smallest.to(dtype).double() == smallest
        assert (smallest * 0.5).to(dtype).double() == 0


def test_a_run_without_histograms_has_no_picture(tmp_path):
    page = page_of(gm.read_run(write_run(tmp_path, steps=3)))
    assert page.values["exponents"] == {}
    assert not [name for name in page.matrices if name.startswith("exponents")]


def test_many_steps_share_a_column(run, monkeypatch):
    monkeypatch.setattr(exponents, "MOST_COLUMNS", 2)
    page = page_of(run)
    entry = picture(page)
    assert (entry["first"], entry["last"], entry["binned"]) == ([0, 20], [10, 20], 2)
    cells = cells_of(page)
    # 1.5 and 0.75, once each and once halved
    shares = [round(x, 1) for x in cells[0, 0].tolist() if x > 0]
    assert shares == pytest.approx([0.25, 0.1, 0.25, 0.1, 0.25], abs=0.06)


def test_of_too_many_tensors_only_the_total_is_drawn(run, monkeypatch):
    monkeypatch.setattr(exponents, "MOST_CELLS", 2 * 16 * 32 * 3)
    page = page_of(run)
    assert picture(page)["each"] is False
    assert cells_of(page).shape == (1, 3, 32)


def test_nothing_but_zeros(tmp_path):
    model = torch.nn.ParameterDict({"w": torch.ones(3)})
    with gm.Monitor(model, run_dir=tmp_path, precision=1, rules=()) as monitor:
        model["w"].grad = torch.zeros(3)
        monitor.record()
        monitor.advance()
    page = page_of(gm.read_run(tmp_path))
    assert picture(page)["low"] == 0
    assert cells_of(page)[0, 0].tolist() == [1.0, -1.0, -1.0]
