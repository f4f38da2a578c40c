"""Findings: what a rule has to say about a run, and the ledger that keeps one of each."""

from __future__ import annotations

import enum
import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gradiometer.steps import Kind

__all__ = ["Finding", "Ledger", "Severity"]


class Severity(enum.IntEnum):
    """How much a finding matters: worth knowing; probably a problem; the run is harmed."""

    INFO = 10
    WARNING = 20
    ERROR = 30

    def __str__(self) -> str:
        """Return the word: ``warning``."""
        return self.name.lower()


@dataclass(frozen=True)
class Finding:
    """What one rule found about one tensor, or about the run, over some steps.

    Attributes:
        rule: the rule's name, such as ``"nonfinite"``.
        severity: how much it matters.
        first_step: where it began.
        last_step: where it was last seen.
        count: in how many recorded steps it was seen.
        kind: ``"grads"``, ``"weights"`` or ``"updates"``; None if it is about no tensor.
        tensor: the parameter's name; None if it is about all of them, or about a scalar.
        value: the most extreme one seen.
        worst_step: where that was; None: in the first.
        threshold: what it is compared with.
        message: one line, complete in itself.
        advice: what to try, one line.
    """

    rule: str
    severity: Severity
    first_step: int
    last_step: int
    kind: Kind | None
    tensor: str | None
    value: float
    threshold: float
    message: str
    advice: str
    count: int = 1
    worst_step: int | None = None

    @property
    def key(self) -> tuple[str, str | None, str | None]:
        """What two sightings of the same thing have in common."""
        return self.rule, self.kind, self.tensor

    def __str__(self) -> str:
        """Return one line: ``warning  step 12 to 40, worst at 31: ...``."""
        steps = f"step {self.first_step}"
        if self.last_step != self.first_step:
            steps += f" to {self.last_step}"
        if self.worst_step is not None:
            steps += f", worst at {self.worst_step}"
        return f"{self.severity!s:7}  {steps}: {self.message}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; the severity as a word."""
        return asdict(self) | {"severity": str(self.severity)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Finding:
        """Return what `to_dict` was made of."""
        return cls(**{**values, "severity": Severity[values["severity"].upper()]})


class Ledger:
    """Keeps findings: a sighting within ``gap`` steps of the last one of its kind prolongs that finding.

    Attributes:
        findings: all of them, in the order in which they began.
    """

    def __init__(self, gap: int = 100) -> None:
        self.gap = gap
        self._least = gap
        self.findings: list[Finding] = []
        self._open: dict[tuple[str, str | None, str | None], int] = {}

    def add(self, sightings: Iterable[Finding]) -> list[Finding]:
        """Take what rules saw in one step; return the findings that are new or have changed."""
        changed: dict[int, Finding] = {}
        for seen in sightings:
            place = self._open.get(seen.key)
            if place is None or seen.first_step - self.findings[place].last_step > self.gap:
                place = self._open[seen.key] = len(self.findings)
                self.findings.append(seen)
            else:
                self.findings[place] = _prolonged(self.findings[place], seen)
            changed[place] = self.findings[place]
        return list(changed.values())

    def span(self, every: int) -> None:
        """Let the gap hold two recorded steps at least, where one in ``every`` is recorded."""
        self.gap = max(self._least, 2 * every)

    def load(self, findings: Iterable[Finding]) -> None:
        """Go on from findings of before; the last of a kind may be prolonged."""
        self.findings[:] = findings
        self._open = {found.key: place for place, found in enumerate(self.findings)}


def _prolonged(old: Finding, seen: Finding) -> Finding:
    worse = seen if seen.severity > old.severity or _is_beyond(seen, old) else old
    return replace(
        worse,
        severity=max(old.severity, seen.severity),
        first_step=min(old.first_step, seen.first_step),
        last_step=max(old.last_step, seen.last_step),
        worst_step=old.worst_step if worse is old else seen.first_step,
        count=old.count + seen.count,
    )


def _is_beyond(seen: Finding, old: Finding) -> bool:
    if math.isnan(old.value) or math.isnan(seen.value):
        return False
    return seen.value > old.value if old.value >= old.threshold else seen.value < old.value
