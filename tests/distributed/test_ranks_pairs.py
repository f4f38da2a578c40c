"""Statistics of pairs over ranks: those of one process, by two collectives, or an error on every rank."""

from __future__ import annotations

import math
from contextlib import closing
from functools import partial

import pytest
import torch

import gradiometer as gm
from gradiometer.columns import PAIRS, TENSORS
from support import rank_models
from support.pair_oracle import exact_pair
from support.rank_models import BUILDERS, NUM_TENSORS, Collectives, build, error_of
from support.rank_pool import RankPool, pool_of

NAMES = tuple(PAIRS.index)
# the parameter whose elements become infinite, and NaN where they are 0
NONFINITE = 3


@pytest.fixture(params=[2, 4])
def pool(request):
    return pool_of(request, request.param)


def step(model):
    """Take a step that does not depend on gradients, so that all ranks do what one process would."""
    with torch.no_grad():
        for i, (_, p) in enumerate(rank_models.names_and_parameters(model)):
            if i % 3:
                p.mul_(1.0 + 2.0**-i)
            if i == NONFINITE:
                p.div_(0.0)


def updates(rank, size, how):
    model = build(rank, size, how)
    if model is None:
        return None
    ranks = gm.Ranks(model)
    snapshot = gm.Snapshot(model)
    step(model)
    stats = gm.collect_updates(model, snapshot, reduce=ranks)
    implicit = gm.collect_updates(model, snapshot, reduce=True)
    assert torch.equal(stats.columns, implicit.columns)
    if how != "tp":  # which leaves some gradients partial: they are added up by a collective before
        later = gm.collect_updates(model, snapshot).reduce(ranks)
        assert torch.equal(stats.columns, later.columns)
    assert stats.is_reduced
    assert not stats.local.is_reduced
    alone = rank_models.alone(torch.float64)
    before = gm.Snapshot(alone)
    step(alone)
    return (
        stats.names,
        stats.columns.tolist(),
        gm.collect_updates(alone, before).columns.tolist(),
        [exact_pair(p, old, p.grad) for p, old in zip(alone.parameters(), before.buffers(), strict=True)],
        repr(stats.materialize()),
        stats.origin.tolist(),
    )


@pytest.mark.parametrize("how", BUILDERS)
def test_all_ranks_find_what_one_process_finds(pool, how):
    told = pool.run(updates, pool.size, how)
    if told[0] is None:
        pytest.skip("needs four ranks")
    for names, reduced, alone, exact, text, origin in told:
        assert (names, reduced) == (told[0][0], told[0][1])
        whole_names = [name for name, _ in rank_models.whole(torch.float64).named_parameters()]
        found = [name for name, rank in zip(names, origin, strict=True) if rank >= 0]
        assert found == [whole_names[NONFINITE]]
        assert text.startswith(f"<PairReport: {NUM_TENSORS} pairs of all ranks, ")
        by_name = dict(zip(names, reduced, strict=True))
        assert by_name[whole_names[NONFINITE]][NAMES.index("n_posinf")] > 0
        assert by_name[whole_names[NONFINITE]][NAMES.index("n_neginf")] > 0
        for name, one, (values, magnitudes) in zip(whole_names, alone, exact, strict=True):
            for column, mine, single in zip(NAMES, by_name[name], one, strict=True):
                if column in {"sumsq_g", "dot_ug"}:
                    # gradients that ranks add up differ in their last bits: 2**-53 for each of a few
                    # hundred terms of a gradient, which may cancel to a hundredth of their magnitudes
                    assert abs(mine - single) <= 1e-9 * max(magnitudes[column], 1e-9), (name, column)
                elif column in magnitudes:
                    # each is within its bound
                    assert abs(mine - values[column]) <= 1e-13 * magnitudes[column], (name, column)
                elif column in {"n_nonzero_g", "n_stuck"}:
                    # words that do not occur have a gradient of exactly 0; sums that cancel need not
                    assert abs(mine - single) <= 2, (name, column)
                else:
                    assert mine == values[column], (name, column)


def counted(rank, size):
    del rank, size
    model = rank_models.plain(0, 1, torch.float64)
    ranks = gm.Ranks(model)
    snapshot = gm.Snapshot(model)
    found = []
    # the ranks meet in the first call
    for _ in range(2):
        with Collectives() as calls:
            gm.collect_updates(model, snapshot, reduce=ranks)
        found.append(calls.calls)
    with Collectives() as calls:
        gm.compare(model, model, reduce=ranks)
        gm.collect_grads(model, reduce=ranks)
    return found, calls.calls


def test_two_collectives_of_stated_sizes(pool):
    wide = TENSORS.num_sums + 10
    sizes = [(NUM_TENSORS, wide), (NUM_TENSORS + 8, 2)]
    for (first, second), more in pool.run(counted, pool.size):
        assert len(first) == len(second) == 2
        for calls in (first, second, more[:2], more[2:]):
            shapes = [shape for _, inputs in calls for shape, _ in inputs]
            assert shapes[:1] + shapes[-1:] == sizes, shapes
            assert all(dtype == torch.float64 for _, inputs in calls for _, dtype in inputs)


def uneven(rank, size):
    """Gradients that differ between the ranks, some of which have none, and a NaN on one rank."""
    weights = {name: torch.nn.Parameter(torch.ones(6, dtype=torch.float64)) for name in "abc"}
    ranks = gm.Ranks(weights)
    snapshot = gm.Snapshot(weights)
    if rank == 0:
        weights["a"].grad = torch.full((6,), 2.0, dtype=torch.float64)
    with torch.no_grad():
        weights["b"].add_(1.0)
        if rank == size - 1:
            weights["c"][0] = math.nan
    report = gm.collect_updates(weights, snapshot, reduce=ranks).materialize()
    return report["a"].n_stuck, report["b"].norm_u, report["c"].n_nonfinite, report.ranks


def test_copies_count_once_and_the_rank_of_a_nan_is_named(pool):
    # the copy of rank 0 is the one that is counted
    expected = 6, math.sqrt(6), 0, {"c": pool.size - 1}
    assert pool.run(uneven, pool.size) == [expected] * pool.size


def sampled(rank, size):
    del rank
    model = torch.nn.Linear(512, 256, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    mesh = rank_models.mesh_of((size,), ("dp_shard",))
    model = torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    snapshot = gm.Snapshot(model, sample=1 / 4)
    with torch.no_grad():
        model.weight.mul_(3.0)
    stats = gm.collect_updates(model, snapshot, reduce=True)
    held = next(x.numel() for x in snapshot.buffers())
    return held, stats.numel.item(), stats.norm_u.item()


def test_each_rank_samples_its_shard(pool):
    shard = 512 * 256 // pool.size
    # every element changes by 2
    assert pool.run(sampled, pool.size) == [(shard // 4, 512.0 * 256, 2 * math.sqrt(512 * 256))] * pool.size


def compared(rank, size):
    a, b = (rank_models.fsdp(rank, size, torch.float64) for _ in range(2))
    step(b)
    stats = gm.compare(a, b, reduce=True)
    grads = [{n: p.grad for n, p in x.named_parameters()} for x in (a, b)]
    same = gm.compare(*grads, reduce=True)
    return stats.total_value("norm_u").item(), same.total_value("unchanged_fraction").item()


def test_shards_are_compared(pool):
    one, other = rank_models.whole(torch.float64), rank_models.whole(torch.float64)
    step(other)
    expected = gm.compare(one, other).total_value("norm_u").item()
    for norm, unchanged in pool.run(compared, pool.size):
        assert norm == pytest.approx(expected, rel=2e-13)
        assert unchanged == 1.0


def other_calls(rank, size):
    del size
    weights = {"w": torch.nn.Parameter(torch.ones(3))}
    ranks = gm.Ranks(weights)
    snapshot = gm.Snapshot(weights)
    updates = partial(gm.collect_updates, weights, snapshot, reduce=ranks)
    pairs = partial(gm.compare, weights, reduce=ranks)
    # all ranks have met with pairs
    updates()
    others = [
        (updates, partial(pairs, weights)),
        (updates, partial(gm.collect_weights, weights, reduce=ranks)),
        # rank 0 fails before it measures
        (partial(pairs, {"w": torch.ones(4)}), partial(pairs, weights)),
    ]
    said = [error_of(calls[rank], ValueError) for calls in others]
    # and they are at the same call again
    return said, updates().n_unchanged.item()


def test_ranks_that_make_different_calls_learn_of_it(two_ranks):
    for rank, (said, unchanged) in enumerate(two_ranks.run(other_calls, 2)):
        for text, other in zip(said, ("compare of pairs", "collect_weights"), strict=False):
            assert "collect_updates of pairs" in text, text
            assert other in text, text
        assert "'w' is float32 (3,) on cpu in a, but float32 (4,) on cpu" in said[2], (rank, said)
        assert unchanged == 3.0


def first_pairs(rank, size):
    del size
    weights = {"w": torch.nn.Parameter(torch.ones(3))}
    ranks = gm.Ranks(weights, timeout=2.0)
    snapshot = gm.Snapshot(weights)
    if rank:
        return error_of(partial(gm.collect_weights, weights, reduce=ranks))
    return error_of(partial(gm.collect_updates, weights, snapshot, reduce=ranks))


def test_ranks_that_do_not_all_reduce_pairs_do_not_hang():
    with closing(RankPool(2)) as pool:
        asked, did_not_ask = pool.run(first_pairs, 2)
    assert "rank 1 of 2 did not arrive within 2 s" in asked
    assert "pairs" in asked
    assert "rank 0" in did_not_ask


def compiled(rank, size):
    model = rank_models.ddp(rank, size, torch.float64).module
    ranks = gm.Ranks(model)
    snapshot = gm.Snapshot(model)
    step(model)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def inside():
        return gm.collect_updates(model, snapshot, reduce=ranks)

    eager = gm.collect_updates(model, snapshot, reduce=ranks)
    for _ in range(3):
        found = inside()
        assert torch.equal(found.columns, eager.columns)
        assert torch.equal(found.origin, eager.origin)
        assert torch.equal(found.local.columns, eager.local.columns)
    return found.materialize().to_dict()["total"]["norm_u"]


def test_a_compiled_step_finds_the_same(pool):
    assert len(set(pool.run(compiled, pool.size))) == 1


def test_one_process_has_the_statistics_of_all():
    model = torch.nn.Linear(2, 1)
    snapshot = gm.Snapshot(model)
    alone = gm.collect_updates(model, snapshot)
    assert alone.reduce() is alone
    reduced = gm.collect_updates(model, snapshot, reduce=gm.Ranks(model))
    assert torch.equal(reduced.columns, alone.columns)
    assert reduced.origin.tolist() == [-1.0, -1.0]
    grouped = reduced.group({"all": ".", "none": []})
    assert grouped.materialize()["all"].numel == 3
