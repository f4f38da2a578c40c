"""The roofline model against hand-computed values, and the report of the machine code."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import fields, replace
from typing import Any

import pytest

from kernels_bench.machine_code import report, tables
from kernels_bench.machine_code.roofline import GPUS, Gpu, binding, times

# 10 processors at 1 GHz: 10**10 clocks a second in all
SMALL = Gpu("small", "sm_90", 10, 1e9, 1e12, lanes=128, fp64=64, conversions=16, sources={})

NAMES = {"target": "sm_90", "kernel": "moments", "dtype": "float32", "variant": ""}
COSTS = {"instructions": 8.0, "slots": 8.0, "nops": 0.0, "fp64": 2.0, "conversions": 1.0}
COSTS |= {"elements": 16, "threads": 128, "reads_ahead": False}
KERNEL = {"loads": {"16": 4}, "registers": 64, "spills": 0, "stack": 0, "shared": 32, "code": 800}
ROW = NAMES | COSTS | KERNEL


def test_each_resource_takes_its_time():
    seconds = times(SMALL, 4, slots=8, fp64=2, conversions=1, elements=9e9)
    assert seconds == pytest.approx(
        {
            "memory": 0.04,  # 36 GB at 0.9 TB/s
            "issue": 0.05625,  # 72e9 lanes at 128 * 10**10 a second
            "fp64": 0.028125,  # 18e9 at 64 * 10**10
            "conversion": 0.05625,  # 9e9 at 16 * 10**10
        }
    )


@pytest.mark.parametrize(
    ("costs", "name"),
    [
        ({"slots": 5, "fp64": 2, "conversions": 0}, "memory"),
        ({"slots": 6, "fp64": 2, "conversions": 0}, "issue"),
        ({"slots": 5, "fp64": 3, "conversions": 0}, "fp64"),
        ({"slots": 5, "fp64": 2, "conversions": 1}, "conversion"),
    ],
)
def test_the_longest_time_binds(costs, name):
    # 4 bytes at 0.9 TB/s are the time of 5.69 instructions, 2.84 fp64 operations and 0.71 conversions
    assert binding(times(SMALL, 4, **costs)) == name


def test_the_formula_gives_the_budgets_known():
    # at the specified bandwidth a bf16 element leaves 19 slots on an A100
    a100 = next(gpu for gpu in GPUS if gpu.name == "A100")
    seconds = times(a100, 2, slots=19, fp64=0, conversions=0)
    assert seconds["issue"] == pytest.approx(0.9 * seconds["memory"], rel=0.02)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_each_rate_has_a_source(gpu):
    rates = {field.name for field in fields(Gpu)} - {"name", "target", "sources"}
    assert set(gpu.sources) == rates
    assert all(len(source.split()) > 3 for source in gpu.sources.values())
    assert rates == set(tables.RATES)


@pytest.mark.parametrize(
    ("name", "fp32", "fp64"),
    # the vendors' peak TFLOPS of vector instructions; MI300X's fp32 counts packed ones
    [
        ("A100", 19.5, 9.7),
        ("H100", 67, 34),
        ("H200", 67, 34),
        ("B200", 75, 37),
        ("RTX 4090", 82.6, 1.3),
        ("MI300X", 163.4 / 2, 81.7),
    ],
)
def test_the_rates_give_the_vendors_peaks(name, fp32, fp64):
    gpu = next(gpu for gpu in GPUS if gpu.name == name)
    fused = 2e-12 * gpu.processors * gpu.clock
    # an A100's SM has 64 fp32 lanes for its 128 slots
    lanes = 64 if name == "A100" else gpu.lanes
    assert fused * lanes == pytest.approx(fp32, rel=0.01)
    assert fused * gpu.fp64 == pytest.approx(fp64, rel=0.03)


def test_a_bound_follows_for_each_gpu_of_a_target():
    bounds = report.bound_rows([ROW, ROW | {"instructions": 99.0, "slots": 99.0}])
    assert [(row["gpu"], row["dtype"]) for row in bounds] == [("H100", "float32"), ("H200", "float32")]
    h200 = bounds[1]
    # the first variant is the one for aligned tensors
    assert (h200["bound"], h200["share"]) == ("memory", pytest.approx(0.9))
    assert h200["bytes_per_second"] == pytest.approx(4.32e12)
    # at this clock conversions take as long as memory
    slower = replace(next(gpu for gpu in GPUS if gpu.name == "H200"), clock=h200["clock_needed"])
    seconds = times(slower, 4, ROW["slots"], ROW["fp64"], ROW["conversions"])
    assert seconds["conversion"] == pytest.approx(seconds["memory"])


def test_a_gpu_without_fp64_units_is_said_to_be_bound_by_them():
    row, _ = report.bound_rows([ROW | {"target": "sm_89", "dtype": "bfloat16"}])
    assert (row["gpu"], row["bound"]) == ("RTX 4090", "fp64")
    assert "| fp64 |" in tables.pipe_table(tables.BOUND_HEAD, tables.bound_table([row]))


def report_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"versions": {"triton": "3.7.1"}, "code": rows, "bounds": report.bound_rows(rows)}


def test_the_report_says_what_was_not_compiled():
    found = report_of([NAMES | {"error": "no such GPU"}, ROW])
    page = tables.markdown(found)
    assert "not compiled: no such GPU" in page
    assert "| sm_90 | moments | float32 |  | 8.00 |" in page
    assert "triton 3.7.1" in page
    used = [gpu for gpu in GPUS if gpu.target == "sm_90"]
    assert all(source in page for gpu in used for source in gpu.sources.values())
    # every row of a table has as many cells as its header
    blocks = [block.splitlines() for block in page.split("\n\n") if block.startswith("|")]
    assert len(blocks) == 3
    assert all(len({line.count("|") for line in table}) == 1 for table in blocks)
    json.dumps(found)


@pytest.mark.parametrize("hidden", [[], ["rich", "rich.console", "rich.table"]])
def test_the_report_is_shown_with_and_without_rich(monkeypatch, capsys, hidden):
    if not hidden:
        pytest.importorskip("rich")
    for name in hidden:
        monkeypatch.setitem(sys.modules, name, None)
    tables.show(report_of([ROW]))
    shown = capsys.readouterr().out
    assert ("| H200 | moments | float32 |" in shown) == bool(hidden)
    assert all(word in shown for word in ("sm_90", "H200", "4 x 16 B", "triton 3.7.1"))


def test_compilers_stand_side_by_side():
    old = report_of([ROW, ROW | {"dtype": "float16"}])
    new = {"versions": {"triton": "3.9.0", "sm_90": "ptxas 13.4"}, "code": [ROW | {"spills": 3}]}
    page = tables.joined([old, new])
    assert "| target | dtype | triton 3.7.1 | triton 3.9.0 |" in page
    assert "| sm_90 | float32 | 8.00 (64) | 8.00 (64, 3 spills) |" in page
    assert "| sm_90 | float16 | 8.00 (64) | - |" in page
    assert "| sm_90 | - | ptxas 13.4 |" in page


def test_an_unknown_name_is_one_line(capsys):
    with pytest.raises(SystemExit, match="unknown target sm_70; known are sm_80, sm_90"):
        report.chosen("sm_90,sm_70", ("sm_80", "sm_90"), "target")
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "0" or os.name != "posix" or os.uname().machine != "x86_64",
    reason="machine code is read on x86-64 Linux",
)
def test_a_target_that_a_compiler_does_not_know_is_a_row(monkeypatch):
    pytest.importorskip("triton")
    from kernels_bench.machine_code.compile import Launch

    def compile_(_, target):
        raise RuntimeError(f"unknown {target}\nand a long listing")

    monkeypatch.setattr(Launch, "compile", compile_)
    (row,) = report.code_rows("sm_90", ["float32"], ["moments"], None)
    assert row["error"] == "RuntimeError: unknown sm_90"


def end_the_process(*_):
    os._exit(1)


def test_a_compiler_that_ends_the_process_is_a_row(monkeypatch):
    monkeypatch.setattr(report, "code_rows", end_the_process)
    (row,) = report.in_own_process("sm_90", ["float32"], ["moments"], None)
    assert "ended the process" in row["error"]
    assert report.bound_rows([row]) == []
