"""The sums of small tensors, which have the same bits in eager mode and in a compiled graph.

`torch.sum` adds up a row in an order that depends on the vector length of the CPU, and Inductor has an order
of its own. Here a row is cut into chunks of 1024 elements, and a chunk into 16 slabs of 64, which are added
one after the other, element by element. So are the results of the chunks, and the 64 numbers that are left
are added from left to right. Each addition is defined by itself, so no vector length and no compiler changes
a bit.
"""

from __future__ import annotations

from functools import cache, reduce
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from gradiometer.ops.eager_plan import LANES, WIDTH_OF

# slabs in a chunk
_SLABS: Final = 16


def row_sums(x: Tensor) -> Tensor:
    """Return the sum of each row, ``(..., W) -> (...)``; trailing zeros change no bit of it.

    ``x``: contiguous. W: see `exact_width`.
    """
    return add_lanes(lanes_of(x))


def lanes_of(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Add up the chunks and slabs of each row, ``(..., W) -> (..., min(W, 64))``."""
    *rows, width = x.shape
    slabs = x.view(*rows, -1, min(width, LANES))
    if type(x) is Tensor and _sum_adds_in_order():
        return torch.sum(slabs, -2, out=out)
    lanes = _added(slabs)
    return lanes if out is None else out.copy_(lanes)


def sum_of_small(x: Tensor) -> Tensor:
    """Return the sum of a tensor of at most 8192 elements, float64, as if it were a padded row."""
    return row_sums(functional.pad(x.reshape(-1), (0, WIDTH_OF[x.numel()] - x.numel())))


def add_lanes(lanes: Tensor) -> Tensor:
    """Return the sum of each row, from left to right, ``(..., 64) -> (...)``."""
    # in a graph, too: Inductor calls this operator of torch on the CPU
    return lanes.cumsum(-1).select(-1, -1)


def _added(slabs: Tensor) -> Tensor:
    *rows, count, width = slabs.shape
    if count > _SLABS:
        # all chunks at once
        slabs = reduce(torch.add, slabs.view(*rows, -1, _SLABS, width).unbind(-2))
    return reduce(torch.add, slabs.unbind(-2))


@cache
def _sum_adds_in_order() -> bool:
    """Return whether `torch.sum` adds slabs in this order, as in torch 2.11 to 2.15."""
    generator = torch.Generator("cpu").manual_seed(0)
    for shape in [(rows, count, LANES) for rows in (1, 3) for count in (3, _SLABS, 5 * _SLABS, 8 * _SLABS)]:
        slabs = torch.randn(shape, dtype=torch.float64, device="cpu", generator=generator)
        if not torch.equal(slabs.sum(-2), _added(slabs)):
            return False
    return True
