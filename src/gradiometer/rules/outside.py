"""Weights that change between two steps, where no optimizer changes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from gradiometer.rules.base import Observation, TensorRule
from gradiometer.rules.finding import Severity, modules_text
from gradiometer.rules.known import optimizers_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from gradiometer.recorder import Rows, StepRecord
    from gradiometer.rules.finding import Finding


# Above this relative difference of sums of squares, weights differ: equal ones at other addresses differ less
ROUNDING: Final = 1e-12
# A tensor that changes in a larger share of the steps is changed by the training loop on purpose
RARE: Final = 0.1
# steps whose weights are known again when they come back
REMEMBERED: Final = 4096
# factors are one factor if they differ by less: bfloat16 rounds an element by 0.4 % at most
ALIKE: Final = 5e-3
# averaged weights lag behind norms that grow, and lose noise: so many norms shrink, by less than half
SEVERAL, NEARLY_ALL, SLIGHTLY = 4, 0.8, 0.5

# Of an update u of weights b, the share c is left if the next step begins with b + c u. If at most this is
# left of each update, training is several times slower than the learning rate says.
LEFT: Final = 0.2
# Below this, a norm that is kept the same, as by a projection onto a sphere, may as well be the reason.
LEAST_LEFT: Final = 1e-4
# shares are one share if they differ by less in proportion
SAME_SHARE: Final = 0.1
# steps in a row
PATIENCE: Final = 10

ADVICE: Final = (
    "if this is not meant, look for code between two calls of optimizer.step() that writes weights: a "
    "state_dict that is loaded, averaged weights that are swapped in and not back, clipping or "
    "re-initialization; optimizers keep their state meanwhile"
)
AVERAGES: Final = (
    "keep averaged weights in a copy of the model, such as torch.optim.swa_utils.AveragedModel, and copy "
    "them into the model only to evaluate it; copy the trained weights back before the next step"
)


@dataclass(eq=False, repr=False)
class ChangedOutside(TensorRule):
    """A weight that something other than ``optimizer.step()`` has changed, between two steps.

    It needs a Monitor with ``updates=True`` that `gradiometer.watch` or the callback of a trainer calls, or
    that calls `gradiometer.Monitor.begin_updates`: the weights right before an update are compared with those
    right after the one before. The squared norms of both are recorded, so a change that leaves the norm as it
    was, such as a permutation, is not noticed, and the difference of the norms is a lower bound of the norm
    of the change. Both steps have to be recorded.

    The weights that are changed between two steps are one finding, which says whether all norms have changed
    by one factor, went back to those after an earlier step, or shrink a little, as if averaged weights had
    been swapped in. It has ``severity`` if this happens to a tensor in at most a tenth of its steps.
    Otherwise it has info, since it is a part of the training loop, such as weights that are clipped; unless
    this takes back the same share of the last update in nearly all tensors, at least 80 %, in 10 steps in a
    row, as moving averages do that are written into the model. Weights that no known optimizer holds, such as
    a target network, are left out.
    """

    name = "changed_outside"
    kinds: ClassVar[tuple[str, ...]] = ("updates",)
    kept = (
        *(*TensorRule.kept, "after", "after_step", "times", "compared", "since", "sums", "steps"),
        *("squares", "undone", "undone_since"),
    )

    def restart(self, size: int) -> None:
        """Start a new history of ``size`` tensors."""
        super().restart(size)
        self.after_step: int | None = None
        # the squared norms after the last recorded update; NaN where they are not known
        self.after = torch.full((size,), torch.nan, dtype=torch.float64, device="cpu")
        # of the last recorded update, the squared norms of the weights before it and of itself
        self.squares = torch.full((2, size), torch.nan, dtype=torch.float64, device="cpu")
        # the steps in a row in which most of it was taken back, and the first of them
        self.undone, self.undone_since = 0, 0
        start = torch.zeros(3, size, dtype=torch.float64, device="cpu")
        self.times, self.compared, self.since = start.unbind()
        # of earlier steps, the sum of the squared norms after the update
        self.sums = torch.zeros(0, dtype=torch.float64, device="cpu")
        self.steps = torch.zeros(0, dtype=torch.int64, device="cpu")

    def prepare(self, rows: Rows) -> None:
        """Compare with no step of other tensors."""
        if len(self.after) != len(rows.names):
            self.restart(len(rows.names))

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Return findings about the weights that have changed since the last step."""
        known = record.measured("updates") & (record.value("n_nonfinite", "updates") == 0)
        before = torch.where(known, record.value("sumsq_b", "updates"), torch.nan)
        last, last_step, squares = self.after, self.after_step, self.squares
        self.squares = torch.stack([before, record.value("sumsq_u", "updates")])
        self.after = torch.where(known, record.value("sumsq_a", "updates"), torch.nan)
        self.after_step = record.step
        earlier = self._look_back(record.step, before, self.after)
        if last_step != record.step - 1:
            return []
        found = (before - last).abs() > ROUNDING * torch.maximum(before, last)
        optimizers = optimizers_of(record)
        if optimizers is not None:
            # target networks and averages have no optimizer: only other code changes them
            found &= optimizers.held
        self.compared = self.compared + (before - last).isfinite()
        left = _left(squares[0], squares[1], last, before, found)
        self.undone = 0 if left is None else self.undone + 1
        if not found.any():
            return []
        self.since = torch.where(found & (self.times == 0), float(record.step), self.since)
        self.times = self.times + found
        norms, were = before.sqrt(), last.sqrt()
        change = (norms - were).abs() / were.clamp(min=1e-300)
        rare = found & (self.times <= RARE * self.compared)
        made = [self._summary(record, rare, norms, were, earlier)] if rare.any() else []
        if self.undone == 1:
            self.undone_since = record.step
        if left is not None and self.undone >= PATIENCE:
            made.append(self._undone(record, left))

        def describe(place: int) -> Observation:
            message = "something other than optimizer.step() changes this weight between steps"
            severity = min(self.severity, Severity.INFO)
            return Observation(float(change[place]), 0.0, message, ADVICE, severity)

        return made + self.findings(record, "updates", found & ~rare, change, describe, self.since)

    def _undone(self, record: StepRecord, left: float) -> Finding:
        text = (
            f"something other than optimizer.step() takes back {1.0 - left:.1%} of each update, since step "
        )
        text += f"{self.undone_since}, as if moving averages of the weights were written into the model"
        taken, limit = 1.0 - left, 1.0 - LEFT
        since = self.undone_since
        return self.finding(record, since, None, taken, limit, text, AVERAGES, self.severity, None)

    def _look_back(self, step: int, before: Tensor, after: Tensor) -> int | None:
        """Return after which earlier step, if any, all weights were as they are now; note those of this step.

        The sum of all squared norms tells them apart: of float64, it is the same for another state by chance
        only.
        """
        now = float(before.nansum())
        same = (self.sums[:-1] - now).abs() <= ROUNDING * now
        places = same.nonzero().flatten().tolist()
        earlier = int(self.steps[places[-1]]) if places and now > 0 else None
        self.sums = torch.cat([self.sums, after.nansum().unsqueeze(0)])[-REMEMBERED:]
        self.steps = torch.cat([self.steps, torch.tensor([step], device="cpu")])[-REMEMBERED:]
        return earlier

    def _summary(
        self, record: StepRecord, found: Tensor, norms: Tensor, were: Tensor, earlier: int | None
    ) -> Finding:
        """Return one finding about all weights that were changed between two steps."""
        places, names = found.nonzero().flatten().tolist(), record.names("updates")
        worst = int(torch.where(found, (norms - were).abs() / were.clamp(min=1e-300), -1.0).argmax())
        ratio = norms[found] / were[found].clamp(min=1e-300)
        text = f"{modules_text(names, places)}: something other than optimizer.step() has changed "
        text += "this weight" if len(places) == 1 else "these weights"
        text += f" between steps {record.step - 1} and {record.step}, "
        middle = float(ratio.median())
        if earlier is not None:
            text += f"back to what they were after step {earlier}"
        elif len(places) == 1:
            text += f"its norm from {float(were[worst]):.4g} to {float(norms[worst]):.4g}"
        elif bool((ratio / middle - 1.0).abs().max() < ALIKE):
            text += f"all by the factor {middle:.4g}"
        elif len(places) >= SEVERAL and (ratio < 1.0).double().mean() > NEARLY_ALL and middle > SLIGHTLY:
            text += f"nearly all norms are smaller, by {1.0 - middle:.2%} in the median, as if averaged "
            text += "weights had taken their place"
        else:
            text += f"their norms by {float((ratio - 1.0).abs().median()):.2%} in the median, that of "
            text += f"{names[worst]} from {float(were[worst]):.4g} to {float(norms[worst]):.4g}"
        value = float((norms[worst] - were[worst]).abs() / were[worst].clamp(min=1e-300))
        first = None if len(places) > 1 and len(places) == len(names) else names[worst]
        return self.finding(record, record.step, first, value, 0.0, text, ADVICE, self.severity, "updates")


def _left(begin: Tensor, update: Tensor, end: Tensor, now: Tensor, found: Tensor) -> float | None:
    """Return which share of the last update is left; None unless it is the same, small one nearly everywhere.

    Let b be weights before an update u, and c the share. Then ``|b + c u|**2`` is
    ``|b|**2 + 2 c b·u + c**2 |u|**2``, and ``2 b·u`` is ``|b + u|**2 - |b|**2 - |u|**2``. So each tensor
    gives up to two shares, of which one has to be that of the others.

    Args:
        begin: the squared norms before the update, ``(N,)``.
        update: those of the update.
        end: those after it.
        now: those before the next update.
        found: ``(N,) bool``, the weights that something else has changed.
    """
    used = found & (update > 0) & begin.isfinite() & end.isfinite() & now.isfinite()
    if int(used.sum()) < SEVERAL:
        return None
    begin, update, end, now = (x[used] for x in (begin, update, end, now))
    half = (end - begin - update) / (2.0 * update)
    root = (half.square() + (now - begin) / update).sqrt()
    shares = torch.stack([-half + root, -half - root])
    fits = (shares > LEAST_LEFT) & (shares <= LEFT)
    alone = shares[:, fits.sum(0) == 1]
    usual = float(alone[fits[:, fits.sum(0) == 1]].median()) if alone.numel() else math.nan
    agree = ((shares - usual).abs() < SAME_SHARE * usual).any(0)
    return usual if float(agree.double().mean()) > NEARLY_ALL else None
