"""The columns of lines: the rows and the columns of a matrix.

The projection of a line is the sum of its elements times fixed weights. Equal lines have equal columns. Other
lines of finite numbers, such as a permutation of a line, have other columns with overwhelming probability.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from gradiometer.columns.schema import Column, Schema
from gradiometer.columns.tensors import TENSORS, count_of

if TYPE_CHECKING:
    from torch import Tensor

# The finalizer of MurmurHash3 for 32 bits: x ^= x >> shift, then x *= factor, for each of these. It is a
# bijection, so no two elements of a line have the same weight.
MIX: Final = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1))
_MASK: Final = 2**32 - 1

LINES: Final = Schema(
    "lines",
    (
        TENSORS.columns[TENSORS.index["numel"]],
        TENSORS.columns[TENSORS.index["sum"]],
        TENSORS.columns[TENSORS.index["sumsq"]],
        count_of("n_nonfinite", "NaN and infinite elements", "NaN, ±Inf", "rare"),
        Column("projection", "sum", "s", "sum of x times `line_weights` over finite elements", signed=True),
        TENSORS.columns[TENSORS.index["abs_max"]],
    ),
)
"""The schema of `gradiometer.ops.measure_lines`."""


def line_weights(first: int, count: int, device: torch.device | None = None) -> Tensor:
    """Return the weights of ``count`` elements of a line, from index ``first``, ``(count,) float64``.

    Weight i is the 32-bit hash of i + 1, as a signed integer, times 2**-31. It is not 0 for lines of fewer
    than 2**32 elements.

    >>> line_weights(0, 3)
    tensor([ 0.6352,  0.3825, -0.9536], dtype=torch.float64)
    """
    x = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=device) & _MASK
    for shift, factor in MIX:
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return (x - ((x >> 31) << 32)).to(torch.float64) * 2.0**-31
