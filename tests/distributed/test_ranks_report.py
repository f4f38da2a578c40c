"""The printed text of several ranks: whose statistics these are, and which rank has a NaN."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import gradiometer as gm

# how each gradient is sharded; every rank has a copy of the other tensors
CUTS = {"0.weight": 0, "0.bias": 0, "1.weight": 1}


def model_of(rank):
    """Return a model sharded over all ranks; the last rank has a NaN in its first gradient."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1))
    for name, whole in [(name, torch.full_like(p, 2.0)) for name, p in model.named_parameters()]:
        if name == "0.weight":
            whole[-1, 0] = math.nan
        if name in CUTS:
            part = whole.detach().chunk(mesh.size(), CUTS[name])[rank].contiguous()
            shard = DTensor.from_local(part, mesh, [Shard(CUTS[name])])
            place, _, own = name.rpartition(".")
            setattr(model.get_submodule(place), own, nn.Parameter(shard))
        model.get_parameter(name).grad = shard.clone() if name in CUTS else whole.detach()
    return model


LOCAL = "4 tensors, this rank's shards only (TensorStats.reduce() merges them), 19 elements"

TABLE = """\
4 tensors of all ranks, 37 elements, total norm nan, health 0.00, 1 with NaN, 1 exploding
──────────────────────────────────────────────────────────────────────────────
name      elements  norm  rms  abs max  zero %  NaN  ±Inf  rank  flags
──────────────────────────────────────────────────────────────────────────────
0.weight        24   nan    2        2       0    1     -     1  NAN EXPLODING
0.bias           6   4.9    2        2       0    -     -     -
1.weight         6   4.9    2        2       0    -     -     -
1.bias           1     2    2        2       0    -     -     -
──────────────────────────────────────────────────────────────────────────────
total           37   nan    2        2       0    1     -     1  1 flagged"""


def _reports(rank):
    model = model_of(rank)
    ranks = gm.Ranks(model)
    stats = gm.collect_grads(model)
    reduced = gm.collect_grads(model, reduce=ranks)
    assert repr(stats).startswith("<TensorStats: 4 tensors, this rank's shards only (reduce() merges them), ")
    assert repr(reduced).startswith("<TensorStats: 4 tensors of all ranks, ")
    for local in (stats, reduced.local, stats.by_module(1), stats.merge(stats)):
        assert (local.is_local, local.is_reduced) == (True, False)
        assert local.materialize().is_local
    for merged in (reduced, stats.reduce(), reduced.by_module(1), reduced.merge(reduced)):
        assert (merged.is_local, merged.is_reduced) == (False, True)
        assert merged.materialize().is_reduced
    return stats.materialize(), reduced.materialize()


def test_a_report_says_whose_it_is_and_which_rank_has_a_nan(two_ranks):
    for local, merged in two_ranks.run(_reports):
        # it was pickled to get here
        assert str(local).startswith(LOCAL)
        assert repr(local).startswith(f"<Report: {LOCAL}")
        heading = "this rank's shards only (TensorStats.reduce() merges them)\nmodule"
        assert str(local.by_module(1)).startswith(heading)
        assert str(merged) == TABLE
        assert merged.ranks == {"0.weight": 1}
        exported = merged.to_dict()
        assert exported["ranks"] == merged.ranks
        assert (exported["is_reduced"], exported["is_local"]) == (True, False)
        assert local.to_dict()["is_local"] is True
        assert copy.deepcopy(merged).to_string() == TABLE


def _compiled(rank):
    model = model_of(rank)
    ranks = gm.Ranks(model)
    collect = torch.compile(gm.collect_grads, backend="eager", fullgraph=True)
    stats, reduced = collect(model), collect(model, reduce=ranks)
    assert stats.is_local
    assert reduced.local.is_local
    refused = []
    for shards in (stats, stats.by_module(1), gm.collect_grads(model).by_module(1)):
        with pytest.raises(ValueError, match=r"^reduce: ") as error:
            shards.reduce()
        refused.append(str(error.value))
    return refused, str(stats.reduce(ranks).materialize()), str(reduced.materialize())


def test_shards_that_reduce_knows_nothing_of_are_refused(two_ranks):
    # counted once, as copies, they would give too small a norm
    for (compiled, grouped_in_compiled, grouped), *tables in two_ranks.run(_compiled):
        assert compiled == grouped_in_compiled
        assert compiled.endswith("does not keep their placements; pass ranks = gm.Ranks(model)")
        said = "cannot be merged over ranks; reduce before you group: stats.reduce().group(...)"
        assert grouped.endswith(said)
        assert tables == [TABLE, TABLE]


def _same_everywhere(_):
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    stats = gm.collect_grads(model)
    assert not stats.is_local
    # groups of replicated tensors are replicated too
    return stats.group({"all": "."}).reduce().materialize().total_norm, stats.materialize().is_local


def test_groups_of_copies_can_be_reduced(two_ranks):
    assert two_ranks.run(_same_everywhere) == [(math.sqrt(54), False)] * 2
