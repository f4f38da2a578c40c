"""The benchmark: its cases, the results of its providers, and its output, on tiny inputs."""

from __future__ import annotations

import json
import math
import subprocess

import pytest
import torch

from kernels_bench import bench, cases, git_base, measure, providers, scripts, tables
from kernels_bench.cases import BF16, FP32, Case

CPU = torch.device("cpu")
TINY = Case("tiny", "a few small tensors, one empty", FP32, (((40, 30), 3), ((0, 5), 1), ((7,), 2)))
# without an empty tensor, which has no largest magnitude, and with every dtype that peers take
WHOLE = Case("whole", "", FP32, (((40, 30), 3), ((5000,), 1), ((7,), 2)))
HALF = Case("half", "", BF16, WHOLE.blocks)
# providers that need no compiler
QUICK = "ours-eager,ours-op,foreach64,loop,flatten,ours-graph"


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    for case in (TINY, WHOLE, HALF):
        monkeypatch.setitem(cases.CASES, case.name, case)
    monkeypatch.setattr(cases, "MOST_COPIES", 3)


def run(tmp_path, *arguments):
    status = bench.main(["--device", "cpu", "--out", str(tmp_path), "--seconds", "0.02", *arguments])
    return status, json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))


def by_provider(result):
    return {row["provider"]: row for row in result["rows"]}


# cases


@pytest.mark.parametrize(
    ("name", "tensors", "elements"),
    [
        ("gpt2", 148, 124_439_808),
        ("llama-1b", 146, 1_235_814_400),
        ("2000x1k", 2000, 2000 * 256),
        ("2000x1m", 2000, 2000 * 2**20),
        ("one-1.5e9", 1, 1_500_000_000),
    ],
)
def test_cases_have_the_promised_tensors(name, tensors, elements):
    case = cases.CASES[name]
    assert len(cases.shapes(case)) == tensors
    assert cases.elements(case) == elements


def test_the_other_cases_are_what_they_say():
    assert cases.elements(cases.CASES["beyond-2^31"]) > 2**31
    assert cases.nbytes(cases.CASES["2000x1k"]) == 2000 * 1024
    rows = [shape[0] for shape in cases.shapes(cases.CASES["moe"])]
    assert 0 in rows
    assert max(rows) > 100 * min(n for n in rows if n)
    data = cases.make(cases.CASES["misaligned"], CPU, scale=2**14)
    beginnings = {x.data_ptr() % 16 for x in data.sets[0]}
    assert beginnings == set(range(2, 16, 2))


@pytest.mark.parametrize("name", cases.CASES)
def test_on_a_cpu_every_case_fits_and_keeps_its_tensors(name):
    case = cases.CASES[name]
    scale = bench.scale_of(case)
    assert scale == 1 or not case.only
    assert cases.nbytes(case, scale) <= (400 * 2**20 if case.only else cases.CPU_LIMIT)
    whole, scaled = cases.shapes(case), cases.shapes(case, scale)
    assert [math.prod(shape) > 0 for shape in whole] == [math.prod(shape) > 0 for shape in scaled]


def test_copies_are_equal_apart_and_without_zeros():
    data = cases.make(TINY, CPU, copies=3)
    assert [x.shape for x in data.sets[0]] == [torch.Size(shape) for shape in cases.shapes(TINY)]
    for first, third in zip(data.sets[0], data.sets[2], strict=True):
        assert torch.equal(first, third)
        assert first.numel() == 0 or first.data_ptr() != third.data_ptr()
        assert first.count_nonzero() == first.numel()
    assert [x.numel() for x in data.flats] == [cases.elements(TINY)] * 3


# providers


@pytest.mark.parametrize("case", [WHOLE, HALF], ids=lambda case: case.name)
def test_every_provider_tells_the_truth(case):
    here = measure.Bench()
    here.make(case.name, "cpu", 1, 2)
    before = [x.clone() for x in here.data.sets[0]]
    compared = []
    for name, provider in providers.PROVIDERS.items():
        if provider.level == "compiled":  # tested in tests/test_compile.py
            continue
        built = here.build(name)
        if "ms" in built:
            assert built["error"] is None, (name, built)
            compared.append(name)
        else:
            assert built["error"] in {"on a GPU only", "not installed"}
    assert {"ours-eager", "ours-op", "foreach", "foreach64", "foreach-inf", "loop", "flatten"} <= set(
        compared
    )
    assert {"total-norm", "total-norm-loop", "clip-grad-norm", "amp-unscale"} <= set(compared)
    # providers that write their inputs leave the values unchanged
    assert all(torch.equal(a, b) for a, b in zip(before, here.data.sets[0], strict=True))


def test_the_truth_is_that_of_plain_pytorch():
    tensors = [torch.tensor([3.0, -4.0]), torch.empty(0), torch.full((2,), 1e20)]
    found = measure.truth(tensors)
    assert found["norms"] == pytest.approx([5.0, 0.0, 2**0.5 * 1e20], rel=1e-7)
    assert found["max"] == [4.0, 0.0, pytest.approx(1e20)]
    assert found["total"] == [pytest.approx(2**0.5 * 1e20, rel=1e-7)]


def test_all_columns_counts_what_is_there():
    x = torch.tensor([3.0, -4.0, 0.0, -0.0, math.nan, math.inf, -math.inf, -math.inf])
    columns = providers.all_columns([x, torch.empty(0)])
    assert columns.tolist() == [[5.0, -1.0, 2.0, 1.0, 1.0, 2.0, 4.0], [0.0] * 7]


# the runner


def test_a_run_writes_json_markdown_and_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    status, result = run(tmp_path, "--cases", "tiny", "--providers", QUICK, "--no-memory")
    assert status == 0
    rows = by_provider(result)
    assert list(rows) == ["ceiling", *QUICK.split(",")]
    for row in rows.values():
        assert (row["case"], row["tensors"], row["elements"], row["bytes"]) == ("tiny", 6, 3614, 4 * 3614)
        if row["provider"] == "ours-graph":
            assert (row["ms"], row["error"]) == (None, "on a GPU only")
        else:
            assert row["error"] is None
            assert 0 < row["ms_low"] <= row["ms"] <= row["ms_high"]
            assert row["gb_s"] == pytest.approx(row["bytes"] / row["ms"] / 1e6)
            assert row["ceiling_share"] == pytest.approx(rows["ceiling"]["ms"] / row["ms"])
    assert result["machine"]["torch"] == torch.__version__
    page = (tmp_path / "bench.md").read_text(encoding="utf-8")
    line = next(line for line in page.splitlines() if line.startswith("| foreach64"))
    assert tables.digits(rows["ours-eager"]["ms"] / rows["foreach64"]["ms"]) in line
    assert "ours-graph (on a GPU only)" in page
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "foreach64" in capsys.readouterr().out


def test_a_peer_that_fails_has_its_reason_and_the_others_their_times(tmp_path, monkeypatch):
    def fails_late(tensors):
        fails_late.calls += 1
        if fails_late.calls > 3:
            raise RuntimeError("no more\nof this")
        return providers._foreach64(tensors)

    fails_late.calls = 0
    for name, function in (("fails", lambda tensors: tensors / 0), ("fails-late", fails_late)):
        peer = providers._peer(name, what="norms", build=providers.each(function))
        monkeypatch.setitem(providers.PROVIDERS, name, peer)
    names = "fails,fails-late,foreach-inf,foreach64"
    status, result = run(tmp_path, "--cases", "tiny", "--providers", names, "--no-memory")
    rows = by_provider(result)
    assert status == 0
    assert rows["fails"]["error"] == "TypeError: unsupported operand type(s) for /: 'list' and 'int'"
    assert rows["fails-late"]["error"] == "RuntimeError: no more"
    assert "empty" in rows["foreach-inf"]["error"]  # TINY holds an empty tensor
    assert [rows[name]["ms"] for name in ("fails", "fails-late", "foreach-inf")] == [None] * 3
    assert rows["foreach64"]["ms"] > 0


@pytest.mark.parametrize("factor", [1.03, math.nan])
def test_a_wrong_result_is_shown_with_its_time(tmp_path, monkeypatch, factor):
    def wrong(tensors):
        return [norm * factor for norm in torch._foreach_norm(tensors, 2)]

    peer = providers._peer("wrong", what="norms", build=providers.each(wrong))
    monkeypatch.setitem(providers.PROVIDERS, "wrong", peer)
    _, result = run(tmp_path, "--cases", "whole", "--providers", "wrong", "--no-memory")
    row = by_provider(result)["wrong"]
    assert row["ms"] > 0
    assert row["error"] == ("wrong: nan" if math.isnan(factor) else "wrong: 3e-02")
    assert row["relative_error"] == (None if math.isnan(factor) else pytest.approx(0.03, rel=1e-3))
    assert row["error"] in (tmp_path / "bench.md").read_text(encoding="utf-8")


def test_another_commit_takes_its_turn(tmp_path, monkeypatch):
    command = ["git", "-C", str(scripts.ROOT), "rev-parse", "HEAD"]
    cloned = subprocess.run(command, capture_output=True, check=False)
    if cloned.returncode:
        pytest.skip("not in a clone")
    # a package in the working directory must not be used instead
    monkeypatch.chdir(scripts.ROOT / "src")
    arguments = (
        "--cases",
        "1000x1000-bf16",
        "--providers",
        "ours-eager,ours-op",
        "--base",
        "HEAD",
        "--no-memory",
    )
    status, result = run(tmp_path, *arguments)
    rows = by_provider(result)
    assert status == 0
    assert cloned.stdout.decode().startswith(result["base"])
    assert rows["base-eager"]["error"] is None
    assert rows["base-eager"]["relative_error"] <= 1e-12
    assert tables.ratio(rows["base-op"], result["rows"]) == rows["ours-op"]["ms"] / rows["base-op"]["ms"]


def test_a_commit_whose_package_lacks_what_the_benchmark_needs_is_refused(tmp_path, capfd):
    (tmp_path / "gradiometer").mkdir()
    (tmp_path / "gradiometer" / "__init__.py").touch()
    with pytest.raises(git_base.BaseError, match=r"it needs gm\.collect, gm\.COLUMNS"):
        git_base.Remote(tmp_path)
    assert "ImportError" in capfd.readouterr().err


def test_sources_of_another_commit_are_taken_away_again(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)  # noqa: S607

    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "which.py").write_text("then", encoding="utf-8")
    git("init", "-q")
    git("add", "src")
    git("commit", "-q", "-m", "then")
    (tmp_path / "src" / "which.py").write_text("now", encoding="utf-8")
    with git_base.sources("HEAD", tmp_path) as (source, _):
        assert (source / "which.py").read_text(encoding="utf-8") == "then"
    assert not source.exists()
    assert (tmp_path / "src" / "which.py").read_text(encoding="utf-8") == "now"
    git("rm", "-rqf", "src")
    git("commit", "-q", "--allow-empty", "-m", "none")
    with pytest.raises(git_base.BaseError, match="has no folder src"), git_base.sources("HEAD", tmp_path):
        pass


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cases", "gpt3"], "no case 'gpt3'; there are: gpt2, "),
        (["--providers", "ours,numpy"], "no provider 'numpy'; there are: ours, peers, ceiling, "),
        (["--seconds", "0"], "--seconds must be a positive number, got 0.0"),
        (["--base", "no-such-commit", "--cases", "1000x1000-fp32"], "--base: no commit 'no-such-commit'"),
    ],
)
def test_what_cannot_be_asked_for_is_one_clear_line(arguments, said, tmp_path, capsys):
    try:
        status = bench.main(["--device", "cpu", "--out", str(tmp_path), *arguments])
    except SystemExit as stopped:
        status = stopped.code
    error = capsys.readouterr().err
    assert status == 2
    assert said in error
    assert error.startswith("bench: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(("most", "status"), [(1e9, 0), (1e-9, 1)])
def test_the_check_fails_where_a_bound_is_missed(tmp_path, monkeypatch, capsys, most, status):
    monkeypatch.setattr(bench, "BOUNDS", (("whole", "foreach64", most),))
    monkeypatch.setattr(bench, "MEMORY_CASES", ())
    assert run(tmp_path, "--check")[0] == status
    assert ("MISSED" in capsys.readouterr().out) == bool(status)


def test_a_check_without_its_figure_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "BOUNDS", (("whole", "foreach64", 1e9),))
    monkeypatch.setattr(bench, "MEMORY_CASES", ())
    assert run(tmp_path, "--check", "--providers", "ours-eager")[0] == 1


def test_ratios_compare_the_same_level():
    def row(family, level, ms, case="a"):
        return {"family": family, "level": level, "ms": ms, "case": case}

    rows = [row("ours", "eager", 2.0), row("ours", "graph", 1.0), row("ours", "eager", 9.0, "b")]
    assert tables.ratio(row("peer", "graph", 4.0), rows) == 0.25
    assert tables.ratio(row("peer", "eager", 4.0), rows) == 0.5
    assert tables.ratio(row("peer", "compiled", 4.0), rows) == 0.5  # ours has none: the eager call
    assert tables.ratio(row("peer", "eager", None), rows) is None
    assert tables.ratio(rows[0], rows) is None


def test_all_cases_stand_in_one_table(tmp_path, capsys):
    _, result = run(
        tmp_path, "--cases", "whole,half", "--providers", "ours-eager,foreach64,loop", "--no-memory"
    )
    head, table = tables.overview(result["rows"])
    assert head == ["case", "ours, ms", "ceiling", "foreach64", "loop"]
    assert [line[0] for line in table] == ["whole", "half"]
    ms = {(row["case"], row["provider"]): row["ms"] for row in result["rows"]}
    for line in table:
        for name, text in zip(head[3:], line[3:], strict=True):
            # on a busy machine, "~" marks the ratio
            assert float(text.lstrip("~")) == pytest.approx(
                ms[line[0], "ours-eager"] / ms[line[0], name], rel=0.06
            )
    assert "Our time" in capsys.readouterr().out
    assert (tmp_path / "bench.md").read_text(encoding="utf-8").count("| case | ours, ms |") == 1
    # nothing to overlook
    run(tmp_path, "--cases", "whole", "--providers", "ours-eager,loop", "--no-memory")
    assert "Our time" not in capsys.readouterr().out


def test_a_run_that_was_disturbed_says_so():
    steady = {"ms": 3.0, "ms_low": 2.6, "ms_high": 3.5}
    assert not tables.is_unsteady(steady)
    assert tables.is_unsteady({**steady, "ms_high": 3.7})
    assert not tables.is_unsteady({"ms": None})


def test_a_check_of_cases_without_bounds_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, "--check", "--cases", "gpt2")
    assert ended.value.code == 2
    assert "none of these cases has a bound" in capsys.readouterr().err


def test_an_old_picture_does_not_pass_for_this_runs(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "bench.png").write_bytes(b"old")
    run(tmp_path, "--cases", "whole", "--providers", "apex", "--no-memory")
    assert not (tmp_path / "bench.png").exists()
    assert "bench.png" not in capsys.readouterr().out
