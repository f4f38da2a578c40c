"""Losses and norms over many steps: at chance level, far above their lowest value, or gradients that fade."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from gradiometer.rules.base import BaseRule
from gradiometer.rules.finding import Finding, times

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradiometer.recorder import StepRecord

# values whose median is compared, so that no single step decides
WINDOW: Final = 20
# a loss within these factors of log(C) is no better than that of guessing among C classes
NO_BETTER: Final = 0.95
NO_WORSE: Final = 1.1
# the loss of an untrained classifier, whose logits are not exactly equal
UNTRAINED: Final = 1.5
# a loss that falls by less stays
STAYS: Final = 0.98
# with fewer classes, log(C) is near 1, as are many losses that are no cross entropy
LEAST_CLASSES: Final = 4

NOT_LEARNING: Final = (
    "look at whether inputs and labels belong together (order, shift, padding and token ids), whether inputs "
    "are normalized and reach the model, and whether updates are large enough"
)
DIVERGED: Final = (
    "go back to a checkpoint from before the rise, lower the learning rate, and look for what changed there: "
    "data, schedule, precision"
)
FADED: Final = (
    "look for saturated outputs (a sigmoid or softmax in front of a loss that has its own), dead units, "
    "a loss that is clamped, or values that are flushed to 0 in a narrow dtype"
)


def _window() -> Tensor:
    return torch.full((WINDOW,), math.nan, dtype=torch.float64, device="cpu")


def _median(window: Tensor, value: float) -> tuple[Tensor, float]:
    """Return a window with one more value, and its median; NaN until it is full."""
    window = torch.cat([window[1:], window.new_tensor([value])])
    return window, math.nan if window.isnan().any() else float(window.median())


@dataclass(eq=False, repr=False)
class ChanceLevel(BaseRule):
    """A loss that stays at log(C), the cross entropy of guessing among C classes, or rises above it.

    C is the number of rows of the last or the first matrix of the model, of the classifier or of the
    embedding, if it is 4 or more. The median of 20 losses has to stay between 0.95 and 1.1 times log(C), and
    not to fall by more than 2 %, for ``patience`` steps, or for C steps if that is more, since each class has
    to be seen before it is learned. If the first median is between 0.95 and 1.5 times log(C), as of a
    classifier that has not learned yet, there is no upper limit.

    Args:
        patience: number of steps.
    """

    name = "chance_level"
    kept = ("window", "streak", "since", "classes", "begun", "first")
    _: KW_ONLY
    patience: int = 100
    window: Tensor = field(default_factory=_window, init=False)
    streak: int = field(default=0, init=False)
    since: int = field(default=0, init=False)
    classes: int = field(default=0, init=False)
    begun: float = field(default=0.0, init=False)
    first: float = field(default=0.0, init=False)

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Compare the loss with that of guessing."""
        if record.loss is None or not math.isfinite(record.loss):
            return []
        self.window, usual = _median(self.window, record.loss)
        rows = [shape[0] for shape in record.catalog.parameters.shapes if len(shape) == 2]
        several = [count for count in (rows[-1:] + rows[:1]) if count >= LEAST_CLASSES]
        self.first = self.first or (0.0 if math.isnan(usual) else usual)
        classes = next((c for c in several if NO_BETTER <= usual / math.log(c) <= self._most(c)), 0)
        if classes != self.classes or usual < STAYS * self.begun:
            self.classes, self.streak = classes, 0
        if not classes:
            return []
        self.streak += 1
        if self.streak == 1:
            self.since, self.begun = record.step, usual
        patience = max(self.patience, classes)
        if self.streak < patience:
            return []
        guess = math.log(classes)
        text = f"the loss stays near {usual:.3g} since step {self.since}"
        if usual > NO_WORSE * guess:
            text = f"the loss has risen to {usual:.3g} since step {self.since}"
        text += (
            f": the loss of a model that guesses among {classes:,} classes is log({classes}) = {guess:.3g}, "
        )
        text += "so it does not learn"
        # what stops the learning begins before this shows
        shown = self.since + patience - 1
        return [self.finding(record, shown, None, usual, guess, text, NOT_LEARNING, None, None)]

    def _most(self, classes: int) -> float:
        """Return the limit of the loss, as a factor of that of guessing."""
        is_untrained = NO_BETTER <= self.first / math.log(classes) <= UNTRAINED
        return math.inf if is_untrained else NO_WORSE


@dataclass(eq=False, repr=False)
class StaysHigh(BaseRule):
    """A loss or a total gradient norm that stays far above its lowest value, whatever its scale.

    A spike is compared with the recent past, which a slow rise takes along; this rule compares medians of 20
    steps with the lowest one of the run. The loss also has to be above a tenth of its first median, since
    the loss of a training set that is learned by heart falls by orders and is noisy there; the norm has to
    be above ten times its first median, since converged gradients are nearly 0.

    Args:
        factor: limit of the ratio to the lowest median.
        patience: number of steps in a row.
    """

    name = "stays_high"
    kept = ("losses", "norms", "levels", "streaks")
    factor: float = 1000.0
    _: KW_ONLY
    patience: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        self.losses, self.norms = _window(), _window()
        # of the loss and the norm: the first and the lowest median
        self.levels = torch.full((2, 2), math.nan, dtype=torch.float64, device="cpu")
        # of each: the number of steps, and the first of them
        self.streaks = torch.zeros(2, 2, dtype=torch.float64, device="cpu")

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Compare the loss and the norm with their lowest values."""
        found: list[Finding] = []
        if record.loss is not None and math.isfinite(record.loss):
            self.losses, usual = _median(self.losses, record.loss)
            found += self._compare(record, 0, "the loss", usual, 0.1, None)
        norm = record.total() if record.recorded else math.nan
        if math.isfinite(norm):
            self.norms, usual = _median(self.norms, norm)
            found += self._compare(record, 1, "the total gradient norm", usual, 10.0, "grads")
        # the norm follows from the loss
        return found[:1]

    def _compare(
        self, record: StepRecord, place: int, what: str, usual: float, of_first: float, kind: str | None
    ) -> list[Finding]:
        if math.isnan(usual) or usual <= 0.0:
            return []
        first, lowest = self.levels[place].tolist()
        if math.isnan(first):
            first = lowest = usual
        lowest = min(lowest, usual)
        self.levels[place, 0], self.levels[place, 1] = first, lowest
        if usual < self.factor * lowest or usual < of_first * first:
            self.streaks[place, 0] = 0
            return []
        self.streaks[place, 0] += 1
        if self.streaks[place, 0] == 1:
            self.streaks[place, 1] = record.step
        count, since = self.streaks[place].tolist()
        if count < self.patience:
            return []
        text = f"{what} stays near {usual:.3g} since step {since:.0f}, {times(usual / lowest)} its lowest "
        text += f"level, {lowest:.3g}"
        limit = self.factor * lowest
        return [self.finding(record, int(since), None, usual, limit, text, DIVERGED, None, kind)]


@dataclass(eq=False, repr=False)
class FadingGradients(BaseRule):
    """A total gradient norm that falls by orders, though the loss does not fall.

    Medians of 20 steps are compared with the highest one of the norm, and the loss at that time. Near the
    minimum of a loss gradients fade, too, but the loss has fallen by then.

    Args:
        factor: limit of the ratio of the highest median to that of now.
        patience: number of recorded steps in a row.
    """

    name = "fading_gradients"
    kept = ("losses", "norms", "highest", "loss_then", "streak", "since")
    factor: float = 1000.0
    _: KW_ONLY
    patience: int = 20
    losses: Tensor = field(default_factory=_window, init=False)
    norms: Tensor = field(default_factory=_window, init=False)
    highest: float = field(default=0.0, init=False)
    loss_then: float = field(default=0.0, init=False)
    streak: int = field(default=0, init=False)
    since: int = field(default=0, init=False)

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Compare the norm and the loss with those of the largest gradients."""
        norm = record.total() if record.recorded else math.nan
        if record.loss is None or not math.isfinite(record.loss) or not math.isfinite(norm):
            return []
        self.losses, loss = _median(self.losses, record.loss)
        self.norms, usual = _median(self.norms, norm)
        if math.isnan(usual):
            return []
        if usual >= self.highest:
            self.highest, self.loss_then = usual, loss
        fallen = loss < self.loss_then - (1.0 - STAYS) * abs(self.loss_then)
        if fallen or usual * self.factor > self.highest or usual == 0.0:
            self.streak = 0
            return []
        self.streak += 1
        if self.streak == 1:
            self.since = record.step
        if self.streak < self.patience:
            return []
        text = f"the gradients have faded: their total norm stays near {usual:.3g} since step {self.since}, "
        text += f"after {self.highest:.3g} before, but the loss has not fallen meanwhile ({loss:.4g}, after "
        text += f"{self.loss_then:.4g})"
        limit = self.highest / self.factor
        return [self.finding(record, self.since, None, usual, limit, text, FADED)]
