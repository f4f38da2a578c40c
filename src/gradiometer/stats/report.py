"""Report: statistics on the host, by name, in plain Python."""

from __future__ import annotations

from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from gradiometer.columns import (
    EXPLODING_WEIGHT,
    HEALTH,
    MAX_NORM_RATIO,
    MAX_ZERO_FRACTION,
    NUM_COLUMNS,
    VANISHING_WEIGHT,
    Flag,
    Thresholds,
    derived,
    is_healthy,
    score,
)
from gradiometer.stats import grouping, text_table
from gradiometer.stats.module_reports import ModuleReports
from gradiometer.stats.tensor_report import TensorReport, dicts, frame, row_to_dict, rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pandas as pd

__all__ = ["Report"]

# values of all tensors together, in Report.to_dict
_SUMMARY: Final = (
    "measured",
    "is_reduced",
    "is_local",
    "skipped",
    "total_norm",
    "min_norm",
    "max_norm",
    "norm_ratio",
    "zero_fraction",
    "n_nan",
    "n_inf",
    "has_vanishing",
    "has_exploding",
    "is_healthy",
    "health",
)


class Report:
    """Statistics of named tensors at one moment, on the host.

    ``report["layer.0.weight"]`` is one tensor's `TensorReport`; iteration goes over all of them, in
    the order of the model. ``print(report)`` shows a table, worst first.

    Attributes:
        names: the tensors' names.
        thresholds: where the flags begin.
        skip_nonfinite: whether a step with a non-finite element is skipped, as by a GradScaler.
        total: a `TensorReport` of all tensors together, named ``"total"``.
        is_reduced: whether these are statistics of all ranks, see `TensorStats.reduce`.
        is_local: whether tensors are cut over ranks, and these are statistics of this rank's parts alone.
        ranks: of statistics of all ranks: the first rank that has a NaN or Inf in its part of a tensor, by
            the tensor's name.

    >>> import torch, gradiometer as gm
    >>> report = gm.collect({"w": torch.tensor([3.0, 4.0]), "b": torch.tensor([float("inf")])}).materialize()
    >>> report["w"].norm, report.total_norm
    (5.0, inf)
    >>> report.inf, report.exploding, report.vanishing
    (['b'], ['b'], [])
    """

    def __init__(
        self,
        names: tuple[str, ...],
        packed: Tensor,
        thresholds: Thresholds,
        *,
        skip_nonfinite: bool = False,
        ranks: Mapping[str, int] | None = None,
        is_local: bool = False,
    ) -> None:
        """``packed``: ``(T, C + 1) float64`` on the host, the raw columns and then the flags.

        ``ranks``: None, where the statistics are not of all ranks.
        """
        self.names = names
        self.thresholds = thresholds
        self.skip_nonfinite = skip_nonfinite
        self.is_reduced = ranks is not None
        self.is_local = is_local
        self.ranks = dict(ranks or {})
        self._packed = packed

    # What is made of it is made when it is asked for: the Python values of a thousand rows take milliseconds

    @cached_property
    def _columns(self) -> Tensor:
        return self._packed[:, :NUM_COLUMNS]

    @cached_property
    def _flags(self) -> Tensor:
        return self._packed[:, NUM_COLUMNS].to(torch.int32)

    @cached_property
    def total(self) -> TensorReport:
        """All tensors together."""
        merged = self._merged.unsqueeze(0)
        flags = derived.compute_flags(merged, self.thresholds, skip_nonfinite=self.skip_nonfinite)
        (row,) = rows(("total",), merged, flags.tolist())
        return row

    @cached_property
    def _merged(self) -> Tensor:
        return derived.merge_rows(self._columns)

    @cached_property
    def _by_name(self) -> dict[str, TensorReport]:
        return {row.name: row for row in rows(self.names, self._columns, self._flags.tolist())}

    def __getitem__(self, name: str) -> TensorReport:
        """Return one tensor's statistics."""
        try:
            return self._by_name[name]
        except KeyError:
            msg = f"no tensor {name!r} in this report of {len(self)}; see report.names"
            raise KeyError(msg) from None

    def __contains__(self, name: object) -> bool:
        """Tell whether a tensor of this name was measured."""
        return name in self.names

    def __iter__(self) -> Iterator[TensorReport]:
        """Go over the tensors in the order of the model."""
        return iter(self._by_name.values())

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.names)

    def flagged(self, flag: Flag) -> list[str]:
        """Return the names of tensors with any of these flags, in the order of the model."""
        if not isinstance(flag, Flag):
            msg = f"flagged: expected a gm.Flag, gm.Flag.NAN say, got {flag!r}"
            raise TypeError(msg)
        # an IntFlag makes an object of each result
        mask = int(flag)
        return [name for name, bits in zip(self.names, self._flags.tolist(), strict=True) if bits & mask]

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
        return derived.value(self._merged, "norm").item()

    @property
    def found_inf(self) -> bool:
        """Whether any element of any tensor is NaN or infinite."""
        # of ranks a copy that is not counted, too
        return derived.value(self._merged, "n_nonfinite").item() > 0 or bool(self.ranks)

    @property
    def skipped(self) -> bool:
        """Whether this step is skipped: ``skip_nonfinite``, and an element is not finite."""
        return self.skip_nonfinite and self.found_inf

    @property
    def health(self) -> float:
        """From 1.0, nothing flagged, to 0.0: ``clamp(1 - 0.5 * vanishing / T - 0.8 * exploding / T, 0, 1)``.

        0.0 if the total norm is not finite; 1.0 with no tensors.
        """
        return float(self._of_all("health"))

    def health_score(
        self,
        *,
        vanishing: float = VANISHING_WEIGHT,
        exploding: float = EXPLODING_WEIGHT,
    ) -> float:
        """Return the health with other weights, finite and not negative."""
        return score(self._columns, self._flags, vanishing, exploding).item()

    @property
    def has_vanishing(self) -> bool:
        """Whether any tensor is vanishing."""
        return bool(self._of_all("has_vanishing"))

    @property
    def has_exploding(self) -> bool:
        """Whether any tensor is exploding."""
        return bool(self._of_all("has_exploding"))

    @property
    def min_norm(self) -> float:
        """Smallest norm of a tensor with elements, NaN with any NaN; 0.0 with none."""
        return float(self._of_all("min_norm"))

    @property
    def max_norm(self) -> float:
        """Largest norm of a tensor, NaN with any NaN; 0.0 with none."""
        return float(self._of_all("max_norm"))

    @property
    def norm_ratio(self) -> float:
        """``max_norm / max(min_norm, 1e-10)``; 0.0 with no tensors."""
        return float(self._of_all("norm_ratio"))

    @property
    def zero_fraction(self) -> float:
        """Share of all elements equal to 0."""
        return derived.value(self._merged, "zero_fraction").item()

    @property
    def n_nan(self) -> int:
        """NaN elements of all tensors."""
        return self.total.n_nan

    @property
    def n_inf(self) -> int:
        """Infinite elements of all tensors."""
        return self.total.n_inf

    @property
    def is_healthy(self) -> bool:
        """No NaN or Inf, nothing exploding, norm ratio below 1000, under half of all elements zero."""
        return bool(self._of_all("is_healthy"))

    def is_healthy_within(
        self, *, norm_ratio: float = MAX_NORM_RATIO, zero_fraction: float = MAX_ZERO_FRACTION
    ) -> bool:
        """Tell what `is_healthy` tells, with limits of your own; see `TensorStats.is_healthy_within`."""
        return bool(is_healthy(self._columns, self._flags, norm_ratio, zero_fraction))

    def _of_all(self, name: str) -> float:
        return HEALTH[name](self._columns, self._flags).item()

    def by_module(self, depth: int | None = None) -> ModuleReports:
        """Roll the tensors up the tree of modules: module -> `Report` of the tensors below it.

        Args:
            depth: how many steps down from the root; None for the modules that own the tensors.
                What the root itself owns is in ``""``.

        >>> import torch, gradiometer as gm
        >>> report = gm.collect({"mlp.0.w": torch.ones(9), "mlp.1.w": torch.ones(16)}).materialize()
        >>> mlp = report.by_module(1)["mlp"]
        >>> mlp.total_norm, mlp.min_norm, mlp.max_norm, mlp.total.mean
        (5.0, 3.0, 4.0, 1.0)
        """
        packed = torch.cat([self._columns, self._flags.to(torch.float64).unsqueeze(1)], dim=1)
        return ModuleReports(
            {
                module: Report(
                    tuple(self.names[i] for i in indices),
                    packed[indices],
                    self.thresholds,
                    skip_nonfinite=self.skip_nonfinite,
                    ranks=self._ranks_of([self.names[i] for i in indices]),
                    is_local=self.is_local,
                )
                for module, indices in grouping.by_module(self.names, depth).items()
            }
        )

    def _ranks_of(self, names: list[str]) -> dict[str, int] | None:
        return {name: self.ranks[name] for name in names if name in self.ranks} if self.is_reduced else None

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
        """Return plain Python values: of all tensors, and a dict per tensor. Norms may be NaN or inf."""
        return {
            **{name: getattr(self, name) for name in _SUMMARY},
            "ranks": dict(self.ranks),
            "thresholds": asdict(self.thresholds),
            "total": row_to_dict(self.total),
            "tensors": self._dicts(),
        }

    def _dicts(self) -> dict[str, dict[str, Any]]:
        return dicts(self.names, self._columns, self._flags.tolist())

    def to_frame(self) -> pd.DataFrame:
        """Return a pandas DataFrame, a row per tensor, indexed by name.

        Of all ranks it has one column more, ``rank``, as in ``ranks``; -1: everything is finite.

        Raises:
            ImportError: without pandas; ``pip install 'gradiometer[frame]'`` brings it.
        """
        fields = [field for field in TensorReport.__dataclass_fields__ if field != "name"]
        values = self._dicts()
        if self.is_reduced:
            fields.append("rank")
            values = {name: row | {"rank": self.ranks.get(name, -1)} for name, row in values.items()}
        return frame(values, "name", fields)

    def to_string(self, max_rows: int | None = 20) -> str:
        """Return the table that ``print`` shows, worst first.

        Args:
            max_rows: how many tensors at most; None for all.
        """
        return text_table.render(self, max_rows)

    def __str__(self) -> str:
        """Return a table, worst first, long models abridged."""
        return self.to_string()

    def __repr__(self) -> str:
        """Return one line."""
        return f"<Report: {text_table.headline(self)}>"
