"""Read a run on disk: tables, matrices, records. ``docs/reference/run-record.md`` describes the format."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from gradiometer.columns import EXPONENTS
from gradiometer.runs.arrow import numbers
from gradiometer.runs.files import RunError
from gradiometer.runs.notebook import run_html
from gradiometer.runs.plot import plot_run
from gradiometer.runs.schema_table import columns_of
from gradiometer.runs.table_reader import TableReader
from gradiometer.stats import ExponentStats, PrecisionReport

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from pathlib import Path

    import pyarrow as pa
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def read_run(path: Path | str, *, attempt: int | None = None, skip_damaged: bool = False) -> Run:
    """Open a run on disk; its tables are read when they are accessed.

    Args:
        path: the folder.
        attempt: read the run as it was after this attempt, with the steps that later attempts have
            superseded; None for the last attempt.
        skip_damaged: leave out segments with a damaged file, or only a table that is stored sparsely, such as
            the exponents, if only its file is damaged; journals from the damage on; and ``findings.json`` and
            ``blackbox.json`` if they are damaged. ``run.damaged`` lists them, and a warning is logged for
            each. This checks every file at once.

    Raises:
        RunError: if there is no run or attempt, or its version is newer than this package reads. Without
            ``skip_damaged``, methods that read a file later raise it too, if the file is missing or is not
            as it was written.
        ImportError: without pyarrow; ``pip install 'gradiometer[monitor]'`` installs it.

    >>> import tempfile, torch, gradiometer as gm
    >>> model = torch.nn.Linear(2, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with gm.Monitor(model, run_dir=folder) as monitor:
    ...         model(torch.tensor([[3.0, 4.0]])).sum().backward()
    ...         monitor.record()
    ...         monitor.advance(loss=0.5)
    ...     record = gm.read_run(folder).record(0)
    >>> record.loss, record.report()["weight"].norm
    (0.5, 5.0)
    """
    return Run(path, attempt=attempt, skip_damaged=skip_damaged)


class StepPrecision(PrecisionReport):
    """Which tensors of a recorded step fit which format: a `gradiometer.PrecisionReport` of one step.

    Attributes:
        step: its number.
        kind: ``"grads"`` or ``"weights"``.
        stats: the histograms, `gradiometer.ExponentStats` on the CPU, for other formats and scales.
    """

    def __init__(
        self, step: int, kind: str, stats: ExponentStats, formats: Iterable[Any] | None = None
    ) -> None:
        super().__init__(stats.names, stats.columns, formats)
        self.step, self.kind, self.stats = step, kind, stats

    def _headline(self) -> str:
        return f"{self.kind} of step {self.step}: {super()._headline()}"


class Run(TableReader):
    """A run on disk, as of when it was opened or last refreshed.

    Rows that a later attempt has superseded are left out: if that attempt began at step s, rows of
    earlier attempts for step s and later no longer belong to the run; ``read_run(path, attempt=...)`` reads
    them.

    Attributes:
        path: the folder.
        info: the content of run.json; if an earlier attempt is read, as it was then.
        attempts: all attempts in the folder.
        catalog: the tables of its steps: kinds and schemas, and the names of parameters and taps.
        thresholds: the thresholds of the flags.
        damaged: with ``skip_damaged``, what is left out: the error of each file by its path in the folder.
    """

    def plot(self, *what: str, ax: Axes | None = None) -> Figure:
        """Draw the run with matplotlib, an axis for each of ``what``, and return the figure.

        The chart of the total norm has marks where findings begin, and the limit if gradients are clipped.

        Args:
            what: columns of `steps` that are norms or ratios, such as ``"total_norm"``, and scalars; by
                default the total norm, the loss and the learning rate.
            ax: the axes to draw on, for one of ``what``; by default those of a new figure.

        Raises:
            ImportError: without matplotlib; ``pip install 'gradiometer[plot]'`` installs it.
            ValueError: for a name that the run does not have, or for several with ``ax``.

        >>> figure = gm.read_run("runs/first").plot("total_norm", "loss")  # doctest: +SKIP
        >>> figure.savefig("first.png")                                    # doctest: +SKIP
        """
        return plot_run(self, what, ax)

    def _repr_html_(self) -> str:
        """Return the run and its findings for a notebook."""
        return run_html(self)

    @property
    def precision_steps(self) -> list[int]:
        """The steps that have histograms of exponents, ascending; see `precision`."""
        return sorted({*self.exponents(columns=["step"])["step"].to_pylist()})

    def exponents(
        self,
        kind: str | None = None,
        *,
        columns: Collection[str] | None = None,
        first: int | None = None,
        last: int | None = None,
    ) -> pa.Table:
        """Return histograms of exponents: one row per step, kind and measured parameter, in that order.

        The columns are those of `table`; `precision` returns histograms of one step.

        Args:
            kind: ``"grads"`` or ``"weights"``; None for both.
            columns: names of columns; None for all.
            first: only from this step on.
            last: only up to and including this step.
        """
        own = None if kind is None else self._exponents_of(kind) or kind
        return self.table(EXPONENTS.name, columns=columns, kind=own, first=first, last=last)

    def precision(
        self, step: int | None = None, kind: str = "grads", formats: Iterable[Any] | None = None
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
        if step is not None:
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
        more = "" if self._exponents_of(kind) else "; Monitor(weights=True) records those of weights, too"
        raise RunError(f"{self.path} has no histograms of {kind} in step {step}{more}")

    def precisions(
        self, kind: str = "grads", *, first: int | None = None, last: int | None = None
    ) -> Iterator[tuple[int, ExponentStats]]:
        """Iterate over the steps that have histograms, and these, ascending. Files are read lazily."""
        own = self._exponents_of(kind)
        for key in [] if own is None else self._segments_with(EXPONENTS.name, first, last):
            low, high = self._bounds(key, first, last)
            table = self.table(EXPONENTS.name, kind=own, first=low, last=high)
            steps, names = numbers(table["step"]), table["name"].to_pylist()
            starts = [0, *(steps.diff().nonzero().view(-1) + 1).tolist(), len(steps)] if len(steps) else []
            for start, end in itertools.pairwise(starts):
                # step by step: a segment of histograms would take far more memory than its file
                rows = columns_of(EXPONENTS, table.slice(start, end - start))
                yield int(steps[start]), ExponentStats(tuple(names[start:end]), rows)

    def _exponents_of(self, kind: str) -> str | None:
        """Return the kind with the histograms of gradients or weights; None without one."""
        kinds = [x for x in self.catalog.sparse if x.schema is EXPONENTS]
        return next((x.name for x in kinds if x.of == kind), None)
