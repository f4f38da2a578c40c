"""The first updates of an Adam without bias correction."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from gradiometer.rules.base import BaseRule
from gradiometer.rules.finding import Finding, Severity, times
from gradiometer.rules.known import optimizers_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from gradiometer.recorder import OptimizerState, StepRecord

# updates that are larger by less do little
LARGE: Final = 1.5
# how far the median, and most tensors, may be from the factor: eps, weight decay and rounding change it
MEDIAN, EACH, MOST = 0.01, 0.05, 0.8
# tensors that have to agree
LEAST: Final = 4

CORRECT: Final = (
    "divide exp_avg by 1 - beta1**t and exp_avg_sq by 1 - beta2**t in step t, or warm up the learning rate "
    "from near 0 over about 1 / (1 - beta2) steps"
)


@dataclass(eq=False, repr=False)
class BiasCorrection(BaseRule):
    """An optimizer like Adam whose first updates are too large, because its averages begin at 0.

    It needs a Monitor with ``updates=True`` that `gradiometer.watch` or the callback of a trainer calls.
    After one step from 0, ``m = (1 - beta1) g`` and ``v = (1 - beta2) g**2``, so without the corrections of
    Kingma and Ba (arXiv:1412.6980, section 3), each element moves by ``(1 - beta1) / sqrt(1 - beta2)`` times
    the learning rate, 3.16 for the usual betas, and by more in the next steps. If the root mean square of
    the first update is exactly that in nearly all tensors, it is info, as some implementations do so on
    purpose; and it has ``severity`` if the learning rate has no warm-up: if it is at least half of its
    highest value in the first ``patience`` steps.

    Args:
        patience: number of steps.
    """

    name = "bias_correction"
    kept = ("seen", "factor", "first_step", "rates")
    _: KW_ONLY
    patience: int = 20
    seen: int = field(default=0, init=False)
    factor: float = field(default=0.0, init=False)
    first_step: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        # the highest learning rate of the first step, and of all
        self.rates = torch.zeros(2, dtype=torch.float64, device="cpu")

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Look at the first update; return a finding after ``patience`` steps."""
        known = optimizers_of(record)
        if self.seen > self.patience or known is None or record.skipped:
            return []
        if not self.seen:
            if not record.has("updates"):
                # without updates, or a step that is not recorded
                self.seen = self.patience + 1
                return []
            self.factor, self.first_step = self._factor(record, known), record.step
            self.rates[0] = known.highest_rate or math.nan
        self.seen = self.seen + 1 if self.factor else self.patience + 1
        self.rates[1] = max(float(self.rates[1]), known.highest_rate or 0.0)
        if not self.factor or self.seen < self.patience:
            return []
        self.seen = self.patience + 1
        first, highest = self.rates.tolist()
        has_warm_up = not first > highest / 2.0
        text = (
            f"the first update moves each element by {self.factor:.3g} times the learning rate, as by Adam "
        )
        text += f"without bias correction: the first updates are {times(self.factor)} as large, or more"
        severity = min(self.severity, Severity.INFO) if has_warm_up else self.severity
        return [
            self.finding(
                record, self.first_step, None, self.factor, LARGE, text, CORRECT, severity, "updates"
            )
        ]

    def _factor(self, record: StepRecord, known: OptimizerState) -> float:
        """Return by how many learning rates all elements move; 0 if that is not because of the averages."""
        made = [_first_step(options) for options in known.options]
        of_groups = torch.tensor([*made, math.nan], dtype=torch.float64, device="cpu")
        rates = torch.tensor(
            [*(rate or math.nan for rate in known.rates), math.nan], dtype=torch.float64, device="cpu"
        )
        groups = torch.tensor(known.groups, dtype=torch.int64, device="cpu")
        expected = of_groups[groups]
        moved: Tensor = record.value("n_nonzero_g", "updates") * rates[groups].square()
        found = (record.value("sumsq_u", "updates") / moved).sqrt()
        ratio = (found / expected)[record.measured("updates") & (moved > 0) & (expected > LARGE)]
        ratio = ratio[ratio.isfinite()]
        if len(ratio) < LEAST or abs(float(ratio.median()) - 1.0) > MEDIAN:
            return 0.0
        is_same = float(((ratio - 1.0).abs() < EACH).double().mean()) > MOST
        return float(expected[expected.isfinite()].max()) if is_same else 0.0


def _first_step(options: Mapping[str, float]) -> float:
    """Return by how many learning rates Adam moves an element in its first step without bias correction."""
    one, two = options.get("beta1", math.nan), options.get("beta2", math.nan)
    return (1.0 - one) / math.sqrt(1.0 - two) if 0.0 <= one < 1.0 and 0.0 <= two < 1.0 else math.nan
