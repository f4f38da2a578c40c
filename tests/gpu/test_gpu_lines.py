"""Rows and columns of matrices on a real device: the sums of the CPU, and equal lines."""

from __future__ import annotations

import math

import pytest
import torch

from gradiometer import ops
from gradiometer.ops import line_reference
from support.gpu import DEVICE, DTYPES, FEW, no_waits, record

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def assert_lines(found, tensors):
    expected = line_reference.line_stats([x.cpu() for x in tensors])
    # normal numbers, summed in another order
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-12, atol=1e-9)


@every_dtype
def test_the_kernels_measure_what_the_cpu_measures(dtype):
    sizes = (
        [(5, 7), (40, 300), (1000,)] if FEW else [(5, 7), (3000, 1001), (50_000,), (3, 50_000), (50_000, 3)]
    )
    tensors = [torch.randn(size, device=DEVICE).to(dtype) for size in sizes]
    tensors += [tensors[1].t(), tensors[1][:, 1::3]]
    tensors[0][2, 3] = math.nan
    with no_waits():
        found = ops.measure_lines(tensors)
    assert_lines(found, tensors)
    # the same bits in any call
    assert torch.equal(ops.measure_lines(tensors), found)


@every_dtype
def test_equal_lines_have_equal_bits_wherever_they_are(dtype):
    count, length = (40, 300) if FEW else (3000, 4099)
    x = torch.randn(count, length, device=DEVICE)
    places = torch.arange(0, count, 7, device=DEVICE)
    x[:, 5] = math.inf
    x[places] = x[0].clone()
    x = x.to(dtype)
    rows, _ = ops.measure_lines([x]).split([count, length])
    _, columns = ops.measure_lines([x.t().contiguous()]).split([length, count])
    for lines in (rows, columns):
        same = (lines == lines[0]).all(dim=1).nonzero().squeeze(1)
        assert torch.equal(same, places)


def test_a_graph_measures_what_it_finds_at_each_replay():
    tensors = [torch.randn(30, 300, device=DEVICE).to(dtype) for dtype in DTYPES]
    ops.measure_lines(tensors)
    graph, lines = record(lambda: ops.measure_lines(tensors))
    for factor in (1.0, 0.25):
        for x in tensors:
            x.mul_(factor)
        graph.replay()
        assert_lines(lines, tensors)
