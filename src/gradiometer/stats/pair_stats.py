"""Statistics of named pairs of tensors: on the device, and by name in plain Python on the host."""

from __future__ import annotations

from dataclasses import dataclass

from gradiometer.columns import PAIRS
from gradiometer.stats import text_table
from gradiometer.stats.device_values import PairValues
from gradiometer.stats.named_stats import NamedStats
from gradiometer.stats.table_report import TableReport


@dataclass(frozen=True)
class PairRow:
    """One pair's statistics, of ``u = a - b`` and the gradient g; named as in `PairStats`.

    Without a gradient ``norm_g`` is 0, ``descent_cosine`` NaN and ``stuck_fraction`` 0. Counts that are
    estimated from a sample are rounded.
    """

    name: str
    numel: int
    norm_a: float
    norm_b: float
    norm_u: float
    norm_g: float
    rms_u: float
    abs_max_u: float
    update_ratio: float
    cosine: float
    descent_cosine: float
    n_unchanged: int
    unchanged_fraction: float
    n_nonzero_g: int
    n_stuck: int
    stuck_fraction: float
    n_nan: int
    n_posinf: int
    n_neginf: int
    n_inf: int
    n_nonfinite: int


class PairReport(TableReport[PairRow]):
    """Statistics of named pairs at one moment, on the host: a mapping from names to `PairRow`.

    ``print(report)`` shows a table: pairs with NaN or Inf first, then by update ratio.

    Attributes:
        names: the pairs' names.
        total: a `PairRow` of all pairs together, named ``"total"``.
        is_reduced, is_local, ranks: as for `Report`.

    >>> import torch, gradiometer as gm
    >>> report = gm.compare({"w": torch.tensor([3.0, 4.5])}, {"w": torch.tensor([3.0, 4.0])}).materialize()
    >>> report["w"].update_ratio, report["w"].unchanged_fraction
    (0.1, 0.5)
    """

    schema = PAIRS
    _row_class = PairRow
    _noun = "pair"
    _nothing = "nothing measured: no pairs"

    def ordered(self) -> list[PairRow]:
        """Return the rows in the order of the printed table: NaN and Inf first, then by update ratio."""
        return sorted(self.rows(), key=lambda row: (-row.n_nonfinite, -row.update_ratio))

    def _facts(self) -> list[str]:
        return [f"update ratio {text_table.number(self.total.update_ratio)}"]

    def _cell(self, row: PairRow, name: str) -> str:
        # without a gradient nothing is known to be stuck
        return "-" if name == "stuck_fraction" and not row.norm_g > 0 else super()._cell(row, name)


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
