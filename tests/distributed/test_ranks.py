"""`gradiometer.Ranks`: arguments and errors; reduced statistics behave like those of one process."""

from __future__ import annotations

import copy
import gc
import json
import math
import pickle
import threading
import weakref
from contextlib import closing

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils import _pytree as pytree

import gradiometer as gm
from gradiometer import distributed
from gradiometer.columns.health import HEALTH
from support.rank_pool import RankPool, free_port, join_over_tcp

LAYERS = 4


def parameters(*, cut=None, part=slice(None)):
    """Return parameters with gradients: some vanish, explode or are 0, and one has none."""
    torch.manual_seed(0)
    found = {}
    for i, factor in enumerate([1.0, 1e-9, 1e3, 0.0]):
        parameter = torch.nn.Parameter(torch.randn(4, 6))
        parameter.grad = factor * torch.randn(4, 6)
        found[f"layer.{i}.weight"] = parameter
    found["head.bias"] = torch.nn.Parameter(torch.ones(4))
    if cut is not None:
        mesh, rank = cut
        for name, whole in list(found.items()):
            half = slice(2 * rank, 2 * rank + 2)
            shard = torch.nn.Parameter(DTensor.from_local(whole.detach()[half], mesh, [Shard(0)]))
            if whole.grad is not None:
                shard.grad = DTensor.from_local(whole.grad[half], mesh, [Shard(0)])
            found[name] = shard
    return dict(list(found.items())[part])


# one process


def test_a_job_of_one_rank():
    own = parameters()
    ranks = gm.Ranks(own)
    assert repr(ranks) == "<Ranks: rank 0 of 1, 5 tensors, 5 of them here>"
    assert (ranks.rank, ranks.size, ranks.group) == (0, 1, None)
    assert ranks.names == ranks.local_names == tuple(own)
    assert ranks.where("head.bias", 0) == "rank 0"
    alone, reduced = gm.collect_grads(own), gm.collect_grads(own, reduce=ranks)
    assert reduced.reduce() is reduced
    assert reduced.names == tuple(own)
    assert alone.names == tuple(own)[:-1]
    assert reduced.materialize().to_dict()["tensors"] == alone.materialize().to_dict()["tensors"]
    assert reduced.local.columns.equal(alone.columns)
    for name in HEALTH:
        assert getattr(reduced, name).equal(getattr(alone, name)), name
    assert alone.reduce() is alone


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"timeout": 0}, ValueError, r"timeout=0\): timeout must be a number of seconds, above 0"),
        ({"timeout": "60"}, ValueError, "timeout='60'"),
        ({"timeout": True}, ValueError, "timeout=True"),
        ({"timeout": float("nan")}, ValueError, "timeout=nan"),
        ({"timeout": float("inf")}, ValueError, "timeout=inf"),
        ({"shards": ["layer"]}, TypeError, "shards must map regular expressions to groups, got list"),
        ({"shards": {"layer(": None}}, ValueError, r"'layer\(' is not a regular expression: missing \)"),
        ({"shards": {3: None}}, ValueError, "3 is not a regular expression"),
        (
            {"shards": {"expert": None}},
            ValueError,
            "'expert' matches no tensor of any rank; available: 'layer.0.weight', .* ...$",
        ),
        ({"group": "world"}, gm.RankError, "there is no process group; call torch.distributed.init_process_"),
    ],
)
def test_arguments_that_cannot_be(arguments, kind, said):
    with pytest.raises(kind, match=said):
        gm.Ranks(parameters(), **arguments)


def test_names_that_stand_twice_are_refused():
    pairs = [("a", torch.ones(1)), ("a", torch.ones(2))]
    with pytest.raises(ValueError, match="Ranks: two tensors have the name 'a'"):
        gm.Ranks(pairs)


def test_what_is_copied_with_a_model_stays_itself():
    ranks = gm.Ranks(parameters())
    assert copy.deepcopy({"ranks": ranks})["ranks"] is ranks
    assert copy.copy(ranks) is ranks
    with pytest.raises(TypeError, match=r"gm\.Ranks belongs to a process group and cannot be pickled"):
        pickle.dumps(ranks)


@pytest.mark.parametrize("reduce", [3, "yes", gm.Ranks])
def test_reduce_takes_nothing_else(reduce):
    said = r"collect_grads: reduce must be True, False or gm.Ranks\(model\), got"
    with pytest.raises(TypeError, match=said):
        gm.collect_grads(parameters(), reduce=reduce)


# two ranks


def values(stats):
    """Return the contents of a report, except where it comes from."""
    report = stats.materialize()
    told = report.to_dict()
    for name in ("is_local", "is_reduced", "ranks"):
        told.pop(name)
    return told


def halves(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    own = parameters(cut=(mesh, rank))
    ranks = gm.Ranks(own, timeout=30)
    stats = gm.collect_grads(own, reduce=ranks)
    assert stats.reduce() is stats
    assert stats.reduce(ranks) is stats
    alone = gm.collect_grads(parameters())
    assert stats.total_norm.item() == pytest.approx(alone.total_norm.item(), rel=1e-13)
    again = gm.collect_grads(own).reduce(ranks)
    assert again.columns.equal(stats.columns)
    rules = {"first": r"layer\.[01]", "all": r".", "none": ["head.bias"]}
    smooth = gm.EMA(LAYERS + 1, decay=0.5)
    pairs = {
        "stats": (stats, alone),
        "group": (stats.group(rules), alone.group(rules | {"none": []})),
        "by_module": (stats.by_module(1), alone.by_module(1)),
        "merge": (stats.merge(stats), alone.merge(alone)),
    }
    assert smooth(stats.norm).value.equal(stats.norm)
    seen = {key: [values(x) for x in pair] for key, pair in pairs.items()}
    health = {name: [getattr(x, name).item() for x in (stats, alone)] for name in HEALTH}
    pending = gm.materialize_async({"grads": stats, "local": stats.local})
    found = pending.result()
    leaves, spec = pytree.tree_flatten(stats)
    spec = pytree.treespec_loads(json.loads(json.dumps(pytree.treespec_dumps(spec))))
    back = pytree.tree_unflatten(leaves, spec)
    return {
        "repr": (repr(ranks), repr(stats), ranks.where("layer.0.weight", 1)),
        "seen": seen,
        "health": health,
        "names": (stats.names, stats.origin.tolist(), found["grads"].names, len(found["local"])),
        "local": found["local"]["layer.0.weight"].numel,
        "back": (back.names, back.origin.tolist(), back.local.names),
        "sharding": back.local.sharding == stats.local.sharding,
    }


def close_to(found, expected):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            close_to(found[key], value)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-15)
    else:
        assert found == expected


def test_reduced_statistics_do_what_those_of_one_process_do(two_ranks):
    for rank, told in enumerate(two_ranks.run(halves)):
        assert told["repr"] == (
            f"<Ranks: rank {rank} of 2, 5 tensors, 5 of them here>",
            "<TensorStats: 5 tensors of all ranks, on cpu; materialize() reads them>",
            "rank 1, dp 1 of 2",
        )
        for of_ranks, alone in (*told["seen"].values(), *told["health"].values()):
            close_to(of_ranks, alone)
        names = tuple(parameters())
        # the last parameter has no gradient, so it has no row in a report
        assert told["names"] == (names, [-1.0] * LAYERS + [-2.0], names[:-1], LAYERS)
        assert told["local"] == 12
        assert told["back"] == (names, told["names"][1], names[:-1])
        assert told["sharding"]


def absent_everywhere(rank):
    own = {"a": torch.nn.Parameter(torch.ones(2)), "b": torch.nn.Parameter(torch.ones(0))}
    if rank:
        own["b"].grad = torch.ones(0)
    ranks = gm.Ranks(own | {"c": torch.ones(1)}, shards={".": None}, timeout=30)
    stats = gm.collect_grads(own, reduce=ranks)
    report = stats.materialize()
    return stats.names, stats.origin.tolist(), report.names, report.health, stats.health.item()


def test_a_row_without_elements_is_there_and_one_that_nobody_has_is_not(two_ranks):
    for told in two_ranks.run(absent_everywhere):
        assert told == (("a", "b", "c"), [-2.0, -1.0, -2.0], ("b",), 1.0, 1.0)


def experts_that_are_sharded(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    expert = rank // 2
    whole = torch.arange(1.0, 4.0, dtype=torch.float64) + 10 * expert
    own = {"expert": distribute_tensor(whole, mesh["dp"], [Shard(0)]), "router": torch.ones(5)}
    ranks = gm.Ranks(own, shards={"expert": mesh["ep"]}, timeout=30)
    stats = gm.collect_weights(own, reduce=ranks)
    copies = gm.collect_weights(own, reduce=gm.Ranks(own, timeout=30))
    return stats.numel.tolist(), stats.sumsq.tolist(), ranks.where("expert", rank), copies.numel.tolist()


def test_experts_of_one_name_that_are_sharded_themselves_all_count(four_ranks):
    sumsq = sum(x * x for x in (1, 2, 3, 11, 12, 13))
    for rank, (numel, squares, where, copies) in enumerate(four_ranks.run(experts_that_are_sharded)):
        assert (numel, squares) == ([6.0, 5.0], [sumsq, 5.0])
        assert where == f"rank {rank}, expert {rank // 2} of 2, dp {rank % 2} of 2"
        # without `shards`, the experts of other ranks count as copies
        assert copies == [3.0, 5.0]


def a_nan_in_one_copy(rank):
    own = {"a": torch.nn.Parameter(torch.ones(3)), "b": torch.nn.Parameter(torch.ones(2))}
    for parameter in own.values():
        parameter.grad = torch.full_like(parameter, 2.0)
    if rank == 1:
        own["b"].grad[0] = math.nan
    stats = gm.collect_grads(own, reduce=gm.Ranks(own, timeout=30), skip_nonfinite=True)
    report = stats.materialize()
    finite = gm.check_finite(own, reduce=True)
    by_group = stats.group({"all": "."})
    return (
        (stats.found_inf.item(), bool(stats.skipped), by_group.found_inf.item()),
        (report.ranks, report.nan, report.found_inf, report.skipped, report["b"].n_nan),
        (finite.has_issues, finite.nan_grads),
        "rank" in str(report) and "b" in str(finite),
    )


def test_a_nan_in_a_copy_that_is_not_counted_is_not_overlooked(two_ranks):
    for told in two_ranks.run(a_nan_in_one_copy):
        assert told == ((1.0, True, 1.0), ({"b": 1}, ["b"], True, True, 0), (True, ["b"]), True)


def shards_of_dtensors(rank):
    mesh = init_device_mesh("cpu", (2,))
    own = parameters(cut=(mesh, rank))
    with pytest.raises(TypeError, match=r"group must be a process group, a device mesh or None .*, got str"):
        gm.Ranks(own, group="world", timeout=30)
    alone = dist.new_group([0])
    if rank == 0:
        assert gm.Ranks(parameters(), group=alone).size == 1
        with pytest.raises(gm.RankError, match="is sharded into 2 parts, but the ranks hold only 1 of them"):
            gm.Ranks(own, group=alone)
    else:
        with pytest.raises(gm.RankError, match="rank 1 is not in this process group"):
            gm.Ranks(own, group=alone)


def test_arguments_that_cannot_be_among_ranks(two_ranks):
    two_ranks.run(shards_of_dtensors)


def beside(_):
    side = distributed.side_group([0, 1], 30.0)
    found = []

    def background(group):
        for i in range(200):
            merged = distributed.all_reduce(torch.full((3,), float(i)), "sum", group, 30.0)
            found.append(merged[0].item())

    thread = threading.Thread(target=background, args=(side,))
    thread.start()
    own = parameters()
    ranks = gm.Ranks(own, timeout=30)
    norms = {gm.grad_norm(own, reduce=ranks) for _ in range(100)}
    thread.join()
    reference = weakref.ref(side)
    distributed.close(side)
    del side, thread
    gc.collect()
    return (
        found == [2.0 * i for i in range(200)],
        list(norms) == [pytest.approx(gm.grad_norm(own), rel=1e-13)],
        reference() is None,
    )


def test_a_side_group_works_beside_the_group_of_all(two_ranks):
    assert two_ranks.run(beside) == [(True, True, True)] * 2


def compiled_on_one(rank):
    own = parameters()
    # the other rank waits while this one compiles
    ranks = gm.Ranks(own, timeout=60)

    def collect():
        return gm.collect_grads(own, reduce=ranks)

    compiled = torch.compile(collect, backend="eager", fullgraph=True)
    step = compiled if rank == 0 else collect
    found = [step().total_norm.item() for _ in range(3)] == [pytest.approx(gm.grad_norm(own), rel=1e-13)] * 3
    # if one rank fails, the other's graph raises nothing, but its numbers are refused
    if rank == 1:
        with pytest.raises(ValueError, match="inv_scale must be a positive"):
            gm.collect_grads(own, reduce=ranks, inv_scale=-1.0)
    else:
        with pytest.raises(gm.RankError, match="the ranks made different calls"):
            compiled().materialize()
    return found


def test_a_rank_in_a_compiled_function_meets_one_outside(two_ranks):
    """One rank may have exceeded its recompile limit, and run this step in eager mode."""
    assert two_ranks.run(compiled_on_one) == [True, True]


# four ranks


def over_meshes(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    three = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    own = {"w": torch.full((3,), float(rank + 1))}
    found = []
    for group in (None, dist.group.WORLD, mesh, mesh["tp"], mesh["dp"], three["b", "c"], three["b", "c"]):
        ranks = gm.Ranks(own, group=group, shards={"w": group}, timeout=30)
        total = gm.total_norm(own, reduce=ranks).item() ** 2 / 3
        found.append((ranks.rank, ranks.size, ranks.global_ranks, round(total)))
    return found


def test_a_group_may_be_a_mesh_of_any_dimensions(four_ranks):
    for rank, found in enumerate(four_ranks.run(over_meshes)):
        dp, tp = divmod(rank, 2)
        row, column = [2 * dp, 2 * dp + 1], [tp, tp + 2]
        squares = {r: (r + 1) ** 2 for r in range(4)}
        of_all = (rank, 4, [0, 1, 2, 3], 30)
        of_row = (tp, 2, row, sum(squares[r] for r in row))
        of_column = (dp, 2, column, sum(squares[r] for r in column))
        assert found == [of_all, of_all, of_all, of_row, of_column, of_row, of_row]


def over_a_mesh_of_a_bound_world(rank):
    mesh = DeviceMesh("cpu", [[0, 1]])
    world = dist.group.WORLD
    world.bound_device_id = device = torch.device("cuda", 0)  # as init_process_group(device_id=...) does
    try:
        with pytest.MonkeyPatch.context() as patch:
            # NCCL then splits the world's communicator, which waits for ranks 2 and 3 for ever
            patch.setattr(dist.distributed_c10d, "_get_split_source", lambda _: pytest.fail("split"))
            if rank > 1:
                with pytest.raises(gm.RankError, match=f"rank {rank} is not in the group of ranks 0, 1"):
                    gm.Ranks({"w": torch.ones(3)}, group=mesh, timeout=30)
                return None
            ranks = gm.Ranks({"w": torch.ones(3)}, group=mesh, shards={"w": mesh}, timeout=30)
            squares = gm.total_norm({"w": torch.ones(3)}, reduce=ranks).item() ** 2
            return world.bound_device_id == device, ranks.global_ranks, round(squares)
    finally:
        world.bound_device_id = None


def test_only_the_ranks_of_a_mesh_create_its_group_in_a_world_bound_to_a_device(four_ranks):
    assert four_ranks.run(over_a_mesh_of_a_bound_world) == [(True, [0, 1], 6)] * 2 + [None] * 2


def outside_of_a_mesh(rank):
    mesh = DeviceMesh("cpu", [0])
    if rank == 1:
        with pytest.raises(gm.RankError, match="rank 1 is not in the group of ranks 0; only its members"):
            gm.Ranks({"w": torch.ones(3)}, group=mesh, timeout=30)
    return rank


def test_a_rank_outside_of_a_mesh_is_refused(two_ranks):
    assert two_ranks.run(outside_of_a_mesh) == [0, 1]


# process groups that are destroyed and made again


def again(rank, ports):
    own = parameters()
    found = []
    for port in ports:
        old = weakref.ref(dist.group.WORLD)
        kept = gm.Ranks(own, timeout=30)
        # an implicit agreement, without gm.Ranks: its cache must not outlive the group
        first = gm.collect_grads(own, reduce=True)
        dist.destroy_process_group()
        gc.collect()
        assert old() is None
        assert gm.collect_grads(own, reduce=True).origin is None
        with pytest.raises(gm.RankError, match=r"the process group of these gm\.Ranks was destroyed"):
            gm.collect_grads(own, reduce=kept)
        join_over_tcp(rank, 2, port)
        with pytest.raises(gm.RankError, match=r"the process group of these gm\.Ranks was destroyed"):
            gm.collect_grads(own, reduce=kept)
        # if only one rank had kept a cache of the old group, the other would wait
        second = gm.collect_grads(own if rank else parameters(), reduce=True)
        found.append(first.columns.equal(second.columns))
    return found


def test_a_new_world_begins_anew():
    with closing(RankPool(2)) as pool:
        assert pool.run(again, [free_port(), free_port()]) == [[True, True]] * 2
