"""The tutorial and the pages on training loops run unchanged, and give the results on the pages."""

from __future__ import annotations

import pytest
import torch

import gradiometer as gm
from support.pages import ROOT, blocks, close, execute, sections, text
from support.synthetic_run import write_run

pytest.importorskip("pyarrow")
read_run = pytest.importorskip("gradiometer.runs").read_run

LOOPS = "docs/how-to/training-loops.md"
HUGGING_FACE = "docs/how-to/hugging-face.md"
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


def run(page, title=None):
    """Execute a page's first block, and a section or all of them; return what they define."""
    return execute(*(blocks(page) if title is None else [blocks(page)[0], *sections(page)[title]]))


def totals(path):
    return [record.total() for record in read_run(path).records()]


@pytest.mark.parametrize("page", [LOOPS, HUGGING_FACE])
def test_every_section_with_code_is_run_here(page):
    source = (ROOT / "tests/docs/test_how_to.py").read_text(encoding="utf-8")
    assert all(f'"{title}"' in source for title, code in sections(page).items() if code)


def test_the_tutorial(capsys):
    page = "docs/tutorial.md"
    scope = run(page)
    printed = capsys.readouterr().out
    # the finding, the table, and the values in the comments beside the calls
    finding, table = blocks(page, "text")
    before, _, rest = printed.partition(finding)
    assert before.startswith("100 steps")
    lines, length = rest.splitlines(), len(table.splitlines())
    assert close("\n".join(lines[:length]), table)
    values = lines[length:]
    assert values == ["1.0 0.0", "['0.weight', '0.bias']", "[30]", "True"]
    assert all(f"# {value}\n" in text(page) for value in values)
    assert scope["norms"].shape == (50, 6)
    assert scope["page"].read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_report_page(tmp_path):
    write_run("runs/mine", 6, 20)
    execute(*blocks("docs/reference/report-page.md"))
    assert (tmp_path / "runs/mine/report.html").stat().st_size == (tmp_path / "page.html").stat().st_size


def test_one_call():
    scope = run(LOOPS, "One call")
    recorded = read_run("runs/watched")
    assert scope["monitor"].failures == {}
    assert recorded.steps["step"].to_pylist() == list(range(20))
    assert recorded.steps["lr"].to_pylist() == [1e-2] * 20
    assert recorded.steps["loss"][0].as_py() > recorded.steps["loss"][-1].as_py()


def test_the_order_of_a_loop(capsys):
    run(LOOPS, "The order of your loop")
    printed = capsys.readouterr().out
    assert printed.strip() in [block.strip() for block in blocks(LOOPS, "text")]


def test_a_plain_loop():
    scope = run(LOOPS, "Your own loop")
    assert scope["steps"].num_rows == 20
    assert scope["steps"]["loss"][0].as_py() > scope["steps"]["loss"][-1].as_py()
    assert scope["worst"].names == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert scope["findings"] == []
    assert read_run("runs/plain").blackbox is None


def test_updates():
    scope = run(LOOPS, "Updates")
    assert scope["monitor"].failures == {}
    assert scope["ratios"].shape == (20, 4)
    assert (scope["ratios"] > 0).all()
    recorded = read_run("runs/updates")
    assert not recorded.matrix("descent_cosine", "updates")[1].isnan().any()


def test_compiled_steps():
    run(LOOPS, "A compiled step")
    for path in ("runs/compiled", "runs/compiled-model"):
        recorded = read_run(path)
        assert recorded.catalog.names == ("0.weight", "0.bias", "2.weight", "2.bias")
        assert recorded.steps["step"].to_pylist() == list(range(20))
        losses = recorded.steps["loss"].to_pylist()
        assert losses[-1] < losses[0]
        assert min(totals(path)) > 0


def test_accumulation():
    scope = run("docs/how-to/accumulation.md")
    assert len(totals("runs/accumulated")) == 10
    # separate micro-batches: the columns of all four add up
    assert scope["merged"].sumsq.sum().item() == pytest.approx((scope["norms"] ** 2).sum().item(), rel=1e-12)


@pytest.mark.usefixtures("_one_thread")
def test_the_noise_scale():
    *alone, ddp, accumulation = blocks("docs/how-to/noise-scale.md")
    scope = execute(*alone)
    scales = [record.scalars["noise_scale"] for record in read_run("runs/noise").records()]
    assert len(scales) == 100
    # it grows
    assert 0 < scales[10] < scales[-1]
    assert set(scope["named"]) == {"noise_scale.first", "noise_scale.last", "noise_scale.all"}
    # the others are run by tests/distributed/test_ranks_noise_scale.py
    assert "register_comm_hook" in ddp
    assert "no_sync" in accumulation


@pytest.mark.usefixtures("_one_thread")
def test_the_agreement_of_gradients(capsys):
    *alone, ddp = blocks("docs/how-to/gradient-agreement.md")
    scope = execute(*alone)
    assert capsys.readouterr().out == "[0, 1, 0]\n"
    assert "# [0, 1, 0]\n" in text("docs/how-to/gradient-agreement.md")
    names = {"micro_batch_cosine", "micro_batch_cosine.first", "micro_batch_cosine.last"}
    assert set(scope["cosines"]) == names
    assert all(-1 <= x <= 1 for x in scope["cosines"].values())
    # run by tests/distributed/test_ranks_agreement.py
    assert "register_comm_hook" in ddp


def test_clipping():
    scope = run("docs/how-to/clipping.md")
    norms = totals("runs/clipped")
    assert len(norms) == 10
    assert max(norms) > 1.5  # before the clip
    assert norms[-1] == pytest.approx(scope["stats"].total_norm.item(), rel=1e-12)
    assert scope["norm"] > 1.5
    assert set(scope["clipped"].to_dict()) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_cuda_graphs(monkeypatch):
    # the mode is Inductor's; on the CPU there is nothing to capture
    compiled, modes = torch.compile, []

    def compiled_without(*args, mode=None, **options):
        modes.append(mode)
        return compiled(*args, **options)

    monkeypatch.setattr(torch, "compile", compiled_without)
    scope = run("docs/how-to/cuda-graphs.md")
    assert modes[0] == "reduce-overhead"
    assert scope["monitor"].failures == {}
    for path in ("runs/reduce-overhead", "runs/captured"):
        losses = read_run(path).steps["loss"].to_pylist()
        assert losses[-1] < losses[0]
        assert min(totals(path)) > 0


def test_mixed_precision():
    scope = run(LOOPS, "Mixed precision")
    records = list(read_run("runs/amp").records())
    # scales up to 65536, which must not appear in the norms
    assert all(0 < record.total() < 1e3 for record in records if not record.skipped)
    assert records[-1].scalars["scale"] == scope["scaler"].get_scale()


def test_several_models_and_optimizers():
    run(LOOPS, "Several models and optimizers")
    recorded = read_run("runs/gan")
    assert recorded.catalog.names == ("maker.weight", "maker.bias", "judge.weight", "judge.bias")
    for record in recorded.records():
        assert record.measured().all()
        assert set(record.scalars) == {"loss", "judged"}


def test_accelerate():
    pytest.importorskip("accelerate")
    run(HUGGING_FACE, "Accelerate")
    recorded = read_run("runs/accelerate")
    assert recorded.steps["step"].to_pylist() == [0, 1, 2, 3]
    assert max(totals("runs/accelerate")) > 1.5  # before the clip


def test_the_trainer_of_transformers(capfd):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    transformers.logging.set_verbosity_error()
    scope = run(HUGGING_FACE, "Trainer")
    assert read_run("runs/trainer").steps.num_rows == 4
    assert scope["callback"].monitor.failures == {}
    capfd.readouterr()


def test_lightning():
    pytest.importorskip("pytorch_lightning")
    scope = run("docs/how-to/lightning.md")
    recorded = read_run("runs/lightning")
    assert recorded.steps.num_rows == 8
    assert recorded.catalog.names == ("net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias")
    assert scope["callback"].monitor.failures == {}


def test_resuming():
    scope = run(LOOPS, "Resume from a checkpoint")
    monitor = scope["monitor"]
    assert monitor.step == 10
    scope["model"](torch.randn(4, 16)).sum().backward()
    monitor.record()
    monitor.advance()
    monitor.close()
    assert read_run("runs/resumed").steps["step"].to_pylist() == list(range(11))
    assert gm.grad_norm(scope["model"]) == pytest.approx(totals("runs/resumed")[-1], rel=1e-12)
