"""The criterion: logits that are bounded by a function before the loss, and a first loss that is too high."""

from __future__ import annotations

import math
import re
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
UNBOUND: Final = (
    "end the model with a linear layer: leave the {} after it out; to bound logits on purpose, multiply them "
    "by a larger scale"
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
SATURATED: Final = 24 * math.log(2)
# names of vectors that are the scales of norm layers
_SCALES: Final = re.compile(r"(?:^|[._])(?:weight|gamma|scale|g)$")
# the share of positions that tell their label
_LABELLED: Final = 0.95


@dataclass(eq=False, repr=False)
class Criterion(BaseRule):
    """A loss that does not get logits, or not in its order of dimensions.

    The graph of the loss tells whether its logits are the output of a softmax, sigmoid, ReLU or tanh, if it
    is passed to `Monitor.note` or `Monitor.advance`; otherwise the logits do, if all of them are
    probabilities and their gradient is that of a cross entropy. A ReLU or tanh before a binary cross entropy
    has severity info. The gradient also tells whether logits of the shape ``(rows, length,
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
        severity = None
        if not bounded and agreeing(looks, _has_probabilities):
            bounded = "log_softmax of softmax"
        if bounded:
            text, advice = about_bounded(bounded, looks[-1].classes if looks else 0)
            if bounded in HINTS:
                severity = Severity.INFO
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
        severity = None if severity is None else min(self.severity, severity)
        return [self.finding(record, self.since, None, 1.0, 0.0, text, advice, severity, None)]


HINTS: Final = {f"binary_cross_entropy_with_logits of {inner}" for inner in ("relu", "tanh")}


def about_bounded(bounded: str, classes: int) -> tuple[str, str]:
    """Return a message and an advice about a loss and its logits, see `ModelState.bounded`."""
    function, _, inner = bounded.partition(" of ")
    if function == "nll_loss":
        return "the nll_loss gets probabilities, the output of a softmax, and needs their logarithms", LOG
    of_loss = "softmax" if function == "log_softmax" else "sigmoid"
    if inner == "relu":
        text = (
            "the logits of the loss are the output of a ReLU: none can be below 0, and those that are 0 get "
        )
        return text + "no gradient", UNBOUND.format("ReLU")
    if inner == "tanh":
        text = "the logits of the loss are the output of a tanh, between -1 and 1"
        # the logit of the label is 1, and all others are -1
        least = math.log1p((classes - 1) * math.exp(-2)) if of_loss == "softmax" else math.log1p(math.exp(-1))
        if classes or of_loss == "sigmoid":
            among = f" with {classes:,} classes" if of_loss == "softmax" else ""
            text += f":{among} it cannot fall below {least:.3g}"
        return text, UNBOUND.format("tanh")
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
    from the logit of the label alone is meant.

    It is a warning if the softmax is saturated: above 24 ln(2) = 16.6, the probability of a label is less
    than the rounding error of 1 in float32. A small model without norm layers may start below that, and
    recover. It is a warning there as well if a norm layer comes right before the last one, as the order of
    the parameters tells: then the logits have the scale of the last layer alone, s = rms · sqrt(fan_in) of
    its weights, which is about 1 or less in all usual initializations. A model with frozen parameters is
    pretrained, and may be sure of what was right elsewhere.

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
        is_wrong = look.loss >= SATURATED or _ends_in_norm(record)
        severity = None if is_wrong else Severity.INFO
        return [self.about(record, looks[:1], look.loss, limit, text, SCALE, severity)]


def _ends_in_norm(record: StepRecord) -> bool:
    """Return whether a new model has a norm layer right before the last one, from the order of parameters."""
    is_pretrained = record.model is not None and not all(record.model.requires_grad)
    rows = record.catalog.parameters
    norms = [
        i
        for i, (name, shape) in enumerate(zip(rows.names, rows.shapes, strict=True))
        if len(shape) == 1 and shape[0] > 1 and _SCALES.search(name)
    ]
    # a head that is tied to the embedding comes earlier
    return bool(norms) and not is_pretrained and sum(len(x) > 1 for x in rows.shapes[norms[-1] :]) <= 1
