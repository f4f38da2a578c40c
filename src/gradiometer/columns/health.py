"""The health of a step, computed from the raw columns and flags of T tensors.

Each function takes ``columns (T, C) float64`` and ``flags (T,) int32`` on any device, and returns a 0-d
tensor there. T may be 0. Tensors without elements have no norm to compare.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from gradiometer.columns.schema import Flag
from gradiometer.columns.tensors import TENSORS

if TYPE_CHECKING:
    from collections.abc import Callable

# weights of the shares of vanishing and of exploding tensors in the health score
VANISHING_WEIGHT: Final = 0.5
EXPLODING_WEIGHT: Final = 0.8

# limits of a healthy step: largest norm / max(smallest norm, LEAST_NORM), and share of zeros
MAX_NORM_RATIO: Final = 1000.0
LEAST_NORM: Final = 1e-10
MAX_ZERO_FRACTION: Final = 0.5

# a NaN on a replica that is not counted sets the flag, but is not in the columns
_NONFINITE: Final = Flag.NAN | Flag.INF


def score(
    columns: Tensor,
    flags: Tensor,
    vanishing: float = VANISHING_WEIGHT,
    exploding: float = EXPLODING_WEIGHT,
    measured: Tensor | None = None,
) -> Tensor:
    """Return ``clamp(1 - vanishing * n_vanishing / T - exploding * n_exploding / T, 0, 1)``.

    It is 0 if an element or the total norm is not finite, and 1 for T = 0. ``measured``, 0-d float64, is the
    number of rows that some rank has measured; None means all T.
    """
    for name, weight in (("vanishing", vanishing), ("exploding", exploding)):
        if not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
            msg = f"health_score({name}={weight!r}): {name} must be a finite non-negative number"
            raise ValueError(msg)
    count = max(columns.shape[0], 1) if measured is None else measured.clamp(min=1.0)
    loss = (vanishing * _count(flags, Flag.VANISHING) + exploding * _count(flags, Flag.EXPLODING)) / count
    finite = _total(columns, "norm").isfinite() & (_count(flags, _NONFINITE) == 0)
    return torch.where(finite, (1.0 - loss).clamp(0.0, 1.0), 0.0)


def _count(flags: Tensor, flag: Flag) -> Tensor:
    return (flags.bitwise_and(int(flag)) != 0).sum(dtype=torch.float64)


def _total(columns: Tensor, name: str) -> Tensor:
    return TENSORS.value(TENSORS.merge_rows(columns), name)


def _min_norm(columns: Tensor) -> Tensor:
    if columns.shape[0] == 0:
        return columns.new_zeros(())
    filled = TENSORS.value(columns, "numel") > 0
    least = torch.where(filled, TENSORS.value(columns, "norm"), torch.inf).amin()
    return torch.where(filled.any(), least, 0.0)


def _max_norm(columns: Tensor) -> Tensor:
    return TENSORS.value(columns, "norm").amax() if columns.shape[0] else columns.new_zeros(())


def _norm_ratio(columns: Tensor) -> Tensor:
    return _max_norm(columns) / _min_norm(columns).clamp(min=LEAST_NORM)


def is_healthy(
    columns: Tensor,
    flags: Tensor,
    norm_ratio: float = MAX_NORM_RATIO,
    zero_fraction: float = MAX_ZERO_FRACTION,
) -> Tensor:
    """Return whether all elements are finite, no tensor is exploding, and the step is within the limits.

    The ratio of norms and the share of zeros must be below ``norm_ratio`` and ``zero_fraction``. 0-d bool.
    """
    for name, limit in (("norm_ratio", norm_ratio), ("zero_fraction", zero_fraction)):
        # rejects NaN too; Dynamo does not trace math.isnan of a number that changes
        if not isinstance(limit, (int, float)) or not limit >= 0:
            msg = f"is_healthy_within: {name} must be a non-negative number, got {limit}"
            raise ValueError(msg)
    return (
        (_total(columns, "n_nonfinite") == 0)
        & (_count(flags, _NONFINITE) == 0)
        & (_norm_ratio(columns) < norm_ratio)
        & (_total(columns, "zero_fraction") < zero_fraction)
        & (_count(flags, Flag.EXPLODING) == 0)
    )


HEALTH: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "health": score,
    "has_vanishing": lambda _, flags: _count(flags, Flag.VANISHING) > 0,
    "has_exploding": lambda _, flags: _count(flags, Flag.EXPLODING) > 0,
    "min_norm": lambda columns, _: _min_norm(columns),
    "max_norm": lambda columns, _: _max_norm(columns),
    "norm_ratio": lambda columns, _: _norm_ratio(columns),
    "is_healthy": is_healthy,
    "total_norm": lambda columns, _: _total(columns, "norm"),
    "total_zero_fraction": lambda columns, _: _total(columns, "zero_fraction"),
    "total_n_nan": lambda columns, _: _total(columns, "n_nan"),
    "total_n_inf": lambda columns, _: _total(columns, "n_inf"),
}
