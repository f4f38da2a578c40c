"""The black box: the last steps, where the first non-finite value was, and why the run ended."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from gradiometer.rules import Fault, first_nonfinite_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradiometer.recorder import StepRecord
    from gradiometer.rules import Finding

__all__ = ["BlackBox"]

# steps that a fault shows: the last ones, and those before the first non-finite one
_LAST: Final = 64
_BEFORE: Final = 16


class BlackBox:
    """Sees every record, on the background thread, and keeps what a fault is made of.

    Where the run is not finite now, the first non-finite step is the one with which that began; a step
    that was overcome earlier, such as one that a GradScaler skipped, is named only while there is no other.

    Args:
        rank: whose steps it sees, where each rank has one of its own.

    Attributes:
        lost_the_loss: whether the record seen last is the run's first with a loss that is not finite.
    """

    def __init__(self, rank: int | None = None) -> None:
        self.lost_the_loss = False
        self._rank = rank
        self._recent: deque[StepRecord] = deque(maxlen=_LAST)
        self._before: list[StepRecord] = []
        self._first: str | None = None
        self._is_broken = False
        self._had_bad_loss = False

    def see(self, record: StepRecord) -> None:
        """Take the next record."""
        self._recent.append(record)
        bad_loss = record.loss is not None and not math.isfinite(record.loss)
        self.lost_the_loss = bad_loss and not self._had_bad_loss
        self._had_bad_loss = self._had_bad_loss or bad_loss
        if not record.recorded:
            return
        text = first_nonfinite_text(record)
        if text is None:
            if self._is_broken and self._first is not None:
                self._first += f"; finite again in step {record.step}"
            self._is_broken = False
        elif not self._is_broken:
            self._first, self._is_broken = text, True
            self._before = list(self._recent)[-_BEFORE:]

    def fault(self, reason: str, message: str, step: int, findings: Sequence[Finding]) -> Fault:
        """Return what is known now."""
        steps = {record.step: record for record in [*self._before, *self._recent]}
        last = [steps[number] for number in sorted(steps)]
        return Fault(reason, message, step, self._first, tuple(findings), tuple(last), self._rank)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run goes on with."""
        return {"first": self._first, "is_broken": self._is_broken, "had_bad_loss": self._had_bad_loss}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._first, self._is_broken = state["first"], state["is_broken"]
        self._had_bad_loss = state["had_bad_loss"]
