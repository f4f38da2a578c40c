"""Updates that are smaller than the rounding: elements that stay the same despite a gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from gradiometer.rules.base import LastingRule, Observation, mask
from gradiometer.rules.finding import Severity
from gradiometer.rules.known import optimizers_of
from gradiometer.rules.not_updated import SHORT, SMALL, add_advice, small_updates_advice
from gradiometer.rules.optimizer import learning_rates

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from gradiometer.recorder import Rows, StepRecord
    from gradiometer.rules.finding import Finding


# share of stuck elements above which a finding is a warning
NEARLY_ALL: Final = 0.9
# share of the highest learning rate below which a schedule has nearly ended
ENDING: Final = 0.1


@dataclass(eq=False, repr=False)
class Stuck(LastingRule):
    """A tensor most of whose elements stay the same although their gradients are not 0.

    It needs a Monitor with ``updates=True``. The share is ``stuck_fraction``, see `gradiometer.PairStats`. If
    the gradients were cleared before the updates were measured, it is a lower bound: unchanged elements minus
    zeros of the gradient that was recorded in the same step.

    A finding has ``severity`` if more than nine tenths of the elements are stuck, and the dtype has 16 bits
    or less; otherwise info. In float32 a tensor that does not change at all is left to `NotUpdated`. Steps
    that are skipped, have a learning rate of 0, a rising one, as in a warm-up, or a gradient that is not
    finite do not count. While the learning rate is below a tenth of its highest value, findings have
    severity info.

    Master weights, which are copies in float32, keep small updates, and stochastic rounding loses nothing on
    average, though both leave most elements unchanged. With `gradiometer.watch` and trainers, the rule leaves
    out the parameters of optimizers that are known to use one of these, and those whose learning rate is 0;
    `NotUpdated` reports them if none of them changes.
    Otherwise it cannot tell: leave it out then, or raise ``fraction``.

    Args:
        fraction: limit of the share of stuck elements.
    """

    name = "stuck"
    kinds: ClassVar[tuple[str, ...]] = ("updates",)
    kept = (*LastingRule.kept, "rate", "highest")
    fraction: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.fraction < 1.0:
            raise ValueError(f"Stuck(fraction={self.fraction!r}): fraction must be at least 0 and below 1")

    def restart(self, size: int) -> None:
        """Start a new history of ``size`` tensors."""
        super().restart(size)
        self.rate = self.highest = 0.0

    def prepare(self, rows: Rows) -> None:
        """Leave out single numbers, and find the tensors of 16 bits or less."""
        self.wide = mask([math.prod(shape) > 1 for shape in rows.shapes])
        self._is_short = mask([dtype.startswith(SHORT) for dtype in rows.dtypes])

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Return findings about the tensors that have been stuck for ``patience`` steps."""
        if record.skipped:
            return []
        rates, optimizers = learning_rates(record).values(), optimizers_of(record)
        highest = None if optimizers is None else optimizers.highest_rate
        before, self.rate = self.rate, max(rates, default=0.0) if highest is None else highest
        self.highest = max(self.highest, self.rate)
        # other groups than those of the scalars may have another rate
        if self.rate > before > 0.0 or (self.rate == 0.0 if highest is not None else 0.0 in rates):
            return []
        share, known = stuck_share(record)
        if optimizers is not None:
            known &= ~(optimizers.is_frozen | optimizers.keeps_small_updates)
        norm = record.value("norm")
        # an update by a vanishing gradient may be lost in rounding
        known &= self.wide & norm.isfinite() & (norm > SMALL * record.total("finite_norm"))
        moves = record.value("abs_max", "updates") > 0
        found = self.lasting(known & (share > self.fraction) & (moves | self._is_short), known, record.step)
        if found is None:
            return []
        severe = self._is_short & (share > NEARLY_ALL)
        if self.rate < ENDING * self.highest:
            severe = torch.zeros_like(severe)

        def describe(place: int) -> Observation:
            value, dtype = float(share[place]), record.catalog.parameters.dtypes[place]
            part = "all" if value == 1.0 else f"{math.floor(100 * value)}%"
            message = f"{part} of the elements whose gradient is not 0 stay the same since step "
            message += f"{int(self.since[place])}: "
            advice = small_updates_advice(dtype)
            small = f"their updates are smaller than the rounding of {dtype}"
            if moves[place] or (optimizers is not None and optimizers.held[place]):
                message += small
            elif optimizers is not None:
                message, advice = f"{message}no optimizer holds this tensor", add_advice(optimizers)
            else:
                message += f"{small}, or optimizer.step() is not called or leaves this tensor out"
                advice = f"{advice}; {add_advice(None)}"
            severity = self.severity if severe[place] else min(self.severity, Severity.INFO)
            return Observation(value, self.fraction, message, advice, severity)

        # larger gradients first, if the shares are equal
        badness = share + norm / norm.max().clamp(min=1e-300) * 1e-3
        return self.findings(record, "updates", found, badness, describe, self.since)


def stuck_share(record: StepRecord) -> tuple[Tensor, Tensor]:
    """Return the share of stuck elements, or its lower bound, and where it is known; ``(N,)`` each."""
    nonzero, stuck = record.value("n_nonzero_g", "updates"), record.value("n_stuck", "updates")
    exact = nonzero > 0
    # an element with a gradient of 0 may stay the same
    zeros = record.value("n_zero")
    bound = (record.value("n_unchanged", "updates") - zeros).clamp(min=0.0)
    nonzero = torch.where(exact, nonzero, record.value("numel") - zeros)
    share = torch.where(exact, stuck, bound) / nonzero.clamp(min=1.0)
    return share, (nonzero > 0) & record.measured("updates") & record.measured()
