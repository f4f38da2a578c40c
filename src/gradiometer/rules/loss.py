"""Spikes of the loss."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Final

from gradiometer.rules.base import BaseRule
from gradiometer.rules.finding import Finding, Severity, times
from gradiometer.rules.history import WARMUP, SpikeHistory
from gradiometer.rules.known import if_summed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradiometer.recorder import StepRecord


# the minimum deviation, as a share of the usual loss, and of the highest usual loss
OF_USUAL: Final = 0.02
OF_HIGHEST: Final = 0.01
# with a usual loss below CONVERGED of the highest, a spike below HARD_BATCH of the highest is a hard batch
CONVERGED: Final = 0.05
HARD_BATCH: Final = 0.25
# a rise by a smaller share of the usual loss is slight
SLIGHT: Final = 1 / 3

# the limit for the logarithm, as a share of the limit
IN_LOGS: Final = 0.75

ADVICE: Final = (
    "look at the batch of this step; if the loss stays high, go back to an earlier checkpoint, skip some "
    "batches and lower the learning rate"
)


@dataclass(eq=False, repr=False)
class LossSpike(BaseRule):
    """A loss far above its recent past. Every step with a loss counts, recorded or not.

    If recent losses are positive, their logarithms must be far above their own past, too. Once the usual loss
    is below 5 % of its highest value, a spike below 25 % of that value has severity info, and so has one that
    rises by less than a third.

    Args:
        deviations: limit for the loss, in deviations above its usual value, see `SpikeHistory`.
        warmup: number of losses before the first finding.
    """

    name = "loss_spike"
    kept = ("losses", "logs", "highest")
    _: KW_ONLY
    deviations: float = 8.0
    warmup: int = WARMUP

    def __post_init__(self) -> None:
        super().__post_init__()
        self.losses, self.logs = SpikeHistory(self.warmup), SpikeHistory(self.warmup)
        self.highest = 0.0

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Compare this step's loss with the history."""
        loss = record.loss
        if loss is None or not math.isfinite(loss):
            return []
        usual = self.losses.usual
        if self.losses.count >= self.losses.warmup:
            self.highest = max(self.highest, abs(usual))
        # a constant loss has no deviation, and may be 0
        floor = max(OF_USUAL * abs(usual), OF_HIGHEST * self.highest, 1e-12)
        z, usual, deviation = self.losses.score(loss, floor)
        # of positive losses with a heavy tail, the logarithms are nearly normal
        log_z = self.logs.score(math.log(loss), OF_USUAL)[0] if loss > 0 else math.inf
        if z <= self.deviations or (log_z <= self.deviations * IN_LOGS and min(self.losses.recent) > 0):
            return []
        harmless = abs(usual) < CONVERGED * self.highest and loss < HARD_BATCH * self.highest
        harmless = harmless or loss - usual < SLIGHT * abs(usual)
        severity = min(self.severity, Severity.INFO) if harmless else self.severity
        ratio = f", {times(loss / usual)} its usual" if usual > 0 else ", usually"
        message = f"loss {loss:.4g}{ratio} {usual:.4g}"
        limit = usual + self.deviations * deviation
        return [
            self.finding(
                record, record.step, None, loss, limit, message, ADVICE + if_summed(record), severity, None
            )
        ]
