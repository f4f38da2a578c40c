"""Report: statistics on the host, by name, in plain Python; and the copy that brings them there."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradiometer import derived, table
from gradiometer.schema import COLUMN_NAMES, NUM_COLUMNS, Flag, Thresholds

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd

__all__ = ["Pending", "Report", "TensorReport"]

_COUNTS = frozenset({"numel", "n_zero", "n_nan", "n_posinf", "n_neginf", "n_inf", "n_nonfinite"})


@dataclass(frozen=True)
class TensorReport:
    """One tensor's statistics. Means, norms and extremes are those of its finite elements.

    ``norm`` alone is as torch would say it: NaN with any NaN, inf with any Inf. ``std`` is of the
    population.
    """

    name: str
    numel: int
    norm: float
    finite_norm: float
    rms: float
    mean: float
    std: float
    abs_max: float
    zero_fraction: float
    n_zero: int
    n_nan: int
    n_posinf: int
    n_neginf: int
    n_inf: int
    n_nonfinite: int
    sum: float
    sumsq: float
    flags: Flag


def _rows(names: tuple[str, ...], columns: Tensor, flags: list[int]) -> Iterator[TensorReport]:
    fields = [*COLUMN_NAMES, *derived.DERIVED]
    values = [derived.value(columns, field).tolist() for field in fields]
    for i, name in enumerate(names):
        row: dict[str, Any] = {
            field: int(value[i]) if field in _COUNTS else value[i]
            for field, value in zip(fields, values, strict=True)
        }
        yield TensorReport(name=name, flags=Flag(flags[i]), **row)


class Report:
    """Statistics of named tensors at one moment, on the host.

    ``report["layer.0.weight"]`` is one tensor's `TensorReport`; iteration goes over all of them, in
    the order of the model. ``print(report)`` shows a table, worst first.

    Attributes:
        names: the tensors' names.
        thresholds: where the flags begin.
        total: a `TensorReport` of all tensors together, named ``"total"``.

    >>> import torch, gradiometer as gm
    >>> report = gm.collect({"w": torch.tensor([3.0, 4.0]), "b": torch.tensor([float("inf")])}).materialize()
    >>> report["w"].norm, report.total_norm
    (5.0, inf)
    >>> report.inf, report.exploding, report.vanishing
    (['b'], ['b'], [])
    """

    def __init__(self, names: tuple[str, ...], packed: Tensor, thresholds: Thresholds) -> None:
        """``packed``: ``(T, C + 1) float64`` on the host, the raw columns and then the flags."""
        columns, flags = packed[:, :NUM_COLUMNS], packed[:, NUM_COLUMNS].to(torch.int32)
        merged = derived.merge_rows(columns).unsqueeze(0)
        self.names = names
        self.thresholds = thresholds
        self._by_name = {row.name: row for row in _rows(names, columns, flags.tolist())}
        merged_flags = derived.compute_flags(merged, thresholds)
        (self.total,) = _rows(("total",), merged, merged_flags.tolist())

    def __getitem__(self, name: str) -> TensorReport:
        """Return one tensor's statistics."""
        try:
            return self._by_name[name]
        except KeyError:
            msg = f"no tensor {name!r} in this report of {len(self)}; see report.names"
            raise KeyError(msg) from None

    def __contains__(self, name: object) -> bool:
        """Tell whether a tensor of this name was measured."""
        return name in self._by_name

    def __iter__(self) -> Iterator[TensorReport]:
        """Go over the tensors in the order of the model."""
        return iter(self._by_name.values())

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._by_name)

    def flagged(self, flag: Flag) -> list[str]:
        """Return the names of tensors with any of these flags, in the order of the model."""
        return [row.name for row in self if row.flags & flag]

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
        """Names of tensors with a norm above the threshold, or not finite."""
        return self.flagged(Flag.EXPLODING)

    @property
    def dead(self) -> list[str]:
        """Names of tensors with at least the threshold's share of zeros (all of them, by default)."""
        return self.flagged(Flag.DEAD)

    @property
    def measured(self) -> bool:
        """Whether there was any tensor to measure."""
        return len(self) > 0

    @property
    def total_norm(self) -> float:
        """L2 norm of all tensors together; 0.0 with none."""
        return self.total.norm

    @property
    def found_inf(self) -> bool:
        """Whether any element of any tensor is NaN or infinite."""
        return self.total.n_nonfinite > 0

    @property
    def health(self) -> float:
        """From 1.0, nothing flagged, to 0.0: ``clamp(1 - 0.5 * vanishing / T - 0.8 * exploding / T, 0, 1)``.

        0.0 if any element is not finite; 1.0 with no tensors.
        """
        if not self.measured:
            return 1.0
        if self.found_inf:
            return 0.0
        loss = (0.5 * len(self.vanishing) + 0.8 * len(self.exploding)) / len(self)
        return min(1.0, max(0.0, 1.0 - loss))

    def worst_first(self) -> list[TensorReport]:
        """Return the tensors, worst first.

        Not finite, exploding, dead, vanishing (the smallest first), then the rest, each by falling norm.
        """
        ranks = (Flag.NAN | Flag.INF, Flag.EXPLODING, Flag.DEAD, Flag.VANISHING)

        def key(row: TensorReport) -> tuple[int, int, float]:
            rank = next((i for i, flag in enumerate(ranks) if row.flags & flag), len(ranks))
            norm = row.finite_norm if row.flags & Flag.VANISHING else -row.finite_norm
            return rank, -row.n_nonfinite, norm

        return sorted(self, key=key)

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values: totals, thresholds, and a dict per tensor. Norms may be NaN or inf."""
        return {
            "measured": self.measured,
            "total_norm": self.total_norm,
            "health": self.health,
            "thresholds": asdict(self.thresholds),
            "total": _row_to_dict(self.total),
            "tensors": {row.name: _row_to_dict(row) for row in self},
        }

    def to_frame(self) -> pd.DataFrame:
        """Return a pandas DataFrame, a row per tensor, indexed by name.

        Raises:
            ImportError: without pandas; ``pip install 'gradiometer[frame]'`` brings it.
        """
        try:
            import pandas as pd  # optional, and slow to import
        except ImportError as error:
            msg = "Report.to_frame needs pandas: pip install 'gradiometer[frame]'"
            raise ImportError(msg) from error
        rows = [_row_to_dict(row) for row in self]
        fields = [field for field in TensorReport.__dataclass_fields__ if field != "name"]
        return pd.DataFrame(rows, index=pd.Index(self.names, name="name", dtype="object"), columns=fields)

    def to_string(self, max_rows: int | None = 20) -> str:
        """Return the table that ``print`` shows, worst first.

        Args:
            max_rows: how many tensors at most; None for all.
        """
        return table.render(self, max_rows)

    def __str__(self) -> str:
        """Return a table, worst first, long models abridged."""
        return self.to_string()

    def __repr__(self) -> str:
        """Return one line."""
        return f"<Report: {table.headline(self)}>"


def _row_to_dict(row: TensorReport) -> dict[str, Any]:
    values = asdict(row)
    del values["name"]
    return values | {"flags": [flag.name for flag in row.flags]}


class Pending:
    """A copy to the host that is under way."""

    def __init__(self, names: tuple[str, ...], packed: Tensor, thresholds: Thresholds) -> None:
        """Start to copy ``packed``, ``(T, C + 1) float64``."""
        self._names = names
        self._thresholds = thresholds
        self._event: torch.Event | None = None
        if packed.device.type == "cpu":
            self._host = packed
        else:
            self._host = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.Event(packed.device)
            self._event.record(torch.accelerator.current_stream(packed.device))

    def ready(self) -> bool:
        """Tell whether `result` would return at once. Never waits."""
        return self._event is None or self._event.query()

    def result(self) -> Report:
        """Return the report, after waiting for this copy, and nothing else, if it must."""
        if self._event is not None:
            self._event.synchronize()
        return Report(self._names, self._host, self._thresholds)
