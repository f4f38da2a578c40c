"""docs/how-to/migrating.md: every block runs, and each pair agrees or differs as the page says."""

from __future__ import annotations

import copy
import math
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import gradiometer as gm
from support.pages import code_of, text

PAGE = text("docs/how-to/migrating.md")
# heading -> its blocks: before, after, and an alternative after
SECTIONS = {
    title: code_of(body)
    for title, body in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
}
# relative error of sums of a few elements in fp32
FINE = 1e-6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(nn.functional.gelu(self.encoder(x)))


def run(title, block, spoil=None, **more):
    """Run a block after a backward, always the same; ``spoil`` changes gradients first."""
    torch.manual_seed(0)
    model = Net()
    scope = {"torch": torch, "gm": gm, "model": model, "loss_fn": nn.functional.mse_loss}
    scope |= {"x": torch.randn(8, 4), "y": torch.randn(8, 2), **more}
    scope["loss"] = scope["loss_fn"](model(scope["x"]), scope["y"])
    scope["loss"].backward()
    if spoil:
        spoil(model)
    exec(SECTIONS[title][block], scope)  # noqa: S102 the page's own code
    return SimpleNamespace(**scope)


def both(title, spoil=None, **more):
    return run(title, 0, spoil, **more), run(title, 1, spoil, **copy.deepcopy(more))


def grads_times(factor):
    def spoil(model):
        for p in model.parameters():
            p.grad *= factor

    return spoil


def no_grads(model):
    model.zero_grad()


def half(model):
    for p in model.parameters():
        p.grad = None
    model.half()
    model.encoder.weight.grad = torch.full((8, 4), 300.0).half()


def put(value, name="encoder.weight"):
    def spoil(model):
        model.get_parameter(name).grad.view(-1)[1] = value

    return spoil


def near(expected):
    return pytest.approx(expected, rel=FINE)


def test_the_table_names_every_section():
    links = re.findall(r"^\| \[.*?\]\(#(.*?)\)", PAGE, flags=re.MULTILINE)
    anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in SECTIONS]
    assert [*links, "tests"] == anchors


def test_every_section_has_a_before_and_an_after():
    counts = {title: len(blocks) for title, blocks in SECTIONS.items()}
    assert counts.pop("Tests") == 0
    assert counts.pop("Clipping") == 3
    assert set(counts.values()) == {2}


ITEM = "A total norm from `.item()`"


def test_a_norm_from_item():
    before, after = both(ITEM)
    assert before.total == near(after.total)
    before, after = both(ITEM, no_grads)
    assert before.total == after.total == 0.0


def test_a_norm_from_item_overflows():
    before, after = both(ITEM, grads_times(2.0**66))
    assert before.total == math.inf
    assert after.total == 2.0**66 * gm.grad_norm(run(ITEM, 1).model)


def test_a_norm_of_three_types():
    title = "A norm of three types"
    before, after = both(title)
    assert before.norm.item() == near(after.norm)
    assert after.norm == after.maybe == after.on_device.item()
    before, after = both(title, no_grads)
    assert before.norm == after.norm == 0.0
    assert after.maybe is None
    assert after.on_device == 0.0
    assert before.compute_gradient_norm([]) is None
    before, after = both(title, half)
    assert before.norm == math.inf
    assert after.norm == pytest.approx(300 * math.sqrt(32))


STABILITY = "A stability check"


def test_a_stability_check():
    before, after = both(STABILITY)
    assert before.issues == after.large == []
    assert not after.found.has_issues


@pytest.mark.parametrize(("value", "word"), [(math.nan, "NaN"), (math.inf, "Inf")])
def test_a_stability_check_names_what_is_not_finite(value, word):
    before, after = both(STABILITY, put(value))
    assert f"{word} in gradient encoder.weight" in before.issues
    assert (after.found.nan_grads if word == "NaN" else after.found.inf_grads) == ["encoder.weight"]
    assert after.found.nan_weights == after.found.inf_weights == []
    # an Inf does not count as a large finite magnitude
    assert after.large == []


def test_a_stability_check_names_what_is_large():
    before, after = both(STABILITY, put(2e6))
    assert before.issues == ["gradient encoder.weight is too large"]
    assert after.large == ["encoder.weight"]
    assert not after.found.has_issues


def test_a_stability_check_of_a_loss():
    before, after = both(STABILITY, y=torch.full((8, 2), math.inf))
    assert "Inf in loss" in before.issues
    assert not after.found.loss_is_finite


COLLECTOR = "A gradient collector"


def assert_same_values(before, after):
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert value == near(after[key]), key


def test_a_collector():
    before, after = both(COLLECTOR)
    assert_same_values(before.found, after.found)
    before, after = both(COLLECTOR, grads_times(1e4))
    assert before.found["exploding"] > 0
    assert_same_values(before.found, after.found)
    assert after.report.exploding


def test_a_collector_and_what_is_not_finite():
    before, after = both(COLLECTOR, put(math.nan))
    assert (before.found["health"], after.found["health"]) == (1.0, 0.0)
    assert (before.found["exploding"], after.found["exploding"]) == (0, 1)
    assert before.found["nan_count"] == after.found["nan_count"] == 1
    assert math.isnan(after.found["max_norm"])
    # the NaN comes first, and no comparison with it is true
    assert math.isnan(before.found["max_norm"])
    before, after = both(COLLECTOR, put(math.nan, "head.bias"))
    assert math.isfinite(before.found["max_norm"])
    assert math.isnan(after.found["max_norm"])

    before, after = both(COLLECTOR, put(math.inf))
    assert before.found["health"] == pytest.approx(1 - 0.8 / 4)
    assert after.found["health"] == 0.0


def test_a_collector_of_nothing():
    before, after = both(COLLECTOR, no_grads)
    assert before.found == {"total_norm": 0.0, "health": 1.0}
    assert before.found.items() <= after.found.items()
    assert after.found.keys() == run(COLLECTOR, 1).found.keys()


def test_a_collector_that_is_read_later():
    before, after = both("A collector that is read later")
    assert_same_values(before.found, after.found)


PARTS = "Two parts of a model, and their ratio"


def test_two_parts_of_a_model():
    before, after = both(PARTS)
    for name in ("norms", "counts"):
        assert_same_values(getattr(before, name), getattr(after, name))
    assert before.ratio == near(after.ratio)
    model = after.model
    by_module = gm.collect_grads(model).group({"encoder": model.encoder, "head": model.head}, model=model)
    assert torch.equal(by_module.columns, after.grouped.columns)


@pytest.mark.parametrize(
    ("spoil", "before", "after"),
    [
        (no_grads, 0.0, 0.0),
        (grads_times(1e-12), 0.0, 0.0),
        (put(math.nan), 0.0, math.nan),
        (lambda model: grads_times(2.0**66)(model.encoder), 0.0, None),
    ],
    ids=["no gradients", "below the floor", "NaN", "an overflow"],
)
def test_two_parts_of_a_model_of_what_is_no_number(spoil, before, after):
    found = both(PARTS, spoil)
    if after is None:
        after = run(PARTS, 1).ratio / 2.0**66
    assert found[0].ratio == before
    assert found[1].ratio == pytest.approx(after, nan_ok=True)


CLIP = "Clipping"


def clipped(block, spoil=None):
    found = run(CLIP, block, spoil)
    return found.logged["grad_norm"], torch.cat([p.grad.flatten() for p in found.model.parameters()])


def test_clipping():
    (norm, theirs), *ours = (clipped(block, grads_times(100.0)) for block in range(3))
    assert theirs.norm().item() == pytest.approx(1.0, rel=1e-5)
    for its, grads in ours:
        assert its == near(norm)
        torch.testing.assert_close(grads, theirs)


def test_clipping_where_the_norm_overflows():
    (norm, theirs), *ours = (clipped(block, grads_times(2.0**66)) for block in range(3))
    assert norm == math.inf
    assert (theirs == 0).all()
    for its, grads in ours:
        assert math.isfinite(its)
        assert grads.norm().item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_clipping_what_is_not_finite(value):
    (norm, theirs), *ours = (clipped(block, put(value)) for block in range(3))
    assert theirs.isfinite().sum() == 0 or (theirs[theirs.isfinite()] == 0).all()
    for its, grads in ours:
        assert its == pytest.approx(norm, nan_ok=True)
        assert grads.isfinite().sum() == len(grads) - 1
        assert grads.nan_to_num(0.0, 0.0).norm() > 0


@pytest.mark.parametrize("factor", [1e-3, 100.0])
def test_a_norm_and_then_a_clip(factor):
    before, after = both("A norm and then a clip", grads_times(factor))
    assert after.norm.item() == near(before.norm.item())
    for theirs, ours in zip(before.grads, after.grads, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_tells_nothing_and_then_a_clip(value):
    before, after = both("A norm and then a clip", put(value))
    assert after.norm.item() == pytest.approx(before.norm.item(), nan_ok=True)
    theirs, ours = (torch.cat([g.flatten() for g in found.grads]) for found in (before, after))
    assert (theirs.nan_to_num() == 0).all()
    assert ours.isfinite().sum() == len(ours) - 1


@pytest.mark.parametrize("value", [0.5, math.nan, math.inf])
def test_clipping_by_value(value):
    before, after = both("Clipping by value", put(value))
    kept = run("Clipping by value", 1, put(value))
    assert list(kept.large) == ["encoder.weight", "encoder.bias", "head.weight", "head.bias"]
    at_bound = [int((p.grad.abs() == torch.tensor(0.01)).sum()) for p in after.model.parameters()]
    assert list(after.large.values()) == at_bound
    assert sum(at_bound) == after.clipped.total.item() > 0
    for theirs, ours in zip(before.model.parameters(), after.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.0, atol=0.0, equal_nan=True)


def summary_of(run):
    # a second watched model in the process has its own prefix
    summary = dict(run.summary).items()
    return {re.sub(r"^gradients/graph_\d+", "gradients/", key): value for key, value in summary}


def logged(block, spoil=None):
    """Return the values logged by a block; ``spoil`` changes gradients while they are computed."""

    def loss_fn(prediction, target):
        return nn.functional.mse_loss(prediction, target) * (1.0 if spoil is None else spoil)

    scope = run("wandb.watch", block, no_grads, loss_fn=loss_fn)
    summary = summary_of(scope.run)
    scope.run.finish()
    return scope, summary


def test_wandb_watch(wandb):
    del wandb
    before, histograms = logged(0)
    after, norms = logged(1)
    names = [f"gradients/{name}" for name, _ in before.model.named_parameters()]
    assert {*names, "loss"} <= histograms.keys() & norms.keys()
    assert histograms["loss"] == pytest.approx(norms["loss"])
    for name, p in after.model.named_parameters():
        assert norms[f"gradients/{name}"] == near(p.grad.norm().item())
        assert len(histograms[f"gradients/{name}"]["values"]) == 64
        assert sum(histograms[f"gradients/{name}"]["values"]) == p.numel()


def test_wandb_watch_hides_what_is_not_finite(wandb):
    del wandb
    _, histograms = logged(0, math.nan)
    after, norms = logged(1, math.nan)
    assert not any(key.startswith("gradients/") for key in histograms)
    assert all(key in norms for key in ("gradients/encoder.weight", "health"))
    assert len(after.found["grads"].nan) == 4


def test_wandb_watch_sees_one_backward_of_many(wandb):
    del wandb
    scope = run("wandb.watch", 0, no_grads)
    first = scope.model.head.bias.grad.clone()
    (scope.model(scope.x).sum() * 5.0).backward()
    scope.run.log({})
    bins = summary_of(scope.run)["gradients/head.bias"]["bins"]
    second = scope.model.head.bias.grad - first
    assert bins[0] == pytest.approx(second.min().item())
    assert bins[0] != pytest.approx(scope.model.head.bias.grad.min().item())


LIGHTNING = "Lightning"


def train(block):
    pl = pytest.importorskip("pytorch_lightning")
    cls = run(LIGHTNING, block).Logged

    class Trained(cls):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = Net()

        def training_step(self, batch):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = pl.Trainer(
        max_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Trained(), torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=8))
    return dict(trainer.callback_metrics)


@pytest.mark.filterwarnings(
    # Lightning's own warnings
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning",
    "ignore:The 'train_dataloader' does not have many workers",
)
def test_lightning():
    before, after = train(0), train(1)
    assert before.keys() == after.keys()
    assert "grad_2.0_norm_total" in after
    for key, value in before.items():
        assert value.item() == near(after[key].item())
        # Lightning's own type
        assert after[key].dtype == torch.float32


def test_lightning_without_gradients():
    grad_norm = pytest.importorskip("pytorch_lightning.utilities").grad_norm
    assert grad_norm(Net(), 2) == {}


COMPOSER = "Composer's OptimizerMonitor"


def test_composer():
    before, after = both(COMPOSER)
    assert_same_values(before.metrics, after.metrics)
    before, after = both(COMPOSER, half)
    assert before.metrics["l2_norm/grad/global"] == math.inf
    assert math.isfinite(before.metrics["l2_norm/grad/encoder.weight"])
    assert after.metrics["l2_norm/grad/global"] == pytest.approx(300 * math.sqrt(32))


SMOOTHING = "Smoothing and drift"


def test_smoothing_of_a_constant():
    before, after = both(SMOOTHING, values=[torch.tensor(3.0)] * 5)
    assert before.mean == near(after.mean.item())
    assert before.drift == after.drift.item() == 0.0


def test_smoothing_begins_otherwise_and_ends_alike():
    values = [torch.tensor(10.0), *[torch.tensor(1.0)] * 10]
    before, after = both(SMOOTHING, values=values)
    assert before.mean == pytest.approx(1 + 9 * 0.9**10)
    assert after.mean.item() == pytest.approx(1 + 9 * 0.1 * 0.9**10 / (1 - 0.9**11))
    before, after = both(SMOOTHING, values=list(torch.rand(101) + 1))
    assert before.mean == pytest.approx(after.mean.item(), rel=1e-4)
    assert before.drift == pytest.approx(after.drift.item(), rel=1e-2)


def test_smoothing_from_zero_is_the_loop_from_zero():
    values = torch.rand(20, dtype=torch.float64) + 1
    ema, mean = gm.EMA(decay=0.9, bias_correction=False), 0.0
    for value in values:
        found = ema(value)
        drift = abs(value.item() - mean) / (abs(mean) + 1e-12)
        mean = 0.9 * mean + 0.1 * value.item()
        assert found.value.item() == pytest.approx(mean, rel=1e-13)
        assert found.drift.item() == pytest.approx(drift, rel=1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_smoothing_of_what_is_not_finite(value):
    values = [torch.tensor(v) for v in (2.0, 2.0, value)]
    before, after = both(SMOOTHING, values=values)
    assert not math.isfinite(before.mean)
    assert after.mean == 2.0
    assert not after.drift.isfinite()
    assert both(SMOOTHING, values=[*values, torch.tensor(2.0)])[1].drift == 0.0
