"""The single definition of raw columns, flags and thresholds.

A column's name, its merge and its position in the matrix are defined only here. Raw columns merge over
chunks, steps, groups and ranks; values that do not merge are derived from them in
`gradiometer.columns.derived`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, Literal

__all__ = [
    "COLUMNS",
    "COLUMN_INDEX",
    "COLUMN_NAMES",
    "DEFAULT_DEAD_THRESHOLD",
    "DEFAULT_EXPLODING_THRESHOLD",
    "DEFAULT_THRESHOLDS",
    "DEFAULT_VANISHING_THRESHOLD",
    "NUM_COLUMNS",
    "NUM_SUM_COLUMNS",
    "Column",
    "Flag",
    "Thresholds",
]


@dataclass(frozen=True)
class Column:
    """One raw value per tensor: its name, how two of them merge, and its meaning.

    The identity of both merges is 0: it adds nothing to a sum, and no magnitude is below it. ``scaling`` is
    the factor on the value when the tensor is multiplied by s.
    """

    name: str
    merge: Literal["sum", "max"]
    scaling: Literal["1", "s", "|s|", "s*s", "s*s*s*s"]
    meaning: str


# The columns that merge by sum come first, so that a merge is two slices.
COLUMNS: Final = (
    Column("numel", "sum", "1", "elements"),
    Column("sumsq", "sum", "s*s", "sum of x**2 over finite elements, squared and accumulated in fp64"),
    Column("sum", "sum", "s", "sum of x over finite elements"),
    Column("n_zero", "sum", "1", "elements equal to 0, including -0"),
    Column("n_nan", "sum", "1", "NaN elements"),
    Column("n_posinf", "sum", "1", "+Inf elements"),
    Column("n_neginf", "sum", "1", "-Inf elements"),
    Column("abs_max", "max", "|s|", "largest finite magnitude, 0 if there is none"),
)
"""The raw columns, in the order of ``TensorStats.columns``: name, merge, scaling and meaning of each."""
COLUMN_NAMES: Final = tuple(column.name for column in COLUMNS)
COLUMN_INDEX: Final = {name: index for index, name in enumerate(COLUMN_NAMES)}
NUM_COLUMNS: Final = len(COLUMNS)
NUM_SUM_COLUMNS: Final = sum(column.merge == "sum" for column in COLUMNS)


class Flag(enum.IntFlag):
    """Anomalies of one tensor, as bits of ``TensorStats.flags``.

    ``NAN`` and ``INF``: it holds at least one. ``VANISHING``: its L2 norm is finite and below the threshold.
    ``EXPLODING``: its L2 norm is above the threshold or not finite. ``DEAD``: its share of zeros is at or
    above the threshold. A tensor with no elements has no flag.
    """

    NAN = 1
    INF = 2
    VANISHING = 4
    EXPLODING = 8
    DEAD = 16


DEFAULT_VANISHING_THRESHOLD: Final = 1e-7
"""An L2 norm strictly below it is flagged ``VANISHING``."""
DEFAULT_EXPLODING_THRESHOLD: Final = 100.0
"""An L2 norm strictly above it, or not finite, is flagged ``EXPLODING``."""
DEFAULT_DEAD_THRESHOLD: Final = 1.0
"""A share of zeros at or above it is flagged ``DEAD``."""


@dataclass(frozen=True)
class Thresholds:
    """The limits at which a tensor is flagged.

    Args:
        vanishing: an L2 norm strictly below it is ``VANISHING``; 0 switches the flag off.
        exploding: an L2 norm strictly above it is ``EXPLODING``; with ``math.inf``, only
            that of a tensor with NaN or Inf is.
        dead: a share of zeros at or above it is ``DEAD``; above 1 switches the flag off.

    Raises:
        ValueError: if a threshold is not a number, is NaN or is negative, or if ``dead`` is 0.

    >>> Thresholds(exploding=10.0)
    Thresholds(vanishing=1e-07, exploding=10.0, dead=1.0)
    """

    vanishing: float = DEFAULT_VANISHING_THRESHOLD
    exploding: float = DEFAULT_EXPLODING_THRESHOLD
    dead: float = DEFAULT_DEAD_THRESHOLD

    def __post_init__(self) -> None:
        for name in ("vanishing", "exploding", "dead"):
            value = getattr(self, name)
            # rejects NaN too; Dynamo does not trace math.isnan of a number that changes
            if not isinstance(value, (int, float)) or not value >= 0:
                msg = f"Thresholds({name}={value!r}): {name} must be a non-negative number"
                raise ValueError(msg)
        if self.dead == 0:
            msg = "Thresholds(dead=0): it would flag every tensor; pass a share of zeros above 0 (1.0: all)"
            raise ValueError(msg)


DEFAULT_THRESHOLDS: Final = Thresholds()
