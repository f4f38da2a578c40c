"""ActivationReport: statistics of activations and their gradients on the host, by name, in plain Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from gradiometer.columns import ACTIVATION_INDEX, activation_value
from gradiometer.stats import text_table
from gradiometer.stats.tensor_report import frame
from gradiometer.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd
    from torch import Tensor

__all__ = ["ActivationReport", "ActivationRow"]

_NOTHING: Final = (
    "nothing measured: no activations (they are measured in training mode; names= of gm.Taps are "
    "those of calls of gm.tap)"
)
_HEADER: Final = (
    *("name", "elements", "rms", "abs max", "outlier", "kurtosis", "zero %", "dead channels"),
    *("calls", "NaN", "±Inf"),
)


@dataclass(frozen=True)
class ActivationRow:
    """Statistics of one activation or gradient, of all calls of a step; named as in `ActivationStats`."""

    name: str
    numel: int
    n_calls: int
    norm: float
    rms: float
    mean: float
    std: float
    abs_max: float
    outlier_ratio: float
    kurtosis: float
    n_zero: int
    zero_fraction: float
    n_channels: int
    n_zero_channels: int
    zero_channel_fraction: float
    n_nan: int
    n_inf: int


_VALUES: Final = tuple([field.name for field in fields(ActivationRow)][1:])
_COUNTS: Final = {"numel", "n_inf", *[name for name in ACTIVATION_INDEX if name.startswith("n_")]}


class ActivationReport(Mapping[str, ActivationRow]):
    """Statistics of activations of one step, on the host: a mapping from names to `ActivationRow`.

    ``print(report)`` shows a table in the order of the model. Activations that were not measured are left
    out.

    Attributes:
        names: the names of the rows.

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> taps = gm.Taps(model, {"relu": r"^1$"})
    >>> _ = model(torch.ones(8, 2))
    >>> report = taps.stats().materialize()
    >>> report["1.out"].numel, report["1.out"].n_calls
    (16, 1)
    """

    def __init__(self, names: tuple[str, ...], columns: Tensor) -> None:
        """Create a report from ``columns``, ``(T, A) float64`` on the host."""
        kept = [row > 0 for row in columns[:, ACTIVATION_INDEX["n_calls"]].tolist()]
        self.names = tuple([name for name, keep in zip(names, kept, strict=True) if keep])
        self._columns = columns[kept] if kept else columns

    @cached_property
    def _rows(self) -> dict[str, ActivationRow]:
        values = [activation_value(self._columns, name).tolist() for name in _VALUES]
        values = [
            list(map(int, column)) if name in _COUNTS else column
            for name, column in zip(_VALUES, values, strict=True)
        ]
        return {
            name: ActivationRow(name, *row)
            for name, row in zip(self.names, zip(*values, strict=True), strict=True)
        }

    def __getitem__(self, name: str) -> ActivationRow:
        """Return one row."""
        try:
            return self._rows[name]
        except KeyError:
            msg = f"no activation {name!r} in this report; see report.names"
            raise KeyError(msg) from None

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, in order."""
        return iter(self.names)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.names)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return plain Python values, a dict per row."""
        return {name: asdict(row) for name, row in self.items()}

    def to_frame(self) -> pd.DataFrame:
        """Return a pandas DataFrame, a row per activation, indexed by name.

        Raises:
            ImportError: without pandas; ``pip install 'gradiometer[frame]'`` installs it.
        """
        return frame(self.to_dict(), "name", list(_VALUES))

    def to_string(self, max_rows: int | None = 40) -> str:
        """Return the table that ``print`` shows.

        Args:
            max_rows: maximum number of rows; None for all.
        """
        if not self.names:
            return _NOTHING
        rows = list(self.values())
        shown = rows if max_rows is None else rows[:max_rows]
        lines, rule = text_table.aligned(
            [_HEADER, *text_table.with_short_names([_cells(row) for row in shown])]
        )
        more = [f"… {len(rows) - len(shown)} more"] if len(shown) < len(rows) else []
        return "\n".join([self._headline(), rule, lines[0], rule, *lines[1:], *more])

    def __str__(self) -> str:
        """Return a table in the order of the model, truncated for long models."""
        return self.to_string()

    def __repr__(self) -> str:
        """Return a one-line summary."""
        return f"<ActivationReport: {self._headline()}>"

    def _headline(self) -> str:
        return f"{len(self)} rows" if self.names else _NOTHING


def _cells(row: ActivationRow) -> tuple[str, ...]:
    return (
        printable(row.name),
        text_table.count(row.numel),
        *(text_table.number(x) for x in (row.rms, row.abs_max, row.outlier_ratio, row.kurtosis)),
        text_table.percent(row.zero_fraction),
        f"{row.n_zero_channels} of {row.n_channels}" if row.n_zero_channels else "-",
        str(row.n_calls),
        *(text_table.count(x) if x else "-" for x in (row.n_nan, row.n_inf)),
    )
