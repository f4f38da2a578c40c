"""The device ring, which is written inside the step, and the step records read back from it.

Gradients, weights and updates of a model are recorded inside a compiled or captured step; `StepRecord`
holds them on the host. Nothing here starts a thread, accesses a disk or judges what it records.
"""

from gradiometer.recorder.batch_look import BatchLook
from gradiometer.recorder.catalog import Catalog, Rows
from gradiometer.recorder.kinds import KINDS, LOSS_ORDER, Kind, described, is_alike, kinds_of, label, register
from gradiometer.recorder.model_state import (
    OPTION,
    Driver,
    InitialValues,
    LoopFacts,
    ModelState,
    ModelValues,
    NormValues,
    OptimizerState,
    StepOrder,
    gradient_framework,
)
from gradiometer.recorder.optimizer_states import OptimizerStates, state_names
from gradiometer.recorder.recorder import Recorder
from gradiometer.recorder.settings import check_integer
from gradiometer.recorder.step_record import RunInfo, StepRecord
from gradiometer.recorder.table import Table
from gradiometer.recorder.updates import Updates

__all__ = [
    "KINDS",
    "LOSS_ORDER",
    "OPTION",
    "BatchLook",
    "Catalog",
    "Driver",
    "InitialValues",
    "Kind",
    "LoopFacts",
    "ModelState",
    "ModelValues",
    "NormValues",
    "OptimizerState",
    "OptimizerStates",
    "Recorder",
    "Rows",
    "RunInfo",
    "StepOrder",
    "StepRecord",
    "Table",
    "Updates",
    "check_integer",
    "described",
    "gradient_framework",
    "is_alike",
    "kinds_of",
    "label",
    "register",
    "state_names",
]
