"""Projections in eager PyTorch, see `gradiometer.columns.projections`.

Signs of 8 projections at a time are one byte of the hash. Elements are added up by that byte, in float64; the
256 sums, with the signs of each byte, give 8 projections. Small tensors share the operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from gradiometer.columns.projections import (
    FIRST_PROJECTION,
    HIGH_FACTOR,
    SIGN_MIX,
    WORD_BITS,
    sign_keys,
)
from gradiometer.inputs import Part, as_real
from gradiometer.ops import openmp
from gradiometer.ops.index_boxes import MOST_PIECES, Piece, pieces_of
from gradiometer.ops.streaming import MOST_THREADS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

# elements at a time: these stay in the cache
_CHUNK: Final = 1 << 14
# small tensors that are measured together
_MOST_TENSORS: Final = 128
# elements per additional thread
_WORTH_A_THREAD: Final = 2**17
_BITS: Final = 8
_BYTES: Final = 1 << _BITS


class _Segment(NamedTuple):
    """Elements of one tensor, in one dimension.

    ``place``: the number of the tensor in its job. ``low``: the lower halves of the elements' indices, as
    int32 of the same bits. ``high``: the upper halves.
    """

    place: int
    values: Tensor
    low: Tensor
    high: Tensor | int


def real_part(tensor: Tensor, part: Part | None) -> tuple[Tensor, Part | None]:
    """Return the real view of a tensor, in which a complex number is two elements, and its part."""
    x = as_real(tensor)
    if part is None or not tensor.is_complex():
        return x, part
    boxes = [
        box._replace(start=(*box.start, 0), shape=(*box.shape, 2), origin=(*box.origin, 0))
        for box in part.boxes
    ]
    return x, Part((*part.shape, 2), tuple(boxes))


def laid_out(tensor: Tensor, part: Part | None) -> tuple[Tensor, list[Piece]]:
    """Return a real tensor and its pieces; it is a copy if there would be too many."""
    x, part = real_part(tensor, part)
    pieces = pieces_of(x.shape, x.stride(), part)
    if len(pieces) > MOST_PIECES:
        x = x.contiguous()
        pieces = pieces_of(x.shape, x.stride(), part)
    return x, pieces


def project(
    tensors: Sequence[Tensor], names: Sequence[str], count: int, seed: int, parts: Sequence[Part | None]
) -> Tensor:
    """Return the raw columns of tensors of one device, ``(T, 3 + count) float64``."""
    device = tensors[0].device
    threads = 1
    if device.type == "cpu":
        work = sum([x.numel() for x in tensors])
        threads = min(MOST_THREADS, torch.get_num_threads(), 1 + work // _WORTH_A_THREAD)

    def start() -> Callable[[range], Tensor]:
        scratch = _Scratch(device)

        def rows_of(job: range) -> Tensor:
            segments = [_segments(place, tensors[i], parts[i], scratch.lows) for place, i in enumerate(job)]
            return _rows_of(segments, [names[i] for i in job], count, seed, scratch)

        return rows_of

    return torch.cat(openmp.map_on_threads(start, _jobs(tensors), threads))


def _jobs(tensors: Sequence[Tensor]) -> Iterator[range]:
    """Yield the numbers of tensors that are measured together: a few small ones, or a large one."""
    first = size = 0
    for i, x in enumerate(tensors):
        if i > first and (size + x.numel() > _CHUNK or i - first == _MOST_TENSORS):
            yield range(first, i)
            first, size = i, 0
        size += x.numel()
    yield range(first, len(tensors))


def _rows_of(
    segments: Sequence[Iterator[_Segment]], names: Sequence[str], count: int, seed: int, scratch: _Scratch
) -> Tensor:
    """Return the rows of a job's tensors."""
    number, device = len(segments), scratch.lows.device
    keys = [[sign_keys(name, seed, word) for name in names] for word in range(-(-count // WORD_BITS))]
    head = torch.zeros((FIRST_PROJECTION, number), dtype=torch.float64, device=device)
    sums = torch.zeros((-(-count // _BITS), number * _BYTES), dtype=torch.float64, device=device)
    batch: list[_Segment] = []
    size = 0
    for own in segments:
        for segment in own:
            if batch and size + len(segment.low) > _CHUNK:
                _add(batch, keys, head, sums, scratch)
                batch, size = [], 0
            batch.append(segment)
            size += len(segment.low)
    if batch:
        _add(batch, keys, head, sums, scratch)
    return torch.cat([head.t(), _projections(sums.view(-1, number, _BYTES))], dim=1)


def _add(
    batch: list[_Segment],
    keys: list[list[tuple[int, int]]],
    head: Tensor,
    sums: Tensor,
    scratch: _Scratch,
) -> None:
    """Add elements to the columns before the projections, ``(3, T)``, and to the sums by bytes."""
    sizes = [len(segment.low) for segment in batch]
    places = _Spread(sizes, head.device)
    low = places.joined([segment.low for segment in batch])
    wide = scratch.wide[: len(low)]
    for segment, values in zip(batch, wide.split(sizes), strict=True):
        values.copy_(segment.values)
    own = [segment.place for segment in batch]
    # the tensor of each element
    place = scratch.zeros[: len(low)] if head.shape[1] == 1 else places.each(own, torch.int64)
    if isinstance(place, int):
        place = scratch.zeros[: len(low)] + place
    numels = torch.tensor(sizes, dtype=torch.float64, device=head.device)
    head[0].scatter_add_(0, torch.tensor(own, dtype=torch.int64, device=head.device), numels)
    square = torch.mul(wide, wide, out=scratch.square[: len(low)])
    if not bool(square.sum() < torch.inf):
        odd = wide.isfinite().logical_not_()
        head[2].scatter_add_(0, place, odd.to(torch.float64))
        wide.masked_fill_(odd, 0.0)
        square = torch.mul(wide, wide, out=square)
    # as all sums, one element after the other: the bits depend on the tensor alone
    head[1].scatter_add_(0, place, square)
    high: Tensor | int
    uppers = [segment.high for segment in batch if isinstance(segment.high, int)]
    if len(uppers) == len(batch):
        high = places.each([_signed(upper * HIGH_FACTOR) for upper in uppers], torch.int32)
    else:
        high = places.joined([torch.zeros_like(x.low) + x.high for x in batch]) * _signed(HIGH_FACTOR)
    start = place * _BYTES if head.shape[1] > 1 else None
    for word, of_tensors in enumerate(keys):
        first, second = [
            places.each([_signed(of_tensors[i][half]) for i in own], torch.int32) for half in range(2)
        ]
        octets = _hash(low, first, second, high).view(torch.uint8).view(-1, 4)
        done = word * (WORD_BITS // _BITS)
        for i, row in enumerate(sums[done : done + WORD_BITS // _BITS]):
            # little-endian, as all platforms of torch are
            octet = scratch.octet[: len(low)].copy_(octets[:, i])
            row.scatter_add_(0, octet if start is None else octet.add_(start), wide)


class _Scratch:
    """Memory that a thread uses again: new memory of this size costs page faults."""

    def __init__(self, device: torch.device) -> None:
        self.lows = torch.arange(_CHUNK, dtype=torch.int32, device=device)
        self.wide = torch.empty(_CHUNK, dtype=torch.float64, device=device)
        self.square = torch.empty_like(self.wide)
        self.zeros = torch.zeros(_CHUNK, dtype=torch.int64, device=device)
        self.octet = torch.empty(_CHUNK, dtype=torch.int64, device=device)


class _Spread:
    """Segments of these sizes, one after the other."""

    def __init__(self, sizes: list[int], device: torch.device) -> None:
        self._total, self._device = sum(sizes), device
        self._sizes = None if len(sizes) == 1 else torch.tensor(sizes, dtype=torch.int64, device=device)

    def joined(self, tensors: list[Tensor]) -> Tensor:
        return tensors[0] if self._sizes is None else torch.cat(tensors)

    def each(self, values: list[int], dtype: torch.dtype) -> Tensor | int:
        """Return each element's value, from those of the segments; one number if they are equal."""
        if self._sizes is None or len(set(values)) == 1:
            return values[0]
        found = torch.tensor(values, dtype=dtype, device=self._device)
        return torch.repeat_interleave(found, self._sizes, output_size=self._total)


def _projections(sums: Tensor) -> Tensor:
    """Return projections ``(T, 8 * octets)`` from sums by bytes, ``(octets, T, 256)``.

    Without a product of matrices, whose order of additions depends on their sizes.
    """
    found: list[Tensor] = []
    for bit in reversed(range(_BITS)):
        plus, minus = sums[..., : 1 << bit], sums[..., 1 << bit :]
        found.insert(0, (plus - minus).sum(dim=-1))
        sums = plus + minus
    return torch.stack(found, dim=-1).transpose(0, 1).flatten(1)


def _segments(place: int, tensor: Tensor, part: Part | None, lows: Tensor) -> Iterator[_Segment]:
    """Yield the elements of a tensor; ``lows``: 0, 1, ..., as many as a segment has at most."""
    if part is None and tensor.numel() <= _CHUNK // 2:
        values = as_real(tensor).reshape(-1)
        if len(values):
            yield _Segment(place, values, lows[: len(values)], 0)
        return
    x, pieces = laid_out(tensor, part)
    for piece in pieces:
        values = x.as_strided(
            (piece.rows, piece.columns), (piece.stride, piece.step), x.storage_offset() + piece.offset
        )
        wide = min(piece.columns, _CHUNK)
        tall = min(piece.rows, _CHUNK // wide)
        # modulo 2**32
        steps = lows[:tall, None] * _signed(piece.pitch) + lows[:wide] * _signed(piece.increment)
        for column in range(0, piece.columns, wide):
            for row in range(0, piece.rows, tall):
                block = values[row : row + tall, column : column + wide]
                rows, columns = block.shape
                first = piece.first + row * piece.pitch + column * piece.increment
                last = first + (rows - 1) * piece.pitch + (columns - 1) * piece.increment
                low = steps[:rows, :columns].reshape(-1) + _signed(first)
                high: Tensor | int = first >> WORD_BITS
                if high != last >> WORD_BITS:
                    index = lows[:rows, None].to(torch.int64) * piece.pitch + first
                    index = index + lows[:columns].to(torch.int64) * piece.increment
                    high = (index.view(-1) >> WORD_BITS).to(torch.int32)
                yield _Segment(place, block.reshape(-1), low, high)


def _hash(low: Tensor, first: Tensor | int, second: Tensor | int, high: Tensor | int) -> Tensor:
    """Return the hashes of indices, int32 of the same bits; see `gradiometer.columns.sign_hash`.

    ``high``: the upper halves times their factor.
    """
    x = low ^ first
    shifted = torch.empty_like(x)
    for place, (shift, factor) in enumerate(SIGN_MIX):
        # a logical shift
        torch.bitwise_right_shift(x, shift, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_((1 << (WORD_BITS - shift)) - 1))
        if factor != 1:
            x.mul_(_signed(factor))
        if place == 0:
            x.add_(second).add_(high)
    return x


def _signed(value: int) -> int:
    """Return the signed 32-bit integer with the same bits."""
    value &= (1 << WORD_BITS) - 1
    return value - (1 << WORD_BITS) if value >> (WORD_BITS - 1) else value
