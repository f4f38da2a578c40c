"""The Weights & Biases sink."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gradiometer.extras import require
from gradiometer.rules import Severity
from gradiometer.runs import encodable
from gradiometer.sinks.selection import News, Options, Selection, check_severity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Unpack

    from gradiometer.recorder import RunInfo, StepRecord
    from gradiometer.rules import Fault, Finding

_STEP: Final = "gradiometer/step"
_LEVELS: Final = {Severity.INFO: "INFO", Severity.WARNING: "WARN", Severity.ERROR: "ERROR"}
_SHOWN: Final = 50


class WeightsAndBiases:
    """Logs to a Weights & Biases run: the active run, or a new one.

    Values arrive some steps late, so they are plotted over a separate axis, ``gradiometer/step``. In an
    existing run the loss and other scalars are left to your own logging, unless ``scalars=`` selects them.
    Findings are listed in the run's summary.

    Each step is a row of the run's history and increments its internal step, like every ``wandb.log``. If
    your code calls ``wandb.log(..., step=n)``, wandb would reject some of its rows; see ``commit``.

    Args:
        project: the project for a new run, if none is active; `close` finishes that run.
        run: a run to use instead of the active one.
        commit: if False, steps do not become rows. The newest step is added to the next row that you log,
            and steps between are left out. Use it with code that passes ``step=``.
        alerts: also call ``run.alert`` for findings of at least this severity; None for no alerts.
        init: more arguments of ``wandb.init`` for a new run.
        **options: which steps and values to log, as for `gradiometer.sinks.Selection`.

    Raises:
        ImportError: without wandb; ``pip install 'gradiometer[wandb]'`` installs it.
        ValueError: if there is no run and no project was given.
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        run: Any = None,
        commit: bool = True,
        alerts: Severity | None = None,
        init: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> None:
        if alerts is not None:
            check_severity("WeightsAndBiases: alerts", alerts)
        wandb = require("wandb", "wandb", "sinks.WeightsAndBiases")
        self._run = run if run is not None else wandb.run
        self._owned = self._run is None
        if not self._owned:
            options.setdefault("scalars", None)
        self.selection = Selection(**options)
        if self._owned and project is None:
            msg = "WeightsAndBiases: there is no active run; call wandb.init first, or pass project=..."
            raise ValueError(msg)
        if self._owned:
            # not on the background thread, because it may prompt for an API key
            self._run = wandb.init(project=project, **(init or {}))
        self._alerts = alerts
        self._commit = commit
        self._news = News()
        self._lines: list[str] = []
        self._failed = False

    def __repr__(self) -> str:
        return f"WeightsAndBiases({self._run.name or self._run.id!r})"

    def start(self, info: RunInfo) -> None:
        """Define the axis."""
        self._run.define_metric(_STEP, hidden=True)
        for prefix in (*info.catalog.kinds, *(["train"] if self._owned else [])):
            self._run.define_metric(f"{prefix}/*", step_metric=_STEP, step_sync=False)

    def write(self, records: Sequence[StepRecord], findings: Sequence[Finding]) -> None:
        """Log the steps; wandb sends them from a separate process."""
        taken = [record for record in records if self.selection.takes(record)]
        for record in taken if self._commit else taken[-1:]:
            values = self.selection.values(record)
            if values:
                self._run.log({_STEP: record.step, **values}, commit=self._commit)
        for finding in self._news.take(findings):
            self._lines.append(encodable(str(finding)))
            if self._alerts is not None and finding.severity >= self._alerts:
                level = _LEVELS[finding.severity]
                text = encodable(finding.message)
                self._run.alert(title=f"gradiometer: {finding.rule}", text=text, level=level)
            self._run.summary["gradiometer/findings"] = self._lines[:_SHOWN]
            self._run.summary["gradiometer/n_findings"] = len(self._lines)

    def fault(self, fault: Fault) -> None:
        """Put the fault into the summary."""
        # the run goes on after a non-finite loss
        self._failed |= fault.reason not in {"exit", "non-finite loss"}
        self._run.summary["gradiometer/fault"] = encodable(str(fault))

    def close(self) -> None:
        """Finish the run if this sink created it."""
        if self._owned:
            self._run.finish(exit_code=int(self._failed))
