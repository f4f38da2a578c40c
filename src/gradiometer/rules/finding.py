"""Findings: observations of a rule about a run, and their severity."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradiometer.recorder import Kind

__all__ = ["Finding", "Severity"]


class Severity(enum.IntEnum):
    """How much a finding matters: worth knowing, probably a problem, or harmful to the run."""

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
        first_step: the step at which it began.
        last_step: the step at which it was last seen.
        count: number of steps in which the rule reported it.
        kind: ``"grads"``, ``"weights"`` or ``"updates"``; None if it is not about tensors.
        tensor: the parameter's name; None if it is about all of them, or about a scalar.
        value: the most extreme value seen.
        worst_step: the step of that value; None if it is the value with which the finding began.
        threshold: the limit that the value is compared with.
        message: one self-contained line.
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
        """The key that all sightings of the same condition share."""
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
        """Return the finding that `to_dict` converted to these values."""
        return cls(**{**values, "severity": Severity[values["severity"].upper()]})
