"""Normalization layers whose output is not their normalized input."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gradiometer.rules.base import BaseRule

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradiometer.recorder import StepRecord
    from gradiometer.rules.finding import Finding

# Rounding to bfloat16, in all steps of the computation, leaves 2 %, since layers whose output varies little
# are not compared. A norm over the batch or sequence of normal random numbers with C channels leaves about
# sqrt(1 / 2C), 6 % of 128 channels; real activations differ more from token to token.
LIMIT: Final = 0.05
# how near a power is to -1, so that it is named
NEAR: Final = 0.2

USUAL: Final = (
    "normalize each token over its channels: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) for "
    "RMSNorm, and with x - x.mean(-1, keepdim=True) in place of x for LayerNorm; or use torch.nn.RMSNorm or "
    "torch.nn.LayerNorm"
)


@dataclass(eq=False, repr=False)
class Normalization(BaseRule):
    """A layer that is a LayerNorm or RMSNorm by its name, and does not normalize each token.

    It needs `gradiometer.watch` or the callback of a trainer, and looks at layers with a forward of their own
    in four of the first 64 steps, unless they are compiled. Each channel of the output has to be that of the
    input, divided by the standard deviation or the root mean square of the token, times a scale plus a shift
    that are those of all tokens, whatever they are. Where this is not so in two of the steps, the norm is
    over another dimension, without the root, or missing.
    """

    name = "normalization"
    kept = ("failed", "before_step", "since")

    def __post_init__(self) -> None:
        super().__post_init__()
        # the layers of which it was not so in an earlier step
        self.failed: list[str] = []
        self.before_step = -1
        # the step of the first of them
        self.since = 0

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Return a finding about the layers that do not normalize."""
        values = None if record.model is None else record.model.norms
        if values is None or values.step == self.before_step or not values.layers:
            return []
        self.before_step = values.step
        wrong = [layer for layer in values.layers if layer[2] > LIMIT]
        found = [layer for layer in wrong if layer[0] in self.failed]
        if wrong and not self.failed:
            self.since = values.step
        self.failed += [layer[0] for layer in wrong if layer[0] not in self.failed]
        if not found:
            return []
        first = self.failed[0]
        name, kind, error, _ = next((layer for layer in found if layer[0] == first), found[0])
        power = statistics.median(layer[3] for layer in found)
        text = f"{name} ({kind}) does not normalize each token: "
        if error > 1.0:
            text += "it returns only 0, as where the mean square of a large input is Inf in float16"
        elif abs(power + 1.0) < NEAR:
            text += "it divides by the variance or mean square, without the root"
        else:
            text += "the norm is missing, or over another dimension than the channels"
        if error <= 1.0:
            text += f" ({error:.0%} of the variation of its output is not that of a normalized input)"
        if len(found) > 1:
            text += f"; {len(found) - 1} more of {len(values.layers)} such layers do not either"
        since = min(self.since, record.step)
        return [self.finding(record, since, name, error, LIMIT, text, USUAL, self.severity, None)]
