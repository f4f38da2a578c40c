"""Projections in eager PyTorch, see `gradiometer.columns.projections`.

Signs of 8 projections at a time are one byte of the hash. Elements are added up by that byte, in float64; the
256 sums times the signs of each byte are the projections.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from gradiometer.columns.projections import (
    FIRST_PROJECTION,
    HIGH_FACTOR,
    SIGN_MIX,
    WORD_BITS,
    sign_keys,
)
from gradiometer.inputs import Part, as_real
from gradiometer.ops.index_boxes import MOST_PIECES, Piece, pieces_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

# elements at a time: these stay in the cache
_CHUNK: Final = 1 << 14
_BITS: Final = 8
_BYTES: Final = 1 << _BITS


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
    rows = torch.zeros((len(tensors), FIRST_PROJECTION + count), dtype=torch.float64, device=device)
    groups = -(-count // _BITS)
    for tensor, name, part, row in zip(tensors, names, parts, rows, strict=True):
        x, pieces = laid_out(tensor, part)
        sums = torch.zeros((groups, _BYTES), dtype=torch.float64, device=device)
        for values, low, high in _chunks(x, pieces):
            wide = values.to(torch.float64)
            finite = wide.isfinite()
            row[0] += wide.numel()
            if not bool(finite.all()):
                row[2] += wide.numel() - finite.count_nonzero()
                wide = torch.where(finite, wide, 0.0)
            row[1] += wide.dot(wide)
            for word in range(-(-count // WORD_BITS)):
                octets = _hash(low, high, sign_keys(name, seed, word)).view(torch.uint8).view(-1, 4)
                first = word * (WORD_BITS // _BITS)
                for place in range(first, min(first + 4, groups)):
                    # little-endian, as all platforms of torch are
                    octet = octets[:, place - first].to(torch.int64)
                    sums[place].scatter_add_(0, octet, wide)
        row[FIRST_PROJECTION:] = (sums @ _signs(device)).view(-1)[:count]
    return rows


def _signs(device: torch.device) -> Tensor:
    """Return the signs of 8 projections for each byte, ``(256, 8) float64``."""
    bits = torch.arange(_BYTES, device=device).unsqueeze(1) >> torch.arange(_BITS, device=device)
    return 1.0 - 2.0 * (bits & 1).to(torch.float64)


def _chunks(x: Tensor, pieces: Sequence[Piece]) -> Iterator[tuple[Tensor, Tensor, Tensor | int]]:
    """Yield elements, the lower halves of their indices as int32, and the upper halves, in one dimension."""
    for piece in pieces:
        values = x.as_strided(
            (piece.rows, piece.columns), (piece.stride, piece.step), x.storage_offset() + piece.offset
        )
        wide = min(piece.columns, _CHUNK)
        tall = max(1, _CHUNK // wide)
        of_rows = torch.arange(piece.rows, dtype=torch.int64, device=x.device) * piece.pitch + piece.first
        for column in range(0, piece.columns, wide):
            end = min(column + wide, piece.columns)
            of_columns = torch.arange(column, end, dtype=torch.int64, device=x.device) * piece.increment
            for row in range(0, piece.rows, tall):
                index = (of_rows[row : row + tall, None] + of_columns).view(-1)
                low = (index & (2**WORD_BITS - 1)).to(torch.int32)
                last = min(row + tall, piece.rows) - 1
                high: Tensor | int = (piece.first + row * piece.pitch + column * piece.increment) >> WORD_BITS
                if high != (piece.first + last * piece.pitch + (end - 1) * piece.increment) >> WORD_BITS:
                    high = (index >> WORD_BITS).to(torch.int32)
                yield values[row : row + tall, column:end].reshape(-1), low, high


def _hash(low: Tensor, high: Tensor | int, keys: tuple[int, int]) -> Tensor:
    """Return the hashes of indices, int32 of the same bits; see `gradiometer.columns.sign_hash`."""
    x = low ^ _signed(keys[0])
    shifted = torch.empty_like(x)
    for place, (shift, factor) in enumerate(SIGN_MIX):
        # a logical shift
        torch.bitwise_right_shift(x, shift, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_((1 << (WORD_BITS - shift)) - 1))
        if factor != 1:
            x.mul_(_signed(factor))
        if place == 0:
            added = (
                _signed(keys[1] + high * HIGH_FACTOR)
                if isinstance(high, int)
                else high * _signed(HIGH_FACTOR) + _signed(keys[1])
            )
            x.add_(added)
    return x


def _signed(value: int) -> int:
    """Return the signed 32-bit integer with the same bits."""
    value &= (1 << WORD_BITS) - 1
    return value - (1 << WORD_BITS) if value >> (WORD_BITS - 1) else value
