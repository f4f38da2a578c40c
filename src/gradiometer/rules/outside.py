"""Weights that change between two steps, where no optimizer changes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from gradiometer.rules.base import Observation, TensorRule
from gradiometer.rules.finding import Severity
from gradiometer.rules.known import optimizers_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradiometer.recorder import Rows, StepRecord
    from gradiometer.rules.finding import Finding


# Above this relative difference of sums of squares, weights differ: equal ones at other addresses differ less
ROUNDING: Final = 1e-12
# A tensor that changes in a larger share of the steps is changed by the training loop on purpose
RARE: Final = 0.1

ADVICE: Final = (
    "if this is not meant, look for code between two calls of optimizer.step() that writes weights: a "
    "state_dict that is loaded, averaged weights that are swapped in and not back, clipping or "
    "re-initialization; optimizers keep their state meanwhile"
)


@dataclass(eq=False, repr=False)
class ChangedOutside(TensorRule):
    """A weight that something other than ``optimizer.step()`` has changed, between two steps.

    It needs a Monitor with ``updates=True`` that `gradiometer.watch` or the callback of a trainer calls, or
    that calls `gradiometer.Monitor.begin_updates`: the weights right before an update are compared with those
    right after the one before. The squared norms of both are recorded, so a change that leaves the norm as it
    was, such as a permutation, is not noticed, and the difference of the norms is a lower bound of the norm
    of the change. Both steps have to be recorded.

    A finding has ``severity`` if this happens to the tensor in at most a tenth of its steps. Otherwise it has
    info, since it is a part of the training loop, such as weights that are clipped. Weights that no known
    optimizer holds, such as a target network, are left out.
    """

    name = "changed_outside"
    kinds: ClassVar[tuple[str, ...]] = ("updates",)
    kept = (*TensorRule.kept, "after", "after_step", "times", "compared", "since")

    def restart(self, size: int) -> None:
        """Start a new history of ``size`` tensors."""
        super().restart(size)
        self.after_step: int | None = None
        # the squared norms after the last recorded update; NaN where they are not known
        self.after = torch.full((size,), torch.nan, dtype=torch.float64, device="cpu")
        start = torch.zeros(3, size, dtype=torch.float64, device="cpu")
        self.times, self.compared, self.since = start.unbind()

    def prepare(self, rows: Rows) -> None:
        """Compare with no step of other tensors."""
        if len(self.after) != len(rows.names):
            self.restart(len(rows.names))

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Return findings about the weights that have changed since the last step."""
        known = record.measured("updates") & (record.value("n_nonfinite", "updates") == 0)
        before = torch.where(known, record.value("sumsq_b", "updates"), torch.nan)
        last, last_step = self.after, self.after_step
        self.after = torch.where(known, record.value("sumsq_a", "updates"), torch.nan)
        self.after_step = record.step
        if last_step != record.step - 1:
            return []
        found = (before - last).abs() > ROUNDING * torch.maximum(before, last)
        optimizers = optimizers_of(record)
        if optimizers is not None:
            # target networks and averages have no optimizer: only other code changes them
            found &= optimizers.held
        self.compared = self.compared + (before - last).isfinite()
        if not found.any():
            return []
        self.since = torch.where(found & (self.times == 0), float(record.step), self.since)
        self.times = self.times + found
        norms, were = before.sqrt(), last.sqrt()
        change = (norms - were).abs() / were.clamp(min=1e-300)

        def describe(place: int) -> Observation:
            if self.times[place] > RARE * self.compared[place]:
                message = "something other than optimizer.step() changes this weight between steps"
                severity = min(self.severity, Severity.INFO)
                return Observation(float(change[place]), 0.0, message, ADVICE, severity)
            message = "something other than optimizer.step() has changed this weight between steps "
            message += f"{record.step - 1} and {record.step}, its norm from {float(were[place]):.4g} to "
            message += f"{float(norms[place]):.4g}"
            return Observation(float(change[place]), 0.0, message, ADVICE, self.severity)

        rare = self.times <= RARE * self.compared
        since = torch.where(rare, float(record.step), self.since)
        return self.findings(record, "updates", found, change + rare.to(change.dtype) * 1e9, describe, since)
