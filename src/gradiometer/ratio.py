"""The ratio of two groups' gradients, normalized by their numbers of parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from gradiometer import derived
from gradiometer.stats import TensorStats

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["group_ratio"]

# names in an error message
_NAMES: Final = 10


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
        ValueError: for a floor that is negative, NaN or no number.
        TypeError: for what are no stats.

    >>> import torch, gradiometer as gm
    >>> stats = gm.collect({"host.w": torch.ones(9), "seed.w": torch.full((4,), 0.5)})
    >>> gm.group_ratio(stats.group({"host": r"^host", "seed": r"^seed"}), "seed", "host")
    tensor(0.5000, dtype=torch.float64)
    """
    # true for NaN too, without math.isnan, which no Dynamo asks of a number that changes
    if not isinstance(floor, (int, float)) or not floor >= 0:
        msg = f"group_ratio: floor must be a number that is not negative, got {floor}"
        raise ValueError(msg)
    if not isinstance(grouped, TensorStats):
        msg = f"group_ratio: expected the TensorStats that group returns, got {type(grouped).__name__}"
        raise TypeError(msg)
    one = isinstance(numerator, str)
    above = [_row(grouped, name) for name in ([numerator] if isinstance(numerator, str) else numerator)]
    below = _row(grouped, denominator)
    norms, sizes = grouped.norm, grouped.numel
    scaled = norms / derived.sqrt(sizes.clamp(min=1.0))
    nothing = (sizes == 0) | (norms < floor) | (norms == 0)
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
        shown = ", ".join(map(repr, grouped.names[:_NAMES])) or "none"
        more = f" and {len(grouped.names) - _NAMES} more; are these groups?" if grouped.names[_NAMES:] else ""
        msg = f"group_ratio: no group {name!r}; there are {shown}{more}"
        raise KeyError(msg)
    return grouped.names.index(name)
