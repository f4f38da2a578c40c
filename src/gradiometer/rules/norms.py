"""Norms that are too large or too small: of each gradient, and of all gradients together."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Final

from gradiometer.columns import Flag
from gradiometer.rules.base import LastingRule, Observation, SpikeRule, TensorRule
from gradiometer.rules.finding import Finding, Severity, times
from gradiometer.rules.history import MEANT, CopyHistory, NormHistory
from gradiometer.rules.known import if_summed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradiometer.recorder import StepRecord


# a norm above the threshold has severity info, unless it is more than this many times its usual level
RISING: Final = 10.0
# steps after the update of a target network in which the norm may be high
WINDOW_OF_COPIES: Final = 5
# a tensor below its threshold vanishes only if the total norm is this many times as large
CONTRAST: Final = 1e4
# and whatever its threshold, if the total norm is this many times as large
FAINT: Final = 1e6

LOWER_LR: Final = (
    "look at the batch of this step; clip the total norm if you do not yet (gradiometer.clip_grad_norm_), "
    "lower the learning rate or lengthen its warm-up"
)
RAISE_THRESHOLD: Final = (
    "look at the scale of this layer's weights and inputs, lower the learning rate, or clip; if such norms "
    "are usual here, as with a summed loss, raise Thresholds(exploding=...)"
)
VANISHES: Final = (
    "look between this layer and the loss for saturated activations, weights that are too small, a missing "
    "residual path or norm; in fp16, check the loss scale"
)


@dataclass(eq=False, repr=False)
class Exploding(TensorRule):
    """A gradient's norm above the threshold of its flag, or far above its own history.

    The comparison with its history uses the logarithm of the norm. It applies only if the norm is at least
    ``share`` of the total: gradients that are only rounding errors, such as that of a key bias in
    attention, change by orders of magnitude from step to step. A norm
    above the threshold has severity info unless it is ten times its usual norm too: a summed loss has large
    gradients.

    Args:
        deviations: limit in robust standard deviations above the usual norm.
        share: minimum share of the total norm.
    """

    name = "exploding"
    kept = (*TensorRule.kept, "norms")
    _: KW_ONLY
    deviations: float = 12.0
    share: float = 0.01
    norms: NormHistory = field(default_factory=NormHistory)

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Compare this step's norms with the threshold and the history."""
        norm, x, _, flags, any_flag, (z, usual, deviation) = self.norms.of(record)
        own = z > self.deviations
        if not (any_flag or own.any()):
            return []
        flagged = flags & Flag.EXPLODING > 0
        if not (flagged | own).any():
            return []
        own &= norm >= self.share * record.total("finite_norm")
        # NonFinite reports non-finite norms
        flagged &= norm.isfinite()
        # in the very first step there is no past: x is the level itself, so it has not risen
        risen = x > self.norms.level + math.log(RISING)
        major = own | (flagged & risen)
        threshold, settled, summed = record.thresholds.exploding, self.norms.settled, if_summed(record)

        def describe(place: int) -> Observation:
            value = float(norm[place])
            severity = self.severity if major[place] else min(self.severity, Severity.INFO)
            if own[place]:
                limit = float((usual[place] + self.deviations * deviation[place]).exp())
                base = float(usual[place].exp())
                message = f"norm {value:.3g}, {times(value / base)} its usual {base:.3g}"
                return Observation(value, limit, message, LOWER_LR + summed, severity)
            message = f"norm {value:.3g} is above the threshold {threshold:g}"
            if not major[place] and settled[place]:
                message += ", as usual for it"
            return Observation(value, threshold, message, RAISE_THRESHOLD + summed, severity)

        return self.findings(record, "grads", flagged | own, norm + major * norm.amax(), describe)


@dataclass(eq=False, repr=False)
class Vanishing(LastingRule):
    """A gradient's norm below the threshold of its flag, or far below its own history, for a while.

    The threshold applies only if the total norm is more than 10,000 times the gradient's; from 1,000,000
    times on, a gradient vanishes whatever its threshold. If the total
    norm itself stays below the threshold for ``patience`` recorded steps, training may have
    converged; this gives one finding of severity info. The comparison with the history
    subtracts the median decline of all gradients, since a loss that approaches 0 shrinks all of them. `Dead`
    reports gradients of exactly 0. Vectors are left out: the gradients of biases before a norm, and of key
    biases, are rounding errors.

    Args:
        deviations: limit in robust standard deviations below the usual norm.
        min_dims: minimum number of dimensions of the tensors.
        severity: the severity of a finding about a tensor.
    """

    name = "vanishing"
    kept = (*LastingRule.kept, "norms", "all_streak")
    _: KW_ONLY
    deviations: float = 10.0
    min_dims: int = 2
    norms: NormHistory = field(default_factory=NormHistory)

    def restart(self, size: int) -> None:
        """Start a new history of ``size`` tensors."""
        super().restart(size)
        self.all_streak = 0

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Compare this step's norms with the threshold and the history."""
        norm, x, known, flags, any_flag, (z, usual, deviation) = self.norms.of(record)
        total, threshold = record.total("finite_norm"), record.thresholds.vanishing
        everything = self._everything(record, total, threshold)
        faint = known & self.wide & (norm * FAINT < total)
        own = (z < -self.deviations) & self.wide
        if not (any_flag or self.counting or faint.any() or own.any()):
            return everything
        flagged = (flags & Flag.VANISHING > 0) & self.wide
        fallen = usual - x
        if own.any():
            fallen = fallen - fallen[known & self.norms.settled].median().clamp(min=0.0)
            own &= fallen > self.deviations * deviation
        flagged = (flagged & known & (norm * CONTRAST < total)) | faint
        lasting = self.lasting(own | flagged, known, record.step)
        if lasting is None:
            return everything

        def describe(place: int) -> Observation:
            value, since = float(norm[place]), int(self.since[place])
            message = f"norm {value:.3g}, since step {since} "
            if faint[place]:
                message += f"less than a millionth of the total norm {total:.3g}"
                return Observation(value, total / FAINT, message, VANISHES, self.severity)
            if flagged[place]:
                message += f"below the threshold {threshold:g}, while the total norm is {total:.3g}"
                return Observation(value, threshold, message, VANISHES, self.severity)
            limit = float((usual[place] - self.deviations * deviation[place]).exp())
            base = float(usual[place].exp())
            message += f"far below its usual {base:.3g}, by more than the median decline of all gradients"
            return Observation(value, limit, message, VANISHES, self.severity)

        return self.findings(record, "grads", lasting, -x, describe, self.since) + everything

    def _everything(self, record: StepRecord, total: float, threshold: float) -> list[Finding]:
        self.all_streak = self.all_streak + 1 if 0 < total < threshold else 0
        if self.all_streak < self.patience:
            return []
        message = (
            f"total gradient norm {total:.3g} is below the threshold {threshold:g}: training has converged, "
            "or the gradients are scaled down"
        )
        advice = "if the loss is still high, check whether it is scaled by a number close to 0, and in fp16 "
        advice += "the loss scale"
        severity = min(self.severity, Severity.INFO)
        return [self.finding(record, record.step, None, total, threshold, message, advice, severity)]


@dataclass(eq=False, repr=False)
class NormSpike(SpikeRule):
    """A total gradient norm far above its recent past; info right after a target network was updated.

    OLMo-core skips a step at 6 standard deviations or more; the spike score of OLMo 2 (arXiv:2501.00656,
    section 3.2) counts steps at 7 or more.

    Args:
        deviations: limit for the logarithm of the norm, in deviations above its usual value, see
            `SpikeHistory`.
    """

    name = "norm_spike"
    kept = (*SpikeRule.kept, "copies", "meant")
    copies: CopyHistory = field(default_factory=CopyHistory, init=False)
    # the last step of a spike that such an update began
    meant: int = field(default=-1, init=False)

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Compare this step's total norm with the history."""
        self.copies.add(record)
        if not record.has("grads") or record.total("n_nonfinite"):
            return []
        spike = self.spike(record, "grads", "total gradient norm", record.value("sumsq"))
        if spike is None:
            return []
        total, _, limit, text = spike
        is_meant = self.copies.changed_within(WINDOW_OF_COPIES, record.step)
        is_meant = is_meant or 0 <= self.meant >= record.step - WINDOW_OF_COPIES
        self.meant = record.step if is_meant else -1
        severity = min(self.severity, Severity.INFO) if is_meant else self.severity
        text += MEANT if is_meant else ""
        advice = LOWER_LR + if_summed(record)
        return [self.finding(record, record.step, None, total, limit, text, advice, severity)]
