"""Adaptive clipping in several processes: equal factors and states on all ranks, and those of one process."""

from __future__ import annotations

import math
import re
import zlib

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import gradiometer as gm
from support.rank_models import KINDS, Collectives, alone, full, grads_of, held, mesh_of
from support.rank_pool import pool_of

NAN = math.nan
# sizes of the gradients of each step, relative to the model's
SIZES = (1.0, 1.1, 0.9, 1.05, 30.0, 1.0, NAN, 2.0)
# sums over ranks are added in another order than those of one process, some tens of summands
SUMS = 1e-12


CLIPS = {
    "z-score": lambda _: gm.ZScoreClip(warmup_steps=4),
    "per tensor": lambda source: gm.PerTensorClip(source, warmup_steps=3, max_norm=0.05),
    "weight norm": lambda source: gm.WeightNormClip(source, max_ratio=1e-3),
}


def steps(model, clip, reduce):
    """Take all steps; return the factors and gradients of each, and the final buffers."""
    before = {name: held(grad).clone() for name, grad in grads_of(model).items()}
    found = []
    for i, size in enumerate(SIZES):
        for name, grad in grads_of(model).items():
            held(grad).copy_(before[name]).mul_(1.0 + 0.1 * ((i + zlib.crc32(name.encode())) % 5))
            # in one step one tensor is not finite
            if not math.isnan(size) or name == "norm.bias":
                held(grad).mul_(size)
        gm.collect_and_clip_(model, clip, reduce=reduce)
        grads = {name: full(grad).clone() for name, grad in grads_of(model).items()}
        found.append((clip.factor, grads))
    return found, {name: x.clone() for name, x in clip.named_buffers()}


def clip_on_ranks(rank, size, kind, how, compiled):
    torch._dynamo.reset()
    model = KINDS[kind][0](rank, size, torch.float64)
    ranks = gm.Ranks(model)
    clip = CLIPS[how](ranks if "pipeline" in kind else model)
    if compiled:
        function = torch.compile(gm.collect_and_clip_, fullgraph=True, backend="aot_eager")
        twin = CLIPS[how](ranks if "pipeline" in kind else model)
        before = {name: held(grad).clone() for name, grad in grads_of(model).items()}
        same = True
        for number in SIZES:
            grads = []
            for each, call in ((clip, function), (twin, gm.collect_and_clip_)):
                for name, grad in grads_of(model).items():
                    held(grad).copy_(before[name]).mul_(number)
                call(model, each, reduce=ranks)
                grads.append([held(grad).clone() for grad in grads_of(model).values()])
            pairs = [*zip(*grads, strict=True), *zip(clip.buffers(), twin.buffers(), strict=True)]
            same = same and all(torch.equal(x.nan_to_num(7), y.nan_to_num(7)) for x, y in pairs)
        torch._dynamo.reset()
        return same
    # given or implicit agreement
    reduce = ranks if kind in {"DDP", "pipeline", "pipeline x FSDP2"} else None
    return steps(model, clip, reduce), ranks.names


CASES = [
    ("DDP", 2),
    pytest.param("FSDP2", 2, marks=pytest.mark.deep),
    ("TP", 2),
    ("pipeline", 2),
    ("FSDP2", 4),
    pytest.param("HSDP", 4, marks=pytest.mark.deep),
    pytest.param("FSDP2 x TP", 4, marks=pytest.mark.deep),
    pytest.param("pipeline x FSDP2", 4, marks=pytest.mark.deep),
]


@pytest.mark.parametrize("how", CLIPS)
@pytest.mark.parametrize(("kind", "size"), CASES)
def test_all_ranks_decide_the_same_and_as_one_process(request, kind, size, how):
    told = pool_of(request, size).run(clip_on_ranks, size, kind, how, False)
    model = alone(torch.float64)
    (single, state), names = steps(model, CLIPS[how](model), None), told[0][1]
    rows = [[name for name, _ in model.named_parameters()].index(name) for name in names]
    clipped = 0
    for (found, buffers), _ in told:
        for name, x in buffers.items():
            # bit for bit, on all ranks
            assert torch.equal(x, told[0][0][1][name]), name
        each_step = zip(found, told[0][0][0], single, strict=True)
        for (factor, grads), (ours, _), (expected, whole_grads) in each_step:
            assert torch.equal(factor, ours)
            mine = expected if how == "z-score" else expected[rows]
            torch.testing.assert_close(factor, mine, rtol=SUMS, atol=0.0)
            clipped += (factor < 1).sum()
            for name, grad in grads.items():
                atol = SUMS * float(whole_grads[name].abs().nan_to_num(0).max())
                torch.testing.assert_close(grad, whole_grads[name], rtol=SUMS, atol=atol, equal_nan=True)
    assert clipped > 0
    for name, x in state.items():
        is_per_tensor = name in {"average", "record"} and how != "z-score"
        if name != "key":
            expected = x[..., rows] if is_per_tensor else x
            torch.testing.assert_close(told[0][0][1][name], expected, rtol=1e3 * SUMS, atol=1e-15)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        pytest.param(kind, how, marks=() if (kind, how) == ("FSDP2", "per tensor") else (pytest.mark.deep,))
        for kind in ("FSDP2", "pipeline")
        for how in CLIPS
    ],
)
def test_compiled_ranks_decide_as_eager_ones(two_ranks, kind, how):
    assert two_ranks.run(clip_on_ranks, 2, kind, how, True) == [True, True]


def collectives_of(rank, size):
    model = KINDS["FSDP2"][0](rank, size, torch.float64)
    ranks = gm.Ranks(model)
    found = []
    for make in CLIPS.values():
        clip = make(model)
        with Collectives() as seen:
            gm.collect_and_clip_(model, clip, reduce=ranks)
        found.append([shapes[0][0] for _, shapes in seen.calls])
    return found, len(ranks.names)


def test_weight_norms_take_two_more_collectives_and_others_none(two_ranks):
    for (z_score, per_tensor, weight_norm), rows in two_ranks.run(collectives_of, 2):
        pair = [(rows, 7), (rows + 8, 2)]
        assert z_score == per_tensor == pair
        assert weight_norm == [*pair, *pair]


def stage(rank):
    model = nn.ModuleDict({"w": nn.Linear(3, 2)})
    for p in model.parameters():
        p.grad = torch.full_like(p, rank + 1.0)
    return model


def clip_differently(rank, fault):
    model = stage(0)
    makers = {"z-score": gm.ZScoreClip, "per tensor": lambda **o: gm.PerTensorClip(model, **o)}
    clip = makers["per tensor" if fault == "kind" and rank else "z-score"]()
    if fault == "settings" and rank:
        clip = gm.ZScoreClip(decay=0.5)
    if fault == "number" and rank:
        clip = 1.0
    for _ in range(2):
        if fault == "state" and rank and isinstance(clip, gm.ZScoreClip):
            # as if only one rank had loaded a checkpoint
            clip.state.fill_(2.0)
        try:
            gm.collect_and_clip_(model, clip, reduce=True)
        except gm.RankError as error:
            unchanged = all((p.grad == 1).all() for p in model.parameters())
            return str(error), unchanged
    return None, False


@pytest.mark.parametrize("fault", ["kind", "settings", "state", "number"])
def test_modules_that_would_decide_differently_are_refused_on_all_ranks(two_ranks, fault):
    theirs = {"kind": r"gm\.PerTensorClip", "number": "1.0"}.get(fault, r"gm\.ZScoreClip")
    for said, unchanged in two_ranks.run(clip_differently, fault):
        assert unchanged
        assert said.startswith("reduce: rank 1 called collect_and_clip_ with max_norm=")
        assert "every rank must make the same calls" in said
        ours = r"gm\.ZScoreClip with settings and state \w+;"
        assert re.search(rf"max_norm={theirs}.*, but rank 0 with max_norm={ours}", said), said


def refused(rank):
    mesh = mesh_of((2,), ("tp",))
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    weight.grad = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    found = []
    shard = {"p": stage(rank)["w"].weight}
    for parameters, reduce in (({"w": weight}, None), (shard, gm.Ranks(shard, shards={".*": None}))):
        clip = gm.WeightNormClip(parameters, unitwise=True)
        try:
            gm.clip_grad_norm_(parameters, clip, reduce=reduce)
        except TypeError as error:
            found.append(str(error))
    # names that this rank's module lacks
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(2, 1)})
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    try:
        gm.clip_grad_norm_(model, gm.PerTensorClip(model), reduce=True)
    except ValueError as error:
        found.append(str(error))
    return found


def test_what_ranks_cannot_clip_is_refused_on_each(two_ranks):
    for rank, (dtensor, shards, names) in enumerate(two_ranks.run(refused)):
        assert "'w' is a DTensor, whose units this rank cannot clip; use unitwise=False" in dtensor
        assert "gm.Ranks has tensors that are sharded" in shards
        assert f"'stage{1 - rank}.weight' is not among the 2 tensors" in names
        assert "create it with gm.PerTensorClip(gm.Ranks(model))" in names


def units_on_ranks(rank, size):
    model = KINDS["DDP"][0](rank, size, torch.float64)
    clip = gm.WeightNormClip(model, unitwise=True, max_ratio=1e-3)
    gm.collect_and_clip_(model, clip, reduce=gm.Ranks(model))
    return clip.record, [grad.clone() for grad in grads_of(model).values()]


def test_units_of_replicas_are_clipped_alike(two_ranks):
    model = alone(torch.float64)
    clip = gm.WeightNormClip(model, unitwise=True, max_ratio=1e-3)
    gm.collect_and_clip_(model, clip)
    for record, grads in two_ranks.run(units_on_ranks, 2):
        torch.testing.assert_close(record, clip.record, rtol=SUMS, atol=0.0)
        for grad, p in zip(grads, model.parameters(), strict=True):
            torch.testing.assert_close(grad, p.grad, rtol=SUMS, atol=1e-15)
