"""The device ring, written inside of the step, and a step read back from it.

Gradients, weights and updates of a model come in, inside of a compiled or captured step; `StepRecord` goes
out on the host. Nothing here starts a thread, touches a disk or judges what it records.
"""

from gradiometer.recorder.recorder import Recorder, tracked_parameters
from gradiometer.recorder.step_record import KINDS, Kind, Roster, RunInfo, StepRecord, label
from gradiometer.recorder.updates import Updates

__all__ = [
    "KINDS",
    "Kind",
    "Recorder",
    "Roster",
    "RunInfo",
    "StepRecord",
    "Updates",
    "label",
    "tracked_parameters",
]
