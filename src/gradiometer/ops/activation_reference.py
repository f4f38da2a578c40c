"""Statistics of an activation in eager PyTorch: the CPU implementation.

It is built like `gradiometer.ops.reference`, and has the same bits for any number of threads.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from gradiometer.inputs import as_real
from gradiometer.ops import openmp
from gradiometer.ops.eager_plan import BATCH
from gradiometer.ops.streaming import by_tensor, convertible, cut, merged

if TYPE_CHECKING:
    from torch import Tensor

# elements that a thread reads at a time, into a buffer of 8 bytes per element
PIECE: Final = 2**18
# elements per additional thread: with fewer, threads wait for Python's lock longer than they save
WORTH_A_THREAD: Final = 2**22
# a buffer is kept, since new memory of this size is cleared by the system, page by page
_BUFFERS: Final[list[Tensor]] = []
# elements in the first part of a tensor that is searched for channels that are not zero
FIRST: Final = 2**14

# numel, sumsq, sum, n_zero, n_nan, n_posinf, n_neginf, sum4, abs_max
_Row = tuple[float, ...]


def activation_stats(x: Tensor, channel_dim: int) -> list[float]:
    """Return the columns of one call of `ACTIVATIONS`; ``channel_dim``: ignored if x has no dimension."""
    channels = x.shape[channel_dim] if x.dim() else 1
    numbers = as_real(x)
    length = PIECE if openmp.can_run_alone() else BATCH
    if numbers.numel() == 0:
        row: _Row = (0.0,) * 9
    elif numbers.numel() <= length:
        with openmp.one_thread():
            row = _measure_block(length, (numbers,))
    else:
        large: list[tuple[int, tuple[Tensor, ...]]] = [(0, (numbers,))]
        start = partial(partial, _measure_block, length)
        ((_, row),) = by_tensor(large, length, start, merged, worth_a_thread=WORTH_A_THREAD)
    *sums, top = row
    dead = 0
    # a channel that is always zero has zeros
    if sums[3] and channels:
        dead = zero_channels(x, channel_dim)
    return [*sums, channels if x.numel() else 0, dead, 1, top]


def _measure_block(length: int, block: tuple[Tensor, ...]) -> _Row:
    try:
        buffer = _BUFFERS.pop()
    except IndexError:
        # outside of inference mode, whose tensors cannot be written elsewhere
        with torch.inference_mode(mode=False):
            buffer = torch.empty(max(PIECE, BATCH), dtype=torch.float64, device="cpu")
    row = merged([_measure(piece, buffer) for (piece,) in cut(block, length)])
    if not _BUFFERS:
        _BUFFERS.append(buffer)
    return row


def _measure(piece: Tensor, buffer: Tensor) -> _Row:
    wide = buffer[: piece.numel()].view(piece.shape).copy_(convertible(piece))
    total = wide.sum().item()
    if piece.dtype == torch.float64:
        # squares may leave the range of float64
        least, top = [x.item() for x in torch.aminmax(wide.abs_())]
        squares = torch.mul(wide, wide, out=wide)
    else:
        squares = torch.mul(wide, wide, out=wide)
        # a square is exact, so its root is exact too
        least, top = [math.sqrt(x.item()) for x in torch.aminmax(squares)]
    if not top < math.inf:
        return _measure_nonfinite(piece)
    sumsq = squares.sum().item()
    flat = squares.view(-1)
    sum4 = torch.dot(flat, flat).item()
    n_zero = 0.0 if least > 0 else flat.numel() - convertible(piece).count_nonzero().item()
    return (flat.numel(), sumsq, total, n_zero, 0.0, 0.0, 0.0, sum4, top)


def _measure_nonfinite(piece: Tensor) -> _Row:
    wide = convertible(piece).to(torch.float64, copy=True)
    counts = [which.sum().item() for which in (wide.isnan(), wide == math.inf, wide == -math.inf)]
    wide.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    # an element that was replaced by 0 does not count as a zero
    n_zero = wide.numel() - wide.count_nonzero().item() - sum(counts)
    square = wide * wide
    sums = [square.sum().item(), wide.sum().item(), n_zero, *counts, (square * square).sum().item()]
    return (wide.numel(), *sums, wide.abs().amax().item())


def zero_channels(x: Tensor, dim: int) -> int:
    """Return how many channels have only zeros."""
    if x.dim() == 0:
        return int(x.item() == 0)
    # most channels have another number among the first ones, and are not searched again
    rows = x.movedim(dim, -1).flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
    start, length = 0, max(1, FIRST // rows.shape[1])
    while start < rows.shape[0] and rows.shape[1]:
        part = rows[start : start + length]
        part = part.float() if part.itemsize == 1 else part
        zero = (part == 0).all(dim=0)
        if not zero.all():
            rows = rows[:, zero.nonzero().flatten()] if zero.any() else rows[:, :0]
        start, length = start + len(part), length * 2
    return rows.shape[1]
