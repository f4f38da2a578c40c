"""The scripts of `make gpu`, as far as they run without a GPU: each line at least once."""

import argparse
import ast
import importlib
import json
import math
import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

import gradiometer as gm
from gradiometer import ops
from gradiometer.columns import DEFAULT_THRESHOLDS
from gradiometer.ops import reference
from gradiometer.recorder import StepRecord
from kernels_bench import machine, scripts
from kernels_bench.gpu import gpt2, odd_sizes, plan, probe, progress, run

pytestmark = pytest.mark.usefixtures("_one_thread")

SMALL = [*plan.SMALL.split(), "--device", "cpu"]


def rows_of(folder, name):
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["rows"]


@pytest.fixture
def no_compiler(monkeypatch):
    # the same graphs without Inductor
    compile_ = torch.compile

    def without_mode(function, **options):
        del options["mode"]
        return compile_(function, backend="eager", **options)

    monkeypatch.setattr(torch, "compile", without_mode)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def cuda_that_counts(monkeypatch):
    """Replaces the memory statistics of a GPU."""
    for name, value in {"memory_allocated": 2**20, "max_memory_allocated": 3 * 2**20}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _: None)


# the training step


@pytest.mark.usefixtures("no_compiler")
def test_a_step_is_timed_with_and_without_collection_in_every_mode(tmp_path, capsys, monkeypatch):
    # on a busy machine the step takes longer
    monkeypatch.setattr(gpt2, "SMALL_MS", math.inf)
    assert gpt2.main([*SMALL, "--out", str(tmp_path)]) == 0, capsys.readouterr().out
    rows = rows_of(tmp_path, "gpt2")
    assert [(row["mode"], row["collects"]) for row in rows] == [
        (mode, what) for mode in gpt2.MODES for what in gpt2.COLLECTS
    ]
    for row in rows:
        assert row["ms"] > 0
        assert (row["graph_breaks"], row["grown_mib"]) == (0, 0.0)
        if row["collects"] != "nothing":
            assert row["added_us_low"] <= row["added_us"] <= row["added_us_high"]
    table = (tmp_path / "gpt2.md").read_text(encoding="utf-8")
    assert table in capsys.readouterr().out
    assert sum(line.startswith("| ") for line in table.splitlines()) == 1 + len(rows)
    assert "tests the code, not the cost of collection" in table


def test_steps_for_which_there_is_no_time_are_left_out(tmp_path, capsys):
    assert gpt2.main([*SMALL, "--modes", "eager,compiled", "--limit", "0", "--out", str(tmp_path)]) == 0
    rows = rows_of(tmp_path, "gpt2")
    assert ["ms" in row for row in rows] == [True, True, False, False, False, False]
    assert [row["collects"] for row in rows if "left_out" in row] == ["grads+weights", *gpt2.COLLECTS]
    assert "| compiled | grads: no time was left |" in capsys.readouterr().out


def test_it_is_gpt2():
    model = gpt2.GPT2(layers=1, width=8, heads=2, vocabulary=16, context=4)
    assert sum(p.numel() for p in model.parameters()) == (16 + 4) * 8 + 12 * 64 + 13 * 8 + 2 * 8
    # the published 124,439,808 parameters, and 47 rows that pad the vocabulary
    with torch.device("meta"):
        model = gpt2.GPT2(layers=12, width=768, heads=12, vocabulary=50304, context=1024)
    assert sum(p.numel() for p in model.parameters()) == 124_439_808 + 47 * 768
    assert len(list(model.parameters())) == 148


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("mode", ["compiled", "eager"])
def test_statistics_that_are_not_those_of_the_gradients_fail_the_mode(mode, monkeypatch, tmp_path):
    collect = gpt2.Training.collect
    monkeypatch.setattr(
        gpt2.Training, "collect", lambda self, what: collect(self, what) and [gm.collect_weights(self.model)]
    )
    assert gpt2.main([*SMALL, "--modes", mode, "--collects", "nothing,grads", "--out", str(tmp_path)]) == 1
    (row,) = rows_of(tmp_path, "gpt2")
    assert row["error"].startswith("AssertionError: a step's statistics differ")


@pytest.mark.usefixtures("no_compiler")
def test_a_graph_break_fails_the_mode(monkeypatch, tmp_path):
    collect = gpt2.Training.collect

    def broken(self, what):
        torch._dynamo.graph_break()
        return collect(self, what)

    monkeypatch.setattr(gpt2.Training, "collect", broken)
    assert gpt2.main([*SMALL, "--modes", "compiled,eager", "--out", str(tmp_path)]) == 1
    assert ["error" in row for row in rows_of(tmp_path, "gpt2")] == [True, False, False, False]


@pytest.mark.usefixtures("cuda_that_counts")
def test_memory_is_counted_where_torch_counts_it():
    training = argparse.Namespace(device=torch.device("cuda"), wait=lambda: None)
    assert gpt2.peak(training, lambda: None) == 3.0
    assert gpt2.allocated(training.device) == 2**20
    gpt2.Training.wait(training)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "fast"], "unknown: fast; modes are compiled, reduce-overhead, eager"),
        (["--collects", "grads"], "--collects must begin with nothing"),
        (["--heads", "5"], "--width 32 is not a multiple of --heads 5"),
        (["--device", "cuda"], "--device cuda: there is no GPU here"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpt2.main([*SMALL, *arguments])
    assert message in capsys.readouterr().err


SPY = """
import importlib, pkgutil, sys
from triton.runtime.interpreter import InterpretedFunction
from gradiometer import kernels
from kernels_bench.gpu import odd_sizes

names = [f"gradiometer.kernels.{module.name}" for module in pkgutil.iter_modules(kernels.__path__)]
modules = [importlib.import_module(name) for name in names]
written = {
    f"{module.__name__}.{name}"
    for module in modules
    for name, value in vars(module).items()
    if isinstance(value, InterpretedFunction) and value.fn.__module__ == module.__name__
}
run, launched = InterpretedFunction.run, set()
def seen(kernel, *args, **options):
    launched.add(f"{kernel.fn.__module__}.{kernel.fn.__name__}")
    return run(kernel, *args, **options)

InterpretedFunction.run = seen
status = odd_sizes.main(["--device", "cpu", "--small"])
print(*sorted(name for name in written - launched if name.endswith("_kernel")), "are not launched")
sys.exit(status or 10 * (not launched <= {name for name in written if name.endswith("_kernel")}))
"""


def test_odd_sizes_launch_every_kernel():
    pytest.importorskip("triton")
    env = scripts.environment(run.ROOT / "src") | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", SPY]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    # 10: a kernel has another kind of name, so that it would not be missed above
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "are not launched", done.stdout


def test_odd_sizes_agree(monkeypatch):
    assert odd_sizes.main(["--device", "cpu", "--small"]) == 0
    collect = gm.collect
    monkeypatch.setattr(
        gm,
        "collect",
        lambda xs, **options: collect({k: x + (torch.rand(()) < 0.5) for k, x in xs.items()}, **options),
    )
    assert odd_sizes.main(["--device", "cpu", "--small"]) == odd_sizes.WRONG


# the script


def bench_row(case, provider, ms, dtype="float32", size=5e8, share=None, error=None):
    row = {"case": case, "provider": provider, "ms": ms, "dtype": dtype, "bytes": size}
    return row | {"ceiling_share": share, "error": error}


BENCH = [
    bench_row("one-1.5e9", "ours-graph", 1.0, "bfloat16", share=0.97),
    bench_row("llama-1b", "ours-graph", 1.0, "bfloat16", share=0.96),
    bench_row("gpt2", "ours-graph", 1.0, share=0.98),
    bench_row("gpt2", "foreach-graph", 1.0),
    bench_row("gpt2", "inductor-graph", 4.5),
    bench_row("gpt2", "inductor-combo-graph", None, error="not compiled"),
    bench_row("gpt2", "loop-graph", 11.0),
    bench_row("2000x1k", "ours-eager", 0.1, size=2e6, share=0.01),
    bench_row("2000x1k", "foreach", 0.2, size=2e6),
]
GPT2 = [{"mode": "compiled", "collects": "grads", "ms": 20.0, "added_percent": 0.5}]


HOST = {"1": {"beyond_us": 20.0, "limit_us": 60.12}, "1000": {"beyond_us": 170.0, "limit_us": 180.0}}


def test_figures_are_computed_from_the_rows():
    found = run.figures(BENCH, BENCH, GPT2, HOST)
    assert [figure.met for figure in found] == [True] * 8
    assert [figure.reached for figure in found] == pytest.approx(
        [0.98, 0.96, 1.0, 4.5, 11.0, 0.5, 0.5, 170.0]
    )
    assert (found[-1].bound, found[-1].where) == (180.0, "host_path, 1000 tensors")
    # the worst of all lists
    assert found[1].where == "llama-1b"


@pytest.mark.parametrize(
    ("figure", "row", "change"),
    [
        (0, 2, {"ceiling_share": 0.94}),
        (1, 0, {"ceiling_share": 0.94}),
        (2, 3, {"ms": 0.9}),
        (3, 4, {"ms": 3.9}),
        (3, 5, {"ms": 3.9, "error": None}),
        (4, 6, {"ms": 9.0}),
        (5, 8, {"ms": 0.05}),
    ],
)
def test_each_figure_can_be_missed(figure, row, change):
    rows = [{**r, **(change if i == row else {})} for i, r in enumerate(BENCH)]
    assert [i for i, found in enumerate(run.figures(rows, rows, GPT2, HOST)) if not found.met] == [figure]


def test_the_hosts_figure_can_be_missed():
    slow = {**HOST, "148": {"beyond_us": 90.0, "limit_us": 77.8}}
    assert [i for i, found in enumerate(run.figures(BENCH, BENCH, GPT2, slow)) if not found.met] == [7]


def test_a_figure_that_was_not_measured_is_neither_met_nor_missed():
    assert {figure.met for figure in run.figures([], [], [], {})} == {None}
    failed = [bench_row("2000x1k", "ours-eager", 0.1, error="wrong: 1e+00"), *BENCH[-1:]]
    assert run.figures(failed, [], [{"mode": "compiled", "error": "it broke"}], {})[5:7] == [
        run.Figure("time / _foreach_norm's, 2000 tiny", None, 1.0, most=True, where="2000x1k"),
        run.Figure("% of a compiled step of GPT-2", None, 1.0, most=True, where="gpu.gpt2"),
    ]


def python(code):
    return [sys.executable, "-c", code]


@pytest.fixture
def with_gpu(monkeypatch):
    described = machine.describe()
    monkeypatch.setattr(machine, "describe", lambda: described)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def write(path, rows):
    return f"from pathlib import Path; Path({str(path)!r}).write_text({json.dumps({'rows': rows})!r})"


def written(path, lines):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    return f"from pathlib import Path; Path({str(path)!r}).write_text({text!r})"


def results(*outcomes):
    """Return the lines that the plugin writes for tests with these outcomes; None: it has not ended."""
    lines = [{"selected": 4}]
    for name, outcome in zip("abcd", outcomes, strict=False):
        lines += [{"test": name}, *([{"test": name, "outcome": outcome}] if outcome else [])]
    return lines


@pytest.fixture
def listed(monkeypatch):
    """The parts of a run; the test fills the list."""
    found = []
    monkeypatch.setattr(run, "parts", lambda *_, **__: list(found))
    monkeypatch.setattr(run, "GRACE", 2.0)
    return found


@pytest.mark.usefixtures("with_gpu")
def test_all_parts_run_whatever_one_of_them_does(listed, tmp_path, capsys):
    out, left = tmp_path / "out", tmp_path / "left"
    lines = results("passed", "passed", "failed", "skipped")
    # the process that is interrupted writes its results; the one that it started ignores the interrupt
    child = "import signal, time, pathlib; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(6); "
    child += f"pathlib.Path({str(left)!r}).touch()"
    forks = f"import subprocess, sys\ntry:\n  subprocess.Popen([sys.executable, '-c', {child!r}]).wait()\n"
    forks += f"except KeyboardInterrupt:\n  {write(out / 'bench.json', BENCH)}"
    listed += [
        run.Part("tests", [*python(f"{written(out / 'tests.jsonl', lines)}; 1 / 0"), "--progress"], 30),
        run.Part("bench", python(forks), 2),
        run.Part("gpt2", python(write(out / "gpt2.json", GPT2)), 30),
    ]
    begin = time.perf_counter()
    assert run.main(["--out", str(out)]) == 1
    result = json.loads((out / "gpu.json").read_text(encoding="utf-8"))
    ended = {part["part"]: part["ended"] for part in result["parts"]}
    assert ended == {"tests": "exit code 1", "bench": "cut off after 2 s", "gpt2": "ok"}
    assert result["tests"] == {"tests": 4, "passed": 2, "failed": 1, "errors": 0, "skipped": 1}
    assert result["figures"][0]["met"]
    table, said = (out / "gpu.md").read_text(encoding="utf-8"), capsys.readouterr().out
    assert table in said
    assert "ZeroDivisionError" in said
    assert "ZeroDivisionError" in (out / "tests.log").read_text(encoding="utf-8")
    # a process that the part started ended with it
    time.sleep(max(0.0, 9 - (time.perf_counter() - begin)))
    assert not left.exists()


@pytest.mark.usefixtures("with_gpu")
def test_several_short_calls_give_one_result(listed, tmp_path, capsys):
    out = tmp_path / "out"
    listed += [
        run.Part("doctor", python("print('as it is')"), 30),
        run.Part("bench", python(write(out / "bench.json", BENCH)), 30),
        run.Part("gpt2", python(write(out / "gpt2.json", GPT2)), 30),
    ]
    # the first part of a call runs anyway
    assert run.main(["--out", str(out), "--seconds", "1"]) == 0
    assert capsys.readouterr().out.endswith("2 parts are left; go on with --from bench\n")
    assert run.main(["--out", str(out), "--from", "bench"]) == 0
    result = json.loads((out / "gpu.json").read_text(encoding="utf-8"))
    assert [part["part"] for part in result["parts"]] == ["doctor", "bench", "gpt2"]
    assert [figure["met"] for figure in result["figures"]][:2] == [True, True]
    assert "as it is" in (out / "gpu.md").read_text(encoding="utf-8")
    # a part that failed can be run again
    listed[2] = run.Part("gpt2", python("raise SystemExit(5)"), 30)
    assert run.main(["--out", str(out), "--from", "gpt2"]) == 1
    listed[2] = run.Part("gpt2", python(""), 30)
    assert run.main(["--out", str(out), "--from", "gpt2"]) == 0
    # and one alone
    assert run.main(["--out", str(out), "--only", "bench"]) == 0
    result = json.loads((out / "gpu.json").read_text(encoding="utf-8"))
    assert sorted(part["part"] for part in result["parts"]) == ["bench", "doctor", "gpt2"]
    # without --from a run begins anew; other files stay
    (out / "notes.txt").write_text("mine")
    listed[1] = run.Part("bench", python(""), 30)
    assert run.main(["--out", str(out)]) == 0
    assert not (out / "bench.json").exists()
    assert (out / "notes.txt").read_text() == "mine"
    with pytest.raises(SystemExit):
        run.main(["--from", "nothing"])
    assert "the parts here are doctor, bench, gpt2" in capsys.readouterr().err


TOOLS = ("compute-sanitizer", "ncu")


@pytest.fixture
def tools(monkeypatch, tmp_path):
    """Stand-ins for the tools of a GPU machine, which only start the program."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        tool = folder / name
        tool.write_text('#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift 2; done\nexec "$@"\n')
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.usefixtures("tools")
def test_scripts_take_the_arguments_that_they_get_on_a_gpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    seen = []
    for part in run.parts(tmp_path, "cuda", sweep=True):
        module = next((word for word in part.command if word.startswith("kernels_bench")), "")
        # host_path runs on the CPU too, and is run there by the test of all parts
        if not module or "pytest" in part.command or part.name == "host":
            continue
        script = importlib.import_module("kernels_bench.bench" if module == "kernels_bench" else module)
        with pytest.raises(SystemExit):
            script.main(part.command[part.command.index(module) + 1 :])
        # not an unknown argument, case or provider
        assert re.search("sees no GPU here|there is no GPU here", capsys.readouterr().err)
        seen.append(part.name)
    assert seen == [
        "odd-sizes",
        *plan.CHECKERS,
        "replays",
        "monitor",
        "bench",
        "kinds",
        "ncu",
        "gpt2",
        "fused-taps",
        "peers",
        "sweep",
    ]


@pytest.mark.usefixtures("tools")
def test_parts_that_ran_on_a_gpu_the_least_come_first_and_benchmarks_last(tmp_path):
    names = [part.name for part in run.parts(tmp_path, "cuda")]
    order = [*plan.NEW, "odd-sizes", *plan.CHECKERS, *plan.RECORDED, "replays", "monitor", *plan.KNOWN]
    benchmarks = ["bench", "kinds", "ncu", "host", "gpt2", "fused-taps", "peers"]
    assert names == ["doctor", *order, *benchmarks]
    assert len(set(names)) == len(names)


@pytest.mark.deep
@pytest.mark.usefixtures("tools")
def test_the_whole_order_runs_without_a_gpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main(["--out", str(tmp_path)]) == 0, capsys.readouterr().out
    result = json.loads((tmp_path / "rehearsal" / "gpu.json").read_text(encoding="utf-8"))
    names = [part.name for part in run.parts(tmp_path, "cpu")]
    assert [(part["part"], part["ended"]) for part in result["parts"]] == [(name, "ok") for name in names]
    # those that need a device skip themselves
    assert result["tests"]["passed"] > 40
    assert result["tests"]["failed"] == result["tests"]["errors"] == 0
    assert sum(figure["reached"] is not None for figure in result["figures"]) >= 3


def test_every_test_that_compiles_is_marked():
    for file in (run.ROOT / "tests" / "gpu").glob("test_*.py"):
        functions = [x for x in ast.parse(file.read_text()).body if isinstance(x, ast.FunctionDef)]
        # by torch, or by the helper for these tests
        calls = re.compile(r"torch\.compile\(|(run|step) = compiled\(")
        compiling = {x.name for x in functions if calls.search(ast.unparse(x))}
        for function in functions:
            names = {x.id for x in ast.walk(function) if isinstance(x, ast.Name)} | {function.name}
            if function.name.startswith("test_") and names & compiling:
                marks = [ast.unparse(x) for x in function.decorator_list]
                assert "pytest.mark.compiles" in marks, function.name


@pytest.mark.parametrize("what", ["captures", "monitor"])
def test_a_wrong_number_fails_the_probe(what, tmp_path, monkeypatch, capsys):
    arguments = [what, "--device", "cpu", "--steps", "8", "--out", str(tmp_path)]
    monkeypatch.setattr(probe, "ATTACKS", (probe.fill_device,))
    monkeypatch.setattr(probe, "SIZES", (1, 70))
    assert probe.main(arguments) == 0
    if what == "captures":
        capture = probe.capture
        monkeypatch.setattr(probe, "capture", lambda *args: (capture(*args)[0], lambda: None))
    else:
        total = StepRecord.total
        monkeypatch.setattr(StepRecord, "total", lambda record: total(record) * (1 + 1e-9))
    assert probe.main(arguments) == probe.WRONG
    assert "wrong: none" in capsys.readouterr().out


@pytest.mark.usefixtures("with_gpu")
def test_the_benchmark_gets_the_time_that_is_left(listed, tmp_path, monkeypatch, capsys):
    given = {}

    def run_part(part, _log):
        given[part.name] = part.seconds
        return {"part": part.name, "command": "", "seconds": 1.0, "ended": "ok"}

    monkeypatch.setattr(run, "run", run_part)
    listed += [run.Part("tests", [], 200), run.Part("bench", [], 600, least=60)]
    assert run.main(["--out", str(tmp_path), "--seconds", "300"]) == 0
    assert given["tests"] == 200
    # 300 s less those that the machine's description took
    assert 60 <= given["bench"] <= 300
    # without a limit it has its own
    assert run.main(["--out", str(tmp_path)]) == 0
    assert given["bench"] == 600
    given.clear()
    assert run.main(["--out", str(tmp_path), "--seconds", "59"]) == 0
    assert list(given) == ["tests"]
    assert "1 parts are left; go on with --from bench" in capsys.readouterr().out


# the results of tests, which are written one by one


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize(
    ("outcomes", "ended", "status"),
    [
        (("passed", "passed", None), "cut after 2 of 4 tests, 2 passed, in c", 0),
        (("passed", "skipped"), "cut after 2 of 4 tests, 1 passed, 1 skipped", 0),
        ((None,), "cut after 0 of 4 tests, 0 passed, in a", 0),
        (("passed", "failed", None), "cut after 2 of 4 tests, 1 passed, 1 failed, in c", 1),
        (("errors", "passed"), "cut after 2 of 4 tests, 1 passed, 1 errors", 1),
    ],
)
def test_a_part_that_is_cut_counts_the_tests_that_ran(listed, tmp_path, capsys, outcomes, ended, status):
    out = tmp_path / "out"
    # written before, so that it does not matter how fast a process starts
    wait = f"import time; {written(out / 'tests.jsonl', results(*outcomes))}; time.sleep(60)"
    listed += [run.Part("tests", [*python(wait), "--progress"], 0.1), run.Part("bench", python(""), 30)]
    start = run.start

    def start_late(part):
        process = start(part)
        deadline = time.monotonic() + 60
        while part.name == "tests" and not (out / "tests.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "start", start_late)
        assert run.main(["--out", str(out)]) == status
    result = json.loads((out / "gpu.json").read_text(encoding="utf-8"))
    # the rest continues
    assert [part["ended"] for part in result["parts"]] == [ended, "ok"]
    assert result["tests"]["tests"] == sum(outcome is not None for outcome in outcomes)
    assert f"| {ended} |" in (out / "gpu.md").read_text(encoding="utf-8")
    assert f"tests: {ended}; run it again with --only tests" in capsys.readouterr().out


SUITE = """
import os, pytest

@pytest.fixture
def broken():
    yield
    raise ValueError

@pytest.fixture
def missing():
    raise ValueError

def test_a(): pass
def test_b(): assert False
def test_c(missing): pass
def test_d(broken): pass
@pytest.mark.skipif(True, reason="no")
def test_e(): pass
def test_f(): pytest.skip()
def test_g(): os._exit(7)
def test_h(): pass
"""


def test_results_are_written_as_they_come(tmp_path):
    (tmp_path / "test_suite.py").write_text(SUITE)
    path = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "kernels_bench.gpu.progress"]
    command += ["-c", os.devnull, "--progress", str(path), str(tmp_path)]
    env = scripts.environment() | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    # the process is killed in test_g
    assert done.returncode == 7, done.stdout
    found = progress.read(path)
    outcomes = {name[-1]: outcome for name, outcome in found.outcomes.items()}
    assert outcomes == dict(
        zip("abcdef", ["passed", "failed", *["errors"] * 2, *["skipped"] * 2], strict=True)
    )
    assert found.running.endswith("test_g")
    assert found.cut().startswith("cut after 6 of 8 tests, 1 passed, 1 failed, 2 errors, 2 skipped, in ")
    # a line that was cut is not read
    path.write_text(path.read_text() + '{"test": "test_g", "outc')
    assert progress.read(path) == found
    assert progress.read(tmp_path / "nothing") == (None, {}, None)


COLLECT = """
import json, sys, pytest

class Seen:
    def pytest_collection_finish(self, session):
        self.names = [item.nodeid for item in session.items]

found = []
for arguments in json.loads(sys.argv[1]):
    seen = Seen()
    seen.names = []
    pytest.main([*arguments, "--collect-only", "-qq"], plugins=[seen])
    found.append(seen.names)
print("\\n" + json.dumps(found))
"""


def selections(*listed):
    """Return the tests that pytest selects with each list of arguments."""
    env = scripts.environment(run.ROOT / "src", run.ROOT / "tests") | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    # a rehearsal would select fewer
    env.pop("GPU_TESTS_DEVICE", None)
    command = [sys.executable, "-c", COLLECT, json.dumps(listed)]
    done = subprocess.run(command, env=env, cwd=run.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_each_test_on_a_gpu_is_in_one_part(tmp_path):
    commands = [part.command for part in run.parts(tmp_path, "cuda") if "pytest" in part.command]
    arguments = [command[command.index("pytest") + 1 :] for command in commands]
    # no other file has the marker
    files = [
        path for path in (run.ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8")
    ]
    files.remove(Path(__file__))
    options = arguments[0][: arguments[0].index("-m")]
    everything, *each = selections([*options, "-m", "gpu", *map(str, files)], *arguments)
    assert len(everything) > 250
    assert [part for part, names in zip(arguments, each, strict=True) if not names] == []
    together = [name for names in each for name in names]
    assert sorted(together) == sorted(everything)


@pytest.mark.parametrize(
    "name",
    [
        *["taps", "pairs", "exponents", "lines", "clip", "ranks"],
        *[pytest.param(x, marks=pytest.mark.deep) for x in ("compiled-taps", "captures", "compiled-new")],
    ],
)
def test_tests_on_a_gpu_run_on_interpreted_kernels(name, tmp_path):
    pytest.importorskip("triton")
    (part,) = [part for part in run.parts(tmp_path, "cpu") if part.name == name]
    result = run.run(part._replace(seconds=500), tmp_path / f"{name}.log")
    assert result["ended"] == "ok", run.text_of(tmp_path / f"{name}.log")
    assert result["tests"]["passed"] > 0


@pytest.mark.parametrize(
    ("command", "ended", "tests", "fails"),
    [
        ("python -m pytest", "ok", {"failed": 0, "errors": 0}, False),
        ("python -m pytest", "exit code 1", {"failed": 1, "errors": 0}, True),
        ("python -m pytest", "cut after 3 of 4 tests, 3 passed", {"failed": 0, "errors": 0}, False),
        ("python -m pytest", "cut after 3 of 4 tests, 1 failed", {"failed": 1, "errors": 0}, True),
        ("compute-sanitizer", "exit code 9", None, True),
        ("compute-sanitizer", "cut off after 90 s", None, False),
        ("compute-sanitizer", "cut off after 90 s, 2 findings", None, True),
        ("compute-sanitizer", "does not run here (exit code 1)", None, False),
        ("python -m kernels_bench", "cut off after 130 s", None, False),
        ("python -m kernels_bench", "exit code 1", None, True),
    ],
)
def test_what_fails_the_run(command, ended, tests, fails):
    part = {"command": command, "ended": ended}
    assert run.failed(part | ({"tests": tests} if tests else {})) == fails


def test_findings_of_a_checker_that_is_cut_count(tmp_path):
    log = tmp_path / "log"
    lines = ["========= COMPUTE-SANITIZER", "moments", "========= Invalid __global__ read of size 4 bytes"]
    lines += ["=========     at _moments_kernel+0x90", "========= Error: Race reported between Write access"]
    none = [*lines[:2], "========= Error: process didn't terminate successfully"]
    for printed, ended in ((lines, "cut off after 0 s, 2 findings"), (none, "cut off after 0 s")):
        log.unlink(missing_ok=True)
        code = f"import time; print({chr(10).join(printed)!r}, flush=True); time.sleep(60)"
        part = run.Part("memcheck", python(code), 0.1)
        start = run.start

        def start_late(part, start=start):
            process = start(part)
            # printed at once, and read by `tee` later
            select.select([process.stdout], [], [], 60)
            return process

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run, "start", start_late)
            patch.setattr(run, "GRACE", 2.0)
            assert run.run(part, log)["ended"] == ended


@pytest.mark.parametrize(
    ("status", "ended"), [(9, "exit code 9"), (3, "exit code 3"), (1, "does not run here (exit code 1)")]
)
def test_a_checker_that_cannot_attach_has_found_nothing(status, ended, tmp_path):
    part = run.Part("memcheck", python(f"raise SystemExit({status})"), 30)
    assert run.run(part, tmp_path / "log")["ended"] == ended


# the sweep


@pytest.fixture
def sweep(monkeypatch):
    pytest.importorskip("triton")
    from kernels_bench.gpu import sweep

    monkeypatch.setattr(ops, "uses_kernels", lambda _: True)
    # the CPU path gives the numbers, whatever the table says
    monkeypatch.setattr(
        sweep, "measure", lambda tensors: reference.tensor_stats(tensors, DEFAULT_THRESHOLDS, None)
    )
    return sweep


def test_the_sweep_finds_the_quickest_table(sweep, monkeypatch, tmp_path):
    tuning, dtype = sweep.tuning, torch.float32
    before = tuning.CHUNK, dict(tuning.MOMENTS), tuning.FINALIZE

    def cost(call, device):
        del device
        seen = []
        measure = sweep.measure
        monkeypatch.setattr(sweep, "measure", lambda _: seen.append((tuning.CHUNK, tuning.MOMENTS[dtype])))
        call()
        monkeypatch.setattr(sweep, "measure", measure)
        ((chunk, moments),) = seen
        wanted = (math.log2(chunk / 2**16), moments.unroll / 2 - 1, moments.threads / 64 - 1)
        return 1.0 + sum(x * x for x in wanted) + abs(moments.registers - 96) / 96

    monkeypatch.setattr(sweep, "sample", cost)
    small = ["--device", "cpu", "--divide", "1000000", "--tensors", "3", "--turns", "1"]
    assert sweep.main([*small, "--dtypes", "float32", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "sweep.json").read_text(encoding="utf-8"))
    (best,) = result["best"]
    assert [best[key] for key in ("chunk", "tile", "unroll", "threads", "registers")] == [
        2**16,
        256,
        2,
        64,
        96,
    ]
    assert best["whole"]
    assert best["ratio"] < 1
    assert before == (tuning.CHUNK, tuning.MOMENTS, tuning.FINALIZE)
    assert "| float32 | best | 65536 | 256 | 2 | 64 | 96 |" in (tmp_path / "sweep.md").read_text(
        encoding="utf-8"
    )


def test_a_candidate_with_wrong_numbers_is_none(sweep, monkeypatch, tmp_path):
    monkeypatch.setattr(
        sweep, "measure", lambda tensors: (torch.ones(len(tensors), 8, dtype=torch.float64), None)
    )
    small = ["--device", "cpu", "--divide", "1000000", "--tensors", "3", "--dtypes", "bfloat16"]
    assert sweep.main([*small, "--out", str(tmp_path)]) == 0
    assert {row["error"] for row in rows_of(tmp_path, "sweep")} == {"AssertionError: wrong norms"}


def test_time_that_runs_out_is_said(sweep, tmp_path):
    small = ["--device", "cpu", "--divide", "1000000", "--tensors", "3", "--seconds", "0"]
    assert sweep.main([*small, "--out", str(tmp_path)]) == 0
    assert (tmp_path / "sweep.md").read_text(encoding="utf-8").count("not all tried") == 4


def test_recorded_candidates_are_timed_by_the_device(sweep, monkeypatch):
    # a capture that calls the function, and a timing
    device = mock.MagicMock()
    device.return_value.elapsed_time.return_value = 10.0
    for name in ("CUDAGraph", "graph", "Event"):
        monkeypatch.setattr(torch.cuda, name, device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    tensors = [torch.randn(5), torch.randn(9)]
    call = sweep.prepare(tensors, torch.stack([x.double().norm() for x in tensors]), {}, "cuda")
    assert call()[0].shape[0] == 2
    assert sweep.sample(call, "cuda") == 10.0
