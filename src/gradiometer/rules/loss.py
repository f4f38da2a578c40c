"""Spikes of the loss."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Final

from gradiometer.rules.base import BaseRule
from gradiometer.rules.finding import Finding, Severity, times
from gradiometer.rules.history import MEANT, WARMUP, CopyHistory, SpikeHistory
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
SLIGHT: Final = 0.5
# and so is a smaller mean rise that lasts: harder shards and the next stage of a curriculum are as high
SLIGHT_LASTING: Final = 1.0
# the limit for the logarithm, as a share of the limit
IN_LOGS: Final = 0.75
# steps that a loss stays high: independent hard batches, even one in ten, rarely follow one another so long
STAYS: Final = 5
# it is back if it has lost two thirds of the rise; after so many steps its usual value has followed it
BACK: Final = 1 / 3
LONGEST: Final = 50
# A new highest rise is rarely far above the last one: for a tail like that of Student's t with 3 degrees of
# freedom, one in 500 is 8 times it, and a run of 1,000 steps has about four of them after its warm-up.
FAR: Final = 8.0
# a loss as high as that of the untrained model, up to the noise of a batch
UNTRAINED: Final = 0.95
# the share of the highest rise that is left after a step: half after 230 steps
FADES: Final = 0.997

ADVICE: Final = (
    "look at the batch of this step; if the loss stays high, go back to an earlier checkpoint, skip some "
    "batches and lower the learning rate"
)


@dataclass(eq=False, repr=False)
class LossSpike(BaseRule):
    """A loss far above its recent past. Every step with a loss counts, recorded or not.

    If recent losses are positive, their logarithms must be far above their own past, too. One high loss may
    be that of a hard batch, so it has severity info. It is a warning if the loss stays high for 5 steps, on
    average at twice its usual value; or at once if it is about as high as the highest loss of the
    run, such as that of the untrained model, and rises by half its usual value and 8 times as far as before.

    Once the usual loss is below 5 % of its highest value, a spike below 25 % of that value has severity info.
    With ``weights=True``, so has a rise right after tensors without gradients have changed, which they rarely
    do: the update of a target network changes what the loss is.

    Args:
        deviations: limit for the loss, in deviations above its usual value, see `SpikeHistory`.
        warmup: number of losses before the first finding.
    """

    name = "loss_spike"
    kept = (
        *("losses", "logs", "highest", "peak", "rise"),
        *("base", "first", "top", "sum", "since", "stayed", "is_meant"),
        "copies",
    )
    _: KW_ONLY
    deviations: float = 8.0
    warmup: int = WARMUP

    def __post_init__(self) -> None:
        super().__post_init__()
        self.losses, self.logs = SpikeHistory(self.warmup), SpikeHistory(self.warmup)
        # the highest usual loss, the highest loss, and the highest rise
        self.highest, self.peak, self.rise = 0.0, -math.inf, 0.0
        # while it is high: its usual value before, the first rise, the highest loss and the sum, its steps
        self.base, self.first, self.top, self.sum, self.since, self.stayed = 0.0, 0.0, 0.0, 0.0, 0, 0
        self.is_meant = False
        self.copies = CopyHistory()

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Compare this step's loss with the history."""
        self.copies.add(record)
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
        is_spike = z > self.deviations and (log_z > self.deviations * IN_LOGS or min(self.losses.recent) <= 0)
        self._follow(record.step, loss, usual, is_spike=is_spike)
        is_record, self.peak = loss > UNTRAINED * self.peak, max(self.peak, loss)
        if not self.stayed:
            self.rise = max(self.rise * FADES, loss - usual)
            return []
        usual = abs(self.base)
        stays = self.stayed >= STAYS and self.sum / self.stayed - self.base > SLIGHT_LASTING * usual
        is_extreme = is_record and loss - self.base > max(SLIGHT * usual, FAR * self.rise)
        harmless = usual < CONVERGED * self.highest and loss < HARD_BATCH * self.highest
        is_problem = (stays or is_extreme) and not (harmless or self.is_meant)
        if not (is_spike or is_problem):
            return []
        severity = self.severity if is_problem else min(self.severity, Severity.INFO)
        ratio = f", {times(loss / self.base)} its usual" if self.base > 0 else ", usually"
        message = f"loss {loss:.4g}{ratio} {self.base:.4g}"
        if self.is_meant:
            message += MEANT
        elif stays:
            message += f", and it has been high for {self.stayed} steps, since step {self.since}"
        limit = self.base + self.deviations * deviation
        begun = self.since if stays else record.step
        return [
            self.finding(
                record, begun, None, loss, limit, message, ADVICE + if_summed(record), severity, None
            )
        ]

    def _follow(self, step: int, loss: float, usual: float, *, is_spike: bool) -> None:
        """Begin to follow a spike, or find out whether the loss is still high."""
        if self.stayed and (self.stayed >= LONGEST or loss < self.base + self.first * BACK):
            self.rise, self.stayed = max(self.rise, self.top - self.base), 0
        if self.stayed:
            self.stayed, self.top, self.sum = self.stayed + 1, max(self.top, loss), self.sum + loss
        elif is_spike:
            # what follows on its way down belongs to the same change
            lasts = LONGEST if self.is_meant and loss <= self.top else 1
            self.is_meant = self.copies.changed_within(lasts, step)
            self.base, self.first, self.since, self.stayed = usual, loss - usual, step, 1
            self.top = self.sum = loss
