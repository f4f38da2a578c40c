"""Rows of statistics in eager PyTorch: of large tensors block by block, of others in batches.

A batch shares its operators.
"""

from __future__ import annotations

import math
from functools import reduce
from itertools import chain, islice, repeat
from operator import sub
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from gradiometer.columns import Fingerprint
from gradiometer.ops import fingerprint as bits
from gradiometer.ops.eager_plan import FEW, LANES, SMALL
from gradiometer.ops.row_sums import add_lanes, lanes_of, row_sums, sum_of_small
from gradiometer.ops.streaming import BLOCK, by_tensor, convertible, cut, fsum, merged, piece_length

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gradiometer.ops.eager_plan import PaddedGroup

T = TypeVar("T")

# raw columns of one tensor, in the order of `gradiometer.columns.TENSORS`
Row = tuple[float, ...]


class Scratch:
    """The buffers of one thread: a piece in fp64, and slots for the results of several pieces."""

    def __init__(self, numel: int, count: int, device: torch.device) -> None:
        self.wide = torch.empty(numel, dtype=torch.float64, device=device)
        # 0-d: sum, sumsq, least, greatest
        results = torch.empty((4, count), dtype=torch.float64, device=device)
        self.slots = list(zip(*[result.unbind() for result in results], strict=True))


def rows_of(
    large: list[tuple[int, Tensor]], *, fingerprint: bool
) -> Iterator[tuple[int, tuple[Row, list[Fingerprint]]]]:
    """Yield the index and the row of each tensor, and its fingerprint if asked."""

    def measure(block: Tensor, scratch: Scratch) -> tuple[Row, list[Fingerprint]]:
        row = _measure_block(block, scratch)
        # the block is still in a cache
        return row, [bits.fingerprint(block, scratch.wide.view(torch.int64))] if fingerprint else []

    def merge(parts: list[tuple[Row, list[Fingerprint]]]) -> tuple[Row, list[Fingerprint]]:
        found = [one for _, each in parts for one in each]
        return merged([row for row, _ in parts]), [reduce(Fingerprint.then, found)] if found else []

    return _by_tensor(large, measure, merge)


def sums_of_squares_of(large: list[tuple[int, Tensor]]) -> Iterator[tuple[int, float]]:
    """Yield the index and the sum of squares of each tensor; NaN and Inf propagate."""
    return _by_tensor(large, _sumsq_of_block, fsum)


def _by_tensor(
    large: list[tuple[int, Tensor]], measure: Callable[[Tensor, Scratch], T], merge: Callable[[list[T]], T]
) -> Iterator[tuple[int, T]]:
    """Measure each tensor, block by block; yield its index in the call and the merged result."""
    if not large:
        return iter(())
    most, length = max([x.numel() for _, x in large]), piece_length()
    device = large[0][1].device

    def start() -> Callable[[tuple[Tensor, ...]], T]:
        scratch = Scratch(min(length, most), min(BLOCK, -(-most // length)), device)
        return lambda block: measure(block[0], scratch)

    return by_tensor([(index, (x,)) for index, x in large], length, start, merge)


def _pieces(x: Tensor, length: int) -> Iterator[Tensor]:
    return (piece for (piece,) in cut((x,), length))


# After each operator a thread may have to wait for Python's lock. So only the necessary operators are called,
# and most results are written into slots, which are read together.


def _measure_block(block: Tensor, scratch: Scratch) -> Row:
    measure = _measure_double if block.dtype == torch.float64 else _measure_float
    rows: list[Row] = []
    pieces = _pieces(block, scratch.wide.numel())
    while batch := list(islice(pieces, len(scratch.slots))):
        slots = list(zip(batch, scratch.slots, strict=False))
        zeros = [measure(piece, scratch, *results) for piece, results in slots]
        for n_zero, (piece, (total, sumsq, _, greatest)) in zip(zeros, slots, strict=True):
            top = greatest.item()
            if not top < math.inf:
                rows.append(measure_nonfinite(piece, scratch))
                continue
            # the square is exact, so its root is exact too
            top = top if piece.dtype == torch.float64 else math.sqrt(top)
            rows.append((piece.numel(), sumsq.item(), total.item(), n_zero, 0.0, 0.0, 0.0, top))
    return merged(rows)


def _measure_float(
    piece: Tensor, scratch: Scratch, total: Tensor, sumsq: Tensor, least: Tensor, greatest: Tensor
) -> float:
    """Write sum and sum of squares, min x**2 and max x**2 of a piece; return how many elements are 0."""
    wide = _widened(piece, scratch)
    torch.sum(wide, (), out=total)
    wide.square_()
    torch.sum(wide, (), out=sumsq)
    # squares of narrower formats do not underflow in float64
    torch.amin(wide, (), out=least)
    torch.amax(wide, (), out=greatest)
    return 0.0 if least.item() > 0 else _count_zeros(wide)


def _measure_double(
    piece: Tensor, scratch: Scratch, total: Tensor, sumsq: Tensor, least: Tensor, greatest: Tensor
) -> float:
    """Write sum and sum of squares, min |x| and max |x| of a piece; return how many elements are 0."""
    wide = _widened(piece, scratch)
    torch.sum(wide, (), out=total)
    torch.amin(wide.abs_(), (), out=least)
    torch.amax(wide, (), out=greatest)
    n_zero = 0.0 if least.item() > 0 else _count_zeros(wide.clone())
    torch.sum(wide.square_(), (), out=sumsq)
    return n_zero


def _count_zeros(sizes: Tensor) -> float:
    # takes a third of the time of count_nonzero
    return sizes.numel() - sizes.sgn_().sum().item()


def _widened(piece: Tensor, scratch: Scratch) -> Tensor:
    """Return a piece in fp64, in the buffer."""
    piece = convertible(piece)
    if piece.dim() == 1 and piece.numel() == scratch.wide.numel():
        return scratch.wide.copy_(piece)
    return scratch.wide[: piece.numel()].view(piece.shape).copy_(piece)


def measure_nonfinite(piece: Tensor, scratch: Scratch) -> Row:
    """Return the row of a piece that may have NaN or Inf."""
    wide = _widened(piece, scratch)
    counts = [which.sum().item() for which in (wide.isnan(), wide == math.inf, wide == -math.inf)]
    wide.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    # an element that was replaced by 0 does not count as a zero
    n_zero = wide.numel() - wide.count_nonzero().item() - sum(counts)
    least, greatest = [x.item() for x in torch.aminmax(wide)]
    if wide.numel() <= SMALL:
        # in the order of the other small tensors
        total, sumsq = sum_of_small(wide).item(), sum_of_small(wide * wide).item()
    else:
        total, sumsq = wide.sum().item(), sum_of_squares(wide)
    return (wide.numel(), sumsq, total, n_zero, *counts, max(0.0, -least, greatest))


def _sumsq_of_block(block: Tensor, scratch: Scratch) -> float:
    pieces = _pieces(block, scratch.wide.numel())
    return fsum([sum_of_squares(_widened(piece, scratch)) for piece in pieces])


def sum_of_squares(wide: Tensor) -> float:
    """Return the sum of squares of fp64 numbers, which it overwrites."""
    return wide.square_().sum().item()


# small tensors


def row_of_number(x: float) -> Row:
    """Return the row of a tensor of one element."""
    if not math.isfinite(x):
        return (1.0, 0.0, 0.0, 0.0, float(x != x), float(x == math.inf), float(x == -math.inf), 0.0)  # noqa: PLR0124
    # a sum is never -0. With torch.set_flush_denormal(True) this also makes 0 of a subnormal number
    x += 0.0
    return (1.0, x * x, x, float(x == 0), 0.0, 0.0, 0.0, abs(x))


def measure_group(
    tensors: Sequence[Tensor],
    group: PaddedGroup,
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
        members = [tensors[i] for i in indices]
        parts = members
        if group.padding:
            parts = list(chain.from_iterable(zip(members, group.padding[batch], strict=True)))
        filled = len(sizes) * width
        if stack is None and len(parts) > 1:
            # a copy, which can be overwritten
            x = _flatten_dense_tensors(parts)
        else:
            flats = [part if part.dim() == 1 else part.reshape(-1) for part in parts]
            x = torch.cat(flats, out=None if stack is None else stack[:filled])
        if fingerprints is not None:
            found = bits.of_rows(
                x.view(torch.int64).view(len(sizes), -1), [member.nbytes for member in members]
            )
            fingerprints.update(zip(indices, found, strict=True))
        columns = _measure_rows(x.view(-1, width), None if wide is None else wide[:filled].view(-1, width))
        sumsq, total, n_nonzero, top = columns
        none = repeat(0.0)
        measured = zip(sizes, sumsq, total, map(sub, sizes, n_nonzero), none, none, none, top, strict=False)
        for index, row in zip(indices, measured, strict=True):
            rows[index] = row
        if not all(map(math.inf.__gt__, top)):
            for index, x in zip(indices, members, strict=True):
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
    lanes_of(wide.square_(), of_squares)
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
    for indices, numel in zip(batches, numels, strict=True):
        batch = [tensors[index] for index in indices]
        columns = _measure_batch(batch, buffer[:numel])
        for index, x, total, sumsq, top, n_zero in zip(indices, batch, *columns, strict=True):
            if top < math.inf:
                rows[index] = (x.numel(), sumsq, total, n_zero, 0.0, 0.0, 0.0, top)
            else:
                rows[index] = measure_nonfinite(x, Scratch(x.numel(), 1, device))
        if fingerprints is not None:
            for dtype in {x.dtype for x in batch}:
                own = [(index, x) for index, x in zip(indices, batch, strict=True) if x.dtype == dtype]
                found = bits.fingerprints([x for _, x in own])
                fingerprints.update(zip([index for index, _ in own], found, strict=True))


def _measure_batch(batch: list[Tensor], wide: Tensor) -> list[list[float]]:
    """Return sum, sum of squares, max |x| and the number of zeros of each tensor."""
    sizes = [x.numel() for x in batch]
    flats = [x if x.dim() == 1 else x.reshape(-1) for x in map(convertible, batch)]
    # a copy, which can be overwritten. Operators on 2 bytes take more time than those on 4
    narrow = torch.cat(flats).float()
    wide.copy_(narrow)
    is_even = sizes.count(sizes[0]) == len(sizes)

    def reduced(function: Callable[..., Tensor], x: Tensor) -> list[float]:
        if is_even:
            # one operator for all rows takes less time, and adds up each row in the same order
            return function(x.view(len(sizes), -1), 1).tolist()
        return torch.stack([function(part) for part in x.split(sizes)]).tolist()

    columns = [reduced(torch.sum, wide), reduced(torch.sum, wide.square_())]
    columns.append(reduced(torch.amax, narrow.abs_()))
    if narrow.amin().item() > 0:
        return [*columns, [0.0] * len(sizes)]
    # squares of these formats do not underflow in float64
    return [*columns, list(map(sub, sizes, reduced(torch.sum, wide.sgn_())))]
