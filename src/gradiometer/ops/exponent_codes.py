"""Codes of float32 numbers for histograms of magnitudes, by operators on 16-bit integers.

Operators on 16-bit integers take a third of the time of those on 32-bit integers. So the bits of a number,
plus `_SHIFT`, are split into two halves. The upper half, rounded to the nearest even integer as a cast to
bfloat16 does, is its *cell*: there are 128 in a binade. The lower half is then signed, and only its *side* is
kept: below the cell's multiple of 2**16, equal to it, or above. All edges of `gradiometer.columns` in the
middle of the range lie 2**12 below an even multiple, where a cell begins, at one, or just above one; so a
cell and a side lie in one bin. A tie, which is rounded to an even cell, has the side of the other end of that
cell. Edges are only in odd cells, so it lies in the same bin.

`window_codes` have 384 codes in a binade, for large tensors. `row_codes` have 5 codes in a binade, one for
each bin, so that small tensors are counted together: with `row_offsets`, each has codes of its own.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from gradiometer.columns import EXPONENTS, bin_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHIFT: Final = 2**15 + 2**12 + 1
# the lower half of `_SHIFT`, signed: that of a multiple of 2**16
_EQUAL: Final = _SHIFT - 2**16
_MAGNITUDE: Final = 2**15 - 1
_CELLS: Final = 128
_INF: Final = 2**62

# window_codes: 3 for each of the cells of a window and of the cells beside it, which stand for all others. In
# the middle window, 3 * cell + side is the code, modulo 2**16, with no other operator: it begins with this
_LEAST: Final = 2
_WINDOW: Final = 10920
_BELOW_MIDDLE: Final = (_LEAST - (_EQUAL - 1)) // 3
NUM_WINDOW_CODES: Final = 2**15
BELOW: Final = slice(_LEAST, _LEAST + 3)
"""The codes of numbers below a window."""
# the cell of the smallest normal number
_NORMAL: Final = _CELLS + 1
# the first cell of each window, and the end
_STARTS_OF_WINDOWS: Final = (_NORMAL, *range(_BELOW_MIDDLE + 1, 2**15, _WINDOW), 2**15)
NUM_WINDOWS: Final = len(_STARTS_OF_WINDOWS) - 1
MIDDLE: Final = 1
"""The window that has most numbers, from 2**-52 to 2**33."""

# row_codes: one for each column of 64 binades, from 2**-41 to 2**23, and the two ends for all other numbers
_COLUMNS: Final = 5
_LOWEST: Final = 86
_BINADES: Final = 64
NUM_ROW_CODES: Final = _BINADES * _COLUMNS + 2
INSIDE: Final = slice(1, -1)
"""The codes of a row but those of the ends."""
ROWS: Final = 2**15 // NUM_ROW_CODES
"""The most tensors that are counted together."""
# A column is the sum of places in the binade, 4 * cell + side, each cut off at one of these pairs; a side is
# 0, 1 or 2. A multiple of 2**16 is one less than its cell, so cell 0 belongs to the last column of the binade
# below. A bfloat16 number is such a multiple: that is its place, and it is in no first column
_PLACES: Final = 4 * _CELLS
_RAMPS: Final = {
    torch.float32: ((3, 6), (4 * 105 + 1, 4 * 105 + 2), (4 * 113, 4 * 113 + 1)),
    torch.bfloat16: ((0, 1), (104, 105), (111, 112)),
}
# the place of 0, of which no other number of the lowest binade is
_ZERO: Final = {torch.float32: 5, torch.bfloat16: 0}
# the code of the lower end, before `row_offsets`
_ENDS: Final = {
    dtype: _COLUMNS * _LOWEST + sum([low for low, _ in _RAMPS[dtype]]) - more
    for dtype, more in ((torch.float32, 0), (torch.bfloat16, 2))
}


class Scratch:
    """The buffers of one thread, for ``numel`` numbers: one of 4 bytes for each, and two of 2 bytes."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.numel = numel
        # one allocation: C libraries tend to return the memory of several to the system
        memory = torch.empty(4 * numel, dtype=torch.int16, device=device)
        bits, *self.words = memory.split([2 * numel, numel, numel])
        self.bits = bits.view(torch.int32)

    def first(self, numel: int) -> tuple[Tensor, list[Tensor]]:
        """Return the beginnings of the buffers."""
        if numel == self.numel:
            return self.bits, self.words
        return self.bits[:numel], [x[:numel] for x in self.words]


@cache
def _constant(value: int, dtype: torch.dtype) -> Tensor:
    # an operator takes microseconds to make a tensor of a Python number
    return torch.tensor(value, dtype=dtype, device="cpu")


def int16(value: int) -> Tensor:
    """Return a number, modulo 2**16, as an operand."""
    return _constant((value + 2**15) % 2**16 - 2**15, torch.int16)


def _split(bits: Tensor, shifted: Tensor, cells: Tensor, sides: Tensor) -> None:
    """Write sign and cell, and side (-1, 0, 1) + `_EQUAL`, of float32 numbers."""
    torch.add(bits, _constant(_SHIFT, torch.int32), out=shifted)
    cells.view(torch.bfloat16).copy_(shifted.view(torch.float32))
    sides.copy_(shifted).clamp_(_EQUAL - 1, _EQUAL + 1)


def window_codes(bits: Tensor, window: int, scratch: Scratch) -> Tensor:
    """Return the codes of float32 numbers in one of the windows of the range, int16, in ascending order.

    Numbers outside of the window have the codes of the cells beside it.
    """
    shifted, (cells, codes) = scratch.first(bits.numel())
    _split(bits, shifted, cells, codes)
    below, above = _STARTS_OF_WINDOWS[window] - 1, _STARTS_OF_WINDOWS[window + 1]
    cells.bitwise_and_(int16(_MAGNITUDE)).clamp_(below, min(above, _MAGNITUDE))
    codes.add_(cells, alpha=3)
    return codes if window == MIDDLE else codes.add_(int16(_LEAST - (_EQUAL - 1) - 3 * below))


def _inside(window: int) -> slice:
    start, stop = _STARTS_OF_WINDOWS[window : window + 2]
    return slice(_LEAST + 3, _LEAST + 3 * (stop - start + 1))


@cache
def window_columns(window: int) -> tuple[Tensor, Tensor]:
    """Return the column of each code of a window, int64, ascending, and whether to look up its numbers.

    Numbers below the window have the column of zeros, and those above it that of NaN. Those below the first
    window are looked up: they include the subnormal numbers.
    """
    start, stop = _STARTS_OF_WINDOWS[window : window + 2]
    multiples = torch.arange(start - 3, stop + 1, dtype=torch.int32, device="cpu").clamp_(max=2**15 - 1) << 16
    columns = torch.zeros((2, NUM_WINDOW_CODES), dtype=torch.int64, device="cpu")
    columns[0] = _INF
    scratch = Scratch(multiples.numel(), multiples.device)
    # both ends of each side of each cell, and the tie between two cells
    for end in (-(2**12) - 1, -(2**12), -1, 0, 1, 2**16 - 2**12 - 2):
        bits = (multiples + end).clamp_(min=0)
        codes = window_codes(bits, window, scratch).long()
        found = bin_of(magnitudes_of(bits.view(torch.float32)))
        columns[0].scatter_reduce_(0, codes, found, "amin")
        columns[1].scatter_reduce_(0, codes, found, "amax")
    is_wide = columns[0] < columns[1]
    inside = _inside(window)
    is_wide[: inside.start] = is_wide[inside.stop :] = False
    if window == 0:
        # subnormal numbers, whether or not torch.set_flush_denormal makes 0 of them, and with them the
        # largest NaN, for which the sum overflows
        is_wide[: inside.start + 3] = True
    if window == NUM_WINDOWS - 1:
        # a cast makes one number of all NaN
        is_wide[_LEAST + 3 * (2**15 - _CELLS - start) :] = True
    columns[0, : inside.start] = 0
    columns[0, inside.stop :] = EXPONENTS.width - 1
    return columns[0].masked_fill_(columns[0] == _INF, 0).cummax(0).values, is_wide


def row_codes(dtype: torch.dtype, bits: Tensor, words: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the codes of float32 or bfloat16 numbers, int16, without `row_offsets`, and a buffer like them.

    ``bits``: 4 bytes for each number, int32. The buffer begins with the numbers, and then has the result.
    ``words``: two buffers of 2 bytes for each, int16, for `nonzero_among`.
    """
    binades, places = words
    # once the numbers are split, their buffer is free
    codes, part = bits.view(torch.int16).view(2, -1).unbind()
    if dtype == torch.bfloat16:
        torch.bitwise_and(codes, int16(_CELLS - 1), out=places)
        torch.bitwise_and(codes, int16(_MAGNITUDE), out=binades)
    else:
        _split(bits, bits, binades, places)
        # this drops the binade, and what is added to sides
        places.add_(binades, alpha=4).bitwise_and_(int16(_PLACES - 1))
        binades.bitwise_and_(int16(_MAGNITUDE))
    first, second, third = _RAMPS[dtype]
    torch.clamp(places, *third, out=codes).add_(torch.clamp(places, *second, out=part))
    codes.add_(places.clamp_(*first)).add_(binades.bitwise_right_shift_(int16(7)), alpha=_COLUMNS)
    return codes.clamp_(_ENDS[dtype], _ENDS[dtype] + NUM_ROW_CODES - 1), part


@cache
def row_offsets(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what to add to the codes of each row, ``(ROWS, 1) int16``."""
    rows = torch.arange(ROWS, dtype=torch.int16, device=device)
    return (rows * NUM_ROW_CODES - _ENDS[dtype]).unsqueeze(1)


def nonzero_among(dtype: torch.dtype, words: Sequence[Tensor]) -> Tensor:
    """Return integers that are 0 only for 0 and -0, given what `row_codes` wrote into these buffers."""
    binades, places = words
    # a place is less than 4 above the lowest
    return places.add_(binades, alpha=4).sub_(int16(_ZERO[dtype]))


def is_at_end(dtype: torch.dtype, codes: Tensor) -> Tensor:
    """Return integers that are not 0 for the codes of the ends, given the result of `row_codes`."""
    return codes - codes.clamp(_ENDS[dtype] + 1, _ENDS[dtype] + NUM_ROW_CODES - 2)


def magnitudes_of(x: Tensor) -> Tensor:
    """Return the magnitudes of floating-point numbers as the bits of float64."""
    # a narrow number becomes float32 first, so that torch.set_flush_denormal has the same effect everywhere;
    # a product with 1 flushes subnormal numbers, too
    x = x.float() if x.itemsize < 4 else x
    x = x * 1.0 if x.dtype == torch.float64 else x.double()
    return x.abs().view(torch.int64)


def _first_column() -> int:
    # the first column of a binade has the numbers that round to its power of two
    least = torch.tensor([(_LOWEST << 23) - 1], dtype=torch.int32, device="cpu").view(torch.float32)
    return int(bin_of(magnitudes_of(least)))


_FIRST_COLUMN: Final = _first_column()
ROW_COLUMNS: Final = slice(_FIRST_COLUMN, _FIRST_COLUMN + _BINADES * _COLUMNS)
"""The columns of the codes `INSIDE`."""
