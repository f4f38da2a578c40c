"""PairStats: the raw columns of named pairs of tensors on the device, and the values derived from them."""

from __future__ import annotations

from dataclasses import dataclass

from gradiometer.columns import PAIRS
from gradiometer.stats.device_values import PairValues
from gradiometer.stats.named_stats import NamedStats
from gradiometer.stats.pair_report import PairReport


@dataclass(frozen=True, eq=False, repr=False, init=False)
class PairStats(PairValues, NamedStats[PairReport]):
    """Statistics of T named pairs of tensors, on their device. Only `materialize` waits for the device.

    A pair is a tensor b and a later one a, such as weights before and after a step, with u = a - b; for
    updates there is also a gradient g. Sums are in fp64, over the elements that are finite in both. PairStats
    is a pytree, so compiled functions can take and return it. Later changes of the tensors do not change it.

    Attributes:
        names: T names, one per row.
        columns: ``(T, P) float64``, the raw columns in the order of ``gm.PAIR_COLUMNS``.
        sharding, origin, local: as for `TensorStats`.

    Every raw column and derived value is a property too, ``(T,) float64``; the page "Columns and flags" of
    the reference lists them:

    >>> import torch, gradiometer as gm
    >>> stats = gm.compare({"w": torch.tensor([3.0, 4.5])}, {"w": torch.tensor([3.0, 4.0])})
    >>> stats.update_ratio, stats.n_unchanged
    (tensor([0.1000], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """

    schema = PAIRS
    _noun = "pair"
