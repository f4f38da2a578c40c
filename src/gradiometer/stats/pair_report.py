"""PairReport: statistics of pairs of tensors on the host, by name, in plain Python."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from gradiometer.columns import NUM_PAIR_SUMS, derived, pair_value
from gradiometer.stats import text_table
from gradiometer.stats.tensor_report import frame
from gradiometer.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd
    from torch import Tensor

__all__ = ["PairReport", "PairRow"]

_NOTHING: Final = "nothing measured: no pairs"
_HEADER: Final = (
    *("name", "elements", "update ratio", "rms", "abs max", "cos(u,-g)", "unchanged %", "stuck %"),
    *("NaN", "±Inf"),
)


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


_VALUES: Final = tuple([field.name for field in fields(PairRow)][1:])
_COUNTS: Final = {field.name for field in fields(PairRow) if field.type == "int"}


class PairReport(Mapping[str, PairRow]):
    """Statistics of named pairs at one moment, on the host: a mapping from names to `PairRow`.

    ``print(report)`` shows a table: pairs with NaN or Inf first, then by update ratio.

    Attributes:
        names: the pairs' names.
        total: a `PairRow` of all pairs together, named ``"total"``.
        is_reduced: whether these are statistics of all ranks.
        is_local: whether tensors are sharded over ranks, and these are statistics of this rank's shards only.
        ranks: for statistics of all ranks: name -> the first rank with a NaN or Inf in its part of the pair.

    >>> import torch, gradiometer as gm
    >>> report = gm.compare({"w": torch.tensor([3.0, 4.5])}, {"w": torch.tensor([3.0, 4.0])}).materialize()
    >>> report["w"].update_ratio, report["w"].unchanged_fraction
    (0.1, 0.5)
    """

    def __init__(
        self,
        names: tuple[str, ...],
        columns: Tensor,
        *,
        ranks: Mapping[str, int] | None = None,
        is_local: bool = False,
    ) -> None:
        """Create a report from ``columns``, ``(T, P) float64`` on the host.

        ``ranks`` is None if the statistics are not those of all ranks.
        """
        self.names = names
        self.is_reduced = ranks is not None
        self.is_local = is_local
        self.ranks = dict(ranks or {})
        self._columns = columns

    @cached_property
    def _rows(self) -> dict[str, PairRow]:
        return {row.name: row for row in _rows_of(self.names, self._columns)}

    @cached_property
    def total(self) -> PairRow:
        """All pairs together."""
        (row,) = _rows_of(("total",), derived.merge_rows(self._columns, NUM_PAIR_SUMS).unsqueeze(0))
        return row

    def __getitem__(self, name: str) -> PairRow:
        """Return one pair's statistics."""
        try:
            return self._rows[name]
        except KeyError:
            msg = f"no pair {name!r} in this report; see report.names"
            raise KeyError(msg) from None

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, in order."""
        return iter(self.names)

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.names)

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values: a dict for all pairs together, and one per pair."""
        return {
            "is_reduced": self.is_reduced,
            "is_local": self.is_local,
            "ranks": dict(self.ranks),
            "total": asdict(self.total),
            "pairs": {name: asdict(row) for name, row in self.items()},
        }

    def to_frame(self) -> pd.DataFrame:
        """Return a pandas DataFrame, a row per pair, indexed by name.

        Raises:
            ImportError: without pandas; ``pip install 'gradiometer[frame]'`` installs it.
        """
        return frame({name: asdict(row) for name, row in self.items()}, "name", list(_VALUES))

    def to_string(self, max_rows: int | None = 20) -> str:
        """Return the table that ``print`` shows.

        Args:
            max_rows: maximum number of pairs; None for all.
        """
        if not self.names:
            return _NOTHING
        rows = sorted(self.values(), key=lambda row: (-row.n_nonfinite, -row.update_ratio))
        shown = rows if max_rows is None else rows[:max_rows]
        cells = [_HEADER, *text_table.with_short_names([_cells(row) for row in shown]), _cells(self.total)]
        lines, rule = text_table.aligned(cells)
        more = [f"… {len(rows) - len(shown)} more"] if len(shown) < len(rows) else []
        return "\n".join([self._headline(), rule, lines[0], rule, *lines[1:-1], *more, rule, lines[-1]])

    def __str__(self) -> str:
        """Return a table, NaN and Inf and large update ratios first, truncated for long models."""
        return self.to_string()

    def __repr__(self) -> str:
        """Return a one-line summary."""
        return f"<PairReport: {self._headline()}>"

    def _headline(self) -> str:
        if not self.names:
            return _NOTHING
        where = " of all ranks" if self.is_reduced else ", this rank's shards only" if self.is_local else ""
        return (
            f"{len(self)} {'pair' if len(self) == 1 else 'pairs'}{where}, "
            f"{text_table.count(self.total.numel)} elements, "
            f"update ratio {text_table.number(self.total.update_ratio)}"
        )


def _rows_of(names: tuple[str, ...], columns: Tensor) -> list[PairRow]:
    values = [pair_value(columns, name).tolist() for name in _VALUES]
    values = [
        list(map(round, column)) if name in _COUNTS else column
        for name, column in zip(_VALUES, values, strict=True)
    ]
    return [PairRow(name, *row) for name, row in zip(names, zip(*values, strict=True), strict=True)]


def _cells(row: PairRow) -> tuple[str, ...]:
    has_gradient = row.norm_g > 0
    return (
        printable(row.name),
        text_table.count(row.numel),
        *(text_table.number(x) for x in (row.update_ratio, row.rms_u, row.abs_max_u)),
        "-" if math.isnan(row.descent_cosine) else f"{row.descent_cosine:.3f}",
        text_table.percent(row.unchanged_fraction),
        text_table.percent(row.stuck_fraction) if has_gradient else "-",
        text_table.count(row.n_nan) if row.n_nan else "-",
        text_table.count(row.n_inf) if row.n_inf else "-",
    )
