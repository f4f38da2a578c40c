"""ProjectionStats: random projections of named tensors, which estimate distances and cosines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from gradiometer.columns import DEFAULT_PROJECTIONS, FIRST_PROJECTION, PROJECTIONS, sqrt
from gradiometer.stats.named_stats import NamedStats
from gradiometer.stats.table_report import TableReport

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False, repr=False, init=False)
class ProjectionStats(NamedStats[TableReport[Any]]):
    """Projections of T named tensors on random signs, on their device; nothing here waits for it.

    They estimate distances and cosines between tensors of one name, such as those of two runs, ranks,
    micro-batches or steps, without keeping a tensor. With k projections, the square of a distance has a
    relative standard deviation of at most ``sqrt(2 / k)``, 35 % for 16. ProjectionStats is a pytree.

    Attributes:
        names: T names, one per row.
        columns: ``(T, 3 + k) float64``: number of elements, sum of squares, number of NaN and infinite
            elements, and k projections; all merge by sum.
        sharding, origin, local: as in `TensorStats`.

    >>> import torch, gradiometer as gm
    >>> a, b = torch.linspace(-1, 1, 1000), torch.linspace(-1, 1, 1000) ** 3
    >>> left, right = (gm.collect_projections({"w": x}, projections=128) for x in (a, b))
    >>> bool((left.distance(right) - (a - b).norm()).abs() < 0.2 * (a - b).norm())
    True
    """

    schema = PROJECTIONS[DEFAULT_PROJECTIONS]
    _noun = "tensor"

    @property
    def projections(self) -> Tensor:
        """The projections, ``(T, k) float64``."""
        return self.columns[:, FIRST_PROJECTION:]

    def distance(self, other: ProjectionStats) -> Tensor:
        """Return estimates of the L2 norms of the differences from other tensors, ``(T,) float64``.

        Over finite elements; NaN where the numbers of elements differ. Both need the same seed.

        Raises:
            ValueError: unless both have the same names and the same number of projections.
        """
        difference = self.projections - self._of(other)
        return sqrt((difference * difference).mean(dim=1))

    def cosine(self, other: ProjectionStats) -> Tensor:
        """Return estimates of the cosines with other tensors, ``(T,) float64``; NaN if a norm is 0.

        The standard deviation of a cosine c is about ``(1 - c**2) / sqrt(k)``. Equal tensors have 1.

        Raises:
            ValueError: as for `distance`.
        """
        # of the projections' own norms: what they have in common cancels
        mine, others = self.projections, self._of(other)
        norms = sqrt((mine * mine).sum(dim=1)) * sqrt((others * others).sum(dim=1))
        return (mine * others).sum(dim=1) / norms

    def _of(self, other: ProjectionStats) -> Tensor:
        """Return the other projections, on this device."""
        if self.names != other.names:
            differing = [
                x for x in (*self.names, *other.names) if x not in self.names or x not in other.names
            ]
            which = f"{differing[0]!r} is only in one" if differing else "their order differs"
            raise ValueError(f"projections of different tensors: {which}; give both the same names")
        if self.columns.shape != other.columns.shape:
            counts = f"{self.projections.shape[1]} and {other.projections.shape[1]}"
            raise ValueError(f"different numbers of projections, {counts}; project both with the same number")
        columns = other.columns.to(self.columns.device, non_blocking=True)
        is_same = columns[:, :1] == self.columns[:, :1]
        return torch.where(is_same, columns[:, FIRST_PROJECTION:], torch.nan)


def _with(count: int) -> type[ProjectionStats]:
    if count == DEFAULT_PROJECTIONS:
        return ProjectionStats
    made = type(f"ProjectionStats{count}", (ProjectionStats,), {"schema": PROJECTIONS[count]})
    return dataclass(frozen=True, eq=False, repr=False, init=False)(made)


CLASSES: Final = {count: _with(count) for count in PROJECTIONS}
"""The classes by number of projections."""
# pickle looks for them here
globals().update({kind.__name__: kind for kind in CLASSES.values()})
