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

from gradiometer.columns import PAIRS
from gradiometer.inputs import as_real
from gradiometer.ops import openmp
from gradiometer.ops.eager_plan import BATCH, FEW, SMALL, WIDTH_OF
from gradiometer.ops.row_sums import row_sums, sum_of_small
from gradiometer.ops.streaming import by_tensor, convertible, cut, merged, piece_length

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# raw columns of one pair, in the order of `gradiometer.columns.pairs.PAIR_COLUMNS`
_Row = tuple[float, ...]
_NOTHING: Final[_Row] = (0.0,) * PAIRS.width
# the counts of NaN, +Inf and -Inf in finite pairs
_FINITE: Final = (0.0, 0.0, 0.0)


def pair_stats(a: Sequence[Tensor], b: Sequence[Tensor], g: Sequence[Tensor] | None) -> Tensor:
    """Do what `gradiometer.ops.measure_pairs` does."""
    rows = [_NOTHING] * len(a)
    alike: dict[tuple[int, tuple[torch.dtype, ...]], list[tuple[int, tuple[Tensor, ...]]]] = {}
    large: list[tuple[int, tuple[Tensor, ...]]] = []
    for index, (x, y) in enumerate(zip(a, b, strict=True)):
        pair = [x, y]
        if g is not None and g[index].numel():
            pair.append(g[index])
        numbers = tuple([as_real(tensor) for tensor in pair])
        numel = numbers[0].numel()
        if numel > BATCH:
            large.append((index, numbers))
        elif numel == 1:
            rows[index] = _row_of_numbers(numbers)
        elif numel:
            # trailing zeros change no bit of a row's sums
            width = WIDTH_OF[numel] if numel <= SMALL else numel
            dtypes = tuple([tensor.dtype for tensor in numbers])
            alike.setdefault((width, dtypes), []).append((index, numbers))
    if alike:
        with openmp.one_thread():
            for (width, _), members in alike.items():
                most = max(1, piece_length() // width)
                buffers = _buffers(members[0][1], width * min(most, len(members)))
                for start in range(0, len(members), most):
                    _measure_batch(members[start : start + most], width, buffers, rows)
    if large:
        most = min(piece_length(), max([numbers[0].numel() for _, numbers in large]))
        for index, row in by_tensor(large, most, lambda: _measure_on_thread(most), merged):
            rows[index] = row
    columns = torch.frombuffer(array("d", chain.from_iterable(rows)), dtype=torch.float64)
    return columns.view(len(rows), PAIRS.width).to(a[0].device)


def _buffers(numbers: tuple[Tensor, ...], numel: int) -> list[Tensor]:
    # memory that is freed and allocated again has to be mapped again
    return [numbers[0].new_empty(numel, dtype=torch.float64) for _ in range(len(numbers) + 1)]


def _measure_on_thread(numel: int) -> Callable[[tuple[Tensor, ...]], _Row]:
    # by the number of tensors, with or without a gradient
    buffers: dict[int, list[Tensor]] = {}

    def measure(block: tuple[Tensor, ...]) -> _Row:
        if len(block) not in buffers:
            buffers[len(block)] = _buffers(block, numel)
        return merged([_measure(piece, buffers[len(block)]) for piece in cut(block, numel)])

    return measure


def _measure(piece: tuple[Tensor, ...], buffers: list[Tensor]) -> _Row:
    """Return the row of a piece; the buffers have at least as many elements."""
    numel = piece[0].numel()
    *sides, spare = [buffer[:numel] for buffer in buffers]
    for x, source in zip(sides, piece, strict=True):
        x.view(source.shape).copy_(convertible(source))
    ((*sums, top),) = _sums([x.view(1, numel) for x in sides], spare.view(1, numel), _sum)
    return _measure_nonfinite(piece) if _is_odd(sums) else (numel, *sums, *_FINITE, top)


def _row_of_numbers(numbers: tuple[Tensor, ...]) -> _Row:
    a, b, *rest = [x.item() for x in numbers]
    g = rest[0] if rest else 0.0
    if not all([math.isfinite(x) for x in (a, b, g)]):
        return _measure_nonfinite(numbers)
    u = a - b
    same = a == b and math.copysign(1.0, a) == math.copysign(1.0, b)
    return (1, a * a, b * b, a * b, u * u, u, same, g * g, u * g, g != 0, same and g != 0, *_FINITE, abs(u))


def _is_odd(sums: list[float]) -> bool:
    # squares of differences and of gradients
    return not (sums[3] < math.inf and sums[6] < math.inf)


def _sum(x: Tensor) -> Tensor:
    return x.sum(dim=-1)


def _sums(sides: list[Tensor], spare: Tensor, add: Callable[[Tensor], Tensor]) -> list[list[float]]:
    """Return the sums of each row, in the order of the columns, and max |u|.

    ``sides``: a, b and perhaps g, ``(R, n) float64``; they and ``spare``, of the same size, are overwritten.
    ``add``: returns the sum of each row.
    """
    a, b, *rest = sides
    # widening keeps different finite numbers, and zeros of either sign, apart. With a result of another
    # dtype, eq would take three times as long
    same = torch.eq(a.view(torch.int64), b.view(torch.int64), out=spare.view(torch.int64))
    if a.numel() <= FEW:
        # fewer operators: they take more time here than their work
        u = a - b
        values = [a * a, b * b, a * b, u * u, u, same]
        if rest:
            nonzero = rest[0].sgn().abs_()
            values += [rest[0] * rest[0], u * rest[0], nonzero, nonzero * same]
        few = torch.cat([add(torch.stack(values)), u.abs_().amax(dim=1).unsqueeze(0)])
        *sums, tops = few.tolist()
        missing = [[0.0] * len(a)] * (10 - len(sums))
        return list(map(list, zip(*sums, *missing, tops, strict=True)))
    results = a.new_zeros((11, len(a)))
    results[5] = same.sum(dim=1)
    if rest:
        (g,) = rest
        # g where it is the same, as bits
        same.neg_().bitwise_and_(g.view(torch.int64))
        torch.sum(spare.ne_(0.0), 1, out=results[9])
        torch.sum(torch.ne(g, 0.0, out=spare), 1, out=results[8])
    results[2] = add(torch.mul(a, b, out=spare))
    u = torch.sub(a, b, out=spare)
    results[4] = add(u)
    results[0] = add(a.square_())
    results[1] = add(b.square_())
    if rest:
        results[7] = add(torch.mul(u, g, out=a))
        results[6] = add(g.square_())
    torch.amax(u.abs_(), 1, out=results[10])
    results[3] = add(u.square_())
    return results.t().tolist()


def _measure_nonfinite(piece: tuple[Tensor, ...]) -> _Row:
    """Do what `_measure` does, for a piece that may have NaN or Inf."""
    bits = _same_bits(*piece[:2])
    a, b = [convertible(x).to(torch.float64) for x in piece[:2]]
    finite = a.isfinite() & b.isfinite()
    # each element counts as this, see columns/pairs.py
    kind = torch.where(b.isnan(), b, torch.where(a.isfinite(), -b, a))
    kinds = [x.sum().item() for x in (kind.isnan(), kind == math.inf, kind == -math.inf)]
    a, b = torch.where(finite, a, 0.0), torch.where(finite, b, 0.0)
    u = a - b
    values = [a * a, b * b, a * b, u * u, u, bits]
    if len(piece) > 2:
        g = convertible(piece[2]).to(torch.float64)
        kept = torch.where(finite & g.isfinite(), g, 0.0)
        values += [kept * kept, u * kept, g != 0, bits & (g != 0)]
    small = a.numel() <= SMALL
    sums = [(sum_of_small(x.double()) if small else x.sum(dtype=torch.float64)).item() for x in values]
    sums += [0.0] * (10 - len(sums))
    return (finite.numel(), *sums, *kinds, u.abs().amax().item())


def _same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Return where both have the same bits; for two dtypes, where they are the same number, not NaN."""
    if a.dtype == b.dtype:
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
        return a.view(kind) == b.view(kind)
    a, b = [convertible(x).to(torch.float64) for x in (a, b)]
    return (a == b) & (a.view(torch.int64) == b.view(torch.int64))


def _measure_batch(
    members: list[tuple[int, tuple[Tensor, ...]]], width: int, buffers: list[Tensor], rows: list[_Row]
) -> None:
    """Measure pairs with the same dtypes in rows of zero-padded numbers; write their rows."""
    filled = len(members) * width
    *sides, spare = [buffer[:filled] for buffer in buffers]
    sizes = [numbers[0].numel() for _, numbers in members]
    for x, side in zip(sides, zip(*[numbers for _, numbers in members], strict=True), strict=True):
        # fp8 formats lack the operators that padding needs
        flats = [part.float() for part in side] if side[0].itemsize == 1 else side
        zeros = flats[0].new_zeros(width)
        padding = {size: zeros[size:] for size in set(sizes)}
        parts = [
            part
            for size, flat in zip(sizes, flats, strict=True)
            for part in (flat if flat.dim() == 1 else flat.reshape(-1), padding[size])
        ]
        x.copy_(convertible(torch.cat(parts, out=spare.view(zeros.dtype)[:filled])))
    # with the bits of the sums of squares of one tensor
    add = row_sums if width <= SMALL else _sum
    found = _sums([x.view(-1, width) for x in sides], spare.view(-1, width), add)
    for (index, numbers), numel, (*sums, top) in zip(members, sizes, found, strict=True):
        # padding is unchanged
        sums[5] -= width - numel
        rows[index] = _measure_nonfinite(numbers) if _is_odd(sums) else (numel, *sums, *_FINITE, top)
