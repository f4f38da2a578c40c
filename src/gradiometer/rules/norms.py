"""Norms that are too large or too small: of each gradient, and of all together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from gradiometer.columns import Flag
from gradiometer.recorder import label
from gradiometer.rules.base import MOST, BaseRule, LastingRule, Sight, TensorRule
from gradiometer.rules.finding import Finding, Severity
from gradiometer.rules.history import NormHistory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradiometer.recorder import StepRecord

__all__ = ["Exploding", "NormSpike", "Vanishing"]

# above a threshold in the first steps it is worth knowing; so many times above its own past it is a problem
RISING: Final = 10.0
# a tensor below its threshold vanishes if all together have a norm so many times as large
CONTRAST: Final = 1e4

LOWER_LR: Final = (
    "clip the total norm (gradiometer.clip_grad_norm_), lower the learning rate or lengthen its warm-up; "
    "look at the batch of this step"
)
RAISE_THRESHOLD: Final = (
    "lower the learning rate, clip, or look at the scale of this layer's weights and inputs; if such norms "
    "are usual here, as with a summed loss, raise Thresholds(exploding=...)"
)
VANISHES: Final = (
    "look at what lies behind this layer: saturated activations, weights too small, a missing residual path "
    "or norm; in fp16, the loss scale"
)


class Exploding(TensorRule):
    """A gradient's norm above the threshold of its flag, or far above its own history.

    Against its history the logarithm of the norm counts, and only a norm that is at least ``share`` of the
    total: rounding errors, such as the gradient of a key bias, jump by powers of ten. Above the threshold
    in a tensor's first recorded steps, the warm-up of its history, the severity is info, unless it is rising.

    Args:
        deviations: robust deviations above the usual.
        share: of the total norm.
        norms: the history, which several rules may share.
        most: tensors named in a step.
        severity: of a finding.
    """

    name = "exploding"
    kept = (*TensorRule.kept, "norms")

    def __init__(
        self,
        *,
        deviations: float = 12.0,
        share: float = 0.01,
        norms: NormHistory | None = None,
        most: int = MOST,
        severity: Severity = Severity.WARNING,
    ) -> None:
        super().__init__(severity, most)
        self.deviations, self.share = deviations, share
        self.norms = norms or NormHistory()

    def look(self, record: StepRecord) -> Iterable[Finding]:
        """Compare this step's norms."""
        norm, x, _, flags, (z, usual, deviation), *_ = self.norms.of(record)
        flagged = flags & Flag.EXPLODING > 0
        own = z > self.deviations
        if not (flagged | own).any():
            return []
        own &= norm >= self.share * record.total("finite_norm")
        # what is not finite is not ours to say
        flagged &= norm.isfinite()
        # in the first step of all there is no past, and x is not above itself
        risen = x > self.norms.level + math.log(RISING)
        major = own | (flagged & (self.norms.settled | risen))
        threshold = record.thresholds.exploding

        def describe(place: int) -> Sight:
            value = float(norm[place])
            severity = self.severity if major[place] else min(self.severity, Severity.INFO)
            if own[place]:
                limit = float((usual[place] + self.deviations * deviation[place]).exp())
                message = (
                    f"norm {value:.3g}, {float(z[place]):.0f} robust deviations above its usual "
                    f"{float(usual[place].exp()):.3g}"
                )
                return Sight(value, limit, message, LOWER_LR, severity)
            message = f"norm {value:.3g} is above the threshold {threshold:g}"
            if not major[place]:
                message += ", in the first steps"
            return Sight(value, threshold, message, RAISE_THRESHOLD, severity)

        return self.findings(record, "grads", flagged | own, norm + major * norm.amax(), describe)


class Vanishing(LastingRule):
    """A gradient's norm below the threshold of its flag, or far below its own history, for a while.

    Below the threshold only where the total norm is more than 10,000 times as large: what is small everywhere
    has converged, and has one finding of severity info. Against its history, what the others have fallen, by
    their median, is taken off: a loss that comes to 0 takes all gradients with it. What is exactly 0 is
    for `Dead`. Vectors are left out: biases before a norm, and of keys, have rounding errors for gradients.

    Args:
        deviations: robust deviations below the usual.
        patience: recorded steps in a row.
        min_dims: of the tensors that are looked at.
        norms: the history, which several rules may share.
        most: tensors named in a step.
        severity: of a finding about a tensor.
    """

    name = "vanishing"
    kept = (*LastingRule.kept, "norms", "all_row")

    def __init__(
        self,
        *,
        deviations: float = 10.0,
        patience: int = 10,
        min_dims: int = 2,
        norms: NormHistory | None = None,
        most: int = MOST,
        severity: Severity = Severity.WARNING,
    ) -> None:
        super().__init__(severity, most, patience, min_dims)
        self.deviations = deviations
        self.norms = norms or NormHistory()
        self.all_row = 0

    def restart(self, size: int) -> None:
        """Begin the history of so many tensors."""
        super().restart(size)
        self.all_row = 0

    def look(self, record: StepRecord) -> Iterable[Finding]:
        """Compare this step's norms."""
        norm, x, known, flags, (z, usual, deviation), *_ = self.norms.of(record)
        flagged = (flags & Flag.VANISHING > 0) & self.wide
        own = (z < -self.deviations) & self.wide
        fallen = usual - x
        if own.any():
            fallen = fallen - fallen[known & self.norms.settled].median().clamp(min=0.0)
            own &= fallen > self.deviations * deviation
        total, threshold = 0.0, record.thresholds.vanishing
        if flagged.any():
            total = record.total("finite_norm")
            flagged &= known & (norm * CONTRAST < total)
        everything = self._everything(record, total, threshold)
        lasting = self.lasting(own | flagged, known, record.step)
        if lasting is None:
            return everything

        def describe(place: int) -> Sight:
            value, steps = float(norm[place]), int(self.row[place])
            message = f"norm {value:.3g}, for {steps} recorded steps "
            if flagged[place]:
                message += f"below the threshold {threshold:g}; all together have {total:.3g}"
                return Sight(value, threshold, message, VANISHES, self.severity)
            limit = float((usual[place] - self.deviations * deviation[place]).exp())
            message += (
                f"{float(fallen[place] / deviation[place]):.0f} robust deviations further below its usual "
                f"{float(usual[place].exp()):.3g} than the others"
            )
            return Sight(value, limit, message, VANISHES, self.severity)

        return self.findings(record, "grads", lasting, -x, describe, self.since) + everything

    def _everything(self, record: StepRecord, total: float, threshold: float) -> list[Finding]:
        self.all_row = self.all_row + 1 if 0 < total < threshold else 0
        if self.all_row < self.patience:
            return []
        message = (
            f"total gradient norm {total:.3g} is below the threshold {threshold:g}: nothing is left to learn"
        )
        advice = "if the loss is not where it should be: is it detached, or scaled by a number close to 0?"
        severity = min(self.severity, Severity.INFO)
        step = record.step
        return [Finding(self.name, severity, step, step, "grads", None, total, threshold, message, advice)]


class NormSpike(BaseRule):
    """The total gradient norm far above its own history.

    Args:
        deviations: robust deviations of its logarithm above the usual. OLMo-core skips a step from 6 standard
            deviations on, and the spike score of OLMo 2 (arXiv:2501.00656, section 3.2) counts from 7.
        norms: the history, which several rules may share.
        severity: of a finding.
    """

    name = "norm_spike"
    kept = ("norms",)

    def __init__(
        self,
        *,
        deviations: float = 8.0,
        norms: NormHistory | None = None,
        severity: Severity = Severity.WARNING,
    ) -> None:
        super().__init__(severity)
        self.deviations = deviations
        self.norms = norms or NormHistory()

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Compare this step's total norm."""
        if not record.recorded:
            return []
        norms = self.norms.of(record)
        z, usual, deviation = (float(part) for part in norms.total_score)
        if z <= self.deviations:
            return []
        total = float(norms.total)
        squares = record.value("sumsq")
        place = int(squares.argmax())
        message = (
            f"total gradient norm {total:.3g}, {z:.0f} robust deviations above its usual "
            f"{math.exp(usual):.3g}; {float(squares[place]) / total**2:.0%} of its square is "
            f"{label('grads', record.roster.names[place])}"
        )
        limit = math.exp(usual + self.deviations * deviation)
        step = record.step
        return [Finding(self.name, self.severity, step, step, "grads", None, total, limit, message, LOWER_LR)]
