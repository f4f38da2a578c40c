"""What a record tells of the loop: who calls the monitor, and what the optimizers hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from gradiometer.recorder import OptimizerState, StepRecord


def driver_of(record: StepRecord) -> str:
    """Return who calls the monitor, as in `gradiometer.recorder.Driver`."""
    return "loop" if record.model is None else record.model.driver


def optimizers_of(record: StepRecord) -> OptimizerState | None:
    """Return what the optimizers hold; None if that is not known of all parameters of the record."""
    known = None if record.model is None else record.model.optimizers
    return known if known is not None and len(known.groups) == len(record.catalog.names) else None


def by_optimizers(record: StepRecord, changes: Tensor) -> Tensor:
    """Return ``(N,)`` changes of weights, with 0 for those that are known to be made by other code.

    Such parameters are a target network or an average of other weights, for example.
    """
    known = optimizers_of(record)
    if known is None:
        return changes
    return torch.where(known.held | known.keeps_small_updates, changes, 0.0)
