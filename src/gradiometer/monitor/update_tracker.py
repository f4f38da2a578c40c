"""The updates of one or several optimizers, from step to step of a monitor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradiometer.ops import is_capturing
from gradiometer.recorder import Updates

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from gradiometer.monitor.failures import Failures
    from gradiometer.recorder import Recorder


class UpdateTracker:
    """Measures the updates of each optimizer once a step, each with a copy of its own parameters.

    A failure is counted, and the updates of the step are then missing.

    Args:
        recorder: the updates are written into its current step.
        failures: counts failures.
        is_enabled: whether to measure updates at all.

    Attributes:
        parts: the updates of each optimizer; empty without updates, and after `release`.
        is_released: whether `release` was called.
    """

    def __init__(self, recorder: Recorder, failures: Failures, *, is_enabled: bool) -> None:
        self._recorder, self._failures = recorder, failures
        self.parts = [Updates(recorder)] if is_enabled else []
        self.is_released = False

    def split(self, parts: Iterable[Collection[str]]) -> None:
        """Measure the updates of these parameters apart; the parts are all parameters together."""
        if self.parts:
            self.parts = [Updates(self._recorder, names) for names in parts]

    def begin(self, part: int | None, step: int, every: int) -> None:
        """Copy the weights right before the update of a step, if the step is due."""
        if not is_capturing(self._recorder.ring.device):
            for updates in self._of(part):
                updates.has_begun = True
                self._failures.attempt("updates", updates.keep_for, step, every)

    def trace(self, part: int | None) -> None:
        """Measure the updates and copy the weights in compiled code."""
        for updates in self._of(part):
            updates.is_measured = updates.is_traced = True
            updates.measure_and_keep()

    def record(self, part: int | None, step: int, *, again: bool) -> None:
        """Measure the updates of a step, unless that was done in this step; with ``again`` even then."""
        for updates in self._of(part):
            if again or not updates.is_measured:
                self._measure(updates, step)

    def end_step(self, step: int, every: int) -> None:
        """Measure the updates unless that was done in this step, and copy the weights for the next one.

        They are not copied if `begin` was called in this step, as it is then in the next one.
        """
        for updates in self.parts:
            if not (updates.is_measured or is_capturing(self._recorder.ring.device)):
                self._measure(updates, step)
            if updates.is_traced:
                self._failures.attempt("updates", updates.keep_new, step + 1)
            elif not updates.has_begun:
                self._failures.attempt("updates", updates.keep_for, step + 1, every)

    def begin_step(self) -> None:
        """Begin a step in which nothing was measured."""
        for updates in self.parts:
            updates.end_step()

    def restart(self, step: int) -> None:
        """Copy the weights as those before this step, whose number was set."""
        for updates in self.parts:
            self._failures.attempt("updates", updates.keep, step)

    def drop_stale(self, step: int) -> None:
        """Drop copies that were to be replaced for ``step`` and were not: the weights may have changed."""
        for updates in self.parts:
            if not updates.is_traced and updates.step != step:
                updates.drop()

    def release(self) -> None:
        """Free the copies."""
        self.parts, self.is_released = [], True

    def _of(self, part: int | None) -> Sequence[Updates]:
        return self.parts if part is None else [self.parts[part]]

    def _measure(self, updates: Updates, step: int) -> None:
        # set first: after an exception, another step's gradients may be there
        updates.is_measured = True
        try:
            updates.measure(step)
        except Exception as error:  # noqa: BLE001 training goes on
            updates.drop()
            self._failures.add("updates", error)
