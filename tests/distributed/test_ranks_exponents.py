"""Histograms over ranks: their sums are those of one process, in the op's result and in the run record."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.runs import verify
from support import rank_models
from support.rank_models import BUILDERS, Collectives, build, error_of
from support.rank_pool import pool_of


@pytest.fixture(params=[2, 4])
def pool(request):
    return pool_of(request, request.param)


def weights_of(model):
    return dict(rank_models.names_and_parameters(model))


def reduced(rank, size, how):
    model = build(rank, size, how)
    if model is None:
        return None
    weights = weights_of(model)
    ranks = gm.Ranks(weights)
    stats = gm.collect_exponents(weights, reduce=ranks)
    later = gm.collect_exponents(weights).reduce(ranks)
    implicit = gm.collect_exponents(weights, reduce=True)
    assert torch.equal(stats.columns, later.columns)
    assert torch.equal(stats.columns, implicit.columns)
    assert stats.is_reduced
    assert not stats.local.is_reduced
    assert stats.reduce() is stats
    return stats.names, stats.columns.tolist(), repr(stats), stats.report().total.numel


@pytest.mark.parametrize("how", BUILDERS)
def test_all_ranks_find_what_one_process_finds(pool, how):
    told = pool.run(reduced, pool.size, how)
    if told[0] is None:
        pytest.skip("needs four ranks")
    alone = gm.collect_exponents(weights_of(rank_models.whole(torch.float64)))
    expected = dict(zip(alone.names, alone.columns.tolist(), strict=True))
    for names, columns, text, numel in told:
        assert dict(zip(names, columns, strict=True)) == expected
        assert "of all ranks" in text
        assert numel == int(alone.numel.sum())


def missing(rank, size):
    """Gradients that not all ranks have, and a NaN in one rank's copy."""
    weights = {name: nn.Parameter(torch.ones(6)) for name in "abc"}
    ranks = gm.Ranks(weights, shards={"^b$": None})
    if rank == 0:
        weights["a"].grad = torch.full((6,), 2.0)
    weights["b"].grad = torch.full((6,), 2.0**rank)
    if rank == size - 1:
        weights["b"].grad[0] = math.nan
    grads = {name: p.grad for name, p in weights.items() if p.grad is not None}
    with Collectives() as calls:
        stats = gm.collect_exponents(grads, reduce=ranks)
    kinds = [dtype for _, inputs in calls.calls for _, dtype in inputs]
    report = stats.report()
    groups = stats.group({"all": "."})
    return (
        stats.names,
        stats.numel.tolist(),
        stats.n_nan.tolist(),
        stats.origin.tolist(),
        list(report),
        groups.numel.tolist(),
        groups.origin.tolist(),
        kinds.count(torch.int64),
        len(kinds),
    )


def test_a_missing_gradient_adds_nothing_and_parts_add_up(pool):
    last = float(pool.size - 1)
    expected = (
        ("a", "b", "c"),
        [6, 6 * pool.size, 0],
        [0, 1, 0],
        [-1.0, last, -2.0],
        ["a", "b"],
        [6 + 6 * pool.size],
        [last],
        1,
        3,
    )
    assert pool.run(missing, pool.size) == [expected] * pool.size


def other_calls(rank):
    weights = {"w": nn.Parameter(torch.ones(3))}
    ranks = gm.Ranks(weights)
    integers = {"w": torch.ones(3, dtype=torch.int64)}
    histograms = partial(gm.collect_exponents, reduce=ranks)
    others = [
        (partial(histograms, weights), partial(gm.collect_weights, weights, reduce=ranks)),
        # rank 0 fails before it measures
        (partial(histograms, integers), partial(histograms, weights)),
        (partial(histograms, {"v": torch.ones(3)}), partial(histograms, weights)),
    ]
    said = [error_of(calls[rank], ValueError, TypeError) for calls in others]
    # and they are at the same call again
    return said, gm.collect_exponents(weights, reduce=ranks).numel.item()


def test_ranks_that_make_different_calls_learn_of_it(two_ranks):
    for said, numel in two_ranks.run(other_calls):
        assert "collect_exponents of exponents" in said[0]
        assert "collect_weights" in said[0]
        assert "'w' has dtype torch.int64" in said[1]
        assert "'v' is not among the tensors" in said[2]
        assert numel == 3


def compiled(rank, size):
    model = rank_models.ddp(rank, size, torch.float64).module
    weights = weights_of(model)
    ranks = gm.Ranks(weights)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def inside():
        return gm.collect_exponents(weights, reduce=ranks)

    eager = gm.collect_exponents(weights, reduce=ranks)
    for _ in range(2):
        found = inside()
        assert torch.equal(found.columns, eager.columns)
        assert torch.equal(found.origin, eager.origin)
    return found.report().total.numel


def test_a_compiled_step_finds_the_same(two_ranks):
    assert len(set(two_ranks.run(compiled, 2))) == 1


def test_one_process_has_the_histograms_of_all():
    alone = gm.collect_exponents([torch.ones(3)])
    assert alone.reduce() is alone
    weights = {"w": torch.ones(3)}
    found = gm.collect_exponents(weights, reduce=gm.Ranks(weights))
    assert torch.equal(found.columns, alone.columns)
    with pytest.raises(ValueError, match="one of the two is of this rank only"):
        found.merge(gm.collect_exponents(weights))
    assert found.merge(found).numel.tolist() == [6]


# the run record


STEPS = 7


def train(rank, size, run_dir, how="fsdp", forgets=-1, ranks=True):
    model = getattr(rank_models, how)(rank, size, torch.float64)
    with gm.Monitor(model, run_dir=run_dir, precision=3, weights=True, rules=(), ranks=ranks) as monitor:
        for step in range(STEPS):
            if not (rank == forgets and step == 3):
                monitor.record()
            with torch.no_grad():
                for _, p in rank_models.names_and_parameters(model):
                    p.mul_(0.5)
                    if p.grad is not None:
                        p.grad.mul_(2.0)
            monitor.advance(loss=1.0)
    return monitor.failures


@pytest.mark.parametrize("how", ["fsdp", "ddp"])
def test_the_record_has_the_histograms_of_the_job(pool, how, tmp_path):
    assert pool.run(train, pool.size, str(tmp_path / "run"), how) == [{}] * pool.size
    run = gm.read_run(tmp_path / "run")
    assert run.precision_steps == [0, 3, 6]
    model = rank_models.whole(torch.float64)
    for step in run.precision_steps:
        with torch.no_grad():
            scaled = {name: p * 0.5**step for name, p in model.named_parameters()}
        expected = gm.collect_exponents(scaled)
        found = run.precision(step, "weights").stats
        rows = dict(zip(found.names, found.columns.tolist(), strict=True))
        assert rows == dict(zip(expected.names, expected.columns.tolist(), strict=True))
        assert run.precision(step).total.numel == int(expected.numel.sum())
    assert verify(tmp_path / "run").whole


@pytest.mark.parametrize(("how", "steps"), [("ddp", [0, 3, 6]), ("fsdp", [0, 6])])
def test_a_step_that_one_rank_did_not_measure_has_only_whole_tensors(how, steps, two_ranks, tmp_path):
    # rank 0 has whole copies, or a part of each tensor
    two_ranks.run(train, 2, str(tmp_path / "run"), how, 1)
    run = gm.read_run(tmp_path / "run")
    assert run.precision_steps == steps
    sizes = {name: p.numel() for name, p in rank_models.whole(torch.float64).named_parameters()}
    for step in steps:
        report = run.precision(step, "weights")
        assert {name: report[name].numel for name in report} == sizes


def test_without_merging_each_rank_has_its_own(two_ranks, tmp_path):
    two_ranks.run(train, 2, str(tmp_path / "run"), "fsdp", -1, False)
    parts = [gm.read_run(tmp_path / "run" / f"rank-{rank:05d}").precision(6, "weights") for rank in range(2)]
    whole = sum(p.numel() for p in rank_models.whole(torch.float64).parameters())
    assert sum(part.total.numel for part in parts) == whole


def refused(rank, run_dir):
    return error_of(lambda: gm.Monitor(nn.Linear(2, 1), run_dir=run_dir, precision=rank + 1))


def test_ranks_with_another_cadence_are_refused(two_ranks, tmp_path):
    for said in two_ranks.run(refused, str(tmp_path)):
        assert "Monitor(precision=2) on rank 1, but 1 on rank 0" in said
