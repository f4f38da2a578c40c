"""The findings of a run: log lines as they begin, and a summary on one screen."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gradiometer.monitor.failures import LOG
from gradiometer.rules import Severity, counts_text, first_of, headlines, table_of
from gradiometer.stats import html, number
from gradiometer.terminal import one_line, printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradiometer.recorder import StepRecord
    from gradiometer.rules import Finding, Headline

# log lines of findings in a run
_LINES = 20


class FindingLog:
    """Logs each headline once, as one line, when it begins.

    Warnings and errors have the same level in the log, INFO if a sink shows findings by itself, as
    ``is_shown`` says. After 20 lines a last one says that there are more.
    """

    def __init__(self, *, is_shown: bool) -> None:
        self.logger = LOG
        self._is_shown = is_shown
        self._known: set[tuple[object, ...]] = set()
        self._lines = 0

    def see(self, findings: Sequence[Finding], changed: Sequence[Finding]) -> None:
        """Log headlines that have begun; ``changed``: the findings that are new, or have changed since."""
        if self._lines > _LINES:
            return
        if all([_key(one) in self._known or one.severity < Severity.WARNING for one in changed]):
            return
        for headline in headlines(findings):
            if headline.severity < Severity.WARNING:
                continue
            # a known cause goes on, however many findings follow from it
            if not any(_key(one) in self._known for one in headline.findings):
                self._log(headline)
            self._known.update(map(_key, (*headline.findings, *headline.explained)))

    def load(self, findings: Sequence[Finding]) -> None:
        """Take findings as known, as those of a resumed run."""
        self._known = {_key(one) for one in findings if one.severity >= Severity.WARNING}

    def _log(self, headline: Headline) -> None:
        self._lines += 1
        level = logging.ERROR if headline.severity >= Severity.ERROR else logging.WARNING
        level = logging.INFO if self._is_shown else level
        if self._lines > _LINES:
            if self._lines == _LINES + 1:
                self.logger.log(level, "more findings are not logged: see monitor.summary()")
            return
        text = one_line(f"step {headline.first_step}: {headline.message}")
        advice = f"; {one_line(headline.advice)}" if headline.advice else ""
        self.logger.log(level, "%s%s", text, advice)


def _key(finding: Finding) -> tuple[object, ...]:
    return finding.rule, finding.kind, finding.tensor, finding.first_step


def lost_text(dropped: int, failures: Mapping[str, int]) -> list[str]:
    """Return phrases about dropped steps and about failures; none if there are none."""
    failed = ", ".join([f"{kind} ({count})" for kind, count in failures.items()])
    found = [f"dropped: {dropped:,} step{'s' * (dropped != 1)}"] if dropped else []
    return found + [f"failures: {failed}"] * bool(failed)


class Summary:
    """A run so far, on one screen: as text, and as HTML for a notebook.

    ``recorded``: the number of steps with tensors. ``command``: it shows more; empty without a run record.
    """

    def __init__(
        self,
        steps: int,
        recorded: int,
        last: StepRecord | None,
        findings: Sequence[Finding],
        dropped: int,
        failures: Mapping[str, int],
        command: str,
    ) -> None:
        self._first = f"{steps:,} steps, {recorded:,} with tensors" + _last_text(last)
        self._headlines = headlines(findings)
        self._counts = counts_text(findings)
        self._end = [*_not_held(last), *lost_text(dropped, failures), *([command] if command else [])]

    def __str__(self) -> str:
        """Return some ten lines."""
        lines = [self._first, self._counts]
        listed, more = first_of(self._headlines)
        for headline in listed:
            lines += [str(headline), f"         {headline.advice}"]
        lines += [*more, *self._end]
        return "\n".join([printable(line) for line in lines])

    def _repr_html_(self) -> str:
        """Return the same as HTML."""
        table = table_of(self._headlines)
        notes = [*table.notes, *[printable(line) for line in self._end]]
        return html(table._replace(headline=printable(f"{self._first}; {self._counts}"), notes=notes))


def _not_held(last: StepRecord | None) -> list[str]:
    """Return a line about the parameters that no optimizer holds; none if there are none."""
    known = None if last is None or last.model is None else last.model.optimizers
    if last is None or known is None or known.has_others or len(known.groups) != len(last.names()):
        return []
    is_held = zip(last.names(), known.groups, known.rounded_well, strict=True)
    names = [name for name, group, has_copy in is_held if group < 0 and not has_copy]
    if not names:
        return []
    some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return [f"no optimizer holds {len(names)} of {len(last.names())} parameters: {some}"]


def _last_text(last: StepRecord | None) -> str:
    if last is None:
        return ""
    values = [f"{name} {number(value, 4)}" for name, value in list(last.scalars.items())[:4]]
    if last.recorded:
        values.append(f"gradient norm {number(last.total())}")
    return f"; step {last.step}: " + ", ".join(values) if values else f"; step {last.step}"
