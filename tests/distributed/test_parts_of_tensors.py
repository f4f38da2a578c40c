"""Which elements of a whole tensor a rank holds, against torch's own shards."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor as TorchDTensor,
)
from torch.distributed.tensor import (
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

import gradiometer as gm
from gradiometer.distributed import UnknownPartError, part_of
from support.rank_models import mesh_of

SHAPES = [(), (1,), (3,), (8,), (13,), (3, 5), (5, 3), (1, 7), (4, 2, 3), (0, 3)]
MESHES = [(4,), (2, 2), (1, 4), (4, 1)]


def indices(part, local, shape):
    """Return the index in the whole tensor of each element of the local one; each is in one box."""
    whole = torch.arange(math.prod(shape)).view(shape)
    found = torch.full(local.shape, -1)
    assert part is None or part.shape == tuple(shape)
    for box in () if part is None else part.boxes:
        there = found[tuple([slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True)])]
        assert bool((there == -1).all())
        there.copy_(whole[tuple([slice(a, a + n) for a, n in zip(box.origin, box.shape, strict=True)])])
    return whole if part is None else found


def cases():
    for shape, mesh in itertools.product(SHAPES, MESHES):
        dims = [Replicate(), *[Shard(d) for d in range(len(shape))]]
        dims += [_StridedShard(d, split_factor=n) for d in range(len(shape)) for n in (2, 3)]
        for placements in itertools.product(dims, repeat=len(mesh)):
            yield shape, mesh, placements


def compared(_rank):
    count = 0
    for shape, sizes, placements in cases():
        mesh = mesh_of(sizes, ("one", "two")[: len(sizes)])
        whole = torch.arange(float(math.prod(shape))).view(shape)
        tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        part, local = part_of("w", tensor, "test"), tensor.to_local()
        assert torch.equal(indices(part, local, shape), local.long()), (shape, sizes, placements)
        size, offset = compute_local_shape_and_global_offset(tuple(shape), mesh, placements)
        if part is not None and local.numel():
            assert size == tuple(local.shape)
            assert offset == part.boxes[0].origin
        count += 1
    return count


def test_the_parts_are_those_of_torch(four_ranks):
    assert min(four_ranks.run(compared)) > 500


def fsdp_over_tp(_rank, rows, columns, dim):
    mesh = mesh_of((2, 2), ("one", "two"))
    model = nn.Linear(columns, rows, bias=False)
    whole = torch.arange(float(rows * columns)).view(rows, columns)
    model.weight = nn.Parameter(distribute_tensor(whole, mesh["two"], [Shard(dim)], src_data_rank=None))
    fully_shard(model, mesh=mesh["one"])
    local = model.weight.to_local().detach()
    found = indices(part_of("w", model.weight, "test"), local, (rows, columns))
    assert torch.equal(found, local.long())
    return found.flatten().tolist()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 13, 16])
def test_fsdp_over_tensor_parallelism(four_ranks, rows, dim):
    found = four_ranks.run(fsdp_over_tp, rows, 3, dim)
    assert sorted(itertools.chain(*found)) == list(range(3 * rows))


def outside(rank):
    mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1])
    whole = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)
    tensor = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    assert (part_of("w", tensor, "test").boxes == ()) == (rank > 1)
    found = gm.collect_projections({"w": tensor}, reduce=gm.Ranks({"w": tensor}))
    expected = gm.collect_projections({"w": whole})
    assert torch.allclose(found.columns, expected.columns, rtol=1e-14, atol=1e-14)


def test_ranks_outside_of_the_mesh_hold_nothing(four_ranks):
    four_ranks.run(outside)


def odd(rank):
    """Shards of 1 and 3 rows, not those of torch."""
    mesh = mesh_of((2,), ("one",))
    tensor = TorchDTensor.from_local(
        torch.ones(1 + 2 * rank, 2),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=torch.Size((4, 2)),
        stride=(2, 1),
    )
    with pytest.raises(UnknownPartError, match=r"collect_projections: 'w' .* \(4, 2\) .* not known which"):
        gm.collect_projections({"w": tensor})
    partial = TorchDTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    with pytest.raises(TypeError, match=r"'w' is a DTensor with placements .* not yet reduced"):
        gm.collect_projections({"w": partial})


def test_shards_of_other_sizes_are_refused_by_name(two_ranks):
    two_ranks.run(odd)


class DTensor:
    """Just what `part_of` reads, of a rank in a large mesh."""

    def __init__(self, shape, mesh, place, placements, local):
        self.shape, self.placements, self._local = torch.Size(shape), placements, local
        self.device_mesh = SimpleNamespace(shape=mesh, get_coordinate=lambda: place)

    def to_local(self):
        return self._local


def chunk(tensor, count, place):
    """Return a chunk, which may be empty."""
    found = tensor.chunk(count)
    return found[place] if place < len(found) else tensor[:0]


@pytest.mark.parametrize(("rows", "dp", "tp"), [(27, 3, 4), (17, 8, 2), (13, 3, 2), (33, 4, 8), (7, 16, 4)])
def test_where_the_order_of_cuts_matters_the_shards_are_those_of_fsdp(rows, dp, tp):
    whole = torch.arange(rows)
    for place in itertools.product(range(dp), range(tp)):
        # FSDP2 cuts what tensor parallelism has left
        local = chunk(chunk(whole, tp, place[1]), dp, place[0])
        tensor = DTensor((rows,), (dp, tp), place, (_StridedShard(0, split_factor=tp), Shard(0)), local)
        assert torch.equal(indices(part_of("w", tensor, "test"), local, (rows,)), local)
