"""Report: statistics on the host, by name, in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from gradiometer.columns import TENSORS, Flag
from gradiometer.stats import grouping, text_table
from gradiometer.stats.health_values import HealthValues
from gradiometer.stats.table_report import TableReport, frame
from gradiometer.stats.text_table import TextTable
from gradiometer.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pandas as pd
    from torch import Tensor

    from gradiometer.columns import Fingerprint

_LOCAL: Final = "this rank's shards only (TensorStats.reduce() merges them)"
_WHEN: Final = "nothing measured: no tensors (gradients exist after backward() and before zero_grad())"
_MODULES_HEADER: Final[tuple[str, ...]] = (
    "module",
    "tensors",
    "elements",
    "norm",
    "min norm",
    "max norm",
    "rms",
    "mean",
    "std",
    "zero %",
    "flags",
)

# values of all tensors together, in Report.to_dict
_SUMMARY: Final = (
    "measured",
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


@dataclass(frozen=True)
class TensorReport:
    """One tensor's statistics. Means, norms and extremes are those of its finite elements.

    Only ``norm`` is as torch defines it: NaN with any NaN, inf with any Inf. ``std`` is the population
    standard deviation. ``fingerprint`` is None unless it was asked for.
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
    fingerprint: Fingerprint | None = None


class Report(HealthValues[float, bool], TableReport[TensorReport]):
    """Statistics of named tensors at one moment, on the host: a mapping from names to `TensorReport`.

    ``report["layer.0.weight"]`` is one tensor's row; ``report.rows()`` are all of them, in the order of the
    model. ``print(report)`` shows a table, worst first.

    Attributes:
        names: the tensors' names.
        thresholds: limits of the flags.
        skip_nonfinite: whether a step with a non-finite element is skipped, as by a GradScaler.
        total: a `TensorReport` of all tensors together, named ``"total"``.
        is_reduced: whether these are statistics of all ranks, see `TensorStats.reduce`.
        is_local: whether tensors are sharded over ranks, and these are statistics of this rank's shards only.
        ranks: for statistics of all ranks: tensor name -> the first rank with a NaN or Inf in its part of the
            tensor.
        diverged: for statistics of all ranks with fingerprints: names of tensors of which ranks hold copies
            with different bits, see `gradiometer.check_replicas`.

    >>> import torch, gradiometer as gm
    >>> report = gm.collect({"w": torch.tensor([3.0, 4.0]), "b": torch.tensor([float("inf")])}).materialize()
    >>> report["w"].norm, report.total_norm
    (5.0, inf)
    >>> report.inf, report.exploding, report.vanishing
    (['b'], ['b'], [])
    """

    schema = TENSORS
    _row_class = TensorReport
    _noun = "tensor"
    _nothing = _WHEN
    _local = _LOCAL
    _flags: Tensor

    def __init__(
        self,
        names: tuple[str, ...],
        columns: Tensor,
        *,
        skip_nonfinite: bool = False,
        diverged: Sequence[str] = (),
        **options: Any,
    ) -> None:
        """Create a report of columns on the host; ``options`` are those of `TableReport`."""
        super().__init__(names, columns, **options)
        self.skip_nonfinite = skip_nonfinite
        self.diverged = list(diverged)
        if self._flags is None:
            self._flags = self._flags_of(columns)

    def _flags_of(self, columns: Tensor) -> Tensor:
        return TENSORS.flags_of(columns, self.thresholds, skip_nonfinite=self.skip_nonfinite)

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
        """Names of tensors whose norm is above the threshold or, without ``skip_nonfinite``, not finite."""
        return self.flagged(Flag.EXPLODING)

    @property
    def dead(self) -> list[str]:
        """Names of tensors with at least the threshold's share of zeros (all of them, by default)."""
        return self.flagged(Flag.DEAD)

    @property
    def found_inf(self) -> bool:
        """Whether any element of any tensor is NaN or infinite."""
        # a replica that is not counted may have a NaN or Inf, too
        return TENSORS.value(self._merged, "n_nonfinite").item() > 0 or bool(self.ranks)

    @property
    def skipped(self) -> bool:
        """Whether this step is skipped: ``skip_nonfinite`` is set, and an element is not finite."""
        return self.skip_nonfinite and self.found_inf

    @property
    def zero_fraction(self) -> float:
        """Share of all elements equal to 0."""
        return TENSORS.value(self._merged, "zero_fraction").item()

    @property
    def n_nan(self) -> int:
        """NaN elements of all tensors."""
        return self.total.n_nan

    @property
    def n_inf(self) -> int:
        """Infinite elements of all tensors."""
        return self.total.n_inf

    def _computed(self, function: Callable[..., Tensor], *options: Any) -> Any:
        return function(self._columns, self._flags, *options).item()

    def by_module(self, depth: int | None = None) -> ModuleReports:
        """Merge tensors by module: module name -> `Report` of the tensors below it.

        ``depth``: as for `TensorStats.by_module`.

        >>> import torch, gradiometer as gm
        >>> report = gm.collect({"mlp.0.w": torch.ones(9), "mlp.1.w": torch.ones(16)}).materialize()
        >>> mlp = report.by_module(1)["mlp"]
        >>> mlp.total_norm, mlp.min_norm, mlp.max_norm, mlp.total.mean
        (5.0, 3.0, 4.0, 1.0)
        """
        found = {}
        for module, rows in grouping.by_module(self.names, depth).items():
            names = tuple(self.names[i] for i in rows)
            ranks = {name: self.ranks[name] for name in names if name in self.ranks}
            found[module] = Report(
                names,
                self._columns[rows],
                flags=self._flags[rows],
                thresholds=self.thresholds,
                skip_nonfinite=self.skip_nonfinite,
                ranks=ranks if self.is_reduced else None,
                is_local=self.is_local,
                fingerprints=None if self._fingerprints is None else self._fingerprints[rows],
            )
        return ModuleReports(found)

    def worst_first(self) -> list[TensorReport]:
        """Return the tensors, worst first.

        Non-finite (most such elements first), exploding, dead, vanishing (smallest norm first), then the
        rest; otherwise by decreasing norm of the finite elements.
        """
        ranks = (Flag.NAN | Flag.INF, Flag.EXPLODING, Flag.DEAD, Flag.VANISHING)

        def key(row: TensorReport) -> tuple[int, int, float]:
            rank = next((i for i, flag in enumerate(ranks) if row.flags & flag), len(ranks))
            norm = row.finite_norm if row.flags & Flag.VANISHING else -row.finite_norm
            return rank, -row.n_nonfinite, norm

        return sorted(self.rows(), key=key)

    def ordered(self) -> list[TensorReport]:
        """Return the rows in the order of the printed table, see `worst_first`."""
        return self.worst_first()

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values: totals, and a dict per tensor. Norms may be NaN or inf."""
        summary = {name: getattr(self, name) for name in _SUMMARY}
        return {**summary, "thresholds": asdict(self.thresholds), **super().to_dict()}

    def _facts(self) -> list[str]:
        # rounded down, so that 1.00 means that nothing vanishes or explodes
        health = math.floor(100 * self.health) / 100
        flags = ", ".join(_found(self)) or "no flags"
        return [
            f"total norm {text_table.number(self.total_norm)}",
            f"health {health:.2f}",
            f"step skipped: {flags}" if self.skipped else flags,
        ]

    def _rest(self, rows: Sequence[TensorReport]) -> str:
        norms = [row.norm for row in rows if row.numel and not row.n_nonfinite]
        bad = sum(row.n_nonfinite > 0 for row in rows)
        flagged = sum(bool(row.flags) for row in rows)
        notes = [f"norm {text_table.number(min(norms))} to {text_table.number(max(norms))}"] if norms else []
        notes += [f"{bad} not finite"] if bad else []
        notes.append(f"{flagged} of them flagged" if flagged else "no flags")
        return f"… {len(rows)} more, " + ", ".join(notes)


def _found(report: Report) -> list[str]:
    """Return phrases such as ``2 with NaN``, ``1 dead``."""
    found = {
        "with NaN": report.nan,
        "with Inf": report.inf,
        "exploding": report.exploding,
        "dead": report.dead,
        "vanishing": report.vanishing,
    }
    return [f"{len(names)} {what}" for what, names in found.items() if names]


class ModuleReports(Mapping[str, Report]):
    """A mapping from a model's modules, in its order, to a `Report` of each module's tensors.

    ``print`` shows a table with a row per module; `to_frame` and `to_dict` return more values, such as
    ``health``, unrounded.
    """

    def __init__(self, reports: Mapping[str, Report]) -> None:
        """Create the mapping from ``reports``: module -> report of the tensors below it."""
        self._reports = dict(reports)

    def __getitem__(self, module: str) -> Report:
        try:
            return self._reports[module]
        except KeyError:
            msg = f"no module {module!r}; available: {', '.join(map(repr, self)) or 'none'}"
            raise KeyError(msg) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._reports)

    def __len__(self) -> int:
        return len(self._reports)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return module -> plain Python values. Norms may be NaN or inf."""
        return {
            module: {field: get(report) for field, get in _MODULE_FIELDS.items()}
            for module, report in self.items()
        }

    def to_frame(self) -> pd.DataFrame:
        """Return a pandas DataFrame, a row per module, indexed by module.

        Raises:
            ImportError: without pandas; ``pip install 'gradiometer[frame]'`` installs it.
        """
        return frame(self.to_dict(), "module", list(_MODULE_FIELDS))

    def __str__(self) -> str:
        if not self:
            return _WHEN
        table = self._table()
        lines, rule = text_table.aligned([table.header, *text_table.with_short_names(table.rows)])
        return "\n".join([*[table.headline] * bool(table.headline), lines[0], rule, *lines[1:]])

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        return text_table.html(self._table() if self else TextTable(_WHEN))

    def _table(self) -> TextTable:
        cells = [_MODULES_HEADER, *[_module_cells(*each) for each in self.items()]]
        if any(report.ranks for report in self.values()):
            ranks = [text_table.named_ranks(each.ranks) for each in self.values()]
            # before the last column, the flags
            cells = [(*row[:-1], rank, row[-1]) for row, rank in zip(cells, ["rank", *ranks], strict=True)]
        headline = _LOCAL if any(report.is_local for report in self.values()) else ""
        return TextTable(headline, cells[0], cells[1:])

    def __repr__(self) -> str:
        return f"<ModuleReports: {len(self)} {'module' if len(self) == 1 else 'modules'}>"


# field -> function that reads it from a module's report
_MODULE_FIELDS: Final[dict[str, Callable[[Report], Any]]] = {
    "tensors": len,
    **{name: attrgetter(f"total.{name}") for name in ("numel", "norm")},
    **{name: attrgetter(name) for name in ("min_norm", "max_norm", "norm_ratio")},
    **{name: attrgetter(f"total.{name}") for name in ("rms", "mean", "std", "abs_max")},
    **{name: attrgetter(name) for name in ("zero_fraction", "n_nan", "n_inf")},
    # shares of the module's tensors with each flag
    "vanishing_fraction": lambda report: len(report.vanishing) / len(report),
    "exploding_fraction": lambda report: len(report.exploding) / len(report),
    "dead_fraction": lambda report: len(report.dead) / len(report),
    "health": attrgetter("health"),
}


def _module_cells(module: str, report: Report) -> tuple[str, ...]:
    total = report.total
    return (
        printable(module) or "(root)",
        text_table.count(len(report)),
        text_table.count(total.numel),
        *(text_table.number(x) for x in (total.norm, report.min_norm, report.max_norm)),
        *(text_table.of_finite(total, x) for x in (total.rms, total.mean, total.std)),
        text_table.percent(report.zero_fraction),
        ", ".join(_found(report)),
    )
