"""The sums of small tensors, which have the same bits in eager mode and in a compiled graph.

`torch.sum` adds up a row in an order that depends on the vector length of the CPU, and Inductor has an order
of its own. Here a row is cut into slabs of 1024 elements, which are added one after the other, element by
element. Their sum is cut into slabs of 64 elements, which are added in the same way, and the 64 numbers of
the result are added from left to right. So no vector length and no compiler changes a bit.
"""

from __future__ import annotations

from functools import cache, reduce
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from gradiometer.ops.eager_plan import WIDTH_OF

__all__ = ["LANES", "add_lanes", "lanes_of", "row_sums", "sum_of_small"]

LANES: Final = 64
_LONG: Final = 1024


def row_sums(x: Tensor) -> Tensor:
    """Return the sum of each row, ``(..., W) -> (...)``; trailing zeros change no bit of it.

    ``x``: contiguous. W: at most 1024, or a multiple of that; at most 64, or a multiple of that.
    """
    return add_lanes(lanes_of(x))


def lanes_of(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Add up the slabs of each row, ``(..., W) -> (..., min(W, 64))``."""
    *rows, width = x.shape
    if type(x) is Tensor and _sum_adds_in_order():
        if width > _LONG:
            x = x.view(*rows, -1, _LONG).sum(-2)
        return torch.sum(x.view(*rows, -1, min(width, LANES)), -2, out=out)
    if width > _LONG:
        x = _added(x.view(*rows, -1, _LONG))
    x = _added(x.view(*rows, -1, min(width, LANES)))
    return x if out is None else out.copy_(x)


def sum_of_small(x: Tensor) -> Tensor:
    """Return the sum of a tensor of at most 8192 elements, float64, as if it were a padded row."""
    return row_sums(functional.pad(x.reshape(-1), (0, WIDTH_OF[x.numel()] - x.numel())))


def add_lanes(lanes: Tensor) -> Tensor:
    """Return the sum of each row, from left to right, ``(..., 64) -> (...)``."""
    # in a graph, too: Inductor calls this operator of torch on the CPU
    return lanes.cumsum(-1).select(-1, -1)


def _added(slabs: Tensor) -> Tensor:
    return reduce(torch.add, slabs.unbind(-2))


@cache
def _sum_adds_in_order() -> bool:
    """Return whether `torch.sum` adds up to 16 slabs one after the other, as in torch 2.11 to 2.15."""
    generator = torch.Generator("cpu").manual_seed(0)
    for shape in [(rows, count, slab) for rows in (1, 3) for count in (3, 16) for slab in (_LONG, LANES)]:
        slabs = torch.randn(shape, dtype=torch.float64, device="cpu", generator=generator)
        if not torch.equal(slabs.sum(-2), _added(slabs)):
            return False
    return True
