"""The black box: the last steps, the first non-finite value, and why the run ended."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any, Final

from gradiometer.rules import Fault, first_nonfinite_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.monitor.kept_steps import KeptSteps
    from gradiometer.recorder import StepRecord
    from gradiometer.rules import Finding

# steps in a fault: the last ones, and those up to the first non-finite one
_LAST: Final = 64
_BEFORE: Final = 16


class BlackBox:
    """Sees every record on the background thread and keeps the data for a fault report.

    The first non-finite step is the one where the current non-finite phase began. An earlier step from
    which the run recovered, such as one that a GradScaler skipped, is named only if there is no later one.

    Args:
        rank: the rank whose steps it sees, if each rank has its own black box.

    Attributes:
        lost_the_loss: whether the last record is the first of the run with a non-finite loss.
        kept: the data to repeat the last steps; None without a folder for it.
    """

    def __init__(self, rank: int | None = None) -> None:
        self.lost_the_loss = False
        self.kept: KeptSteps | None = None
        self._rank = rank
        self._recent: deque[StepRecord] = deque(maxlen=_LAST)
        self._before: list[StepRecord] = []
        self._first: str | None = None
        self._is_broken = False
        self._had_bad_loss = False

    def see(self, record: StepRecord) -> None:
        """Add the next record."""
        self._recent.append(record)
        bad_loss = record.loss is not None and not math.isfinite(record.loss)
        self.lost_the_loss = bad_loss and not self._had_bad_loss
        self._had_bad_loss = self._had_bad_loss or bad_loss
        text = first_nonfinite_text(record) if record.recorded else None
        if self.kept is not None:
            self.kept.see(record.step, is_bad=bad_loss or text is not None)
        if not record.recorded:
            return
        if text is None:
            if self._is_broken and self._first is not None:
                self._first += f"; finite again in step {record.step}"
            self._is_broken = False
        elif not self._is_broken:
            self._first, self._is_broken = text, True
            self._before = list(self._recent)[-_BEFORE:]

    def fault(self, reason: str, message: str, step: int, findings: Sequence[Finding]) -> Fault:
        """Return a fault with all that is known now; write the data to repeat the step."""
        if self.kept is not None:
            self.kept.write(reason)
        steps = {record.step: record for record in [*self._before, *self._recent]}
        last = [steps[number] for number in sorted(steps)]
        return Fault(reason, message, step, self._first, tuple(findings), tuple(last), self._rank)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run."""
        return {"first": self._first, "is_broken": self._is_broken, "had_bad_loss": self._had_bad_loss}

    def check_state(self, state: Any) -> None:
        """Raise a ValueError unless this is a `state_dict`."""
        fits = isinstance(state, Mapping) and {"first", "is_broken", "had_bad_loss"} <= state.keys()
        if fits:
            flags = state["is_broken"], state["had_bad_loss"]
            fits = isinstance(state["first"], (str, NoneType)) and all([isinstance(x, bool) for x in flags])
        if not fits:
            msg = f"the state's black_box is {state!r:.80}; pass the result of Monitor.state_dict()"
            raise ValueError(msg)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.check_state(state)
        self._first, self._is_broken = state["first"], state["is_broken"]
        self._had_bad_loss = state["had_bad_loss"]
