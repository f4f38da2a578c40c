"""Statistics of several ranks equal those of one process, for each way to share a model."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import gradiometer as gm
from gradiometer.columns import TENSORS
from support.rank_equality import SLACK, assert_equal, expected_of, seen
from support.rank_models import (
    CASES,
    CLASSES,
    KINDS,
    NUM_TENSORS,
    WORDS,
    Collectives,
    alone,
    full,
    grads_of,
    held,
    mesh_of,
    names_and_parameters,
    whole,
)
from support.rank_pool import pool_of

every_way = pytest.mark.parametrize(("kind", "size"), CASES, ids=[f"{kind}, {size}" for kind, size in CASES])


@pytest.fixture
def pool(request, size):
    return pool_of(request, size)


@functools.cache
def found_of(pool, kind, size, dtype=torch.float64):
    """Return each rank's results; several tests check different aspects of them."""
    return pool.run(collected, kind, size, dtype, "reduce=ranks")


def build(kind, rank, size, dtype=torch.float64):
    return KINDS[kind][0](rank, size, dtype)


def is_partial(tensor):
    return isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements)


# gradients of a step


def collected(rank, kind, size, dtype, how):
    model = build(kind, rank, size, dtype)
    ranks = gm.Ranks(model)
    with Collectives() as collectives:
        if how == "reduce=ranks":
            stats = gm.collect_grads(model, reduce=ranks)
        elif how == "reduce=True":
            stats = gm.collect_grads(model, reduce=True)
        else:
            stats = gm.collect_grads(model).reduce()
    if how != "reduce=ranks":
        # the agreement of the first call serves the later ones too
        with Collectives() as collectives:
            again = gm.collect_grads(model, reduce=True)
        assert torch.equal(again.columns, stats.columns)
    found = seen(stats)
    found["collectives"] = collectives.calls
    grads = grads_of(model)
    found["full"] = {name: full(grad) for name, grad in grads.items()}
    found["partial"] = [name for name, grad in grads.items() if is_partial(grad)]
    return found


@every_way
def test_gradients_are_those_of_one_process(pool, kind, size):
    found = found_of(pool, kind, size)
    model = alone(torch.float64)
    assert len(list(model.parameters())) == NUM_TENSORS
    assert_equal(found, expected_of(model), SLACK)
    report = gm.collect_grads(model).materialize()
    for one in found:
        assert one["flags"] == [int(row.flags) for row in report.rows()]
        assert one["total_norm"] == pytest.approx(report.total_norm, rel=SLACK)
        assert one["ranks"] == {}
        assert set(one["origin"].values()) == {-1}


@every_way
def test_two_small_collectives_and_nothing_is_gathered(pool, kind, size):
    for one in found_of(pool, kind, size):
        *before, sums, tops = one["collectives"]
        assert sums == ("allreduce_", [((NUM_TENSORS, TENSORS.num_sums), torch.float64)])
        shape = (NUM_TENSORS + 8, TENSORS.width - TENSORS.num_sums + 1)
        assert tops == ("allreduce_", [(shape, torch.float64)])
        # the partial gradients of normalization weights are added up first, one all-reduce each
        assert [name for name, _ in before] == ["allreduce_"] * KINDS[kind][2]


@every_way
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.deep), torch.bfloat16])
def test_in_other_dtypes_they_are_those_of_the_gathered_gradients(pool, kind, size, dtype):
    found = found_of(pool, kind, size, dtype)
    tensors = {}
    for one in reversed(found):
        tensors |= one["full"]
    ordered = {name: tensors[name] for name, _ in whole(dtype).named_parameters()}
    # partial gradients are added up in that dtype, in an order that depends on how many are reduced at once
    assert_equal(found, ordered, slacks=dict.fromkeys(found[0]["partial"], 8 * torch.finfo(dtype).eps))


@pytest.mark.parametrize("how", ["reduce=True", "reduce()"])
@pytest.mark.parametrize(("kind", "size"), [case for case in CASES if KINDS[case[0]][2] == 0])
def test_ranks_agree_as_they_come(pool, kind, size, how):
    found = pool.run(collected, kind, size, torch.float64, how)
    assert_equal(found, expected_of(alone(torch.float64)), SLACK)
    assert all(len(one["collectives"]) == 2 for one in found)


def partial_gradients(rank, size):
    model = build("TP", rank, size)
    found = seen(gm.collect_grads(model, reduce=True))
    # the gradient itself stays partial
    assert is_partial(model.norm.weight.grad)
    with pytest.raises(TypeError, match=r"norm\.weight.*not yet reduced.*gm\.Ranks"):
        gm.collect_grads(model)
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_summands_are_added_up_or_refused_by_name(pool, size):
    assert_equal(pool.run(partial_gradients, size), expected_of(alone(torch.float64)), SLACK)


# further cases


def weights(rank, kind, size):
    model = build(kind, rank, size)
    with torch.no_grad():
        for _, parameter in names_and_parameters(model):
            parameter.grad = None
    ranks = gm.Ranks(model)
    found = [seen(gm.collect_weights(model, reduce=reduce)) for reduce in (ranks, True)]
    found.append(seen(gm.collect_weights(model).reduce()))
    assert repr(found[1:]) == repr(found[:-1])
    # no parameter has a gradient: no rows in a report, and no rank waits
    assert gm.collect_grads(model, reduce=ranks).materialize().names == ()
    assert gm.grad_norm(model, empty=None) is None
    return found[0]


@every_way
def test_weights_are_those_of_one_process(pool, kind, size):
    tensors = dict(whole(torch.float64).named_parameters())
    assert_equal(pool.run(weights, kind, size), tensors)


def scaled(rank, kind, size, inv_scale):
    model = build(kind, rank, size)
    stats = gm.collect_grads(model, reduce=True, inv_scale=inv_scale, skip_nonfinite=True)
    with torch.no_grad():
        for grad in grads_of(model).values():
            grad.mul_(inv_scale)
    assert stats.skip_nonfinite
    # exact because of powers of two, partial sums too
    assert torch.equal(stats.columns, gm.collect_grads(model, reduce=True).columns)
    norms = [gm.grad_norm(model, reduce=True), gm.grad_norm(model, reduce=gm.Ranks(model))]
    if KINDS[kind][2] == 0 and "pipeline" not in kind:
        norms.append(gm.total_norm(grads_of(model), reduce=True).item())
    return norms


@every_way
def test_norms_and_scales(pool, kind, size):
    expected = gm.grad_norm(alone(torch.float64)) / 1024
    for norms in pool.run(scaled, kind, size, 1 / 1024):
        assert norms == pytest.approx([expected] * len(norms), rel=SLACK)


# (kind, ranks that each set one element, the first of them that counts its part)
PLANTED = [
    ("FSDP2", 4, (3,), 3, "rank 3, dp_shard 3 of 4"),
    ("FSDP2", 4, (1, 2), 1, "rank 1, dp_shard 1 of 4"),
    # ranks 2 and 3 hold copies of the parts of ranks 0 and 1
    ("HSDP", 4, (1, 3), 1, "rank 1, dp_shard 1 of 2"),
    ("FSDP2 x TP", 4, (2,), 2, "rank 2, dp_shard 1 of 2, tp 0 of 2"),
    ("FSDP2 x TP", 4, (0, 3), 0, "rank 0, dp_shard 0 of 2, tp 0 of 2"),
    ("pipeline x FSDP2", 4, (1,), 1, "rank 1, dp_shard 1 of 2"),
    ("DDP", 4, (0, 1, 2, 3), 0, "rank 0"),
    ("TP", 2, (1,), 1, "rank 1, tp 1 of 2"),
]


def plant(rank, kind, size, places, name, value):
    model = build(kind, rank, size)
    grads = grads_of(model)
    before = {name: held(grad).clone() for name, grad in grads.items()}
    if rank in places:
        held(grads[name]).view(-1)[-1] = value
    ranks = gm.Ranks(model)
    stats = gm.collect_grads(model, reduce=ranks)
    found = seen(stats)
    found["found_inf"] = stats.found_inf.item()
    found["local"] = dict(zip(stats.local.names, stats.local.n_nonfinite.tolist(), strict=True))
    found["where"] = ranks.where(name, found["ranks"][name])
    assert all(torch.equal(held(grads[n]), x) for n, x in before.items() if n != name)
    return found


@pytest.mark.parametrize("value", [math.nan, math.inf, pytest.param(-math.inf, marks=pytest.mark.deep)])
@pytest.mark.parametrize(("kind", "size", "places", "first", "where"), PLANTED)
def test_what_is_not_finite_is_counted_once_and_its_rank_is_named(
    pool, kind, size, places, first, where, value
):
    # each rank of the first pipeline stage has a part of it
    name = "layers.0.up.weight"
    found = pool.run(plant, kind, size, places, name, value)
    copies = {"DDP": 4, "HSDP": 2}.get(kind, 1)
    column = {"nan": "n_nan", "inf": "n_posinf", "-inf": "n_neginf"}[str(value)]
    expected = expected_of(alone(torch.float64))[name].numel()
    for rank, one in enumerate(found):
        row = dict(zip(TENSORS.index, one["columns"][name], strict=True))
        assert row["numel"] == expected
        assert row[column] == len(places) / copies
        assert sum(row[other] for other in ("n_nan", "n_posinf", "n_neginf")) == len(places) / copies
        assert one["ranks"] == {name: first}
        assert one["origin"] == {other: first if other == name else -1 for other in one["columns"]}
        assert one["where"] == where
        assert one["found_inf"] == 1
        assert {n for n, count in one["local"].items() if count} == ({name} if rank in places else set())
        assert repr(one["columns"]) == repr(found[0]["columns"])
        assert math.isnan(one["total_norm"]) if math.isnan(value) else one["total_norm"] == math.inf


# ranks without some tensors


def without(rank, kind, size, lacking, frozen):
    """``lacking``: rank -> parts of names whose gradients are missing there; ``frozen``: missing on each."""
    model = build(kind, rank, size)
    ranks = gm.Ranks(model)
    for name, parameter in names_and_parameters(model):
        if frozen and frozen in name:
            parameter.requires_grad_(requires_grad=False)
            parameter.grad = None
        elif any(part in name for part in lacking.get(rank, ())):
            parameter.grad = None
    stats = gm.collect_grads(model, reduce=ranks)
    assert stats.names == ranks.names
    again = gm.collect_grads(model).reduce()
    assert torch.equal(again.columns, stats.columns)
    found = seen(stats)
    found["shards"] = {name: held(grad) for name, grad in grads_of(model).items()}
    return found


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_frozen_parameters_have_no_row(four_ranks, kind):
    found = four_ranks.run(without, kind, 4, {}, "layers.0")
    expected = expected_of(alone(torch.float64))
    assert_equal(found, {name: grad for name, grad in expected.items() if "layers.0" not in name}, SLACK)
    for one in found:
        assert one["columns"]["layers.0.up.weight"] == [0.0] * TENSORS.width
        assert one["origin"]["layers.0.up.weight"] == -2


@pytest.mark.parametrize(
    "lacking",
    [
        {0: ["layers.1"]},
        {1: ["layers.1", "embed"], 2: ["layers.1"]},
        {2: [""]},
        {rank: [""] for rank in range(4)},
    ],
    ids=["first", "some", "all of one", "all"],
)
def test_a_rank_without_gradients_adds_nothing_and_nobody_waits(four_ranks, lacking):
    found = four_ranks.run(without, "FSDP2", 4, lacking, "")
    shards = {}
    for one in found:
        for name, shard in one["shards"].items():
            shards.setdefault(name, []).append(shard.flatten())
    names = [name for name, _ in whole(torch.float64).named_parameters() if name in shards]
    assert_equal(found, {name: torch.cat(shards[name]) for name in names})


def several(rank):
    """One rank has no model, and one has an additional tensor."""
    parameters = {f"layer.{i}": nn.Parameter(torch.full((3,), float(i + 1))) for i in range(3)}
    parameters = [parameters, {}, {**parameters, "own": nn.Parameter(torch.ones(7))}, parameters][rank]
    for parameter in parameters.values():
        parameter.grad = parameter.detach().clone()
    ranks = gm.Ranks(parameters)
    assert len(ranks.local_names) == len(parameters)
    return seen(gm.collect_grads(parameters, reduce=ranks))


def test_a_rank_without_a_model_and_one_with_more(four_ranks):
    tensors = {f"layer.{i}": torch.full((3,), float(i + 1)) for i in range(3)}
    assert_equal(four_ranks.run(several), {**tensors, "own": torch.ones(7)})


# tensors other than a model's gradients

DTYPES = (torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128, torch.float8_e5m2)


def special(dtype):
    """Return a tensor with values of every kind, (WORDS, CLASSES)."""
    x = torch.randn(WORDS, CLASSES, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    x[0, 0], x[5, 1], x[7, 2], x[12, 0] = math.nan, math.inf, -math.inf, 0.0
    return (torch.complex(x, 2 * x) if dtype.is_complex else x).to(dtype)


def dtypes(rank, size):
    mesh = mesh_of((size,), ("dp_shard",))
    tensors = {}
    for dtype in DTYPES:
        # torch cannot shard some of these dtypes
        here = special(dtype).chunk(size)
        local = here[rank] if rank < len(here) else special(dtype)[:0]
        whole_of = {"shape": torch.Size((WORDS, CLASSES)), "stride": (CLASSES, 1)}
        tensors[str(dtype)] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **whole_of)
    return seen(gm.collect(tensors, reduce=True))


@pytest.mark.parametrize("size", [2, 4])
def test_halves_and_complex_numbers(pool, size):
    assert_equal(pool.run(dtypes, size), {str(dtype): special(dtype) for dtype in DTYPES})


def experts(rank):
    """Experts with the same names but different ones on each rank; two ranks hold a copy of each."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    generator = torch.Generator().manual_seed(rank % 2)
    parameters = {
        "gate": nn.Parameter(torch.ones(5)),
        "experts.0.w": nn.Parameter(torch.randn(7, generator=generator)),
        "experts.1.w": nn.Parameter(torch.randn(9, generator=generator)),
    }
    for name, parameter in parameters.items():
        # the second expert saw no token on the first rank
        if (name, rank) != ("experts.1.w", 0):
            parameter.grad = parameter.detach() * (1 + rank % 2)
    ranks = gm.Ranks(parameters, shards={r"^experts\.": halves[rank // 2]})
    found = seen(gm.collect_grads(parameters, reduce=ranks))
    found["grads"] = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    found["where"] = ranks.where("experts.0.w", 3)
    for group in halves:
        if rank in dist.get_process_group_ranks(group):
            dist.destroy_process_group(group)
    return found


def test_experts_of_the_same_names_are_parts_of_one_row(four_ranks):
    found = four_ranks.run(experts)
    first, second = found[0]["grads"], found[1]["grads"]
    both = torch.cat([first["experts.0.w"], second["experts.0.w"]])
    expected = {"gate": torch.ones(5), "experts.0.w": both, "experts.1.w": second["experts.1.w"]}
    assert_equal(found, expected)
    assert found[0]["where"] == "rank 3, ^experts\\. 1 of 2"


def flat(rank, size):
    """Flat parameters, sharded without DTensors; the last rank's shard is shorter."""
    whole_of = torch.arange(1.0, 8.0)
    chunks = whole_of.chunk(size)
    part = nn.Parameter(chunks[rank] if rank < len(chunks) else whole_of[:0])
    part.grad = part.detach().clone()
    return seen(gm.collect_grads({"flat": part}, reduce=gm.Ranks({"flat": part}, shards={"flat": None})))


@pytest.mark.parametrize("size", [2, 4])
def test_shards_that_are_no_dtensors(pool, size):
    assert_equal(pool.run(flat, size), {"flat": torch.arange(1.0, 8.0)})


def half(rank):
    """Two groups of two ranks, each with its own model."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    mesh = mesh_of((2, 2), ("pp", "dp_shard"))["dp_shard"]
    parameter = nn.Parameter(distribute_tensor(torch.arange(5.0) + rank // 2, mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.arange(5.0) + rank // 2, mesh, [Shard(0)])
    ranks = gm.Ranks({"w": parameter}, group=mine)
    assert (ranks.size, ranks.rank) == (2, rank % 2)
    assert gm.Ranks({"w": parameter}, group=mesh).names == ("w",)
    found = seen(gm.collect_grads({"w": parameter}, reduce=ranks))
    dist.destroy_process_group(mine)
    return found


def test_groups_of_ranks(four_ranks):
    found = four_ranks.run(half)
    assert_equal(found[:2], {"w": torch.arange(5.0)})
    assert_equal(found[2:], {"w": torch.arange(5.0) + 1})


def misplaced(_rank, size):
    """Gradients that are whole on each rank, of sharded parameters."""
    mesh = mesh_of((size,), ("tp",))
    parameter = nn.Parameter(distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.arange(15.0).view(5, 3), mesh, [Replicate()])
    named = {"w": parameter}
    return [seen(gm.collect_grads(named, reduce=gm.Ranks(named))), seen(gm.collect_grads(named).reduce())]


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_that_are_placed_otherwise_than_their_parameters(pool, size):
    found = pool.run(misplaced, size)
    for each in zip(*found, strict=True):
        assert_equal(list(each), {"w": torch.arange(15.0).view(5, 3)})


def summarized(rank, size):
    """One parameter vanishes, one explodes, one has no elements and one has no gradient."""
    mesh = mesh_of((size,), ("dp_shard",))
    values = {"fine": torch.ones(5), "small": torch.full((3,), 1e-9), "large": torch.full((7,), 1e3)}
    values |= {"empty": torch.ones(0), "without": torch.ones(6), "alone": torch.ones(2)}
    parameters = {name: nn.Parameter(distribute_tensor(x, mesh, [Shard(0)])) for name, x in values.items()}
    for name, parameter in parameters.items():
        if name != "without" and (name != "alone" or rank == size - 1):
            parameter.grad = parameter.detach().clone()
    stats = gm.collect_grads(parameters, reduce=True)
    groups = stats.group({"some": "fine|small", "lost": "without", "none": "nothing"})
    modules = stats.by_module()
    found = [each.materialize() for each in (stats, groups, modules, stats.merge(stats))]
    on_device = [stats.health.item(), stats.health_score(vanishing=0.25).item(), stats.is_healthy.item()]
    on_device += [stats.min_norm.item(), stats.norm_ratio.item(), stats.total_zero_fraction.item()]
    return found, on_device


@pytest.mark.parametrize("size", [2, 4])
def test_what_is_said_of_all_together(pool, size):
    """As with one process, unmeasured tensors do not count, and tensors without elements do."""
    for (one, groups, modules, merged), on_device in pool.run(summarized, size):
        # the last of four ranks has an empty shard
        assert one.names == merged.names == ("fine", "small", "large", "empty", "alone")
        assert groups.names == ("some", "lost", "none")
        assert [row.numel for row in groups.rows()] == [8, 0, 0]
        assert modules.names == ("",)
        assert (one["alone"].numel, one["empty"].numel) == (1 if size == 2 else 0, 0)
        health = 1 - 0.5 / 5 - 0.8 / 5
        assert one.health == merged.health == pytest.approx(health)
        assert on_device[:3] == [one.health, pytest.approx(health + 0.25 / 5), one.is_healthy]
        assert on_device[3:] == [one.min_norm, one.norm_ratio, one.zero_fraction]


def gathers(rank, size):
    """A gather, which the count of collectives must detect."""
    model = build("FSDP2", rank, size)
    weight = model.embed.weight
    with Collectives() as collectives:
        weight.full_tensor()
        torch.linalg.vector_norm(weight.grad).full_tensor()
    return [name for name, _ in collectives.calls]


def test_what_is_gathered_would_be_seen(two_ranks):
    for names in two_ranks.run(gathers, 2):
        assert len(names) == 2
        assert "gather" in names[0]
        assert "reduce" in names[1]


def huge(_rank):
    parameters = {"w": nn.Parameter(torch.tensor([1e200, 1.0], dtype=torch.float64))}
    parameters["w"].grad = parameters["w"].detach().clone()
    return seen(gm.collect_grads(parameters, reduce=gm.Ranks(parameters)))


def test_copies_whose_squares_overflow_are_left_out_too(two_ranks):
    """Copies are left out by selection, not by multiplication with 0: 0 * inf is NaN."""
    for one in two_ranks.run(huge):
        row = dict(zip(TENSORS.index, one["columns"]["w"], strict=True))
        assert (row["numel"], row["sumsq"], row["sum"], row["n_nan"]) == (2, math.inf, 1e200, 0)
