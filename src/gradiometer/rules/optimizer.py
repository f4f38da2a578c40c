"""The optimizer's part of a step: learning rates, updates, forgotten resets."""

from __future__ import annotations

import math
import re
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from gradiometer.recorder import OPTION
from gradiometer.rules.base import BaseRule, SpikeRule, WholeRule
from gradiometer.rules.finding import Finding, Severity, times
from gradiometer.rules.history import FLOOR, SpikeHistory
from gradiometer.rules.known import by_optimizers, driver_of, optimizers_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from gradiometer.recorder import StepRecord


RESET: Final = "call zero_grad() once in each step, after optimizer.step() or before backward()"
STATE: Final = (
    "look at the optimizer's state, such as a second moment close to 0 or a restored momentum, and at the "
    "gradient of this step; clip the gradients, if you do not yet"
)
MASTERS: Final = (
    "look for an optimizer whose float32 master weights were copied before the weights were loaded or "
    "changed: create it afterwards; or for other code that writes the weights in optimizer.step()"
)
RATE_OF_GROUP: Final = (
    "if these parameters are meant to learn, set the learning rate of their param group; if not, "
    "requires_grad_(False) saves their gradients"
)
SCHEDULE: Final = "look at the scheduler: its number of steps, and whether it is stepped once per step"

_LR: Final = re.compile(r"(?:^|[^a-z])(?:lr|learning_?rate)(?:$|[^a-z])", re.IGNORECASE)
# The first update is compared with so many. It has this share of the weights' norm, and is so many times as
# large, for each unit of the learning rate, and of the gradient's norm, too. Adam's first update is
# sign(gradient), and later ones of pure noise have sqrt((1 - beta1) / (1 + beta1)) of it: 4.4 times less for
# 0.9. Adagrad's fall with the root of the number of steps.
FOLLOWING: Final = 5
FIRST: Final = 20.0
LARGE: Final = 0.1
# what the median of the norms and nine of ten norms have grown to, if gradients add up
GROWN: Final = 1.5
LEAST_GROWN: Final = 1.3


@dataclass(eq=False, repr=False)
class Accumulating(WholeRule):
    """Gradients that add up from step to step, because nothing resets them.

    It compares the first recorded steps of a run, one after another. If nothing resets the gradients, each
    ``.grad`` is the same tensor in all of them, and norms grow about in proportion to the number of steps,
    until the weights have moved far; in proportion to its square root if the gradients are independent. If
    something else writes the gradients, too, such as clipping, then the finding needs a total norm that rises
    in each step, since they may be cleared in place.

    Args:
        steps: number of first steps to compare.
    """

    name = "accumulating"
    kept = (*WholeRule.kept, "count", "last_step", "first_norms", "norms", "is_rising", "is_exact")
    _: KW_ONLY
    steps: int = 6

    def restart(self, size: int) -> None:
        """Start a new history of ``size`` tensors."""
        super().restart(size)
        self.count, self.last_step, self.is_rising, self.is_exact = 0, -1, True, True
        self.first_norms = self.norms = torch.zeros(size, dtype=torch.float64, device="cpu")

    def examine(self, record: StepRecord) -> Iterable[Finding]:
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
        optimizers = optimizers_of(record)
        if optimizers is not None:
            # nobody needs to clear the gradients of what no optimizer holds, nor a copy of it
            known &= optimizers.held | optimizers.keeps_small_updates
        # what is known for sure is LoopOrder's to report
        is_told = record.model is not None and bool(record.model.order.stale)
        writes = 0 if record.model is None or is_told else record.model.grad_writes
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
        text += "zero_grad() is not called, or not for these parameters"
        return [self.finding(record, first, None, growth, 1.0, text, RESET)]


@dataclass(eq=False, repr=False)
class LearningRate(BaseRule):
    """A learning rate that jumps, that falls to 0 for good, or that is not a number of 0 or more.

    It reads all scalars given to ``Monitor.advance`` whose names contain ``lr`` or ``learning_rate``. A jump
    is compared with the highest learning rate before, so restarts of a schedule are none. It is a warning
    if it is by more than ``factor``; by more than 5, it has severity info. So has a rate that is 0 from the
    start while other parameters have one above 0.

    Args:
        factor: the limit of a jump.
        patience: number of steps with a learning rate of 0, and for which a jump is reported.
        warmup: number of steps with a learning rate above 0 before a jump counts.
    """

    name = "learning_rate"
    kept = ("state",)
    _: KW_ONLY
    factor: float = 15.0
    patience: int = 10
    warmup: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
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
            raise ValueError(f"expected for each scalar a dict of numbers: {', '.join(sorted(fields))}")

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Compare this step's learning rates with those before."""
        found = []
        rates = learning_rates(record)
        # of other parameters, which still learn
        others = _any_learn(record)
        for name, rate in rates.items():
            seen = self.state.setdefault(name, dict(_START))
            if not rate >= 0.0 or rate == math.inf:
                text = f"{name} is {rate:g}, which is not a learning rate"
                found.append(self._finding(record, record.step, name, rate, 0.0, text))
            elif rate == 0.0:
                found += self._zero(record, name, seen, others=others)
            else:
                found += self._jump(record, name, rate, seen)
        return found

    def _zero(self, record: StepRecord, name: str, seen: dict[str, float], *, others: bool) -> list[Finding]:
        if not seen["zeros"]:
            seen["zero_since"] = record.step
        seen["zeros"] += 1
        if seen["zeros"] < self.patience:
            return []
        since, last = int(seen["zero_since"]), seen["last"]
        text = f"{name} has fallen to 0 at step {since} (before, {last:.3g})"
        if not last:
            text = f"{name} is 0 since step {since}"
        text += ": the parameters with this learning rate do not learn"
        if not others or last:
            return [self._finding(record, since, name, 0.0, 0.0, text)]
        # one group of several, from the start: frozen on purpose, or not yet thawed
        text += ", while others do"
        found = self._finding(record, since, name, 0.0, 0.0, text, min(self.severity, Severity.INFO))
        return [replace(found, advice=RATE_OF_GROUP)]

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
        tensor = None if name == "lr" else name
        return self.finding(record, since, tensor, rate, limit, text, SCHEDULE, severity, None)


_START: Final = {
    "count": 0, "highest": 0.0, "jumps": 0, "jump_at": 0.0, "zeros": 0, "zero_since": 0, "last": 0.0,
}  # fmt: skip


@dataclass(eq=False, repr=False)
class UpdateSpike(SpikeRule):
    """A total norm of the updates far above its recent past; needs a Monitor with ``updates=True``.

    It compares the norm divided by the learning rate, if that is given: `LearningRate` reports its jumps. If
    the gradients' norm has risen by half as much on a logarithmic scale, it has severity info: `NormSpike`
    reports the gradients.

    Args:
        deviations: limit for the logarithm of the norm, in deviations above its usual value, see
            `SpikeHistory`.
    """

    name = "update_spike"
    kept = (*SpikeRule.kept, "gradients", "first", "first_step", "following")
    gradients: SpikeHistory = field(default_factory=SpikeHistory, init=False)
    # of the first update: its norm, divided by the learning rate; that divided by the gradient's norm, and by
    # the weights'; the largest two of the first that followed, with their number
    first: Tensor = field(default_factory=lambda: _zeros(3), init=False)
    following: Tensor = field(default_factory=lambda: _zeros(3), init=False)
    first_step: int = field(default=-1, init=False)

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Compare this step's updates with the history."""
        if not record.has("updates") or record.skipped:
            return []
        total, before = record.total("finite_norm"), self.gradients.usual
        if total > 0.0:
            self.gradients.score(math.log(total), FLOOR)
        squares = by_optimizers(record, record.value("sumsq", "updates"))
        rate, known = record.scalars.get("lr", 1.0), optimizers_of(record)
        if rate == 0.0 and known is not None:
            # that of the first group
            rate = known.highest_rate or rate
        begun = []
        if driver_of(record) != "loop":
            # in your own loop, what changed the weights before the first step may be a part of its update
            begun = self._begin(record, math.sqrt(float(squares.sum())), rate, total)
        spike = self.spike(record, "updates", "the update's norm is", squares, rate)
        if spike is None:
            return begun
        norm, usual, limit, text = spike
        has_risen = total > 0.0 and math.log(total) - before > 0.5 * math.log(norm / usual)
        severity = min(self.severity, Severity.INFO) if has_risen else self.severity
        return [self.finding(record, record.step, None, norm, limit, text, STATE, severity, "updates")]

    def _begin(self, record: StepRecord, norm: float, rate: float, total: float) -> list[Finding]:
        """Return a finding if the very first update was far above those that follow it."""
        if self.following[2] == FOLLOWING or not (rate > 0.0 and total > 0.0 and norm < math.inf):
            return []
        speed = torch.tensor([norm / rate, norm / rate / total], dtype=torch.float64, device="cpu")
        if self.first_step < 0:
            weights = math.sqrt(record.total("sumsq_b", "updates"))
            self.first, self.first_step = (
                torch.tensor([*speed, norm / max(weights, 1e-300)], dtype=torch.float64, device="cpu"),
                record.step,
            )
            return []
        self.following = torch.cat([self.following[:2].fmax(speed), self.following[2:] + 1.0])
        ratio = float((self.first[:2] / self.following[:2]).min())
        share = float(self.first[2])
        if self.following[2] < FOLLOWING or not (ratio > FIRST and share > LARGE):
            return []
        text = f"the first update, at step {self.first_step}, moved the weights by {share:.2g} of their "
        text += f"norm, {times(ratio)} the updates that follow: it wrote more than this step's gradient"
        return [self.finding(record, self.first_step, None, ratio, FIRST, text, MASTERS, kind="updates")]


def _zeros(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.float64, device="cpu")


def _any_learn(record: StepRecord) -> bool:
    """Return whether a learning rate is above 0: of the optimizers, if these are known, or of the scalars."""
    optimizers = optimizers_of(record)
    if optimizers is None or None in optimizers.rates:
        return any(learning_rates(record).values())
    return any(optimizers.rates)


def learning_rates(record: StepRecord) -> dict[str, float]:
    """Return the learning rates of a step, by name."""
    # those of other groups are recorded when they change only
    given = {name: value for name, value in record.scalars.items() if not name.startswith(OPTION)}
    return {name: value for name, value in given.items() if name == "lr" or _LR.search(name)}
