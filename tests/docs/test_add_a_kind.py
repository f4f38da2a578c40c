"""docs/how-to/add-a-kind.md: a kind in one short file is known to every layer without another line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import gradiometer as gm
from gradiometer.columns import PAIRS
from gradiometer.recorder import KINDS, Kind, register
from gradiometer.web import data
from support.pages import code_of, execute, text

CODE = code_of(text("docs/how-to/add-a-kind.md"))


@pytest.fixture
def scope(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(KINDS, "negatives", None)
    del KINDS["negatives"]
    return execute(*CODE)


def test_the_kind_is_short():
    assert sum(len(block.splitlines()) for block in CODE) < 120


def test_every_layer_knows_the_kind(scope, tmp_path):
    model, run = scope["model"], gm.read_run("run")
    assert scope["monitor"].failures == {}
    record = run.record(19)
    # the gradients are cleared, but their counts are exact: whole numbers of the right size
    assert record.value("numel", "negatives").tolist() == [p.numel() for p in model.parameters()]
    share = record.value("negative_fraction", "negatives")
    assert torch.equal(share, record.value("n_negative", "negatives") / record.value("numel", "negatives"))
    steps, matrix = run.matrix("n_negative", "negatives")
    assert steps == list(range(20))
    assert matrix.shape == (20, 4)
    # sinks
    line = json.loads((tmp_path / "steps.jsonl").read_text().splitlines()[-1])
    assert line["negatives/negative_fraction"] == record.total("negative_fraction", "negatives")
    assert line["negatives/0.weight/negative_fraction"] == share[0]
    # the command line
    report = str(record.report("negatives"))
    assert "negative %" in report
    assert "flags" not in report


def test_a_kind_can_be_registered_again_but_not_replaced_by_another(scope):
    exec(CODE[0], scope)  # noqa: S102 as when a notebook's cell is run again
    assert KINDS["negatives"] is scope["NEGATIVES"]
    for name in ("negatives", "grads"):
        with pytest.raises(ValueError, match=f"there is another kind '{name}' of schema"):
            register(Kind(name, PAIRS, noun="gradient", measure=scope["count_signs"]))


@pytest.mark.usefixtures("scope")
def test_another_process_shows_its_raw_columns():
    command = [sys.executable, "-m", "gradiometer", "show", "run", "--kind", "negatives"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "negative" in shown
    assert "negative %" not in shown
    table = [line.split() for line in shown.splitlines() if line.startswith("0.weight")]
    counts = gm.read_run("run").record(19).value("n_negative", "negatives")
    assert table == [["0.weight", "32", str(int(counts[0]))]]


@pytest.mark.usefixtures("scope")
def test_the_page_draws_it():
    values, matrices = data.page_of(gm.read_run("run"))
    drawn = values["matrices"]["negatives"]
    assert list(drawn) == ["negative_fraction"]
    assert drawn["negative_fraction"]["id"] in matrices


def test_diff_compares_it(scope):
    with gm.Monitor(scope["model"], kinds=[scope["NEGATIVES"]], run_dir="other") as monitor:
        for step in range(20):
            gradients = [torch.full_like(p, 1.0) for p in scope["model"].parameters()]
            for p, grad in zip(scope["model"].parameters(), gradients, strict=True):
                p.grad = grad
            monitor.record()
            monitor.advance(loss=float(step))
    found = gm.compare_runs("run", "other")
    assert {difference.kind for difference in found.first} >= {"grads", "negatives"}
