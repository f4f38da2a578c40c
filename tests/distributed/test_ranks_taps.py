"""Taps on several ranks: their rows are merged as those of a single process that sees the whole batch."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradiometer as gm
from gradiometer.columns import ACTIVATIONS

STEPS = 3


def train(rank, size, run_dir, names=None, spoiled=-1):
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(8, 6, dtype=torch.float64), nn.ReLU(), nn.Linear(6, 4, dtype=torch.float64)
    )
    taps = gm.Taps(model, {"all": names or r"^[01]$"})
    whole = DistributedDataParallel(model) if size > 1 else model
    with gm.Monitor(whole, taps=taps, run_dir=run_dir) as monitor:
        for step in range(STEPS):
            whole.zero_grad()
            x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            if step == 1 and rank == spoiled:
                x = x * math.nan
            whole(x.chunk(size)[rank]).square().sum().backward()
            monitor.record()
            monitor.advance()
    taps.remove()
    return [(f.kind, f.tensor, f.message) for f in monitor.findings if f.rule == "nonfinite"]


def refused(rank, size, run_dir):
    try:
        train(rank, size, run_dir, names=rf"^{rank}$")
    except gm.RankError as error:
        return str(error)
    return None


def test_rows_are_those_of_a_single_process(two_ranks, tmp_path):
    two_ranks.run(train, 2, str(tmp_path / "two"))
    train(0, 1, tmp_path / "one")
    two, one = (gm.read_run(tmp_path / name) for name in ("two", "one"))
    assert two.catalog.taps.names == ("0.out", "1.out")
    for step in range(STEPS):
        here, there = two.record(step), one.record(step)
        for kind in ("activations", "activation_grads"):
            for column in ACTIVATIONS.columns:
                merged, whole = (record.value(column.name, kind) for record in (here, there))
                if column.name in {"n_calls", "n_channels"}:
                    assert torch.equal(merged, 2 * whole), column.name
                elif column.name != "n_zero_channels":  # a part of the batch has more of these
                    # sums of 48 terms in another order, relative to the largest they can be
                    scale = float(there.value("sumsq", kind).max()) if column.scaling != "1" else 0.0
                    torch.testing.assert_close(merged, whole, rtol=1e-13, atol=1e-13 * max(scale, 1.0))


def test_the_rank_of_a_nan_is_named(two_ranks, tmp_path):
    found, none = two_ranks.run(train, 2, str(tmp_path), None, 1)
    assert none == []
    ((kind, tensor, message),) = found
    assert (kind, tensor) == ("activations", "0.out")
    assert message.startswith("0.out, rank 1, 24 NaN of 48")


def test_ranks_with_other_taps_are_refused(two_ranks, tmp_path):
    for said in two_ranks.run(refused, 2, str(tmp_path)):
        assert "Monitor(taps=" in said
        assert "pass the same value on all ranks" in said
