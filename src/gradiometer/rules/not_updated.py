"""Weights that do not change although their gradients are not 0."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch

from gradiometer.rules.base import WholeRule, modules_text
from gradiometer.rules.finding import Finding, Severity
from gradiometer.rules.known import driver_of, optimizers_of
from gradiometer.rules.optimizer import RATE_OF_GROUP, learning_rates

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from gradiometer.recorder import OptimizerState, Roster, StepRecord

__all__ = ["ADD", "SHORT", "SMALL", "NotUpdated", "small_updates_advice"]

STEP: Final = (
    "call optimizer.step() in each step, and create the optimizer with the parameters of this model, after "
    "they have been moved or replaced"
)
ADD: Final = "pass these parameters to the optimizer, or freeze them with requires_grad_(False)"
ROUNDED: Final = (
    "unless float32 master weights, stochastic rounding or Kahan summation keep such updates, keep the "
    "weights in float32 (autocast computes in half precision) or use an optimizer with one of these; a "
    "larger learning rate helps, too"
)
SMALL_UPDATES: Final = (
    "compare the gradients with the weights: raise the learning rate or the scale of the loss, or lower the "
    "eps of the optimizer; look for code that writes the weights after optimizer.step()"
)
WRITE_BACK: Final = (
    "if the optimizer has master weights, write them to the parameters after each optimizer.step(); if that "
    "is done, small updates change the parameters only from time to time"
)

# share of the total norm below which a gradient's update need not change a weight
SMALL: Final = 1e-6
# the beginnings of dtypes in which an update of less than a few thousandths of a weight is lost
SHORT: Final = ("bfloat16", "float16", "float8", "float4")


class NotUpdated(WholeRule):
    """Weights that stay exactly the same although their gradients are not 0.

    It needs a Monitor with ``weights=True`` or ``updates=True``. If this holds for all weights, the
    optimizer's step may be missing; if it holds for some, these may be missing from the optimizer. With
    `gradiometer.watch` and trainers the rule knows which parameters the optimizers hold, and with which
    learning rates, so the message says which of these is the cause. Parameters of a group whose learning
    rate is 0, while that of others is not, have severity info; so have those of an optimizer with master
    weights, unless no weight changes.

    Skipped steps, and steps with a learning rate of 0, which `LearningRate` reports, do not count. With
    ``updates=True``, `Stuck` reports tensors of 16 bits or less, which may stay the same because of rounding.

    Args:
        patience: number of recorded steps in a row.
        severity: the severity of a finding.
    """

    name = "not_updated"
    kept = (*WholeRule.kept, "row", "since")

    def __init__(self, *, patience: int = 10, severity: Severity = Severity.WARNING) -> None:
        super().__init__(severity)
        self.patience = patience
        self.row = self.since = torch.zeros(0, dtype=torch.float64, device="cpu")
        self._counts = torch.zeros(0, dtype=torch.bool, device="cpu")

    def restart(self, size: int) -> None:
        """Start a new history of ``size`` tensors."""
        super().restart(size)
        self.row, self.since = torch.zeros(2, size, dtype=torch.float64, device="cpu").unbind()

    def prepare(self, roster: Roster) -> None:
        """Leave out single numbers, whose updates may be lost in rounding."""
        self._counts = torch.tensor(
            [math.prod(shape) > 1 for shape in roster.shapes], dtype=torch.bool, device="cpu"
        )
        if "updates" in roster.kinds:
            short = [dtype.startswith(SHORT) for dtype in roster.dtypes]
            self._counts &= ~torch.tensor(short, dtype=torch.bool, device="cpu")

    def look(self, record: StepRecord) -> Iterable[Finding]:
        """Return a finding about the weights that have stayed the same for ``patience`` steps."""
        moved, known = self.moved(record), optimizers_of(record)
        if moved is None or record.skipped or _stands_still(record, known):
            return []
        still = self._counts & ~moved
        if still.any():
            # an update by a vanishing gradient may be lost in rounding
            norm = record.value("norm")
            active = (norm > SMALL * record.total()) & norm.isfinite()
            if record.model is not None and len(record.model.requires_grad) == len(active):
                # a parameter that was frozen may still have the gradient of an earlier step
                active &= torch.tensor(record.model.requires_grad, dtype=torch.bool, device="cpu")
            still &= active
        if not still.any():
            if self.row.any():
                self.row = torch.zeros_like(self.row)
            return []
        self.row = torch.where(active | moved, (self.row + 1.0).mul_(still), self.row)
        self.since = torch.where(still & (self.row == 1.0), float(record.step), self.since)
        lasting = still & (self.row >= self.patience)
        if not lasting.any():
            return []
        is_all = not moved.any() and bool((lasting == (active & self._counts)).all())
        if known is None:
            return [self._guess(record, lasting, is_all=is_all)]
        return self._explained(record, lasting, known, any_moved=bool(moved.any()))

    def _guess(self, record: StepRecord, lasting: Tensor, *, is_all: bool) -> Finding:
        """Return a finding that lists what may be the cause, if the optimizer is not known."""
        dtypes = self._dtypes(record, lasting)
        small = f"its updates are smaller than the rounding of {dtypes}"
        if small_updates_advice(dtypes) is ROUNDED:
            # the optimizer may have moved them, by less than a rounding error
            text = f"the updates are smaller than the rounding of {dtypes}, or optimizer.step() leaves these "
            return self._finding(record, lasting, f"{text}weights out", f"{ROUNDED}; {ADD}")
        if is_all:
            rate = "" if learning_rates(record) else ", its learning rate is 0"
            text = f"optimizer.step() is not called, the optimizer holds other parameters{rate}, or {small}"
            return self._finding(record, lasting, text, STEP, is_all=True)
        text = "the optimizer does not hold these parameters, the learning rate of their group is 0, or "
        text += small
        return self._finding(record, lasting, text, ADD)

    def _explained(
        self, record: StepRecord, lasting: Tensor, known: OptimizerState, *, any_moved: bool
    ) -> list[Finding]:
        """Return a finding for each cause, if it is known what the optimizers hold."""
        found, info = [], min(self.severity, Severity.INFO)
        held, copied = known.held, known.keeps_small_updates
        left_out = lasting & ~held & ~copied
        if left_out.any():
            which = "no watched optimizer holds" if driver_of(record) == "watch" else "no optimizer holds"
            found.append(self._finding(record, left_out, f"{which} these parameters", ADD))
        frozen = lasting & known.is_frozen
        if frozen.any():
            text = "the learning rate of their param group is 0"
            found.append(self._finding(record, frozen, text, RATE_OF_GROUP, info))
        copies = lasting & copied & ~frozen
        if copies.any():
            text = f"the updates are smaller than the rounding of {self._dtypes(record, copies)}, but the "
            text += "optimizer keeps them; or its master weights are not written to these parameters"
            severity = info if any_moved else self.severity
            found.append(self._finding(record, copies, text, WRITE_BACK, severity))
        small = lasting & held & ~copied & ~frozen
        if small.any():
            rates = [known.rates[known.groups[place]] for place in small.nonzero().flatten().tolist()]
            rate = ", its learning rate is 0" if None in rates else ""
            text = "the optimizer holds them, but its updates are smaller than the rounding of "
            if driver_of(record) == "loop":
                text = f"optimizer.step() is not called, or {text}"
            text += f"{self._dtypes(record, small)}{rate}, or other code writes the weights"
            advice = small_updates_advice(self._dtypes(record, small))
            found.append(self._finding(record, small, text, advice))
        return found

    def _dtypes(self, record: StepRecord, which: Tensor) -> str:
        dtypes = {record.roster.dtypes[place] for place in which.nonzero().flatten().tolist()}
        return " and ".join(sorted(dtypes))

    def _finding(
        self,
        record: StepRecord,
        which: Tensor,
        cause: str,
        advice: str,
        severity: Severity | None = None,
        *,
        is_all: bool = False,
    ) -> Finding:
        places, names = which.nonzero().flatten().tolist(), record.roster.names
        since, share = int(self.since[places].min()), len(places) / len(names)
        text = f"{modules_text(names, places)}: the weights stay exactly the same since step {since}, though "
        text += f"their gradients are not 0: {cause}"
        if is_all:
            text = f"no weight has changed since step {since}, though gradients are not 0: {cause}"
        first = None if share == 1.0 else names[places[0]]
        severity = self.severity if severity is None else severity
        return self.finding(record, since, first, share, 0.0, text, advice, severity, "weights")


def small_updates_advice(dtypes: str) -> str:
    """Return what to try if updates are too small for these dtypes, which are joined by " and "."""
    return ROUNDED if all([dtype.startswith(SHORT) for dtype in dtypes.split(" and ")]) else SMALL_UPDATES


def _stands_still(record: StepRecord, known: OptimizerState | None) -> bool:
    """Return whether the learning rate is 0, so that the weights are meant to stay the same."""
    if known is None or None in known.rates:
        return 0.0 in learning_rates(record).values()
    return not any(known.rates)
