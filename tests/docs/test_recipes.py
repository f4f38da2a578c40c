"""The code in docs/recipes.md runs as it stands there, and says what the page says."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import gradiometer as gm
from support.pages import ROOT, blocks

pytest.importorskip("pyarrow")
read_run = pytest.importorskip("gradiometer.runs").read_run

PAGE = "docs/recipes.md"
pytestmark = [
    pytest.mark.usefixtures("_eager_backend", "_in_a_folder"),
    pytest.mark.filterwarnings("ignore::Warning:(pytorch_)?lightning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def sections():
    """Return the blocks of each section, by its title."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    return {
        part.splitlines()[0]: re.findall(r"^```python\n(.*?)^```", part, flags=re.MULTILINE | re.DOTALL)
        for part in text.split("\n## ")[1:]
    }


def run(title, *setup):
    """Execute a section after the page's first block, and others it needs; return what it defines."""
    scope: dict[str, Any] = {}
    for code in (blocks(PAGE)[0], *setup, *sections()[title]):
        exec(code, scope)  # noqa: S102 the page's own code
    return scope


def totals(path):
    return [record.total() for record in read_run(path).records()]


def test_every_section_with_code_is_run_here():
    source = (ROOT / "tests/docs/test_recipes.py").read_text(encoding="utf-8")
    assert all(f'"{title}"' in source for title, code in sections().items() if code)


def test_a_plain_loop():
    scope = run("Your own loop")
    assert scope["steps"].num_rows == 20
    assert scope["steps"]["loss"][0].as_py() > scope["steps"]["loss"][-1].as_py()
    assert scope["worst"].names == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert scope["findings"] == []
    assert read_run("runs/plain").blackbox is None


def test_compiled_steps():
    run("A compiled step")
    for path in ("runs/compiled", "runs/compiled-model"):
        recorded = read_run(path)
        assert recorded.roster.names == ("0.weight", "0.bias", "2.weight", "2.bias")
        assert recorded.steps["step"].to_pylist() == list(range(20))
        losses = recorded.steps["loss"].to_pylist()
        assert losses[-1] < losses[0]
        assert min(totals(path)) > 0


@pytest.mark.parametrize(
    ("title", "path"), [("Gradient accumulation", "runs/accumulated"), ("Clipping", "runs/clipped")]
)
def test_what_comes_between_backward_and_step(title, path):
    scope = run(title)
    norms = totals(path)
    assert len(norms) == 10
    if title == "Clipping":
        assert max(norms) > 1.5  # before the clip
        assert norms[-1] == pytest.approx(scope["stats"].total_norm.item(), rel=1e-12)


def test_mixed_precision():
    scope = run("Mixed precision")
    records = list(read_run("runs/amp").records())
    # scales of 65536 and less, of which nothing is left in the norms
    assert all(0 < record.total() < 1e3 for record in records if not record.skipped)
    assert records[-1].scalars["scale"] == scope["scaler"].get_scale()


def test_several_models_and_optimizers():
    run("Several models and optimizers")
    recorded = read_run("runs/gan")
    assert recorded.roster.names == ("maker.weight", "maker.bias", "judge.weight", "judge.bias")
    for record in recorded.records():
        assert record.measured().all()
        assert set(record.scalars) == {"loss", "judged"}


def test_accelerate():
    pytest.importorskip("accelerate")
    run("Accelerate")
    recorded = read_run("runs/accelerate")
    assert recorded.steps["step"].to_pylist() == [0, 1, 2, 3]
    assert max(totals("runs/accelerate")) > 1.5  # before the clip


def test_the_trainer_of_transformers(capfd):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    transformers.logging.set_verbosity_error()
    scope = run("Hugging Face Trainer")
    assert read_run("runs/trainer").steps.num_rows == 4
    assert scope["callback"].monitor.failures == {}
    capfd.readouterr()


def test_lightning():
    pytest.importorskip("pytorch_lightning")
    scope = run("Lightning", "data = torch.utils.data.TensorDataset(*batch())")
    recorded = read_run("runs/lightning")
    assert recorded.steps.num_rows == 8
    assert recorded.roster.names == ("net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias")
    assert scope["callback"].monitor.failures == {}


def test_resuming():
    scope = run("Resume from a checkpoint")
    monitor = scope["monitor"]
    assert monitor.step == 10
    scope["model"](torch.randn(4, 16)).sum().backward()
    monitor.record()
    monitor.advance()
    monitor.close()
    assert read_run("runs/resumed").steps["step"].to_pylist() == list(range(11))
    assert gm.grad_norm(scope["model"]) == pytest.approx(totals("runs/resumed")[-1], rel=1e-12)
