"""The third family of the zoo: models that are healthy or have a fault, and are checked before they train."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

import gradiometer as gm
from gradiometer.checks.contracts import CONTRACTS

pytest.importorskip("transformers")
from kernels_bench.zoo import __main__ as zoo
from kernels_bench.zoo.contracts import command, faults_open, faults_open_start, runs, subjects
from kernels_bench.zoo.contracts import fault as faults

pytestmark = pytest.mark.usefixtures("_one_thread")
# by numbers, so that the output of a test does not show what is held out
NUMBERED = {f"{half}-{i}": each for half, table in (("open", runs.OPEN), ("held-out", runs.held_out()))
            for i, each in enumerate(table.items())}  # fmt: skip
KNOWN = {name: group for group, names in faults.CONTRACTS.items() for name in names.split()}


def test_every_name_is_in_one_table():
    tables = (faults_open.FAULTS, faults_open_start.FAULTS, runs.held_out(), runs.HEALTHY)
    assert sum(map(len, tables)) == len({name for table in tables for name in table})


def test_the_contracts_are_those_of_check_model():
    assert {each.name: each.group for each in CONTRACTS.values()}.items() <= KNOWN.items()


@pytest.mark.parametrize("numbered", NUMBERED)
def test_every_fault_is_planted_and_names_known_contracts(numbered):
    name, fault = NUMBERED[numbered]
    assert fault.group in {KNOWN[contract] for contract in fault.contracts}
    assert fault.where
    for place in fault.where:
        assert isinstance(runs.start(name, place, 0).model, torch.nn.Module)


def outputs(subject):
    """Return the logits in evaluation mode."""
    with torch.no_grad():
        return subject.model.eval()(**subject.batch).logits


def gradients(subject):
    """Return the gradients of all parameters, flat; zeros where there are none."""
    torch.manual_seed(3)
    subject.model(**subject.batch).loss.backward()
    parameters = subject.model.parameters()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])


def held(subject):
    """Return which parameters the optimizer holds, and their decay."""
    groups = subject.optimizer.param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    parameters = subject.model.parameters()
    return torch.tensor([decay.get(id(p), -1.0) for p in parameters])


def modes(subject):
    """Return the modes of all modules."""
    return torch.tensor([module.training for module in subject.model.modules()])


@pytest.mark.parametrize(
    ("name", "measure"),
    [
        ("causal-mask-missing", outputs),
        ("causal-mask-in-an-encoder", outputs),
        ("scale-left-out", outputs),
        ("softmax-over-the-queries", outputs),
        ("dropout-of-the-residual-stream", gradients),
        ("stream-detached-between-blocks", gradients),
        ("source-is-ignored", gradients),
        ("layer-replaced-after-the-optimizer", held),
        ("norms-and-biases-decay", held),
        ("heads-start-equal", outputs),
        ("another-activation", outputs),
        ("base-of-rotary-positions-is-another", outputs),
        ("part-left-in-evaluation-mode", modes),
    ],
)
def test_a_fault_has_an_effect(name, measure):
    for place in runs.OPEN[name].where:
        healthy, again = (measure(subjects.start(place)) for _ in range(2))
        assert torch.equal(healthy, again)
        assert not torch.equal(measure(runs.start(name, place, 0)), healthy)


def test_attention_by_hand_is_the_usual_one():
    for place in ("gpt2", "llama", "bert", "vit", "whisper"):
        usual, subject = subjects.start(place), subjects.start(place)
        for attention in faults_open.attentions(subject):
            faults_open.parts.attend(
                attention, lambda scores, allowed: scores.masked_fill(~allowed, -1e9).softmax(-1)
            )
        torch.testing.assert_close(outputs(subject), outputs(usual))


@pytest.mark.parametrize("name", ["mistral", "clip", "llama-lora", "loop-t5", "training-gan", "training-vae"])
def test_a_healthy_model_has_a_loss_with_gradients(name):
    subject = runs.start(name, name, 0)
    assert subject.model.training
    loss = subject.options.get("loss", lambda model, batch: model(**batch).loss)
    loss(subject.model, subject.batch).backward()
    assert any(p.grad is not None for p in subject.model.parameters())
    forward = subject.options.get("forward")
    assert forward is None or forward(subject.model, subject.batch) is not None


# counting, with a check that says what it is told


def result(contract, *, is_warning=True, status="broken"):
    severity = gm.Severity.WARNING if is_warning else gm.Severity.INFO
    return SimpleNamespace(contract=contract, status=status, severity=severity, text="why")


def checked(name, *results, place="gpt2"):
    report = SimpleNamespace(results=results)
    return runs.run(name, place, 0, lambda *_, **__: report)


def test_a_fault_is_told_by_one_of_its_contracts():
    name = "causal-mask-missing"
    assert checked(name, result("causal"), result("padding"))["verdict"] == "told"
    assert checked(name, result("padding"), result("causal", status="holds"))["verdict"] == "another"
    assert checked(name, result("causal", is_warning=False))["verdict"] == "not told"
    assert checked(name, result("causal", status="does not apply"))["verdict"] == "not told"
    assert checked("norms-and-biases-decay", result("weight_decay", is_warning=False))["verdict"] == "told"


def test_only_warnings_are_false():
    row = checked("gpt2", result("order"), result("modes", is_warning=False), result("cache", status="holds"))
    assert (row["broken"], row["noted"], row["verdict"]) == ({"order": "why"}, {"modes": "why"}, None)


def test_an_error_and_a_change_of_the_model_are_failures():
    def fail(*_, **__):
        raise ZeroDivisionError("no")

    def change(model, *_, **__):
        model.eval()
        torch.rand(1)
        model.lm_head.weight.data[0] += 1
        return SimpleNamespace(results=())

    assert runs.run("gpt2", "gpt2", 0, fail)["error"] == "ZeroDivisionError: no"
    error = runs.run("gpt2", "gpt2", 0, change)["error"]
    assert error == "changed weights or buffers, modes, the random state"
    assert checked("gpt2")["error"] is None


def row(name="a", *, planted=True, verdict="told", broken=(), error=None, held_out=True, kind="gpt2"):
    return {"name": name, "kind": kind, "seed": 0, "planted": planted, "group": "gradients",
            "contracts": ["b"], "held_out": held_out and planted, "seconds": 0.5,
            "verdict": verdict if planted else None,
            "broken": dict.fromkeys(broken, "why"), "noted": {}, "error": error}  # fmt: skip


def test_bounds_are_of_the_held_out_half_of_healthy_models_and_of_failures():
    good = [row(), row(verdict="another", held_out=False), row("m", planted=False)]
    assert command.missed(command.totals(good)) == []
    bad = [row(), row(verdict="not told"), row("m", planted=False, broken=["order", "causal"], error="x")]
    total = command.totals(bad)
    assert (total["held_out"]["share"], total["false"], total["errors"]) == (0.5, 2, 1)
    assert len(command.missed(total)) == 3


def test_the_tables_count_runs():
    rows = [row(broken=["b"]), row(verdict="another", broken=["c"]), row(verdict="not told", kind="t5"),
            row("m", planted=False, broken=["order"], error="failure")]  # fmt: skip
    text = command.document(rows, "note")
    assert "| gradients | 3 | 1 | 1 | 1 |" in text
    assert "| all | 3 | 1 | 1 | 1 |" in text
    assert "| gradients | a | gpt2 1 of 2, t5 0 of 1 | b | b 1, c 1 |" in text
    assert "| m | 1 | 1 | order 1, failed 1 |" in text
    assert "m, gpt2, seed 0: failure" in text
    assert "## Open" not in text


def test_the_command_writes_tables_and_ends_with_an_error_if_a_bound_is_missed(tmp_path, monkeypatch, capsys):
    def run_all(names, seeds, jobs):
        assert (names, seeds, jobs) == (["gpt2", "gpt2-pretrained", "gpt2-recomputed"], 1, 2)
        return [row(name, planted=False, broken=["order"]) for name in names]

    monkeypatch.setattr(command, "run_all", run_all)
    flags = ["--family", "contracts", "--kinds", "^gpt2(-[pr].*)?$", "--seeds", "1", "--out", str(tmp_path)]
    assert zoo.main(flags) == 0
    assert zoo.main([*flags, "--check"]) == 1
    assert "MISSED  contracts broken in healthy models: 3, at most 0" in capsys.readouterr().out
    assert json.loads((tmp_path / "contracts.json").read_text())["totals"]["false"] == 3
    assert "| gpt2 | 1 | 1 | order 1 |" in (tmp_path / "contracts.md").read_text()


def test_names_are_listed_and_a_pattern_without_any_is_an_error(capsys):
    flags = ["--family", "contracts", "--list", "--kinds"]
    assert zoo.main([*flags, "^(llama|causal-mask-m.*)$"]) == 0
    assert capsys.readouterr().out.split() == ["llama", "causal-mask-missing"]
    assert zoo.main([*flags, "nothing like it"]) == 1
