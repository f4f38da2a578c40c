"""Computations on raw columns in PyTorch: derived values, merged rows and flags.

``columns`` is ``(..., C) float64`` on any device; no function moves it to the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from gradiometer.columns.roots import sqrt
from gradiometer.columns.schema import (
    COLUMN_INDEX,
    COLUMNS,
    NUM_SUM_COLUMNS,
    Flag,
    Thresholds,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "DERIVED",
    "by_merge",
    "compute_flags",
    "first_rank",
    "merge",
    "merge_groups",
    "merge_rows",
    "number",
    "realized",
    "rescale",
    "spread",
    "sqrt",
    "take",
    "value",
]


def value(columns: Tensor, name: str) -> Tensor:
    """Return a raw column or derived value by name. ``(..., C) -> (...) float64``."""
    if name in COLUMN_INDEX:
        return columns.select(-1, COLUMN_INDEX[name])
    return DERIVED[name](columns)


def _n_inf(columns: Tensor) -> Tensor:
    return value(columns, "n_posinf") + value(columns, "n_neginf")


def _n_nonfinite(columns: Tensor) -> Tensor:
    return value(columns, "n_nan") + _n_inf(columns)


def _finite_norm(columns: Tensor) -> Tensor:
    return sqrt(value(columns, "sumsq"))


def _norm(columns: Tensor) -> Tensor:
    # like a norm over all elements: NaN if one is NaN, else inf if one is infinite
    inf = torch.where(_n_inf(columns) > 0, torch.inf, 0.0)
    nan = torch.where(value(columns, "n_nan") > 0, torch.nan, 0.0)
    return _finite_norm(columns) + inf + nan


def _over(numerator: Tensor, denominator: Tensor) -> Tensor:
    # 0 where the denominator is 0
    return numerator / denominator.clamp(min=1.0)


def _n_finite(columns: Tensor) -> Tensor:
    return value(columns, "numel") - _n_nonfinite(columns)


def _mean(columns: Tensor) -> Tensor:
    return _over(value(columns, "sum"), _n_finite(columns))


def _rms(columns: Tensor) -> Tensor:
    return sqrt(_over(value(columns, "sumsq"), _n_finite(columns)))


def _std(columns: Tensor) -> Tensor:
    mean = _mean(columns)
    return sqrt((_over(value(columns, "sumsq"), _n_finite(columns)) - mean * mean).clamp(min=0.0))


def _zero_fraction(columns: Tensor) -> Tensor:
    return _over(value(columns, "n_zero"), value(columns, "numel"))


DERIVED: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "n_inf": _n_inf,
    "n_nonfinite": _n_nonfinite,
    "finite_norm": _finite_norm,
    "norm": _norm,
    "rms": _rms,
    "mean": _mean,
    "std": _std,
    "zero_fraction": _zero_fraction,
}


def merge(a: Tensor, b: Tensor, sums: int = NUM_SUM_COLUMNS) -> Tensor:
    """Merge two matrices of raw columns, element by element. ``(..., C), (..., C) -> (..., C)``.

    ``sums``: how many of the columns, which come first, merge by sum.
    """
    (a_sums, a_tops), (b_sums, b_tops) = by_merge(a, sums), by_merge(b, sums)
    return torch.cat([a_sums + b_sums, torch.maximum(a_tops, b_tops)], dim=-1)


def merge_rows(columns: Tensor, sums: int = NUM_SUM_COLUMNS) -> Tensor:
    """Merge all rows into one. ``(T, ..., C) -> (..., C)``; zeros, the identity, for T = 0."""
    if columns.shape[0] == 0:
        return columns.new_zeros(columns.shape[1:])
    summed, tops = by_merge(columns, sums)
    return torch.cat([summed.sum(dim=0), tops.amax(dim=0)], dim=-1)


def merge_groups(
    values: Tensor, groups: Sequence[Sequence[int]], merge: Callable[[Tensor], Tensor] = merge_rows
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


def by_merge(columns: Tensor, sums: int = NUM_SUM_COLUMNS) -> tuple[Tensor, Tensor]:
    """Return the columns that merge by sum, and those that merge by maximum, as views."""
    summed, tops = columns.split([sums, columns.shape[-1] - sums], dim=-1)
    return summed, tops


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
    # slices need no index tensor on the device
    parts: list[Tensor] = []
    done, order = 0, sorted(range(len(rows)), key=rows.__getitem__)
    i = 0
    while i < len(order):
        j = i + 1
        while j < len(order) and order[j] == order[j - 1] + 1 and rows[order[j]] == rows[order[j - 1]] + 1:
            j += 1
        start = rows[order[i]]
        if start > done:
            parts.append(values.new_zeros((start - done, *values.shape[1:])))
        parts.append(values[order[i] : order[j - 1] + 1])
        done, i = start + (j - i), j
    if done < size:
        parts.append(values.new_zeros((size - done, *values.shape[1:])))
    return torch.cat(parts) if parts else values.new_zeros((size, *values.shape[1:]))


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


def rescale(columns: Tensor, scale: Tensor) -> Tensor:
    """Return the columns of ``scale * x``, with the same counts. ``scale``: 0-d float64, finite.

    With a negative scale, +Inf and -Inf are not exchanged.
    """
    one = torch.ones_like(scale)
    # multiply by s twice, not by s*s: the square alone may leave the range of float64
    first = {"1": one, "s": scale, "|s|": scale.abs(), "s*s": scale}
    second = {"1": one, "s": one, "|s|": one, "s*s": scale}
    for factors in (first, second):
        columns = columns * torch.stack([factors[column.scaling] for column in COLUMNS])
    return columns


def compute_flags(columns: Tensor, thresholds: Thresholds, *, skip_nonfinite: bool = False) -> Tensor:
    """Return the flags of each row. ``(..., C) float64 -> (...) int32``, bits of `Flag`.

    It makes the same comparisons as the finalize kernel, for rows that come from a merge. With
    ``skip_nonfinite``, a tensor that is not finite is not flagged as exploding.
    """
    n_nan, n_inf = value(columns, "n_nan"), _n_inf(columns)
    finite = n_nan + n_inf == 0
    norm = _finite_norm(columns)
    # not (norm <= limit), so that a NaN norm is exploding
    exploding = (norm <= thresholds.exploding).logical_not()
    found = (
        (Flag.NAN, n_nan > 0),
        (Flag.INF, n_inf > 0),
        (Flag.VANISHING, finite & (norm < thresholds.vanishing)),
        (Flag.EXPLODING, finite & exploding if skip_nonfinite else finite.logical_not() | exploding),
        (Flag.DEAD, _zero_fraction(columns) >= thresholds.dead),
    )
    flags = torch.zeros(columns.shape[:-1], dtype=torch.int32, device=columns.device)
    for flag, where in found:
        flags = torch.add(flags, where, alpha=int(flag))
    return flags * (value(columns, "numel") > 0)
