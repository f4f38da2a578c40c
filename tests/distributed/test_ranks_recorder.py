"""A recorder on each of several ranks: its ring holds that rank's shards, and all skip the same steps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer import ops
from gradiometer.columns import PAIRS, TENSORS, Cursor
from gradiometer.monitor.failures import Failures
from gradiometer.monitor.model_reader import ParameterCheck
from gradiometer.recorder.recorder import Recorder
from gradiometer.recorder.updates import Updates
from support.rank_models import KINDS, Collectives, backward, held, mesh_of, sharded, whole
from support.rank_pool import pool_of

DOUBLE = torch.float64


def build(kind, rank, size):
    return KINDS[kind][0](rank, size, DOUBLE)


def spoil(model, value=math.nan):
    """Put a value into this rank's part of a gradient that is sharded over all ranks."""
    model = getattr(model, "module", model)
    with torch.no_grad():
        held(model.layers["0"].up.weight.grad).view(-1)[0] = value


# rows


def records(rank, size, kind):
    model = build(kind, rank, size)
    ranks = gm.Ranks(model)
    local = gm.collect_grads(model, reduce=ranks).local
    recorder = Recorder(model, weights=True, ranks=ranks)
    calls, true = [], ops.record_
    ops.record_ = lambda *args, **kwargs: (calls.append(1), true(*args, **kwargs))[1]
    try:
        with Collectives() as seen:
            recorder.record()
    finally:
        ops.record_ = true
    (record,) = recorder.read()
    for table, stats in (("grads", local), ("weights", gm.collect_weights(model))):
        assert torch.equal(record.columns(table), stats.columns)
        assert torch.equal(record.flags(table), stats.flags)
    assert record.catalog.names == ranks.local_names
    assert record.catalog.parameters.shapes == tuple([tuple(p.shape) for p in whole(DOUBLE).parameters()])
    assert len(calls) == 1
    # stats that were measured before are recorded in the same way
    recorder.advance()
    recorder.record(gm.collect_grads(model, reduce=ranks))
    for table in ("grads", "weights"):
        assert torch.equal(recorder.read()[-1].columns(table), record.columns(table))
    return len(seen.calls)


@pytest.mark.parametrize("kind", ["DDP", "FSDP2", "TP"])
def test_the_rows_are_those_of_local_shards(two_ranks, kind):
    # only partial gradients are added up
    assert two_ranks.run(records, 2, kind) == [KINDS[kind][2]] * 2


def without_ranks(rank, size):
    model = build("FSDP2", rank, size)
    recorder = Recorder(model)
    spoil(model, math.nan if rank == 1 else 0.0)
    with Collectives() as seen:
        recorder.record()
        skip = bool(recorder.skip_step)
    (record,) = recorder.read()
    assert torch.equal(gm.collect_grads(model).columns.nan_to_num(), record.columns().nan_to_num())
    assert seen.calls == []
    partial = build("TP", rank, size)
    with pytest.raises(TypeError, match=r"'layers.0.norm.weight' is a DTensor .* not yet reduced"):
        Recorder(partial).record()
    return skip


def test_without_ranks_each_is_on_its_own(two_ranks):
    assert two_ranks.run(without_ranks, 2) == [False, True]


def groups_of_all_ranks(rank, size):
    model = build("FSDP2", rank, size)
    stats = gm.collect_grads(model, reduce=gm.Ranks(model))
    recorder = Recorder(model)
    with pytest.raises(ValueError, match=r"groups that are merged over ranks.* pass the stats"):
        recorder.record(stats.by_module(1))
    other = Recorder({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match=r"'embed.weight' is not among the parameters"):
        other.record(stats)
    said = r"'a.weight' is not among the tensors .*; create gm.Ranks from the same model"
    with pytest.raises(ValueError, match=said):
        Recorder({"a": nn.Linear(2, 2)}, ranks=gm.Ranks(model))


def test_what_is_no_ranks_own_is_refused(two_ranks):
    two_ranks.run(groups_of_all_ranks, 2)


# skipped steps


def decide(rank, size, kind, options, values):
    """Record a step for each value, which only rank 1 puts into a gradient."""
    model = build(kind, rank, size)
    recorder = Recorder(model, ranks=gm.Ranks(model), **options)
    skipped = []
    for value in values:
        if value is not None and rank == 1:
            spoil(model, value)
        recorder.record()
        skipped.append(bool(recorder.skip_step))
        assert recorder.cursor[Cursor.SKIP] == skipped[-1]
        recorder.advance()
        spoil(model, 0.0)
    return skipped, {record.step: record.skipped for record in recorder.read()}


@pytest.mark.parametrize("kind", ["DDP", "FSDP2", "TP"])
def test_what_one_rank_finds_all_skip_and_say_so(two_ranks, kind):
    values = [None, math.nan, None, -math.inf, 1e200]
    expected = [False, True, False, True, False]
    for skipped, recorded in two_ranks.run(decide, 2, kind, {}, values):
        assert skipped == expected
        assert recorded == dict(enumerate(expected))


def test_what_was_not_recorded_is_skipped_all_the_same(two_ranks):
    found = two_ranks.run(decide, 2, "FSDP2", {"every": 3}, [None, None, math.nan, None])
    assert [skipped for skipped, _ in found] == [[False, False, True, False]] * 2
    # the rank that has the NaN keeps the step
    kept = {0: False, 3: False}
    assert [recorded for _, recorded in found] == [kept, kept | {2: True}]


def test_where_a_nan_is_no_reason_it_is_none_on_any_rank(two_ranks):
    values = [math.nan, 1e9, math.inf]
    options = {"skip_nonfinite": False, "skip_above": 1e6}
    for skipped, recorded in two_ranks.run(decide, 2, "FSDP2", options, values):
        assert skipped == [False, True, False]
        assert recorded == dict(enumerate(skipped))


def above(rank, size, kind):
    """Return the decisions for limits around each rank's own norm and the total norm."""
    model = build(kind, rank, size)
    ranks = gm.Ranks(model)
    stats = gm.collect_grads(model, reduce=ranks)
    total, own = float(stats.total_norm), float(stats.local.total_norm)
    recorder = Recorder(model, ranks=ranks, skip_above=1.0)
    found = []
    for limit in (total * (1 - 1e-9), total * (1 + 1e-9)):
        recorder.configure_(skip_above=limit)
        # measured by record, and passed as stats
        for given in (None, stats):
            recorder.record(given)
            found.append(bool(recorder.skip_step))
            recorder.advance()
    return total, own, found, [record.skipped for record in recorder.read()]


@pytest.mark.parametrize(("kind", "size"), [("DDP", 2), ("FSDP2", 2), ("TP", 2), ("FSDP2 x TP", 4)])
def test_the_norm_of_all_ranks_is_what_the_limit_is_for(request, kind, size):
    alone = gm.grad_norm(backward(whole(DOUBLE)))
    for total, own, found, recorded in pool_of(request, size).run(above, size, kind):
        assert total == pytest.approx(alone, rel=1e-12)
        # replicated gradients are not added up; with shards, no single rank's norm is the total
        assert own == total if kind == "DDP" else own < total * (1 - 1e-6)
        assert found == recorded == [True, True, False, False]


def beyond(rank, size):
    """Squares that overflow float64, on a rank whose gradients are copies."""
    model = build("DDP", rank, size)
    recorder = Recorder(model, ranks=gm.Ranks(model))
    found = []
    for value, limit in ((0.0, math.inf), (1e200, math.inf), (1e200, 1e9), (0.0, 1e9)):
        # a limit that is set later
        recorder.configure_(skip_above=limit)
        spoil(model, value)
        recorder.record()
        found.append(bool(recorder.skip_step))
        recorder.advance()
    return found


def test_an_infinite_sum_of_squares_is_above_any_limit(two_ranks):
    assert two_ranks.run(beyond, 2) == [[False, False, True, False]] * 2


def collectives(rank, size):
    model = build("FSDP2", rank, size)
    ranks = gm.Ranks(model)
    counts = []
    for options in ({}, {"skip_above": 1e9}, {"skip_nonfinite": False}):
        recorder = Recorder(model, ranks=ranks, **options)
        for reads in (0, 1, 3):
            with Collectives() as seen:
                recorder.record()
                for _ in range(reads):
                    assert not recorder.skip_step
                recorder.advance()
            counts.append(len(seen.calls))
            assert all(shapes == [((2,), DOUBLE)] for _, shapes in seen.calls)
    return counts


def test_ranks_are_asked_once_a_step_if_at_all(two_ranks):
    assert two_ranks.run(collectives, 2) == [[0, 1, 1, 0, 1, 1, 0, 0, 0]] * 2


def several_records(rank, size):
    """The verdict covers the latest measurement."""
    model = build("FSDP2", rank, size)
    recorder = Recorder(model, ranks=gm.Ranks(model), skip_above=1e6)
    found = []
    for value in (math.nan, 0.0, 1e9, 0.0):
        spoil(model, value if rank == 1 else 0.0)
        recorder.record()
        found.append(bool(recorder.skip_step))
    (record,) = recorder.read()
    return found, record.skipped


def test_a_second_record_in_a_step_is_decided_anew(two_ranks):
    assert two_ranks.run(several_records, 2) == [([True, False, True, False], True)] * 2


def goes_on(rank, size):
    model = build("TP", rank, size)
    recorder = Recorder(model, ranks=gm.Ranks(model), skip_above=1.0)
    recorder.advance()
    state = recorder.state_dict()
    other = Recorder(model, ranks=gm.Ranks(model), skip_above=1.0).half()
    other.load_state_dict(state)
    other.record()
    return list(state), [(record.step, record.skipped) for record in other.read()], bool(other.skip_step)


def test_a_checkpoint_is_that_of_one_rank(two_ranks):
    norm = gm.grad_norm(backward(whole(DOUBLE)))
    for names, recorded, skip in two_ranks.run(goes_on, 2):
        assert names == ["cursor"]
        assert recorded[0][0] == 1
        assert skip == (norm > 1.0)


# additional measurements of a monitor


def updates(rank, size, kind):
    model = build(kind, rank, size)
    recorder = Recorder(model, updates=True, ranks=gm.Ranks(model))
    with Collectives() as seen:
        kept = Updates(recorder)
        for step in range(2):
            with torch.no_grad():
                before = {name: held(p).to(DOUBLE, copy=True) for name, p in model.named_parameters()}
                for p in model.parameters():
                    held(p).mul_(1.5)
            expected = {name: held(p).double() - before[name] for name, p in model.named_parameters()}
            kept.measure(step)
            kept.keep(step + 1)
            (*_, record) = recorder.read()
            wanted = gm.collect(expected)
            # two orders of summation; terms cancel in a sum, which is below numel * abs_max
            bound = 1e-13 * wanted.numel * wanted.abs_max
            assert ((record.value("sum", "updates") - wanted.sum).abs() <= bound).all()
            assert torch.equal(record.value("n_unchanged", "updates"), wanted.n_zero)
            for name in {*PAIRS.names} & {*TENSORS.names} - {"sum", "mean", "std"}:
                value = TENSORS.value(wanted.columns, name)
                torch.testing.assert_close(record.value(name, "updates"), value, rtol=1e-13, atol=0)
            ratios = record.value("update_ratio", "updates")
            torch.testing.assert_close(ratios, torch.full_like(ratios, 0.5), rtol=1e-6, atol=0)
            recorder.advance()
    assert seen.calls == []
    return record.total("norm", "updates")


@pytest.mark.parametrize("kind", ["FSDP2", "TP"])
def test_updates_are_those_of_local_shards(two_ranks, kind):
    one, other = two_ranks.run(updates, 2, kind)
    assert one > 0
    assert other > 0


def calls(_rank, size):
    """Look while FSDP has gathered its shards, after the step, and after a parameter was replaced."""
    told = []
    model = sharded(whole(DOUBLE), mesh_of((size,), ("dp_shard",)))
    model.set_reshard_after_forward(False)
    failures = Failures()
    call = ParameterCheck(model, Recorder(model), failures)
    output = model(torch.zeros(2, 3, dtype=torch.long))
    assert not any(hasattr(p, "to_local") for p in model.parameters())
    call()
    told.append(dict(failures.counts))
    output.sum().backward()
    call()
    told.append(dict(failures.counts))
    model.head.bias = nn.Parameter(model.head.bias.detach() + 1)
    call()
    return [*told, dict(failures.counts)]


def test_shards_that_are_put_together_are_not_replaced(two_ranks):
    assert two_ranks.run(calls, 2) == [[{}, {}, {"parameters": 1}]] * 2
