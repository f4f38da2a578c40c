"""Statistics in eager PyTorch: the CPU implementation, one streaming pass with little extra memory.

Large tensors go through small buffers piece by piece, on threads that do not wait for one another. Small
tensors are stacked into batches, so that each does not cost a dozen operator calls. Both paths are
optimistic: they count NaN and Inf only in pieces or rows whose extremes are not finite.

How a tensor is split depends only on its own size, shape and strides, and one thread sums up each piece. So
its statistics have the same bits whichever tensors share the call, and for any number of threads.
"""

from __future__ import annotations

import math
from array import array
from functools import reduce
from itertools import chain, groupby, islice, repeat
from operator import itemgetter, sub
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import Tensor

from gradiometer.columns import (
    NUM_COLUMNS,
    NUM_FINGERPRINT_COLUMNS,
    WORD_BYTES,
    Fingerprint,
    Flag,
    compute_flags,
    rescale,
)
from gradiometer.inputs import as_flat, as_real
from gradiometer.ops import fingerprint as bits
from gradiometer.ops import openmp
from gradiometer.ops.eager_plan import BATCH, FEW, SMALL, Group, Plan, plan_of, prepared
from gradiometer.ops.row_sums import LANES, add_lanes, lanes_of, row_sums, sum_of_small

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gradiometer.columns import Thresholds

__all__ = ["by_tensor", "convertible", "cut", "fsum", "sumsq", "tensor_stats"]

T = TypeVar("T")

# elements that a thread reads at a time, into a buffer of 8 bytes per element that stays in its cache
PIECE: Final = 2**17
# maximum number of threads; their buffers take 3 MiB together, and more would wait for Python's lock
MOST_THREADS: Final = 3
# elements in full pieces per additional thread, which takes 0.1 ms to start. In smaller pieces the operators
# are so short that the threads wait for Python's lock instead
WORTH_A_THREAD: Final = 2**19
# pieces of a tensor that one thread takes together (a block), and the most blocks of one tensor
BLOCK: Final = 4
MOST_BLOCKS: Final = 1024
# number of blocks whose results are kept until they are merged
WAVE: Final = 2048


# raw columns of one tensor, in the order of `gradiometer.columns.schema.COLUMNS`
_Row = tuple[float, ...]

# plain integers: an IntFlag creates an object for each result
_NAN, _INF, _VANISHING, _EXPLODING, _DEAD = map(int, Flag)


def tensor_stats(
    tensors: Sequence[Tensor],
    thresholds: Thresholds,
    inv_scale: Tensor | None = None,
    plan: Plan | None = None,
    *,
    fingerprint: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Measure tensors of one device.

    Args:
        tensors: at least one.
        thresholds: the limits for the flags.
        inv_scale: one element; the statistics are those of ``inv_scale * x``.
        plan: the result of `plan_of` for these tensors, if `prepared` changes none of them.
        fingerprint: whether to return fingerprints too.

    Returns:
        columns ``(T, C) float64``, flags ``(T,) int32``, and fingerprints ``(T, 3) int64`` or None.
    """
    fingerprints: dict[int, Fingerprint] | None = None
    if fingerprint:
        fingerprints = {}
        if plan is None or not all([tensor.is_contiguous() for tensor in tensors]):
            tensors = [as_real(tensor).contiguous() for tensor in tensors]
    originals = tensors
    if plan is None:
        tensors = [prepared(tensor) for tensor in tensors]
        plan = plan_of(tensors)
    rows: list[_Row] = [(0.0,) * NUM_COLUMNS] * len(tensors)
    for index in plan.single:
        rows[index] = _row_of_number(tensors[index].item())
    for group in plan.groups:
        if len(group.sizes) * group.width <= BATCH or not openmp.can_run_alone():
            _measure_group(tensors, group, rows, BATCH, fingerprints)
        else:
            with openmp.one_thread():
                _measure_group(tensors, group, rows, 4 * BATCH, fingerprints)
    if plan.batches:
        with openmp.one_thread():
            _measure_batches(tensors, plan.batches, rows, fingerprints)
    large = [(index, tensors[index]) for index in plan.large]
    if fingerprints is None:
        for index, row in _by_tensor(large, _measure_block, _merge):
            rows[index] = row
    else:
        for index, (row, found) in _by_tensor(large, _measure_block_and_bits, _merge_both):
            rows[index], fingerprints[index] = row, found
        for index, x in enumerate(originals):
            if index not in fingerprints or x is not tensors[index]:
                # a single number, an empty tensor, or one in a format that was converted
                fingerprints[index] = bits.fingerprint(x, x.new_empty(SMALL, dtype=torch.int64))
    device = tensors[0].device
    columns = _tensor(array("d", chain.from_iterable(rows)), torch.float64, device)
    columns = columns.view(len(rows), NUM_COLUMNS)
    bits_of_all = None
    if fingerprints is not None:
        values = array("q", chain.from_iterable([fingerprints[i].row for i in range(len(rows))]))
        bits_of_all = _tensor(values, torch.int64, device).view(len(rows), NUM_FINGERPRINT_COLUMNS)
    if inv_scale is not None:
        columns = rescale(columns, inv_scale.reshape(()).to(columns))
        return columns, compute_flags(columns, thresholds), bits_of_all
    return columns, _tensor(array("i", _flags(rows, thresholds)), torch.int32, device), bits_of_all


def _tensor(values: array[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    x = torch.frombuffer(values, dtype=dtype)
    return x if device.type == "cpu" else x.to(device)


def sumsq(tensors: Sequence[Tensor]) -> float:
    """Return the sum of squares of real tensors of one device; NaN and Inf propagate."""
    large: list[tuple[int, Tensor]] = []
    small: dict[torch.dtype, list[Tensor]] = {}
    for index, x in enumerate(tensors):
        if x.numel() > SMALL:
            large.append((index, x))
        else:
            small.setdefault(x.dtype, []).append(x if x.dim() == 1 else x.reshape(-1))
    sums = [total for _, total in _by_tensor(large, _sumsq_of_block, fsum)]
    for flats in small.values():
        step = BATCH // max(1, *[len(x) for x in flats])
        starts = range(0, len(flats), step)
        sums += [_sum_of_squares(torch.cat(flats[start : start + step]).double()) for start in starts]
    return fsum(sums)


def _flags(rows: list[_Row], thresholds: Thresholds) -> list[int]:
    """Do what `compute_flags` does, for rows on the host."""
    # most rows have no flag; their squares and counts show it, with a margin for the rounding of the root and
    # of the quotient
    least = thresholds.vanishing * thresholds.vanishing * (1 + 2**-50)
    most = thresholds.exploding * thresholds.exploding * (1 - 2**-50)
    dead = thresholds.dead * (1 - 2**-50)
    return [
        0
        if least <= sumsq <= most and n_zero < dead * numel and not (n_nan or n_posinf or n_neginf)
        else _flags_of((numel, sumsq, total, n_zero, n_nan, n_posinf, n_neginf, top), thresholds)
        for numel, sumsq, total, n_zero, n_nan, n_posinf, n_neginf, top in rows
    ]


def _flags_of(row: _Row, thresholds: Thresholds) -> int:
    numel, sumsq, _, n_zero, n_nan, n_posinf, n_neginf, _ = row
    if numel == 0:
        return 0
    if n_nan or n_posinf or n_neginf:
        flags = _EXPLODING | (_NAN if n_nan else 0) | (_INF if n_posinf or n_neginf else 0)
    else:
        norm = math.sqrt(sumsq)
        flags = _VANISHING if norm < thresholds.vanishing else 0
        flags = flags if norm <= thresholds.exploding else flags | _EXPLODING
    return flags | _DEAD if n_zero / numel >= thresholds.dead else flags


# small tensors


def _row_of_number(x: float) -> _Row:
    if not math.isfinite(x):
        return (1.0, 0.0, 0.0, 0.0, float(x != x), float(x == math.inf), float(x == -math.inf), 0.0)  # noqa: PLR0124
    # a sum is never -0. With torch.set_flush_denormal(True) this also makes 0 of a subnormal number
    x += 0.0
    return (1.0, x * x, x, float(x == 0), 0.0, 0.0, 0.0, abs(x))


def _measure_group(
    tensors: Sequence[Tensor],
    group: Group,
    rows: list[_Row],
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
                    rows[index] = _measure_nonfinite(x, _Scratch(x.numel(), 1, x.device))


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


def _measure_batches(
    tensors: Sequence[Tensor],
    batches: list[list[int]],
    rows: list[_Row],
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
                rows[index] = _measure_nonfinite(x, _Scratch(x.numel(), 1, device))
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


# large tensors


class _Scratch:
    """The buffers of one thread: a piece in fp64, and slots for the results of several pieces."""

    def __init__(self, numel: int, count: int, device: torch.device) -> None:
        self.wide = torch.empty(numel, dtype=torch.float64, device=device)
        # 0-d: sum, sumsq, least, greatest
        results = torch.empty((4, count), dtype=torch.float64, device=device)
        self.slots = list(zip(*[result.unbind() for result in results], strict=True))


def piece_length() -> int:
    """Return how many elements a thread reads at a time; fewer where torch would spread them over threads."""
    # a multiple of the elements of a word of any dtype
    return PIECE if openmp.can_run_alone() else BATCH // WORD_BYTES * WORD_BYTES


def _by_tensor(
    large: list[tuple[int, Tensor]], measure: Callable[[Tensor, _Scratch], T], merge: Callable[[list[T]], T]
) -> Iterator[tuple[int, T]]:
    """Measure each tensor, block by block; yield its index in the call and the merged result."""
    if not large:
        return iter(())
    most, length = max([x.numel() for _, x in large]), piece_length()
    device = large[0][1].device

    def start() -> Callable[[tuple[Tensor, ...]], T]:
        scratch = _Scratch(min(length, most), min(BLOCK, -(-most // length)), device)
        return lambda block: measure(block[0], scratch)

    return by_tensor([(index, (x,)) for index, x in large], length, start, merge)


def by_tensor(
    large: list[tuple[int, tuple[Tensor, ...]]],
    length: int,
    start: Callable[[], Callable[[tuple[Tensor, ...]], T]],
    merge: Callable[[list[T]], T],
    *,
    worth_a_thread: int = WORTH_A_THREAD,
) -> Iterator[tuple[int, T]]:
    """Measure tensors, or tuples of tensors of one shape, block by block, on several threads.

    Args:
        large: at least one index in the call, and the tensors that are cut together.
        length: elements that a thread reads at a time.
        start: called once on each thread; returns the function that measures a block.
        merge: merges the results of a tensor's blocks, in order.
        worth_a_thread: elements in full pieces per additional thread.

    Yields:
        each index and its result.
    """
    device, sizes = large[0][1][0].device, [xs[0].numel() for _, xs in large]
    threads = 1
    if device.type == "cpu":
        full = sum([size for size in sizes if size >= length])
        threads = min(MOST_THREADS, torch.get_num_threads(), 1 + full // worth_a_thread)

    def blocks() -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        for index, xs in large:
            pieces = max(BLOCK, -(-xs[0].numel() // (length * MOST_BLOCKS)))
            yield from ((index, block) for block in cut(xs, length * pieces))

    def on_thread() -> Callable[[tuple[int, tuple[Tensor, ...]]], tuple[int, T]]:
        measure = start()
        return lambda block: (block[0], measure(block[1]))

    def measured() -> Iterator[tuple[int, T]]:
        todo, count = blocks(), WAVE
        while count == WAVE:
            wave = openmp.map_on_threads(on_thread, islice(todo, WAVE), threads)
            yield from wave
            count = len(wave)

    for index, parts in groupby(measured(), key=itemgetter(0)):
        yield index, merge([part for _, part in parts])


def cut(xs: tuple[Tensor, ...], length: int) -> Iterator[tuple[Tensor, ...]]:
    """Cut tensors of one shape alike into views of at most ``length`` elements, whatever their strides."""
    first, *others = xs
    if first.numel() <= length:
        yield xs
        return
    if all([x.stride() == first.stride() for x in others]):
        flats = [as_flat(x) for x in xs]
        if flats[0] is not None:
            yield from zip(*[x.split(length) for x in flats if x is not None], strict=True)
            return
    dim = next(dim for dim, size in enumerate(first.shape) if size > 1)
    rows = max(1, length // (first.numel() // first.shape[dim]))
    for parts in zip(*[x.split(rows, dim) for x in xs], strict=True):
        yield from cut(parts, length)


def _pieces(x: Tensor, length: int) -> Iterator[Tensor]:
    return (piece for (piece,) in cut((x,), length))


# After each operator a thread may have to wait for Python's lock. So only the necessary operators are called,
# and most results are written into slots, which are read together.


def _measure_block(block: Tensor, scratch: _Scratch) -> _Row:
    measure = _measure_double if block.dtype == torch.float64 else _measure_float
    rows: list[_Row] = []
    pieces = _pieces(block, scratch.wide.numel())
    while batch := list(islice(pieces, len(scratch.slots))):
        slots = list(zip(batch, scratch.slots, strict=False))
        zeros = [measure(piece, scratch, *results) for piece, results in slots]
        for n_zero, (piece, (total, sumsq, _, greatest)) in zip(zeros, slots, strict=True):
            top = greatest.item()
            if not top < math.inf:
                rows.append(_measure_nonfinite(piece, scratch))
                continue
            # the square is exact, so its root is exact too
            top = top if piece.dtype == torch.float64 else math.sqrt(top)
            rows.append((piece.numel(), sumsq.item(), total.item(), n_zero, 0.0, 0.0, 0.0, top))
    return _merge(rows)


def _measure_block_and_bits(block: Tensor, scratch: _Scratch) -> tuple[_Row, Fingerprint]:
    # the block is still in a cache
    return _measure_block(block, scratch), bits.fingerprint(block, scratch.wide.view(torch.int64))


def _measure_float(
    piece: Tensor, scratch: _Scratch, total: Tensor, sumsq: Tensor, least: Tensor, greatest: Tensor
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
    piece: Tensor, scratch: _Scratch, total: Tensor, sumsq: Tensor, least: Tensor, greatest: Tensor
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


def _widened(piece: Tensor, scratch: _Scratch) -> Tensor:
    """Return a piece in fp64, in the buffer."""
    piece = convertible(piece)
    if piece.dim() == 1 and piece.numel() == scratch.wide.numel():
        return scratch.wide.copy_(piece)
    return scratch.wide[: piece.numel()].view(piece.shape).copy_(piece)


def convertible(x: Tensor) -> Tensor:
    """Return a tensor whose conversion to float64 is fast."""
    # a direct conversion from float16 to float64 takes four times as long
    return x.to(torch.float32) if x.itemsize < 4 and x.dtype != torch.bfloat16 else x


def _measure_nonfinite(piece: Tensor, scratch: _Scratch) -> _Row:
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
        total, sumsq = wide.sum().item(), _sum_of_squares(wide)
    return (wide.numel(), sumsq, total, n_zero, *counts, max(0.0, -least, greatest))


def _sumsq_of_block(block: Tensor, scratch: _Scratch) -> float:
    pieces = _pieces(block, scratch.wide.numel())
    return fsum([_sum_of_squares(_widened(piece, scratch)) for piece in pieces])


def _sum_of_squares(wide: Tensor) -> float:
    return torch.mul(wide, wide, out=wide).sum().item()


def _merge(rows: list[_Row]) -> _Row:
    if len(rows) == 1:
        return rows[0]
    numel, sumsq, total, n_zero, n_nan, n_posinf, n_neginf, top = zip(*rows, strict=True)
    counts = map(sum, (n_zero, n_nan, n_posinf, n_neginf))
    return (sum(numel), fsum(sumsq), fsum(total), *counts, max(top))


def _merge_both(parts: list[tuple[_Row, Fingerprint]]) -> tuple[_Row, Fingerprint]:
    rows, fingerprints = zip(*parts, strict=True)
    return _merge(list(rows)), reduce(Fingerprint.then, fingerprints)


def fsum(values: Sequence[float]) -> float:
    """Return the sum, rounded once unless it leaves the range of float64."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        # float64 inputs beyond 1e154: a plain sum gives inf or NaN
        return sum(values)
