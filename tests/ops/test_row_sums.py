"""Sums of small tensors have one order of additions, whatever the processor, the padding and the route."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gradiometer.ops import row_sums as module
from gradiometer.ops.eager_plan import SMALL, WIDTH_OF, WIDTHS
from gradiometer.ops.row_sums import LANES, row_sums


def in_order(row: list[float]) -> float:
    """Add up the numbers of a row as the module's docstring says, one at a time."""
    chunks = [added(parts_of(chunk, LANES)) for chunk in parts_of(row, 1024)]
    return added(parts_of(added(chunks), 1))[0]


def parts_of(row: list[float], length: int) -> list[list[float]]:
    return [row[start : start + length] for start in range(0, len(row), length)]


def added(parts: list[list[float]]) -> list[float]:
    total = parts[0]
    for part in parts[1:]:
        total = [a + b for a, b in zip(total, part, strict=True)]
    return total


def numbers(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(shape, dtype=torch.float64) * 10.0 ** torch.randint(-8, 8, shape)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 2, 3, 17])
def test_each_sum_has_the_documented_order(width, rows):
    x = numbers(rows, width)
    wanted = [in_order(row) for row in x.tolist()]
    assert row_sums(x).tolist() == wanted
    assert row_sums(torch.stack([x, -x]))[1].tolist() == [-total for total in wanted]


@pytest.mark.parametrize("width", WIDTHS)
def test_torch_need_not_add_in_that_order(width, monkeypatch):
    x = numbers(3, width)
    expected = row_sums(x)
    monkeypatch.setattr(module, "_sum_adds_in_order", lambda: False)
    assert torch.equal(row_sums(x), expected)
    out = torch.empty(3, min(width, LANES), dtype=torch.float64)
    assert torch.equal(module.add_lanes(module.lanes_of(x, out)), expected)


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 63, 64, 65, 1000, 1024, 1025, 4097, 5000, SMALL])
def test_trailing_zeros_change_no_bit(size):
    x = numbers(size)

    def padded(width: int) -> Tensor:
        return row_sums(torch.nn.functional.pad(x, (0, width - size)))

    wanted = padded(WIDTH_OF[size])
    for width in WIDTHS:
        if width >= size:
            assert torch.equal(padded(width), wanted)


def test_an_infinite_element_stays_in_its_row():
    x = numbers(3, 1024)
    x[1, 500] = math.inf
    total = row_sums(x)
    assert total.isfinite().tolist() == [True, False, True]
