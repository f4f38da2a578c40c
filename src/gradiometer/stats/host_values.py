"""The values of a `Report` for all its tensors together, as plain Python values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradiometer.columns import (
    EXPLODING_WEIGHT,
    HEALTH,
    MAX_NORM_RATIO,
    MAX_ZERO_FRACTION,
    TENSORS,
    VANISHING_WEIGHT,
    Flag,
    is_healthy,
    score,
)
from gradiometer.stats.table_report import TableReport
from gradiometer.stats.tensor_report import TensorReport

if TYPE_CHECKING:
    from torch import Tensor


class HostValues(TableReport[TensorReport]):
    """Names of tensors by flag, and values of all tensors together."""

    skip_nonfinite: bool
    _flags: Tensor

    @property
    def nan(self) -> list[str]:
        """Names of tensors that hold a NaN."""
        return self.flagged(Flag.NAN)

    @property
    def inf(self) -> list[str]:
        """Names of tensors that hold +Inf or -Inf."""
        return self.flagged(Flag.INF)

    @property
    def vanishing(self) -> list[str]:
        """Names of tensors with a finite norm below the threshold."""
        return self.flagged(Flag.VANISHING)

    @property
    def exploding(self) -> list[str]:
        """Names of tensors whose norm is above the threshold or, without ``skip_nonfinite``, not finite."""
        return self.flagged(Flag.EXPLODING)

    @property
    def dead(self) -> list[str]:
        """Names of tensors with at least the threshold's share of zeros (all of them, by default)."""
        return self.flagged(Flag.DEAD)

    @property
    def total_norm(self) -> float:
        """L2 norm of all tensors together; 0.0 with none."""
        return TENSORS.value(self._merged, "norm").item()

    @property
    def found_inf(self) -> bool:
        """Whether any element of any tensor is NaN or infinite."""
        # a replica that is not counted may have a NaN or Inf, too
        return TENSORS.value(self._merged, "n_nonfinite").item() > 0 or bool(self.ranks)

    @property
    def skipped(self) -> bool:
        """Whether this step is skipped: ``skip_nonfinite`` is set, and an element is not finite."""
        return self.skip_nonfinite and self.found_inf

    @property
    def health(self) -> float:
        """Health, from 0.0 to 1.0: ``clamp(1 - 0.5 * vanishing / T - 0.8 * exploding / T, 0, 1)``.

        0.0 if an element or the total norm is not finite; 1.0 without tensors.
        """
        return float(self._of_all("health"))

    def health_score(
        self,
        *,
        vanishing: float = VANISHING_WEIGHT,
        exploding: float = EXPLODING_WEIGHT,
    ) -> float:
        """Return the health with other weights, which must be finite and non-negative."""
        return score(self._columns, self._flags, vanishing, exploding).item()

    @property
    def has_vanishing(self) -> bool:
        """Whether any tensor is vanishing."""
        return bool(self._of_all("has_vanishing"))

    @property
    def has_exploding(self) -> bool:
        """Whether any tensor is exploding."""
        return bool(self._of_all("has_exploding"))

    @property
    def min_norm(self) -> float:
        """Smallest norm of a tensor with elements, NaN with any NaN; 0.0 with none."""
        return float(self._of_all("min_norm"))

    @property
    def max_norm(self) -> float:
        """Largest norm of a tensor, NaN with any NaN; 0.0 with none."""
        return float(self._of_all("max_norm"))

    @property
    def norm_ratio(self) -> float:
        """``max_norm / max(min_norm, 1e-10)``; 0.0 with no tensors."""
        return float(self._of_all("norm_ratio"))

    @property
    def zero_fraction(self) -> float:
        """Share of all elements equal to 0."""
        return TENSORS.value(self._merged, "zero_fraction").item()

    @property
    def n_nan(self) -> int:
        """NaN elements of all tensors."""
        return self.total.n_nan

    @property
    def n_inf(self) -> int:
        """Infinite elements of all tensors."""
        return self.total.n_inf

    @property
    def is_healthy(self) -> bool:
        """Whether all elements are finite, nothing explodes, norm ratio < 1000 and zero fraction < 0.5."""
        return bool(self._of_all("is_healthy"))

    def is_healthy_within(
        self, *, norm_ratio: float = MAX_NORM_RATIO, zero_fraction: float = MAX_ZERO_FRACTION
    ) -> bool:
        """Return `is_healthy` with the given limits; see `TensorStats.is_healthy_within`."""
        return bool(is_healthy(self._columns, self._flags, norm_ratio, zero_fraction))

    def _of_all(self, name: str) -> float:
        return HEALTH[name](self._columns, self._flags).item()
