"""The columns of tensors: gradients, weights, or any other tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from gradiometer.columns.roots import sqrt
from gradiometer.columns.schema import Column, Derived, Flag, Schema

if TYPE_CHECKING:
    from torch import Tensor

    from gradiometer.columns.schema import Row, Style


def _n_inf(row: Row) -> Tensor:
    return row("n_posinf") + row("n_neginf")


def _n_nonfinite(row: Row) -> Tensor:
    return row("n_nan") + row("n_inf")


def _norm(row: Row) -> Tensor:
    # like a norm over all elements: NaN if one is NaN, else inf if one is infinite
    inf = torch.where(row("n_inf") > 0, torch.inf, 0.0)
    nan = torch.where(row("n_nan") > 0, torch.nan, 0.0)
    return row("finite_norm") + inf + nan


def share(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return a quotient of counts; 0 where the denominator is 0."""
    return numerator / denominator.clamp(min=1.0)


def _per_finite(row: Row, name: str) -> Tensor:
    return share(row(name), row("numel") - row("n_nonfinite"))


def _rms(row: Row) -> Tensor:
    return sqrt(_per_finite(row, "sumsq"))


def _std(row: Row) -> Tensor:
    average = row("mean")
    return sqrt((_per_finite(row, "sumsq") - average * average).clamp(min=0.0))


def count_of(
    name: str, meaning: str, heading: str = "", style: Style = "count", unit: str = "elements"
) -> Column:
    """Return a column of counts, which merge by sum."""
    return Column(name, "sum", "1", meaning, heading, style, unit)


# of every schema with the columns that they need
STATISTICS: Final = (
    Derived("n_inf", _n_inf, "infinite elements of either sign", "±Inf", "rare"),
    Derived("n_nonfinite", _n_nonfinite, "NaN and infinite elements", "NaN, ±Inf", "rare"),
    Derived("finite_norm", lambda row: sqrt(row("sumsq")), "L2 norm of the finite elements", "finite norm"),
    Derived("norm", _norm, "L2 norm; NaN with any NaN, else inf with any Inf"),
    Derived("rms", _rms, "root mean square of the finite elements", style="finite"),
    Derived("mean", lambda row: _per_finite(row, "sum"), "mean of the finite elements", style="finite"),
    Derived("std", _std, "population standard deviation of the finite elements", style="finite"),
)
ZERO_FRACTION: Final = Derived(
    "zero_fraction", lambda row: share(row("n_zero"), row("numel")), "n_zero / numel", "zero %", "fraction"
)

TENSORS: Final = Schema(
    "tensors",
    (
        count_of("numel", "elements", "elements"),
        Column("sumsq", "sum", "s*s", "sum of x**2 over finite elements, squared and accumulated in fp64"),
        Column("sum", "sum", "s", "sum of x over finite elements", signed=True),
        count_of("n_zero", "elements equal to 0, including -0", "zeros"),
        count_of("n_nan", "NaN elements", "NaN", "rare"),
        count_of("n_posinf", "+Inf elements", "+Inf", "rare"),
        count_of("n_neginf", "-Inf elements", "-Inf", "rare"),
        Column("abs_max", "max", "|s|", "largest finite magnitude, 0 if there is none", "abs max", "finite"),
    ),
    (*STATISTICS, ZERO_FRACTION),
    flags=~Flag(0),
    shown=("numel", "norm", "rms", "abs_max", "zero_fraction", "n_nan", "n_inf"),
    drawn=("norm", "rms", "abs_max", "zero_fraction"),
)
"""The schema of `gradiometer.TensorStats`."""


COLUMNS: Final = TENSORS.columns
"""The raw columns, in the order of ``TensorStats.columns``: name, merge, scaling and meaning of each."""
