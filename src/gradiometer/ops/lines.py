"""The op that measures matrices by rows and by columns, ``gradiometer::line_stats``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradiometer.columns import LINES
from gradiometer.inputs import as_real
from gradiometer.ops.dispatch import without_grad
from gradiometer.ops.library import REVISION, by_device, define
from gradiometer.ops.line_reference import line_counts, line_stats

if TYPE_CHECKING:
    from collections.abc import Sequence


def measure_lines(tensors: Sequence[Tensor]) -> Tensor:
    """Measure each row and each column of tensors of one device, as matrices, in one read.

    `line_counts` tells how many rows and columns a tensor has. Equal rows of one length have the same bits,
    wherever they are, in tensors of one dtype; so have equal columns.

    Args:
        tensors: at least one floating-point or complex strided tensor; any shapes, strides, dtypes.

    Returns:
        ``(L, C) float64`` in the order of `gradiometer.columns.LINES`, on the tensors' device: for each
        tensor a line for each row, and then one for each column.

    >>> x = torch.tensor([[1.0, 2.0], [1.0, 2.0], [2.0, 1.0]])
    >>> rows, columns = measure_lines([x]).split(line_counts(x))
    >>> torch.equal(rows[0], rows[1]), torch.equal(rows[0], rows[2])
    (True, False)
    >>> LINES.value(columns, "sum")
    tensor([4., 5.], dtype=torch.float64)
    """
    with without_grad():
        return torch.ops.gradiometer.line_stats(tensors, REVISION)  # type: ignore[no-any-return]


def _by_kernels(tensors: Sequence[Tensor]) -> Tensor:
    from gradiometer import kernels  # noqa: PLC0415 as in dispatch.py

    counts = [line_counts(x) for x in tensors]
    result = torch.empty((sum(map(sum, counts)), LINES.width), dtype=torch.float64, device=tensors[0].device)
    for tensor, shape, out in zip(tensors, counts, result.split([sum(x) for x in counts]), strict=True):
        x = as_real(tensor)
        kernels.lines((x.float() if x.itemsize == 1 else x).reshape(shape), out)
    return result


def _fake(tensors: Sequence[Tensor]) -> Tensor:
    lines = sum([sum(line_counts(x)) for x in tensors])
    return tensors[0].new_empty((lines, LINES.width), dtype=torch.float64)


define("line_stats(Tensor[] tensors) -> Tensor", by_device(line_stats, _by_kernels), _fake)
