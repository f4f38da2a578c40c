"""Taps on several ranks: their rows are merged as those of a single process that sees the whole batch."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradiometer as gm
from gradiometer.columns import ACTIVATIONS, Column, Derived, Schema
from gradiometer.recorder import Kind, register
from support.rank_models import error_of

STEPS = 3


def train(rank, size, run_dir, names=None, spoiled=-1):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)).double()
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
    return error_of(lambda: train(rank, size, run_dir, names=rf"^{rank}$"))


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


def signs(rank, run_dir, columns):
    # a class of its own on each rank: functions of two processes have nothing in common but their code
    own = tuple([Column(name, "sum", "1", name, style="count") for name in columns])
    derived = (Derived("share", lambda row: row(columns[1]) / row("numel").clamp(min=1), "a share"),)

    def measure(tensors):
        return torch.tensor([[x.numel(), int((x < 0).sum())] for x in tensors], dtype=torch.float64)

    schema = Schema("signs", own, derived)
    kind = register(Kind(f"signs of {columns[1]}", schema, "gradient", measure=measure))
    model = nn.Linear(3, 2, bias=False)
    whole = DistributedDataParallel(model)
    with gm.Monitor(whole, kinds=[kind], run_dir=run_dir, rules=()) as monitor:
        whole(torch.full((1, 3), -1.0 - rank)).sum().backward()
        monitor.record()
        monitor.advance()
    return monitor.failures


def refused_signs(rank, run_dir):
    return error_of(lambda: signs(rank, run_dir, ("numel", f"n_{rank}")))


def test_a_kind_of_ones_own_is_merged(two_ranks, tmp_path):
    assert two_ranks.run(signs, str(tmp_path), ("numel", "n_negative")) == [{}, {}]
    record = gm.read_run(tmp_path).record(0)
    # the gradients are copies, which count once
    values = [record.value(name, "signs of n_negative").tolist() for name in ("numel", "n_negative")]
    assert values == [[6.0], [6.0]]


def test_ranks_with_other_kinds_are_refused(two_ranks, tmp_path):
    for said in two_ranks.run(refused_signs, str(tmp_path)):
        assert "Monitor(kinds=" in said
