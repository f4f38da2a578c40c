"""A fault: why a run ended, and the last steps before it, as kept in the black box."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradiometer.terminal import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradiometer.recorder import StepRecord
    from gradiometer.rules.finding import Finding


@dataclass(frozen=True)
class Fault:
    """Why a run ended or was found broken, with the findings and last steps before that.

    Attributes:
        reason: ``"exception"``, ``"interrupt"``, ``"SIGTERM"``, ``"SIGHUP"``, ``"non-finite loss"`` or
            ``"exit"``; or ``"other rank"`` if another rank ended for such a reason, or does not respond.
        message: details, such as the class and message of the exception; may be empty.
        step: the current step.
        first_nonfinite: such as ``"step 1207, blocks.3.mlp.w1.grad, 12 NaN of 4.2 M"``; None if all
            recorded values are finite.
        findings: all findings of the run so far.
        last: the last records, and those up to the first non-finite step; oldest first.
        rank: the rank of these last records; None if they are those of all ranks.
    """

    reason: str
    message: str
    step: int
    first_nonfinite: str | None
    findings: Sequence[Finding]
    last: Sequence[StepRecord]
    rank: int | None = None

    def __str__(self) -> str:
        """Return a one-line summary: ``exception in step 1208: ...; first non-finite: step 1207, ...``."""
        return summarize(vars(self))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; the last steps have scalars, total norm and count of non-finite elements."""
        report: dict[str, Any] = {} if self.rank is None else {"rank": self.rank}
        return report | {
            "reason": self.reason,
            "message": self.message,
            "step": self.step,
            "first_nonfinite": self.first_nonfinite,
            "findings": [finding.to_dict() for finding in self.findings],
            "last": [_row(record) for record in self.last],
        }


def summarize(fault: Mapping[str, Any]) -> str:
    """Return a one-line summary of a fault, or of a `Fault.to_dict` that may be incomplete."""
    rank = fault.get("rank")
    text = "" if rank is None else f"rank {rank}: "
    text += f"{fault.get('reason', 'fault')} in step {fault.get('step', '?')}"
    if message := fault.get("message"):
        text += f": {message}"
    if where := fault.get("first_nonfinite"):
        text += f"; first non-finite: {where}"
    return one_line(text)


def _row(record: StepRecord) -> dict[str, Any]:
    row: dict[str, Any] = {
        "step": record.step,
        "time": record.time,
        "scalars": dict(record.scalars),
        "recorded": record.recorded,
        "skipped": record.skipped,
    }
    if record.has("grads"):
        row |= {"total_norm": record.total("norm"), "n_nonfinite": int(record.total("n_nonfinite"))}
    return row
