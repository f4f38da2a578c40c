"""Statistics in eager PyTorch: the CPU implementation, one streaming pass in small extra memory.

Large tensors go through one fp64 buffer piece by piece; small ones are stacked, many to a batch,
so that they do not each pay for a dozen operator calls. Both are optimistic: zeros, NaN and Inf
are counted only where the extremes of the piece say that there are some.

How a tensor is cut depends on its own size, shape and strides alone, and every sum runs along
rows of a fixed length, each summed by one thread. So its statistics have the same bits whichever
tensors share the call, and whatever the number of threads.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import chain
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from gradiometer.derived import compute_flags, rescale
from gradiometer.views import as_flat, as_real

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradiometer.schema import Thresholds

__all__ = ["tensor_stats"]

T = TypeVar("T", float, Tensor)

# elements of the fp64 buffer: 2 MiB
BUFFER: Final = 2**18
# elements of a row: short enough for one order of summation, long enough to vectorize
ROW: Final = 2**12
# a small tensor fills one zero-padded row of the next width; the widest is a ROW
WIDTHS: Final = (2**4, 2**6, 2**8, 2**10, ROW)
# elements of a batch of such rows: below what torch spreads over threads, whose start would cost
# more than it saves, and far more on a busy machine
BATCH: Final = 2**15 - 1


class _Row(NamedTuple, Generic[T]):
    """Raw columns in the order of `gradiometer.schema.COLUMNS`, of one tensor or of many."""

    numel: T
    sumsq: T
    sum: T
    n_zero: T
    n_nan: T
    n_posinf: T
    n_neginf: T
    abs_max: T


class _Small(NamedTuple):
    """Small tensors, their sizes and their places in the call."""

    indices: list[int]
    sizes: list[int]
    tensors: list[Tensor]


def tensor_stats(
    tensors: Sequence[Tensor], thresholds: Thresholds, inv_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Measure tensors of one device. Returns columns ``(T, C) float64`` and flags ``(T,) int32``.

    ``inv_scale``: one element; the statistics are those of ``inv_scale * x``.
    """
    device = tensors[0].device
    large: list[tuple[int, Tensor]] = []
    small: dict[tuple[torch.dtype, int], _Small] = {}
    for index, tensor in enumerate(tensors):
        x = as_real(tensor)
        numel = x.numel()
        if numel > ROW:
            large.append((index, x))
        elif numel > 0:
            # fp8 formats lack operators, and one of them lacks a zero to pad with
            x = x.to(torch.float32) if x.itemsize == 1 else x
            key = (x.dtype, WIDTHS[bisect_left(WIDTHS, numel)])
            group = small.get(key) or small.setdefault(key, _Small([], [], []))
            group.indices.append(index)
            group.sizes.append(numel)
            group.tensors.append(x)

    columns = torch.zeros(len(tensors), len(_Row._fields), dtype=torch.float64, device=device)
    buffer = torch.empty(_buffer_size(large, small), dtype=torch.float64, device=device)
    rows = [(index, _merge([_measure(piece, buffer) for piece in _pieces(x)])) for index, x in large]
    if small:
        together = _Small(*([*chain(*parts)] for parts in zip(*small.values(), strict=True)))
        values = _measure_small(together, small, buffer)
        columns.index_copy_(0, _index(together.indices, device), values)
        # what is not finite is counted one by one
        finite = (values.select(1, _Row._fields.index("abs_max")) < math.inf).tolist()
        some = [i for i, is_finite in enumerate(finite) if not is_finite]
        rows += [(together.indices[i], _measure(together.tensors[i], buffer)) for i in some]
    if rows:
        values = torch.tensor([row for _, row in rows], dtype=torch.float64, device=device)
        columns.index_copy_(0, _index([index for index, _ in rows], device), values)
    if inv_scale is not None:
        columns = rescale(columns, inv_scale.reshape(()).to(columns))
    return columns, compute_flags(columns, thresholds)


def _index(indices: list[int], device: torch.device) -> Tensor:
    return torch.tensor(indices, dtype=torch.int64, device=device)


def _buffer_size(large: list[tuple[int, Tensor]], small: dict[tuple[torch.dtype, int], _Small]) -> int:
    # a model of a few small tensors should not touch 2 MiB
    wanted = [-(-x.numel() // ROW) * ROW for _, x in large]
    wanted += [2 * min(width * len(group.sizes), BATCH) for (_, width), group in small.items()]
    return min(BUFFER, max([2 * ROW, *wanted]))


def _pieces(x: Tensor) -> Iterator[Tensor]:
    """Cut a tensor into views of at most `BUFFER` elements, whatever its strides."""
    flat = as_flat(x)
    if flat is not None:
        yield from flat.split(BUFFER)
    elif x.numel() <= BUFFER:
        yield x
    else:
        dim = next(dim for dim, size in enumerate(x.shape) if size > 1)
        step = max(1, BUFFER // (x.numel() // x.shape[dim]))
        for part in x.split(step, dim):
            yield from _pieces(part)


def _measure(piece: Tensor, buffer: Tensor) -> _Row[float]:
    numel = piece.numel()
    flat = buffer[:numel]
    rows = buffer[: -(-numel // ROW) * ROW].view(-1, ROW)
    buffer[numel : rows.numel()].zero_()

    flat.view(piece.shape).copy_(piece)
    total, smallest, largest = _sum_and_extremes(flat, rows)
    n_nan = n_posinf = n_neginf = 0
    if not largest < math.inf:
        flat.view(piece.shape).copy_(piece)
        n_nan = int(flat.isnan().sum())
        n_posinf = int((flat == math.inf).sum())
        n_neginf = int((flat == -math.inf).sum())
        flat.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        total, smallest, largest = _sum_and_extremes(flat, rows)
    # what was replaced by 0 above is no zero
    n_zero = numel - int(flat.count_nonzero()) - n_nan - n_posinf - n_neginf if smallest == 0 else 0
    sumsq = rows.mul_(rows).sum(dim=1).sum().item()
    return _Row(numel, sumsq, total, n_zero, n_nan, n_posinf, n_neginf, largest)


def _sum_and_extremes(flat: Tensor, rows: Tensor) -> tuple[float, float, float]:
    """Return the sum, min |x| and max |x|; leaves |x| in the buffer."""
    total = rows.sum(dim=1).sum().item()
    smallest, largest = torch.aminmax(flat.abs_())
    return total, smallest.item(), largest.item()


def _measure_small(together: _Small, groups: dict[tuple[torch.dtype, int], _Small], buffer: Tensor) -> Tensor:
    """Return raw columns of small tensors, ``(n, C)``; of those with NaN or Inf only numel is right."""
    measured = []
    for (_, width), group in groups.items():
        step = BATCH // width
        # one for all batches: freed between small results that stay, each would leave a hole in the heap
        stack = group.tensors[0].new_empty(min(step, len(group.sizes)) * width)
        for start in range(0, len(group.sizes), step):
            batch = slice(start, start + step)
            tensors, sizes = group.tensors[batch], group.sizes[batch]
            measured.append(_measure_batch(tensors, sizes, width, stack[: len(sizes) * width], buffer))
    sumsq, total, n_nonzero, abs_max = torch.cat(measured).unbind(dim=1)
    numel = torch.tensor(together.sizes, dtype=torch.float64, device=buffer.device)
    none = torch.zeros_like(numel)
    row = _Row(numel, sumsq, total, numel - n_nonzero, none, none, none, abs_max)
    return torch.stack(row, dim=1)


def _measure_batch(
    tensors: list[Tensor], sizes: list[int], width: int, stack: Tensor, buffer: Tensor
) -> Tensor:
    """Stack tensors as rows of ``width``. Returns ``(n, 4)``: sumsq, sum, non-zeros, max |x|."""
    zeros = tensors[0].new_zeros(width)
    padding = {size: zeros[size:] for size in set(sizes)}
    parts: list[Tensor] = []
    for x, size in zip(tensors, sizes, strict=True):
        parts += (x if x.dim() == 1 else x.reshape(-1), padding[size])
    half, shape = buffer.numel() // 2, (len(tensors), width)
    x = buffer[: len(tensors) * width].view(shape)
    squares = buffer[half : half + len(tensors) * width].view(shape)

    torch.cat(parts, out=stack)
    x.copy_(stack.view(shape))
    sumsq = torch.mul(x, x, out=squares).sum(dim=1)
    total = x.sum(dim=1)
    abs_max = x.abs_().amax(dim=1)
    return torch.stack([sumsq, total, x.sgn_().sum(dim=1), abs_max], dim=1)


def _merge(pieces: list[_Row[float]]) -> _Row[float]:
    numel, sumsq, total, n_zero, n_nan, n_posinf, n_neginf, abs_max = zip(*pieces, strict=True)
    return _Row(
        sum(numel),
        _fsum(sumsq),
        _fsum(total),
        sum(n_zero),
        sum(n_nan),
        sum(n_posinf),
        sum(n_neginf),
        max(abs_max),
    )


def _fsum(values: Sequence[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        # float64 inputs beyond 1e154: what a plain sum says, inf or NaN
        return sum(values)
