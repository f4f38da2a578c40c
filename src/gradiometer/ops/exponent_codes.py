"""Codes of float32 numbers for histograms of magnitudes, by operators on 16-bit integers.

Operators on 16-bit integers take a third of the time of those on 32-bit integers. So the bits of a number,
plus `_SHIFT`, are split into two halves. The upper half, rounded to the nearest even integer as a cast to
bfloat16 does, is its *cell*: there are 128 in a binade. The lower half is then signed, and only its *side* is
kept: below the cell's multiple of 2**16, equal to it, or above. All edges of `gradiometer.columns` in the
middle of the range lie 2**12 below an even multiple, where a cell begins, at one, or just above one; so a
cell and a side lie in one bin. A tie, which is rounded to an even cell, has the side of the other end of that
cell. Edges are only in odd cells, so it lies in the same bin.

`window_codes` have 384 codes in a binade, for large tensors. `row_codes` have 5 codes in a binade, and a
number for the tensor, so that small tensors are counted together.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import Tensor

from gradiometer.columns import NUM_EXPONENT_COLUMNS, bin_of

__all__ = [
    "BELOW",
    "MIDDLE",
    "NUM_ROW_CODES",
    "NUM_WINDOWS",
    "NUM_WINDOW_CODES",
    "ROWS",
    "Scratch",
    "count_outside",
    "int16",
    "is_outside",
    "magnitudes_of",
    "row_codes",
    "row_codes_of_words",
    "row_offsets",
    "window_codes",
    "window_columns",
    "write_columns",
]

_SHIFT: Final = 2**15 + 2**12 + 1
# the lower half of `_SHIFT`, signed: that of a multiple of 2**16
_EQUAL: Final = _SHIFT - 2**16
_MAGNITUDE: Final = 2**15 - 1
_CELLS: Final = 128
_INF: Final = 2**62

# window_codes: 3 for each of the cells of a window and of the cells beside it, which stand for all others. In
# the middle window, 3 * cell + side is the code, modulo 2**16, with no further operator: it begins with this
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

# row_codes: 8 bits for the binade, the others for the row and the class
_BINADES: Final = 64
_BELOW: Final = 85
NUM_ROW_CODES: Final = (_BINADES + 2) * 2**8
# 3 * cell in the binade + side: the first; from the last two on, the column is the next one
_FIRST: Final = _EQUAL - 1
_THIRD: Final = _FIRST + 3 * 104 + 2
_FOURTH: Final = _FIRST + 3 * 112 + 1


ROWS: Final = 32
"""The most tensors that are counted together."""
# a class is the sum of places in the binade that are cut off at the ends of these
_RAMPS: Final = ((_FIRST, _FIRST + 2), (_THIRD - 1, _THIRD), (_FOURTH - 1, _FOURTH))
# what that sum is too large by: binades, and a remainder
_EXCESS: Final = sum([low for low, _ in _RAMPS]) % 2**16
_EXTRA: Final = _EXCESS & 255


class Scratch:
    """The buffers of one thread, for ``numel`` numbers: 4 bytes for each, and 2 for each of ``words``."""

    def __init__(self, numel: int, device: torch.device, words: int = 2) -> None:
        self.numel = numel
        self.bits = torch.empty(numel, dtype=torch.int32, device=device)
        self.words = [torch.empty(numel, dtype=torch.int16, device=device) for _ in range(words)]

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


def _split(bits: Tensor, scratch: Scratch, sides: Tensor) -> tuple[Tensor, Tensor]:
    """Return sign and cell, and side (-1, 0, 1) + `_EQUAL`, of float32 numbers."""
    shifted, (cells, *_) = scratch.first(bits.numel())
    torch.add(bits, _constant(_SHIFT, torch.int32), out=shifted)
    cells.view(torch.bfloat16).copy_(shifted.view(torch.float32))
    sides.copy_(shifted)
    return cells, torch.clamp(sides, _EQUAL - 1, _EQUAL + 1, out=sides)


def window_codes(bits: Tensor, window: int, scratch: Scratch, out: Tensor) -> Tensor:
    """Write the codes of float32 numbers in one of the windows of the range, int16, in ascending order.

    Numbers outside of the window have the codes of the cells beside it.
    """
    cells, sides = _split(bits, scratch, out)
    torch.bitwise_and(cells, int16(_MAGNITUDE), out=cells)
    below, above = _STARTS_OF_WINDOWS[window] - 1, _STARTS_OF_WINDOWS[window + 1]
    torch.clamp(cells, below, min(above, _MAGNITUDE), out=cells)
    codes = torch.add(sides, cells, alpha=3, out=out)
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
        codes = window_codes(bits, window, scratch, scratch.first(len(bits))[1][1]).long()
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
    columns[0, inside.stop :] = NUM_EXPONENT_COLUMNS - 1
    return columns[0].masked_fill_(columns[0] == _INF, 0).cummax(0).values, is_wide


def row_codes(bits: Tensor, scratch: Scratch) -> Tensor:
    """Return the codes of float32 numbers, int16, of row 0, less what `row_offsets` has more.

    Numbers outside of 2**-41 to 2**23 have codes below the first binade or above the last.
    """
    cells, sides = _split(bits, scratch, scratch.first(bits.numel())[1][1])
    return _row_codes(cells.sub_(int16(1)), sides, scratch)


def row_codes_of_words(words: Tensor, scratch: Scratch) -> Tensor:
    """Return the same for bfloat16 numbers, given as their bits in the first buffer of 16 bits."""
    sides = scratch.first(words.numel())[1][1]
    return _row_codes(words, sides.fill_(_EQUAL), scratch)


def _row_codes(cells: Tensor, sides: Tensor, scratch: Scratch) -> Tensor:
    # from now on, a cell has the number of its multiple of 2**16
    part, total = scratch.first(cells.numel())[1][2:]
    torch.bitwise_and(cells, int16(_CELLS - 1), out=part)
    # the binade, times 128, from the one below the first; and the place in it
    cells.sub_(part).sub_(int16((_BELOW + (_EXCESS >> 8)) << 7))
    sides.add_(part, alpha=3)
    first, *others = _RAMPS
    torch.clamp(sides, *first, out=total)
    for low, high in others:
        total.add_(torch.clamp(sides, low, high, out=part))
    # this multiplies the sign by 2**16
    total.add_(cells, alpha=2)
    return torch.clamp(total, _EXTRA, _EXTRA + ((_BINADES + 1) << 8), out=total)


@cache
def row_offsets(count: int) -> Tensor:
    """Return what to add to the codes of each row, ``(R,) int16``; the first `ROWS` repeat."""
    return torch.arange(count, dtype=torch.int16, device="cpu") % ROWS * (2**8 // ROWS) - _EXTRA


def write_columns(counts: Tensor, out: Tensor) -> None:
    """Write the columns of each row, ``(R, C)``, given the counts of `row_codes`."""
    table = counts.view(_BINADES + 2, ROWS, -1)[1:-1, : len(out), :5].transpose(0, 1)
    columns = out.zero_()[:, _FIRST_COLUMN : _FIRST_COLUMN + 5 * _BINADES]
    columns.unflatten(1, (_BINADES, 5)).copy_(table)


def count_outside(counts: Tensor) -> list[int]:
    """Return, by the counts of `row_codes`, how many numbers of each row are outside of the window, or []."""
    table = counts.view(_BINADES + 2, 2**8)[:: _BINADES + 1]
    return table.view(2, ROWS, -1).sum((0, 2)).tolist() if table.any() else []


def is_outside(codes: Tensor) -> Tensor:
    """Return which codes, with the offsets of their rows, are those of numbers outside of the window."""
    return (codes < 2**8) | (codes >= (_BINADES + 1) << 8)


def magnitudes_of(x: Tensor) -> Tensor:
    """Return the magnitudes of floating-point numbers as the bits of float64."""
    # a narrow number becomes float32 first, so that torch.set_flush_denormal has the same effect everywhere
    x = x.float() if x.itemsize < 4 else x
    return x.double().abs().view(torch.int64)


def _first_column() -> int:
    # the class 1 of the first binade is the end of the binade below
    least = torch.tensor([((_BELOW + 1) << 23) - 1], dtype=torch.int32, device="cpu").view(torch.float32)
    return int(bin_of(magnitudes_of(least)))


_FIRST_COLUMN: Final = _first_column()
