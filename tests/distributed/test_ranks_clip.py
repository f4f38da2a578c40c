"""Clipping, check_finite and GradScalers in several processes: all ranks act as one process would."""

from __future__ import annotations

import importlib
import math
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import gradiometer as gm
from support.pages import blocks
from support.rank_models import (
    CASES,
    KINDS,
    Collectives,
    alone,
    full,
    grads_of,
    held,
    mesh_of,
    names_and_parameters,
)
from support.rank_pool import RankFailedError, pool_of

# far below the norms of the gradients, so that clipping happens
MAX_NORM = 0.1
# relative error of sums in another order, of some tens of summands
SUMS = {torch.float64: 1e-14, torch.float32: 1e-5}
NAN, INF = math.nan, math.inf


# expert parallelism: some tensors are on their own mesh


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        shapes = {"router": (5, 3), "experts": (4, 6, 2), "head": (7,)}
        for name, shape in shapes.items():
            parameter = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
            parameter.grad = torch.randn(shape, generator=generator, dtype=torch.float64)
            setattr(self, name, parameter)


def distributed(model, name, mesh, placements):
    parameter = getattr(model, name)
    placed = nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements))
    placed.grad = distribute_tensor(parameter.grad, mesh, placements)
    setattr(model, name, placed)


def experts(size):
    """Experts are sharded over `ep` and replicated across its groups; others are sharded over all ranks."""
    model = Expert()
    mesh = mesh_of((size // 2, 2), ("dp_mod_ep", "ep"))
    for name in ("router", "head"):
        distributed(model, name, mesh_of((size,), ("dp_shard",)), [Shard(0)])
    distributed(model, "experts", mesh["ep"], [Shard(0)])
    return model


def experts_fsdp(size):
    """Experts are sharded over `ep`, and each one over the ranks that share it."""
    model = experts(size)
    model.experts = Expert().experts
    mesh = mesh_of((size // 2, 2), ("dp_mod_ep", "ep"))
    distributed(model, "experts", mesh, [Shard(1), Shard(0)])
    return model


EXPERTS = {"EP": experts, "EP x FSDP": experts_fsdp}
# cases in which some rank's shard is empty: torch has no maximum of an empty tensor
EMPTY = {("FSDP2", 4), ("HSDP", 4), ("TP", 4), ("FSDP2 x TP", 4), ("EP", 4), ("EP x FSDP", 4)}


def model_of(kind, rank, size, dtype=torch.float64):
    return EXPERTS[kind](size) if kind in EXPERTS else KINDS[kind][0](rank, size, dtype)


# the clipping of torchtitan's loops, with torch's own functions


def norm_of(parameters, order):
    return full(get_total_norm([p.grad for p in parameters], order))


def loops_clip_(model, order, stages):
    """Clip as such a loop does: norms of experts and other tensors separately, then over the stages."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    kinds = {}
    for p in parameters:
        names = p.device_mesh.mesh_dim_names if isinstance(p, DTensor) else ()
        kinds.setdefault("ep" in names, []).append(p)
    norm = torch.stack([norm_of(kind, order) for kind in kinds.values()])
    norm = torch.linalg.vector_norm(norm, order)
    if stages is not None and order == INF:
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=stages)
    elif stages is not None:
        norm = norm**order
        dist.all_reduce(norm, group=stages)
        norm = norm ** (1.0 / order)
    for kind in kinds.values():
        clip_grads_with_norm_(kind, MAX_NORM, norm)
    return norm


def stages_of(kind, size):
    if kind == "pipeline x FSDP2":
        return mesh_of((2, size // 2), ("pp", "dp_shard")).get_group("pp")
    return dist.group.WORLD if kind == "pipeline" else None


def clip_each_way(rank, size, kind, dtype, orders):
    """Return for each order both norms, our clipped gradients, and the difference from theirs."""
    model = model_of(kind, rank, size, dtype)
    before = {name: held(grad).clone() for name, grad in grads_of(model).items()}
    ranks = gm.Ranks(model)
    found = []
    for order in orders:
        # torch has no such norm of an empty shard
        said = None
        if order != INF or (kind, size) not in EMPTY:
            said = float(loops_clip_(model, order, stages_of(kind, size)))
        theirs = {name: held(grad).clone() for name, grad in grads_of(model).items()}
        restore(model, before)
        ours = gm.clip_grad_norm_(model, MAX_NORM, order, reduce=ranks)
        clipped = {name: full(grad).clone() for name, grad in grads_of(model).items()}
        compared = [name for name, grad in grads_of(model).items() if not is_left_by_torch(grad)]
        off = [difference(held(grads_of(model)[name]), theirs[name]) for name in compared]
        restore(model, before)
        stats = gm.collect_and_clip_(model, MAX_NORM, norm_type=order, reduce=ranks)
        same = all(torch.equal(full(grad), clipped[name]) for name, grad in grads_of(model).items())
        same = same and stats.local.names == tuple(grads_of(model)) and stats.names == ranks.names
        restore(model, before)
        found.append((said, float(ours), clipped, max(off) if said is not None else 0.0, same))
    return found


def is_left_by_torch(grad):
    # torch 2.11 silently does not clip partial gradients
    summands = isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements)
    return summands and torch.__version__ < "2.13"


def restore(model, before):
    for name, grad in grads_of(model).items():
        held(grad).copy_(before[name])


def difference(a, b):
    """Return the largest difference, relative to the values."""
    return float(((a - b).abs() / b.abs().clamp(min=torch.finfo(b.dtype).tiny)).max()) if b.numel() else 0.0


def alone_clipped(kind, dtype, order):
    model = Expert() if kind in EXPERTS else alone(dtype)
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, order)
    return float(norm), grads_of(model)


@pytest.mark.parametrize(
    ("kind", "size", "dtype"),
    [
        *[
            pytest.param(
                kind,
                size,
                torch.float64,
                marks=()
                if kind in {"DDP", "FSDP2 x TP", "pipeline"} and size == max(KINDS[kind][1])
                else (pytest.mark.deep,),
            )
            for kind, size in CASES
            if kind != "plain"
        ],
        *[pytest.param(kind, 2, torch.float64, marks=pytest.mark.deep) for kind in EXPERTS],
        pytest.param("EP", 4, torch.float64, marks=pytest.mark.deep),
        ("EP x FSDP", 4, torch.float64),
        pytest.param("FSDP2 x TP", 4, torch.float32, marks=pytest.mark.deep),
    ],
    ids=str,
)
def test_every_rank_clips_as_torchtitans_loops_and_one_process_do(request, kind, size, dtype):
    orders = (2.0, INF, 1.0, 3.0)
    told = pool_of(request, size).run(clip_each_way, size, kind, dtype, orders)
    eps = torch.finfo(dtype).eps
    for i, order in enumerate(orders):
        norm, single = alone_clipped(kind, dtype, order)
        for rank in told:
            theirs, ours, clipped, off, same = rank[i]
            # bit-identical on every rank: otherwise copies would drift apart
            assert ours == told[0][i][1]
            assert ours == pytest.approx(norm, rel=10 * SUMS[dtype])
            if theirs is not None:
                assert ours == pytest.approx(theirs, rel=1e-13 if dtype == torch.float64 else 10 * eps)
            # errors of the coefficient's last digits, and one rounding
            assert off <= 10 * eps
            assert same
            for name, grad in clipped.items():
                scale = float(single[name].abs().max())
                torch.testing.assert_close(grad, single[name], rtol=SUMS[dtype], atol=SUMS[dtype] * scale)
        assert {name for rank in told for name in rank[i][2]} == set(single)


def test_torch_alone_clips_no_mixed_meshes(two_ranks):
    # if a new torch supports this, change docs/how-to/many-ranks.md
    with pytest.raises(RankFailedError, match="mesh"):
        two_ranks.run(torchs_own_clip, 2)


def torchs_own_clip(_, size):
    nn.utils.clip_grad_norm_(experts(size).parameters(), MAX_NORM)


# drop-in use: without gm.Ranks


def drop_in(rank, size, kind):
    model = model_of(kind, rank, size)
    norm = gm.clip_grad_norm_(model.parameters(), MAX_NORM)
    return float(norm), gm.grad_norm(model)


@pytest.mark.parametrize("kind", ["FSDP2", "TP", "EP", "DDP"])
def test_in_place_of_torchs_function_the_norm_is_the_models(two_ranks, kind):
    norm, _ = alone_clipped(kind, torch.float64, 2.0)
    for said, left in two_ranks.run(drop_in, 2, kind):
        assert said == pytest.approx(norm, rel=1e-13)
        assert left == pytest.approx(MAX_NORM, rel=1e-5)


@pytest.mark.parametrize(("kind", "size"), [("pipeline x FSDP2", 4), ("pipeline", 2)])
def test_stages_without_names_are_not_taken_for_copies(request, kind, size):
    for failed, text in pool_of(request, size).outcomes(clip_a_list, size, kind):
        assert failed
        assert "RankError: reduce: tensors in a list have no names" in text


def clip_a_list(rank, size, kind):
    gm.clip_grad_norm_(model_of(kind, rank, size).parameters(), MAX_NORM, reduce=True)


def collectives_of(rank, size, kind):
    model = model_of(kind, rank, size)
    ranks = gm.Ranks(model)
    found = []
    for order, reduce in ((2.0, ranks), (INF, ranks), (3.0, ranks), (2.0, False)):
        with Collectives() as seen:
            gm.clip_grad_norm_(model, MAX_NORM, order, reduce=reduce)
        found.append([shapes[0][0] for _, shapes in seen.calls])
    return found, len(ranks.names)


@pytest.mark.parametrize("kind", ["FSDP2", "pipeline"])
def test_there_are_two_collectives_and_two_numbers_more_for_another_order(two_ranks, kind):
    for found, rows in two_ranks.run(collectives_of, 2, kind):
        pair = [(rows, 7), (rows + 8, 2)]
        assert found == [pair, pair, [*pair, (), ()], []]


# non-finite gradients and refusals: the same on every rank


def stage(rank, *, dtype=torch.float32):
    """Return one of two stages, whose names differ."""
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(3, 2, dtype=dtype)})
    for p in model.parameters():
        p.grad = torch.full_like(p, rank + 1.0)
    return model


def clip_with_a_fault(rank, size, kind, options):
    model = stage(rank) if kind == "pipeline" else model_of(kind, rank, size)
    name, parameter = list(model.named_parameters())[-1]
    if rank == 1:
        held(parameter.grad).view(-1)[0] = NAN
    before = {name: held(grad).clone() for name, grad in grads_of(model).items()}
    try:
        norm = float(gm.clip_grad_norm_(model, MAX_NORM, reduce=True, **options))
        error = None
    except RuntimeError as raised:
        norm, error = None, str(raised)
    grads = grads_of(model)
    unchanged = all(torch.equal(held(grad), before[n]) or n == name for n, grad in grads.items())
    factors = {float((held(grad) / before[n]).nanmean()) for n, grad in grads.items() if held(grad).numel()}
    return norm, error, name, unchanged, factors


def test_elements_that_are_not_finite_do_not_count_on_any_rank(two_ranks):
    # 8 elements of 1 on one rank, and 7 of 2 beside the NaN on the other
    factor = MAX_NORM / (math.sqrt(8 * 1.0 + 7 * 4.0) + 1e-6)
    for norm, error, _, _, factors in two_ranks.run(clip_with_a_fault, 2, "pipeline", {}):
        assert error is None
        assert math.isnan(norm)
        assert all(x == pytest.approx(factor, rel=1e-6) for x in factors)


@pytest.mark.parametrize("kind", ["pipeline", "FSDP2"])
def test_error_if_nonfinite_is_raised_on_every_rank_and_names_one(two_ranks, kind):
    told = two_ranks.run(clip_with_a_fault, 2, kind, {"error_if_nonfinite": True})
    name = told[1][2]
    where = {"pipeline": "rank 1", "FSDP2": "rank 1, dp_shard 1 of 2"}[kind]
    for norm, error, _, unchanged, _ in told:
        assert norm is None
        assert re.search(rf"{re.escape(repr(name))} has 1 NaN and 0 Inf of \d+ \(first on {where}\)", error)
        assert unchanged


def clip_what_one_rank_cannot(rank, fault):
    model = stage(rank)
    weight, bias = model.parameters()
    if fault == "shared memory" and rank == 1:
        weight.grad = torch.ones(1, 3).expand(2, 3)
    if fault == "summands":
        mesh = mesh_of((2,), ("tp",))
        model.w = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
        model.w.grad = DTensor.from_local(torch.ones(4), mesh, [Partial("max")])
    error = None
    try:
        gm.clip_grad_norm_(model, MAX_NORM, reduce=True)
    except (TypeError, RuntimeError) as raised:
        error = type(raised).__name__ + ": " + str(raised)
    unchanged = torch.equal(bias.grad, torch.full((2,), rank + 1.0))
    # the ranks still work together afterwards
    again = stage(rank)
    return error, unchanged, float(gm.clip_grad_norm_(again, MAX_NORM, reduce=True))


@pytest.mark.parametrize(
    ("fault", "here", "there"),
    [
        ("shared memory", "TypeError: .*'stage1.weight'", "RankError: .*rank 1 failed.*'stage1.weight'"),
        ("summands", r"TypeError: .*'w' is a DTensor with placements .*one by one", "TypeError: .*'w'"),
    ],
)
def test_what_one_rank_refuses_no_rank_clips(two_ranks, fault, here, there):
    first, second = two_ranks.run(clip_what_one_rank_cannot, fault)
    assert re.match(here, second[0])
    assert re.match(there, first[0])
    assert first[1]
    assert second[1]
    # the weight and bias are 1 on one rank and 2 on the other
    assert first[2] == second[2] == pytest.approx(math.sqrt(8 * 1.0 + 8 * 4.0), rel=1e-13)


def clip_summands(rank):
    mesh = mesh_of((2,), ("tp",))
    weight = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Replicate()]))
    weight.grad = DTensor.from_local(torch.tensor([1.0, 2.0]) + 2.0 * rank, mesh, [Partial()])
    norm = gm.clip_grad_norm_([("w", weight)], 1.0)
    return float(norm), weight.grad.placements[0].is_partial(), weight.grad.full_tensor()


def test_summands_are_added_up_for_the_norm_and_scaled_one_by_one(two_ranks):
    for norm, is_partial, grad in two_ranks.run(clip_summands):
        assert norm == pytest.approx(math.hypot(4.0, 6.0), rel=1e-13)
        assert is_partial
        torch.testing.assert_close(grad, torch.tensor([4.0, 6.0]) / norm)


def clip_complex(rank):
    model = stage(rank, dtype=torch.complex64 if rank == 1 else torch.float32)
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0 + 4.0j if rank == 1 else 4.5)
    norm = gm.clip_grad_norm_(model, 1.0, INF, reduce=gm.Ranks(model))
    return float(norm), [p.grad.abs().max().item() for p in model.parameters()]


def test_the_largest_magnitude_of_complex_elements_on_one_rank(two_ranks):
    (norm, real), (again, complex_ones) = two_ranks.run(clip_complex)
    assert norm == again == 5.0
    assert real == pytest.approx([0.9, 0.9])
    assert complex_ones == pytest.approx([1.0, 1.0])


def clip_where_one_has_nothing(rank, order):
    model = stage(rank)
    if rank == 0:
        model.zero_grad()
    return float(gm.clip_grad_norm_(model, 1.0, order, reduce=True)), gm.grad_norm(model, reduce=False)


@pytest.mark.parametrize("order", [2.0, 3.0])
def test_a_rank_without_gradients_waits_for_nobody(two_ranks, order):
    norms, left = zip(*two_ranks.run(clip_where_one_has_nothing, order), strict=True)
    assert norms == pytest.approx([2.0 * 8 ** (1 / order)] * 2, rel=1e-13)
    assert left[0] == 0.0
    assert left[1] == pytest.approx(math.sqrt(8) * 2.0 / norms[0], rel=1e-5)


# norms of every order


def norms_of_all(rank, orders):
    """Return the norms of sharded, replicated and missing tensors, and the gradients clipped by them."""
    mesh = mesh_of((2,), ("tp",))
    wholes = {
        "cut": torch.tensor([[3.0, 0.5], [2.0, -1.0], [0.25, 7.0]], dtype=torch.float64),
        "copied": torch.tensor([1.5, -4.0], dtype=torch.float64),
        # the second rank holds no part of it
        "row": torch.tensor([[2.5, 1.25]], dtype=torch.float64),
        "zeros": torch.zeros(3, dtype=torch.float64),
    }
    found = []
    for names in (("cut", "copied", "row"), ("row",), ("cut", "zeros")):
        tensors = {}
        for name in names:
            placement = Replicate() if name in {"copied", "zeros"} else Shard(0)
            tensors[name] = distribute_tensor(wholes[name], mesh, [placement])
        ranks = gm.Ranks(tensors)
        for order in orders:
            said = [gm.total_norm(tensors, order), gm.total_norm(tensors, order, reduce=ranks)]
            parameters = {name: nn.Parameter(torch.zeros_like(x)) for name, x in tensors.items()}
            for name, parameter in parameters.items():
                parameter.grad = tensors[name].clone()
            said.append(gm.clip_grad_norm_(parameters, MAX_NORM, order, reduce=True))
            clipped = torch.cat([parameter.grad.full_tensor().view(-1) for parameter in parameters.values()])
            single = {name: wholes[name].clone() for name in names}
            found.append(([float(x) for x in said], clipped, single, order))
    # a pipeline stage without tensors
    stage = {"last": torch.full((2,), 3.0)} if rank else {}
    ranks = gm.Ranks(stage)
    return found, [float(gm.total_norm(stage, order, reduce=ranks)) for order in orders]


ORDERS = (0, 0.5, 1, 2, 3, INF, -0.5, -1, -2, -INF)


def test_norms_of_every_order_are_those_of_one_process(two_ranks):
    for found, stages in two_ranks.run(norms_of_all, ORDERS):
        for said, clipped, single, order in found:
            expected = float(gm.total_norm(single, order))
            assert said == pytest.approx([expected] * 3, rel=1e-14)
            parameters = [nn.Parameter(torch.zeros_like(x)) for x in single.values()]
            for parameter, x in zip(parameters, single.values(), strict=True):
                parameter.grad = x
            gm.clip_grad_norm_(parameters, MAX_NORM, order)
            torch.testing.assert_close(clipped, torch.cat([x.view(-1) for x in single.values()]))
        expected = [float(gm.total_norm([torch.full((2,), 3.0)], order)) for order in ORDERS]
        assert stages == pytest.approx(expected, rel=1e-14)


# clipping by a precomputed norm, and by value


def clip_otherwise(rank):
    mesh = mesh_of((2,), ("tp",))
    whole_grad = torch.tensor([[3.0, -4.0], [0.5, NAN], [12.0, 0.0]])
    weight = nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)]))
    copied = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Replicate()]))

    def fill():
        weight.grad = distribute_tensor(whole_grad, mesh, [Shard(0)])
        copied.grad = distribute_tensor(torch.tensor([1.0, -9.0]), mesh, [Replicate()])
        return {"w": weight, "c": copied}

    found = gm.clip_grad_value_(fill(), 2.0)
    by_value = found.to_dict(), full(weight.grad), full(copied.grad)
    norm = get_total_norm([copied.grad])
    gm.clip_grads_with_norm_(fill(), 1.0, norm)
    by_norm = isinstance(norm, DTensor), full(weight.grad), full(copied.grad)
    summands = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Replicate()]))
    summands.grad = DTensor.from_local(torch.tensor([1.0 + rank, 2.0]), mesh, [Partial()])
    said = None
    try:
        gm.clip_grad_value_(fill() | {"s": summands}, 0.1)
    except TypeError as error:
        said = str(error)
    unchanged = torch.equal(full(copied.grad), torch.tensor([1.0, -9.0]))
    gm.clip_grads_with_norm_({"s": summands}, 1.0, 4.0)
    return by_value, by_norm, said, unchanged, full(summands.grad)


def test_by_value_and_by_a_given_norm_each_rank_clips_what_it_holds(two_ranks):
    for rank, (by_value, by_norm, said, unchanged, summands) in enumerate(two_ranks.run(clip_otherwise)):
        counts, weight, copied = by_value
        # two rows on the first rank and one on the second
        assert counts == {"w": 2 - rank, "c": 1}
        expected = torch.tensor([[2.0, -2.0], [0.5, NAN], [2.0, 0.0]])
        torch.testing.assert_close(weight, expected, rtol=0.0, atol=0.0, equal_nan=True)
        assert copied.tolist() == [1.0, -2.0]
        is_dtensor, weight, copied = by_norm
        factor = 1.0 / (math.sqrt(2.0**2 + 1.0) + 1e-6)
        assert is_dtensor
        torch.testing.assert_close(copied, torch.tensor([1.0, -9.0]) * factor)
        torch.testing.assert_close(weight[2], torch.tensor([12.0, 0.0]) * factor)
        assert "'s' is a DTensor with placements (Partial(sum),), and clamping its parts" in said
        assert unchanged
        torch.testing.assert_close(summands, torch.tensor([3.0, 4.0]) / 4.0)


# compiled


def clip_compiled(rank, size, kind, backend):
    torch._dynamo.reset()
    model = model_of(kind, rank, size)
    ranks = gm.Ranks(model)
    before = {name: held(grad).clone() for name, grad in grads_of(model).items()}
    eager = gm.collect_and_clip_(model, MAX_NORM, reduce=ranks)
    clipped = {name: held(grad).clone() for name, grad in grads_of(model).items()}
    restore(model, before)

    @torch.compile(fullgraph=True, backend=backend)
    def clip(model):
        return gm.collect_and_clip_(model, MAX_NORM, reduce=ranks)

    stats = clip(model)
    off = max(difference(held(grad), clipped[name]) for name, grad in grads_of(model).items())
    torch._dynamo.reset()
    return torch.equal(stats.columns, eager.columns), off, float(stats.total_norm)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("EP", "aot_eager"),
        pytest.param("pipeline", "aot_eager", marks=pytest.mark.deep),
        pytest.param("EP", "inductor", marks=pytest.mark.deep),
    ],
)
def test_in_a_compiled_function_ranks_clip_the_same(two_ranks, kind, backend):
    for same, off, norm in two_ranks.run(clip_compiled, 2, kind, backend):
        assert same
        assert off <= 2 * torch.finfo(torch.float64).eps
        assert norm == pytest.approx(alone_clipped(kind, torch.float64, 2.0)[0], rel=1e-13)


def clip_compiled_without_ranks(rank, size):
    torch._dynamo.reset()
    model = model_of("EP", rank, size)

    @torch.compile(fullgraph=True, backend="eager")
    def clip(model):
        return gm.clip_grad_norm_(model, MAX_NORM)

    clip(model)


def test_a_compiled_function_is_told_to_agree_outside(two_ranks):
    for failed, text in two_ranks.outcomes(clip_compiled_without_ranks, 2):
        assert failed
        assert "create ranks = gm.Ranks(model) outside, and pass reduce=ranks" in text


# check_finite


def check(rank, kind, reduce):
    model = model_of(kind, rank, 2)
    if rank == 1:
        # in the head, which is sharded: of replicated tensors only the first rank's copy is read
        *_, (_, last) = names_and_parameters(model)
        held(last.grad).view(-1)[0] = INF
        held(last.data).view(-1)[0] = NAN
    fetched = []
    module = importlib.import_module("gradiometer.stats.materialize")
    fetch = module.fetch
    module.fetch = lambda tensors: fetched.append(len(tensors)) or fetch(tensors)
    try:
        report = gm.check_finite(model, torch.tensor(NAN if rank == 1 else 1.0), reduce=reduce)
    finally:
        module.fetch = fetch
    kinds = report.weights, report.grads
    return [(r.nan, r.inf, r.ranks, len(r)) for r in kinds], report.loss_is_finite, str(report), len(fetched)


@pytest.mark.parametrize(("kind", "reduce"), [("FSDP2", None), ("TP", None), ("pipeline", True)])
def test_check_finite_names_the_rank_on_every_rank(two_ranks, kind, reduce):
    (first, loss, text, fetched), (second, other_loss, _, _) = two_ranks.run(check, kind, reduce)
    assert first == second
    (nan, _, weight_ranks, count), (_, inf, grad_ranks, _) = first
    assert count == len(list(alone(torch.float64).parameters()))
    assert weight_ranks == {nan[0]: 1}
    assert grad_ranks == {inf[0]: 1}
    assert len(nan) == len(inf) == 1
    # without reduce, the result stays local
    assert (loss, other_loss) == (True, False)
    assert fetched == 1
    assert re.search(rf"weight +{re.escape(nan[0])} +1 NaN of \d+, first on rank 1", text)
    assert re.search(rf"gradient +{re.escape(inf[0])} +1 \+Inf of \d+, first on rank 1", text)


@pytest.mark.parametrize(("kind", "reduce"), [("FSDP2", False), ("pipeline", None)])
def test_check_finite_of_what_is_here_alone(two_ranks, kind, reduce):
    (first, _, text, fetched), (second, *_) = two_ranks.run(check, kind, reduce)
    assert [found[:3] for found in first] == [([], [], {})] * 2
    assert all(nan or inf for nan, inf, _, _ in second)
    assert fetched == 1
    assert "all finite" in text


# GradScalers


def scaled_training(rank, size, kind, order, scaler_of=GradScaler, fused=False):
    """Train five steps, the third with an Inf on the last rank; return scales and whether weights moved."""
    torch.manual_seed(0)
    idle = kind == "idle" and rank == 0
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(3, 2)})
    if kind == "mesh":
        model = nn.ParameterDict({"copied": torch.ones(2), "cut": torch.ones(4)})
        for name, placement in (("copied", Replicate()), ("cut", Shard(0))):
            cut = distribute_tensor(model[name].data, mesh_of((size,), ("tp",)), [placement])
            model[name] = nn.Parameter(cut)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    scaler = scaler_of("cpu", init_scale=8.0, growth_interval=2)
    ranks = gm.Ranks(model)
    told = []
    for step in range(5):
        fault = step == 2 and rank == size - 1
        if not idle:
            loss = loss_of_all(model)
            scaler.scale(loss).backward()
            if fault:
                held(list(model.parameters())[-1].grad)[0] = INF
        if order == "unscaled":
            scaler.unscale_(optimizer)
            stats = gm.collect_and_clip_(model, 1.0, skip_nonfinite=True, reduce=ranks)
        else:
            scale = gm.inverse_scale(scaler)
            stats = gm.collect_and_clip_(model, 1.0, inv_scale=scale, skip_nonfinite=True, reduce=ranks)
        gm.share_found_inf_(scaler, optimizer, stats)
        before = [(p, held(p.data).clone()) for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = any(not torch.equal(held(p.data), old) for p, old in before)
        told.append((bool(stats.skipped), moved, scaler.get_scale(), round(float(stats.local.total_norm), 4)))
    return told


def loss_of_all(model):
    total = 0.0
    for p in model.parameters():
        total = total + (full(p) * torch.arange(1.0, 1 + p.numel()).view(p.shape)).sum()
    return total


@pytest.mark.parametrize(
    ("kind", "size", "order", "fused"),
    [
        ("stages", 2, "scaled", False),
        ("stages", 2, "unscaled", False),
        ("stages", 2, "scaled", True),
        ("stages", 2, "unscaled", True),
        ("stages", 4, "scaled", False),
        ("idle", 2, "scaled", False),
        ("idle", 4, "scaled", True),
        ("mesh", 2, "scaled", False),
        ("mesh", 4, "unscaled", False),
    ],
)
def test_all_scalers_skip_together_and_stay_equal(request, kind, size, order, fused):
    told = pool_of(request, size).run(scaled_training, size, kind, order, GradScaler, fused)
    for rank, steps in enumerate(told):
        skipped, moved, scales, norms = zip(*steps, strict=True)
        assert skipped == (False, False, True, False, False)
        if kind == "idle" and rank == 0:
            assert not any(moved)
        else:
            assert moved == (True, True, False, True, True)
        # two good steps double the scale; a skipped step halves it and restarts the count
        assert scales == (8.0, 16.0, 8.0, 8.0, 16.0)
        # only the rank with the Inf sees it
        assert all(math.isfinite(x) for x in norms) == (rank != size - 1)


def test_the_scaler_of_fsdp_agrees(two_ranks):
    for steps in two_ranks.run(scaled_training, 2, "stages", "scaled", ShardedGradScaler):
        _, moved, scales, _ = zip(*steps, strict=True)
        assert moved == (True, True, False, True, True)
        assert scales == (8.0, 16.0, 8.0, 8.0, 16.0)


class Louder(nn.Module):
    """A model that overflows earlier on the last rank; its parts have different names on each rank."""

    def __init__(self, model, rank):
        super().__init__()
        self.add_module(f"stage{rank}", model)
        self.model, self.factor = [model], 1.0 + 30.0 * rank

    def forward(self, x):
        return self.model[0](x) * self.factor


def run_the_page(rank):
    setup, loop = blocks("docs/how-to/amp.md")[0], blocks("docs/how-to/amp.md")[-1]
    found = []
    for code in (loop, loop.replace("gm.share_found_inf_", "# ")):
        scope = {}
        exec(setup, scope)  # noqa: S102 the page's own code
        scope["model"] = Louder(scope["model"], rank)
        try:
            exec(code, scope)  # noqa: S102
            said = ""
        except gm.RankError as error:
            said = str(error)
        found.append((scope["scales"], scope["stats"].columns, said))
    return found


def test_the_loop_of_the_page_keeps_scales_equal(two_ranks):
    (first, alone), (second, other) = two_ranks.run(run_the_page)
    assert first[0] == second[0]
    assert len(set(first[0])) > 1
    assert torch.equal(first[1], second[1])
    # without the agreement the scales differ, and the next call says so
    assert alone[0] != other[0]
    assert first[2] == second[2] == ""
    assert alone[2] == other[2]
    assert re.match(r"reduce: rank 1 called \w+ with inv_scale=\S+, but rank 0 with inv_scale=", alone[2])


def torch_alone(rank, case):
    mesh = mesh_of((2,), ("tp",))
    copied, cut, plain = (nn.Parameter(torch.ones(4)) for _ in range(3))
    copied = nn.Parameter(distribute_tensor(copied.data, mesh, [Replicate()]))
    cut = nn.Parameter(distribute_tensor(cut.data, mesh, [Shard(0)]))
    cases = {"plain": [plain], "cut": [cut], "copied, cut": [copied, cut], "mixed": [cut, plain], "none": []}
    for p in cases[case]:
        p.grad = p.detach().clone()
    if rank == 1 and case != "none":
        held(cases[case][-1].grad)[0] = INF
    optimizer = torch.optim.SGD(cases[case] or [plain])
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


@pytest.mark.parametrize("case", ["plain", "cut", "copied, cut", "mixed", "none"])
def test_what_torch_agrees_on_alone_is_as_the_page_says(two_ranks, case):
    # if this fails with a new torch, update docs/how-to/amp.md
    said = {"mixed": "mixed torch.Tensor and DTensor", "none": "No inf checks were recorded"}
    scales = {"plain": [8.0, 4.0], "cut": [4.0, 4.0], "copied, cut": [8.0, 4.0]}
    for rank, (failed, value) in enumerate(two_ranks.outcomes(torch_alone, case)):
        assert failed == (case in said)
        assert said[case] in value if failed else value == scales[case][rank]


def fused_with_the_scaler_of_fsdp(rank):
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([parameter], fused=True)
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    scaler.scale(parameter.sum()).backward()
    parameter.grad[0] = INF if rank == 1 else 1.0
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def test_the_scaler_of_fsdp_agrees_for_no_fused_optimizer(two_ranks):
    assert two_ranks.run(fused_with_the_scaler_of_fsdp) == [8.0, 4.0]


def misuse(rank, how):
    model, other = stage(rank), stage(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = GradScaler("cpu")
    stats = gm.collect_grads(model, reduce=how != "stats of this rank")
    if how == "another scaler":
        scaler = other
    elif how == "no stats":
        stats = stats.columns
    elif how == "disabled":
        scaler = GradScaler("cpu", enabled=False)
    elif how == "too late":
        gm.share_found_inf_(scaler, optimizer, stats)
        scaler.step(optimizer)
    gm.share_found_inf_(scaler, optimizer, stats)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("stats of this rank", "ValueError: share_found_inf_: these stats are of this rank only"),
        ("another scaler", "TypeError: share_found_inf_: expected a torch.amp.GradScaler, got ModuleDict"),
        ("no stats", "TypeError: share_found_inf_: expected the TensorStats"),
        ("too late", r"RuntimeError: share_found_inf_: scaler.step\(optimizer\) was already called"),
        ("disabled", None),
    ],
)
def test_a_misuse_is_said(two_ranks, how, said):
    for failed, text in two_ranks.outcomes(misuse, how):
        assert failed == (said is not None)
        assert said is None or re.search(said, text)
