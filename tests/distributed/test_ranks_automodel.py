"""The clipping cases of NVIDIA NeMo Automodel as a table: partial sums, mixed meshes, empty shards, experts.

They come from its `run_clip_grad_norm_correctness.py`, `test_clip_grad_norm_ep.py` and
`test_train_utils.py`; further placements are added. Gradients are whole numbers, so that their parts add up
exactly; the expected norm is that of the whole gradients, each counted once.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import gradiometer as gm
from support.rank_models import full, held, mesh_of
from support.rank_pool import pool_of

INF, NAN = math.inf, math.nan
ORDERS = (2.0, INF, 1.0, 3.0)
MAX_NORM = 0.5
PLACEMENTS = {"R": Replicate(), "S0": Shard(0), "S1": Shard(1), "P": Partial()}


class Held(NamedTuple):
    """A tensor: its shape, its mesh, and the placements of parameter and gradient; "" for plain."""

    shape: tuple[int, ...]
    mesh: Any
    parameter: str
    # None: the same as the parameter
    gradient: str | None = None
    # ranks of the pipeline stages that have it; None: all
    ranks: tuple[int, ...] | None = None

    @property
    def placed(self):
        return self.parameter if self.gradient is None else self.gradient


def line(size, name):
    return (size,), (name,)


def square(size, first, second):
    return (size // 2, 2), (first, second)


# name -> the tensors of the case for a number of ranks
CASES = {
    "TP": lambda n: [
        Held((8, 6), line(n, "tp"), "S0"),
        Held((6, 8), line(n, "tp"), "S1"),
        Held((4, 4), line(n, "tp"), "R"),
    ],
    "stacked experts": lambda n: [Held((2 * n, 3, 4), line(n, "ep"), "S0") for _ in range(5)],
    "experts, some copied": lambda n: [
        Held((2 * n, 6), line(n, "ep"), "S0"),
        Held((5, 5), line(n, "ep"), "R"),
    ],
    "FSDP2": lambda n: [Held((4 * n, 5), line(n, "dp"), "S0"), Held((8 * n, 2), line(n, "dp"), "S0")],
    "EP and FSDP2 on separate meshes": lambda n: [
        Held((2 * n, 3, 4), line(n, "ep"), "S0"),
        Held((4 * n, 5), line(n, "dp"), "S0"),
        Held((4, 4), line(n, "dp"), "R"),
    ],
    "EP and FSDP2 on one mesh": lambda n: [
        Held((n, 8, 3), square(n, "dp", "ep"), "S1 S0"),
        Held((n, 5), square(n, "dp", "ep"), "S0 R"),
        Held((4, 4), square(n, "dp", "ep"), "R R"),
    ],
    "TP and EP on one mesh": lambda n: [
        Held((6, 4), square(n, "tp", "ep"), "S0 R"),
        Held((6, 4), square(n, "tp", "ep"), "R S0"),
        Held((3, 3), square(n, "tp", "ep"), "R R"),
    ],
    "TP x DP and TP x EP": lambda n: [
        Held((6, 4), square(n, "dp", "tp"), "R S0"),
        Held((6, 4), square(n, "dp", "tp"), "S0 S1"),
        Held((4, 6), square(n, "ep", "tp"), "S0 S0"),
        Held((3, 3), square(n, "ep", "tp"), "R R"),
    ],
    "copies alone": lambda n: [Held((6, 4), line(n, "m"), "R"), Held((4, 6), line(n, "m"), "R")],
    "a dimension of one rank": lambda n: [
        Held((2 * n, 3), ((1, n), ("dp", "ep")), "R S0"),
        Held((3, 2 * n), ((1, n), ("dp", "ep")), "R S1"),
        Held((2 * n, 3), ((1, n), ("dp", "ep")), "S1 S0"),
    ],
    "three meshes": lambda n: [
        Held((2 * n, 3), line(n, "ep"), "S0"),
        Held((4 * n, 2), line(n, "dp"), "S0"),
        Held((3, 4 * n), line(n, "tp"), "S1"),
        Held((3, 3), line(n, "dp"), "R"),
        Held((5,), None, ""),
    ],
    "small tensors": lambda n: [
        Held((4 * n,), line(n, "m"), "S0"),
        Held((16,), line(n, "m"), "R"),
        Held((1,), line(n, "m"), "R"),
        Held((), line(n, "m"), "R"),
    ],
    "empty shards": lambda n: [
        Held((1, 2), line(n, "m"), "S0"),
        Held((n - 1,), line(n, "m"), "S0"),
        Held((0, 3), line(n, "m"), "S0"),
    ],
    "empty shards on one mesh": lambda n: [
        Held((1, 3), square(n, "dp", "tp"), "S0 S0"),
        Held((3, 1), square(n, "dp", "tp"), "S1 S0"),
    ],
    "pipeline": lambda n: [
        *[Held((6, 4), None, "", None, (rank,)) for rank in range(n)],
        # one stage has more tensors than the others
        *[Held((i + 1,), None, "", None, (0,)) for i in range(3)],
    ],
    "TP x PP": lambda n: [
        Held((6, 4), (*square(n, "pp", "tp"), "tp"), "S0", None, tuple(range(n // 2))),
        Held((6, 4), (*square(n, "pp", "tp"), "tp"), "S1", None, tuple(range(n // 2, n))),
        Held((3,), (*square(n, "pp", "tp"), "tp"), "R", None, tuple(range(n // 2, n))),
    ],
    # a normalization under sequence parallelism, and LoRA's first factor beside a column-parallel weight
    "summands of a copied parameter": lambda n: [Held((4, 3), line(n, "m"), "R", "P")],
    "summands of a parameter of summands": lambda n: [Held((4, 3), line(n, "m"), "P", "P")],
    "summands of a sharded parameter": lambda n: [
        Held((2 * n, 3), line(n, "m"), "S0", "P"),
        Held((3, 2 * n), line(n, "m"), "S1", "P"),
    ],
    "a whole gradient of a parameter of summands": lambda n: [
        # autograd makes such a gradient
        Held((4, 3), line(n, "m"), "P", "R"),
        Held((4, 3), line(n, "m"), "R", "R"),
    ],
    "a sharded gradient of a parameter of summands": lambda n: [Held((n + 1, 3), line(n, "m"), "P", "S0")],
    "summands among others": lambda n: [
        Held((4, 3), line(n, "m"), "P", "P"),
        Held((3, 2), line(n, "other"), "R", "P"),
        Held((2 * n, 3), line(n, "m"), "S0"),
        Held((2,), None, ""),
    ],
    "summands on one mesh": lambda n: [
        Held((4, 6), square(n, "dp", "tp"), "S0 P", "S0 P"),
        Held((4, 6), square(n, "dp", "tp"), "P R", "P R"),
        Held((4, 6), square(n, "dp", "tp"), "P P", "P P"),
        Held((4, 6), square(n, "dp", "tp"), "S0 R", "S0 P"),
        Held((4, 6), square(n, "dp", "tp"), "P S1", "R S1"),
        Held((4, 6), square(n, "dp", "tp"), "S1 P", "P S0"),
    ],
    "a plain gradient of a sharded parameter": lambda n: [
        Held((2 * n + 1, 3), line(n, "m"), "S0", ""),
        Held((4, 3), line(n, "m"), "P", ""),
    ],
}
# a plain parameter alone does not show that ranks must reduce: these cases pass gm.Ranks
TOLD = {
    "a sharded gradient of a plain parameter": lambda n: [Held((n + 1, 3), line(n, "m"), "", "S0")],
    "summands of a plain parameter": lambda n: [
        Held((4, 3), line(n, "m"), "", "P"),
        Held((4, 3), square(n, "dp", "tp"), "", "P S0"),
    ],
}
SQUARE = (
    "TP and EP on one mesh",
    "TP x DP and TP x EP",
    "EP and FSDP2 on one mesh",
    "empty shards on one mesh",
    "TP x PP",
    "summands on one mesh",
)


def whole_of(place, shape):
    """Return the whole gradient of a tensor, the same on every rank; whole numbers."""
    generator = torch.Generator().manual_seed(place)
    return torch.randint(-9, 10, shape, generator=generator).double()


def part_of(whole, mesh, dimension):
    """Return this rank's summand of a tensor; the ranks of a mesh dimension add up to the whole."""
    parts = [2.0 * whole + place + 1.0 for place in range(mesh.size(dimension) - 1)]
    return [*parts, whole - sum(parts)][mesh.get_local_rank(dimension)]


def placed(whole, part, how):
    """Return this rank's part of a whole tensor as a DTensor with these placements; "" for plain."""
    if not how:
        return whole.clone()
    shape, names, *sub = part.mesh
    mesh = mesh_of(shape, names)
    mesh = mesh[sub[0]] if sub else mesh
    words = how.split()
    for dimension, word in enumerate(words):
        if word == "P":
            whole = part_of(whole, mesh, dimension)
    kept = [PLACEMENTS["R" if word == "P" else word] for word in words]
    local = distribute_tensor(whole, mesh, kept, src_data_rank=None).to_local()
    target = [PLACEMENTS[word] for word in words]
    return DTensor.from_local(local, mesh, target, run_check=False, shape=whole.shape, stride=whole.stride())


def build(rank, size, case):
    """Return this rank's parameters, with gradients, by name."""
    model = {}
    for place, part in enumerate((CASES | TOLD)[case](size)):
        if part.ranks is None or rank in part.ranks:
            whole = whole_of(place, part.shape)
            parameter = nn.Parameter(placed(torch.zeros_like(whole), part, part.parameter))
            parameter.grad = placed(whole, part, part.placed)
            model[f"{place}.w"] = parameter
    return model


def wholes(model):
    return {name: full(p.grad).clone() for name, p in model.items()}


def measured(rank, size, case):
    """Return the result of every function for the case, and the gradients after clipping."""
    told = case in TOLD
    model = build(rank, size, case)
    ranks = gm.Ranks(model)
    stats = gm.collect_grads(model, reduce=ranks)
    norms = dict(zip(stats.names, stats.norm.tolist(), strict=True))
    said = [gm.grad_norm(model, reduce=ranks), gm.grad_norm(model, reduce=True), float(stats.total_norm)]
    if case not in ("pipeline", "TP x PP") and not told:
        said.append(gm.grad_norm(model))
    found = {2.0: said}
    left = []
    for order in ORDERS:
        for reduce in (ranks, True):
            model = build(rank, size, case)
            norm = gm.clip_grad_norm_(model, MAX_NORM, order, reduce=reduce)
            found.setdefault(order, []).append(float(norm))
            left.append((order, wholes(model)))
    model = build(rank, size, case)
    before = {name: held(p.grad).clone() for name, p in model.items()}
    gm.collect_and_clip_(model, 1e9, reduce=ranks)
    same = all(torch.equal(held(p.grad), before[name]) for name, p in model.items())
    return norms, found, left, same


def norm_of(tensors, order):
    values = [abs(x) for tensor in tensors for x in tensor.flatten().tolist()]
    if order == INF:
        return max(values)
    return math.fsum(x**order for x in values) ** (1 / order)


@pytest.mark.parametrize(
    ("case", "size"),
    [
        pytest.param(case, size, marks=(pytest.mark.deep,) if size == 4 and case not in SQUARE else ())
        for case in (*CASES, *TOLD)
        for size in (2, 4)
        if case not in SQUARE or size == 4
    ],
)
def test_every_rank_has_the_norm_of_the_whole_gradients_and_clips_by_it(request, case, size):
    parts = (CASES | TOLD)[case](size)
    expected = {f"{place}.w": whole_of(place, part.shape) for place, part in enumerate(parts)}
    for norms, found, left, same in pool_of(request, size).run(measured, size, case):
        for name, whole in expected.items():
            assert norms[name] == pytest.approx(norm_of([whole], 2.0), rel=1e-14), name
        assert same
        for order, said in found.items():
            norm = norm_of(expected.values(), order)
            assert said == pytest.approx([norm] * len(said), rel=1e-13)
        for order, clipped in left:
            factor = MAX_NORM / (norm_of(expected.values(), order) + 1e-6)
            for name, grad in clipped.items():
                # the partial summands are larger than their sum, so allow an absolute error
                torch.testing.assert_close(grad, expected[name] * factor, rtol=1e-13, atol=1e-13)


# without gm.Ranks, partial gradients of plain parameters are refused


def without_ranks(rank, case):
    model = build(rank, 2, case)
    before = wholes(model)
    messages = []
    for function in (
        gm.grad_norm,
        gm.collect_grads,
        lambda model: gm.clip_grad_norm_(model, 1.0),
        lambda model: gm.clip_grad_norm_(model, 1.0, 3.0),
    ):
        try:
            function(model)
        except TypeError as error:
            messages.append(str(error))
    same = all(torch.equal(x, before[name]) for name, x in wholes(model).items())
    return messages, same


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (
            "a sharded gradient of a plain parameter",
            r"the gradient of '0.w' has placements .*, but its parameter is a plain tensor, .*; pass reduce",
        ),
        ("summands of a plain parameter", "'0.w' is a DTensor with .*not yet reduced .*reduce=gm.Ranks"),
    ],
)
def test_a_part_of_a_gradient_is_not_taken_for_the_whole_of_a_plain_parameter(two_ranks, case, said):
    for messages, same in two_ranks.run(without_ranks, case):
        assert len(messages) == 4
        assert all(re.search(said, message) for message in messages)
        assert same


def on_two_meshes(_rank, reduce):
    mesh, other = mesh_of((2,), ("m",)), mesh_of((1, 2), ("dp", "ep"))
    weight = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    weight.grad = distribute_tensor(torch.ones(4), other, [Replicate(), Shard(0)])
    gm.collect_grads({"w": weight}, reduce=reduce)


@pytest.mark.parametrize("reduce", [True, False])
def test_a_gradient_on_another_mesh_than_its_parameter_is_refused_by_name(two_ranks, reduce):
    for failed, text in two_ranks.outcomes(on_two_meshes, reduce):
        assert failed
        said = r"TypeError: collect_grads: the gradient of 'w' is on the mesh .*, but its parameter is on"
        assert re.search(said, text)


# experts with equal names on different ranks


def expert_model(rank, size, kind):
    """Return a model with experts, and the tensors that show which ranks hold different ones."""
    mesh = mesh_of((size,), ("dp_shard",))
    model = {"dense": nn.Parameter(distribute_tensor(torch.zeros(2 * size, 4), mesh, [Shard(0)]))}
    model["dense"].grad = distribute_tensor(torch.ones(2 * size, 4), mesh, [Shard(0)])
    if kind == "sharded":
        pair = mesh_of((size // 2, 2), ("ep_shard", "ep"))
        value = 10.0 if pair.get_local_rank("ep") == 0 else 0.1
        local = torch.full((2, 4), value)
        grad = DTensor.from_local(local, pair["ep_shard"], [Shard(1)], run_check=False)
        model["experts"] = nn.Parameter(torch.zeros_like(grad))
        model["experts"].grad = grad
        return model, {"experts": pair.get_group("ep")}
    model["experts"] = nn.Parameter(torch.zeros(2, 8))
    if rank == 0 or kind == "plain":
        model["experts"].grad = torch.full((2, 8), 10.0 if rank == 0 else 0.1)
    return model, {"experts": None}


def clip_experts(rank, size, kind, order):
    model, shards = expert_model(rank, size, kind)
    ranks = gm.Ranks(model, shards=shards)
    before = None if model["experts"].grad is None else held(model["experts"].grad).clone()
    norm = float(gm.clip_grad_norm_(model, 1.0, order, reduce=ranks))
    expert = None if before is None else held(model["experts"].grad) / before
    return norm, held(model["dense"].grad), expert


# the numbers of elements equal to 10 and to 0.1 among all experts
EXPERTS = {"plain": (16, 48), "sharded": (16, 16), "on one rank": (16, 0)}


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("order", [2.0, INF, 1.0])
def test_experts_outside_of_their_mesh_count_on_every_rank(four_ranks, kind, order):
    large, small = EXPERTS[kind]
    elements = [torch.full((large,), 10.0), torch.full((small,), 0.1), torch.ones(32)]
    expected = norm_of(elements, order)
    factor = torch.tensor(1.0 / (expected + 1e-6))
    for rank, (norm, dense, expert) in enumerate(four_ranks.run(clip_experts, 4, kind, order)):
        assert norm == pytest.approx(expected, rel=1e-7)
        torch.testing.assert_close(dense, factor.expand(2, 4), rtol=1e-6, atol=0.0)
        if kind == "on one rank" and rank:
            assert expert is None
        else:
            torch.testing.assert_close(expert, factor.expand(expert.shape), rtol=1e-6, atol=0.0)


# extreme values


def clip_value(_rank, values, max_norm, order):
    mesh = mesh_of((2,), ("m",))
    weight = nn.Parameter(distribute_tensor(torch.zeros(1, 2), mesh, [Shard(0)]))
    weight.grad = distribute_tensor(torch.tensor([values]), mesh, [Shard(0)])
    norm = float(gm.clip_grad_norm_({"w": weight}, max_norm, order))
    return norm, weight.grad.full_tensor()


@pytest.mark.parametrize("order", [2.0, INF, 1.0])
@pytest.mark.parametrize(
    ("values", "norms"),
    [
        ([3.0, 4.0], {2.0: 5.0, INF: 4.0, 1.0: 7.0}),
        ([0.0, 0.0], {2.0: 0.0, INF: 0.0, 1.0: 0.0}),
        # its square overflows fp32
        ([6e31, 4.0], {2.0: 6e31, INF: 6e31, 1.0: 6e31}),
        ([INF, 1.0], {2.0: INF, INF: INF, 1.0: INF}),
        ([NAN, 1.0], {2.0: NAN, INF: NAN, 1.0: NAN}),
    ],
    ids=str,
)
def test_beside_an_empty_shard_every_value_is_clipped_alike(two_ranks, values, norms, order):
    for norm, grad in two_ranks.run(clip_value, values, 0.3, order):
        assert norm == pytest.approx(norms[order], rel=1e-6, nan_ok=True)
        finite = grad[grad.isfinite()]
        assert norm_of([finite], order) <= 0.3 + 1e-6
        if any(values):
            assert finite.count_nonzero() == sum(map(math.isfinite, values))
        assert grad.isfinite().flatten().tolist() == list(map(math.isfinite, values))
