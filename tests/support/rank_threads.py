"""Ranks that are threads of this process: they exchange values through a barrier."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import torch

from gradiometer.columns import TENSORS
from gradiometer.distributed import NUM_SUMMED
from gradiometer.distributed.global_plan import Member, make_global_plan
from gradiometer.distributed.sharding import Mesh, Sharding, ShardSpec
from gradiometer.recorder import Catalog, StepRecord, Table


def catalog_of(size, kinds=("grads",), taps=()):
    return Catalog.of(("w", "b"), ((size, 2), (3,)), ("float32",) * 2, kinds, taps)


class Side:
    """Replaces the module `distributed`: the ranks are threads, and meet here."""

    def __init__(self, size):
        self.size, self.given, self.results = size, {}, None
        self.barrier = threading.Barrier(size, timeout=60)
        self.meetings = []

    def meet(self, rank, what, value, join):
        self.given[rank] = (what, value)
        if self.barrier.wait() == 0:
            kinds = {kind for kind, _ in self.given.values()}
            assert len(kinds) == 1, "ranks do different things"
            self.meetings.append(what)
            self.results = join([self.given[place][1] for place in range(self.size)])
        self.barrier.wait()
        return self.results

    def of(self, rank):
        def pair(parts, *_):
            what = str([(len(tensor), how) for tensor, how in parts])
            return self.meet(rank, what, [tensor for tensor, _ in parts], joined)

        def joined(given):
            sums, tops = zip(*given, strict=True)
            return [torch.stack(sums).sum(0), torch.stack(tops).amax(0)]

        def one(tensor, *_):
            return self.meet(rank, f"beat {len(tensor)}", tensor, lambda all_of: torch.stack(all_of).amax(0))

        return SimpleNamespace(
            all_reduce_pair=pair,
            all_reduce=one,
            share=lambda value, _: self.meet(rank, "share", value, lambda given: given),
            close=lambda _: None,
            is_active=lambda: True,
        )


class Agreed:
    """Replaces `Ranks`: ``w`` is sharded, and ``b`` is on all ranks, where the first counts it."""

    def __init__(self, rank, size, timeout=5.0):
        specs = (ShardSpec((size, 2), "float32", 0, ("S(0)",)), ShardSpec((3,), "float32"))
        shardings = [Sharding(("w", "b"), specs, (Mesh(("dp",), (size,), (r,)),)) for r in range(size)]
        members = [Member(sharding.digest, sharding.coordinates) for sharding in shardings]
        self.plan = make_global_plan(members, {shardings[0].digest: shardings[0]})
        self.names, self.rank, self.size, self.timeout = ("w", "b"), rank, size, timeout
        self.global_ranks = list(range(size))
        self.counted = torch.tensor(self.plan.counts(rank)).unsqueeze(1)

    def to_rows(self, _, columns):
        # as in `Ranks`, a matrix
        return torch.where(self.counted, columns, 0)

    def bits_of(self, _, fingerprints):
        """Add up fingerprints, and one number with coefficients that add up to 0 over equal copies."""
        bits = torch.where(fingerprints[:, :1] < 0, 0, fingerprints).double()
        coefficients = [1.0 if index else 1.0 - count for index, count in self.plan.copies(self.rank)]
        differences = bits[:, 1:2] * torch.tensor(coefficients, dtype=torch.float64).unsqueeze(1)
        return torch.cat([self.to_rows(None, bits), differences, bits.new_zeros(2, NUM_SUMMED - 4)], dim=1)

    def merged_bits(self, sums):
        return sums[..., :3].long(), sums[..., 3] != 0

    def where(self, name, rank):
        return self.plan.where(self.names.index(name), rank)


def step_of(rank, size, number, every, bad):
    catalog, is_bad = catalog_of(size), bad.get(number) == rank
    values = torch.zeros(2, TENSORS.width, dtype=torch.float64)
    values[0, :2] = torch.tensor([2.0, 2.0 * (number + rank)])
    values[1, :2] = torch.tensor([3.0, 3.0 * number])
    values[0, TENSORS.index["n_nan"]] = float(is_bad)
    scalars = {"loss": float(number + rank), "same": 0.1 * number}
    if rank == size - 1 and number % 2:
        scalars["last"] = 1.0
    tables = {}
    if number % every == 0 or is_bad:
        tables["grads"] = Table(catalog.kind("grads"), catalog.parameters, values)
    return StepRecord(number, 0.0, scalars, catalog, tables)
