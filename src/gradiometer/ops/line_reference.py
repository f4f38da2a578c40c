"""The rows and columns of matrices in eager PyTorch: the CPU implementation.

A matrix is read in tiles. The columns of each line are added up pairwise in a tile, and tile after tile, by
operators that treat all elements alike. So a line has the same bits wherever it is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from gradiometer.columns import LINES, line_weights
from gradiometer.inputs import as_real
from gradiometer.ops import openmp
from gradiometer.ops.streaming import convertible

if TYPE_CHECKING:
    from collections.abc import Sequence

# of a tile, whose numbers take 256 KiB
_ROWS: Final = 64
_COLUMNS: Final = 512


def line_counts(tensor: Tensor) -> tuple[int, int]:
    """Return how many rows and columns a tensor has as a matrix.

    The rows are those of dimension 0; a vector or a number is one row. A complex number is two columns.
    """
    rows, *others = tensor.shape if tensor.dim() > 1 else (1, tensor.numel())
    return rows, math.prod(others) * (2 if tensor.is_complex() else 1)


def line_stats(tensors: Sequence[Tensor]) -> Tensor:
    """Return the columns of the rows and columns of each tensor, ``(L, C) float64``."""
    with openmp.one_thread():
        return torch.cat([_measure(x) for x in tensors])


def _measure(tensor: Tensor) -> Tensor:
    rows, columns = line_counts(tensor)
    x = as_real(tensor) if tensor.dim() > 1 else as_real(tensor).unsqueeze(0)
    result = x.new_zeros((rows + columns, LINES.width), dtype=torch.float64)
    of_rows, of_columns = result.split([rows, columns])
    for i in range(0, rows, _ROWS):
        # a copy of a few rows, if they have no view as vectors
        some = x[i : i + _ROWS]
        some = some.reshape(len(some), columns)
        for j in range(0, columns, _COLUMNS):
            tile = some[:, j : j + _COLUMNS]
            for lines, found in zip((of_columns[j:], of_rows[i:]), _columns_of(tile, (i, j)), strict=True):
                lines[: len(found)] = LINES.merge(lines[: len(found)], found)
    return result


def _columns_of(tile: Tensor, first: tuple[int, int]) -> list[Tensor]:
    """Return the columns of a tile's columns, and those of its rows.

    ``first``: the indices of its first row and column.
    """
    # zeros up to powers of two
    x = tile.new_zeros([1 << (size - 1).bit_length() for size in tile.shape], dtype=torch.float64)
    x[: tile.shape[0], : tile.shape[1]] = convertible(tile)
    finite = x.isfinite()
    x = torch.where(finite, x, 0.0)
    terms, magnitudes = [x, x * x, (~finite).to(x.dtype)], x.abs()
    result = []
    for dim in (0, 1):
        weights = line_weights(first[dim], x.shape[dim], x.device)
        sums = torch.stack([*terms, x * (weights if dim else weights[:, None])])
        while sums.shape[dim + 1] > 1:
            one, other = sums.chunk(2, dim + 1)
            sums = one + other
        top = magnitudes.amax(dim)
        numel = torch.full_like(top, tile.shape[dim])
        found = torch.stack([numel, *sums.squeeze(dim + 1), top], dim=-1)
        result.append(found[: tile.shape[1 - dim]])
    return result
