"""The criterion: a softmax or sigmoid before a loss that has its own, and a first loss that is too high."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Final

from gradiometer.rules.base import BaseRule
from gradiometer.rules.data import LookRule, agreeing
from gradiometer.rules.finding import Severity, times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.recorder import BatchLook, StepRecord
    from gradiometer.rules.finding import Finding

LOGITS: Final = (
    "pass the logits: leave the softmax or sigmoid out of the model or the loss, and use it for predictions "
    "only"
)
TRANSPOSE: Final = (
    "transpose them with logits.transpose(1, 2), or flatten the positions with logits.flatten(0, 1); view "
    "and reshape do not transpose"
)
LOG: Final = "use log_softmax with nll_loss, or cross_entropy with the logits"
SCALE: Final = (
    "look at the scale of the last layer and of the embedding that it is tied to, at missing norm layers, "
    "and at whether inputs are normalized"
)

# the loss of a label whose probability is lost in float32 beside one of 1
_SATURATED: Final = 24 * math.log(2)
# the share of positions that tell their label
_LABELLED: Final = 0.95


@dataclass(eq=False, repr=False)
class Criterion(BaseRule):
    """A loss that does not get logits, or not in its order of dimensions.

    The graph of the loss tells whether its logits are the output of a softmax or sigmoid, if it is passed to
    `Monitor.note` or `Monitor.advance`; otherwise the logits do, if all of them are probabilities and their
    gradient is that of a cross entropy. The gradient also tells whether logits of the shape ``(rows, length,
    C)`` were reshaped to ``(rows, C, length)``, and not transposed.
    """

    name = "criterion"
    kept = ("since",)
    _: KW_ONLY
    since: int = field(default=-1, init=False)

    def check(self, record: StepRecord) -> list[Finding]:
        """Return a finding if the loss has such inputs."""
        if record.model is None:
            return []
        looks = record.model.batches
        bounded = record.model.bounded
        if not bounded and agreeing(looks, _has_probabilities):
            bounded = "log_softmax of softmax"
        if bounded:
            text, advice = _about(bounded, looks[-1].classes if looks else 0)
        elif agreeing(looks, lambda look: look.untransposed >= _LABELLED and look.labelled < 0.5):
            rows, length, classes = looks[-1].rows, looks[-1].length, looks[-1].classes
            text = (
                f"the loss reshapes logits of the shape {rows, length, classes} to {rows, classes, length}, "
            )
            text += "but does not transpose them, so that a label is compared with several positions"
            advice = TRANSPOSE
        else:
            return []
        self.since = record.step if self.since < 0 else self.since
        return [self.finding(record, self.since, None, 1.0, 0.0, text, advice, None, None)]


def _about(bounded: str, classes: int) -> tuple[str, str]:
    """Return a message and an advice about a loss and its logits, see `ModelState.bounded`."""
    function, _, inner = bounded.partition(" of ")
    if function == "nll_loss":
        return "the nll_loss gets probabilities, the output of a softmax, and needs their logarithms", LOG
    of_loss = "softmax" if function == "log_softmax" else "sigmoid"
    text = f"the loss takes the output of a {inner} for logits, and applies a {of_loss} again"
    if of_loss == "softmax" and classes:
        # one of them is 1, and all others are 0
        least = math.log(math.e + classes - 1) - 1
        text += f": with values from 0 to 1 and {classes:,} classes it cannot fall below {least:.3g}"
    return text, LOGITS


def _has_probabilities(look: BatchLook) -> bool:
    # with two classes and equal probabilities, a cross entropy of the logits looks alike
    return look.probabilities >= 0.99 and look.labelled >= _LABELLED and look.residual < 0.05


@dataclass(eq=False, repr=False)
class FirstLoss(LookRule):
    """A first loss far above that of a model that knows nothing, ln(C) for C classes.

    With logits of variance s², labels at random have a cross entropy of about ln(C) + s² / 2. The loss is
    computed from the logits and the labels of step 0, and has to be ``factor`` times ln(C), and 2 above it,
    which is a standard deviation of 2. So has the loss of labels at random, since a margin that is subtracted
    from the logit of the label alone is meant. A small model without norm layers may start so, and recover,
    so it is a warning only if the softmax is saturated: above 24 ln(2) = 16.6, the probability of a label is
    less than the rounding error of 1 in float32.

    Args:
        factor: the limit of the ratio to ln(C).
    """

    name = "first_loss"
    _: KW_ONLY
    factor: float = 3.0

    def check(self, record: StepRecord) -> list[Finding]:
        """Return a finding in the first look, unless the run was resumed."""
        return [] if self.last >= 0 else super().check(record)

    def examine(self, record: StepRecord, looks: Sequence[BatchLook]) -> list[Finding]:
        """Compare the loss of the first step."""
        look = looks[0]
        guess = math.log(look.classes)
        limit = max(self.factor * guess, guess + 2.0)
        is_sure = look.step == 0 and look.labelled >= _LABELLED and look.residual < 0.2 and look.counted >= 8
        if not (is_sure and look.loss >= limit and look.uniform_loss >= limit):
            return []
        text = f"the first loss is {look.loss:.3g}, {times(look.loss / guess)} that of a model that knows "
        text += f"nothing, ln({look.classes:,}) = {guess:.3g}: the logits are too large"
        severity = None if look.loss >= _SATURATED else Severity.INFO
        return [self.about(record, looks[:1], look.loss, limit, text, SCALE, severity)]
