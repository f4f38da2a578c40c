"""Pairs on a real device: the numbers of the CPU, captured graphs, and memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import gradiometer as gm
from support.gpu import DEVICE, DTYPES, FEW, SIZES, compiled, fewer, no_waits, on_a_gpu, record, values
from support.pair_oracle import assert_pair

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("_dynamo"), pytest.mark.filterwarnings("default")]

NAMES = tuple(column.name for column in gm.PAIR_COLUMNS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def assert_pairs(columns, *sides):
    for row, *one in zip(columns.tolist(), *sides, strict=True):
        assert_pair(dict(zip(NAMES, row, strict=True)), *[x.cpu() for x in one])


def measured(*sides):
    with no_waits():
        return torch.ops.gradiometer.pair_stats(*map(list, sides))


@every_dtype
def test_the_kernel_agrees_with_exact_sums(dtype):
    a, b, g = ([values(size + i, dtype)[i:] for size in SIZES] for i in range(3))
    for x, y in zip(a[::2], b[::2], strict=True):
        x[::3] = y[::3]
    assert_pairs(measured(a, b, g), a, b, g)
    assert_pairs(measured(a, b), a, b)
    assert_pairs(measured(a, [x.clone() for x in a], g), a, a, g)


def test_all_pairs_of_dtypes_share_a_call():
    sides = [], [], []
    for i, (one, other) in enumerate(itertools.product(DTYPES, repeat=2)):
        for side, dtype in zip(sides, (one, other, DTYPES[i % 4]), strict=True):
            side.append(values(3000 + i, dtype))
    sides[2][::3] = [torch.empty(0, device=DEVICE)] * len(sides[2][::3])
    assert_pairs(measured(*sides), *sides)


def test_strides_agree():
    rows = 8 if FEW else 40
    wide = values(rows * 3000).view(rows, 3000)
    views = [
        wide[:, :2048],
        wide[:1, :2000].expand(5, -1),
        wide.t(),
        wide[:, ::2],
        wide.view(-1).unfold(0, 4096, 9000),
    ]
    dense = [values(x.numel() + 1)[1:].view(x.shape) for x in views]
    grads = [x.to(torch.bfloat16) for x in dense]
    for sides in fewer(list(itertools.permutations((views, dense, grads)))):
        assert_pairs(measured(*sides), *sides)


def test_nan_and_inf_count_as_on_the_cpu():
    size = 9_001 if FEW else 100_000
    a, b, g = ([values(size) for _ in range(3)] for _ in range(3))
    a[0][size * 7 // 10], b[1][5], g[2][-1] = torch.nan, torch.inf, torch.nan
    assert_pairs(measured(a, b, g), a, b, g)


@pytest.mark.parametrize("sample", [1, 1 / 4])
def test_a_recorded_step_measures_each_replay(sample):
    torch.manual_seed(0)
    size = 64 if FEW else 512
    model = nn.Linear(size, size).to(DEVICE)
    snapshot = gm.Snapshot(model, sample=sample)
    x = torch.randn(8, size, device=DEVICE)

    def step():
        model.zero_grad()
        snapshot.update_(model)
        model(x).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
        return gm.collect_updates(model, snapshot)

    graph, stats = record(step)
    found = set()
    for _ in range(4):
        x.normal_()
        graph.replay()
        expected = gm.collect_updates(model, snapshot)
        assert torch.equal(stats.columns, expected.columns)
        found.add(stats.total_value("norm_u").item())
    assert len(found) == 4


@pytest.mark.compiles
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_step_measures_what_it_computes(mode):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 5)).to(DEVICE)
    snapshot = gm.Snapshot(model)

    def step(x):
        model(x).square().mean().backward()
        snapshot.update_(model)
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
        stats = gm.collect_updates(model, snapshot)
        for p in model.parameters():
            p.grad = None
        return stats

    run = compiled(step, mode)
    for _ in range(2 if FEW else 6):
        torch.compiler.cudagraph_mark_step_begin()
        stats = run(torch.randn(8, 16, device=DEVICE))
        sides = list(model.parameters()), list(snapshot.buffers())
        without = [name for name in NAMES if not name.endswith("_g") and name not in {"dot_ug", "n_stuck"}]
        columns = torch.ops.gradiometer.pair_stats(*sides)
        places = [NAMES.index(name) for name in without]
        torch.testing.assert_close(stats.columns[:, places], columns[:, places], rtol=2e-13, atol=1e-20)
        assert stats.norm_g.min() > 0


@on_a_gpu
def test_updates_take_the_memory_of_the_snapshot_alone():
    weights = [nn.Parameter(torch.ones(25_000_000, device=DEVICE)) for _ in range(4)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    size = sum(weight.nbytes for weight in weights)
    before = torch.cuda.memory_allocated()
    snapshot = gm.Snapshot(weights)
    # the allocator rounds up to 2 MiB
    assert torch.cuda.memory_allocated() - before <= size + 8 * 2**20
    gm.collect_updates(weights, snapshot)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with no_waits():
        gm.collect_updates(weights, snapshot)
        snapshot.update_(weights)
    # twelve numbers per chunk, and tables
    assert torch.cuda.max_memory_allocated() - before < 4 * 2**20
