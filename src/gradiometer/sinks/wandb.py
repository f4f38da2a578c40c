"""Weights & Biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gradiometer.extras import require
from gradiometer.recorder import KINDS
from gradiometer.rules import Severity
from gradiometer.runs import encodable
from gradiometer.sinks.selection import News, Options, Selection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Unpack

    from gradiometer.recorder import RunInfo, StepRecord
    from gradiometer.rules import Fault, Finding

__all__ = ["WeightsAndBiases"]

_STEP: Final = "gradiometer/step"
_LEVELS: Final = {Severity.INFO: "INFO", Severity.WARNING: "WARN", Severity.ERROR: "ERROR"}
_SHOWN: Final = 50


class WeightsAndBiases:
    """Logs to a run of Weights & Biases: to the active one, or to one of its own.

    What it logs arrives some steps late, and so has an axis of its own, ``gradiometer/step``, which its
    plots use. In a run that is there already the loss and other scalars are left to whoever made it, unless
    ``scalars=`` asks for them. Findings are listed in the run's summary.

    Each step is a row of the run's history and counts for its internal step, like every ``wandb.log``. Code
    that logs with ``wandb.log(..., step=n)`` itself would have rows refused: see ``commit``.

    Args:
        project: for a run of its own, if none is active; it is finished by `close`.
        run: a run, instead of the active one.
        commit: False: nothing becomes a row of its own. The newest step joins the next row that you log;
            those between are left out. For code that passes ``step=``.
        alerts: also send ``run.alert`` for findings from this severity on; None for none.
        init: more arguments of ``wandb.init``, for a run of its own.
        **options: which steps and values, as for `gradiometer.sinks.Selection`.

    Raises:
        ImportError: without wandb; ``pip install 'gradiometer[wandb]'`` brings it.
        ValueError: without a project where there is no run.
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
        wandb = require("wandb", "wandb", "sinks.WeightsAndBiases")
        self._run = run if run is not None else wandb.run
        self._owned = self._run is None
        if not self._owned:
            options.setdefault("scalars", None)
        self.selection = Selection(**options)
        if self._owned and project is None:
            raise ValueError(
                "WeightsAndBiases: there is no active run; call wandb.init first, or give project=..."
            )
        if self._owned:
            # here and not on the background thread: it may ask for a key
            self._run = wandb.init(project=project, **(init or {}))
        self._alerts = alerts
        self._commit = commit
        self._news = News()
        self._lines: list[str] = []
        self._failed = False

    def __repr__(self) -> str:
        """Return the run's name."""
        return f"WeightsAndBiases({self._run.name or self._run.id!r})"

    def start(self, info: RunInfo) -> None:
        """Define the axis."""
        del info
        self._run.define_metric(_STEP, hidden=True)
        for prefix in (*KINDS, *(["train"] if self._owned else [])):
            self._run.define_metric(f"{prefix}/*", step_metric=_STEP, step_sync=False)

    def write(self, records: Sequence[StepRecord], findings: Sequence[Finding]) -> None:
        """Log the steps; wandb sends them on a process of its own."""
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
        # after a loss that is not finite the run goes on
        self._failed |= fault.reason not in {"exit", "non-finite loss"}
        self._run.summary["gradiometer/fault"] = encodable(str(fault))

    def close(self) -> None:
        """Finish the run, if it is this sink's own."""
        if self._owned:
            self._run.finish(exit_code=int(self._failed))
