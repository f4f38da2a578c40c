"""The ledger: joins findings about the same condition."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from gradiometer.rules.finding import MOST, checked

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradiometer.rules.finding import Finding


class Ledger:
    """Collects findings; one within ``gap`` steps of another with the same key extends that one.

    Attributes:
        findings: all of them, in the order in which they were first added.
    """

    def __init__(self, gap: int = 100) -> None:
        self.gap = gap
        self._least = gap
        self.findings: list[Finding] = []
        self._open: dict[tuple[str, str | None, str | None], int] = {}

    def add(self, sightings: Iterable[Finding]) -> list[Finding]:
        """Add the findings of one step; return those of the ledger that are new or have changed.

        Raises:
            TypeError: for an object that is not a `Finding`, or with a field of another type that cannot be
                converted; the message names the field. Those before it are added.
        """
        changed: dict[int, Finding] = {}
        for finding in sightings:
            seen = checked(finding)
            place = self._open.get(seen.key)
            if place is None or seen.first_step - self.findings[place].last_step > self.gap:
                place = self._open[seen.key] = len(self.findings)
                self.findings.append(seen)
            else:
                self.findings[place] = _prolonged(self.findings[place], seen)
            changed[place] = self.findings[place]
        return list(changed.values())

    def span(self, every: int) -> None:
        """Set the gap to at least ``2 * every`` steps, since only one step in ``every`` is recorded."""
        self.gap = max(self._least, 2 * every)

    def load(self, findings: Iterable[Finding]) -> None:
        """Continue from earlier findings; the last one of each key may be extended."""
        self.findings[:] = findings
        self._open = {found.key: place for place, found in enumerate(self.findings)}


def _prolonged(old: Finding, seen: Finding) -> Finding:
    worse = seen if seen.severity > old.severity or _is_beyond(seen, old) else old
    return replace(
        worse,
        severity=max(old.severity, seen.severity),
        first_step=min(old.first_step, seen.first_step),
        last_step=max(old.last_step, seen.last_step),
        worst_step=old.worst_step if worse is old else seen.last_step,
        count=min(old.count + seen.count, MOST),
    )


def _is_beyond(seen: Finding, old: Finding) -> bool:
    if math.isnan(old.value) or math.isnan(seen.value):
        return False
    return seen.value > old.value if old.value >= old.threshold else seen.value < old.value
