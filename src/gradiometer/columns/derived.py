# ruff: noqa: D103 until nothing uses them
"""Names of `TENSORS` and of `gradiometer.columns.rows` from before there were schemas."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from gradiometer.columns import rows
from gradiometer.columns.tensors import NUM_SUM_COLUMNS, TENSORS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

value = TENSORS.value
compute_flags = TENSORS.flags_of
rescale = TENSORS.scaled
DERIVED: Final = {x.name: partial(TENSORS.value, name=x.name) for x in TENSORS.derived}


def by_merge(columns: Tensor, sums: int = NUM_SUM_COLUMNS) -> tuple[Tensor, Tensor]:
    summed, tops = columns.split([sums, columns.shape[-1] - sums], dim=-1)
    return summed, tops


def merge(a: Tensor, b: Tensor, sums: int = NUM_SUM_COLUMNS) -> Tensor:
    (a_sums, a_tops), (b_sums, b_tops) = by_merge(a, sums), by_merge(b, sums)
    return torch.cat([a_sums + b_sums, torch.maximum(a_tops, b_tops)], dim=-1)


def merge_rows(columns: Tensor, sums: int = NUM_SUM_COLUMNS) -> Tensor:
    if columns.shape[0] == 0:
        return columns.new_zeros(columns.shape[1:])
    summed, tops = by_merge(columns, sums)
    return torch.cat([summed.sum(dim=0), tops.amax(dim=0)], dim=-1)


def merge_groups(
    values: Tensor, groups: Sequence[Sequence[int]], merge: Callable[[Tensor], Tensor] = merge_rows
) -> Tensor:
    return rows.merge_groups(values, groups, merge)
