"""What a record tells of the loop: who calls the monitor, and what the optimizers hold."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from gradiometer.recorder import OptimizerState, StepRecord


def driver_of(record: StepRecord) -> str:
    """Return who calls the monitor, as in `gradiometer.recorder.Driver`."""
    return "loop" if record.model is None else record.model.driver


def if_summed(record: StepRecord) -> str:
    """Return what to add to the advice about large gradients if backward passes of a step are added up.

    Empty for one pass, if their number is not known, and for trainers, which divide the loss themselves.
    """
    order = None if record.model is None or record.model.driver != "watch" else record.model.order
    if order is None or order.passes < 2 or order.lost or order.stale:
        return ""
    return (
        f"; {order.passes} backward passes wrote the gradients of this step: divide the loss of each by "
        f"{order.passes}, unless that is done"
    )


def has_loss_scale(record: StepRecord) -> bool:
    """Return whether the loss has a scale, also if `torch.amp.GradScaler.unscale_` was called already."""
    model = record.model
    return model is not None and (model.has_loss_scale or model.order.backoff > 0.0)


def most_skips(record: StepRecord) -> int:
    """Return how many steps a GradScaler may skip in a row until its first scale has fallen to a usual one.

    10, from 2**16 to 2**6; more for a larger first scale, up to 100: halving takes the largest one of float32
    there, and a scale that needs more hardly falls.
    """
    order = None if record.model is None else record.model.order
    if order is None or not order.first_scale or not 0.0 < order.backoff < 1.0:
        return 10
    steps = math.log(order.first_scale / 2.0**6) / -math.log(order.backoff)
    return math.ceil(min(max(10.0, steps), 100.0))


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
