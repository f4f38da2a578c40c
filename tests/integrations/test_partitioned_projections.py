"""Projections of gradients in the flat buffers of DeepSpeed and Megatron are those of whole tensors."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.distributed import Mesh, UnknownPartError, part_of
from gradiometer.integrations import partitioned
from support import deepspeed_buffers, megatron_buffers
from support.partitioned_training import loss_of
from support.rank_pool import pool_of
from support.watching import Sink

COUNT, STEPS = 32, 2
# rounding of float32 in sums of a few hundred terms
BOUND = 1e-5


def model_of(dtype=torch.float32):
    """Return a model whose parameters begin inside of partitions, also of Megatron's, padded to 64."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 47), nn.Tanh(), nn.Linear(47, 3))
    model.register_parameter("frozen", nn.Parameter(torch.ones(4), requires_grad=False))
    return model.to(dtype)


def reference(model, step, size):
    """Return the gradients in float64 by name, of the mean over ranks."""
    exact = model_of(torch.float64)
    with torch.no_grad():
        for p, own in zip(exact.parameters(), model.parameters(), strict=True):
            p.copy_(own)
    for rank in range(size):
        (loss_of(exact, step, rank, 0, torch.float64) / size).backward()
    return {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}


def deepspeed(model, name):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    return deepspeed_buffers.DeepSpeedEngine(model, getattr(deepspeed_buffers, name)(optimizer, 0.0, 1.0), 1)


def train(rank, size, name):
    warnings.simplefilter("ignore")
    model, sink, expected = model_of(), Sink(), []
    options = {"sinks": [sink], "rules": (), "projections": COUNT, "weights": True}
    if name == "DistributedOptimizer":
        engine = megatron_buffers.DistributedDataParallel(model, is_sharded=True)
        leaf = megatron_buffers.DistributedOptimizer(engine, 0.05, 0.0, None)
        optimizer = megatron_buffers.ChainedOptimizer([leaf])
        monitor = gm.watch(engine, optimizer, **options)
    else:
        engine, optimizer = deepspeed(model, name), None
        monitor = gm.watch(engine, **options)
    with monitor:
        for step in range(STEPS):
            weights = {name: p.detach().clone() for name, p in model.named_parameters()}
            grads = reference(model, step, size)
            expected.append([gm.collect_projections(x, projections=COUNT).columns for x in (grads, weights)])
            if optimizer is None:
                engine.backward(loss_of(engine, step, rank))
                engine.step()
                continue
            engine.zero_grad_buffer()
            optimizer.zero_grad()
            loss_of(engine, step, rank).backward()
            engine.finish_grad_sync()
            optimizer.step()
    tables = ("grad_projections", "weight_projections")
    found = [[record.columns(x) for x in tables] for record in sink.records]
    return found, expected, monitor.failures


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", ["DeepSpeedZeroOptimizer", "BF16_Optimizer", "DistributedOptimizer"])
def test_fragments_add_up_to_the_projections_of_whole_tensors(request, size, name):
    (found, expected, failures), *_ = pool_of(request, size).run(train, size, name)
    assert failures == {}
    assert len(found) == STEPS
    for step in range(STEPS):
        for rows, others in zip(found[step], expected[step], strict=True):
            # all but the frozen one have gradients
            measured = rows[rows[:, 0] > 0]
            assert torch.equal(measured[:, 0], others[:, 0])
            most = (others[:, 0] * others[:, 1]).sqrt().unsqueeze(1)
            assert bool(((measured[:, 3:] - others[:, 3:]).abs() <= BOUND * most).all())


def test_the_place_of_a_part_of_tensor_parallelism_is_not_known():
    weight = nn.Parameter(torch.ones(6))
    mesh = Mesh(("tensor parallel", "data parallel"), (2, 1), (0, 0))
    parts = [
        partitioned.Part("split", weight, weight, (12,), ("S", "R"), None),
        partitioned.Part("whole", weight, weight, (6,), ("R", "R")),
    ]
    sharding = partitioned._sharding(parts, [weight, weight], mesh)
    assert part_of("whole", weight, "Recorder", sharding) is None
    with pytest.raises(UnknownPartError, match="Recorder: 'split' is a part of a larger tensor"):
        part_of("split", weight, "Recorder", sharding)
