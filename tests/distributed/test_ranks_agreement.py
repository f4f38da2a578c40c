"""Do ranks agree: equal data, a rank that disagrees, gradients that are not averaged, and healthy jobs."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812 its usual name
from torch.nn.parallel import DistributedDataParallel

import gradiometer as gm
from gradiometer.rules import DisagreeingRank, NotAveraged, SameData
from support.pages import blocks
from support.rank_models import Collectives, mesh_of
from support.rank_pool import pool_of, scripted
from support.watching import Sink

F64 = torch.float64
PAGE = "docs/how-to/gradient-agreement.md"


def model_of(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def batch_of(generator, dtype=torch.float32):
    x = torch.randn(16, 6, generator=generator, dtype=dtype)
    return x, x[:, :2] + 0.3 * torch.randn(16, 2, generator=generator, dtype=dtype)


def job(rank, fault, seed, steps=30, options=None):
    """Train under DDP with a fault; return the findings and the scalars, of the first rank."""
    model = model_of()
    inner = model
    if fault == "ignored":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.weight"])
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    agreement = gm.GradientAgreement(model, ranks=gm.Ranks(model), **(options or {}))
    agreement.register_comm_hook(model)
    same = fault == "same" and rank == 2
    generator = torch.Generator().manual_seed(1000 * seed + (0 if same else rank))
    sink, rules = Sink(), [SameData(), DisagreeingRank(), NotAveraged()]
    with gm.watch(model, optimizer, agreement=agreement, rules=rules, sinks=[sink], states=None) as monitor:
        for step in range(steps):
            x, y = batch_of(generator)
            if fault == "targets" and rank == 1:
                y = torch.randn(16, 2, generator=generator)
            if fault == "sign" and rank == 1:
                y = -2 * y
            if fault == "once" and rank == 1 and step == 12:
                y = -20 * y
            if fault == "nan" and rank == 1 and step % 7 == 3:
                x = x * torch.nan
            called = inner if fault == "bypassed" else model
            with model.no_sync() if fault == "no_sync" else nullcontext():
                F.mse_loss(called(x), y).backward()
            if fault == "nan":
                for p in model.parameters():
                    p.grad.nan_to_num_(0.0)
            optimizer.step()
            optimizer.zero_grad()
    assert monitor.failures == {}
    found = [(one.rule, one.severity.name, one.message) for one in monitor.findings]
    return found, [(record.step, dict(record.scalars)) for record in sink.records]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_healthy_job_has_no_finding(request, size, seed):
    first, *others = pool_of(request, size).run(job, "", seed, 40)
    assert all(found == ([], []) for found in others)
    findings, scalars = first
    assert findings == []
    cosines = [each["rank_cosine"] for _, each in scalars]
    assert len(cosines) == 40
    assert all(-1 <= x <= 1 for x in cosines)
    assert "micro_batch_cosine" not in scalars[0][1]


@pytest.mark.parametrize("fault", ["once", "nan"])
def test_what_happens_in_a_few_steps_is_no_finding(three_ranks, fault):
    assert three_ranks.run(job, fault, 0)[0][0] == []


def test_ranks_with_the_same_data_are_named(three_ranks):
    ((rule, severity, message),) = three_ranks.run(job, "same", 0)[0][0]
    assert (rule, severity) == ("same_data", "WARNING")
    assert message.startswith(
        "ranks 0 and 2 get the same data: their gradients are equal, with cosine 1 and "
    )


@pytest.mark.parametrize("fault", ["targets", "sign"])
def test_a_rank_that_disagrees_is_named(three_ranks, fault):
    ((rule, severity, message),) = three_ranks.run(job, fault, 1)[0][0]
    assert (rule, severity) == ("disagreeing_rank", "WARNING")
    assert message.startswith(
        "rank 1 disagrees with the other ranks: the gradient of rank 1 has a cosine of "
    )


def test_of_two_ranks_none_is_blamed(two_ranks):
    assert two_ranks.run(job, "sign", 0)[0][0] == []


@pytest.mark.parametrize("fault", ["bypassed", "no_sync"])
def test_gradients_that_are_never_averaged_are_reported(two_ranks, fault):
    ((rule, severity, message),) = two_ranks.run(job, fault, 0)[0][0]
    assert (rule, severity) == ("not_averaged", "ERROR")
    assert message == (
        "gradients are not averaged over the 2 ranks: after backward(), those of all 4 tensors differ "
        "between ranks, and so will the weights"
    )


def test_a_tensor_that_is_not_averaged_is_named(two_ranks):
    ((_, _, message),) = two_ranks.run(job, "ignored", 0)[0][0]
    assert "those of 2.weight differ" in message


def test_every_leaves_steps_out(three_ranks):
    findings, scalars = three_ranks.run(job, "same", 0, 13, {"every": 4})[0]
    assert [step for step, each in scalars if "rank_cosine" in each] == [0, 4, 8, 12]
    assert [rule for rule, *_ in findings] == ["same_data"]


def test_cosines_are_those_of_the_gradients(two_ranks):
    answers = two_ranks.run(cosines_by_hand)
    for found, expected, micro, expected_micro in answers:
        # a deviation of (1 - c²) / sqrt(256) at most
        assert abs(found - expected) < 4 / 16
        assert abs(micro - expected_micro) < 4 / 16
    assert answers[0][:2] == answers[1][:2]
    # the micro-batches of each rank
    assert answers[0][2] != answers[1][2]


def cosines_by_hand(rank):
    """Accumulate under no_sync with the hook, and compare with the gradients themselves."""
    model = DistributedDataParallel(model_of(F64), bucket_cap_mb=1e-4)
    agreement = gm.GradientAgreement(model, projections=256, ranks=gm.Ranks(model))
    agreement.register_comm_hook(model)
    generator = torch.Generator().manual_seed(rank)
    batches = [batch_of(generator, F64) for _ in range(3)]
    parts = []
    for x, y in batches:
        grads = torch.autograd.grad(F.mse_loss(model.module(x), y), model.parameters())
        parts.append(torch.cat([grad.flatten() for grad in grads]))
    for i, (x, y) in enumerate(batches):
        with model.no_sync() if i < 2 else nullcontext():
            F.mse_loss(model(x), y).backward()
        # the last one is the average already
        agreement.add()
    found = agreement.step()
    assert found.micro_batches == 3
    assert not found.differing.any()
    totals = [torch.zeros_like(parts[0]) for _ in range(2)]
    dist.all_gather(totals, sum(parts))
    pairs = [F.cosine_similarity(parts[i], parts[j], 0) for i, j in ((0, 1), (0, 2), (1, 2))]
    expected = F.cosine_similarity(*totals, 0).item()
    return found.rank_cosine[0].item(), expected, found.cosine[0].item(), torch.stack(pairs).mean().item()


@pytest.mark.parametrize("way", ["hook", "no_sync"])
def test_a_step_takes_one_collective(two_ranks, way):
    for shapes, differing in two_ranks.run(collectives_of_a_step, way):
        # 2 ranks, the total and a group, 8 projections; 8 more of 4 tensors, as a maximum and a minimum
        assert shapes == [[((2 * 2 * 8 + 16 * 4,), F64)]]
        assert differing == [False] * 4


def collectives_of_a_step(rank, way):
    model = DistributedDataParallel(model_of())
    agreement = gm.GradientAgreement(model, projections=8, groups={"first": r"^0\."}, ranks=gm.Ranks(model))
    if way == "hook":
        agreement.register_comm_hook(model)
    x, y = batch_of(torch.Generator().manual_seed(rank))
    if way != "hook":
        with model.no_sync():
            F.mse_loss(model(x), y).backward()
        agreement.add()
    F.mse_loss(model(x), y).backward()
    agreement.add_averaged()
    with Collectives() as seen:
        found = agreement.step()
    assert bool(found.rank_cosine.isfinite().all())
    return [shapes for _, shapes in seen.calls], found.differing.tolist()


def test_a_compiled_step_gives_the_same(two_ranks):
    for eager, compiled in two_ranks.run(in_both_modes):
        assert compiled == pytest.approx(eager, rel=1e-12)


def in_both_modes(rank):
    model = model_of()
    ranks, results = gm.Ranks(model), []
    x, y = batch_of(torch.Generator().manual_seed(rank))
    F.mse_loss(model(x), y).backward()
    for compiled in (False, True):
        agreement = gm.GradientAgreement(model, ranks=ranks)

        def step(agreement=agreement):
            agreement.add(gm.collect_projections(model, projections=64))
            agreement.add_averaged(gm.collect_projections(model, projections=8))
            return agreement.step()

        found = (torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step)()
        results.append([*found.rank_cosine.tolist(), *found.rank_twins.tolist(), *found.differing.tolist()])
    return results


def test_several_synchronized_backwards_count_once(two_ranks):
    for found, other in two_ranks.run(synchronized_twice):
        assert found == other


def synchronized_twice(rank):
    results = []
    for times in (1, 2):
        model = DistributedDataParallel(model_of())
        agreement = gm.GradientAgreement(model, ranks=gm.Ranks(model))
        agreement.register_comm_hook(model)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(times):
            x, y = batch_of(generator)
            F.mse_loss(model(x), y).backward()
        found = agreement.step()
        results.append((found.rank_cosine.item(), found.micro_batches.item()))
    return results


def test_under_fsdp2_micro_batches_are_compared(two_ranks):
    answers = two_ranks.run(under_fsdp)
    assert answers[0] == answers[1]
    cosine, expected = answers[0]
    # a deviation of (1 - c²) / sqrt(256) at most
    assert abs(cosine - expected) < 4 / 16


def under_fsdp(rank):
    model = model_of(F64)
    batches = [[batch_of(torch.Generator().manual_seed(10 * r + i), F64) for r in range(2)] for i in range(3)]
    parts = []
    for both in batches:
        loss = sum(F.mse_loss(model(x), y) / 2 for x, y in both)
        parts.append(torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, model.parameters())]))
    pairs = [F.cosine_similarity(parts[i], parts[j], 0) for i, j in ((0, 1), (0, 2), (1, 2))]
    fully_shard(model, mesh=mesh_of((2,), ("dp_shard",)))
    ranks, agreement = gm.Ranks(model), gm.GradientAgreement(model, projections=256)
    for both in batches:
        x, y = both[rank]
        F.mse_loss(model(x), y).backward()
        agreement.add(gm.collect_projections(model, projections=256, reduce=ranks))
    found = agreement.step().cosine.item()
    with pytest.raises(ValueError, match=r"of this rank's shards only, .* leave ranks= out"):
        agreement.add()
    with pytest.raises(ValueError, match=r"of this rank's shards only"):
        gm.GradientAgreement(model, ranks=ranks).add_averaged()
    with pytest.raises(TypeError, match=r"with FSDP2, no rank has the gradient"):
        gm.GradientAgreement(model, ranks=ranks).register_comm_hook(model)
    dist.barrier()
    return found, torch.stack(pairs).mean().item()


def test_the_file_of_the_page_runs_and_prints_what_it_says(tmp_path):
    path = tmp_path / "file.py"
    path.write_text(blocks(PAGE)[-1], encoding="utf-8")
    # findings are logged, too
    assert blocks(PAGE, "text")[0].strip() in scripted(path).splitlines()
