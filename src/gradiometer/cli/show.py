"""One step of a run: its scalars, its tensors and its findings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gradiometer.runs import RunError

if TYPE_CHECKING:
    import re
    from collections.abc import Sequence

    from gradiometer.recorder import StepRecord
    from gradiometer.rules import Finding
    from gradiometer.runs import Attempt, Run
    from gradiometer.stats import TableReport


@dataclass(frozen=True)
class Shown:
    """One step, as the command shows it.

    The report has the requested tensors of this kind; ``measured`` is their number in the step. ``attempts``
    are all of the folder. The findings are those whose range includes this step, most severe first. If the
    step has no tensors of this kind, ``nearest`` are the nearest steps before and after that have some.
    """

    run: str
    record: StepRecord
    kind: str
    report: TableReport[Any]
    measured: int
    attempt: int
    attempts: Sequence[Attempt]
    findings: Sequence[Finding]
    nearest: Sequence[int] = ()

    def to_dict(self, top: int | None = None) -> dict[str, Any]:
        """Return plain values, of the first ``top`` tensors of the table or of all."""
        record = self.record
        return {
            "run": self.run,
            "step": record.step,
            "time": record.time,
            "recorded": record.recorded,
            "skipped": record.skipped,
            "scalars": dict(record.scalars),
            "kind": self.kind,
            "report": plain(self.report, top),
            "attempt": self.attempt,
            "attempts": [asdict(attempt) for attempt in self.attempts],
            "findings": [finding.to_dict() for finding in self.findings],
            "nearest": list(self.nearest),
        }


def plain(report: TableReport[Any], top: int | None = None) -> dict[str, Any]:
    """Return a report's plain values, with the first ``top`` rows of its table."""
    names = [row.name for row in report.ordered()]
    values = report.to_dict()
    # under a key such as "tensors"
    for key, value in values.items():
        if isinstance(value, dict) and value.keys() == {*names}:
            values[key] = {name: value[name] for name in names[:top]}
    return values


def look(
    run: Run, step: int | None = None, *, kind: str = "grads", name: re.Pattern[str] | None = None
) -> Shown:
    """Return one step of a run.

    Negative numbers of steps count from the end. None is the last step with tensors of this kind, or the last
    step if none has any, and then with the findings of all steps. With ``name``, the report has only tensors
    whose name matches (`re.Pattern.search`). Raise RunError, which says what the run has, if it has no such
    step, kind or tensor.
    """
    rows = run.steps.select(["step", "kinds", "attempt"])
    is_last = step is None
    steps, measured, attempts = (column.to_pylist() for column in rows.columns)
    if not steps:
        raise RunError(f"{run.path} has no steps yet; try again when the run has written some")
    having = [s for s, found in zip(steps, measured, strict=True) if kind in found]
    if step is None:
        step = (having or steps)[-1]
    elif -len(steps) <= step < 0:
        step = steps[step]
    if step not in set(steps):
        raise RunError(f"{run.path} has no step {step}; it has {len(steps)}, from {steps[0]} to {steps[-1]}")
    kinds = run.catalog.kinds
    if kind not in kinds:
        raise RunError(f"{run.path} has no {kind!r}; choose from {', '.join(kinds)}")
    record = run.record(step)
    whole = record.report(kind)
    named = [x for x in record.names(kind) if name is None or name.search(x)]
    report = whole if name is None else record.report(kind, named)
    if name is not None and whole.measured and not report.measured:
        raise RunError(f"{run.path}: no tensor of step {step} has a name that matches {name.pattern!r}")
    before, after = [s for s in having if s < step], [s for s in having if s > step]
    nearest = () if record.has(kind) else (*before[-1:], *after[:1])
    findings = [f for f in run.findings if is_last or f.first_step <= step <= f.last_step]
    findings.sort(key=lambda f: (-f.severity, f.first_step))
    attempt = attempts[steps.index(step)]
    return Shown(str(run.path), record, kind, report, len(whole), attempt, run.attempts, findings, nearest)
