"""A reference in a file: what is saved, what is compared with it, and files that are none."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import gradiometer as gm
from gradiometer.checks.reference_file import read_reference, write_reference
from gradiometer.checks.saved_reference import judge_saved, reference_of
from gradiometer.checks.step_run import StepRun

K = 64


def model_of(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.LayerNorm(40), nn.Linear(40, 1)).to(dtype)


def batch(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in ((16, 12), (16, 1))]


def run(model, x, y):
    model.zero_grad()
    loss = mse_loss(model(x), y)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in reversed(list(model.named_parameters()))}
    return StepRun({"loss": loss.detach()}, grads)


def saved_of(seed=0, dtype=torch.float32, **options):
    reference = run(model_of(seed, dtype), *batch(seed, dtype))
    exact = run(model_of(seed, dtype).double(), *[x.double() for x in batch(seed, dtype)])
    weights = dict(model_of(seed, dtype).named_parameters())
    return reference, reference_of(reference, exact, weights, projections=K, **options)


def projected(tensors, **options):
    return gm.collect_projections(dict(tensors), projections=K, **options)


def changed(run, name, change):
    return projected({**run.grads, name: change(run.grads[name])})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_rounds_differently_agrees(seed, dtype, tmp_path):
    reference, saved = saved_of(seed, dtype)
    write_reference(tmp_path / "reference.json", saved)
    saved = read_reference(tmp_path / "reference.json")
    order = torch.randperm(16, generator=torch.Generator().manual_seed(seed))
    other = run(model_of(seed, dtype), *[x[order] for x in batch(seed, dtype)])
    weights = projected(model_of(seed, dtype).named_parameters())
    report = judge_saved(projected(other.grads), saved, outputs=other.outputs, weights=weights)

    assert report, str(report)
    assert [each.name for each in report] == ["loss", *reference.grads]
    assert report.precision == "float64"
    assert "distances are estimated from 64 projections, to 9 %" in str(report)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["0.weight", "0.bias", "2.weight", "3.weight", "3.bias"])
def test_a_wrong_gradient_is_named(seed, name):
    reference, saved = saved_of(seed)
    for change, text in (
        (lambda g: g * 1.05, "1.05 times"),
        (lambda g: -g, "the negative of"),
        (lambda g: g * 0, "all elements are 0"),
        (lambda g: g / 2, "1/2 times"),
    ):
        report = judge_saved(changed(reference, name, change), saved, modules={name: "Part"})
        assert [each.name for each in report.failures] == [name]
        assert report.first.module == "Part"
        if reference.grads[name].numel() > 2 or "1.05" not in text:
            assert text in report.first.text

    if reference.grads[name].numel() > 30:
        part = changed(reference, name, lambda g: torch.cat([g[:1] * 0, g[1:]]) if g.dim() == 1 else 0.9 * g)
        assert judge_saved(part, saved).first.name == name


def test_the_distance_is_near_the_true_one():
    reference, saved = saved_of()
    noise = 0.1 * torch.randn(40, 12, generator=torch.Generator().manual_seed(1))
    report = judge_saved(changed(reference, "0.weight", lambda g: g + noise), saved)
    row = report["0.weight"]

    # 5 deviations
    assert row.error == pytest.approx(float(noise.norm()), rel=5 / math.sqrt(2 * K))
    wrong = reference.grads["0.weight"] + noise
    cosine = torch.cosine_similarity(wrong.flatten(), reference.grads["0.weight"].flatten(), 0)
    assert row.cosine == pytest.approx(float(cosine), abs=5 * math.sqrt(2 / K))
    assert row.norm_ratio == pytest.approx(float(wrong.norm() / reference.grads["0.weight"].norm()), rel=1e-5)


def test_a_factor_of_all_gradients_is_said():
    reference, saved = saved_of()
    report = judge_saved(projected({name: 2 * g for name, g in reference.grads.items()}), saved)

    assert len(report.failures) == 6
    assert report.kind.startswith(
        "all gradients are 2 times the reference: a sum over 2 micro-batches or ranks"
    )


def test_other_weights_are_said_and_nothing_is_compared():
    reference, saved = saved_of()
    weights = projected(model_of(1).named_parameters())
    report = judge_saved(projected(reference.grads), saved, outputs=reference.outputs, weights=weights)

    assert not report
    assert not report.is_comparable
    assert "the weights differ from those of the reference, 0.weight first: load the same" in str(report)
    names = dict(model_of().named_parameters())
    del names["2.bias"]
    report = judge_saved(projected(reference.grads), saved, weights=projected(names))
    assert "the model has no parameter 2.bias, but the reference has" in str(report)


def test_an_output_that_differs_is_first():
    reference, saved = saved_of()
    outputs = {"loss": reference.outputs["loss"] * 2, "more": torch.ones(3)}
    report = judge_saved(projected(reference.grads), saved, outputs=outputs)
    assert report.first.name == "loss"


def test_gradients_that_are_missing_other_or_not_finite():
    reference, saved = saved_of()
    grads = dict(reference.grads)
    del grads["3.bias"]
    grads["extra"] = torch.ones(4)
    grads["0.bias"] = torch.full((40,), math.nan)
    grads["2.bias"] = torch.ones(39)
    report = judge_saved(projected(grads), saved)
    texts = {each.name: each.text for each in report.failures}

    assert texts["3.bias"].startswith("the run has none, the other one has a norm of")
    assert texts["extra"] == "the reference has none, the other one has a norm of 2"
    assert texts["0.bias"] == "40 elements are NaN or infinite; the reference is finite"
    assert texts["2.bias"] == "has 39 elements, in the reference 40"
    assert len(texts) == 4


def test_without_float64_the_tolerance_is_of_the_dtype():
    reference = run(model_of(), *batch())
    saved = reference_of(reference, None, {}, projections=K, notes=["one"])
    report = judge_saved(changed(reference, "0.weight", lambda g: g * 1.01), saved)

    assert report
    assert report.precision == ""
    assert report.notes[0] == "one"
    assert "the reference has no float64 run" in str(report)
    assert not judge_saved(changed(reference, "0.weight", lambda g: g * 1.3), saved)


def test_other_numbers_of_projections_are_refused():
    reference, saved = saved_of()
    with pytest.raises(
        ValueError, match="the reference has 64 projections of each gradient; collect as many"
    ):
        judge_saved(gm.collect_projections(dict(reference.grads), projections=16), saved)


def test_save_reference_keeps_a_step_and_changes_nothing(tmp_path):
    model, (x, y) = model_of(), batch()

    def step(x, y=None):
        loss = mse_loss(model(x), y)
        loss.backward()
        return {"loss": loss}

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    random = torch.get_rng_state()
    path = tmp_path / "reference.json"
    gm.save_reference(path, step, x, y=y, model=model)
    saved = read_reference(str(path))

    assert all(p.grad is None and torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert torch.equal(random, torch.get_rng_state())
    assert [p.name for p in tmp_path.iterdir()] == ["reference.json"]
    assert set(saved.grads) == set(before) == set(saved.weights)
    expected = run(model, x, y)
    assert saved.outputs["output.loss"][0] == pytest.approx(float(expected.outputs["loss"]))
    assert judge_saved(projected(expected.grads), saved, weights=projected(model.named_parameters()))
    with pytest.raises(ValueError, match="leaves no gradient"):
        gm.save_reference(path, lambda: None, model=model)


def test_what_is_not_finite_is_kept(tmp_path):
    grads = {"w": torch.tensor([1.0, math.nan]), "v": torch.ones(2)}
    saved = reference_of(StepRun({"loss": torch.tensor(math.inf)}, grads), None, {}, projections=8)
    path = tmp_path / "reference.json"
    write_reference(path, saved)

    assert read_reference(path) == saved
    given = gm.collect_projections(grads, projections=8)
    report = judge_saved(given, saved, outputs={"loss": torch.tensor(math.inf)})
    assert report
    assert report["w"].text == "not finite in both"
    assert not report["loss"].is_compared


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path):
    _, saved = saved_of()
    path = tmp_path / "reference.json"
    write_reference(path, saved)
    text = path.read_text()
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_reference(tmp_path / "folder", saved)
    with pytest.raises(FileNotFoundError):
        write_reference(tmp_path / "none" / "reference.json", saved)
    write_reference(path, saved)

    assert path.read_text() == text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "reference.json"]


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no saved reference"):
        read_reference(tmp_path / "none.json")


def damaged(change):
    def apply(values):
        change(values)
        return json.dumps(values)

    return apply


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda _: "", "is not a saved reference, or damaged"),
        (lambda values: json.dumps(values)[:500], "is not a saved reference, or damaged"),
        (lambda _: "[" * 100_000, "is not a saved reference, or damaged"),
        (lambda _: b"\x80\x04\x95\xff", "is not a saved reference, or damaged"),
        (lambda _: '{"format": NaN}', "NaN is not JSON"),
        (lambda _: "[1]", "is not a saved reference; write one"),
        (lambda _: '{"format": "other"}', "is not a saved reference; write one"),
        (damaged(lambda v: v.update(version=2)), "of version 2, this gradiometer reads 1"),
        (damaged(lambda v: v.pop("grads")), "is damaged: KeyError: 'grads'"),
        (damaged(lambda v: v.update(grads=[])), "is damaged: AttributeError"),
        (damaged(lambda v: v.update(projections=10**9)), "is damaged: ValueError: projections"),
        (damaged(lambda v: v.update(projections=True)), "is damaged: TypeError: True in place of int"),
        (damaged(lambda v: v["grads"]["0.bias"].update(dtype="load")), "dtype 'load'"),
        (damaged(lambda v: v["grads"]["0.bias"].update(dtype=[])), "is damaged: TypeError"),
        (damaged(lambda v: v["grads"]["0.bias"].update(norm=-1)), "is not the norm of a tensor"),
        (damaged(lambda v: v["grads"]["0.bias"].update(norm="nan")), "is not the norm of a tensor"),
        (damaged(lambda v: v["grads"]["0.bias"]["projections"].pop()), "63 projections of 64"),
        (damaged(lambda v: v["grads"]["0.bias"]["projections"].__setitem__(0, 10**400)), "OverflowError"),
        (damaged(lambda v: v["grads"]["0.bias"]["projections"].__setitem__(0, {})), "in place of"),
        (damaged(lambda v: v["grads"]["0.bias"].update(shape=[-1])), "is negative"),
        (damaged(lambda v: v["outputs"].update(loss=[1])), "is damaged: ValueError"),
        (damaged(lambda v: v["grads"]["0.bias"].update(error=1e300)), "do not have the SHA-256 in the file"),
        (damaged(lambda v: v.update(weights={})), "do not have the SHA-256 in the file"),
        (damaged(lambda v: v.update(seed=2**70)), "do not have the SHA-256 in the file"),
        (damaged(lambda v: v.pop("sha256")), "is damaged: KeyError: 'sha256'"),
    ],
    ids=itertools.count(),
)
def test_files_that_are_damaged_or_hostile(content, message, tmp_path):
    path = tmp_path / "reference.json"
    write_reference(path, saved_of()[1])
    data = content(json.loads(path.read_text()))
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(ValueError, match=message):
        read_reference(path)


def test_what_is_no_file_is_not_replaced_and_a_link_is_followed(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is a folder or a device"):
        write_reference(tmp_path / "pipe", saved_of()[1])
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link").symlink_to(tmp_path / "reference.json")
    write_reference(tmp_path / "link", saved_of()[1])
    assert (tmp_path / "link").is_symlink()
    assert read_reference(tmp_path / "reference.json") == read_reference(tmp_path / "link")


def test_weights_whose_sums_are_not_finite_differ():
    reference, saved = saved_of()
    weights = {name: dataclasses.replace(x, projections=(math.nan,) * K) for name, x in saved.weights.items()}
    saved = dataclasses.replace(saved, weights=weights)
    report = judge_saved(projected(reference.grads), saved, weights=projected(model_of().named_parameters()))
    assert not report
    assert "the weights differ" in str(report)
    grads = {name: dataclasses.replace(x, projections=(1e308,) * K) for name, x in saved.grads.items()}
    report = judge_saved(projected(reference.grads), dataclasses.replace(saved, grads=grads))
    assert len(report.failures) == len(grads)


def test_updates_alone_do_not_pass(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    x, path = torch.randn(4, 3), tmp_path / "reference.json"
    gm.save_reference(path, step, x, model=model)
    assert gm.check_gradients(step, x, model=model, against=path)
    with torch.no_grad():
        model.bias.add_(1)
    report = gm.check_gradients(step, x, model=model, against=path)
    assert {row.what for row in report if row.is_compared} == {"update"}
    assert not report
    assert str(report).startswith("not compared with the saved reference: no gradient could be compared")
