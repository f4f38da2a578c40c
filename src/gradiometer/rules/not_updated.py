"""Weights that do not change although their gradients are not 0."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Final

import torch

from gradiometer.rules.base import ChangeRule, mask
from gradiometer.rules.finding import Finding, Severity, modules_text
from gradiometer.rules.known import driver_of, optimizers_of
from gradiometer.rules.optimizer import RATE_OF_GROUP, SCHEDULE, learning_rates

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from gradiometer.recorder import OptimizerState, Rows, StepRecord


STEP: Final = (
    "call optimizer.step() in each step, and create the optimizer with the parameters of this model, after "
    "they have been moved or replaced"
)
ADD: Final = "pass these parameters to the optimizer, or freeze them with requires_grad_(False)"
UNLESS_COPIED: Final = "unless the optimizer holds a copy of them, "
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

# parts of messages: no optimizer holds the parameters, it is not known whether one does, and their group
LEFT_OUT: Final = ("no watched optimizer holds", "no optimizer holds")
MAY_LACK: Final = ("does not hold these parameters", "holds other parameters", "leaves these weights out")
OF_GROUP: Final = "the learning rate of their param group"

# the number of that cause, and the steps after which it is told
LEFT, FEW = 1, 5
# share of the total norm below which a gradient's update need not change a weight
SMALL: Final = 1e-6
# the beginnings of dtypes in which an update of less than a few thousandths of a weight is lost
SHORT: Final = ("bfloat16", "float16", "float8", "float4")


@dataclass(eq=False, repr=False)
class NotUpdated(ChangeRule):
    """Weights that stay exactly the same although their gradients are not 0.

    It needs a Monitor with ``weights=True`` or ``updates=True``. If this holds for all weights, the
    optimizer's step may be missing; if it holds for some, these may be missing from the optimizer. With
    `gradiometer.watch` and trainers the rule knows which parameters the optimizers hold, and with which
    learning rates, so the message says which of these is the cause. Parameters of a group whose learning
    rate is 0 from the start, while that of others is not, have severity info; so have those of an optimizer
    with master weights, unless none of these parameters changes.

    Skipped steps, and steps with a learning rate of 0, which `LearningRate` reports, do not count; steps
    before the cause changes count for its finding alone. With ``updates=True``, `Stuck` reports tensors of 16
    bits or less, which may stay the same because of rounding, but for those whose learning rate is 0, and
    those with master weights, if none of them changes and nothing is seen to write them.
    """

    name = "not_updated"
    kept = (*ChangeRule.kept, "streak", "since", "cause", "has_learned")
    _: KW_ONLY
    patience: int = 10

    def restart(self, size: int) -> None:
        """Start a new history of ``size`` tensors."""
        super().restart(size)
        self.streak, self.since = torch.zeros(2, size, dtype=torch.float64, device="cpu").unbind()
        self.cause = torch.zeros(size, dtype=torch.int64, device="cpu")
        # whether the learning rate of its group was above 0
        self.has_learned = torch.zeros(size, dtype=torch.bool, device="cpu")

    def prepare(self, rows: Rows) -> None:
        """Leave out single numbers, whose updates may be lost in rounding, and find what `Stuck` reports."""
        self._counts = mask([math.prod(shape) > 1 for shape in rows.shapes])
        self._short = mask([dtype.startswith(SHORT) for dtype in rows.dtypes])

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Return a finding about the weights that have stayed the same for ``patience`` steps."""
        moved, known = self.moved(record), optimizers_of(record)
        if known is not None:
            self.has_learned = self.has_learned | (known.held & ~known.is_frozen)
        if moved is None or record.skipped or _stands_still(record, known):
            return []
        counts = self._counts & ~self._short if record.has("updates") else self._counts
        if known is not None:
            masters = known.unwritten
            counts |= self._counts & (known.is_frozen | (masters & ~(moved & masters).any()))
        still = counts & ~moved
        if still.any():
            # an update by a vanishing gradient may be lost in rounding
            norm = record.value("norm")
            active = (norm > SMALL * record.total()) & norm.isfinite()
            if record.model is not None and len(record.model.requires_grad) == len(active):
                # a parameter that was frozen may still have the gradient of an earlier step
                active &= mask(record.model.requires_grad)
            still &= active
        if not still.any():
            if self.streak.any():
                self.streak = torch.zeros_like(self.streak)
            return []
        before, self.cause = self.cause, self._causes(known)
        # a finding is about the steps in which its cause held
        streak = self.streak * (self.cause == before)
        self.streak = torch.where(active | moved, (streak + 1.0).mul_(still), streak)
        self.since = torch.where(still & (self.streak == 1.0), float(record.step), self.since)
        # what no optimizer holds needs fewer steps, as it is known
        patience = torch.where(self.cause == LEFT, min(self.patience, FEW), self.patience)
        lasting = still & (self.streak >= patience)
        if not lasting.any():
            return []
        if known is None:
            is_all = not moved.any() and bool((lasting == (active & counts)).all())
            return [self._guess(record, lasting, is_all=is_all)]
        # whether some weights that have master weights change, or any weight
        written = bool((counts & known.unwritten & active & ~lasting).any())
        return self._explained(record, lasting, known, written=written, moved=bool(moved.any()))

    def _guess(self, record: StepRecord, lasting: Tensor, *, is_all: bool) -> Finding:
        """Return a finding that lists what may be the cause, if the optimizer is not known."""
        dtypes = self._dtypes(record, lasting)
        small = f"its updates are smaller than the rounding of {dtypes}"
        if small_updates_advice(dtypes) is ROUNDED:
            # the optimizer may have moved them, by less than a rounding error
            text = f"the updates are smaller than the rounding of {dtypes}, or optimizer.step() leaves these "
            return self._finding(record, lasting, f"{text}weights out", f"{ROUNDED}; {add_advice(None)}")
        if is_all:
            rate = "" if learning_rates(record) else ", its learning rate is 0"
            text = f"optimizer.step() is not called, the optimizer holds other parameters{rate}, or {small}"
            return self._finding(record, lasting, text, STEP, is_all=True)
        text = "the optimizer does not hold these parameters, the learning rate of their group is 0, or "
        text += small
        return self._finding(record, lasting, text, ADD)

    def _explained(
        self, record: StepRecord, lasting: Tensor, known: OptimizerState, *, written: bool, moved: bool
    ) -> list[Finding]:
        """Return a finding for each cause, if it is known what the optimizers hold."""
        found, info = [], min(self.severity, Severity.INFO)
        left_out, frozen, fallen, kept, copies, small = [lasting & (self.cause == i) for i in range(1, 7)]
        if left_out.any():
            text = f"{LEFT_OUT[driver_of(record) != 'watch']} these parameters"
            found.append(self._finding(record, left_out, text, add_advice(known)))
        if frozen.any():
            found.append(self._finding(record, frozen, f"{OF_GROUP} is 0", RATE_OF_GROUP, info))
        if fallen.any():
            found.append(self._finding(record, fallen, f"{OF_GROUP} has fallen to 0", SCHEDULE))
        if kept.any():
            text = f"the updates are smaller than the rounding of {self._dtypes(record, kept)}, which the "
            text += "optimizer makes up for, or other code writes the weights"
            severity = info if moved else self.severity
            found.append(self._finding(record, kept, text, SMALL_UPDATES, severity))
        if copies.any():
            text = f"the updates are smaller than the rounding of {self._dtypes(record, copies)}, but the "
            text += "optimizer keeps them; or its master weights are not written to these parameters"
            if not all(known.rates):
                text += ", or have a learning rate of 0"
            severity = info if written else self.severity
            found.append(self._finding(record, copies, text, WRITE_BACK, severity))
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

    def _causes(self, known: OptimizerState | None) -> Tensor:
        """Return why each parameter would stay the same, ``(N,)``; 0 if that is not known."""
        if known is None:
            return torch.zeros_like(self.cause)
        causes = torch.where(known.held, 6, LEFT)
        causes[known.keeps_small_updates] = 4
        causes[known.unwritten] = 5
        causes[known.is_frozen] = 2
        causes[known.is_frozen & self.has_learned] = 3
        return causes

    def _dtypes(self, record: StepRecord, which: Tensor) -> str:
        dtypes = {record.catalog.parameters.dtypes[place] for place in which.nonzero().flatten().tolist()}
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
        places, names = which.nonzero().flatten().tolist(), record.names()
        since, share = int(self.since[places].min()), len(places) / len(names)
        text = f"{modules_text(names, places)}: the weights stay exactly the same since step {since}, though "
        text += f"their gradients are not 0: {cause}"
        if is_all:
            text = f"no weight has changed since step {since}, though gradients are not 0: {cause}"
        first = None if share == 1.0 else names[places[0]]
        return self.finding(record, since, first, share, 0.0, text, advice, severity, "weights")


def small_updates_advice(dtypes: str) -> str:
    """Return what to try if updates are too small for these dtypes, which are joined by " and "."""
    return ROUNDED if all([dtype.startswith(SHORT) for dtype in dtypes.split(" and ")]) else SMALL_UPDATES


def add_advice(known: OptimizerState | None) -> str:
    """Return the advice to pass parameters to the optimizer, which may hold copies of them already."""
    return ADD if known is not None and not known.has_others else f"{UNLESS_COPIED}{ADD}"


def _stands_still(record: StepRecord, known: OptimizerState | None) -> bool:
    """Return whether the learning rate is 0, so that the weights are meant to stay the same."""
    if known is None or None in known.rates:
        return 0.0 in learning_rates(record).values()
    return not any(known.rates)
