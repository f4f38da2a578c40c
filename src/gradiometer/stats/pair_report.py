"""PairReport: statistics of pairs of tensors on the host, by name, in plain Python."""

from __future__ import annotations

from dataclasses import dataclass

from gradiometer.columns import PAIRS
from gradiometer.stats import text_table
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
