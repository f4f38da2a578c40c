"""Read the state of the model in each step, and check its parameters every second."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from gradiometer.monitor.failures import remember_handlers
from gradiometer.monitor.model_reader import ModelReader
from gradiometer.monitor.parameter_check import ParameterCheck

if TYPE_CHECKING:
    from gradiometer.monitor.failures import Failures
    from gradiometer.recorder import ModelState, Recorder

# seconds between two checks for replaced parameters
_INTERVAL = 1.0


class ModelChecks:
    """Reads the state of the model in each step; every second, checks its parameters and all of its state.

    Args:
        model: the model of the recorder.
        recorder: the recorder of the parameters.
        failures: counts failures.

    Attributes:
        reader: reads the state.
    """

    def __init__(self, model: Any, recorder: Recorder, failures: Failures) -> None:
        self._failures = failures
        self._parameter_check = ParameterCheck(model, recorder, failures)
        self.reader = ModelReader(model, recorder)
        self._next = 0.0

    def read(self, loss: Any, *, has_loss_scale: bool) -> ModelState | None:
        """Return the state of the model at the end of a step; None after a failure."""
        now = time.monotonic()
        is_due = now >= self._next
        if is_due:
            self._next = now + _INTERVAL
            remember_handlers()
            self._failures.attempt("parameters", self._parameter_check)
        return self._failures.attempt(
            "model", self.reader.read, loss, afresh=is_due, has_loss_scale=has_loss_scale
        )

    def release(self) -> None:
        """Forget the model."""
        self._parameter_check.release()
        self.reader.release()
