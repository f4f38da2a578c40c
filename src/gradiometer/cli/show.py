"""One step of a run: its scalars, its tensors and its findings."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from gradiometer.columns import TAP_STATISTICS, UPDATE_STATISTICS
from gradiometer.recorder import TAP_KINDS
from gradiometer.runs import RunError
from gradiometer.stats import row_to_dict

if TYPE_CHECKING:
    import re
    from collections.abc import Sequence

    from gradiometer.recorder import Kind, StepRecord
    from gradiometer.rules import Finding
    from gradiometer.runs import Attempt, Run
    from gradiometer.stats import Report


@dataclass(frozen=True)
class Shown:
    """One step, as the command shows it.

    Attributes:
        run: the run's folder.
        record: the step.
        kind: the kind of the tensors in the report.
        report: the report of the requested tensors.
        measured: the number of tensors of this kind in the step.
        attempt: the attempt that wrote the step.
        attempts: all attempts in the folder.
        findings: the findings whose range includes this step, most severe first.
        nearest: if the step has no tensors, the nearest steps before and after it that have some.
    """

    run: str
    record: StepRecord
    kind: Kind
    report: Report
    measured: int
    attempt: int
    attempts: Sequence[Attempt]
    findings: Sequence[Finding]
    nearest: Sequence[int] = ()

    def to_dict(self, top: int | None = None) -> dict[str, Any]:
        """Return plain values, of the ``top`` worst tensors or of all."""
        record, rows = self.record, self.report.worst_first()
        values = self.report.to_dict()
        values["tensors"] = {row.name: row_to_dict(row) for row in rows[:top]}
        if self.kind == "updates":
            values |= self.of_updates()
        own = UPDATE_STATISTICS if self.kind == "updates" else TAP_STATISTICS
        if self.kind == "updates" or self.kind in TAP_KINDS:
            found = {name: record.value(name, self.kind).tolist() for name in own}
            for name, row in values["tensors"].items():
                place = record.roster.index[name]
                row |= {statistic: numbers[place] for statistic, numbers in found.items()}
        return {
            "run": self.run,
            "step": record.step,
            "time": record.time,
            "recorded": record.recorded,
            "skipped": record.skipped,
            "scalars": dict(record.scalars),
            "kind": self.kind,
            "report": values,
            "attempt": self.attempt,
            "attempts": [asdict(attempt) for attempt in self.attempts],
            "findings": [finding.to_dict() for finding in self.findings],
            "nearest": list(self.nearest),
        }

    def of_updates(self) -> dict[str, float]:
        """Return the values that only updates have, of all tensors together; NaN if they are not known."""
        found = {name: self.record.total(name, "updates") for name in UPDATE_STATISTICS}
        if not self.record.total("n_nonzero_g", "updates") > 0:
            found["stuck_fraction"] = math.nan
        return found


def look(
    run: Run, step: int | None = None, *, kind: Kind = "grads", name: re.Pattern[str] | None = None
) -> Shown:
    """Return one step of a run.

    Args:
        run: the run.
        step: its number; negative numbers count from the end. None for the last step with tensors, or for the
            last step if none has tensors, and then with the findings of all steps.
        kind: the kind of the tensors.
        name: only tensors whose name matches (`re.Pattern.search`).

    Raises:
        RunError: if the run has no such step, kind or tensor; the message says what it has.
    """
    rows = run.steps.select(["step", "recorded", "attempt"])
    is_last = step is None
    steps, recorded, attempts = (column.to_pylist() for column in rows.columns)
    if not steps:
        raise RunError(f"{run.path} has no steps yet; try again when the run has written some")
    having = [s for s, has in zip(steps, recorded, strict=True) if has]
    if step is None:
        step = (having or steps)[-1]
    elif -len(steps) <= step < 0:
        step = steps[step]
    if step not in set(steps):
        raise RunError(f"{run.path} has no step {step}; it has {len(steps)}, from {steps[0]} to {steps[-1]}")
    if kind not in run.roster.kinds:
        raise RunError(f"{run.path} has no {kind!r}; choose from {', '.join(run.roster.kinds)}")
    record = run.record(step)
    whole = record.report(kind)
    report = whole if name is None else _named(record, kind, name)
    if name is not None and whole.measured and not report.measured:
        raise RunError(f"{run.path}: no tensor of step {step} has a name that matches {name.pattern!r}")
    before, after = [s for s in having if s < step], [s for s in having if s > step]
    nearest = () if record.recorded else (*before[-1:], *after[:1])
    findings = [f for f in run.findings if is_last or f.first_step <= step <= f.last_step]
    findings.sort(key=lambda f: (-f.severity, f.first_step))
    attempt = attempts[steps.index(step)]
    return Shown(str(run.path), record, kind, report, len(whole), attempt, run.attempts, findings, nearest)


def _named(record: StepRecord, kind: Kind, name: re.Pattern[str]) -> Report:
    """Return the report of the measured tensors whose name matches."""
    found = torch.tensor([bool(name.search(x)) for x in record.roster.names], dtype=torch.bool, device="cpu")
    if record.values is None:
        return record.report(kind)
    values = torch.where(found.view(1, -1, 1), record.values, 0.0)
    return replace(record, values=values).report(kind)
