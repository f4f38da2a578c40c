"""Read large tensors piece by piece, on threads that do not wait for one another.

How a tensor is cut depends only on its own size, shape and strides, and one thread reads each piece. So what
is added up has the same bits whichever tensors share the call, and for any number of threads.
"""

from __future__ import annotations

import math
from itertools import groupby, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Final, TypeVar

import torch
from torch import Tensor

from gradiometer.columns import WORD_BYTES
from gradiometer.inputs import as_flat
from gradiometer.ops import openmp
from gradiometer.ops.eager_plan import BATCH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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


def piece_length() -> int:
    """Return how many elements a thread reads at a time; fewer where torch would spread them over threads."""
    # a multiple of the elements of a word of any dtype
    return PIECE if openmp.can_run_alone() else BATCH // WORD_BYTES * WORD_BYTES


def by_tensor(
    large: list[tuple[int, tuple[Tensor, ...]]],
    length: int,
    start: Callable[[], Callable[[tuple[Tensor, ...]], T]],
    merge: Callable[[list[T]], T],
    *,
    worth_a_thread: int = WORTH_A_THREAD,
) -> Iterator[tuple[int, T]]:
    """Measure tensors block by block, on several threads; yield the index of each and its result.

    ``large``: at least one index, and tensors of one shape that are cut together. ``length``: elements that a
    thread reads at a time. ``start``: called once on each thread; returns the function that measures a block.
    ``merge``: merges the results of a tensor's blocks, in order. ``worth_a_thread``: elements in full pieces
    per additional thread.
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


def convertible(x: Tensor) -> Tensor:
    """Return a tensor whose conversion to float64 is fast."""
    # a direct conversion from float16 to float64 takes four times as long
    return x.to(torch.float32) if x.itemsize < 4 and x.dtype != torch.bfloat16 else x


def merged(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Merge rows of raw columns of parts: the last column is a maximum, the others are sums."""
    if len(rows) == 1:
        return rows[0]
    *sums, tops = zip(*rows, strict=True)
    return (*map(fsum, sums), max(tops))


def fsum(values: Sequence[float]) -> float:
    """Return the sum, rounded once unless it leaves the range of float64."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        # float64 inputs beyond 1e154: a plain sum gives inf or NaN
        return sum(values)
