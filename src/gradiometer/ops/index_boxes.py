"""The indices, in the whole tensor, of the elements that a rank holds.

`pieces_of` turns the boxes of a `gradiometer.inputs.Part` into pieces of two dimensions with strides in
memory and in the whole tensor's row-major order, so that neither a kernel nor the reference divides to find
the index of an element.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Final, NamedTuple

from gradiometer.inputs import Box, Part

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# a tensor in more pieces is copied first
MOST_PIECES: Final = 4096


class Piece(NamedTuple):
    """Elements (r, c) of R rows and C columns, in memory and in the whole tensor.

    The element is at ``offset + r * stride + c * step`` in memory, counted in elements, and its index is
    ``first + r * pitch + c * increment``.
    """

    rows: int
    columns: int
    offset: int
    stride: int
    step: int
    first: int
    pitch: int
    increment: int


def encode(parts: Iterable[Part | None]) -> list[int]:
    """Return integers from which `decode` returns the parts, for an op; None: a whole tensor."""
    found: list[int] = []
    for part in parts:
        if part is None:
            found.append(-1)
            continue
        found += [len(part.shape), *part.shape, len(part.boxes)]
        for box in part.boxes:
            found += [*box.start, *box.shape, *box.origin]
    return found if any([number != -1 for number in found]) else []


def decode(numbers: Sequence[int], count: int) -> list[Part | None]:
    """Return the parts of ``count`` tensors."""
    if not numbers:
        return [None] * count
    left = iter(numbers)

    def some(dims: int) -> tuple[int, ...]:
        return tuple(itertools.islice(left, dims))

    found: list[Part | None] = []
    for _ in range(count):
        (dims,) = some(1)
        if dims < 0:
            found.append(None)
            continue
        shape = some(dims)
        boxes = [Box(some(dims), some(dims), some(dims)) for _ in range(some(1)[0])]
        found.append(Part(shape, tuple(boxes)))
    return found


def pieces_of(shape: Sequence[int], strides: Sequence[int], part: Part | None) -> list[Piece]:
    """Return the pieces of a local tensor of this shape and these strides, in any order.

    >>> pieces_of((2, 3), (3, 1), None)
    [Piece(rows=1, columns=6, offset=0, stride=0, step=1, first=0, pitch=0, increment=1)]
    >>> right_half = Part((2, 6), (Box((0, 0), (2, 3), (0, 3)),))
    >>> pieces_of((2, 3), (3, 1), right_half)
    [Piece(rows=2, columns=3, offset=0, stride=3, step=1, first=3, pitch=6, increment=1)]
    """
    if part is None:
        part = Part(tuple(shape), (Box((0,) * len(shape), tuple(shape), (0,) * len(shape)),))
    pitches = [math.prod(part.shape[i + 1 :]) for i in range(len(part.shape))]
    found: list[Piece] = []
    for box in part.boxes:
        if 0 in box.shape:
            continue
        offset = sum([a * b for a, b in zip(box.start, strides, strict=True)])
        first = sum([a * b for a, b in zip(box.origin, pitches, strict=True)])
        dims = _collapsed(list(zip(box.shape, strides, pitches, strict=True)))
        # the largest two become rows and columns; of these, the nearer in memory becomes columns
        dims.sort(key=lambda dim: dim[0])
        *outer, rows, columns = [(1, 0, 0), (1, 0, 0), *dims][-max(2, len(dims)) :]
        if abs(rows[1]) < abs(columns[1]) and rows[0] > 1:
            rows, columns = columns, rows
        for place in itertools.product(*[range(size) for size, _, _ in outer]):
            moved = sum([i * dim[1] for i, dim in zip(place, outer, strict=True)])
            index = sum([i * dim[2] for i, dim in zip(place, outer, strict=True)])
            found.append(
                Piece(
                    rows[0],
                    columns[0],
                    offset + moved,
                    *rows[1:2],
                    columns[1],
                    first + index,
                    rows[2],
                    columns[2],
                )
            )
    return found


def _collapsed(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Merge dimensions, each (size, stride, pitch), that follow one another in memory and in the whole."""
    found: list[tuple[int, int, int]] = []
    for size, stride, pitch in sorted(dims, key=lambda dim: -dim[2]):
        if size == 1:
            continue
        if found and found[-1][1:] == (stride * size, pitch * size):
            found[-1] = (found[-1][0] * size, stride, pitch)
        else:
            found.append((size, stride, pitch))
    return found
