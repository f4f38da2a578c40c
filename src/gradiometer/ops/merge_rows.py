"""The op ``gradiometer::merge_rows_``, which merges raw columns of any schema into rows of a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradiometer.columns import Cursor
from gradiometer.ops import ring
from gradiometer.ops.library import define

if TYPE_CHECKING:
    from torch import Tensor


def merge_rows_(columns: Tensor, store: Tensor, cursor: Tensor, row: int, num_sums: int) -> None:
    """Merge columns into adjacent rows of a store, in a step that is due; not inside of a backward pass.

    Args:
        columns: ``(R, C) float64``, the raw columns of a schema.
        store: ``(N, C) float64``; ``store[row : row + R]`` changes.
        cursor: `gradiometer.columns.Cursor`; EVERY must be positive and divide STEP.
        row: the first row.
        num_sums: the number of columns that merge by sum.
    """
    torch.ops.gradiometer.merge_rows_(columns, store, cursor, row, num_sums)


def _merge_rows(columns: Tensor, store: Tensor, cursor: Tensor, row: int, num_sums: int) -> None:
    # activation checkpointing runs the forward pass again, inside the backward pass
    if torch._C._current_graph_task_id() != -1:  # noqa: SLF001 it has no public name
        return
    with torch.no_grad():
        if cursor.device.type == "cpu":
            if not ring.is_due(cursor):
                return
        else:
            every, step = cursor[Cursor.EVERY], cursor[Cursor.STEP]
            is_due = (every > 0) & (step.remainder(every.clamp(min=1.0)) == 0)
            columns = torch.where(is_due, columns, 0.0)
        kept = store[row : row + columns.shape[0]]
        kept[:, :num_sums].add_(columns[:, :num_sums])
        largest = kept[:, num_sums:]
        torch.maximum(largest, columns[:, num_sums:], out=largest)


define(
    "merge_rows_(Tensor columns, Tensor(a!) store, Tensor cursor, int row, int num_sums) -> ()", _merge_rows
)
