"""``gradiometer precision``: the table of a step, and what changed over the run."""

from __future__ import annotations

import json
import math

import pytest
import torch

pytest.importorskip("pyarrow")
pytest.importorskip("typer")

import gradiometer as gm
from gradiometer.cli import Exit
from support.synthetic_run import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Gradients that get smaller, and a tensor that is measured in the first steps only."""
    path = tmp_path_factory.mktemp("runs") / "a"
    model = torch.nn.ParameterDict({name: torch.ones(4) for name in ("shrinks", "stays", "[red]", "zero")})
    with gm.Monitor(model, run_dir=path, precision=10, every=3, weights=True, rules=()) as monitor:
        for step in range(41):
            model["shrinks"].grad = torch.tensor([1.0, 2.0, 4.0, 8.0]) * 2.0**-step
            model["stays"].grad = torch.tensor([1.0, 2.0, 3e5, math.nan])
            model["zero"].grad = torch.zeros(4)
            model["[red]"].grad = torch.ones(4) if step < 25 else None
            monitor.record()
            monitor.advance()
    return path


def test_the_last_step_and_what_changed(run, call):
    code, out, err = call("precision", run)
    assert (code, err) == (Exit.OK, "")
    report, over_run = out.split("\n\n")
    assert report == str(gm.read_run(run).precision())
    head, _, header, _, *rows = over_run.splitlines()
    assert head.startswith("over 5 measured steps, from 0 to 40: ")
    assert header.split() == "name median log2 |x| fp16 lost % e4m3 lost % e5m2 lost %".split()  # noqa: SIM905
    cells = {row.split()[0]: row.split() for row in rows[:4]}
    # half of the smallest subnormal number, a tie, becomes 0
    lost = [f"0 → 100 (100 at {step})" for step in (30, 20, 20)]
    assert cells["shrinks"][1:] == " ".join(["1 → -39", *lost]).split()
    assert cells["[red]"][1:] == ["0", "0", "0", "0"]
    assert cells["zero"][1:] == ["-", "0", "0", "0"]
    assert rows[-2] == "no loss in any step in bf16"
    assert rows[-1].startswith("NaN or Inf in 1 tensor, first in step 0: ")


def test_json_has_the_counts_and_the_worst_steps(run, call):
    code, out, err = call("precision", run, "--json", "--format", "e4m3", "--format", "float16")
    assert (code, err) == (Exit.OK, "")
    found = json.loads(out, parse_constant=pytest.fail)
    assert (found["step"], found["kind"], found["steps"]) == (40, "grads", [0, 10, 20, 30, 40])
    assert found["formats"] == ["float8_e4m3fn", "float16"]
    assert sorted(found["tensors"]) == ["shrinks", "stays", "zero"]
    stays = found["tensors"]["stays"]
    assert (stays["numel"], stays["n_nan"], stays["max_exponent"]) == (4, 1, 18)
    assert stays["formats"]["float16"]["n_overflowed"] == 1
    assert found["total"]["numel"] == 12
    shrinks = found["over_run"]["shrinks"]
    assert shrinks["median"] == [1, -39]
    assert shrinks["formats"]["float8_e4m3fn"] == {"first": 0.0, "last": 1.0, "worst": 1.0, "worst_step": 20}
    assert shrinks["formats"]["float16"] == {"first": 0.0, "last": 1.0, "worst": 1.0, "worst_step": 30}
    assert found["over_run"]["zero"]["median"] == [None, None]
    assert [found["over_run"][name]["first_nonfinite"] for name in ("zero", "stays")] == [None, 0]
    # of a tensor that is not in the last steps
    assert found["over_run"]["[red]"]["formats"]["float16"]["last"] == 0.0


@pytest.mark.parametrize(("step", "shown"), [("0", 0), ("20", 20), ("-1", 40), ("-5", 0)])
def test_a_step_is_chosen_by_its_number_or_from_the_end(step, shown, run, call):
    code, out, _ = call("precision", run, "--step", step, "--kind", "weights")
    assert code == Exit.OK
    assert out.startswith(f"weights of step {shown}: 4 tensors, 16 elements; tensors without loss: fp16 4")
    assert "no loss in fp16, bf16, e4m3, e5m2" in out


def test_only_some_tensors(run, call):
    _, out, _ = call("precision", run, "--top", "1", "--format", "fp16")
    report, over_run = out.split("\n\n")
    assert "… 2 more" in report
    assert "… 3 more" in over_run
    _, everything, _ = call("precision", run, "--top", "0", "--format", "fp16")
    assert "more" not in everything


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--step", "7"], Exit.UNREADABLE, "no histograms of step 7; there are 5, from 0 to 40, and the nea"),
        (["--step", "-6"], Exit.UNREADABLE, "no histograms of step -6"),
        (["--kind", "updates"], Exit.UNREADABLE, "has no histograms of updates in step 40"),
        (["--format", "fp64"], Exit.USAGE, "--format: 'fp64' is not one of the formats float16"),
        (["--attempt", "9"], Exit.UNREADABLE, "has no attempt 9"),
        (["--top", "-1"], Exit.USAGE, "--top"),
    ],
)
def test_errors_are_one_line(options, code, words, run, refused):
    assert words in refused("precision", run, *options, code=code)


def test_a_run_without_histograms_says_how_to_record_them(tmp_path, refused):
    said = "has no histograms of exponents; Monitor(model, precision=100) records them every 100 steps"
    assert said in refused("precision", write_run(tmp_path / "run", steps=3))


def test_a_single_step_has_nothing_to_compare_with(tmp_path, call, refused):
    model = torch.nn.Linear(2, 1)
    with gm.Monitor(model, run_dir=tmp_path, precision=10, rules=()) as monitor:
        model(torch.ones(1, 2)).sum().backward()
        monitor.record()
        monitor.advance()
    _, out, _ = call("precision", tmp_path)
    assert "over " not in out
    assert out.strip().endswith("a power of two that the tensor is multiplied by before the cast")
    said = "no histograms of weights in step 0; Monitor(weights=True) records those of weights, too"
    assert said in refused("precision", tmp_path, "--kind", "weights")
