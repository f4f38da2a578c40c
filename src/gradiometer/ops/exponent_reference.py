"""Histograms of magnitudes in eager PyTorch: the CPU implementation.

Each float32 number gets a key of 14 bits, by a few integer operators, and one ``bincount`` counts the keys. A
key stands for one bin, except where edges lie so close that they need more bits: for subnormal numbers and
near the ends of the range. Those few elements are looked up in the edges. float64 numbers are rounded to
float32 first, as a cast rounds them; those that leave its range are looked up too.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from gradiometer.columns import NUM_EXPONENT_COLUMNS, bin_of
from gradiometer.inputs import as_real
from gradiometer.ops import openmp
from gradiometer.ops.reference import MOST_THREADS, WORTH_A_THREAD, by_tensor, cut, piece_length

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["exponent_stats"]

# larger tensors are cut into pieces, smaller ones are put together
_LARGE: Final = 2**16
# elements that a thread reads at a time: operators on fewer would wait for Python's lock too often
_PIECE: Final = 2**18
# rows that are counted together: each takes 8 KB
_ROWS: Final = 256
_WIDTH: Final = NUM_EXPONENT_COLUMNS
# 64 for each value of the exponent field
_KEYS: Final = 2**14
_INF_KEY: Final = 255 * 64
_NAN: Final = 0x7F800001
# of float32
_MANTISSA: Final = 23
_SIXTEENTH: Final = 19
_TOP: Final = 12


def exponent_stats(tensors: Sequence[Tensor]) -> Tensor:
    """Return the histograms of tensors of one device, ``(T, C) int64``."""
    device = tensors[0].device
    numbers = [as_real(x) for x in tensors]
    rows = torch.empty((len(numbers), _WIDTH), dtype=torch.int64, device=device)
    small: dict[torch.dtype, list[int]] = {}
    large: list[tuple[int, tuple[Tensor, ...]]] = []
    for index, x in enumerate(numbers):
        if x.numel() > _LARGE:
            large.append((index, (x,)))
        else:
            small.setdefault(x.dtype, []).append(index)
    batches = [batch for indices in small.values() for batch in _batches(indices, numbers)]
    if batches:
        elements = sum([x.numel() for x in numbers if x.numel() <= _LARGE])
        threads = min(MOST_THREADS, torch.get_num_threads(), 1 + elements // WORTH_A_THREAD)

        def start() -> Callable[[list[int]], None]:
            scratch = _Scratch(min(_PIECE, elements), device)
            return lambda batch: _count_batch(batch, numbers, scratch, rows)

        openmp.map_on_threads(start, batches, threads if device.type == "cpu" else 1)
    if large:
        length = _PIECE if openmp.can_run_alone() else piece_length()
        most = min(length, max([x.numel() for _, (x,) in large]))

        def start_large() -> Callable[[tuple[Tensor, ...]], Tensor]:
            scratch = _Scratch(most, device)
            return lambda block: _count_block(block[0], scratch)

        for index, row in by_tensor(large, most, start_large, _sum):
            rows[index] = row
    return rows


def _sum(rows: list[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.stack(rows).sum(0)


def _batches(indices: list[int], numbers: list[Tensor]) -> Iterator[list[int]]:
    batch: list[int] = []
    filled = 0
    for index in indices:
        numel = numbers[index].numel()
        if batch and (filled + numel > _PIECE or len(batch) == _ROWS):
            yield batch
            batch, filled = [], 0
        batch.append(index)
        filled += numel
    yield batch


class _Scratch:
    """The buffers of one thread."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.x = torch.empty(numel, dtype=torch.float32, device=device)
        self.keys = [torch.empty(numel, dtype=torch.int32, device=device) for _ in range(3)]


@cache
def _table() -> tuple[Tensor, Tensor]:
    """Return the column of each key, int32, and whether its numbers have several."""
    field = torch.arange(256, dtype=torch.int32, device="cpu")[:, None] << _MANTISSA
    grid = (field + (torch.arange(16, dtype=torch.int32, device="cpu") << _SIXTEENTH)).view(-1)
    top = field.view(-1) + (2**_MANTISSA - 2**_TOP)
    ends = grid + (2**_SIXTEENTH - 1)
    ends[15::16] = top - 1
    # exact sixteenths, those between them, and those that round up to the next binade in float16
    first = torch.cat([grid, grid + 1, top]).clamp_(max=_NAN)
    last = torch.cat([grid, ends, top + (2**_TOP - 1)]).clamp_(max=_NAN)
    keys = _keys_of(first, [torch.empty_like(first) for _ in range(3)]).long()
    columns, others = [bin_of(x.view(torch.float32).double().view(torch.int64)) for x in (first, last)]
    table = torch.zeros(_KEYS, dtype=torch.int32, device="cpu")
    table[keys] = columns.to(torch.int32)
    is_wide = torch.zeros(_KEYS, dtype=torch.bool, device="cpu")
    is_wide[keys] = columns != others
    # subnormal numbers, whether or not torch.set_flush_denormal makes 0 of them
    is_wide[1:64] = True
    return table, is_wide


@cache
def _tables(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    table, is_wide = _table()
    if dtype == torch.float64:
        # they may have been finite, or not 0, before they were rounded
        is_wide = is_wide.clone()
        is_wide[0] = is_wide[_INF_KEY] = True
    return table.to(device), is_wide.to(device)


@cache
def _wide_columns() -> tuple[int, int]:
    """Return the end of the low columns, and the start of the high ones, that keys with several have."""
    table, is_wide = _table()
    known = is_wide.nonzero().view(-1)
    columns = table[known].long()
    middle = NUM_EXPONENT_COLUMNS // 2
    return int(columns[columns < middle].max()) + 1, int(columns[columns > middle].min())


def _keys_of(bits: Tensor, buffers: list[Tensor]) -> Tensor:
    """Return the key of each float32 number, given as its bits, in one of the buffers of the same size.

    With a = ``|bits|``, it is the sum of a in sixteenths of a binade, rounded down and rounded up, and of 32
    times the binade of ``a + 2**12``. So it ascends with a: there are 16 exact sixteenths in a binade, 16
    intervals between them, and, from the last of these, what `float16` rounds to the next binade.
    """
    a, up, keys = buffers
    magnitude, most, sixteenth, ceiling, top, mantissa = _constants()
    torch.minimum(torch.bitwise_and(bits, magnitude, out=a), most, out=a)
    torch.bitwise_right_shift(a, sixteenth, out=keys)
    keys.add_(torch.add(a, ceiling, out=up).bitwise_right_shift_(sixteenth))
    return keys.add_(a.add_(top).bitwise_right_shift_(mantissa), alpha=32)


@cache
def _constants() -> list[Tensor]:
    # an operator takes microseconds to make a tensor of a Python number
    values = (0x7FFFFFFF, _NAN, _SIXTEENTH, 2**_SIXTEENTH - 1, 2**_TOP, _MANTISSA)
    return [torch.tensor(value, dtype=torch.int32, device="cpu") for value in values]


def _in_float32(piece: Tensor, scratch: _Scratch) -> Tensor:
    if piece.dtype == torch.float32 and piece.is_contiguous():
        return piece.view(-1)
    x = scratch.x[: piece.numel()]
    x.view(piece.shape).copy_(piece)
    return x


def _keys_in(x: Tensor, scratch: _Scratch) -> Tensor:
    buffers = scratch.keys
    if x.numel() < buffers[0].numel():
        buffers = [buffer[: x.numel()] for buffer in buffers]
    return _keys_of(x.view(torch.int32), buffers)


def _look_up(x: Tensor, width: int = _WIDTH) -> Tensor:
    """Return the histogram of numbers, by the edges."""
    magnitudes = x.reshape(-1).double().abs().view(torch.int64)
    return torch.bincount(bin_of(magnitudes), minlength=width)


def _count_block(block: Tensor, scratch: _Scratch) -> Tensor:
    """Return the histogram of a block of a large tensor."""
    table, is_wide = _tables(block.dtype, block.device)
    counts = torch.zeros(_KEYS, dtype=torch.int64, device=block.device)
    length = scratch.x.numel()
    for (piece,) in cut((block,), length):
        keys = _keys_in(_in_float32(piece, scratch), scratch)
        counts += torch.bincount(keys, minlength=_KEYS)
    odd = counts * is_wide
    columns = counts.new_zeros(_WIDTH).index_add_(0, table, counts - odd)
    if odd.any():
        for (piece,) in cut((block,), length):
            x = _in_float32(piece, scratch)
            which = is_wide.index_select(0, _keys_in(x, scratch))
            columns += _look_up((piece.reshape(-1) if piece.dtype == torch.float64 else x)[which])
    return columns


def _count_batch(batch: list[int], numbers: list[Tensor], scratch: _Scratch, rows: Tensor) -> None:
    """Write the rows of small tensors of one dtype."""
    parts = [x if x.dim() == 1 else x.reshape(-1) for x in [numbers[index] for index in batch]]
    sizes = [x.numel() for x in parts]
    filled = sum(sizes)
    x = scratch.x[:filled]
    if parts[0].dtype == torch.float32:
        torch.cat(parts, out=x)
    else:
        # fp8 cannot be concatenated
        for part, to in zip(parts, x.split(sizes), strict=True):
            to.copy_(part)
    table, is_wide = _tables(parts[0].dtype, x.device)
    keys = _keys_in(x, scratch)
    columns = torch.index_select(table, 0, keys, out=scratch.keys[0][:filled])
    starts = torch.arange(0, len(batch) * _WIDTH, _WIDTH, dtype=torch.int32, device=x.device)
    if sizes.count(sizes[0]) == len(sizes):
        columns.view(len(batch), -1).add_(starts[:, None])
    else:
        columns.add_(starts.repeat_interleave(torch.tensor(sizes, device=x.device)))
    found = torch.bincount(columns, minlength=len(batch) * _WIDTH).view(len(batch), _WIDTH)
    if batch[-1] - batch[0] == len(batch) - 1:
        rows[batch[0] : batch[-1] + 1] = found
    else:
        rows[torch.tensor(batch, device=x.device)] = found
    low, high = _wide_columns()
    parts_of = [found[:, 1:low], found[:, high:-2]]
    if parts[0].dtype == torch.float64:
        parts_of += [found[:, :1], found[:, -2:-1]]
    if any([x.amax().item() > 0 for x in parts_of]):
        for index, part, wide in zip(batch, parts, is_wide.index_select(0, keys).split(sizes), strict=True):
            if wide.any():
                rows[index] = _look_up(part)
