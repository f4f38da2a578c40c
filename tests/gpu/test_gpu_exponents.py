"""Histograms of magnitudes on a real device: the counts of the CPU, and captured graphs."""

from __future__ import annotations

import pytest
import torch

from gradiometer.ops import exponent_reference
from support.gpu import DEVICE, DTYPES, SIZES, no_waits, record, values

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("_dynamo"), pytest.mark.filterwarnings("default")]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def assert_counts(rows, tensors):
    assert torch.equal(rows.cpu(), exponent_reference.exponent_stats([x.cpu() for x in tensors]))


def measured(tensors):
    with no_waits():
        return torch.ops.gradiometer.exponent_stats(tensors)


@every_dtype
def test_the_kernel_counts_what_the_cpu_counts(dtype):
    tensors = [values(size + i % 3, dtype)[i % 3 :] for i, size in enumerate(SIZES)]
    assert_counts(measured(tensors), tensors)
    # elements of all magnitudes, and any bits
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    info = torch.iinfo(kind)
    bits = torch.randint(info.min, info.max, (100_003,), dtype=kind, device=DEVICE).view(dtype)
    zeros = torch.zeros(40_000, dtype=dtype, device=DEVICE)
    zeros[20_000:] = 2.0**-13
    assert_counts(measured([bits, bits[1:], zeros]), [bits, bits[1:], zeros])


def test_a_graph_counts_what_it_finds_at_each_replay():
    tensors = [values(70_000, dtype) for dtype in DTYPES]
    measured(tensors)
    graph, rows = record(lambda: torch.ops.gradiometer.exponent_stats(tensors))
    for factor in (1.0, 0.25):
        for x in tensors:
            x.mul_(factor)
        graph.replay()
        assert_counts(rows, tensors)
