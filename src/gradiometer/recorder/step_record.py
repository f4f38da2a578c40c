"""The record of one step on the host, and the facts of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from gradiometer.columns import DEFAULT_THRESHOLDS
from gradiometer.recorder.catalog import Rows
from gradiometer.recorder.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from gradiometer.columns import Thresholds
    from gradiometer.distributed import Ranks
    from gradiometer.recorder.catalog import Catalog
    from gradiometer.recorder.model_state import ModelState
    from gradiometer.stats import TableReport


@dataclass(frozen=True, eq=False, repr=False)
class StepRecord:
    """The record of one training step; a snapshot on the host.

    Attributes:
        step: its number.
        time: when it ended, in seconds since 1970; for `gradiometer.Recorder.read`, when it was read.
        scalars: given to ``Monitor.advance``, by name: ``loss``, ``lr`` and others; may be NaN.
        catalog: the tables that the run's steps can have.
        tables: by the name of their kind, those that were measured in this step. A step that was not recorded
            (``every``), or whose tensors were lost before they were read, has none.
        skipped: whether the update was skipped: ``skip_step`` was true and something acts on it, see
            `gradiometer.Monitor.skips`. For a `gradiometer.Recorder` alone, whether ``skip_step`` was true.
        thresholds: limits of the flags.
        ranks: the agreement of the ranks whose steps were merged.
        loss_rank: for a merged step: the first rank whose loss is not finite.
        model: the state of the model, of this rank; None if it is unknown, as in a run that was read.
        diverged: for a merged step with fingerprints of weights: the parameters whose copies differ between
            ranks -> a text that names the ranks in the minority, ``rank 5 differs from 7 others``.
    """

    step: int
    time: float
    scalars: Mapping[str, float]
    catalog: Catalog
    tables: Mapping[str, Table] = field(default_factory=dict)
    skipped: bool = False
    thresholds: Thresholds = DEFAULT_THRESHOLDS
    ranks: Ranks | None = None
    loss_rank: int | None = None
    model: ModelState | None = None
    diverged: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        tables = f"{self.catalog.num_tensors} tensors" if self.recorded else "no tensors"
        return f"<StepRecord: step {self.step}, {tables}>"

    @property
    def recorded(self) -> bool:
        """Whether this step has a table of a kind that is stored as columns."""
        return any([table.kind.schema.storage == "columns" for table in self.tables.values()])

    def has(self, kind: str) -> bool:
        """Return whether the tensors of a kind were measured in this step."""
        return kind in self.tables

    def names(self, kind: str = "grads") -> tuple[str, ...]:
        """Return the names of a kind's rows.

        Raises:
            KeyError: for a kind that the run does not record; so do the other methods.
        """
        return self.catalog.names_of(kind)

    def columns(self, kind: str = "grads") -> Tensor:
        """Return the raw columns, ``(N, C)``; 0 in rows that were not measured, NaN without a table."""
        if kind in self.tables:
            return self.tables[kind].values
        return self._nothing(kind).unsqueeze(1).expand(-1, self.catalog.kind(kind).schema.width)

    def flags(self, kind: str = "grads") -> Tensor:
        """Return the flags, ``(N,) int32``, bits of `gradiometer.Flag`; 0 without a table."""
        return self.tables[kind].flags if kind in self.tables else self._nothing(kind, 0).to(torch.int32)

    def measured(self, kind: str = "grads") -> Tensor:
        """Return which rows were measured, ``(N,) bool``."""
        return self.tables[kind].measured if kind in self.tables else self._nothing(kind, 0) > 0

    def value(self, statistic: str, kind: str = "grads") -> Tensor:
        """Return a raw column or derived value by name, ``(N,)``; NaN without a table, see `has`.

        A row that was not measured has 0 in each column. The names are those of ``kind.schema``: for example,
        updates have ``update_ratio`` and activations ``kurtosis``.

        Raises:
            KeyError: also for an unknown statistic.
        """
        return self.tables[kind].value(statistic) if kind in self.tables else self._nothing(kind)

    def total(self, statistic: str = "norm", kind: str = "grads") -> float:
        """Return a raw column or derived value, by name, of all rows together; NaN without a table."""
        self.catalog.kind(kind)
        return self.tables[kind].total(statistic) if kind in self.tables else math.nan

    def _nothing(self, kind: str, fill: float = math.nan) -> Tensor:
        return torch.full((len(self.catalog.rows(kind)),), fill, dtype=torch.float64, device="cpu")

    @property
    def nonfinite(self) -> list[Table]:
        """The tables with a NaN or Inf, in the order in which a step computes their kinds.

        Kinds that are stored sparse repeat what others count, so they are left out.
        """
        dense = [table for table in self.tables.values() if table.kind.schema.storage == "columns"]
        found = [x for x in dense if "n_nonfinite" in x.kind.schema and x.total("n_nonfinite")]
        return sorted(found, key=lambda table: table.kind.order)

    @property
    def is_finite(self) -> bool:
        """Whether no tensor of any kind has a NaN or Inf."""
        return not self.nonfinite

    def where(self, name: str, kind: str = "grads") -> str | None:
        """Return the first rank with a NaN or Inf in this tensor: ``rank 5, dp_shard 1 of 4``.

        None if the tensor is finite, or if this is the record of one rank.
        """
        table = self.tables.get(kind)
        if table is None or table.origin is None or self.ranks is None:
            return None
        rank = int(table.origin[table.rows.index[name]])
        if rank >= 0 and table.kind.rows == "tap":
            return f"rank {rank}"
        return None if rank < 0 else self.ranks.where(name, rank)

    @property
    def loss(self) -> float | None:
        """The loss, if it was given."""
        return self.scalars.get("loss")

    @property
    def loss_text(self) -> str:
        """The loss as text, such as ``nan on rank 1``."""
        return f"{self.loss}" if self.loss_rank is None else f"{self.loss} on rank {self.loss_rank}"

    def fingerprints(self, kind: str = "grads") -> Tensor | None:
        """Return the fingerprints, as in `TensorStats.fingerprints`; None if they were not recorded."""
        self.catalog.kind(kind)
        return self.tables[kind].fingerprints if kind in self.tables else None

    def bits_of(self, kind: str, names: Iterable[str]) -> dict[str, str]:
        """Return the fingerprints of those of these tensors that have one, as text."""
        return self.tables[kind].fingerprints_of(names) if kind in self.tables else {}

    def report(self, kind: str = "grads", names: Iterable[str] | None = None) -> TableReport[Any]:
        """Return the report of the measured tensors of a kind, or of those among ``names``."""
        if kind in self.tables:
            return self.tables[kind].report(names)
        known, rows = self.catalog.kind(kind), Rows()
        nothing = torch.zeros((0, known.schema.width), dtype=known.schema.dtype, device="cpu")
        return Table(known, rows, nothing, thresholds=self.thresholds).report()


@dataclass(frozen=True)
class RunInfo:
    """Facts about a run that are known when it starts; given to every sink.

    Attributes:
        catalog: the tables of its steps.
        thresholds: limits of the flags.
        every, capacity: of the recorder.
        model: the class of the model, or of the models.
        started: seconds since 1970.
        first_step: the step at which this process began; above 0 if the run was resumed.
        versions: of Python, torch, triton and gradiometer, by name.
        device: of the ring.
        ranks: number of ranks whose steps are merged.
        fingerprint: whether the steps have fingerprints.
        precision: steps divisible by this have histograms of exponents; None: none has.
    """

    catalog: Catalog
    thresholds: Thresholds
    every: int
    capacity: int
    model: str
    started: float
    first_step: int
    versions: Mapping[str, str]
    device: str
    ranks: int = 1
    fingerprint: bool = False
    precision: int | None = None
