"""Statistics of pairs in eager PyTorch: the CPU implementation, one streaming pass with little extra memory.

It is built like `gradiometer.ops.reference`: large tensors go through small fp64 buffers, piece by piece, and
small ones are stacked into batches. A row has the same bits whichever pairs share the call.
"""

from __future__ import annotations

import math
from array import array
from itertools import chain
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from gradiometer.columns import NUM_PAIR_COLUMNS
from gradiometer.inputs import as_real
from gradiometer.ops import openmp
from gradiometer.ops.eager_plan import BATCH, SMALL, WIDTH_OF
from gradiometer.ops.reference import by_tensor, convertible, cut, fsum

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["pair_stats"]

# elements that a thread reads at a time, into four buffers of 8 bytes per element that stay in its cache
PIECE: Final = 2**15 - 1

# raw columns of one pair, in the order of `gradiometer.columns.pairs.PAIR_COLUMNS`
_Row = tuple[float, ...]
_NOTHING: Final[_Row] = (0.0,) * NUM_PAIR_COLUMNS


def pair_stats(a: Sequence[Tensor], b: Sequence[Tensor], g: Sequence[Tensor] | None) -> Tensor:
    """Measure pairs of tensors of one device.

    Args:
        a, b: at least one pair of tensors of one shape.
        g: gradients of the same shapes; an empty one stands for none.

    Returns:
        columns ``(T, P) float64``.
    """
    rows = [_NOTHING] * len(a)
    small: dict[tuple[object, ...], list[tuple[int, tuple[Tensor, ...]]]] = {}
    large: list[tuple[int, tuple[Tensor, ...]]] = []
    for index, (x, y) in enumerate(zip(a, b, strict=True)):
        pair = [x, y]
        if g is not None and g[index].numel():
            pair.append(g[index])
        numbers = tuple([as_real(tensor) for tensor in pair])
        if numbers[0].numel() > SMALL:
            large.append((index, numbers))
        elif numbers[0].numel():
            kind = (*[tensor.dtype for tensor in numbers], WIDTH_OF[numbers[0].numel()])
            small.setdefault(kind, []).append((index, numbers))
    if small:
        with openmp.one_thread():
            for (*_, width), members in small.items():
                most = max(1, BATCH // width)
                for start in range(0, len(members), most):
                    _measure_batch(members[start : start + most], width, rows)
    if large:
        most = max([numbers[0].numel() for _, numbers in large])
        for index, row in by_tensor(large, PIECE, lambda: _measure_on_thread(min(PIECE, most)), _merge):
            rows[index] = row
    device = a[0].device
    columns = torch.frombuffer(array("d", chain.from_iterable(rows)), dtype=torch.float64)
    return columns.view(len(rows), NUM_PAIR_COLUMNS).to(device)


def _measure_on_thread(numel: int) -> Callable[[tuple[Tensor, ...]], _Row]:
    buffers: list[Tensor] = []

    def measure(block: tuple[Tensor, ...]) -> _Row:
        if not buffers:
            buffers.append(torch.empty((4, numel), dtype=torch.float64, device=block[0].device))
        return _merge([_measure(piece, buffers[0]) for piece in cut(block, numel)])

    return measure


def _measure(piece: tuple[Tensor, ...], buffers: Tensor) -> _Row:
    """Return the row of a piece; ``buffers``: ``(4, n) float64`` with at least as many elements."""
    numel = piece[0].numel()
    a, b, product, same = [buffer[:numel] for buffer in buffers]
    # sums, and the maximum
    results = torch.zeros(11, dtype=torch.float64, device=a.device)
    out = results.unbind()

    def add(x: Tensor, place: int) -> None:
        torch.sum(x, (), out=out[place])

    a.view(piece[0].shape).copy_(convertible(piece[0]))
    b.view(piece[0].shape).copy_(convertible(piece[1]))
    add(torch.mul(a, a, out=product), 0)
    add(torch.mul(b, b, out=product), 1)
    add(torch.mul(a, b, out=product), 2)
    # widening keeps different finite numbers, and zeros of either sign, apart
    add(torch.eq(a.view(torch.int64), b.view(torch.int64), out=same), 5)
    u = a.sub_(b)
    add(u, 4)
    add(torch.mul(u, u, out=product), 3)
    if len(piece) > 2:
        b.view(piece[0].shape).copy_(convertible(piece[2]))
        add(torch.mul(b, b, out=product), 6)
        add(torch.mul(u, b, out=product), 7)
        add(torch.ne(b, 0.0, out=product), 8)
        add(product.mul_(same), 9)
    torch.amax(u.abs_(), (), out=out[10])
    *sums, top = results.tolist()
    if not (sums[3] < math.inf and sums[6] < math.inf):
        return _measure_nonfinite(piece)
    return (numel, *sums, 0.0, top)


def _measure_nonfinite(piece: tuple[Tensor, ...]) -> _Row:
    """Do what `_measure` does, for a piece that may have NaN or Inf."""
    bits = _same_bits(*piece[:2])
    a, b = [convertible(x).to(torch.float64) for x in piece[:2]]
    finite = a.isfinite() & b.isfinite()
    a, b = torch.where(finite, a, 0.0), torch.where(finite, b, 0.0)
    u = a - b
    values = [a * a, b * b, a * b, u * u, u, bits]
    if len(piece) > 2:
        g = convertible(piece[2]).to(torch.float64)
        kept = torch.where(finite & g.isfinite(), g, 0.0)
        values += [kept * kept, u * kept, g != 0, bits & (g != 0)]
    sums = [x.sum(dtype=torch.float64).item() for x in values]
    sums += [0.0] * (10 - len(sums))
    numel = finite.numel()
    return (numel, *sums, numel - finite.sum().item(), u.abs().amax().item())


def _same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Return where both have the same bits; for two dtypes, where they are the same number, not NaN."""
    if a.dtype == b.dtype:
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
        return a.view(kind) == b.view(kind)
    a, b = [convertible(x).to(torch.float64) for x in (a, b)]
    return (a == b) & (a.view(torch.int64) == b.view(torch.int64))


def _measure_batch(members: list[tuple[int, tuple[Tensor, ...]]], width: int, rows: list[_Row]) -> None:
    """Measure pairs with the same dtypes in rows of zero-padded numbers; write their rows."""
    sides = []
    for side in zip(*[numbers for _, numbers in members], strict=True):
        # fp8 formats lack the operators that padding needs
        flats = [(x.float() if x.itemsize == 1 else x).reshape(-1) for x in side]
        zeros = flats[0].new_zeros(width)
        parts = chain.from_iterable([(x, zeros[len(x) :]) for x in flats])
        sides.append(torch.cat(list(parts)).double().view(len(members), width))
    a, b = sides[:2]
    same = torch.eq(a.view(torch.int64), b.view(torch.int64)).to(torch.float64)
    u = a - b
    values = [a * a, b * b, a * b, u * u, u, same]
    if len(sides) > 2:
        g = sides[2]
        nonzero = (g != 0).to(torch.float64)
        values += [g * g, u * g, nonzero, nonzero * same]
    sums = torch.stack(values).sum(dim=2)
    top = u.abs().amax(dim=1).tolist()
    measured = torch.cat([sums, sums.new_zeros(11 - len(values), len(members))]).t().tolist()
    for (index, numbers), row, largest in zip(members, measured, top, strict=True):
        numel = numbers[0].numel()
        if row[3] < math.inf and row[6] < math.inf:
            # padding is unchanged
            row[5] -= width - numel
            rows[index] = (numel, *row, largest)
        else:
            rows[index] = _measure_nonfinite(numbers)


def _merge(rows: list[_Row]) -> _Row:
    if len(rows) == 1:
        return rows[0]
    numel, *sums, top = zip(*rows, strict=True)
    return (sum(numel), *map(fsum, sums), max(top))
