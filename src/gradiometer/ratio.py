"""The ratio of two groups' gradients, normalized by their numbers of parameters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.stats import TensorStats

__all__ = ["group_ratio"]


def group_ratio(
    grouped: TensorStats, numerator: str | Sequence[str], denominator: str, *, floor: float = 1e-8
) -> Tensor:
    """Return ``(norm_a / sqrt(n_a)) / (norm_b / sqrt(n_b))`` of two groups, on their device.

    Of finite norms it is always finite: 0 where a group has no elements or a norm below ``floor``.
    NaN and Inf are carried, by the rules of division.

    Args:
        grouped: stats with a row per group, as `TensorStats.group` returns them.
        numerator: the name of a group, or several: a host and its many slots in one call.
        denominator: the name of a group.
        floor: a norm below it counts as nothing.

    Returns:
        0-d float64; ``(K,)`` for K names.

    Raises:
        KeyError: for a name that is no group's.
        ValueError: for a floor that is negative or NaN.

    >>> import torch, gradiometer as gm
    >>> stats = gm.collect({"host.w": torch.ones(9), "seed.w": torch.full((4,), 0.5)})
    >>> gm.group_ratio(stats.group({"host": r"^host", "seed": r"^seed"}), "seed", "host")
    tensor(0.5000, dtype=torch.float64)
    """
    if math.isnan(floor) or floor < 0:
        msg = f"group_ratio: floor must be a number that is not negative, got {floor!r}"
        raise ValueError(msg)
    one = isinstance(numerator, str)
    above = [_row(grouped, name) for name in ([numerator] if isinstance(numerator, str) else numerator)]
    below = _row(grouped, denominator)
    norms, sizes = grouped.norm, grouped.numel
    scaled = norms / sizes.clamp(min=1.0).sqrt()
    nothing = (sizes == 0) | (norms < floor)
    ratios = [
        torch.where(
            (nothing[a] | nothing[below]) & norms[a].isfinite() & norms[below].isfinite(),
            0.0,
            scaled[a] / scaled[below],
        )
        for a in above
    ]
    if one:
        return ratios[0]
    return torch.stack(ratios) if ratios else norms.new_zeros((0,))


def _row(grouped: TensorStats, name: str) -> int:
    if name not in grouped.names:
        msg = f"group_ratio: no group {name!r}; there are {', '.join(map(repr, grouped.names)) or 'none'}"
        raise KeyError(msg)
    return grouped.names.index(name)
