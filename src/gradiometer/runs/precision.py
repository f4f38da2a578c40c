"""What a run says about formats: its histograms of exponents, and the precision report of a step."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from gradiometer.extras import require
from gradiometer.runs.exponents import check_histograms, histograms
from gradiometer.runs.files import RunError
from gradiometer.runs.format import EXPONENTS, arrow_schema, pyarrow, segment_path
from gradiometer.runs.tables import numbers, unreadable
from gradiometer.stats import ExponentStats, PrecisionReport

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    import pyarrow as pa

    from gradiometer.recorder import Kind, Roster
    from gradiometer.runs.segments import Segments


class StepPrecision(PrecisionReport):
    """Which tensors of a recorded step fit which format: a `gradiometer.PrecisionReport` of one step.

    Attributes:
        step: its number.
        kind: ``"grads"`` or ``"weights"``.
        stats: the histograms, `gradiometer.ExponentStats` on the CPU, for other formats and scales.
    """

    def __init__(
        self, step: int, kind: Kind, stats: ExponentStats, formats: Iterable[Any] | None = None
    ) -> None:
        super().__init__(stats.names, stats.columns, formats)
        self.step, self.kind, self.stats = step, kind, stats

    def _headline(self) -> str:
        return f"{self.kind} of step {self.step}: {super()._headline()}"


class ExponentReader:
    """The part of `gradiometer.runs.Run` that reads histograms of exponents."""

    path: Path
    roster: Roster
    _files: Segments
    # segments whose file of exponents is left out
    _without: set[tuple[int, int]]

    def _between(self, first: int | None, last: int | None) -> list[tuple[int, int]]:
        """Return the segments that may have steps from ``first`` to ``last``."""
        raise NotImplementedError

    def _bounds(self, key: tuple[int, int], first: int | None, last: int | None) -> tuple[int, int]:
        """Return the first and last step to read from a segment, inclusive."""
        raise NotImplementedError

    @property
    def precision_steps(self) -> list[int]:
        """The steps that have histograms of exponents, ascending; see `precision`."""
        tables = self._exponents(["step"], None, None)
        return sorted({step for _, table in tables for step in table["step"].unique().to_pylist()})

    def exponents(
        self,
        kind: Kind | None = None,
        *,
        columns: Collection[str] | None = None,
        first: int | None = None,
        last: int | None = None,
    ) -> pa.Table:
        """Return histograms of exponents: one row per step, kind and measured parameter, in that order.

        The columns are `EXPONENTS`; `precision` returns histograms of one step.

        Args:
            kind: ``"grads"`` or ``"weights"``; None for both.
            columns: names of columns; None for all.
            first: only from this step on.
            last: only up to and including this step.
        """
        schema = arrow_schema(EXPONENTS)
        for name in columns or ():
            if name not in schema.names:
                msg = f"there is no column {name!r} of exponents; choose from {', '.join(schema.names)}"
                raise RunError(msg)
        own = schema.names if columns is None else list(columns)
        none = pyarrow().schema([schema.field(name) for name in own]).empty_table()
        tables = [table for _, table in self._exponents(own, first, last, kind)]
        return pyarrow().concat_tables([none, *tables]).unify_dictionaries()

    def precision(
        self, step: int | None = None, kind: Kind = "grads", formats: Iterable[Any] | None = None
    ) -> StepPrecision:
        """Return which tensors fit which format, from the histograms of a step.

        Args:
            step: one of `precision_steps`; None for the last one.
            kind: ``"grads"`` or, if they were recorded, ``"weights"``.
            formats: as for `gradiometer.precision_report`.

        Raises:
            RunError: if there are no histograms of that step or kind.
            ValueError: for another format.

        >>> import tempfile, torch, gradiometer as gm
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with gm.Monitor(model, run_dir=folder, precision=100) as monitor:
        ...         model(torch.tensor([[1e-6, 4.0]])).sum().backward()
        ...         monitor.record()
        ...         monitor.advance()
        ...     found = gm.read_run(folder).precision()
        >>> found.step, found["weight"].formats["float8_e5m2"].n_flushed
        (0, 1)
        >>> found.stats.n_flushed("float8_e5m2", scale=2.0**10)
        tensor([0])
        """
        if kind in self.roster.kinds and step is not None:
            for _, stats in self.precisions(kind, first=step, last=step):
                return StepPrecision(step, kind, stats, formats)
        steps = self.precision_steps
        if not steps:
            msg = f"{self.path} has no histograms of exponents; Monitor(model, precision=100) records them"
            raise RunError(msg + " every 100 steps")
        if step is None:
            return self.precision(steps[-1], kind, formats)
        if step not in steps:
            near = min(steps, key=lambda x: abs(x - step))
            msg = f"{self.path} has no histograms of step {step}; there are {len(steps)}, from {steps[0]} to "
            raise RunError(f"{msg}{steps[-1]}, and the nearest is that of step {near}")
        more = "" if kind in self.roster.kinds else "; Monitor(weights=True) records those of weights, too"
        msg = f"{self.path} has no histograms of {kind} in step {step}{more}"
        raise RunError(msg)

    def precisions(
        self, kind: Kind = "grads", *, first: int | None = None, last: int | None = None
    ) -> Iterator[tuple[int, ExponentStats]]:
        """Iterate over the steps that have histograms, and these, ascending. Files are read lazily."""
        columns = arrow_schema(EXPONENTS).names
        for _, table in self._exponents(columns, first, last, kind):
            steps, names = numbers(table["step"]), table["name"].to_pylist()
            starts = [0, *(steps.diff().nonzero().view(-1) + 1).tolist(), len(steps)]
            for start, end in itertools.pairwise(starts):
                # step by step: a segment of histograms would take far more memory than its file
                rows = histograms(table.slice(start, end - start))
                yield int(steps[start]), ExponentStats(tuple(names[start:end]), rows)

    def _exponents(
        self, columns: Sequence[str], first: int | None, last: int | None, kind: Kind | None = None
    ) -> Iterator[tuple[tuple[int, int], pa.Table]]:
        """Return the histograms of each segment that has some."""
        ds = require("pyarrow.dataset", "monitor", "A run record")
        for key in self._between(first, last):
            if key in self._without or not self._files.has_exponents(key):
                continue
            low, high = self._bounds(key, first, last)
            where = (ds.field("step") >= low) & (ds.field("step") <= high)
            if kind is not None:
                where &= ds.field("kind") == kind
            found = self._files.read("exponents", key, columns, where)
            try:
                check_histograms(found)
            except ValueError as error:
                raise unreadable(segment_path(self.path, "exponents", *key), error) from None
            if len(found):
                yield key, found
