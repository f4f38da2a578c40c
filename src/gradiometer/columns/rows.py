"""Operations on rows of columns in PyTorch: selected, spread and merged.

No function moves columns to the host, and none needs an index tensor on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def merge_groups(
    values: Tensor, groups: Sequence[Sequence[int]], merge: Callable[[Tensor], Tensor]
) -> Tensor:
    """Merge the rows of each of G groups into one. ``(T, ...) -> (G, ...)``.

    One call of ``merge``, which reduces the first dimension, merges all groups of the same size. So the
    number of calls grows with the number of distinct sizes, not of groups.
    """
    sizes: dict[int, list[int]] = {}
    for place, rows in enumerate(groups):
        sizes.setdefault(len(rows), []).append(place)
    merged: list[Tensor] = []
    for size, places in sizes.items():
        rows = [row for place in places for row in groups[place]]
        merged.append(merge(take(values, rows).view(len(places), size, *values.shape[1:]).transpose(0, 1)))
    if len(merged) < 2:
        return merged[0] if merged else values.narrow(0, 0, 0)
    # back into the order of the groups
    places = [place for same in sizes.values() for place in same]
    return take(torch.cat(merged), sorted(range(len(places)), key=places.__getitem__))


def first_rank(origin: Tensor) -> Tensor:
    """Return the lowest rank along the first dimension, ``(N, ...) -> (...) float64``.

    -1 where there is none; -2 where no rank has measured the row.
    """
    if origin.shape[0] == 0:
        return origin.new_full(origin.shape[1:], -1.0)
    first = torch.where(origin >= 0, origin, torch.inf).amin(dim=0)
    return torch.where(first < torch.inf, first, origin.amax(dim=0))


def take(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Return the given rows, ``(T, ...) -> (len(rows), ...)``, using slices only."""
    # slices need no index tensor on the device
    parts = [values.narrow(0, start, length) for start, length in _runs(tuple(rows))]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else values.narrow(0, 0, 0)


def _runs(rows: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the start and length of each run of consecutive rows."""
    runs: list[tuple[int, int]] = []
    for i in rows:
        if runs and sum(runs[-1]) == i:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((i, 1))
    return tuple(runs)


# the effect of torch.compiler.assume_constant_result, without importing Dynamo: rows are graph constants
_runs._dynamo_marked_constant = True  # type: ignore[attr-defined] # noqa: SLF001


def spread(values: Tensor, rows: Sequence[int], size: int) -> Tensor:
    """Return ``(size, ...)`` with the values in the given rows and 0 elsewhere, using slices only."""
    if len(rows) == size and all([row == i for i, row in enumerate(rows)]):
        return values
    places = {row: place for place, row in enumerate(rows)}
    zeros = iter(range(len(rows), size))
    filled = torch.cat([values, values.new_zeros((size - len(rows), *values.shape[1:]))])
    return take(filled, [places[row] if row in places else next(zeros) for row in range(size)])


def number(value: float, device: torch.device) -> Tensor:
    """Return a number as a 0-d float64 tensor, created on the device without a copy."""
    if torch.compiler.is_compiling():
        # torch.full would make the number a graph constant, and each new value would recompile
        return torch.ones((), dtype=torch.float64, device=device) * value
    return torch.full((), value, dtype=torch.float64, device=device)


def realized(x: Tensor) -> Tensor:
    """Return a tensor that Inductor computes once, instead of again in each kernel that reads it.

    Use it for a coefficient that multiplies T tensors: it halves the compile time for 20 tensors, and saves
    more with more tensors.
    """
    # Inductor stores a tensor in memory before it views it by strides
    return x.as_strided(x.shape, x.stride()) if torch.compiler.is_compiling() else x
