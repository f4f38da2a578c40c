"""Moments of another parameter: an optimizer's state that was loaded in another order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import torch

from gradiometer.rules.base import WholeRule
from gradiometer.rules.finding import times
from gradiometer.rules.history import History
from gradiometer.rules.known import optimizers_of
from gradiometer.rules.not_updated import SHORT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from gradiometer.recorder import Rows, StepRecord
    from gradiometer.rules.finding import Finding

# recorded steps before a resume from which the usual values are known, and over which they fade
WARMUP, WINDOW = 20, 50
# recorded steps after a resume that are left out, and as many that are averaged: with beta1 = 0.9, less than
# a fifth of the other parameter's first moment is left after the first of these
LEFT_OUT, AVERAGED = 16, 16
# The updates of one tensor have to fall by this factor. A healthy resume with another number of ranks or
# batch changes the ratio of an update to a gradient that is all noise by its root, and alike in all tensors.
FALLEN: Final = 3.0
# Those of another have to rise by this factor. Where gradients are s times those of the other, and T steps
# came before, the rise is sqrt((T + n) / (T / s**2 + n)) after n more: about 2 for T = 80 and n = 24.
RISEN: Final = 2.0
# The fall is that of the gradients' usual logarithms: this part of it at least, this at most, and at least
# this part of 2.5: after 24 steps a first moment that is too large has fallen to 0.9**24.
LEAST, MOST, DECAYED = 0.5, 1.3, 2.5
# standard deviations of a single step's value that it must differ by; they contain the drift of a young run
DEVIATIONS: Final = 2.0
# The first update of Adam and RMSprop is a multiple of the sign of the gradient, so the ratio of the mean
# square of its elements to the largest square is 1, or less by the elements without a gradient; 1/9 is usual.
SIGN: Final = 0.8
# the name of the kind of Adam's second moments, and how far their sum may leave its bounds
SECOND: Final = "exp_avg_sq"
SLACK: Final = 1.5

ADVICE: Final = (
    "pass the parameters to the optimizer in the order in which they were saved, such as that of "
    "model.named_parameters(), not from a set; torch.optim loads states by position, without their names; go "
    "back to the checkpoint, or start with a new state"
)


class _Pair(NamedTuple):
    """A tensor, the one whose moments it seems to have, and the change of its updates."""

    tensor: int
    other: int
    change: float


@dataclass(eq=False, repr=False)
class MisplacedMoments(WholeRule):
    """Updates that after a resume fit the second moments of another parameter.

    ``optimizer.load_state_dict()`` assigns states by position. If the parameters come in another order,
    tensors of one shape get the moments of each other, without an error. For Adam and others that divide by
    a second moment, the update of one tensor then falls by the ratio of the two gradients, and that of the
    other rises, while the gradients are as before. The rule needs a Monitor with ``updates=True`` whose
    history was restored, by ``Monitor.load_state_dict``. It compares the norm of each update, divided by the
    learning rate and by the norm of the gradient, with its usual value before the resume, once, 32 recorded
    steps after it. A finding needs a tensor whose updates fell to a third or less, by about the ratio of its
    gradients to those of another tensor of its shape, and a tensor of the same shape whose updates doubled.

    If second moments are recorded, as ``exp_avg_sq``, they are compared instead, in the first step that has
    them: from one step to the next, they can fall by no more than ``beta2``, nor rise by more than
    ``(1 - beta2)`` times the square of the gradient.

    A momentum of SGD that is misplaced is not reported: it is gone after some steps.
    """

    name = "misplaced_moments"
    kinds: ClassVar[tuple[str, ...]] = ("grads",)
    kept = (
        *(*WholeRule.kept, "speeds", "levels", "resumed", "count", "after"),
        *("moments", "moments_step", "squares", "summed"),
    )

    def restart(self, size: int) -> None:
        """Start a new history of ``size`` tensors."""
        super().restart(size)
        self.speeds, self.levels = History(WARMUP, WINDOW, 0.1), History(WARMUP, WINDOW, 0.1)
        self.speeds.restart(size)
        self.levels.restart(size)
        # the first step after a resume, until it is judged; the recorded steps since then, and their sums
        self.resumed, self.count = -1, 0
        self.after = torch.zeros(size, dtype=torch.float64, device="cpu")
        # sums of second moments when they were recorded last, and of the squares of gradients since then
        self.moments, self.squares = torch.zeros(2, size, dtype=torch.float64, device="cpu").unbind()
        # the last such step, and the number of recorded steps since then
        self.moments_step, self.summed = -1, 0
        self._is_restored = False

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a history; the next step is the first one of a resumed run."""
        super().load_state_dict(state)
        self._is_restored = True

    def prepare(self, rows: Rows) -> None:
        """Find the tensors of each shape; leave out those in which small updates are lost."""
        self._shapes: dict[tuple[int, ...], list[int]] = {}
        for place, (shape, dtype) in enumerate(zip(rows.shapes, rows.dtypes, strict=True)):
            if math.prod(shape) > 1 and not dtype.startswith(SHORT):
                self._shapes.setdefault(tuple(shape), []).append(place)

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Compare the updates after a resume with those before."""
        if self._is_restored:
            self._is_restored = False
            if self.speeds.count.any() or self.moments_step >= 0:
                self.resumed, self.count = record.step, 0
                self.after = torch.zeros_like(self.after)
        squares = record.value("sumsq")
        level = squares.log() / 2
        self.squares, self.summed = self.squares + squares, self.summed + 1
        found = self._by_moments(record) if SECOND in record.tables else None
        if found is None and record.has("updates") and not record.skipped:
            speed = record.value("sumsq", "updates").log() / 2 - _rates(record).log() - level
            speed = torch.where(record.measured("updates"), speed, torch.nan)
            if self.resumed < 0:
                self.speeds.score(speed)
                self.levels.score(level)
            elif self.count == 0 and _is_new_state(record):
                self._forget()
            else:
                found = self._by_updates(speed)
        if not found:
            return []
        since, self.resumed = self.resumed, -1
        return [self._finding(record, since, found)]

    def _by_updates(self, speed: Tensor) -> list[_Pair]:
        self.count += 1
        if self.count > LEFT_OUT:
            self.after = self.after + speed
        if self.count < LEFT_OUT + AVERAGED:
            return []
        change = self.after / AVERAGED - self.speeds.mean
        enough = change.isfinite() & (self.speeds.count >= WARMUP)
        enough &= change.abs() > DEVIATIONS * self.speeds.deviation
        found = self._pairs(change, self.levels.mean, enough)
        if not found:
            self._forget()
        return found

    def _forget(self) -> None:
        """Wait for the next resume, with a new history."""
        self.resumed = -1
        self.speeds.restart(len(self.after))
        self.levels.restart(len(self.after))

    def _pairs(self, change: Tensor, level: Tensor, enough: Tensor) -> list[_Pair]:
        """Return the tensors whose updates changed as if they had the second moments of another one."""
        changes, levels = change.tolist(), level.tolist()
        found = []
        for alike in self._shapes.values():
            usable = [place for place in alike if enough[place]]
            fallen = [place for place in usable if changes[place] < -math.log(FALLEN)]
            risen = [place for place in usable if changes[place] > math.log(RISEN)]
            if not (fallen and risen):
                continue
            for place in fallen:
                # by how much the gradients of each other one are usually larger
                larger = {other: levels[other] - levels[place] for other in alike}
                fits = [
                    # one that has changed, too, if there is one
                    (not enough[other], abs(changes[place] + more), other)
                    for other, more in larger.items()
                    if LEAST * min(more, DECAYED) <= -changes[place] <= MOST * more
                ]
                if fits:
                    found.append(_Pair(place, min(fits)[2], changes[place]))
            lowest = min(alike, key=lambda x: levels[x])
            found += [_Pair(place, lowest, changes[place]) for place in risen if place != lowest]
        return found if {x.change > 0 for x in found} == {True, False} else []

    def _by_moments(self, record: StepRecord) -> list[_Pair] | None:
        """Return the tensors whose second moments are those of another one; None if that is not known."""
        table, known = record.tables[SECOND], optimizers_of(record)
        if table.rows.names != record.names() or known is None or not known.options:
            return None
        moments, before = table.value("sum"), self.moments
        last = self.moments_step
        # as if steps that were not recorded had the same gradients
        squares = self.squares * max((record.step - last) / self.summed, 1.0)
        self.moments, self.moments_step = moments, record.step
        self.squares, self.summed = torch.zeros_like(squares), 0
        if self.resumed < 0 or last < 0 or record.step <= last:
            return [] if self.resumed < 0 else None
        beta = [known.options[x].get("beta2", math.nan) if x >= 0 else math.nan for x in known.groups]
        beta2 = torch.tensor(beta, dtype=torch.float64, device="cpu")
        lowest = before * beta2 ** (record.step - last)
        highest = before + (1.0 - beta2) * squares
        is_off = (moments < lowest / SLACK) | (moments > highest * SLACK)
        found = []
        for alike in self._shapes.values():
            for place in alike:
                theirs = [x for x in alike if x != place and before[x] > 0]
                fits = [
                    x
                    for x in theirs
                    if lowest[x] / SLACK <= moments[place] <= (highest[x] + highest[place]) * SLACK
                ]
                if is_off[place] and before[place] > 0 and fits:
                    other = min(fits, key=lambda x: abs(float((moments[place] / before[x]).log())))
                    change = float((before[place] / moments[place]).log()) / 2
                    found.append(_Pair(place, other, change))
        if {x.change > 0 for x in found} != {True, False}:
            found = []
        self.resumed = self.resumed if found else -1
        return found

    def _finding(self, record: StepRecord, since: int, found: list[_Pair]) -> Finding:
        names = record.names()
        worst = max(found, key=lambda x: abs(x.change))
        fallen, risen = min(found, key=lambda x: x.change), max(found, key=lambda x: x.change)
        text = f"since the run was resumed at step {since}, the updates of {len(found)} tensors do not fit "
        text += "their gradients, as if the optimizer's state had been assigned in another order: "
        text += f"{names[fallen.tensor]} moves {times(math.exp(-fallen.change))} less than before, as with "
        text += f"the second moments of {names[fallen.other]}, and {names[risen.tensor]} "
        text += f"{times(math.exp(risen.change))} more"
        value = math.exp(abs(worst.change))
        return self.finding(record, since, names[worst.tensor], value, FALLEN, text, ADVICE, kind="updates")


def _is_new_state(record: StepRecord) -> bool:
    """Return whether the elements of an update have one magnitude, as in the first step of a new state."""
    squares, size = record.value("sumsq", "updates"), record.value("numel", "updates")
    alike = squares / (size * record.value("abs_max", "updates").square())
    return bool(alike[size > 1].nanmedian() > SIGN)


def _rates(record: StepRecord) -> Tensor:
    """Return the learning rate of each tensor, ``(N,)``; 1 if it is not known."""
    known, size = optimizers_of(record), len(record.names())
    rate = record.scalars.get("lr", 1.0)
    if known is None or None in known.rates:
        return torch.full((size,), rate, dtype=torch.float64, device="cpu")
    rates = [known.rates[group] if group >= 0 else math.nan for group in known.groups]
    return torch.tensor(rates, dtype=torch.float64, device="cpu")
