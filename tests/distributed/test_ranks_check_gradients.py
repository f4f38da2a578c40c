"""check_gradients in several processes: a one-process function shows what parallel layers compute wrong."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradiometer as gm
from support.rank_models import batch, loss_of, mesh_of, over_tensors, sharded, whole

BLOCK = "layers.0"


def in_one_process(x, target):
    """Return the gradients of the whole batch."""
    del x, target
    model = whole(torch.float32)
    loss_of(model(batch()[0]), batch()[1]).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def answer(model, step, x, target, **options):
    local = [getattr(p, "_local_tensor", p) for p in model.parameters()]
    before = [p.detach().clone() for p in local]
    report = gm.check_gradients(step, x, target, model=model, **options)
    kept = [getattr(p, "_local_tensor", p) for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))
    assert all(p.grad is None for p in model.parameters())
    failures = sorted(row.name for row in report.failures)
    return bool(report), failures, report.precision, [row.text for row in report.failures], str(report)


def step_of(model):
    def step(x, target):
        loss = loss_of(model(x), target)
        loss.backward()
        return loss.detach()

    return step


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp"])
def test_a_healthy_model_agrees(kind, two_ranks):
    for against in (in_one_process, "eager"):
        for agrees, failures, precision, _, text in two_ranks.run(check, kind, against):
            assert agrees, text
            assert not failures
            has_float64 = kind == "ddp" or against != "eager"
            assert precision == ("float64" if has_float64 else "")


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp"])
def test_a_healthy_model_agrees_with_what_one_process_has_saved(kind, two_ranks, tmp_path):
    model = whole(torch.float32)
    gm.save_reference(tmp_path / "reference.json", step_of(model), *batch(), model=model)
    for agrees, failures, precision, _, text in two_ranks.run(check, kind, tmp_path / "reference.json"):
        assert agrees, text
        assert not failures
        assert precision == "float64"


def check(rank, kind, against):
    x, target = (part.chunk(2)[rank] for part in batch())
    model = whole(torch.float32)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        model = sharded(model, mesh_of((2,), ("dp_shard",)))
    else:
        x, target = batch()
        model = over_tensors(model, mesh_of((2,), ("tp",)))
    return answer(model, step_of(model), x, target, against=against)


def test_a_loss_that_bypasses_ddp_is_named(two_ranks):
    for agrees, failures, _, _, text in two_ranks.run(bypass):
        assert not agrees
        assert failures == ["head.bias", "head.weight"], text


def bypass(rank):
    x, target = (part.chunk(2)[rank] for part in batch())
    model = whole(torch.float32)
    inner = DistributedDataParallel(nn.Sequential(model.embed, *model.layers.values(), model.norm))

    def step(x, target):
        loss = loss_of(nn.functional.linear(inner(x), model.head.weight, model.head.bias), target)
        loss.backward()

    return answer(model, step, x, target, against=in_one_process)


def test_partial_gradients_of_a_copied_layer_are_named(two_ranks):
    for agrees, failures, _, _, text in two_ranks.run(partial):
        assert not agrees
        assert failures == ["layers.0.norm.bias", "layers.0.norm.weight"], text


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(_, grad):
        return grad


class Copied(torch.autograd.Function):
    """The entrance of a tensor-parallel block, whose backward adds up the gradients of the ranks."""

    @staticmethod
    def forward(_, x):
        return x.view_as(x)

    @staticmethod
    def backward(_, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def partial(rank):
    """Split the hidden units of a block by hand; its norm comes after the entrance, as it should not."""
    model = whole(torch.float32)

    def block(layer, x):
        half = slice(rank * 6, rank * 6 + 6)
        hidden = layer.norm(Copied.apply(x))
        hidden = nn.functional.linear(hidden, layer.up.weight[half], layer.up.bias[half])
        out = nn.functional.linear(nn.functional.gelu(hidden), layer.down.weight[:, half])
        return x + Sum.apply(out) + layer.down.bias

    def step(x, target):
        x = model.embed(x)
        x = block(model.layers["0"], x)
        x = model.layers["1"](x)
        loss_of(model.head(model.norm(x)), target).backward()
        # each rank has the gradients of its hidden units
        for p in (model.layers["0"].up.weight, model.layers["0"].up.bias, model.layers["0"].down.weight):
            dist.all_reduce(p.grad)

    return answer(model, step, *batch(), against=in_one_process)
