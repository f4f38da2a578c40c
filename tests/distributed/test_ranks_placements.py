"""Whatever the placements of a DTensor, its merged shards equal the whole tensor."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import gradiometer as gm
from gradiometer.columns import TENSORS
from support.oracle import assert_same_counts, assert_within_bounds, exact
from support.rank_models import Collectives, mesh_of
from support.strategies import FLOATS, Recipe

MESHES = {2: [(2,)], 4: [(4,), (2, 2), (4, 1), (1, 4)]}
VALUES = ("normal", "constant", "wide", "tiny", "zeros", "some zeros", "nonfinite")
SIZES = st.sampled_from((0, 1, 1, 2, 3, 3, 4, 5, 7, 13))


class Placed(NamedTuple):
    """A tensor, and for each mesh dimension the tensor dimension that it shards; None: replicated."""

    recipe: Recipe
    cuts: tuple[int | None, ...]
    # sharded over the last mesh dimension first, as tensor parallelism before FSDP2 does
    strided: bool = False


@st.composite
def placed(draw, mesh):
    shape = tuple(draw(st.lists(SIZES, min_size=1, max_size=3)))
    along = st.none() | st.integers(0, len(shape) - 1)
    cuts = tuple(draw(along) for _ in mesh)
    strided = len(mesh) == 2 and cuts[0] is not None and cuts[0] == cuts[1] and draw(st.booleans())
    recipe = Recipe(
        dtype=draw(st.sampled_from((*FLOATS, torch.complex64, torch.float8_e4m3fn))),
        shape=shape,
        values=draw(st.sampled_from(VALUES)),
        specials=draw(st.sampled_from((0, 0, 1, 2))),
        seed=draw(st.integers(0, 2**16)),
    )
    return Placed(recipe, cuts, strided)


@st.composite
def examples(draw, size):
    mesh = draw(st.sampled_from(MESHES[size]))
    return mesh, draw(st.lists(placed(mesh), min_size=1, max_size=5))


def distribute(tensor, mesh, cuts, strided):
    if not strided:
        placements = [Replicate() if dim is None else Shard(dim) for dim in cuts]
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    dim, (outer, inner) = cuts[0], mesh.shape
    local = tensor
    for place, parts in zip(reversed(mesh.get_coordinate()), (inner, outer), strict=True):
        chunks = local.chunk(parts, dim)
        local = chunks[place] if place < len(chunks) else local.narrow(dim, 0, 0)
    return DTensor.from_local(
        local,
        mesh,
        [_StridedShard(dim, split_factor=inner), Shard(dim)],
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def measured(_rank, shape, tensors, cuts, strided):
    mesh = mesh_of(shape, ("one", "two")[: len(shape)])
    named = {
        str(i): distribute(*each)
        for i, each in enumerate(zip(tensors, [mesh] * len(tensors), cuts, strided, strict=True))
    }
    ranks = gm.Ranks(named)
    with Collectives() as collectives:
        stats = gm.collect(named, reduce=ranks)
    assert [name for name, _ in collectives.calls] == ["allreduce_", "allreduce_"]
    assert stats.names == tuple(named)
    return stats.columns.tolist(), stats.origin.int().tolist(), (stats.local.n_nonfinite > 0).tolist()


def check(pool, example):
    shape, each = example
    tensors = [one.recipe.tensor() for one in each]
    cuts, strided = [one.cuts for one in each], [one.strided for one in each]
    found = pool.run(measured, shape, tensors, cuts, strided)
    for row, tensor in enumerate(tensors):
        expected = exact(tensor)
        bad = [rank for rank, (_, _, local) in enumerate(found) if local[row]]
        for columns, origin, _ in found:
            assert columns[row] == found[0][0][row]
            values = dict(zip(TENSORS.index, columns[row], strict=True))
            assert_same_counts(values, expected)
            assert_within_bounds(values, expected)
            # several ranks hold copies of the non-finite element
            assert origin[row] == min(bad, default=-1)
            assert (origin[row] >= 0) == (expected.n_nonfinite > 0)


@given(examples(2))
def test_two_ranks(two_ranks, example):
    check(two_ranks, example)


@given(examples(4))
def test_four_ranks(four_ranks, example):
    check(four_ranks, example)


def test_the_parts_of_a_strided_cut_are_those_of_torch(four_ranks):
    """The placements that the examples build by hand equal those of tensor parallelism with FSDP2."""
    found = four_ranks.run(by_torch)
    assert math.prod(found) > 0


def by_torch(_rank):
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of((2, 2), ("one", "two"))
    model = torch.nn.Linear(3, 13, bias=False)
    whole = torch.arange(39.0).view(13, 3)
    weight = distribute_tensor(whole, mesh["two"], [Shard(0)], src_data_rank=None)
    model.weight = torch.nn.Parameter(weight)
    fully_shard(model, mesh=mesh["one"])
    by_hand = distribute(whole, mesh, (0, 0), strided=True)
    assert model.weight.placements == by_hand.placements
    assert torch.equal(model.weight.to_local(), by_hand.to_local())
    return by_hand.to_local().numel()
