"""The order of a training loop under DistributedDataParallel and fully_shard."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradiometer as gm
from gradiometer.rules import LoopOrder
from support.watching import Sink

# by name, as the pool of processes imports this module
OPTIONS = {
    "ddp": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True, "gradient_as_bucket_view": True},
}


def wrapped(kind):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    return fully_shard(model) if kind == "fsdp" else DistributedDataParallel(model, **OPTIONS[kind])


def job(rank, kind, mistake, to_none):
    model, sink = wrapped(kind), Sink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    parts = 3 if kind == "ddp" else 2
    with gm.watch(model, optimizer, sinks=[sink], rules=[LoopOrder()]) as monitor:
        for _ in range(10):
            if mistake != "never":
                optimizer.zero_grad(set_to_none=to_none)
            for part in range(parts):
                if mistake == "each":
                    optimizer.zero_grad(set_to_none=to_none)
                alone = kind == "ddp" and part < parts - 1 and mistake != "each"
                with model.no_sync() if alone else nullcontext():
                    model(torch.randn(4, 6, generator=generator)).square().mean().backward()
            if mistake == "late":
                optimizer.zero_grad(set_to_none=to_none)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    assert monitor.failures == {}
    return [finding.message for finding in monitor.findings], [x.model.order.passes for x in sink.records]


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("kind", ["ddp", "views", "static", "fsdp"])
def test_a_healthy_loop_is_told_nothing(two_ranks, kind, to_none):
    for messages, passes in two_ranks.run(job, kind, "", to_none):
        assert messages == []
        if kind == "ddp" and passes:
            assert set(passes) == {3}


@pytest.mark.parametrize(
    ("mistake", "to_none", "words"),
    [
        ("each", True, "only the last of 3 backward passes counts"),
        ("each", False, "only the last of 3 backward passes counts"),
        ("late", True, "cleared between backward() and optimizer.step()"),
        ("never", True, "gradients are not cleared since step 0"),
    ],
)
def test_a_mistake_is_named(two_ranks, mistake, to_none, words):
    (first, *_), _ = two_ranks.run(job, "ddp", mistake, to_none)[0]
    assert words in first
