"""Statistics of pairs in eager PyTorch: the CPU implementation, one streaming pass with little extra memory.

It is built like `gradiometer.ops.reference`: large tensors go through small fp64 buffers, piece by piece, and
small ones are stacked into batches. A row has the same bits whichever pairs share the call.
"""

from __future__ import annotations

import math
from array import array
from itertools import chain, repeat
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from gradiometer.columns import PAIRS
from gradiometer.inputs import as_real
from gradiometer.ops import openmp
from gradiometer.ops.eager_plan import BATCH, SMALL, WIDTH_OF, exact_width
from gradiometer.ops.row_sums import row_sums, sum_of_small
from gradiometer.ops.streaming import PIECE, by_tensor, convertible, cut, merged, piece_length

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# raw columns of one pair, in the order of `gradiometer.columns.pairs.PAIR_COLUMNS`
_Row = tuple[float, ...]
_NOTHING: Final[_Row] = (0.0,) * PAIRS.width
# the counts of NaN, +Inf and -Inf in finite pairs
_FINITE: Final = (0.0, 0.0, 0.0)


class PairPlan(NamedTuple):
    """How to measure a list of pairs.

    ``large``, ``single``: the indices of large pairs and of pairs of numbers. ``groups``: the others, of the
    same dtypes, with the width of their rows.
    """

    large: list[int]
    single: list[int]
    groups: list[tuple[int, list[int]]]


def pairs_of(
    a: Sequence[Tensor], b: Sequence[Tensor], g: Sequence[Tensor] | None = None
) -> list[tuple[Tensor, ...]]:
    """Return tuples of two tensors, or of three where there is a gradient with elements."""
    if g is None:
        return list(zip(a, b, strict=True))
    return [(x, y, z) if z.numel() else (x, y) for x, y, z in zip(a, b, g, strict=True)]


def plan_of(pairs: Sequence[tuple[Tensor, ...]]) -> PairPlan:
    """Return the plan for pairs of real tensors; it also holds if only the addresses differ."""
    plan = PairPlan([], [], [])
    groups: dict[tuple[int, tuple[torch.dtype, ...]], list[int]] = {}
    for index, pair in enumerate(pairs):
        numel = pair[0].numel()
        if numel > BATCH:
            plan.large.append(index)
        elif numel == 1:
            plan.single.append(index)
        elif numel:
            # trailing zeros change no bit of a row's sums
            width = WIDTH_OF[numel] if numel <= SMALL else numel
            groups.setdefault((width, tuple([x.dtype for x in pair])), []).append(index)
    for (width, _), indices in groups.items():
        sizes = {pairs[index][0].numel() for index in indices}
        plan.groups.append((exact_width(sizes, width) if width <= SMALL else width, indices))
    return plan


def pair_stats(
    a: Sequence[Tensor], b: Sequence[Tensor], g: Sequence[Tensor] | None, plan: PairPlan | None = None
) -> Tensor:
    """Do what `gradiometer.ops.measure_pairs` does.

    ``plan``: the result of `plan_of` for these pairs, if they are real.
    """
    pairs = pairs_of(a, b, g)
    if plan is None:
        pairs = [tuple([as_real(x) for x in pair]) for pair in pairs]
    plan = plan or plan_of(pairs)
    rows = [_NOTHING] * len(pairs)
    for index in plan.single:
        rows[index] = _row_of_numbers(pairs[index])
    if plan.groups:
        with openmp.one_thread():
            for width, indices in plan.groups:
                _measure_group(pairs, indices, width, rows)
    if plan.large:
        large = [(index, pairs[index]) for index in plan.large]
        most = min(_piece_length(), max([pair[0].numel() for _, pair in large]))
        for index, row in by_tensor(large, most, lambda: _measure_on_thread(most), merged):
            rows[index] = row
    columns = torch.frombuffer(array("d", chain.from_iterable(rows)), dtype=torch.float64)
    return columns.view(len(rows), PAIRS.width).to(a[0].device)


def _piece_length() -> int:
    # the buffers of a thread take 2.5 MiB
    return min(piece_length(), PIECE // 2)


class _Scratch:
    """Buffers for R rows of n numbers in fp64: a, b, perhaps g, and what is added up.

    An operator on several buffers takes the time of one call. ``memory``: of all buffers; memory that is
    freed and allocated again has to be mapped again. ``sources``: tensors like those that are measured, of
    R * n elements.
    """

    def __init__(self, memory: Tensor, sources: Sequence[Tensor], rows: int) -> None:
        numel, lists = sources[0].numel(), len(sources)
        # u * g, u, a, b, g; without g the first and the last are left out
        count = 2 * lists - 1
        buffers = memory[: count * numel].view(count, rows, -1)
        self.products, self.squares = buffers[: lists - 1], buffers[lists - 2 :]
        *self.ug, self.u = self.products.unbind()
        self.sides = self.squares[1:].unbind()
        self.flats = [x.view(-1) for x in self.sides]
        dtypes = {x.dtype for x in sources}
        # operators on numbers of 4 bytes take half the time
        self.is_narrow, self.is_double = dtypes == {torch.float32}, torch.float64 in dtypes
        integer, real = (torch.int32, torch.float32) if self.is_narrow else (torch.int64, torch.float64)
        self.integer = integer
        # flags of the elements, as numbers of either kind, in the memory of u
        self.flags = self.u.view(-1).view(integer)[:numel]
        self.real_flags = self.flags.view(real)
        self.flag_rows, self.real_flag_rows = [x.view(rows, -1) for x in (self.flags, self.real_flags)]


def _measure_on_thread(numel: int) -> Callable[[tuple[Tensor, ...]], _Row]:
    memory: dict[int, Tensor] = {}
    kept: dict[tuple[int, tuple[torch.dtype, ...]], _Scratch] = {}

    def measure_piece(piece: tuple[Tensor, ...]) -> _Row:
        size = piece[0].numel()
        key = size, tuple([x.dtype for x in piece])
        if key not in kept:
            # with a gradient and without
            if len(piece) not in memory:
                memory[len(piece)] = _memory(piece, numel)
            kept[key] = _Scratch(memory[len(piece)], piece, 1)
        return _rows_of([piece], piece, kept[key], [size], _sum)[0]

    return lambda block: merged([measure_piece(piece) for piece in cut(block, numel)])


def _memory(pair: tuple[Tensor, ...], numel: int) -> Tensor:
    return pair[0].new_empty((2 * len(pair) - 1) * numel, dtype=torch.float64)


def _row_of_numbers(numbers: tuple[Tensor, ...]) -> _Row:
    a, b, *rest = [x.item() for x in numbers]
    g = rest[0] if rest else 0.0
    if not all([math.isfinite(x) for x in (a, b, g)]):
        return _measure_nonfinite(numbers)
    u = a - b
    same = a == b and math.copysign(1.0, a) == math.copysign(1.0, b)
    return (1, a * a, b * b, a * b, u * u, u, same, g * g, u * g, g != 0, same and g != 0, *_FINITE, abs(u))


def _rows_of(
    pairs: list[tuple[Tensor, ...]],
    sources: Sequence[Tensor],
    scratch: _Scratch,
    sizes: list[int],
    add: Callable[[Tensor], Tensor],
) -> list[_Row]:
    """Return the rows of pairs.

    ``sources``: a, b and perhaps g of all pairs, each of R * n elements; of two dimensions if R > 1.
    ``sizes``: of the pairs, without the zeros after each. ``add``: returns the sum of each row.
    """
    _widen(sources, scratch)
    counts = _counts(sources, scratch, sizes)
    a, b, *rest = scratch.sides
    u = torch.sub(a, b, out=scratch.u)
    for g, ug in zip(rest, scratch.ug, strict=True):
        torch.mul(u, g, out=ug)
    *dot_ug, sum_u = add(scratch.products).tolist()
    if scratch.is_double:
        # their squares may leave the range of float64
        tops = u.abs_().amax(dim=1).tolist()
    sumsq_u, sumsq_a, sumsq_b, *sumsq_g = add(scratch.squares.square_()).tolist()
    if not scratch.is_double:
        # the root of a rounded square is the number itself
        tops = list(map(math.sqrt, u.amax(dim=1).tolist()))
    dot_ab = _dot_ab((sumsq_a, sumsq_b, sumsq_u), sources, scratch, add)
    (of_g,), (of_ug,) = [x or [[0.0] * len(sizes)] for x in (sumsq_g, dot_ug)]
    n_unchanged, n_nonzero, n_stuck = counts
    columns = sumsq_a, sumsq_b, dot_ab, sumsq_u, sum_u, n_unchanged, of_g, of_ug, n_nonzero, n_stuck
    rows: list[_Row] = list(zip(sizes, *columns, *map(repeat, _FINITE), tops, strict=False))
    if all(map(math.inf.__gt__, chain(sumsq_u, of_g))):
        return rows
    is_finite = [x < math.inf and y < math.inf for x, y in zip(sumsq_u, of_g, strict=True)]
    every = zip(rows, pairs, is_finite, strict=True)
    return [row if finite else _measure_nonfinite(pair) for row, pair, finite in every]


def _widen(sources: Sequence[Tensor], scratch: _Scratch) -> None:
    for x, flat, source in zip(scratch.sides, scratch.flats, sources, strict=False):
        (flat if source.dim() == 1 else x.view(source.shape)).copy_(convertible(source))


def _dot_ab(
    sums_of_squares: tuple[list[float], ...],
    sources: Sequence[Tensor],
    scratch: _Scratch,
    add: Callable[[Tensor], Tensor],
) -> list[float]:
    """Return the dot product of a and b of each row; if u is small, from the squares of a, b and u.

    It overwrites a and b.
    """
    every = list(zip(*sums_of_squares, strict=True))
    # |u| <= |a| / 4 and |u| <= |b| / 4: their sum is then at least half of its terms, and as exact as they
    # are. Squares of float64 may leave its range
    is_near = [not scratch.is_double and 16 * u <= a and 16 * u <= b for a, b, u in every]
    near = [a / 2 + b / 2 - u / 2 for a, b, u in every]
    if all(is_near):
        return near
    _widen(sources[:2], scratch)
    a, b, *_ = scratch.sides
    others = add(a.mul_(b)).tolist()
    return [x if fits else y for x, y, fits in zip(near, others, is_near, strict=True)]


def _sum(x: Tensor) -> Tensor:
    return x.sum(dim=-1)


def _counts(sources: Sequence[Tensor], scratch: _Scratch, sizes: list[int]) -> list[list[float]]:
    """Return n_unchanged, n_nonzero_g and n_stuck of each row."""
    a, b, *rest = sources if scratch.is_narrow else scratch.sides
    flags, real_flags, integer = scratch.flags, scratch.real_flags, scratch.integer
    if a.dim() != 1:
        flags, real_flags = flags.view(a.shape), real_flags.view(a.shape)
    n_nonzero = n_stuck = [0.0] * len(sizes)
    if rest:
        # with a result of another size, ne and eq would take three times as long
        torch.ne(rest[0], 0.0, out=real_flags)
        n_nonzero = scratch.real_flag_rows.sum(1).tolist()
    # widening keeps different finite numbers, and zeros of either sign, apart
    torch.eq(a.view(integer), b.view(integer), out=flags)
    n_unchanged = scratch.flag_rows.sum(1, dtype=integer).tolist()
    # padding is unchanged
    width = scratch.u.shape[1]
    n_unchanged = [n - (width - size) for n, size in zip(n_unchanged, sizes, strict=True)]
    if n_nonzero == sizes:
        n_stuck = n_unchanged
    elif rest and any(n_unchanged):
        # g where it is the same, as bits
        flags.neg_().bitwise_and_(rest[0].view(integer))
        real_flags.ne_(0.0)
        n_stuck = scratch.real_flag_rows.sum(1).tolist()
    return [n_unchanged, n_nonzero, n_stuck]


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


def _measure_group(pairs: list[tuple[Tensor, ...]], indices: list[int], width: int, rows: list[_Row]) -> None:
    """Measure pairs with the same dtypes in rows of zero-padded numbers, in batches; write their rows."""
    most = max(1, _piece_length() // width)
    memory = _memory(pairs[indices[0]], width * min(most, len(indices)))
    scratch: _Scratch | None = None
    # with the bits of the sums of squares of one tensor
    add = row_sums if width <= SMALL else _sum
    for start in range(0, len(indices), most):
        batch = indices[start : start + most]
        members = [pairs[index] for index in batch]
        sizes = [pair[0].numel() for pair in members]
        sources = []
        for side in zip(*members, strict=True):
            # fp8 formats lack the operators that padding needs
            parts = [x.float() for x in side] if side[0].itemsize == 1 else list(side)
            if min(sizes) < width:
                zeros = parts[0].new_zeros(width)
                padding = {size: zeros[size:] for size in set(sizes)}
                parts = [x for part, size in zip(parts, sizes, strict=True) for x in (part, padding[size])]
            sources.append(_flatten_dense_tensors(parts).view(-1, width))
        if scratch is None or len(batch) < most:
            scratch = _Scratch(memory, sources, len(batch))
        found = _rows_of(members, sources, scratch, sizes, add)
        for index, row in zip(batch, found, strict=True):
            rows[index] = row
