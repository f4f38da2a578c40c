"""An eps of Adam that is 0, or that outweighs the second moments."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Final

import torch

from gradiometer.rules.base import WholeRule
from gradiometer.rules.finding import Severity, times
from gradiometer.rules.known import optimizers_of
from gradiometer.rules.optimizer_states import FRESH, SECOND, counters_of, of, options_of, second_moment

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from gradiometer.recorder import OptimizerState, StepRecord
    from gradiometer.rules.finding import Finding

# numbers up to it are rounded to 0 in float16
_ZERO_IN_FP16: Final = 2.0**-25
# An eps up to this is meant to prevent a division by 0 only; larger ones are chosen
_SMALL_EPS: Final = 1e-6
RAISE_EPS: Final = (
    "keep the parameters that the optimizer updates in float32 (autocast or master weights), or pass an eps "
    "that float16 can hold, such as eps=1e-4"
)
LOWER_EPS: Final = (
    "check whether the loss is scaled down by a large number; if these gradients are meant, pass a smaller "
    "eps (1e-15 is common for large models) or a higher learning rate"
)


@dataclass(eq=False, repr=False)
class Epsilon(WholeRule):
    """An eps that is 0 in the dtype of the optimizer's state, or that outweighs the second moments.

    Adam divides by ``sqrt(v) + eps``. The usual 1e-8 is 0 in float16, where v is 0 for gradients below 2e-4:
    the update is then a division by 0. That is known from the first step on.

    If eps is larger than the root of the second moments, which are corrected for their bias, the update is
    proportional to the gradient, and smaller than the learning rate. A finding needs that of most elements of
    the model from its first steps on: gradients that fall at the end of a training are healthy. It is a
    warning if eps is 10 times as large or more, and at most 1e-6, and otherwise info.

    Args:
        patience: number of steps with measured states, from the first on.
        factor: the ratio from which on it is a warning.
    """

    name = "epsilon"
    kept = (*WholeRule.kept, "count", "is_above", "first")
    _: KW_ONLY
    patience: int = 3
    factor: float = 10.0

    def restart(self, size: int) -> None:
        """Start a new history."""
        super().restart(size)
        self.count, self.is_above, self.first = 0, True, -1

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Compare eps with 0 and with the second moments."""
        known = optimizers_of(record)
        if known is None or not known.updates:
            return []
        eps, kind = options_of(known, "eps"), second_moment(record)
        if kind is None:
            return []
        if self.first < 0:
            self.first = record.step
            # at the end of a training, which may be resumed, the gradients are small
            counters = counters_of(known)
            is_fresh = counters[~counters.isnan()] <= FRESH
            self.is_above = bool(is_fresh.all()) if len(is_fresh) else record.step < FRESH
        is_short = torch.tensor([dtype == "float16" for dtype in known.dtypes], device="cpu")
        zero = is_short & (eps <= _ZERO_IN_FP16) & options_of(known, "fused").isnan()
        # without moments that are 0 nothing is divided by it
        zero |= (eps == 0) & record.measured(kind) & (record.value("n_zero", kind) > 0)
        if zero.any():
            place = int(zero.to(torch.int8).argmax())
            value = float(eps[place])
            dtype = f"eps is 0, and the second moments of {of(zero, len(eps))} have elements that are 0"
            if value:
                dtype = f"eps={value:g} is 0 in float16, the dtype of the state of {of(zero, len(eps))}"
            text = f"{dtype}: where a second moment is 0, the update is a division by 0"
            return [self.finding(record, self.first, None, value, _ZERO_IN_FP16, text, RAISE_EPS, kind=None)]
        return self._outweighs(record, known, kind, eps)

    def _outweighs(
        self, record: StepRecord, known: OptimizerState, kind: str, eps: Tensor
    ) -> Iterable[Finding]:
        if not self.is_above:
            return []
        counters = counters_of(known)
        count = torch.where(counters.isnan(), float(record.step + 1), counters)
        # of the elements that had a gradient
        filled = record.value("numel", kind) - record.value("n_zero", kind)
        moment = record.value("sum", kind) / filled
        if kind == "exp_avg_sq":
            moment = moment / (1.0 - options_of(known, SECOND[kind]).pow(count))
        ratio = eps / moment.sqrt()
        judged = ratio.isfinite() & (ratio > 0)
        if not judged.any():
            return []
        self.count += 1
        # the elements of the model, from the largest ratio down: that of the middle one
        order = ratio[judged].argsort(descending=True)
        size = filled[judged][order]
        middle = float(ratio[judged][order][int((size.cumsum(0) >= size.sum() / 2).to(torch.int8).argmax())])
        self.is_above = middle > 1.0
        if not self.is_above or self.count < self.patience:
            return []
        largest = float(eps[judged].max())
        text = (
            f"eps={largest:g} is {times(middle)} the root of the second moments, in half of all elements or "
        )
        text += "more, since the first step: updates are proportional to the gradients, and "
        text += f"{1 / (1 + middle):.2g} times the learning rate"
        is_small = largest <= _SMALL_EPS and middle >= self.factor
        severity = self.severity if is_small else min(self.severity, Severity.INFO)
        return [self.finding(record, self.first, None, middle, 1.0, text, LOWER_EPS, severity, None)]
