"""`gradiometer.watch` with DeepSpeed: the imitation of its buffers everywhere, and DeepSpeed if it is installed."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import pickle
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import gradiometer as gm
from support import deepspeed_buffers
from support.partitioned_training import loss_of, model_of, norms_of, reference, rows_of
from support.rank_pool import RankPool, pool_of
from support.watching import Sink

REAL = importlib.util.find_spec("deepspeed") is not None
KINDS = ["imitation", pytest.param("real", marks=pytest.mark.skipif(not REAL, reason="needs deepspeed"))]
STEPS = 3


@pytest.fixture(scope="module")
def one_rank():
    pool = RankPool(1)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def three_ranks():
    pool = RankPool(3)
    yield pool
    pool.close()


def pool(request, size):
    return (
        pool_of(request, size)
        if size == 2
        else request.getfixturevalue({1: "one_rank", 3: "three_ranks"}[size])
    )


def engine_of(
    kind, model, *, stage=2, bf16=False, accumulation=1, clip=0.0, scale=1.0, groups=1, lr=0.05, **config
):
    """Return an engine; ``bf16`` at stage 1 is BF16_Optimizer."""
    named = [p for p in model.parameters() if p.requires_grad]
    parts = (
        [{"params": named}] if groups == 1 else [{"params": named[:1]}, {"params": named[1:], "lr": lr / 2}]
    )
    optimizer = torch.optim.SGD(parts, lr=lr)
    if kind == "imitation":
        cls = (
            deepspeed_buffers.BF16_Optimizer
            if bf16 and stage == 1
            else deepspeed_buffers.DeepSpeedZeroOptimizer
        )
        return deepspeed_buffers.DeepSpeedEngine(model, cls(optimizer, clip, scale), accumulation)
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    size = torch.distributed.get_world_size()
    settings = {
        "train_batch_size": 6 * size * accumulation,
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage, **config},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
        "steps_per_print": 10**9,
    }
    if bf16:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def exact_gradients(kind, engine):
    """Return what DeepSpeed holds, of all ranks, before the step."""
    if kind == "real":
        from deepspeed.utils import safe_get_full_grad

        named = engine.module.named_parameters()
        return {name: safe_get_full_grad(p) for name, p in named if p.requires_grad}
    found = {}
    for name, p in engine.module.named_parameters():
        if not p.requires_grad:
            continue
        whole, mapping = torch.zeros(p.numel()), p._hp_mapping
        if mapping is not None:
            at, to = mapping.hp_fragment_address, mapping.lp_fragment_address
            flat = torch.cat([x.reshape(-1) for x in partition_of(engine.optimizer, p)])
            whole[to.start : to.start + to.numel] = flat[at.start : at.start + at.numel]
        if engine.optimizer.size > 1:
            torch.distributed.all_reduce(whole)
        found[name] = whole
    return found


def partition_of(optimizer, p):
    group = next(i for i, own in enumerate(optimizer.groups) if any(p is x for x in own))
    if hasattr(optimizer, "averaged_gradients"):
        return optimizer.averaged_gradients[group]
    return [optimizer.fp32_groups_gradient_flat_partition[group]]


def train(rank, kind, size, options, case, steps=STEPS):
    """Train, and return what was recorded, and what the gradients are."""
    warnings.simplefilter("ignore")
    case = dict(case)
    accumulation, dtype = case.get("accumulation", 1), torch.bfloat16 if case.get("bf16") else torch.float32
    engine = engine_of(kind, model_of(dtype), **case)
    sink, exact, held, norms, losses, before = Sink(), [], [], [], [], []
    monitor = gm.watch(engine, sinks=[sink], rules=(), **options)
    with monitor:
        for step in range(steps):
            before.append({name: p.detach().clone() for name, p in engine.module.named_parameters()})
            exact.append(norms_of(reference(engine.module, step, size, accumulation)))
            for micro in range(accumulation):
                loss = loss_of(engine, step, rank, micro, dtype)
                engine.backward(loss)
                monitor.note(loss=loss)
                if micro == accumulation - 1:
                    held.append(norms_of(exact_gradients(kind, engine)))
                engine.step()
            norms.append(float(engine.get_global_grad_norm()))
            losses.append(float(loss.detach()))
    return {
        "optimizer": type(engine.optimizer).__name__,
        "rows": [rows_of(record) for record in sink.records],
        "totals": [record.total() for record in sink.records],
        "numel": [record.total("numel") for record in sink.records],
        "scalars": [dict(record.scalars) for record in sink.records],
        "shapes": dict(zip(sink.info.catalog.names, sink.info.catalog.parameters.shapes, strict=True))
        if sink.info
        else None,
        "model": sink.info.model if sink.info else None,
        "weights": [rows_of(record, "weights") for record in sink.records if record.has("weights")],
        "updates": [rows_of(record, "updates") for record in sink.records if record.has("updates")],
        "cosines": [
            rows_of(record, "updates", "descent_cosine") for record in sink.records if record.has("updates")
        ],
        "changes": [
            norms_of({name: after - old[name].double() for name, after in new.items()})
            for old, new in zip(before, [*before[1:], dict(engine.module.named_parameters())], strict=True)
        ],
        "exact": exact,
        "held": held,
        "norms": norms,
        "losses": losses,
        "failures": monitor.failures,
        "restored": "step" not in vars(engine.optimizer),
        "clears": all(p.grad is None for p in engine.module.parameters()) or kind == "real",
    }


CASES = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "clipped": {"stage": 2, "clip": 0.1},
    "accumulated": {"stage": 1, "accumulation": 3},
    "accumulated, stage 2, clipped": {"stage": 2, "accumulation": 2, "clip": 0.1},
    "two groups": {"stage": 2, "groups": 2},
    "bf16": {"stage": 2, "bf16": True},
    "BF16_Optimizer": {"stage": 1, "bf16": True, "clip": 0.1, "accumulation": 2, "groups": 2},
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_by_name(request, kind, case, size):
    results = pool(request, size).run(train, kind, size, {}, CASES[case])
    first = results[0]
    expected = first["held"] if CASES[case].get("bf16") else first["exact"]
    assert len(first["rows"]) == STEPS
    for rows, norms in zip(first["rows"], expected, strict=True):
        assert rows == pytest.approx(norms, rel=1e-6)
    assert first["numel"] == [66] * STEPS
    assert first["shapes"]["0.weight"] == (7, 5)
    assert first["model"] == "Sequential"
    assert first["totals"] == pytest.approx(first["norms"], rel=1e-5)
    # the mean over the ranks
    losses = [sum(each) / size for each in zip(*[result["losses"] for result in results], strict=True)]
    assert [scalars["loss"] for scalars in first["scalars"]] == pytest.approx(losses, rel=1e-6)
    assert [scalars["lr"] for scalars in first["scalars"]] == [0.05] * STEPS
    assert [result["failures"] for result in results] == [{}] * size
    assert all(result["restored"] and result["clears"] for result in results)
    assert first["optimizer"] == ("BF16_Optimizer" if case == "BF16_Optimizer" else "DeepSpeedZeroOptimizer")
