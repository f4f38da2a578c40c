"""Fingerprints over ranks: those of whole tensors, and copies that are not the same."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import pytest
import torch
from torch.distributed.tensor import DTensor

import gradiometer as gm
from support import rank_models
from support.rank_models import BUILDERS, Collectives, build, error_of, held
from support.rank_pool import RankPool, pool_of


@pytest.fixture(params=[2, 4])
def pool(request):
    return pool_of(request, request.param)


def bits_of(report):
    return {row.name: row.fingerprint for row in report.rows()}


def wholes(rank, size, how, dtype):
    """Return fingerprints of the weights of all ranks and of one process, and what diverged."""
    model = build(rank, size, how, dtype)
    if model is None:
        return None
    stats = gm.collect_weights(model, fingerprint=True, reduce=True).materialize()
    alone = gm.collect_weights(rank_models.whole(dtype), fingerprint=True).materialize()
    placements = {
        name: [str(x) for x in p.placements] if isinstance(p, DTensor) else []
        for name, p in rank_models.names_and_parameters(model)
    }
    return bits_of(stats), bits_of(alone), stats.diverged, placements


@pytest.mark.parametrize("how", BUILDERS)
def test_parts_merge_to_the_fingerprint_of_the_whole_tensor(pool, how):
    # rows of float64 are whole words
    told = pool.run(wholes, pool.size, how, torch.float64)
    if told[0] is None:
        pytest.skip("needs four ranks")
    for merged, alone, diverged, placements in told:
        assert diverged == []
        assert set(merged) == set(alone)
        for name, bits in merged.items():
            cut = [place for place in placements[name] if place != "R"]
            # a part that is no contiguous piece has no place in the whole
            assert bits == (alone[name] if cut in ([], ["S(0)"]) else None), name


def test_a_part_that_begins_inside_a_word_has_no_whole(pool):
    if pool.size != 2:
        pytest.skip("the cases are those of two ranks")
    (merged, alone, *_), _ = pool.run(wholes, 2, "fsdp", torch.float32)
    # 13 rows of 5: the second half begins at row 7, byte 140
    assert merged["embed.weight"] is None
    # 12 rows of 5
    assert merged["layers.0.up.weight"] == alone["layers.0.up.weight"]


def flip(parameter, bit):
    """Flip a bit of the first element that this rank holds."""
    local = held(parameter)
    if local.numel():
        with torch.no_grad():
            local.view(-1)[:1].view(torch.int64).bitwise_xor_(1 << bit)
    return local.numel() > 0


def flipped(rank, size, how, name, victims, bit):
    model = build(rank, size, how, torch.float64)
    parameters = dict(rank_models.names_and_parameters(model))
    ranks = gm.Ranks(model)
    before = gm.check_replicas(model, reduce=ranks)
    if rank in victims:
        assert flip(parameters[name], bit)
    stats = gm.collect_weights(model, fingerprint=True, reduce=ranks)
    report = stats.materialize()
    return before, report.diverged, gm.check_replicas(model, reduce=ranks), gm.check_replicas(model)


CASES = [
    # one rank of four under DDP, with the lowest and the highest bit
    ("ddp", "layers.0.up.weight", (2,), 0, (2,)),
    ("ddp", "embed.weight", (3,), 63, (3,)),
    # the first rank, whose copy is the one that is counted
    ("ddp", "head.bias", (0,), 51, (0,)),
    # two of four: the version of the lowest rank counts as that of most
    ("ddp", "norm.weight", (1, 3), 5, (1, 3)),
    ("ddp", "norm.weight", (0, 2), 5, (1, 3)),
    # three ranks with the same wrong bits are the majority
    ("ddp", "norm.weight", (1, 2, 3), 5, (0,)),
    # replicas of a shard: ranks 0 and 2 hold the same part, and 1 and 3
    ("hsdp", "layers.1.down.weight", (2,), 17, (2,)),
    ("hsdp", "layers.1.down.weight", (1,), 17, (3,)),
    # parameters that tensor parallelism replicates
    ("tp", "norm.weight", (1,), 40, (1,)),
    ("plain", "norm.bias", (3,), 12, (3,)),
]


@pytest.mark.parametrize(("how", "name", "victims", "bit", "named"), CASES)
def test_the_ranks_in_the_minority_are_named(four_ranks, how, name, victims, bit, named):
    for before, diverged, given, implicit in four_ranks.run(flipped, 4, how, name, victims, bit):
        assert before == {}
        assert diverged == [name]
        assert given == implicit == {name: named}


def opposite(rank, size):
    del size
    # the differences of ranks 1 and 2 from the others add up to 0, in both halves of both sums
    weight = torch.nn.Parameter(torch.tensor([2.0, 2.0, 2.0], dtype=torch.float64))
    with torch.no_grad():
        weight.view(torch.int64)[0] += 1000 + {1: 1, 2: -1}.get(rank, 0)
    return gm.collect_weights({"w": weight}, fingerprint=True, reduce=True).materialize().diverged


def test_opposite_differences_of_two_ranks_do_not_cancel(four_ranks):
    assert four_ranks.run(opposite, 4) == [["w"]] * 4


def different_shards(rank, size):
    model = rank_models.fsdp(rank, size, torch.float64)
    flip(dict(rank_models.names_and_parameters(model))["embed.weight"], 3)
    grads = gm.collect_grads(model, fingerprint=True, reduce=True)
    return gm.check_replicas(model), grads.materialize().diverged


def test_shards_are_no_copies(pool):
    assert pool.run(different_shards, pool.size) == [({}, [])] * pool.size


def unmeasured(rank, size):
    del size
    parameters = {"w": torch.nn.Parameter(torch.ones(3)), "b": torch.nn.Parameter(torch.ones(2))}
    parameters["b"].grad = torch.full((2,), float(rank))
    # the measured copy would otherwise differ from nothing
    if not rank:
        parameters["w"].grad = torch.full((3,), 2.0)
    report = gm.collect_grads(parameters, fingerprint=True, reduce=True).materialize()
    return report.diverged


def test_of_a_tensor_that_a_rank_did_not_measure_nothing_is_known(pool):
    assert pool.run(unmeasured, pool.size) == [["b"]] * pool.size


def compiled(rank, size):
    del size
    weight = torch.nn.Parameter(torch.arange(6.0, dtype=torch.float64))
    flip(weight, rank)
    ranks = gm.Ranks({"w": weight})

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step():
        return gm.collect_weights({"w": weight}, fingerprint=True, reduce=ranks)

    eager = gm.collect_weights({"w": weight}, fingerprint=True, reduce=ranks)
    inside = step()
    assert torch.equal(inside.fingerprints, eager.fingerprints)
    assert torch.equal(inside.diverged, eager.diverged)
    return inside.materialize().diverged


def test_a_compiled_step_finds_the_same(pool):
    assert pool.run(compiled, pool.size) == [["w"]] * pool.size


def counted(rank, size):
    del rank, size
    weight = torch.nn.Parameter(torch.ones(3))
    ranks = gm.Ranks({"w": weight})
    found = []
    for fingerprint in (False, True):
        with Collectives() as calls:
            gm.collect_weights({"w": weight}, fingerprint=fingerprint, reduce=ranks)
        found.append([name for name, _ in calls.calls])
    return found


def test_fingerprints_take_no_further_collective(pool):
    for without, with_fingerprints in pool.run(counted, pool.size):
        assert without == with_fingerprints


def mixed(rank, size):
    del size
    weight = torch.nn.Parameter(torch.ones(3))
    ranks = gm.Ranks({"w": weight}, timeout=2.0)
    return error_of(partial(gm.collect_weights, {"w": weight}, fingerprint=rank == 0, reduce=ranks))


def test_ranks_that_do_not_all_ask_for_fingerprints_learn_of_it():
    with closing(RankPool(2)) as pool:
        asked, did_not_ask = pool.run(mixed, 2)
    assert "fingerprint=True, or of pairs: rank 1 of 2 did not arrive within 2 s" in asked
    assert "rank 0" in did_not_ask


def watched(rank, size, how, folder):
    model = build(rank, size, how, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    options = {"weights": True, "fingerprint": True, "run_dir": folder}
    with gm.Monitor(model, **options) as monitor:
        for step in range(12):
            if step == 5 and rank == 2:
                flip(dict(rank_models.names_and_parameters(model))["layers.0.norm.weight"], 7)
            optimizer.zero_grad()
            rank_models.backward(model)
            monitor.record()
            optimizer.step()
            monitor.advance(loss=1.0)
        monitor.flush()
    return [str(x) for x in monitor.findings if x.rule == "replica_divergence"], monitor.failures


@pytest.mark.parametrize(("how", "others"), [("ddp", "3 others"), ("hsdp", "1 other")])
def test_the_monitor_names_the_rank_and_the_step(four_ranks, tmp_path, how, others):
    (found, failures), *rest = four_ranks.run(watched, 4, how, str(tmp_path / "run"))
    assert failures == {}
    expected = f"layers.0.norm.weight: rank 2 differs from {others} since step 5"
    assert found == [f"error    step 5 to 11: {expected}"]
    assert [each for each, _ in rest] == [[]] * 3
    run = gm.read_run(tmp_path / "run")
    before, after = [run.record(step).fingerprints("weights") for step in (0, 11)]
    assert not torch.equal(before, after)


def test_a_run_of_ranks_keeps_the_fingerprints_of_one_process(pool, tmp_path):
    """With a learning rate of 0 the weights stay as they were made."""
    pool.run(unmoved, pool.size, str(tmp_path / "run"))
    run = gm.read_run(tmp_path / "run")
    alone = gm.collect_weights(rank_models.whole(torch.float64), fingerprint=True)
    assert run.catalog.names == alone.names
    assert torch.equal(run.record(0).fingerprints("weights"), alone.fingerprints)


def unmoved(rank, size, folder, dtype=torch.float64):
    model = build(rank, size, "fsdp", dtype)
    with gm.Monitor(model, weights=True, fingerprint=True, run_dir=folder) as monitor:
        monitor.record()
        monitor.advance(loss=1.0)


def test_runs_with_a_tensor_whose_parts_do_not_merge_are_compared_in_the_others(pool, tmp_path):
    for name in ("a", "b"):
        pool.run(unmoved, pool.size, str(tmp_path / name), torch.float32)
    result = gm.compare_runs(tmp_path / "a", tmp_path / "b")
    assert result.fingerprinted == 1
    # 13 rows of 5 in 2 parts, 12 rows of 5 in 4: the second begins inside a word
    assert {2: "embed.weight", 4: "layers.0.up.weight"}[pool.size] in result.unknown
    assert result.same
    assert not result.identical
    assert result.verdict.startswith("bits: identical for 1 step; ")
    assert result.verdict.endswith("have no fingerprint")


def test_one_process_has_no_replicas():
    model = torch.nn.Linear(2, 1)
    assert gm.check_replicas(model) == {}
    reduced = gm.collect_weights(model, fingerprint=True, reduce=gm.Ranks(model))
    assert reduced.diverged.tolist() == [False, False]
    alone = gm.collect_weights(model, fingerprint=True)
    assert torch.equal(reduced.fingerprints, alone.fingerprints)


def test_a_compiled_function_is_refused():
    model = torch.nn.Linear(2, 1)
    with pytest.raises(Exception, match="collect_weights\\(model, fingerprint=True"):
        torch.compile(lambda: gm.check_replicas(model), fullgraph=True, backend="aot_eager")()


def asked_by_some(rank, size):
    model = rank_models.plain(rank, size, torch.float32)
    ranks = gm.Ranks(model)
    gm.check_replicas(model, reduce=ranks)
    with pytest.raises(gm.RankError) as raised:
        gm.collect_weights(model, fingerprint=rank == 0, reduce=ranks)
    # and the ranks are at the same call
    plain = gm.collect_weights(model, reduce=ranks)
    asked = gm.collect_weights(model, fingerprint=True, reduce=ranks)
    return str(raised.value), plain.fingerprints, asked.fingerprints.shape


def test_fingerprints_that_some_ranks_ask_for_are_an_error_on_all(two_ranks):
    for said, fingerprints, shape in two_ranks.run(asked_by_some, 2):
        call = "called collect_weights"
        assert f"rank 1 {call}, but rank 0 {call} with fingerprint=True" in said
        assert fingerprints is None
        assert shape[1] == 3
