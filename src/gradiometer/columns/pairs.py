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

from gradiometer.columns.roots import sqrt
from gradiometer.columns.schema import Column, Derived, Flag, Schema
from gradiometer.columns.tensors import STATISTICS, count_of, share

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from gradiometer.columns.schema import Row


def _root_of(name: str) -> Callable[[Row], Tensor]:
    return lambda row: sqrt(row(name))


def _update_ratio(row: Row) -> Tensor:
    change, reference = row("norm_u"), row("norm_b")
    # no change of nothing is no change; any other change of zeros is infinite
    return torch.where(change > 0, change / reference, torch.zeros_like(change))


def _cosine(dot: Tensor, a: Tensor, b: Tensor) -> Tensor:
    # one by one: the product of both norms may leave the range of float64; NaN if one of them is 0
    return (dot / a / b).clamp(-1.0, 1.0)


# `scaling` is for a and b times s, and the same g
PAIRS: Final = Schema(
    "pairs",
    (
        count_of("numel", "elements", "elements"),
        Column("sumsq_a", "sum", "s*s", "sum of a**2"),
        Column("sumsq_b", "sum", "s*s", "sum of b**2"),
        Column("dot_ab", "sum", "s*s", "sum of a * b", signed=True),
        Column("sumsq_u", "sum", "s*s", "sum of u**2, where u = a - b"),
        Column("sum_u", "sum", "s", "sum of u", signed=True),
        count_of("n_unchanged", "elements that have the same bits in a and b", "unchanged"),
        Column("sumsq_g", "sum", "1", "sum of g**2"),
        Column("dot_ug", "sum", "s", "sum of u * g", signed=True),
        count_of("n_nonzero_g", "elements whose g is not 0"),
        count_of("n_stuck", "unchanged elements whose g is not 0", "stuck"),
        count_of("n_nan", "elements that are NaN in a or b", "NaN", "rare"),
        count_of(
            "n_posinf",
            "elements that are +Inf in a, or -Inf in b and finite in a; without NaN",
            "+Inf",
            "rare",
        ),
        count_of(
            "n_neginf",
            "elements that are -Inf in a, or +Inf in b and finite in a; without NaN",
            "-Inf",
            "rare",
        ),
        Column("abs_max_u", "max", "|s|", "largest |u|", "abs max", "finite"),
    ),
    (
        # those that every tensor has, of u
        Derived("sumsq", lambda row: row("sumsq_u"), "sum of u**2"),
        Derived("sum", lambda row: row("sum_u"), "sum of u"),
        Derived("abs_max", lambda row: row("abs_max_u"), "largest |u|", "abs max", "finite"),
        *STATISTICS,
        *[Derived(f"norm_{x}", _root_of(f"sumsq_{x}"), f"L2 norm of {x}") for x in "abug"],
        Derived("rms_u", lambda row: row("rms"), "root mean square of u", "rms", "finite"),
        Derived(
            "update_ratio",
            _update_ratio,
            "norm_u / norm_b; 0 if nothing changed, inf if only b is 0",
            "update ratio",
        ),
        Derived(
            "cosine",
            lambda row: _cosine(row("dot_ab"), row("norm_a"), row("norm_b")),
            "cosine of a and b; NaN if one of them is 0",
            style="cosine",
        ),
        Derived(
            "descent_cosine",
            lambda row: _cosine(row("dot_ug"), row("norm_u"), row("norm_g")).neg(),
            "cosine of u and -g, 1 for a step of gradient descent; NaN if one of them is 0",
            "cos(u,-g)",
            "cosine",
        ),
        Derived(
            "unchanged_fraction",
            lambda row: share(row("n_unchanged"), row("numel")),
            "n_unchanged / numel",
            "unchanged %",
            "fraction",
        ),
        Derived(
            "stuck_fraction",
            lambda row: share(row("n_stuck"), row("n_nonzero_g")),
            "n_stuck / n_nonzero_g",
            "stuck %",
            "fraction",
            per="n_nonzero_g",
        ),
    ),
    flags=Flag.NAN | Flag.INF | Flag.VANISHING | Flag.EXPLODING,
    shown=(
        *("numel", "update_ratio", "rms_u", "abs_max_u", "descent_cosine", "unchanged_fraction"),
        *("stuck_fraction", "n_nan", "n_inf"),
    ),
    drawn=(
        "norm",
        "rms",
        "abs_max",
        "unchanged_fraction",
        "update_ratio",
        "descent_cosine",
        "stuck_fraction",
    ),
)
"""The schema of `gradiometer.PairStats`."""

PAIR_COLUMNS: Final = PAIRS.columns
"""The raw columns of ``PairStats.columns``, in order: name, merge, scaling and meaning of each."""
