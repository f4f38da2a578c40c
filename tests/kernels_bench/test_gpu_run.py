"""The scripts of `make gpu`, as far as they run without a GPU: each line at least once."""

import argparse
import importlib.util
import json
import math
import sys
import time

import pytest
import torch

import gradiometer as gm
from gradiometer import ops
from gradiometer.columns.schema import DEFAULT_THRESHOLDS
from gradiometer.ops import reference
from kernels_bench import machine
from kernels_bench.gpu import gpt2, odd_sizes, run

pytestmark = pytest.mark.usefixtures("_one_thread")

SMALL = [*run.SMALL.split(), "--device", "cpu"]


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
        gpt2.Training,
        "collect",
        lambda self, what: collect(self, what) and [gm.collect_weights(self.model)],
    )
    assert gpt2.main([*SMALL, "--modes", mode, "--collects", "nothing,grads", "--out", str(tmp_path)]) == 1
    (row,) = rows_of(tmp_path, "gpt2")
    assert row["error"].startswith("AssertionError: a step's statistics differ")


@pytest.mark.usefixtures("no_compiler")
def test_a_graph_break_fails_the_mode(monkeypatch, tmp_path):
    update = gpt2.Training.update

    def broken(self):
        torch._dynamo.graph_break()
        update(self)

    monkeypatch.setattr(gpt2.Training, "update", broken)
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


def test_odd_sizes_agree(monkeypatch):
    assert odd_sizes.main(["--device", "cpu"]) == 0
    collect = gm.collect
    monkeypatch.setattr(
        gm, "collect", lambda xs: collect({k: x + (torch.rand(()) < 0.5) for k, x in xs.items()})
    )
    assert odd_sizes.main(["--device", "cpu"]) == odd_sizes.WRONG


# the script


def bench_row(case, provider, ms, dtype="float32", size=5e8, share=None, error=None):
    row = {"case": case, "provider": provider, "ms": ms, "dtype": dtype, "bytes": size}
    return row | {"ceiling_share": share, "error": error}


BENCH = [
    bench_row("one-1.5e9", "ours-eager", 1.0, "bfloat16", share=0.97),
    bench_row("llama-1b", "ours-eager", 1.0, "bfloat16", share=0.96),
    bench_row("gpt2", "ours-eager", 1.0, share=0.98),
    bench_row("gpt2", "foreach", 1.0),
    bench_row("gpt2", "inductor", 4.5),
    bench_row("gpt2", "inductor-combo", None, error="not compiled"),
    bench_row("gpt2", "loop", 11.0),
    bench_row("2000x1k", "ours-eager", 0.1, size=2e6, share=0.01),
    bench_row("2000x1k", "foreach", 0.2, size=2e6),
]
GPT2 = [{"mode": "compiled", "collects": "grads", "ms": 20.0, "added_percent": 0.5}]


HOST = {"1": {"beyond_us": 20.0, "limit_us": 60.12}, "1000": {"beyond_us": 170.0, "limit_us": 180.0}}


def test_figures_are_computed_from_the_rows():
    found = run.figures(BENCH, GPT2, HOST)
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
    assert [i for i, found in enumerate(run.figures(rows, GPT2, HOST)) if not found.met] == [figure]


def test_the_hosts_figure_can_be_missed():
    slow = {**HOST, "148": {"beyond_us": 90.0, "limit_us": 77.8}}
    assert [i for i, found in enumerate(run.figures(BENCH, GPT2, slow)) if not found.met] == [7]


def test_a_figure_that_was_not_measured_is_neither_met_nor_missed():
    assert {figure.met for figure in run.figures([], [], {})} == {None}
    failed = [bench_row("2000x1k", "ours-eager", 0.1, error="wrong: 1e+00"), *BENCH[-1:]]
    assert run.figures(failed, [{"mode": "compiled", "error": "it broke"}], {})[5:7] == [
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


@pytest.mark.usefixtures("with_gpu")
def test_all_parts_run_whatever_one_of_them_does(monkeypatch, tmp_path, capsys):
    out, left = tmp_path / "out", tmp_path / "left"
    xml = '<testsuites><testsuite tests="3" failures="1" errors="0" skipped="1"/></testsuites>'
    forks = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', %r]).wait()"
    late = f"import time, pathlib; time.sleep(4); pathlib.Path({str(left)!r}).touch()"
    listed = [
        run.Part(
            "tests", python(f"open({str(out / 'tests.xml')!r}, 'w').write({xml!r}); raise SystemExit(1)"), 30
        ),
        run.Part("bench", python(write(out / "bench.json", BENCH) + f"; {forks % late}"), 0),
        run.Part("gpt2", python(write(out / "gpt2.json", GPT2)), 30),
        run.Part("sweep", python("import sys; raise SystemExit(0 if float(sys.argv[1]) > 1 else 3)"), 30),
    ]
    listed[3].command.append(run.LIMIT)
    # the time that the tests leave goes to the next part: here there is none, so that part is cut off
    monkeypatch.setattr(run, "parts", lambda *_, **__: [listed[0]._replace(seconds=3), *listed[1:]])
    monkeypatch.setattr(run, "warm_ups", lambda _: [python("import time; time.sleep(60)")])
    begin = time.perf_counter()
    assert run.main(["--out", str(out)]) == 1
    assert time.perf_counter() - begin < 30
    result = json.loads((out / "gpu.json").read_text(encoding="utf-8"))
    ended = {part["part"]: part["ended"] for part in result["parts"]}
    assert ended["tests"] == "exit code 1"
    assert ended["bench"].startswith("cut off after")
    assert (ended["gpt2"], ended["sweep"]) == ("ok", "ok")
    assert result["tests"] == {"tests": 3, "failures": 1, "errors": 0, "skipped": 1}
    table = (out / "gpu.md").read_text(encoding="utf-8")
    assert table in capsys.readouterr().out
    # a process that the part started ended with it
    time.sleep(max(0.0, 5 - (time.perf_counter() - begin)))
    assert not left.exists()


@pytest.mark.usefixtures("with_gpu")
def test_it_succeeds_when_every_part_does(monkeypatch, tmp_path):
    listed = [run.Part("bench", python(""), 30), run.Part("gpt2", python(""), 30)]
    monkeypatch.setattr(run, "parts", lambda *_, **__: listed)
    monkeypatch.setattr(run, "warm_ups", lambda _: [])
    assert run.main(["--out", str(tmp_path / "out")]) == 0
    assert "not measured" in (tmp_path / "out" / "gpu.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("sweep", [False, True])
@pytest.mark.parametrize("sanitizer", [None, "/usr/bin/compute-sanitizer"])
def test_the_parts_take_less_than_eight_minutes(sweep, sanitizer, tmp_path):
    listed = run.parts(tmp_path, sweep=sweep, sanitizer=sanitizer)
    assert sum(part.seconds for part in listed) <= run.SECONDS < 480
    assert all(part.seconds > run.MARGIN for part in listed)
    for part in listed:
        modules = [word for word in part.command if word.startswith("kernels_bench")]
        assert all(importlib.util.find_spec(word) for word in modules)


def test_without_a_gpu_the_tests_are_collected_and_nothing_is_kept(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ended = []
    monkeypatch.setattr(run, "run", lambda part, *_: ended.append(part.name) or {"part": "", "ended": "ok"})
    assert run.main(["--out", str(tmp_path / "out")]) == 0
    assert ended == ["tests", "gpt2, small, on the CPU"]
    assert "There is no GPU here" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "ended", "fails"),
    [
        ("tests", "ok", False),
        ("tests", "exit code 1", True),
        ("tests", "cut off after 130 s", True),
        ("memcheck", "exit code 9", True),
        ("memcheck", "does not run here (exit code 1)", False),
        ("bench", "cut off after 130 s", False),
        ("gpt2", "exit code 1", True),
    ],
)
def test_what_fails_the_run(name, ended, fails):
    assert run.failed({"part": name, "ended": ended}) == fails


@pytest.mark.parametrize(
    ("status", "ended"), [(9, "exit code 9"), (3, "exit code 3"), (1, "does not run here (exit code 1)")]
)
def test_a_checker_that_cannot_attach_has_found_nothing(status, ended, tmp_path):
    part = run.Part("memcheck", python(f"raise SystemExit({status})"), 30)
    assert run.run(part, tmp_path / "log", 30)["ended"] == ended


# the sweep


class FakeGraph:
    """Replaces the capture and timing of a device; a call of a capture takes only its own time."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def replay(self):
        pass

    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, _):
        return 10.0


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
    for name in ("CUDAGraph", "graph", "Event"):
        monkeypatch.setattr(torch.cuda, name, FakeGraph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    tensors = [torch.randn(5), torch.randn(9)]
    call = sweep.prepare(tensors, torch.stack([x.double().norm() for x in tensors]), {}, "cuda")
    assert call()[0].shape[0] == 2
    assert sweep.sample(call, "cuda") == 10.0


def test_only_what_a_run_writes_is_removed_from_its_folder(monkeypatch, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "bench.json").write_text("old")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run, "warm_ups", lambda _: [])
    monkeypatch.setattr(run, "parts", lambda *_, **__: [])
    monkeypatch.setattr(run.machine, "describe", dict)
    monkeypatch.setattr(run.machine, "one_line", lambda _: "a machine")
    assert run.main(["--out", str(tmp_path)]) == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "bench.json").exists()
    assert (tmp_path / "gpu.json").exists()
