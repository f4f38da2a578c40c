"""The raw columns of attention weights, of one head each, and of blocks that add to a residual stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from gradiometer.columns.roots import sqrt
from gradiometer.columns.schema import Column, Derived, Schema
from gradiometer.columns.tensors import count_of, share

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from gradiometer.columns.schema import Row, Style


def _mean(
    name: str, total: str, count: str, meaning: str, heading: str = "", style: Style = "fraction"
) -> Derived:
    return Derived(name, lambda row: share(row(total), row(count)), meaning, heading, style, per=count)


ATTENTION: Final = Schema(
    "attention",
    (
        count_of("numel", "attention weights", "weights"),
        count_of(
            "n_queries", "queries that may attend to a key, with finite weights", "queries", unit="queries"
        ),
        count_of(
            "n_unnormalized",
            "of these, queries whose weights do not sum to 1, above rounding",
            "not 1",
            "rare",
            "queries",
        ),
        count_of("n_choices", "of these, queries that may attend to at least two keys", unit="queries"),
        count_of("n_zero", "weights of keys that these queries may attend to that are 0", unit="elements"),
        count_of("n_scales", "calls in which the scale of the logits was found", unit="calls"),
        count_of("n_two_way", "calls in which queries may attend to 8 or more later keys", unit="calls"),
        count_of(
            "n_one_way", "of these, calls in which none does, but many do to earlier keys", unit="calls"
        ),
        count_of("n_one_way_masks", "of these, calls with a mask of their own for each query", unit="calls"),
        Column("sum_weights", "sum", "s", "sum of the weights", signed=True),
        Column("sum_masked", "sum", "|s|", "sum of the magnitudes on keys that the mask excludes"),
        Column("sum_future", "sum", "|s|", "sum of the magnitudes on keys after the query"),
        Column("sum_entropy", "sum", "1", "sum over queries of entropy / entropy of equal weights"),
        Column(
            "sum_scale", "sum", "1", "sum over calls of the scale of the logits / expected scale", signed=True
        ),
        Column("max_masked", "max", "|s|", "largest sum_masked of a query"),
        Column("max_future", "max", "|s|", "largest sum_future of a query"),
        Column("max_sum", "max", "|s|", "largest sum of the weights of a query, 0 if all are negative"),
        Column("max_scale", "max", "1", "magnitude of the expected scale of the logits"),
    ),
    (
        _mean(
            "row_sum", "sum_weights", "n_queries", "mean over queries of the sum of weights", style="number"
        ),
        _mean(
            "unnormalized_fraction", "n_unnormalized", "n_queries", "n_unnormalized / n_queries", "not 1 %"
        ),
        _mean(
            "masked_mass", "sum_masked", "n_queries", "mean over queries of the masked weights", "masked %"
        ),
        _mean(
            "future_mass",
            "sum_future",
            "n_queries",
            "mean over queries of the weights of later keys",
            "future %",
        ),
        _mean(
            "entropy",
            "sum_entropy",
            "n_choices",
            "mean over queries of the entropy of the allowed weights, divided by that of equal weights: "
            "1 if all keys have equal weights, 0 if one has all",
            "entropy %",
        ),
        _mean(
            "logit_scale",
            "sum_scale",
            "n_scales",
            "the scale of the logits, found from q, k and the weights, divided by the expected one",
            "logit scale",
            "number",
        ),
    ),
    shown=("n_queries", "row_sum", "masked_mass", "future_mass", "entropy", "logit_scale"),
    drawn=("entropy", "future_mass", "masked_mass", "row_sum", "logit_scale"),
)
"""The schema of attention heads, which `gradiometer.tap_attention` measures."""


def _root_of(name: str) -> Callable[[Row], Tensor]:
    return lambda row: sqrt(row(name))


def _ratio(row: Row) -> Tensor:
    added, before = row("norm_added"), row("norm_in")
    return torch.where(added > 0, added / before, torch.zeros_like(added))


def _cosine(row: Row) -> Tensor:
    before, after = row("norm_in"), row("norm_out")
    # 2 in·out = in² + out² - (out - in)², one division at a time
    twice = (before / after) + (after / before) - row("norm_added") / before * (row("norm_added") / after)
    return (twice / 2.0).clamp(-1.0, 1.0)


RESIDUAL: Final = Schema(
    "residual",
    (
        count_of("numel", "elements", "elements"),
        Column("sumsq_in", "sum", "s*s", "sum of in**2"),
        Column("sumsq_out", "sum", "s*s", "sum of out**2"),
        Column("sumsq_added", "sum", "s*s", "sum of (out - in)**2"),
    ),
    (
        Derived("norm_in", _root_of("sumsq_in"), "L2 norm of the input", "norm in"),
        Derived("norm_out", _root_of("sumsq_out"), "L2 norm of the output", "norm out"),
        Derived("norm_added", _root_of("sumsq_added"), "L2 norm of output - input", "norm added"),
        Derived(
            "added_ratio",
            _ratio,
            "norm_added / norm_in; 0 if nothing is added, inf if only in is 0",
            "added / in",
        ),
        Derived("cosine", _cosine, "cosine of input and output; NaN if one of them is 0", style="cosine"),
    ),
    shown=("numel", "norm_in", "norm_out", "added_ratio", "cosine"),
    drawn=("added_ratio", "cosine", "norm_out"),
)
"""The schema of blocks, whose outputs `gradiometer.Taps` compares with their inputs."""
