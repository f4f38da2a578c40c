"""The device ring, which is written inside the step, and the step records read back from it.

Gradients, weights and updates of a model are recorded inside a compiled or captured step; `StepRecord`
holds them on the host. Nothing here starts a thread, accesses a disk or judges what it records.
"""

from gradiometer.recorder.model_state import Driver, ModelState, OptimizerState, master_copies
from gradiometer.recorder.recorder import Recorder
from gradiometer.recorder.settings import check_integer
from gradiometer.recorder.step_exponents import StepExponents
from gradiometer.recorder.step_record import KINDS, TAP_KINDS, Kind, Roster, RunInfo, StepRecord, label
from gradiometer.recorder.updates import Updates

__all__ = [
    "KINDS",
    "TAP_KINDS",
    "Driver",
    "Kind",
    "ModelState",
    "OptimizerState",
    "Recorder",
    "Roster",
    "RunInfo",
    "StepExponents",
    "StepRecord",
    "Updates",
    "check_integer",
    "label",
    "master_copies",
]
