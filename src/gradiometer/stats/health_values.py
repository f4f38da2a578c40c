"""The values of all tensors together: of `TensorStats` on their device, and of a `Report` in plain Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload

from gradiometer.columns.health import (
    EXPLODING_WEIGHT,
    HEALTH,
    MAX_NORM_RATIO,
    MAX_ZERO_FRACTION,
    VANISHING_WEIGHT,
    is_healthy,
    score,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

V = TypeVar("V")
Number = TypeVar("Number")
Truth = TypeVar("Truth")


class OfAll(Generic[V]):
    """A read-only attribute that the function of its name in `HEALTH` computes."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, values: None, owner: type) -> Self: ...

    @overload
    def __get__(self, values: HealthValues[Any, Any], owner: type) -> V: ...

    def __get__(self, values: HealthValues[Any, Any] | None, owner: type) -> Self | V:
        if values is None:
            return self
        found: V = values._computed(HEALTH[self._name])  # noqa: SLF001 of the class that this is a part of
        return found


class HealthValues(Generic[Number, Truth]):
    """Values of all tensors together: 0-d tensors of stats, plain values of a report."""

    has_vanishing = OfAll[Truth]()
    """Whether any tensor is flagged ``VANISHING``."""

    has_exploding = OfAll[Truth]()
    """Whether any tensor is flagged ``EXPLODING``."""

    min_norm = OfAll[Number]()
    """Smallest norm of a tensor with elements, NaN with any NaN; 0 with none."""

    max_norm = OfAll[Number]()
    """Largest norm of a tensor, NaN with any NaN; 0 with none."""

    norm_ratio = OfAll[Number]()
    """``max_norm / max(min_norm, 1e-10)``; 0 with none."""

    is_healthy = OfAll[Truth]()
    """Whether all elements are finite, nothing explodes, norm ratio < 1000 and zero fraction < 0.5."""

    total_norm = OfAll[Number]()
    """L2 norm of all tensors together; 0 with none."""

    @property
    def health(self) -> Number:
        """Health from 0.0 to 1.0 (nothing vanishes or explodes), see `health_score`."""
        return self.health_score()

    def health_score(
        self, *, vanishing: float = VANISHING_WEIGHT, exploding: float = EXPLODING_WEIGHT
    ) -> Number:
        """Return ``clamp(1 - vanishing * n_vanishing / T - exploding * n_exploding / T, 0, 1)``.

        0.0 if an element or the total norm is not finite; 1.0 without tensors.

        Args:
            vanishing: weight of the share of tensors flagged ``VANISHING``.
            exploding: weight of the share of tensors flagged ``EXPLODING``.

        Raises:
            ValueError: for a weight that is negative or not finite.
        """
        found: Number = self._computed(score, vanishing, exploding, self._num_measured())
        return found

    def is_healthy_within(
        self, *, norm_ratio: float = MAX_NORM_RATIO, zero_fraction: float = MAX_ZERO_FRACTION
    ) -> Truth:
        """Return `is_healthy` with the given limits.

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
        found: Truth = self._computed(is_healthy, norm_ratio, zero_fraction)
        return found

    def _computed(self, function: Callable[..., Tensor], *options: Any) -> Any:
        """Return what a function of the columns and flags computes."""
        raise NotImplementedError

    def _num_measured(self) -> Tensor | None:
        """Return the number of rows that some rank has measured, 0-d float64; None: all."""
        return None
