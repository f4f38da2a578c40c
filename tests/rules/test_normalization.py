"""Layers that are a LayerNorm or RMSNorm by their name, and normalize, or do not."""

from __future__ import annotations

import copy
import io
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradiometer as gm
from gradiometer.monitor import norm_reader
from gradiometer.rules import Normalization, Severity

WIDTH = 32


def rms(x, dim):
    return torch.rsqrt(x.square().mean(dim, keepdim=True) + 1e-6)


CORRECT = {
    "rms": lambda x, w: x * rms(x, -1) * w,
    "of 1 + weight": lambda x, w: x * rms(x, -1) * w.mul(0.3).add(1.0),
    "layer": lambda x, w: functional.layer_norm(x, x.shape[-1:], w),
    "unit length": lambda x, w: functional.normalize(x, dim=-1) * w,
    "in bfloat16": lambda x, w: (x.bfloat16() * rms(x.bfloat16(), -1)).float() * w,
    "unbiased": lambda x, w: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) * w,
}
VARIANCE, ELSEWHERE = "it divides by the variance", "the norm is missing, or over another dimension"
WRONG = {
    "no root": (lambda x, w: x * rms(x, -1).square() * w, VARIANCE),
    "sequence": (lambda x, w: x * rms(x, 1) * w, ELSEWHERE),
    "batch": (lambda x, w: x * rms(x, 0) * w, ELSEWHERE),
    "whole batch": (lambda x, w: x * rms(x, (0, 1, 2)) * w, ELSEWHERE),
    "missing": (lambda x, w: x * w, ELSEWHERE),
    "squares in float16": (
        lambda x, w: x * (1e4 * x.detach()).half().square().mean(-1, keepdim=True).rsqrt() * w,
        "it returns only 0",
    ),
}


class RMSNorm(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight, self.eps, self.function = nn.Parameter(torch.ones(WIDTH)), 1e-6, function

    def forward(self, x):
        return self.function(x, self.weight)


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.body = norm, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.body(self.norm(x)).relu()


def model_of(*norms):
    torch.manual_seed(0)
    return nn.Sequential(*[Block(norm) for norm in norms], nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4))


def batches(steps):
    data = torch.Generator().manual_seed(1)
    for _ in range(steps):
        # tokens whose magnitude differs by a factor of 2
        size = torch.rand(4, 10, 1, generator=data) + 1.0
        yield size * torch.randn(4, 10, WIDTH, generator=data)


def train(model, steps=4, called=None, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with gm.watch(model, optimizer, rules=[Normalization()], **options) as monitor:
        for x in batches(steps):
            loss = (called or model)(x).square().mean()
            loss.backward()
            monitor.note(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            monitor.flush()
    return monitor


@pytest.mark.parametrize("name", CORRECT)
def test_a_norm_of_ones_own_that_is_correct_is_quiet(name):
    model = model_of(RMSNorm(CORRECT[name]), RMSNorm(CORRECT["rms"]))
    with torch.no_grad():
        model[0].norm.weight.normal_()
    monitor = train(model, steps=20)
    assert monitor.findings == []
    assert monitor.failures == {}


@pytest.mark.parametrize("name", WRONG)
def test_a_norm_that_does_not_normalize_each_token_is_found(name):
    function, text = WRONG[name]
    (found,) = train(model_of(RMSNorm(CORRECT["rms"]), RMSNorm(function))).findings
    assert (found.rule, found.tensor, found.severity) == ("normalization", "1.norm", Severity.WARNING)
    assert found.message.startswith(f"1.norm (RMSNorm) does not normalize each token: {text}")
    assert found.first_step == 0


def test_a_weight_that_starts_at_0_is_meant():
    model = model_of(RMSNorm(CORRECT["rms"]))
    nn.init.zeros_(model[0].norm.weight)
    reader = norm_reader.NormReader({"": model}, torch.device("cpu"))
    model(next(iter(batches(1))))
    assert reader._found["0.norm"].tolist() == [0.0, 0.0]
    reader.release()


def test_a_forward_that_is_replaced_is_looked_at_and_others_are_counted():
    model = model_of(nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH))
    for block in model[:2]:
        block.norm.forward = lambda x: x * rms(x, 1)
    (found,) = train(model).findings
    assert found.message.startswith("0.norm (LayerNorm) does not")
    assert found.message.endswith("; 1 more of 2 such layers do not either")


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x):
        shape, dim = self.normalized_shape, 1 if x.shape[1] == WIDTH else 2
        return functional.layer_norm(x.movedim(dim, -1), shape, self.weight, self.bias).movedim(-1, dim)


@pytest.mark.parametrize("dim", [1, 2])
def test_channels_may_be_in_dimension_1(dim):
    model = nn.Sequential(LayerNorm2d(WIDTH))
    reader = norm_reader.NormReader({"": model}, torch.device("cpu"))
    model(torch.randn(2, 5, WIDTH, 6).transpose(1, dim) * torch.rand(2, 1, 1, 6).add(0.5))
    found = {name: float(value[0]) for name, value in reader._found.items()}
    assert found == ({} if dim == 1 else {"0": pytest.approx(0.0, abs=1e-5)})
    reader.release()


def hooks(model):
    # the model itself has the one that looks at its inputs
    return sum(len(module._forward_hooks) for module in model.modules() if module is not model)


def test_only_layers_with_a_forward_of_their_own_have_a_hook_and_only_at_first():
    model = model_of(RMSNorm(CORRECT["rms"]), nn.LayerNorm(WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen = []
    with gm.watch(model, optimizer, rules=[]) as monitor:
        for x in batches(70):
            seen.append(hooks(model))
            model(x).square().mean().backward()
            optimizer.step()
    assert seen == [1] * 64 + [0] * 6
    assert monitor.failures == {}


def test_a_copy_of_the_model_has_no_reader():
    model = model_of(RMSNorm(f_rms))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with gm.watch(model, optimizer, rules=[]) as monitor:
        file = io.BytesIO()
        torch.save(model, file)
        assert b"gradiometer" not in file.getvalue()
        file.seek(0)
        x = next(iter(batches(1)))
        expected = model(x)
        for other in (
            copy.deepcopy(model),
            torch.load(file, weights_only=False),
        ):
            assert torch.equal(other(x), expected)
            assert not any(
                isinstance(hook, norm_reader._Hook)
                for module in other.modules()
                for hook in module._forward_hooks.values()
            )
    assert monitor.failures == {}


def f_rms(x, w):
    return x * rms(x, -1) * w


def test_training_is_the_same_to_the_last_bit():
    ends = []
    for is_watched in (False, True):
        model = model_of(RMSNorm(CORRECT["rms"]))
        if is_watched:
            train(model, steps=20)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for x in batches(20):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        ends.append(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_compiled_model_stays_one_graph_and_is_not_looked_at():
    model = model_of(RMSNorm(WRONG["no root"][0]))
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        monitor = train(model, steps=70, called=compiled)
    assert monitor.findings == []
    assert monitor.failures == {}


def test_an_error_is_logged_once_and_training_goes_on(monkeypatch, caplog):
    def fail(*_, **__):
        raise RuntimeError("no memory")

    monkeypatch.setattr(norm_reader, "compare", fail)
    model = model_of(RMSNorm(CORRECT["rms"]))
    with caplog.at_level(logging.WARNING, "gradiometer"):
        monitor = train(model, steps=6)
    assert monitor.failures == {"model": 1}
    assert caplog.text.count("no memory") == 1
    assert monitor.last.step == 5
    assert hooks(model) == 0


def test_what_a_checkpoint_computes_again_is_looked_at():
    model = model_of(RMSNorm(WRONG["no root"][0]))

    def called(x):
        return torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=True)

    assert [found.rule for found in train(model, called=called).findings] == ["normalization"]


def test_tokens_that_are_all_alike_or_too_small_say_nothing():
    x = torch.randn(1, WIDTH).expand(40, WIDTH) + 0.01 * torch.randn(40, WIDTH)
    assert norm_reader.compare(x, x).tolist() == [0.0, 0.0]
    x = 1e-3 * torch.randn(40, WIDTH) * torch.rand(40, 1)
    assert norm_reader.compare(x, x).tolist() == [0.0, 0.0]
    assert norm_reader.compare(1e3 * x, x)[0] > 0.2


def test_its_history_is_saved():
    rule, other = Normalization(), Normalization()
    rule.failed, rule.before_step = ["a"], 3
    other.load_state_dict(rule.state_dict())
    assert (other.failed, other.before_step) == (["a"], 3)
