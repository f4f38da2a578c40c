"""The values of a `Report` for all its tensors together, as plain Python values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradiometer.columns import TENSORS, Flag
from gradiometer.stats.health_values import HealthValues
from gradiometer.stats.table_report import TableReport
from gradiometer.stats.tensor_report import TensorReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class HostValues(HealthValues[float, bool], TableReport[TensorReport]):
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
    def found_inf(self) -> bool:
        """Whether any element of any tensor is NaN or infinite."""
        # a replica that is not counted may have a NaN or Inf, too
        return TENSORS.value(self._merged, "n_nonfinite").item() > 0 or bool(self.ranks)

    @property
    def skipped(self) -> bool:
        """Whether this step is skipped: ``skip_nonfinite`` is set, and an element is not finite."""
        return self.skip_nonfinite and self.found_inf

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

    def _computed(self, function: Callable[..., Tensor], *options: Any) -> Any:
        return function(self._columns, self._flags, *options).item()
