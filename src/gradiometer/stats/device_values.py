"""The values of statistics as tensors on the device of their columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, overload

import torch

from gradiometer.columns import (
    EXPLODING_WEIGHT,
    HEALTH,
    MAX_NORM_RATIO,
    MAX_ZERO_FRACTION,
    TENSORS,
    VANISHING_WEIGHT,
    is_healthy,
    score,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def _of_rows(name: str, stats: Any) -> Tensor:
    value: Tensor = stats.schema.value(stats.columns, name)
    return value


def _of_all(name: str, stats: Any) -> Tensor:
    return HEALTH[name](stats.columns, stats.flags)


class DeviceValue:
    """A read-only attribute that is computed from the columns of stats under its own name.

    Without a function it is the column or derived value of that name, of each row.
    """

    def __init__(self, compute: Callable[[str, Any], Tensor] = _of_rows) -> None:
        self._compute = compute

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, stats: None, owner: type) -> Self: ...

    @overload
    def __get__(self, stats: object, owner: type) -> Tensor: ...

    def __get__(self, stats: object | None, owner: type) -> Self | Tensor:
        return self if stats is None else self._compute(self._name, stats)


class ElementValues:
    """Raw columns and derived values of the elements of each tensor, by name."""

    # raw columns

    numel = DeviceValue()
    """Elements, ``(T,) float64``."""

    sumsq = DeviceValue()
    """Sum of squares of the finite elements, ``(T,) float64``."""

    sum = DeviceValue()
    """Sum of the finite elements, ``(T,) float64``."""

    n_zero = DeviceValue()
    """Elements equal to 0, including -0, ``(T,) float64``."""

    n_nan = DeviceValue()
    """NaN elements, ``(T,) float64``."""

    n_posinf = DeviceValue()
    """+Inf elements, ``(T,) float64``."""

    n_neginf = DeviceValue()
    """-Inf elements, ``(T,) float64``."""

    abs_max = DeviceValue()
    """Largest finite magnitude, 0 if there is none, ``(T,) float64``."""

    # derived values

    n_inf = DeviceValue()
    """Infinite elements of either sign, ``(T,) float64``."""

    n_nonfinite = DeviceValue()
    """NaN and infinite elements, ``(T,) float64``."""

    finite_norm = DeviceValue()
    """L2 norm of the finite elements, ``sqrt(sumsq)``, ``(T,) float64``."""

    norm = DeviceValue()
    """L2 norm as torch defines it: NaN with any NaN, inf with any Inf, ``(T,) float64``."""

    rms = DeviceValue()
    """Root mean square of the finite elements, ``(T,) float64``."""

    mean = DeviceValue()
    """Mean of the finite elements, ``(T,) float64``."""

    std = DeviceValue()
    """Population standard deviation of the finite elements (no correction), ``(T,) float64``.

    Computed as ``sqrt(sumsq/n - mean**2)``, which loses digits if the mean is much larger than the spread.
    """

    zero_fraction = DeviceValue()
    """Share of elements equal to 0, ``(T,) float64``."""


class HealthValues:
    """Values of all tensors together, for decisions on the device."""

    columns: Tensor
    flags: Tensor
    origin: Tensor | None

    total_zero_fraction = DeviceValue(_of_all)
    """Share of all elements equal to 0; 0-d float64."""

    total_n_nan = DeviceValue(_of_all)
    """NaN elements of all tensors; 0-d float64."""

    total_n_inf = DeviceValue(_of_all)
    """Infinite elements of all tensors; 0-d float64."""

    has_vanishing = DeviceValue(_of_all)
    """Whether any tensor is flagged ``VANISHING``; 0-d bool."""

    has_exploding = DeviceValue(_of_all)
    """Whether any tensor is flagged ``EXPLODING``; 0-d bool."""

    min_norm = DeviceValue(_of_all)
    """Smallest norm of a tensor with elements, NaN with any NaN; 0-d float64; 0 with none."""

    max_norm = DeviceValue(_of_all)
    """Largest norm of a tensor, NaN with any NaN; 0-d float64; 0 with none."""

    norm_ratio = DeviceValue(_of_all)
    """``max_norm / max(min_norm, 1e-10)``; 0-d float64; 0 with none."""

    is_healthy = DeviceValue(_of_all)
    """Whether all elements are finite, nothing explodes, norm ratio < 1000, zero share < 0.5; 0-d bool."""

    @property
    def total_norm(self) -> Tensor:
        """L2 norm of all tensors together, 0-d float64; 0 with none."""
        return TENSORS.value(TENSORS.merge_rows(self.columns), "norm")

    @property
    def found_inf(self) -> Tensor:
        """1.0 if any element is NaN or infinite, else 0.0; 0-d float32.

        GradScaler and fused optimizers accept it as ``found_inf``.
        """
        # true for NaN too: the columns are NaN if the ranks' reductions did not match
        found = TENSORS.value(TENSORS.merge_rows(self.columns), "n_nonfinite") != 0
        if self.origin is not None:
            # a replica that is not counted may have a NaN or Inf, too
            found = found | (self.origin >= 0).any()
        return found.to(torch.float32)

    @property
    def health(self) -> Tensor:
        """Health from 0.0 to 1.0 (nothing vanishes or explodes), see `health_score`; 0-d float64."""
        return self.health_score()

    def health_score(
        self,
        *,
        vanishing: float = VANISHING_WEIGHT,
        exploding: float = EXPLODING_WEIGHT,
    ) -> Tensor:
        """Return ``clamp(1 - vanishing * n_vanishing / T - exploding * n_exploding / T, 0, 1)``, 0-d float64.

        0.0 if an element or the total norm is not finite; 1.0 without tensors.

        Args:
            vanishing: weight of the share of tensors flagged ``VANISHING``.
            exploding: weight of the share of tensors flagged ``EXPLODING``.

        Raises:
            ValueError: for a weight that is negative or not finite.
        """
        measured = None if self.origin is None else (self.origin > -2).sum(dtype=torch.float64)
        return score(self.columns, self.flags, vanishing, exploding, measured)

    def is_healthy_within(
        self, *, norm_ratio: float = MAX_NORM_RATIO, zero_fraction: float = MAX_ZERO_FRACTION
    ) -> Tensor:
        """Return `is_healthy` with the given limits; 0-d bool.

        Args:
            norm_ratio: the largest norm must be below ``norm_ratio`` times the smallest; ``math.inf`` for no
                limit.
            zero_fraction: the share of zeros must be below ``zero_fraction``; ``math.inf`` for no limit.

        Raises:
            ValueError: for a limit that is negative, NaN or not a number.

        >>> import torch, gradiometer as gm
        >>> stats = gm.collect([torch.ones(1), torch.tensor([0.0, 0.0, 20.0])])
        >>> bool(stats.is_healthy_within(norm_ratio=10.0)), bool(stats.is_healthy_within(zero_fraction=0.6))
        (False, True)
        """
        return is_healthy(self.columns, self.flags, norm_ratio, zero_fraction)
