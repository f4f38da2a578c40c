"""The fourth family of the zoo: steps that are healthy or have a fault, and are checked."""

from __future__ import annotations

import json

import pytest

from kernels_bench.zoo import __main__ as zoo
from kernels_bench.zoo.gradients import runs

pytestmark = pytest.mark.usefixtures("_one_thread")


def test_every_name_is_in_one_table():
    assert not runs.FAULTS.keys() & (runs.HEALTHY.keys() | runs.HEALTHY_RANKS.keys())
    assert len(runs.FAULTS) >= 12
    assert len(runs.HEALTHY) >= 40


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["sign-of-a-difference", "optimizer-adamw", "dropout", "lstm"])
def test_a_case_is_the_same_for_the_same_seed(name, seed):
    one, other = (runs.state(runs.start(name, seed)) for _ in range(2))
    assert not runs.differing(one, other)
    assert "weights or buffers" in runs.differing(one, runs.state(runs.start(name, seed + 1)))


def test_the_command_prints_a_table_and_fails_if_a_bound_is_missed(tmp_path, capsys):
    names = "^(sign-of-a-difference|accumulation|ranks-ddp)$"
    flags = ["--family", "gradients", "--kinds", names, "--seeds", "1", "--jobs", "1", "--out", str(tmp_path)]
    assert zoo.main([*flags, "--check"]) == 0
    printed = capsys.readouterr().out
    assert "| sign of a difference | callable | right.weight | 1 of 1 | sign | 1 of 1 |" in printed
    assert "Healthy steps: 0 alarms in 2 runs" in printed
    rows = json.loads((tmp_path / "gradients.json").read_text())["runs"]
    assert [row["name"] for row in rows] == [
        "sign-of-a-difference", "accumulation", "ranks-ddp",
    ]  # fmt: skip
    assert "every bound met" in printed


def test_one_rank_that_names_nothing_is_enough_to_miss_a_fault():
    row = {"name": "x", "error": None, "alarm": True, "named": True, "kind_named": True}
    joined = runs.joined([row, row | {"alarm": False, "named": False, "kind_named": False}])
    assert (joined["alarm"], joined["named"]) == (True, False)
    assert runs.joined([row, row | {"error": "RuntimeError"}])["error"] == "RuntimeError"


def test_names_are_listed(capsys):
    assert zoo.main(["--family", "gradients", "--list", "--kinds", "ddp"]) == 0
    assert capsys.readouterr().out.split() == [
        "fused-loss-bypasses-ddp", "averaged-by-ddp-and-by-the-loop", "ranks-ddp",
    ]  # fmt: skip
    assert zoo.main(["--family", "gradients", "--list", "--kinds", "no such"]) == 1
