"""PairStats: the raw columns of named pairs of tensors on the device, and the values derived from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradiometer.columns import NUM_PAIR_COLUMNS, NUM_PAIR_SUMS, derived, pair_value
from gradiometer.distributed import PAIRS, Sharding, differing_calls
from gradiometer.stats import stats_pytree
from gradiometer.stats.device_values import DeviceValue
from gradiometer.stats.host_copy import Pending, fetch, outside_of_a_graph
from gradiometer.stats.named_stats import NamedStats
from gradiometer.stats.pair_report import PairReport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradiometer.distributed import Ranks

__all__ = ["PairStats"]


def _of_rows(name: str, stats: PairStats) -> Tensor:
    return pair_value(stats.columns, name)


def _merge_rows(columns: Tensor) -> Tensor:
    return derived.merge_rows(columns, NUM_PAIR_SUMS)


@dataclass(frozen=True, eq=False, repr=False, init=False)
class PairStats(NamedStats):
    """Statistics of T named pairs of tensors, on their device. Only `materialize` waits for the device.

    A pair is a tensor b and a later one a, such as weights before and after a step, with u = a - b; for
    updates there is also a gradient g. Sums are in fp64, over the elements that are finite in both. PairStats
    is a pytree, so compiled functions can take and return it. Later changes of the tensors do not change it.

    Attributes:
        names: T names, one per row.
        columns: ``(T, P) float64``, the raw columns in the order of ``gm.PAIR_COLUMNS``.
        sharding: as for `TensorStats`.
        origin: ``(T,) float64``, after `reduce`: the first rank, by its index in the group, with a NaN or Inf
            in its part of the pair; -1 if none has; -2 if no rank measured it. None before `reduce`.
        local: after `reduce`: the statistics of this process before it.

    Every raw column and derived value is a property too, ``(T,) float64``:

    >>> import torch, gradiometer as gm
    >>> stats = gm.compare({"w": torch.tensor([3.0, 4.5])}, {"w": torch.tensor([3.0, 4.0])})
    >>> stats.update_ratio, stats.n_unchanged
    (tensor([0.1000], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """

    _ROW = "pair"

    names: tuple[str, ...]
    columns: Tensor
    sharding: Sharding | None = None
    origin: Tensor | None = None
    local: PairStats | None = None

    def __init__(
        self,
        names: tuple[str, ...],
        columns: Tensor,
        sharding: Sharding | None = None,
        origin: Tensor | None = None,
        local: PairStats | None = None,
    ) -> None:
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "columns", columns)
        # None stays on the class, see TensorStats
        for name, value in (("sharding", sharding), ("origin", origin), ("local", local)):
            if value is not None:
                object.__setattr__(self, name, value)

    numel = DeviceValue(_of_rows)
    """Elements, ``(T,) float64``."""

    sumsq_a = DeviceValue(_of_rows)
    """Sum of a**2, ``(T,) float64``."""

    sumsq_b = DeviceValue(_of_rows)
    """Sum of b**2, ``(T,) float64``."""

    dot_ab = DeviceValue(_of_rows)
    """Sum of a * b, ``(T,) float64``."""

    sumsq_u = DeviceValue(_of_rows)
    """Sum of u**2, ``(T,) float64``."""

    sum_u = DeviceValue(_of_rows)
    """Sum of u, ``(T,) float64``."""

    n_unchanged = DeviceValue(_of_rows)
    """Elements that have the same bits in a and b, ``(T,) float64``.

    For two dtypes: elements that are the same number, with the same sign if they are 0.
    """

    sumsq_g = DeviceValue(_of_rows)
    """Sum of g**2, ``(T,) float64``; 0 without a gradient."""

    dot_ug = DeviceValue(_of_rows)
    """Sum of u * g, ``(T,) float64``."""

    n_nonzero_g = DeviceValue(_of_rows)
    """Elements whose gradient is not 0, ``(T,) float64``."""

    n_stuck = DeviceValue(_of_rows)
    """Elements that are unchanged although their gradient is not 0, ``(T,) float64``."""

    n_nan = DeviceValue(_of_rows)
    """Elements that are NaN in a or b, ``(T,) float64``."""

    n_posinf = DeviceValue(_of_rows)
    """Elements without NaN that are +Inf in a, or -Inf in b and finite in a, ``(T,) float64``."""

    n_neginf = DeviceValue(_of_rows)
    """Elements without NaN that are -Inf in a, or +Inf in b and finite in a, ``(T,) float64``."""

    n_inf = DeviceValue(_of_rows)
    """``n_posinf + n_neginf``, ``(T,) float64``."""

    n_nonfinite = DeviceValue(_of_rows)
    """``n_nan + n_inf``, elements that are NaN or infinite in a or b, ``(T,) float64``."""

    abs_max_u = DeviceValue(_of_rows)
    """Largest |u|, ``(T,) float64``."""

    norm_a = DeviceValue(_of_rows)
    """L2 norm of a, ``(T,) float64``."""

    norm_b = DeviceValue(_of_rows)
    """L2 norm of b, ``(T,) float64``."""

    norm_u = DeviceValue(_of_rows)
    """L2 norm of u, ``(T,) float64``."""

    norm_g = DeviceValue(_of_rows)
    """L2 norm of g, ``(T,) float64``."""

    rms_u = DeviceValue(_of_rows)
    """Root mean square of u, ``(T,) float64``."""

    update_ratio = DeviceValue(_of_rows)
    """``norm_u / norm_b``, ``(T,) float64``; 0 if nothing changed, inf if only b is 0."""

    cosine = DeviceValue(_of_rows)
    """Cosine of a and b, ``(T,) float64``; NaN if one of them is 0."""

    descent_cosine = DeviceValue(_of_rows)
    """Cosine of u and -g, ``(T,) float64``: 1 for a step of gradient descent; NaN if one of them is 0."""

    unchanged_fraction = DeviceValue(_of_rows)
    """``n_unchanged / numel``, ``(T,) float64``."""

    stuck_fraction = DeviceValue(_of_rows)
    """``n_stuck / n_nonzero_g``, ``(T,) float64``: the share of the updates that rounding has lost."""

    @property
    def total(self) -> Tensor:
        """All rows merged into one, ``(P,) float64``."""
        return _merge_rows(self.columns)

    def total_value(self, name: str) -> Tensor:
        """Return a raw column or derived value of all pairs together, 0-d float64.

        Raises:
            KeyError: for an unknown name.

        >>> import torch, gradiometer as gm
        >>> gm.compare([torch.ones(2), torch.ones(2)], [torch.zeros(2), torch.ones(2)]).total_value("norm_u")
        tensor(1.4142, dtype=torch.float64)
        """
        return pair_value(self.total, name)

    def _grouped(self, indices: Mapping[str, Sequence[int]]) -> PairStats:
        groups = list(indices.values())
        columns = derived.merge_groups(self.columns, groups, _merge_rows)
        origin = (
            None if self.origin is None else derived.merge_groups(self.origin, groups, derived.first_rank)
        )
        return replace(self, names=tuple(indices), columns=columns, origin=origin, local=None)

    def merge(self, other: PairStats) -> PairStats:
        """Merge with stats of the same names, as if pairs of the same name were concatenated.

        Raises:
            ValueError: if the names differ, or if only one of the two is reduced.
            TypeError: if ``other`` is not PairStats.
        """
        return self._merged(other, NUM_PAIR_SUMS)

    def reduced_by(self, ranks: Ranks, what: str, **arguments: Any) -> PairStats:
        """Do the work of `reduce`; the calling function and its arguments are the same on all ranks."""
        columns, origin, *_ = ranks.reduce(
            self.names, self.columns, layout=PAIRS, caller=f"{what} of pairs", arguments=arguments
        )
        return PairStats(ranks.names, columns, origin=origin, local=self)

    def materialize(self) -> PairReport:
        """Copy everything to the host in one transfer and return it as a `PairReport`. Waits for the device.

        Raises:
            RuntimeError: inside a compiled function, or while a CUDA graph is captured.
        """
        outside_of_a_graph("materialize")
        return self.unpacked(*fetch([self.packed()]))

    def materialize_async(self) -> Pending[PairReport]:
        """Start the copy that `materialize` makes, and return at once; as `TensorStats.materialize_async`."""
        outside_of_a_graph("materialize_async")
        return Pending([self.packed()], lambda copies: self.unpacked(*copies))

    def packed(self) -> Tensor:
        """Return columns and, after `reduce`, origins as one matrix, ``(T, P ... P + 1) float64``."""
        return (
            self.columns
            if self.origin is None
            else torch.cat([self.columns, self.origin.unsqueeze(1)], dim=1)
        )

    def unpacked(self, packed: Tensor) -> PairReport:
        """Return the `PairReport` of a `packed` matrix that was copied to the host."""
        names, ranks = self.names, None
        if self.origin is not None:
            if bool(packed[:, 0].isnan().any()):
                raise differing_calls(int(packed[0, -1]))
            # a pair that no rank has measured gets no row, as with one rank
            keep = packed[:, -1] > -2
            names, packed = tuple(compress(names, keep.tolist())), packed[keep]
            first = zip(names, packed[:, -1].tolist(), strict=True)
            ranks = {name: int(rank) for name, rank in first if rank >= 0}
        return PairReport(names, packed[:, :NUM_PAIR_COLUMNS], ranks=ranks, is_local=self.is_local)


stats_pytree.register(PairStats)
