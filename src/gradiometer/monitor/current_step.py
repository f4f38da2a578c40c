"""The step that the training loop is in, and how it ends, even if an exception interrupts its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from gradiometer.columns import Cursor
from gradiometer.ops import is_capturing
from gradiometer.recorder import Updates

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from torch import Tensor

    from gradiometer.monitor.failures import Failures
    from gradiometer.monitor.pipeline import Pipeline
    from gradiometer.recorder import ModelState, Recorder


class UpdateTracker:
    """Measures the updates of each optimizer once a step, each with a copy of its own parameters.

    A failure is counted, and the updates of the step are then missing.

    Attributes:
        parts: the updates of each optimizer; empty without updates, and after `release`.
        is_released: whether `release` was called.
    """

    def __init__(self, recorder: Recorder, failures: Failures, *, is_enabled: bool) -> None:
        self._recorder, self._failures = recorder, failures
        self.parts = [Updates(recorder)] if is_enabled else []
        self.is_released = False

    def split(self, parts: Iterable[Collection[str]], masters: Mapping[str, Tensor]) -> None:
        """Measure the updates of these parameters apart; the parts are all parameters together."""
        if self.parts:
            self.parts = [
                Updates(self._recorder, names, {name: masters[name] for name in names if name in masters})
                for names in parts
            ]

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


class _Ending(NamedTuple):
    """A step whose end has begun, so that a later call completes it after an exception.

    ``is_recorded``: whether `Monitor.record` has run on the host in this step.
    """

    step: int
    scalars: dict[str, Any]
    is_recorded: bool
    skips: object


class CurrentStep:
    """Ends steps: on the device, in the pipeline, and for updates and kept steps, which then begin the next.

    The recorder must be at the same step.

    Attributes:
        noted: scalars for this step.
        is_recorded: whether `Monitor.record` has run on the host in this step.
    """

    def __init__(
        self, recorder: Recorder, pipeline: Pipeline, updates: UpdateTracker, failures: Failures
    ) -> None:
        self._recorder, self._pipeline, self._updates, self._failures = recorder, pipeline, updates, failures
        self._reader = pipeline.reader
        self.noted: dict[str, Any] = {}
        self._ending: _Ending | None = None
        self._has_ended_any = False
        # the step to which the device was set last
        self._device_step = 0
        self._begin()

    def begin_end(self, scalars: dict[str, Any], every: int, skips: object) -> None:
        """Begin to end the step; `commit` follows. From here on it ends, whatever interrupts this.

        ``skips``: whether the loop skips the update when told to.
        """
        step = self._reader.step
        self._ending, self.noted = _Ending(step, scalars, self.is_recorded, skips), {}
        there = self._recorder.step_if_known()
        if there not in {None, step}:
            self._reader.refuse(step, there)
        # soon: after an interrupt, the next step's activations may be added to these
        self._failures.attempt("advance", self._recorder.clear_taps, step + 1)
        self._updates.end_step(step, every)
        self._advance_device(step + 1)

    def commit(self, state: ModelState | None) -> None:
        """Pass the step on, unless that was done before an exception; begin the next one."""
        ending = self._ending
        if ending is not None and self._reader.step == ending.step:
            self._has_ended_any = True
            self._failures.attempt("skips", self._pass_skips, ending.skips)
            self._pipeline.take(ending.scalars, state)
        self._ending = None
        self._begin()

    def complete(self) -> None:
        """End the step whose end was interrupted by an exception, if there is one."""
        ending = self._ending
        if ending is None:
            return
        if self._reader.step == ending.step:
            text = "advance() was interrupted by an exception: that step may have no updates, and the next "
            self._failures.add("advance", text + "one neither updates nor activations")
            # the weights may be those of the next step already
            self._updates.drop_stale(ending.step + 1)
            if not (self._device_step == ending.step + 1 or ending.is_recorded):
                # a compiled step that has run since has written into this step's slot
                self._reader.refuse(ending.step)
            self._advance_device(ending.step + 1)
        self.commit(None)

    def restart(self) -> None:
        """Begin a step whose number was set."""
        self._device_step = self._reader.step
        self._updates.restart(self._reader.step)
        self._begin()

    def _begin(self) -> None:
        self.is_recorded = False
        for updates in self._updates.parts:
            updates.end_step()
        kept = self._pipeline.box.kept
        if kept is not None:
            self._failures.attempt("keep", kept.begin, self._reader.step)

    def _advance_device(self, step: int) -> None:
        """Set the recorder, taps and histograms to a step."""
        if self._device_step != step:
            self._failures.attempt("advance", self._recorder.advance, step)
            self._device_step = step

    def _pass_skips(self, skips: object) -> None:
        self._reader.skips = bool(skips)

    def report_missing_ends(self) -> None:
        """Report that no step has ended, though some were recorded or noted; the run is over."""
        if self._has_ended_any:
            return
        # a host sync costs nothing now
        if float(self._recorder.cursor[Cursor.COUNT]):
            text = "steps were recorded, but none was ended: call advance() once per step, after "
            text += "optimizer.step(); with gm.watch, the last of its optimizers must step"
            self._failures.add("advance", text)
        elif self.noted:
            text = (
                "values were noted, but no step was recorded or ended: the optimizer that gm.watch was given "
            )
            text += (
                "has to step (pass it a GradScaler as scaler=); in your own loop, call record() and advance()"
            )
            self._failures.add("advance", text)
