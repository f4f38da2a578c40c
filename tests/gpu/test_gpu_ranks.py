"""Ranks on real devices with NCCL: the same numbers as one process, without a wait, and in CUDA graphs."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import gradiometer as gm
from gradiometer import distributed
from support.oracle import exact
from support.rank_equality import SLACK, assert_equal, expected_of, seen
from support.rank_models import CASES, KINDS, TENSORS, Collectives, alone, mesh_of
from support.rank_pool import RankPool

pytestmark = [
    pytest.mark.gpu,
    # shown, not raised: drivers and NCCL give advice that depends on the machine
    pytest.mark.filterwarnings("default"),
]

DEVICE, BACKENDS = "cuda", "cpu:gloo,cuda:nccl"
# the devices of this machine; a process without a GPU must not query their number
COUNT = torch.cuda.device_count() if torch.cuda.is_available() else 0

of_two = pytest.mark.skipif(COUNT < 2, reason="fewer than two GPUs")


class NoWaits:
    """Turns every operation that CUDA reports as a wait for the device into an error."""

    def __enter__(self):
        self.before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *_):
        torch.cuda.set_sync_debug_mode(self.before)


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
    with NoWaits():
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
    with NoWaits():
        found = distributed.all_reduce_pair(parts, group, 60.0)
    assert torch.equal(found[0], x)
    assert torch.equal(found[1], x[:, :2])
    found, replay = captured(lambda: distributed.all_reduce_pair(parts, group, 60.0))
    x.mul_(3.0)
    replay()
    assert torch.equal(found[0], x)
    assert torch.equal(found[1], x[:, :2])


def captured(function):
    """Return the result of a captured call, and a function that replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # watchdogs of other threads query events during the capture
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = function()

    def replay():
        graph.replay()
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
        BACKENDS,
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )


def collected(rank, kind, size):
    model = KINDS[kind][0](rank, size, torch.float64)
    ranks = gm.Ranks(model)
    gm.collect_grads(model, reduce=ranks)
    with Collectives() as collectives, NoWaits():
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
    assert len(expected) == TENSORS
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
    ranks._calls += rank
    stats = gm.collect_grads(parameters, reduce=ranks)
    with pytest.raises(gm.RankError, match="the ranks made different calls"):
        stats.materialize()
    return stats.columns.isnan().all().item()


@of_two
def test_ranks_that_are_out_of_step(gpu_ranks):
    assert gpu_ranks(2).run(out_of_step, 2) == [True, True]


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
