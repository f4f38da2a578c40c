"""Which tensors of a run fit which format, in one step and over the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gradiometer.columns import LOWEST_BINADE, format_of, losses
from gradiometer.runs import RunError
from gradiometer.stats import aligned, percent, with_short_names
from gradiometer.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.runs import Run, StepPrecision
    from gradiometer.stats import ExponentStats


@dataclass
class Loss:
    """The share of a tensor's elements that a cast to one format would lose, over the measured steps.

    Attributes:
        first, last: in the first and in the last step in which the tensor was measured.
        worst: the largest share, and ``worst_step`` the first step with it.
    """

    first: float
    last: float
    worst: float
    worst_step: int


@dataclass
class Trend:
    """A tensor over the measured steps.

    Attributes:
        median: floor(log2 |x|) of the median nonzero element in the first and in the last step in which the
            tensor was measured; None if there is no such element.
        formats: by the name of the format.
        first_nonfinite: the first measured step in which the tensor had NaN or Inf, or None.
    """

    median: list[int | None]
    formats: dict[str, Loss]
    first_nonfinite: int | None = None


@dataclass(frozen=True)
class PrecisionOverRun:
    """What the command shows: the report of a step, and each tensor over all steps with histograms."""

    run: str
    report: StepPrecision
    steps: Sequence[int]
    trends: dict[str, Trend]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        report = self.report
        return {
            "run": self.run,
            "step": report.step,
            "kind": report.kind,
            "steps": list(self.steps),
            "formats": list(report.formats),
            "tensors": {row.name: asdict(row) for row in report.values()},
            "total": asdict(report.total),
            "over_run": {name: asdict(trend) for name, trend in self.trends.items()},
        }


def look(run: Run, step: int | None, kind: str, formats: Sequence[str] | None) -> PrecisionOverRun:
    """Return what a run says about formats, or all of them.

    ``step``: a measured step; negative numbers count from the end, and None is the last one. Raise RunError,
    which says what there is, if there are no histograms of that step or kind.
    """
    steps = run.precision_steps
    if step is not None and -len(steps) <= step < 0:
        step = steps[step]
    report = run.precision(step, kind, formats)
    trends: dict[str, Trend] = {}
    for number, stats in run.precisions(kind):
        _add_step(trends, number, stats, report.formats)
    if not trends:
        raise RunError(f"{run.path} has no histograms of {kind}")
    return PrecisionOverRun(str(run.path), report, steps, trends)


def _add_step(trends: dict[str, Trend], step: int, stats: ExponentStats, formats: Sequence[str]) -> None:
    """Add a step to the trends of its tensors."""
    numel = stats.numel.clamp(min=1)
    found = {}
    for name in formats:
        flushed, _, over = losses(stats.columns, format_of(name, "precision"))
        found[name] = ((flushed + over) / numel).tolist()
    medians = _medians(stats)
    nonfinite = (stats.n_nan + stats.n_inf).tolist()
    for row, name in enumerate(stats.names):
        shares = {form: values[row] for form, values in found.items()}
        if name not in trends:
            losses_ = {form: Loss(share, share, share, step) for form, share in shares.items()}
            trends[name] = Trend([medians[row], medians[row]], losses_, step if nonfinite[row] else None)
            continue
        trend = trends[name]
        if nonfinite[row] and trend.first_nonfinite is None:
            trend.first_nonfinite = step
        trend.median[1] = medians[row]
        for form, share in shares.items():
            loss = trend.formats[form]
            loss.last = share
            if share > loss.worst:
                loss.worst, loss.worst_step = share, step


def _medians(stats: ExponentStats) -> list[int | None]:
    """Return floor(log2 |x|) of the median of each tensor's nonzero finite elements."""
    upto = stats.binades.cumsum(-1)
    total = upto[:, -1:]
    places = (2 * upto < total).sum(-1)
    return [
        place + LOWEST_BINADE - 1 if count else None
        for place, count in zip(places.tolist(), total.view(-1).tolist(), strict=True)
    ]


def render(found: PrecisionOverRun, top: int | None) -> str:
    """Return the report of the step, and below it what changed over the run."""
    report = found.report.to_string(top)
    return report if len(found.steps) < 2 else f"{report}\n\n{_over_run(found, top)}"


def _over_run(found: PrecisionOverRun, top: int | None) -> str:
    formats = {name: format_of(name, "precision").short for name in found.report.formats}
    # formats in which nothing is ever lost need no column
    lossy = [name for name in formats if any(trend.formats[name].worst for trend in found.trends.values())]
    headline = f"over {len(found.steps)} measured steps, from {found.steps[0]} to {found.steps[-1]}: "
    steps = [x.first_nonfinite for x in found.trends.values() if x.first_nonfinite is not None]
    tensors = f"{len(steps)} tensor{'s' * (len(steps) != 1)}"
    counted = "only finite elements are counted as lost"
    bad = [f"NaN or Inf in {tensors}, first in step {min(steps)}: {counted}"] if steps else []
    if not lossy:
        return "\n".join([f"{headline}no loss in {', '.join(formats.values())}", *bad])
    headline += "% lost in the first → the last step (the most, at step)"
    rows = sorted(found.trends.items(), key=lambda item: _worst(item[1]), reverse=True)
    shown = rows if top is None else rows[:top]
    cells = [
        (printable(name), _median(trend), *[_cell(trend.formats[form]) for form in lossy])
        for name, trend in shown
    ]
    header = ("name", "median log2 |x|", *[f"{formats[name]} lost %" for name in lossy])
    lines, rule = aligned([header, *with_short_names(cells)])
    more = [f"… {len(rows) - len(shown)} more"] if len(shown) < len(rows) else []
    fine = [short for name, short in formats.items() if name not in lossy]
    note = [f"no loss in any step in {', '.join(fine)}"] if fine else []
    return "\n".join([headline, rule, lines[0], rule, *lines[1:], *more, rule, *note, *bad])


def _worst(trend: Trend) -> float:
    return max(loss.worst for loss in trend.formats.values())


def _median(trend: Trend) -> str:
    first, last = ["-" if x is None else str(x) for x in trend.median]
    return first if first == last else f"{first} → {last}"


def _cell(loss: Loss) -> str:
    if not loss.worst:
        return "0"
    first, last, worst = [percent(x) for x in (loss.first, loss.last, loss.worst)]
    return f"{first} → {last} ({worst} at {loss.worst_step})"
