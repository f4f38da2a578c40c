"""The raw columns of activations and of their gradients, and the values derived from them.

A channel is an index of one dimension, such as a feature of a linear layer. The columns of several calls in a
step merge, as those of chunks do: counts of channels are then of channels times calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from gradiometer.columns.schema import Column, Derived, Flag, Schema
from gradiometer.columns.tensors import STATISTICS, TENSORS, ZERO_FRACTION, count_of, share

if TYPE_CHECKING:
    from torch import Tensor

    from gradiometer.columns.schema import Row


def _outlier_ratio(row: Row) -> Tensor:
    top, rms = row("abs_max"), row("rms")
    return torch.where(rms > 0, top / rms, torch.zeros_like(rms))


def _kurtosis(row: Row) -> Tensor:
    finite = row("numel") - row("n_nonfinite")
    sum4, square = row("sum4"), row("sumsq")
    # one by one: the square of sumsq alone may leave the range of float64
    return torch.where(square > 0, sum4 / square * (finite / square), torch.zeros_like(square))


ACTIVATIONS: Final = Schema(
    "activations",
    (
        *TENSORS.columns[: TENSORS.num_sums],
        Column("sum4", "sum", "s*s*s*s", "sum of x**4 over finite elements, in fp64"),
        count_of("n_channels", "channels of each call", "channels", unit="channels"),
        count_of(
            "n_zero_channels",
            "channels whose elements are all 0, of each call",
            "dead channels",
            "rare",
            "channels",
        ),
        count_of("n_calls", "calls", "calls", unit="calls"),
        *TENSORS.columns[TENSORS.num_sums :],
    ),
    (
        *STATISTICS,
        ZERO_FRACTION,
        Derived("outlier_ratio", _outlier_ratio, "abs_max / rms; 0 if all elements are 0", "outlier"),
        Derived(
            "kurtosis",
            _kurtosis,
            "mean of x**4 over the square of the mean of x**2, neither about the mean of x: "
            "3 for a normal distribution about 0, 1 for a constant magnitude; 0 if all are 0",
        ),
        Derived(
            "zero_channel_fraction",
            lambda row: share(row("n_zero_channels"), row("n_channels")),
            "n_zero_channels / n_channels, the share of dead units",
            "dead channel %",
            "fraction",
        ),
    ),
    # the thresholds of norms are about gradients of parameters
    flags=Flag.NAN | Flag.INF | Flag.DEAD,
    shown=(
        *("numel", "rms", "abs_max", "outlier_ratio", "kurtosis", "zero_fraction", "n_zero_channels"),
        *("n_calls", "n_nan", "n_inf"),
    ),
    drawn=(*(TENSORS.drawn or ()), "outlier_ratio", "kurtosis", "zero_channel_fraction"),
)
"""The schema of `gradiometer.ActivationStats`."""

ACTIVATION_COLUMNS: Final = ACTIVATIONS.columns
"""The raw columns of ``ActivationStats.columns``, in order: name, merge, scaling and meaning of each."""
