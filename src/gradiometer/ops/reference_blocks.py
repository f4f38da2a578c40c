"""Statistics of large tensors in eager PyTorch, block by block."""

from __future__ import annotations

import math
from functools import reduce
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from gradiometer.columns import Fingerprint
from gradiometer.ops import fingerprint as bits
from gradiometer.ops.eager_plan import SMALL
from gradiometer.ops.row_sums import sum_of_small
from gradiometer.ops.streaming import BLOCK, by_tensor, convertible, cut, fsum, piece_length

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

# raw columns of one tensor, in the order of `gradiometer.columns.schema.COLUMNS`
Row = tuple[float, ...]


class Scratch:
    """The buffers of one thread: a piece in fp64, and slots for the results of several pieces."""

    def __init__(self, numel: int, count: int, device: torch.device) -> None:
        self.wide = torch.empty(numel, dtype=torch.float64, device=device)
        # 0-d: sum, sumsq, least, greatest
        results = torch.empty((4, count), dtype=torch.float64, device=device)
        self.slots = list(zip(*[result.unbind() for result in results], strict=True))


def rows_of(large: list[tuple[int, Tensor]]) -> Iterator[tuple[int, Row]]:
    """Yield the index and the row of each tensor."""
    return _by_tensor(large, _measure_block, _merge)


def rows_and_fingerprints_of(
    large: list[tuple[int, Tensor]],
) -> Iterator[tuple[int, tuple[Row, Fingerprint]]]:
    """Do what `rows_of` does; also yield fingerprints."""
    return _by_tensor(large, _measure_block_and_bits, _merge_both)


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
    return _merge(rows)


def _measure_block_and_bits(block: Tensor, scratch: Scratch) -> tuple[Row, Fingerprint]:
    # the block is still in a cache
    return _measure_block(block, scratch), bits.fingerprint(block, scratch.wide.view(torch.int64))


def _measure_float(
    piece: Tensor, scratch: Scratch, total: Tensor, sumsq: Tensor, least: Tensor, greatest: Tensor
) -> float:
    """Write sum and sum of squares, min x**2 and max x**2 of a piece; return how many elements are 0."""
    wide = _widened(piece, scratch)
    torch.sum(wide, (), out=total)
    torch.mul(wide, wide, out=wide)
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
    torch.sum(torch.mul(wide, wide, out=wide), (), out=sumsq)
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
    return torch.mul(wide, wide, out=wide).sum().item()


def _merge(rows: list[Row]) -> Row:
    if len(rows) == 1:
        return rows[0]
    numel, sumsq, total, n_zero, n_nan, n_posinf, n_neginf, top = zip(*rows, strict=True)
    counts = map(sum, (n_zero, n_nan, n_posinf, n_neginf))
    return (sum(numel), fsum(sumsq), fsum(total), *counts, max(top))


def _merge_both(parts: list[tuple[Row, Fingerprint]]) -> tuple[Row, Fingerprint]:
    rows, fingerprints = zip(*parts, strict=True)
    return _merge(list(rows)), reduce(Fingerprint.then, fingerprints)
