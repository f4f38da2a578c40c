"""The raw columns of pairs of tensors, and the values derived from them.

A pair is a tensor b and a later one a of the same shape, such as weights before and after a step, with
u = a - b; a gradient g of the same shape is optional. Differences, products and sums are computed in fp64.
Sums and maxima of a, b and u are over the elements that are finite in both; those of g also need a finite g.
The other elements are counted by kind: NaN where a or b is NaN; else Inf, with the sign of a if a is
infinite, and of -b if not. That is what u is, except where a and b are the same infinity: there u would be
NaN, although neither a nor b is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from gradiometer.columns.roots import sqrt
from gradiometer.columns.schema import Column

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "NUM_PAIR_COLUMNS",
    "NUM_PAIR_SUMS",
    "PAIR_COLUMNS",
    "PAIR_DERIVED",
    "PAIR_INDEX",
    "pair_value",
]

# Those that merge by sum come first. ``scaling`` is for a and b times s, and the same g.
PAIR_COLUMNS: Final = (
    Column("numel", "sum", "1", "elements"),
    Column("sumsq_a", "sum", "s*s", "sum of a**2"),
    Column("sumsq_b", "sum", "s*s", "sum of b**2"),
    Column("dot_ab", "sum", "s*s", "sum of a * b"),
    Column("sumsq_u", "sum", "s*s", "sum of u**2, where u = a - b"),
    Column("sum_u", "sum", "s", "sum of u"),
    Column("n_unchanged", "sum", "1", "elements that have the same bits in a and b"),
    Column("sumsq_g", "sum", "1", "sum of g**2"),
    Column("dot_ug", "sum", "s", "sum of u * g"),
    Column("n_nonzero_g", "sum", "1", "elements whose g is not 0"),
    Column("n_stuck", "sum", "1", "unchanged elements whose g is not 0"),
    Column("n_nan", "sum", "1", "elements that are NaN in a or b"),
    Column("n_posinf", "sum", "1", "elements that are +Inf in a, or -Inf in b and finite in a; without NaN"),
    Column("n_neginf", "sum", "1", "elements that are -Inf in a, or +Inf in b and finite in a; without NaN"),
    Column("abs_max_u", "max", "|s|", "largest |u|"),
)
"""The raw columns of ``PairStats.columns``, in order: name, merge, scaling and meaning of each."""
PAIR_INDEX: Final = {column.name: index for index, column in enumerate(PAIR_COLUMNS)}
NUM_PAIR_COLUMNS: Final = len(PAIR_COLUMNS)
NUM_PAIR_SUMS: Final = sum(column.merge == "sum" for column in PAIR_COLUMNS)


def pair_value(columns: Tensor, name: str) -> Tensor:
    """Return a raw column or derived value by name. ``(..., P) -> (...) float64``."""
    if name in PAIR_INDEX:
        return columns.select(-1, PAIR_INDEX[name])
    return PAIR_DERIVED[name](columns)


def _root_of(name: str) -> Callable[[Tensor], Tensor]:
    return lambda columns: sqrt(pair_value(columns, name))


def _rms(columns: Tensor) -> Tensor:
    finite = pair_value(columns, "numel") - pair_value(columns, "n_nonfinite")
    return sqrt(pair_value(columns, "sumsq_u") / finite.clamp(min=1.0))


def _update_ratio(columns: Tensor) -> Tensor:
    norm, reference = pair_value(columns, "norm_u"), pair_value(columns, "norm_b")
    # no change of nothing is no change; any other change of zeros is infinite
    return torch.where(norm > 0, norm / reference, torch.zeros_like(norm))


def _cosine(dot: Tensor, a: Tensor, b: Tensor) -> Tensor:
    # one by one: the product of both norms may leave the range of float64; NaN if one of them is 0
    return (dot / a / b).clamp(-1.0, 1.0)


def _cosine_ab(columns: Tensor) -> Tensor:
    return _cosine(*[pair_value(columns, name) for name in ("dot_ab", "norm_a", "norm_b")])


def _descent_cosine(columns: Tensor) -> Tensor:
    return _cosine(*[pair_value(columns, name) for name in ("dot_ug", "norm_u", "norm_g")]).neg()


def _share(count: str, of: str) -> Callable[[Tensor], Tensor]:
    return lambda columns: pair_value(columns, count) / pair_value(columns, of).clamp(min=1.0)


def _n_inf(columns: Tensor) -> Tensor:
    return pair_value(columns, "n_posinf") + pair_value(columns, "n_neginf")


def _n_nonfinite(columns: Tensor) -> Tensor:
    return pair_value(columns, "n_nan") + _n_inf(columns)


PAIR_DERIVED: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "n_inf": _n_inf,
    "n_nonfinite": _n_nonfinite,
    "norm_a": _root_of("sumsq_a"),
    "norm_b": _root_of("sumsq_b"),
    "norm_u": _root_of("sumsq_u"),
    "norm_g": _root_of("sumsq_g"),
    "rms_u": _rms,
    "update_ratio": _update_ratio,
    "cosine": _cosine_ab,
    "descent_cosine": _descent_cosine,
    "unchanged_fraction": _share("n_unchanged", "numel"),
    "stuck_fraction": _share("n_stuck", "n_nonzero_g"),
}
