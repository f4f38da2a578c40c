"""Options of optimizers and clips with which no training of a usual kind works."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from gradiometer.rules.base import BaseRule
from gradiometer.rules.finding import Finding, Severity, times
from gradiometer.rules.known import optimizers_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from gradiometer.recorder import OptimizerState, StepRecord

# 0.9 to 0.99 are in use; the updates of 0.999 are sums over 1,000 steps, 1,000 times the learning rate
MOMENTUM: Final = 0.999
# lr * weight_decay, the share of a weight that is lost in a step: 5e-5 for ResNets, 1e-4 or less for
# transformers; from 1e-2 on, what was learned 100 steps ago is forgotten
DECAY: Final = 1e-2
# a decay of up to 0.3 is usual (ViT); with it, such a product tells of the learning rate
LARGE_DECAY: Final = 0.3
# what a clip leaves of the gradients: 0.01 where rewards are not normalized, 0.1 to 1 elsewhere
CLIPPED: Final = 1e-3

# of a weight_decay that is added to gradients, which Adam divides by their size: 1e-5 to 1e-3 are usual, and
# larger ones are for AdamW
L2: Final = 1e-2
# By how much it exceeds the gradients, of so many matrices; where a regularized loss is at its minimum, both
# are equal. Adam then takes about the learning rate from each element in each step, until they are 0.
OUTWEIGHS, MATRICES = 10.0, 2
SCALED: Final = ("Adam", "RMSprop", "Adagrad")

DECOUPLE: Final = (
    "use AdamW, or a weight_decay of 1e-4 or less: Adam divides this term by the size of the gradients"
)
CHECK: Final = "compare the optimizer's param_groups with what you meant them to be"
BETAS: Final = f"{CHECK}: Adam's usual betas are (0.9, 0.999), the first one for the gradient"
CLIP: Final = "raise the limit to about the usual norm of the gradients, see clip_max_norm and the total norm"


@dataclass(eq=False, repr=False)
class Hyperparameters(BaseRule):
    """Options of a param group, or a clip, that are far from all that are in use.

    It needs `gradiometer.watch` or the callback of a trainer. The options of each group are read in each
    step; a finding extends over the steps in which it holds.

    * Two betas with ``beta1**2 > beta2``: the gradient is averaged over more steps than its square, so that
      updates are not bounded by the learning rate (Kingma and Ba, arXiv:1412.6980, theorem 4.1, requires
      ``beta1**2 < sqrt(beta2)``; Reddi et al., arXiv:1904.09237, ``beta1 <= sqrt(beta2)``).
    * A ``momentum`` of 0.999 or more.
    * ``lr * weight_decay`` above 0.01 in ``patience`` steps, with a ``weight_decay`` above 0.3.
    * A ``weight_decay`` of 0.01 or more of Adam, RMSprop or Adagrad, which add it to the gradients, if it
      has 10 times the norm of the gradients of several matrices in ``patience`` steps in a row (Loshchilov
      and Hutter, arXiv:1711.05101); it needs weights or updates.
    * A clip that leaves less than 0.1 % of the gradients in ``patience`` steps in a row; info for optimizers
      with two betas, whose updates hardly depend on the scale of gradients.
    """

    name = "hyperparameters"
    kept = ("since", "clipped", "decayed", "outweighed")
    _: KW_ONLY
    patience: int = 20
    since: int = field(default=-1, init=False)
    clipped: int = field(default=0, init=False)
    decayed: int = field(default=0, init=False)
    outweighed: int = field(default=0, init=False)

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Return findings about the options of this step."""
        known = optimizers_of(record)
        if known is None or not known.options:
            return []
        if self.since < 0:
            self.since = record.step
        groups = list(zip(known.options, known.rates, strict=True))
        found = [*self._betas(record, known.options), *self._momentum(record, known.options)]
        decays = [
            rate * options["weight_decay"]
            for options, rate in groups
            if rate is not None and options.get("weight_decay", 0.0) > LARGE_DECAY
        ]
        decay = max(decays, default=0.0)
        self.decayed = self.decayed + 1 if decay > DECAY else 0
        if self.decayed >= self.patience:
            since = record.step - self.decayed + 1
            text = f"weight decay takes {decay:.1%} of the weights away in each step since step {since}: "
            text += f"the learning rate times weight_decay is {decay:.3g}"
            found.append(self.finding(record, since, None, decay, DECAY, text, CHECK, None, None))
        found += self._l2(record, known)
        return [*found, *self._clip(record, is_adam=all("beta2" in options for options in known.options))]

    def _betas(self, record: StepRecord, groups: Iterable[Mapping[str, float]]) -> Iterator[Finding]:
        for options in groups:
            one, two = options.get("beta1", 0.0), options.get("beta2", 1.0)
            if one * one > two and "beta3" not in options:
                text = f"the optimizer's betas are ({one:g}, {two:g}): the gradient is averaged over more "
                text += "steps than its square, as if they were swapped"
                yield self.finding(record, self.since, None, one, math.sqrt(two), text, BETAS, None, None)
                return

    def _momentum(self, record: StepRecord, groups: Iterable[Mapping[str, float]]) -> Iterator[Finding]:
        # dampening makes the update an average instead of a sum
        most = max([x.get("momentum", 0.0) for x in groups if not x.get("dampening")], default=0.0)
        if MOMENTUM <= most < 1.0:
            text = f"the optimizer's momentum is {most:g}: each update adds up about {1 / (1 - most):,.0f} "
            text += "gradients, so that it is too large and late"
            yield self.finding(record, self.since, None, most, MOMENTUM, text, CHECK, None, None)

    def _l2(self, record: StepRecord, known: OptimizerState) -> Iterator[Finding]:
        pairs = zip(known.methods, known.options, strict=True)
        decays = [x.get("weight_decay", 0.0) if method in SCALED else 0.0 for method, x in pairs]
        kind, column = ("weights", "sumsq") if record.has("weights") else ("updates", "sumsq_b")
        if max(decays, default=0.0) < L2 or not record.recorded or not record.has(kind):
            return
        shapes = record.catalog.parameters.shapes
        decay = torch.tensor(
            [decays[i] * (len(shape) > 1 and i >= 0) for i, shape in zip(known.groups, shapes, strict=True)],
            dtype=torch.float64,
            device="cpu",
        )
        gradient, term = record.value("norm"), decay * record.value(column, kind).sqrt()
        used = record.measured() & (decay >= L2) & (gradient > 0)
        ratio = torch.where(used, term / gradient, 0.0)
        outweighed = ratio > OUTWEIGHS
        count, worst = int(outweighed.sum()), int(ratio.argmax())
        self.outweighed = self.outweighed + 1 if count >= MATRICES else 0
        if self.outweighed >= self.patience:
            since, name = record.step - self.outweighed + 1, record.names("grads")[worst]
            text = (
                f"the weight_decay of {float(decay[worst]):g} outweighs the gradients of {count} matrices, "
            )
            text += (
                f"since step {since}, that of {name} {times(float(ratio[worst]))}: this optimizer adds it to "
            )
            text += "them, so that these weights shrink by up to the learning rate in each step"
            value = float(ratio[worst])
            yield self.finding(record, since, None, value, OUTWEIGHS, text, DECOUPLE)

    def _clip(self, record: StepRecord, *, is_adam: bool) -> Iterator[Finding]:
        factor, limit = (record.scalars.get(name, math.nan) for name in ("clip_factor", "clip_max_norm"))
        if record.skipped or not record.recorded:
            return
        self.clipped = self.clipped + 1 if 0.0 < factor < CLIPPED and record.total() > 0 else 0
        if self.clipped >= self.patience:
            since = record.step - self.clipped + 1
            text = (
                f"clipping leaves {factor:.2g} of the gradients in each step since step {since}: the limit "
            )
            text += f"of their norm is {limit:.3g}"
            severity = min(self.severity, Severity.INFO) if is_adam else None
            yield self.finding(record, since, None, factor, CLIPPED, text, CLIP, severity, None)
