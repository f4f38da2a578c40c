"""Statistics of every schema, and of one that a user could define, for tests of what they all share."""

from __future__ import annotations

import math

import torch

import gradiometer as gm
from gradiometer.columns import ACTIVATIONS, EXPONENTS, PAIRS, TENSORS, Column, Derived, Schema
from gradiometer.stats import report_of, stats_of

SIGNS = Schema(
    "signs",
    (
        Column("numel", "sum", "1", "elements", "elements", "count", "elements"),
        Column("n_negative", "sum", "1", "elements below 0", "negative", "count", "elements"),
        Column("lowest", "max", "|s|", "largest magnitude of a negative element", "lowest", "number"),
    ),
    (
        Derived("n_nonfinite", lambda row: row("numel") * 0, "none", "not finite", "rare"),
        Derived(
            "negative_fraction",
            lambda row: row("n_negative") / row("numel").clamp(min=1),
            "n_negative / numel",
            "negative %",
            "fraction",
        ),
    ),
    shown=("numel", "negative_fraction", "lowest"),
)

NAMES = ("a.w", "a.b", "b.w")
TENSORS_BY_NAME = [
    dict(zip(NAMES, values, strict=True))
    for values in (
        (torch.tensor([3.0, -4.0, 0.0]), torch.tensor([0.5]), torch.tensor([1.0, math.nan, -math.inf])),
        (torch.tensor([-8.0, 0.25]), torch.zeros(4), torch.tensor([2.0, 2.0])),
    )
]


def _activations(tensors: dict[str, torch.Tensor]) -> gm.ActivationStats:
    stats = gm.collect(tensors)
    rows = [ACTIVATIONS.columns[i].name for i in range(ACTIVATIONS.width)]
    calls = torch.ones(len(tensors), dtype=torch.float64)
    values = {"n_channels": 4 * calls, "n_zero_channels": stats.n_zero, "n_calls": calls}
    columns = [values[x] if x in values else getattr(stats, x, stats.sumsq**2) for x in rows]
    return gm.ActivationStats(tuple(tensors), torch.stack(columns, dim=1))


def _signs(tensors: dict[str, torch.Tensor]) -> object:
    rows = [[x.numel(), (x < 0).sum(), -x.nan_to_num(0.0).clamp(-99.0, 0.0).amin()] for x in tensors.values()]
    columns = torch.tensor(rows, dtype=torch.float64).view(len(rows), 3)
    return stats_of(SIGNS, tuple(tensors), columns)


COLLECT = {
    "tensors": lambda x: gm.collect(x, fingerprint=True),
    "pairs": lambda x: gm.compare(x, {name: y + 1 for name, y in x.items()}),
    "exponents": gm.collect_exponents,
    "activations": _activations,
    "signs": _signs,
}
SCHEMAS = {
    "tensors": TENSORS,
    "pairs": PAIRS,
    "exponents": EXPONENTS,
    "activations": ACTIVATIONS,
    "signs": SIGNS,
}


def stats_of_kind(kind: str, which: int = 0) -> object:
    """Return the stats of a kind with three rows; ``which``: 0 or 1, of other elements."""
    return COLLECT[kind](TENSORS_BY_NAME[which])


def report_of_kind(kind: str, **options: object) -> object:
    """Return the report of a kind with three rows."""
    stats = stats_of_kind(kind)
    return report_of(SCHEMAS[kind], stats.names, stats.columns, **options)
