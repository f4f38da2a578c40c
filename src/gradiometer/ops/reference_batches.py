"""Statistics of small and middle-sized tensors in eager PyTorch, in batches that share operators."""

from __future__ import annotations

import math
from itertools import chain, repeat
from operator import sub
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradiometer.ops import fingerprint as bits
from gradiometer.ops.eager_plan import FEW
from gradiometer.ops.reference_blocks import Scratch, measure_nonfinite
from gradiometer.ops.row_sums import LANES, add_lanes, lanes_of, row_sums
from gradiometer.ops.streaming import convertible

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradiometer.columns import Fingerprint
    from gradiometer.ops.eager_plan import Group
    from gradiometer.ops.reference_blocks import Row


def row_of_number(x: float) -> Row:
    """Return the row of a tensor of one element."""
    if not math.isfinite(x):
        return (1.0, 0.0, 0.0, 0.0, float(x != x), float(x == math.inf), float(x == -math.inf), 0.0)  # noqa: PLR0124
    # a sum is never -0. With torch.set_flush_denormal(True) this also makes 0 of a subnormal number
    x += 0.0
    return (1.0, x * x, x, float(x == 0), 0.0, 0.0, 0.0, abs(x))


def measure_group(
    tensors: Sequence[Tensor],
    group: Group,
    rows: list[Row],
    length: int,
    fingerprints: dict[int, Fingerprint] | None,
) -> None:
    """Measure small tensors, in batches of at most ``length`` elements; write rows and fingerprints."""
    count, width = len(group.sizes), group.width
    step = length // width
    stack = wide = None
    if count > step:
        # one buffer for all batches: memory that is freed and allocated again has to be mapped again
        stack = tensors[group.indices[0]].new_empty(step * width)
        wide = stack.new_empty(step * width, dtype=torch.float64)
    for start in range(0, count, step):
        batch = slice(start, start + step)
        indices, sizes = group.indices[batch], group.sizes[batch]
        flats = [
            tensors[i] if is_flat else tensors[i].reshape(-1)
            for i, is_flat in zip(indices, group.flat[batch], strict=True)
        ]
        parts = list(chain.from_iterable(zip(flats, group.padding[batch], strict=True)))
        filled = len(sizes) * width
        x = torch.cat(parts, out=None if stack is None else stack[:filled])
        if fingerprints is not None:
            found = bits.of_rows(x.view(torch.int64).view(len(sizes), -1), [flat.nbytes for flat in flats])
            fingerprints.update(zip(indices, found, strict=True))
        columns = _measure_rows(x.view(-1, width), None if wide is None else wide[:filled].view(-1, width))
        sumsq, total, n_nonzero, top = columns
        none = repeat(0.0)
        measured = zip(sizes, sumsq, total, map(sub, sizes, n_nonzero), none, none, none, top, strict=False)
        for index, row in zip(indices, measured, strict=True):
            rows[index] = row
        if not all(map(math.inf.__gt__, top)):
            for index, x in zip(indices, flats, strict=True):
                if not rows[index][-1] < math.inf:
                    rows[index] = measure_nonfinite(x, Scratch(x.numel(), 1, x.device))


def _measure_rows(x: Tensor, wide: Tensor | None = None) -> list[list[float]]:
    """Return sumsq, sum, non-zeros and max |x| of each row. It may overwrite both tensors."""
    # counts in a half-precision format would be rounded
    x = x.float() if x.itemsize < 4 else x
    if x.dtype != torch.float64 and x.numel() <= FEW:
        # squares of narrower formats do not underflow in float64
        values = x.double()
        squares = values * values
        sums = row_sums(torch.stack([squares, values, squares.sgn()])).tolist()
        return [*sums, [math.sqrt(square) for square in squares.amax(dim=1).tolist()]]
    wide = x.to(torch.float64, copy=True) if wide is None else wide.copy_(x)
    lanes = wide.new_empty((2, len(x), min(LANES, x.shape[1])))
    of_squares, of_values = lanes.unbind()
    lanes_of(wide, of_values)
    lanes_of(torch.mul(wide, wide, out=wide), of_squares)
    top = x.abs_().amax(dim=1)
    n_nonzero = x.sgn_().sum(dim=1)
    return [*add_lanes(lanes).tolist(), n_nonzero.tolist(), top.tolist()]


# middle-sized tensors


def measure_batches(
    tensors: Sequence[Tensor],
    batches: list[list[int]],
    rows: list[Row],
    fingerprints: dict[int, Fingerprint] | None,
) -> None:
    """Measure middle-sized tensors, one batch at a time; write rows and fingerprints."""
    device = tensors[0].device
    numels = [sum([tensors[index].numel() for index in batch]) for batch in batches]
    buffer = torch.empty(max(numels), dtype=torch.float64, device=device)
    # sum, sum of squares, max x**2; the number of non-zeros if there are zeros
    results = torch.empty((4, max(map(len, batches))), dtype=torch.float64, device=device)
    for indices, numel in zip(batches, numels, strict=True):
        batch = [tensors[index] for index in indices]
        zeros = _measure_batch(batch, buffer[:numel], results[:, : len(batch)])
        measured = zip(indices, batch, zeros, *results.tolist(), strict=False)
        for index, x, n_zero, total, sumsq, top, _ in measured:
            if top < math.inf:
                rows[index] = (x.numel(), sumsq, total, n_zero, 0.0, 0.0, 0.0, math.sqrt(top))
            else:
                rows[index] = measure_nonfinite(x, Scratch(x.numel(), 1, device))
        if fingerprints is not None:
            for dtype in {x.dtype for x in batch}:
                own = [(index, x) for index, x in zip(indices, batch, strict=True) if x.dtype == dtype]
                found = bits.fingerprints([x for _, x in own])
                fingerprints.update(zip([index for index, _ in own], found, strict=True))


def _measure_batch(batch: list[Tensor], wide: Tensor, results: Tensor) -> list[float]:
    """Write sum, sum of squares and max x**2 of each tensor; return how many elements are 0."""
    sizes = [x.numel() for x in batch]
    xs = wide.split(sizes)
    for source, x in zip(batch, xs, strict=True):
        (x if source.dim() == 1 else x.view(source.shape)).copy_(convertible(source))
    dim: tuple[int, ...]
    outs: list[Sequence[Tensor]]
    if sizes.count(sizes[0]) == len(sizes):
        # one operator for all rows takes less time, and adds up each row in the same order
        parts, dim, outs = [wide.view(len(sizes), -1)], (1,), [[result] for result in results]
    else:
        parts, dim, outs = xs, (), [result.unbind() for result in results]

    def reduce_into(function: Callable[..., Tensor], row: int) -> None:
        for part, out in zip(parts, outs[row], strict=True):
            function(part, dim, out=out)

    reduce_into(torch.sum, 0)
    # squares of these formats do not underflow in float64
    torch.mul(wide, wide, out=wide)
    reduce_into(torch.sum, 1)
    reduce_into(torch.amax, 2)
    if wide.amin().item() > 0:
        return [0.0] * len(sizes)
    wide.sgn_()
    reduce_into(torch.sum, 3)
    return list(map(sub, sizes, results[3].tolist()))
