"""The zoo of training runs: each is healthy or broken, as its table says, and scored by what is reported."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch

from kernels_bench.zoo import __main__ as zoo
from kernels_bench.zoo import faults, healthy, peers, runs, tables
from kernels_bench.zoo.observers import Headline

pytestmark = pytest.mark.usefixtures("_one_thread")


@pytest.mark.parametrize("name", ["mlp-sgd", "two-towers"])
def test_a_healthy_run_is_watched_and_has_no_warning(name):
    row = runs.run(name, 0, steps=30)
    assert row["steps"] == 30
    assert all(map(math.isfinite, row["losses"]))
    assert not row["planted"]
    result = row["tools"]["gradiometer"]
    assert (result["named"], result["delay"], result["warnings"]) == (None, None, 0)


def test_a_fault_that_is_reported_at_once_is_named():
    row = runs.run("nan-in-an-input", 1, steps=75)
    assert row["kind"] == "vae"
    result = row["tools"]["gradiometer"]
    assert (result["named"], result["delay"]) == (True, 0)
    assert result["headlines"][0]["rule"] == "nonfinite"


def test_a_fault_before_its_onset_is_a_healthy_run():
    row = runs.run("nan-in-an-input", 1, steps=20)
    assert row["tools"]["gradiometer"]["named"] is False


def test_an_error_in_a_run_names_the_run(monkeypatch):
    def broken():
        raise ZeroDivisionError

    monkeypatch.setitem(healthy.KINDS, "broken", broken)
    with pytest.raises(ZeroDivisionError) as raised:
        runs.run("broken", 2)
    assert raised.value.__notes__ == ["in broken, seed 2, kind broken"]


@pytest.mark.parametrize("name", faults.FAULTS)
def test_every_fault_is_planted_in_kinds_with_such_a_place(name):
    fault = faults.FAULTS[name]
    for kind in fault.where:
        t = healthy.start(kind, 0)
        assert fault.onset < t.steps
        fault.plant(t, fault.where[kind])


def headline(rule, text="", *, seen=5, is_warning=True):
    return Headline(rule, is_warning, seen, seen, text)


def test_only_the_first_headline_and_only_after_the_onset_names_a_fault():
    fault = faults.FAULTS["nan-in-an-input"]
    other, right = headline("dead", seen=70), headline("nonfinite", seen=72)

    def judged(*headlines):
        return runs.judged(fault, "vae", headlines, own=True)

    assert judged(right, other)["delay"] == 72 - fault.onset
    assert not judged(other, right)["named"]
    assert not judged(headline("nonfinite", seen=69))["named"]
    assert not judged()["named"]
    assert not judged(headline("nonfinite", seen=72, is_warning=False))["named"]


def test_some_rules_name_a_fault_only_with_a_phrase_or_at_its_place():
    nothing = faults.FAULTS["mean-of-an-empty-mask"]
    assert nothing.names("unet", "nonfinite", "the loss is nan. look for an empty mean")
    assert not nothing.names("unet", "nonfinite", "the loss is nan")
    large = faults.FAULTS["layer-times-100"]
    assert large.names("gpt", "exploding", "blocks.0.mlp.0.weight.grad: norm 3")
    assert not large.names("gpt", "exploding", "blocks.0.mlp.2.weight.grad: norm 3")
    assert not large.names("mlp-sgd", "dead", "12.weight.grad: norm 3")
    assert large.names("mlp-sgd", "initialization", "")


def test_any_report_of_another_tool_names_a_fault_if_its_words_fit():
    fault = faults.FAULTS["learning-rate-0-from-60-on"]

    def judged(*headlines):
        return runs.judged(fault, "gpt", headlines, own=False)

    low, high = (headline("update_ratio_band", f"likely LR too {side}", seen=70) for side in ("low", "high"))
    assert judged(headline("loss_spike"), low)["delay"] == 10
    assert not judged(high)["named"]
    assert judged(high)["warnings"] == 1


def test_another_tool_that_fails_harms_only_itself(monkeypatch):
    class Broken:
        def __init__(self, t):
            raise ZeroDivisionError(t.steps)

    monkeypatch.setitem(peers.PEERS, "pulsegrad", Broken)
    result = runs.run("mlp-sgd", 0, steps=3, peers=["pulsegrad"])["tools"]
    assert result["pulsegrad"]["headlines"][0]["text"] == "ZeroDivisionError: 3"
    assert result["pulsegrad"]["warnings"] == result["gradiometer"]["warnings"] == 0
    # PulseGrad reads the gradients itself, before they are cleared
    assert [*runs.run("record-after-zero-grad", 0, steps=3, peers=["pulsegrad"])["tools"]] == ["gradiometer"]


def test_tools_that_are_not_installed_are_left_out(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pulsegrad", None)
    monkeypatch.setitem(sys.modules, "trainscope", None)
    assert zoo.installed() == []
    assert capsys.readouterr().err.count("left out") == 2


def row(name, *, planted, warnings=0, named=None, delay=None):
    headlines = [vars(headline("dead"))] * warnings
    result = {"headlines": headlines, "named": named, "delay": delay, "warnings": warnings}
    return {"name": name, "kind": name, "seed": 0, "steps": 9, "planted": planted} | {
        "tools": {"gradiometer": result}
    }


def test_totals_count_and_bounds_are_missed():
    rows = [row("a", planted=False), row("b", planted=False, warnings=1)]
    rows += [row("c", planted=True, named=True, delay=d) for d in (0, 4)] + [
        row("d", planted=True, named=False)
    ]
    total = tables.totals(rows, "gradiometer")
    assert total == pytest.approx(
        {"planted": 3, "healthy": 2, "recall": 2 / 3, "false": 0.5, "median_delay": 2, "max_delay": 4}
    )
    assert len(tables.missed(total)) == 2
    assert tables.missed(tables.totals(rows[:1] + rows[2:4], "gradiometer")) == []


@pytest.mark.parametrize(("warnings", "status"), [(0, 0), (1, 1)])
def test_the_command_writes_tables_and_checks(monkeypatch, tmp_path, capsys, warnings, status):
    monkeypatch.setattr(
        zoo, "run_all", lambda wanted, _, **__: [row(*wanted[0][:1], planted=False, warnings=warnings)]
    )
    out = tmp_path / "zoo"
    arguments = ["--kinds", "^lstm$", "--seeds", "1", "--check", "--out", str(out)]
    assert zoo.main(arguments) == status
    written = json.loads(out.joinpath("zoo.json").read_text())
    assert written["totals"]["gradiometer"]["false"] == warnings
    assert f"| lstm | 9 | {warnings} |" in out.joinpath("zoo.md").read_text()
    assert ("MISSED" in capsys.readouterr().out) == bool(warnings)


def test_unknown_kinds_are_refused(capsys):
    with pytest.raises(SystemExit):
        zoo.main(["--kinds", "zebra"])
    assert "zebra" in capsys.readouterr().err


def test_a_seed_decides_a_run():
    first, again, other = (runs.run("graph-network", seed, steps=5)["losses"] for seed in (0, 0, 1))
    assert torch.equal(torch.tensor(first), torch.tensor(again))
    assert first != other
