"""docs/how-to/coord-check.md prints what it says, and its transformer fails in one parametrization only."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from support.pages import blocks, execute, load

pytestmark = pytest.mark.usefixtures("_one_thread")

PAGE = "docs/how-to/coord-check.md"


def test_the_page_prints_what_it_says(capsys):
    random = torch.get_rng_state()
    execute(*blocks(PAGE))
    torch.set_rng_state(random)
    printed = capsys.readouterr().out
    (said,) = blocks(PAGE, "text")
    # the slopes depend on the rounding of the processor
    verdicts = [
        [line.split(";")[0] if ";" in line else line.split()[0] for line in x.splitlines()]
        for x in (printed, said)
    ]
    assert verdicts[0] == verdicts[1]
    faults = [re.findall(r"^(\S+) .*(Δx_\d \w+|ok)\b", x, flags=re.MULTILINE) for x in (printed, said)]
    assert len(faults[0]) == 6
    assert faults[0] == faults[1]


def test_the_transformer(monkeypatch, tmp_path):
    demo = load("coord_check_demo.py")
    monkeypatch.setattr(demo, "WIDTHS", (64, 128, 256))
    monkeypatch.setattr(demo, "STEPS", 3)
    results = standard, mup = [demo.check(mup=mup, seeds=1) for mup in (False, True)]
    assert mup.passed, str(mup)
    # what the wider inputs reach
    passed = {row.name for row in standard.rows} - set(standard.failed)
    assert {"embed.out", "blocks.0.norm1.out"} <= passed
    wrong = {f"blocks.0.{name}" for name in ("q.out", "v.out", "proj.out", "up.out", "scores")}
    assert wrong <= set(standard.failed)
    monkeypatch.setattr(demo, "check", lambda **options: results[options["mup"]])
    monkeypatch.setattr(sys, "argv", ["demo", "--seeds", "1", "--out", str(tmp_path)])
    demo.main()
    assert {path.name for path in tmp_path.iterdir()} == {"coord-check-standard.svg", "coord-check-mup.svg"}
    assert "blocks.1.scores ✗ " in (tmp_path / "coord-check-standard.svg").read_text(encoding="utf-8")
