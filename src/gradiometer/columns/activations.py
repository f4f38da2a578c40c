"""The raw columns of activations and of their gradients, and the values derived from them.

A channel is an index of one dimension, such as a feature of a linear layer. The columns of several calls in a
step merge, as those of chunks do: counts of channels are then of channels times calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from gradiometer.columns import derived
from gradiometer.columns.schema import COLUMNS, NUM_SUM_COLUMNS, Column

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = [
    "ACTIVATION_COLUMNS",
    "ACTIVATION_DERIVED",
    "ACTIVATION_INDEX",
    "NUM_ACTIVATION_COLUMNS",
    "NUM_ACTIVATION_SUMS",
    "activation_value",
    "tensor_columns",
]

# those that merge by sum come first
ACTIVATION_COLUMNS: Final = (
    *COLUMNS[:NUM_SUM_COLUMNS],
    Column("sum4", "sum", "s*s*s*s", "sum of x**4 over finite elements, in fp64"),
    Column("n_channels", "sum", "1", "channels of each call"),
    Column("n_zero_channels", "sum", "1", "channels whose elements are all 0, of each call"),
    Column("n_calls", "sum", "1", "calls"),
    *COLUMNS[NUM_SUM_COLUMNS:],
)
"""The raw columns of ``ActivationStats.columns``, in order: name, merge, scaling and meaning of each."""
ACTIVATION_INDEX: Final = {column.name: index for index, column in enumerate(ACTIVATION_COLUMNS)}
NUM_ACTIVATION_COLUMNS: Final = len(ACTIVATION_COLUMNS)
NUM_ACTIVATION_SUMS: Final = sum(column.merge == "sum" for column in ACTIVATION_COLUMNS)


def activation_value(columns: Tensor, name: str) -> Tensor:
    """Return a raw column or derived value by name. ``(..., A) -> (...) float64``."""
    if name in ACTIVATION_INDEX:
        return columns.select(-1, ACTIVATION_INDEX[name])
    if name in ACTIVATION_DERIVED:
        return ACTIVATION_DERIVED[name](columns)
    return derived.value(tensor_columns(columns), name)


def tensor_columns(columns: Tensor) -> Tensor:
    """Return the columns that tensors have too, ``(..., A) -> (..., C)``, in the order of `COLUMNS`."""
    sums, tops = columns[..., :NUM_SUM_COLUMNS], columns[..., NUM_ACTIVATION_SUMS:]
    return torch.cat([sums, tops], dim=-1)


def _outlier_ratio(columns: Tensor) -> Tensor:
    top, rms = activation_value(columns, "abs_max"), activation_value(columns, "rms")
    return torch.where(rms > 0, top / rms, torch.zeros_like(rms))


def _kurtosis(columns: Tensor) -> Tensor:
    finite = activation_value(columns, "numel") - activation_value(columns, "n_nonfinite")
    sum4, square = activation_value(columns, "sum4"), activation_value(columns, "sumsq")
    # one by one: the square of sumsq alone may leave the range of float64
    return torch.where(square > 0, sum4 / square * (finite / square), torch.zeros_like(square))


def _zero_channel_fraction(columns: Tensor) -> Tensor:
    dead = activation_value(columns, "n_zero_channels")
    return dead / activation_value(columns, "n_channels").clamp(min=1.0)


ACTIVATION_DERIVED: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "outlier_ratio": _outlier_ratio,
    "kurtosis": _kurtosis,
    "zero_channel_fraction": _zero_channel_fraction,
}
