"""The second family of the zoo: transformers, whose held-out faults are older than the rules."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from kernels_bench.zoo.observers import Headline
from kernels_bench.zoo.transformers import command, faults_held_out_2, faults_open, faults_seen, runs
from kernels_bench.zoo.transformers.fault import CATEGORIES, Fault

pytestmark = pytest.mark.usefixtures("_one_thread")
# by numbers, so that the output of a test does not show what is held out
NUMBERED = {f"{half}-{i}": name for half, table in (("open", runs.OPEN), ("held-out", runs.HELD_OUT))
            for i, name in enumerate(table)}  # fmt: skip


def test_the_held_out_files_are_those_of_the_documentation():
    root = Path(__file__).parents[2]
    page = (root / "docs/explanation/benchmarks.md").read_text(encoding="utf-8")
    files = [
        f"kernels_bench/zoo/{name}.py"
        for name in ("transformers/faults_held_out_2", "contracts/faults_held_out")
    ]
    found = [hashlib.sha256((root / file).read_bytes()).hexdigest() for file in files]
    assert found == re.findall(r"`([0-9a-f]{64})`", page)


def test_every_name_is_in_one_file():
    tables = (faults_open.FAULTS, faults_seen.FAULTS, faults_held_out_2.FAULTS)
    assert sum(map(len, tables)) == len(runs.FAULTS)
    assert {fault.category for fault in runs.HELD_OUT.values()} == set(CATEGORIES)


@pytest.mark.parametrize("numbered", NUMBERED)
def test_every_fault_runs_for_two_steps(numbered):
    name = NUMBERED[numbered]
    fault = runs.FAULTS[name]
    assert all(fault.onset < runs.kinds.start(kind, 0).steps for kind in fault.where)
    # some with a monitor; the held-out half without
    row = runs.run(name, 0, steps=2, watched=name in runs.OPEN and list(runs.OPEN).index(name) % 8 == 0)
    assert row["steps"] == 2


@pytest.mark.parametrize("name", ["t5-bf16-resumed", "lora", "vit-batch-norm"])
def test_a_healthy_run_has_no_warning(name):
    assert runs.run(name, 0, steps=3)["warnings"] == 0


def headline(text, *, seen=9, is_warning=True):
    return Headline("rule", is_warning, seen, seen, text)


def test_any_warning_after_the_onset_detects_and_the_first_names():
    fault = Fault("data", lambda _: None, ("gpt",), "labels", onset=5)
    right, wrong = headline("the labels"), headline("the rate")
    early, info = headline("the labels", seen=4), headline("the labels", is_warning=False)
    for headlines, detected, named in (
        ([right, wrong], True, True),
        ([wrong, right], True, False),
        ([early], False, False),
        ([info, wrong], True, False),
        ([], False, False),
    ):
        row = runs.judged(fault, headlines)
        assert (row["detected"], row["named"]) == (detected, named)


def test_a_run_is_effective_outside_of_the_spread():
    clean = [{"windows": [2.0 + 0.01 * i] * 10, "evaluation": 1.0 + 0.01 * i} for i in range(8)]
    name = next(name for name, fault in runs.FAULTS.items() if not fault.onset)

    def effective(**changes):
        row = {"name": name, "windows": [2.03] * 10, "evaluation": 1.03, "steps": 100}
        return runs.is_effective(row | changes, clean)

    assert not effective()
    assert not effective(windows=[2.03] * 9 + [3.0])
    assert effective(windows=[2.03] * 8 + [3.0] * 2)
    assert effective(evaluation=0.5)
    assert effective(evaluation=float("nan"))


def row(*, planted, warnings=0, named=False, held_out=True):
    return {"name": "a", "planted": planted, "held_out": held_out, "warnings": warnings, "category": "data",
            "headlines": [], "named": named, "detected": named, "effective": planted}  # fmt: skip


def test_bounds_are_of_the_held_out_half_and_of_healthy_runs():
    good = [row(planted=False), row(planted=True, named=True), row(planted=True, held_out=False)]
    assert command.missed(command.totals(good)) == []
    bad = [row(planted=False, warnings=1), row(planted=True)]
    assert len(command.missed(command.totals(bad))) == 3
    assert "| data | 1 | 1 | 0 | 0 | 1 |" in command.document(bad, "note")
