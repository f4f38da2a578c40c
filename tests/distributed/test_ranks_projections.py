"""Projections of several ranks equal those of one process, for each way to share a model."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import gradiometer as gm
from gradiometer.recorder import projector
from support.rank_models import (
    BATCH,
    CASES,
    KINDS,
    alone,
    backward,
    error_of,
    held,
    names_and_parameters,
)
from support.rank_pool import pool_of

DOUBLE = torch.float64
COUNT = 32
STEPS = 4
# Of the sum of absolute values, by which a sum of elements with signs may be off: gradients of float64, whose
# sums of at most `BATCH * LENGTH * WORDS` terms are in another order, in `STEPS` steps of a small rate
BOUND = 1e-12
assert BATCH * 4 * 13 * STEPS * torch.finfo(DOUBLE).eps < BOUND

every_way = pytest.mark.parametrize(("kind", "size"), CASES, ids=[f"{kind}, {size}" for kind, size in CASES])
fsdp_in_graph = pytest.mark.skipif(
    torch.__version__.startswith("2.14"),
    reason="PyTorch 2.14 cannot read a parameter of FSDP2 and its gradient in one graph",
)
# those that train on parts of the batch without a schedule, with the share of a rank
SHARES = {
    "plain": lambda _rank, _size: (0, 1),
    "DDP": lambda rank, size: (rank, size),
    "FSDP2": lambda rank, size: (rank, size),
    "HSDP": lambda rank, size: (rank, size),
    "TP": lambda _rank, _size: (0, 1),
    "FSDP2 x TP": lambda rank, size: (rank // 2, size // 2),
}


@pytest.fixture
def pool(request, size):
    return pool_of(request, size)


def build(kind, rank, size):
    return KINDS[kind][0](rank, size, DOUBLE)


def assert_close(found, expected, bound=BOUND):
    """Compare ``(T, C)`` columns: counts are equal, and projections up to rounding of the sums."""
    found, expected = torch.as_tensor(found), torch.as_tensor(expected)
    assert torch.equal(found[:, [0, 2]], expected[:, [0, 2]])
    numel, sumsq = expected[:, 0], expected[:, 1]
    # at least the sum of absolute values
    most = (numel * sumsq).sqrt().unsqueeze(1)
    assert bool((most > 0).all())
    assert bool(((found[:, 3:] - expected[:, 3:]).abs() <= bound * most).all())
    assert torch.allclose(found[:, 1], sumsq, rtol=bound, atol=0.0)


def collected(rank, kind, size):
    model = build(kind, rank, size)
    ranks = gm.Ranks(model)
    grads = gm.collect_projections(model, projections=COUNT, reduce=ranks)
    weights = gm.collect_projections(dict(names_and_parameters(model)), projections=COUNT, reduce=ranks)
    return grads.names, grads.columns, weights.columns, grads.origin.tolist()


@functools.cache
def expected():
    model = alone(DOUBLE)
    grads = gm.collect_projections(model, projections=COUNT)
    weights = gm.collect_projections(dict(model.named_parameters()), projections=COUNT)
    return grads.names, grads.columns, weights.columns


@every_way
def test_projections_are_those_of_one_process(pool, kind, size):
    names, grads, weights = expected()
    for found in pool.run(collected, kind, size):
        assert found[0] == names
        assert_close(found[1], grads)
        # the same numbers, added up in another order
        assert_close(found[2], weights, 1e-15)
        assert set(found[3]) == {-1}


# several steps, recorded


@torch.no_grad()
def update(model):
    """Do a step of SGD; torch's own does not take a gradient that is not placed like its parameter."""
    for parameter in model.parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor):
            grad = grad.redistribute(placements=parameter.placements).to_local()
        if grad is not None:
            held(parameter).sub_(1e-3 * grad)


def recorded(rank, kind, size, folder, lacking=()):
    """Record SGD. In step 1, ``lacking`` are the ranks on which the gradient of one tensor is missing."""
    model = build(kind, rank, size)
    own = getattr(model, "module", model)
    options = {"weights": True, "fingerprint": True, "projections": COUNT, "run_dir": folder}
    with gm.Monitor(own, rules=(), **options) as monitor:
        for step in range(STEPS):
            own.zero_grad()
            backward(model, *SHARES[kind](rank, size))
            if step == 1 and rank in lacking:
                dict(own.named_parameters())["layers.0.up.weight"].grad = None
            monitor.record()
            update(own)
            monitor.advance(loss=1.0)
        monitor.flush()
    return monitor.failures


def run_of(pool, kind, size, folder, lacking=()):
    assert pool.run(recorded, kind, size, str(folder), lacking) == [{}] * size
    return gm.read_run(folder)


@pytest.fixture(scope="module")
def one(one_rank, tmp_path_factory):
    return run_of(one_rank, "plain", 1, tmp_path_factory.mktemp("one") / "run")


@pytest.mark.parametrize(("kind", "size"), [(kind, size) for kind, size in CASES if kind in SHARES], ids=str)
def test_runs_have_the_projections_of_one_process_in_every_step(pool, one, tmp_path, kind, size):
    run = run_of(pool, kind, size, tmp_path / "run")
    assert run.catalog.names == one.catalog.names
    for step in range(STEPS):
        found, expected = run.record(step), one.record(step)
        for table in ("grad_projections", "weight_projections"):
            assert_close(found.columns(table), expected.columns(table))
            stats, others = [x.tables[table].stats() for x in (found, expected)]
            assert bool((stats.distance(others) <= BOUND * others.finite_norm * 10).all())
            assert bool((stats.cosine(others) > 1 - 1e-9).all())
        # they don't take part in what fingerprints tell
        assert found.fingerprints("weights").shape == expected.fingerprints("weights").shape


@pytest.mark.parametrize(("kind", "lacking"), [("FSDP2", (1,)), ("DDP", (0,)), ("FSDP2", (0, 1))])
def test_a_tensor_that_is_not_whole_has_no_projections(two_ranks, one, tmp_path, kind, lacking):
    run = run_of(two_ranks, kind, 2, tmp_path / "run", lacking)
    names = run.catalog.names
    for step in range(STEPS):
        table, expected = [x.record(step).tables["grad_projections"] for x in (run, one)]
        absent = [name for name, there in zip(names, table.measured, strict=True) if not there]
        assert absent == (["layers.0.up.weight"] if step == 1 else [])
        if step < 2:
            assert_close(table.values[table.measured], expected.values[table.measured])


# in a compiled step


def compiled(rank, kind, size):
    model = build(kind, rank, size)
    ranks = gm.Ranks(model)
    recorder = gm.Recorder(model, weights=True, projections=COUNT, ranks=ranks)
    eager = gm.collect_projections(model, projections=COUNT, reduce=ranks)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step():
        recorder.record()
        recorder.advance()
        return gm.collect_projections(model, projections=COUNT, reduce=ranks)

    with torch._dynamo.config.patch(error_on_recompile=True):
        found = [step() for _ in range(3)]
    assert all(torch.equal(each.columns, eager.columns) for each in found)
    local = recorder.read()[-1]
    weights = gm.collect_projections(dict(names_and_parameters(model)), projections=COUNT)
    assert torch.equal(local.columns("grad_projections"), eager.local.columns)
    assert torch.equal(local.columns("weight_projections"), weights.columns)
    return eager.columns


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("TP", 2),
        pytest.param("FSDP2", 2, marks=fsdp_in_graph),
        pytest.param("FSDP2 x TP", 4, marks=fsdp_in_graph),
    ],
)
def test_a_compiled_step_finds_the_same(pool, kind, size):
    _, grads, _ = expected()
    for found in pool.run(compiled, kind, size):
        assert_close(found, grads)


# what is not known, and what differs


def parts_without_placements(rank):
    parameters = {
        "gate": nn.Parameter(torch.ones(5)),
        "experts.w": nn.Parameter(torch.full((3,), rank + 1.0)),
    }
    for parameter in parameters.values():
        parameter.grad = parameter.detach().clone()
    ranks = gm.Ranks(parameters, shards={r"^experts\.": None})
    with pytest.raises(ValueError, match=r"collect_projections.*'experts\.w' is a part .* pass a DTensor"):
        gm.collect_projections(list(parameters.items()), reduce=ranks)
    local = gm.collect_projections({"experts.w": parameters["experts.w"]})
    records = []
    sink = gm.sinks.Function(records.append)
    options = {"weights": True, "projections": 8, "rules": (), "sinks": [sink]}
    with mock.patch.object(projector._LOG, "warning") as warning:
        monitor = gm.Monitor(parameters, ranks=ranks, **options)
    with monitor:
        monitor.record()
        monitor.advance()
        monitor.flush()
    (call,) = warning.call_args_list
    found = [record.tables["weight_projections"].measured.tolist() for record in records]
    return call.args[0] % call.args[1:], local.numel.tolist(), found, monitor.failures


def test_parts_without_a_place_are_left_out_by_name(two_ranks):
    for rank, (text, numel, found, failures) in enumerate(two_ranks.run(parts_without_placements)):
        assert text.startswith("Recorder: 'experts.w' is a part of a larger tensor, as with gm.Ranks(shards=")
        assert text.endswith("; 1 of 2 tensors are not projected")
        # alone, it is a tensor of its own
        assert numel == [3.0]
        assert found == ([] if rank else [[True, False]])
        assert failures == {}


def different(rank):
    parameter = nn.Parameter(torch.ones(5))
    ranks = gm.Ranks({"w": parameter})
    call = functools.partial(gm.collect_projections, {"w": parameter}, reduce=ranks)
    number = error_of(functools.partial(call, projections=8 if rank else 16))
    seed = error_of(functools.partial(call, seed=rank))
    assert call().columns.shape == (1, 3 + 16)
    return number, seed


def test_ranks_that_project_differently_learn_of_it(two_ranks):
    for number, seed in two_ranks.run(different):
        assert "collect_projections(projections=8, seed=0)" in number
        assert "collect_projections(projections=16, seed=0)" in number
        assert "seed=1" in seed
