"""The optimizer's part of a step: weights that do not change, learning rates, updates, forgotten resets."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final

import torch

from gradiometer.recorder import label
from gradiometer.rules.base import BaseRule, SpikeRule, WholeRule, modules_text
from gradiometer.rules.finding import Finding, Severity, times
from gradiometer.rules.history import FLOOR, SpikeHistory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradiometer.recorder import Roster, StepRecord

__all__ = ["Accumulating", "LearningRate", "NotUpdated", "UpdateSpike", "learning_rates"]

STEP: Final = (
    "call optimizer.step() in each step, and create the optimizer with the parameters of this model, after "
    "they have been moved or replaced"
)
ADD: Final = "pass these parameters to the optimizer, or freeze them with requires_grad_(False)"
ROUNDED: Final = (
    "keep the weights in float32 (autocast computes in half precision), or use an optimizer with float32 "
    "master weights or stochastic rounding; a larger learning rate helps, too"
)
RESET: Final = "call optimizer.zero_grad() once in each step, after optimizer.step() or before backward()"
STATE: Final = (
    "look at the optimizer's state, such as a second moment close to 0 or a restored momentum, and at the "
    "gradient of this step; clip the gradients"
)
SCHEDULE: Final = "look at the scheduler: its number of steps, and whether it is stepped once per step"

_LR: Final = re.compile(r"(?:^|[^a-z])(?:lr|learning_?rate)(?:$|[^a-z])", re.IGNORECASE)
# share of the total norm below which a gradient's update need not change a weight
SMALL: Final = 1e-6
# what the median of the norms and nine of ten norms have grown to, if gradients add up
GROWN: Final = 1.5
LEAST_GROWN: Final = 1.3
# the beginnings of dtypes in which an update of less than a few thousandths of a weight is lost
SHORT: Final = ("bfloat16", "float16", "float8", "float4")


class NotUpdated(WholeRule):
    """Weights that stay exactly the same although their gradients are not 0.

    It needs a Monitor with ``weights=True`` or ``updates=True``. If this holds for all weights, the
    optimizer's step is missing; if it holds for some, these are missing from the optimizer. Skipped steps,
    and steps with a learning rate of 0, which `LearningRate` reports, do not count. With ``updates=True``,
    `Stuck` reports tensors of 16 bits or less, which may stay the same because of rounding.

    Args:
        patience: number of recorded steps in a row.
        severity: the severity of a finding.
    """

    name = "not_updated"
    kept = (*WholeRule.kept, "row", "since")

    def __init__(self, *, patience: int = 10, severity: Severity = Severity.WARNING) -> None:
        super().__init__(severity)
        self.patience = patience
        self.row = self.since = torch.zeros(0, dtype=torch.float64, device="cpu")
        self._counts = torch.zeros(0, dtype=torch.bool, device="cpu")

    def restart(self, size: int) -> None:
        """Start a new history of ``size`` tensors."""
        super().restart(size)
        self.row, self.since = torch.zeros(2, size, dtype=torch.float64, device="cpu").unbind()

    def prepare(self, roster: Roster) -> None:
        """Leave out single numbers, whose updates may be lost in rounding."""
        self._counts = torch.tensor(
            [math.prod(shape) > 1 for shape in roster.shapes], dtype=torch.bool, device="cpu"
        )
        if "updates" in roster.kinds:
            short = [dtype.startswith(SHORT) for dtype in roster.dtypes]
            self._counts &= ~torch.tensor(short, dtype=torch.bool, device="cpu")

    def look(self, record: StepRecord) -> Iterable[Finding]:
        """Return a finding about the weights that have stayed the same for ``patience`` steps."""
        moved = self.moved(record)
        if moved is None or record.skipped or 0.0 in learning_rates(record).values():
            return []
        still = self._counts & ~moved
        if still.any():
            # an update by a vanishing gradient may be lost in rounding
            norm = record.value("norm")
            active = (norm > SMALL * record.total()) & norm.isfinite()
            if record.model is not None and len(record.model.requires_grad) == len(active):
                # a parameter that was frozen may still have the gradient of an earlier step
                active &= torch.tensor(record.model.requires_grad, dtype=torch.bool, device="cpu")
            still &= active
        if not still.any():
            if self.row.any():
                self.row = torch.zeros_like(self.row)
            return []
        self.row = torch.where(active | moved, (self.row + 1.0).mul_(still), self.row)
        self.since = torch.where(still & (self.row == 1.0), float(record.step), self.since)
        lasting = still & (self.row >= self.patience)
        if not lasting.any():
            return []
        places = lasting.nonzero().flatten().tolist()
        names, since = record.roster.names, int(self.since[places].min())
        dtypes = {record.roster.dtypes[place] for place in places}
        if all([dtype.startswith(SHORT) for dtype in dtypes]):
            # the optimizer may have moved them, by less than a rounding error
            text = f"{modules_text(names, places)}: the weights stay exactly the same since step {since}, "
            text += "though their gradients are not 0: the updates are lost in the rounding of "
            text += f"{' and '.join(sorted(dtypes))}, or optimizer.step() leaves these weights out"
            return [self._finding(record, since, places, text, f"{ROUNDED}; {ADD}")]
        if not moved.any() and len(places) == int((active & self._counts).sum()):
            text = f"no weight has changed since step {since}, though gradients are not 0: optimizer.step() "
            text += "is not called, or the optimizer holds other parameters"
            rate = "" if learning_rates(record) else ", or its learning rate is 0"
            return [self._finding(record, since, places, text + rate, STEP)]
        text = f"{modules_text(names, places)}: the weights stay exactly the same since step {since}, though "
        text += "their gradients are not 0: the optimizer does not hold these parameters"
        return [self._finding(record, since, places, text, ADD)]

    def _finding(self, record: StepRecord, since: int, places: list[int], text: str, advice: str) -> Finding:
        share = len(places) / len(record.roster.names)
        first = None if share == 1.0 else record.roster.names[places[0]]
        return self.finding(record, since, first, share, 0.0, text, advice, self.severity, "weights")


class Accumulating(WholeRule):
    """Gradients that add up from step to step, because nothing resets them.

    It compares the first recorded steps of a run, one after another. If nothing resets the gradients, each
    ``.grad`` is the same tensor in all of them, and norms grow about in proportion to the number of steps,
    until the weights have moved far; in proportion to its square root if the gradients are independent. If
    something else writes the gradients, too, such as clipping, then the finding needs a total norm that rises
    in each step, since they may be cleared in place.

    Args:
        steps: number of first steps to compare.
        severity: the severity of the finding.
    """

    name = "accumulating"
    kept = (*WholeRule.kept, "count", "last_step", "first_norms", "norms", "is_rising", "is_exact")

    def __init__(self, *, steps: int = 6, severity: Severity = Severity.WARNING) -> None:
        super().__init__(severity)
        self.steps = steps
        self.restart(0)

    def restart(self, size: int) -> None:
        """Start a new history of ``size`` tensors."""
        super().restart(size)
        self.count, self.last_step, self.is_rising, self.is_exact = 0, -1, True, True
        self.first_norms = self.norms = torch.zeros(size, dtype=torch.float64, device="cpu")

    def look(self, record: StepRecord) -> Iterable[Finding]:
        """Compare the norms with those of the step before."""
        if not self.is_rising:
            return []
        norms = record.value("norm")
        before, self.norms = self.norms, norms
        self.count += 1
        if self.count == 1:
            self.first_norms, self.last_step = norms, record.step
            return []
        # other steps in between would hide how the gradients add up
        follows, self.last_step = record.step == self.last_step + 1, record.step
        known = (self.first_norms > 0) & norms.isfinite()
        writes = 0 if record.model is None else record.model.grad_writes
        self.is_exact = self.is_exact and writes == 1
        has_risen = bool(norms[known].norm() > before[known].norm())
        self.is_rising = bool(follows and writes and known.any() and (has_risen or self.is_exact))
        if not self.is_rising or self.count <= self.steps:
            return []
        self.is_rising = False
        grown = norms[known] / self.first_norms[known]
        growth, least = float(grown.median()), float(grown.quantile(0.1))
        steps = 0.8 * math.sqrt(self.count), 1.3 * self.count
        if not (growth > GROWN if self.is_exact else steps[0] < growth < steps[1] and least > LEAST_GROWN):
            return []
        first = record.step - self.count + 1
        text = f"gradients add up since step {first}, to {times(growth)} the first in {self.count} steps: "
        text += "zero_grad() is not called"
        return [self.finding(record, first, None, growth, 1.0, text, RESET, self.severity)]


class LearningRate(BaseRule):
    """A learning rate that jumps, that falls to 0 for good, or that is not a number of 0 or more.

    It reads all scalars given to ``Monitor.advance`` whose names contain ``lr`` or ``learning_rate``. A jump
    is compared with the highest learning rate before, so restarts of a schedule are none. It is a warning
    if it is by more than ``factor``; by more than 5, it has severity info.

    Args:
        factor: the limit of a jump.
        patience: number of steps with a learning rate of 0, and for which a jump is reported.
        warmup: number of steps with a learning rate above 0 before a jump counts.
        severity: the severity of a finding.
    """

    name = "learning_rate"
    kept = ("state",)

    def __init__(
        self,
        *,
        factor: float = 15.0,
        patience: int = 10,
        warmup: int = 5,
        severity: Severity = Severity.WARNING,
    ) -> None:
        super().__init__(severity)
        self.factor, self.patience, self.warmup = factor, patience, warmup
        # of each scalar: the number of steps, the highest rate, that before a jump, the first step of a jump
        # or of a rate of 0, the number of steps since then, and the last rate above 0
        self.state: dict[str, dict[str, float]] = {}

    def check_value(self, key: str, value: Any) -> None:
        """Raise an error unless the value can replace the attribute ``key``."""
        super().check_value(key, value)
        fields = set(_START)
        if not isinstance(value, dict) or not all(
            isinstance(one, dict)
            and set(one) == fields
            and all(type(x) in {int, float} for x in one.values())
            for one in value.values()
        ):
            msg = f"expected for each scalar a dict of numbers: {', '.join(sorted(fields))}"
            raise ValueError(msg)

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Compare this step's learning rates with those before."""
        found = []
        for name, rate in learning_rates(record).items():
            seen = self.state.setdefault(name, dict(_START))
            if not rate >= 0.0 or rate == math.inf:
                text = f"{name} is {rate:g}, which is not a learning rate"
                found.append(self._finding(record, record.step, name, rate, 0.0, text))
            elif rate == 0.0:
                found += self._zero(record, name, seen)
            else:
                found += self._jump(record, name, rate, seen)
        return found

    def _zero(self, record: StepRecord, name: str, seen: dict[str, float]) -> list[Finding]:
        if not seen["zeros"]:
            seen["zero_since"] = record.step
        seen["zeros"] += 1
        if seen["zeros"] < self.patience:
            return []
        since, last = int(seen["zero_since"]), seen["last"]
        usual = f" (before, {last:.3g})" if last else ""
        text = f"{name} has fallen to 0 at step {since}{usual}: nothing is learned since then"
        if not last:
            text = f"{name} is 0 since step {since}: nothing is learned"
        return [self._finding(record, since, name, 0.0, 0.0, text)]

    def _jump(self, record: StepRecord, name: str, rate: float, seen: dict[str, float]) -> list[Finding]:
        seen["zeros"], seen["last"] = 0, rate
        seen["count"] += 1
        highest = seen["highest"]
        if rate <= 5.0 * highest or seen["count"] <= self.warmup:
            if rate <= 5.0 * highest or not highest:
                seen["jumps"] = 0
            seen["highest"] = max(highest, rate)
            return []
        if not seen["jumps"]:
            seen["jump_at"] = rate
        seen["jumps"] += 1
        if seen["jumps"] > self.patience:
            # a new level, rather than a mistake that can still be undone
            seen["highest"], seen["jumps"] = rate, 0
            return []
        severity = self.severity if rate > self.factor * highest else min(self.severity, Severity.INFO)
        text = f"{name} was {rate:.3g} at step {record.step}, usually {highest:.3g} at most"
        return [self._finding(record, record.step, name, rate, self.factor * highest, text, severity)]

    def _finding(
        self,
        record: StepRecord,
        since: int,
        name: str,
        rate: float,
        limit: float,
        text: str,
        severity: Severity | None = None,
    ) -> Finding:
        severity = self.severity if severity is None else severity
        tensor = None if name == "lr" else name
        return Finding(self.name, severity, since, record.step, None, tensor, rate, limit, text, SCHEDULE)


_START: Final = {
    "count": 0, "highest": 0.0, "jumps": 0, "jump_at": 0.0, "zeros": 0, "zero_since": 0, "last": 0.0,
}  # fmt: skip


class UpdateSpike(SpikeRule):
    """A total norm of the updates far above its recent past; needs a Monitor with ``updates=True``.

    It compares the norm divided by the learning rate, if that is given: `LearningRate` reports its jumps. If
    the gradients' norm has risen by half as much on a logarithmic scale, it has severity info: `NormSpike`
    reports the gradients.

    Args:
        deviations: limit for the logarithm of the norm, in deviations above its usual value, see
            `SpikeHistory`.
        severity: the severity of a finding.
    """

    name = "update_spike"
    kept = (*SpikeRule.kept, "gradients")

    def __init__(self, *, deviations: float = 8.0, severity: Severity = Severity.WARNING) -> None:
        super().__init__(deviations=deviations, severity=severity)
        self.gradients = SpikeHistory()

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Compare this step's updates with the history."""
        if record.values is None or "updates" not in record.roster.kinds or record.skipped:
            return []
        total, before = record.total("finite_norm"), self.gradients.usual
        if total > 0.0:
            self.gradients.score(math.log(total), FLOOR)
        squares = record.value("sumsq", "updates")
        spike = self.spike(squares, record.scalars.get("lr", 1.0))
        if spike is None:
            return []
        norm, usual, limit, place = spike
        has_risen = total > 0.0 and math.log(total) - before > 0.5 * math.log(norm / usual)
        severity = min(self.severity, Severity.INFO) if has_risen else self.severity
        text = f"the update's norm is {norm:.3g}, {times(norm / usual)} its usual {usual:.3g}; "
        text += f"{float(squares[place]) / norm**2:.0%} of its square comes from "
        text += label("updates", record.roster.names[place])
        step = record.step
        return [Finding(self.name, severity, step, step, "updates", None, norm, limit, text, STATE)]


def learning_rates(record: StepRecord) -> dict[str, float]:
    """Return the learning rates of a step, by name."""
    return {name: value for name, value in record.scalars.items() if name == "lr" or _LR.search(name)}
