"""Ranks on real devices with NCCL: the same numbers as one process, without a wait, and in CUDA graphs."""

from __future__ import annotations

import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import gradiometer as gm
from gradiometer import distributed
from support.gpu import DEVICE, REHEARSED, no_waits_on_a_gpu, record
from support.noise_oracle import least_squares
from support.oracle import exact
from support.rank_equality import SLACK, assert_equal, expected_of, seen
from support.rank_models import CASES, KINDS, NUM_TENSORS, Collectives, alone, mesh_of
from support.rank_pool import RankPool

pytestmark = [
    pytest.mark.gpu,
    # shown, not raised: drivers and NCCL give advice that depends on the machine
    pytest.mark.filterwarnings("default"),
]

BACKENDS = "cpu:gloo" if REHEARSED else "cpu:gloo,cuda:nccl"
# the devices of this machine; a process without a GPU must not query their number
COUNT = torch.cuda.device_count() if torch.cuda.is_available() else 0

of_two = pytest.mark.skipif(COUNT < 2, reason="fewer than two GPUs")


# one device: a job of one rank


@pytest.fixture
def one_rank():
    dist.init_process_group(BACKENDS, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded_model():
    mesh = dist.device_mesh.init_device_mesh(DEVICE, (1,), mesh_dim_names=("dp_shard",))
    model = nn.Sequential(nn.Linear(5, 13), nn.GELU(), nn.Linear(13, 3)).to(DEVICE)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    fully_shard(model, mesh=mesh)
    for name, parameter in model.named_parameters():
        parameter.grad = distribute_tensor(grads[name], mesh, [Shard(0)])
    return model, grads


@pytest.mark.usefixtures("one_rank")
def test_a_job_of_one_rank():
    model, grads = sharded_model()
    ranks = gm.Ranks(model)
    gm.collect_grads(model, reduce=ranks)
    with no_waits_on_a_gpu():
        stats = gm.collect_grads(model, reduce=ranks)
    assert_equal([seen(stats)], {name: grad.cpu() for name, grad in grads.items()})
    assert gm.grad_norm(model) == pytest.approx(exact(*[x.cpu() for x in grads.values()]).norm, rel=1e-13)


@pytest.mark.usefixtures("one_rank")
def test_a_replayed_reduction_of_one_rank():
    model, _ = sharded_model()
    ranks = gm.Ranks(model)
    stats, replay = captured(lambda: gm.collect_grads(model, reduce=ranks))
    for factor in (2.0, float("inf")):
        for parameter in model.parameters():
            parameter.grad.to_local().mul_(factor)
        replay()
        again = gm.collect_grads(model, reduce=ranks)
        assert torch.equal(stats.columns, again.columns)
        assert torch.equal(stats.origin, again.origin)


@pytest.mark.usefixtures("one_rank")
def test_nccl_collectives_are_captured_and_do_not_wait():
    group = distributed.group_of(None)
    x = torch.arange(14.0, dtype=torch.float64, device=DEVICE).view(2, 7)
    parts = [(x, "sum"), (x[:, :2], "max")]
    # communicators are created at the first call
    distributed.all_reduce_pair(parts, group, 60.0)
    with no_waits_on_a_gpu():
        found = distributed.all_reduce_pair(parts, group, 60.0)
    assert torch.equal(found[0], x)
    assert torch.equal(found[1], x[:, :2])
    found, replay = captured(lambda: distributed.all_reduce_pair(parts, group, 60.0))
    x.mul_(3.0)
    replay()
    assert torch.equal(found[0], x)
    assert torch.equal(found[1], x[:, :2])


# clipping, skipped steps, copies and the noise scale of one rank


def one_of_several(model):
    """Return an agreement of one rank, which makes the collectives that it would make beside others."""
    ranks = gm.Ranks(model, group=dist.group.WORLD)
    # one rank alone makes none
    ranks.size = 2
    return ranks


def restored(model, grads):
    """Fill the shards of the gradients with these tensors."""
    for name, parameter in model.named_parameters():
        parameter.grad.to_local().copy_(grads[name])


def clipped(grads, max_norm):
    norm = exact(*[x.cpu() for x in grads.values()]).norm
    factor = min(1.0, max_norm / (norm + 1e-6))
    return norm, {name: (x.cpu().double() * factor) for name, x in grads.items()}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("agree", [one_of_several, gm.Ranks])
def test_one_rank_clips_and_does_not_wait(agree):
    model, grads = sharded_model()
    ranks = agree(model)
    gm.clip_grad_norm_(model, 0.5, reduce=ranks)
    restored(model, grads)
    with no_waits_on_a_gpu():
        norm = gm.clip_grad_norm_(model, 0.5, reduce=ranks)
    expected, after = clipped(grads, 0.5)
    assert norm.item() == pytest.approx(expected, rel=1e-13)
    for name, parameter in model.named_parameters():
        # an fp32 factor and product
        found = parameter.grad.to_local().cpu().double()
        torch.testing.assert_close(found, after[name], rtol=2**-22, atol=1e-300)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", ["norm", "weight norm", "per tensor", "z-score"])
def test_a_captured_clip_of_one_rank(kind):
    model, grads = sharded_model()
    ranks = one_of_several(model)
    clip = {
        "norm": lambda: 0.5,
        "weight norm": lambda: gm.WeightNormClip(model, max_ratio=0.01),
        "per tensor": lambda: gm.PerTensorClip(model, warmup_steps=1),
        "z-score": lambda: gm.ZScoreClip(warmup_steps=1, z_threshold=0.5, device=DEVICE),
    }[kind]()
    _, replay = captured(lambda: gm.collect_and_clip_(model, clip, reduce=ranks))
    twin = copy.deepcopy(clip)
    for size in (1.0, 3.0, 0.5):
        scaled = {name: x * size for name, x in grads.items()}
        restored(model, scaled)
        replay()
        found = [parameter.grad.to_local().clone() for parameter in model.parameters()]
        restored(model, scaled)
        gm.collect_and_clip_(model, twin, reduce=ranks)
        for x, parameter in zip(found, model.parameters(), strict=True):
            assert torch.equal(x, parameter.grad.to_local())
        if kind == "norm":
            for x, y in zip(found, clipped(scaled, 0.5)[1].values(), strict=True):
                torch.testing.assert_close(x.cpu().double(), y, rtol=2**-22, atol=1e-300)
        else:
            for x, y in zip(clip.buffers(), twin.buffers(), strict=True):
                assert torch.equal(x, y)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("agree", [one_of_several, gm.Ranks])
@pytest.mark.parametrize("bad", [1e6, float("nan"), 1.0])
def test_a_captured_consensus_skips(bad, agree):
    model, grads = sharded_model()
    recorder = gm.Recorder(model, ranks=agree(model), skip_above=100.0, capacity=8)

    def step():
        recorder.record()
        return recorder.skip_step

    step()
    with no_waits_on_a_gpu():
        step()
    skip, replay = captured(step)
    recorder.advance()
    for value in (1.0, bad, 1.0):
        restored(model, grads)
        next(model.parameters()).grad.to_local().view(-1)[0] = value
        replay()
        assert bool(skip) == (value != 1.0)
        recorder.advance()
    assert [step.skipped for step in recorder.read()[-3:]] == [False, bad != 1.0, False]


@pytest.mark.usefixtures("one_rank")
def test_a_captured_reduction_makes_its_collectives():
    model, grads = sharded_model()
    ranks = one_of_several(model)
    gm.collect_grads(model, reduce=ranks)
    with Collectives() as collectives, no_waits_on_a_gpu():
        stats = gm.collect_grads(model, reduce=ranks)
    # a sum and a maximum
    assert len(collectives.calls) == 2
    assert_equal([seen(stats)], {name: grad.cpu() for name, grad in grads.items()})
    stats, replay = captured(lambda: gm.collect_grads(model, reduce=ranks))
    for size in (1.0, -3.0):
        restored(model, {name: grad * size for name, grad in grads.items()})
        replay()
        assert_equal([seen(stats)], {name: (grad * size).cpu() for name, grad in grads.items()})


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("agree", [one_of_several, gm.Ranks])
def test_one_rank_has_no_copies_that_differ(agree):
    model = nn.Linear(5, 13).to(DEVICE)
    ranks = agree(model)
    assert gm.check_replicas(model, reduce=ranks) == {}
    stats = gm.collect_weights(model, fingerprint=True, reduce=ranks)
    with no_waits_on_a_gpu():
        stats = gm.collect_weights(model, fingerprint=True, reduce=ranks)
    assert not stats.diverged.any()
    whole = {name: p.detach().cpu() for name, p in model.named_parameters()}
    assert torch.equal(stats.fingerprints.cpu(), gm.collect(whole, fingerprint=True).fingerprints)


@pytest.mark.usefixtures("one_rank")
def test_the_noise_scale_of_one_rank():
    model = nn.Linear(3, 2).to(DEVICE, torch.float64)
    ranks = gm.Ranks(model)
    noise = gm.NoiseScale(4, decay=0.0, ranks=ranks, device=DEVICE)
    x = 1 + torch.randn(3, 4, 3, dtype=torch.float64, device=DEVICE)

    def step():
        model.zero_grad(set_to_none=False)
        for batch in x:
            (model(batch) - 4).square().mean().div(3).backward()
            noise.add(gm.collect_grads(model))
        return noise.step()

    _, replay = captured(step)
    replay()
    each = [torch.autograd.grad((model(batch) - 4).square().mean(), list(model.parameters())) for batch in x]
    sums = torch.stack([torch.cat([g.flatten() for g in grads]) for grads in each]).cumsum(0).cpu()
    signal, spread = least_squares(sums.square().sum(1), 2, 1, 3)
    # the condition number of the least squares is below 1e4 n²
    close = {"rtol": 1e-9, "atol": 1e-9 * float(signal.abs())}
    torch.testing.assert_close(noise.squared_norm.cpu(), signal, **close)
    torch.testing.assert_close(noise.trace.cpu(), spread * 4, **close)


def captured(function):
    """Return the result of a captured call, and a function that replays it."""
    # watchdogs of other threads query events during the capture
    graph, result = record(function, errors="thread_local")

    def replay():
        graph.replay()
        if not REHEARSED:
            torch.cuda.synchronize()

    return result, replay


# several devices: a process for each


@pytest.fixture(scope="module")
def gpu_ranks(tmp_path_factory):
    pools = {}

    def of(size):
        if size not in pools:
            pools[size] = RankPool(size)
            pools[size].run(start, size, str(tmp_path_factory.mktemp("ranks") / "store"))
        return pools[size]

    yield of
    for pool in pools.values():
        pool.close()


def start(rank, size, store):
    """Leave the CPU job and join one on GPUs."""
    dist.destroy_process_group()
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    torch.set_default_device(torch.device(DEVICE, rank) if DEVICE == "cuda" else DEVICE)
    dist.init_process_group(
        BACKENDS, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )


def collected(rank, kind, size):
    model = KINDS[kind][0](rank, size, torch.float64)
    ranks = gm.Ranks(model)
    gm.collect_grads(model, reduce=ranks)
    with Collectives() as collectives, no_waits_on_a_gpu():
        stats = gm.collect_grads(model, reduce=ranks)
    assert stats.columns.device.type == DEVICE
    return seen(stats), len(collectives.calls)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        pytest.param(kind, size, marks=pytest.mark.skipif(size > COUNT, reason=f"fewer than {size} GPUs"))
        for kind, size in CASES
    ],
)
def test_gradients_are_those_of_one_process(gpu_ranks, kind, size):
    found = gpu_ranks(size).run(collected, kind, size)
    with torch.device(DEVICE):
        expected = expected_of(alone(torch.float64))
    assert len(expected) == NUM_TENSORS
    assert_equal([one for one, _ in found], {name: grad.cpu() for name, grad in expected.items()}, SLACK)
    assert {calls for _, calls in found} == {2 + KINDS[kind][2]}


def shards(size):
    mesh = mesh_of((size,), ("dp_shard",))
    parameters = {}
    for i in range(3):
        whole = torch.arange(float(7 * i + 1), device=DEVICE)
        parameter = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        parameter.grad = distribute_tensor(whole, mesh, [Shard(0)])
        parameters[str(i)] = parameter
    return parameters, gm.Ranks(parameters)


def replayed(_rank, size):
    parameters, ranks = shards(size)
    stats, replay = captured(lambda: gm.collect_grads(parameters, reduce=ranks))
    found = []
    for factor in (1.0, 2.0):
        for parameter in parameters.values():
            parameter.grad.to_local().mul_(factor)
        replay()
        found.append(seen(stats))
    return found


@of_two
def test_a_replayed_reduction(gpu_ranks):
    for factor, found in zip((1.0, 2.0), zip(*gpu_ranks(2).run(replayed, 2), strict=True), strict=True):
        assert_equal(list(found), {str(i): factor * torch.arange(float(7 * i + 1)) for i in range(3)})


def out_of_step(rank, size):
    """One rank has made one more reduction alone: no rank waits for it, and the sums are refused."""
    parameters, ranks = shards(size)
    ranks._calls.number += rank
    stats = gm.collect_grads(parameters, reduce=ranks)
    with pytest.raises(gm.RankError, match="the ranks made different calls"):
        stats.materialize()
    return stats.columns.isnan().all().item()


@of_two
def test_ranks_that_are_out_of_step(gpu_ranks):
    assert gpu_ranks(2).run(out_of_step, 2) == [True, True]


def copies_that_differ(rank, size):
    model = nn.Linear(4, 3).to(DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    same = gm.check_replicas(model)
    if rank == size - 1:
        with torch.no_grad():
            model.bias[1] = 2.0
    return same, gm.check_replicas(model)


@of_two
def test_the_rank_whose_copy_differs_is_named(gpu_ranks):
    # of two versions, that of the lowest rank counts as that of most
    assert gpu_ranks(2).run(copies_that_differ, 2) == [({}, {"bias": (1,)})] * 2


def compiled(_rank, size):
    parameters, ranks = shards(size)
    step = torch.compile(lambda: gm.collect_grads(parameters, reduce=ranks), fullgraph=True)
    found = [seen(step()) for _ in range(2)]
    assert repr(found[0]) == repr(found[1])
    return found[0]


@pytest.mark.compiles
@of_two
def test_a_compiled_reduction(gpu_ranks):
    found = gpu_ranks(2).run(compiled, 2, timeout=300.0)
    assert_equal(found, {str(i): torch.arange(float(7 * i + 1)) for i in range(3)})
