"""Ratios that should stay in a band: of updates to weights, and of two groups' gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from gradiometer.columns import TENSORS
from gradiometer.columns.roots import sqrt
from gradiometer.inputs import Named, named_parameters
from gradiometer.rules.base import CHANGES, Observation, TensorRule, mask
from gradiometer.rules.finding import Finding, Severity
from gradiometer.rules.history import History
from gradiometer.rules.known import by_optimizers, if_summed
from gradiometer.stats import TensorStats, group_ratio, grouping

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from gradiometer.inputs import Parameters
    from gradiometer.recorder import Rows, StepRecord
    from gradiometer.stats import GroupRule


# recorded steps before a ratio counts: until then, weights that started at 0 consist of updates only
SETTLE: Final = 20
# number of ratios before the first finding, and number of ratios in the average
LEAST: Final = 10
# an average ratio above the range is a warning if it is above this, or so many times the lowest before
FAST: Final = 1.0
RISING: Final = 5.0
# a ratio of all updates to all weights above this is a warning after a few steps, also at the start
WHOLE: Final = 0.5
FEW: Final = 2
WINDOW: Final = 50

TOO_FAST: Final = "lower the learning rate, at least for this layer, or lengthen its warm-up"
ADJUST: Final = "give the two groups separate learning rates, or weight their losses differently"
TOO_SLOW: Final = (
    "if the learning rate is not meant to be this low here, raise it; in bf16 without float32 master "
    "weights, such small updates may be lost in rounding"
)


@dataclass(eq=False, repr=False)
class UpdateRatio(TensorRule):
    """A ratio of an update's norm to its weight's norm outside a range, on average over some steps.

    A ratio around 1e-3 is a rule of thumb (CS231n, "Ratio of weights:updates"; Karpathy's "Building
    makemore", part 3); the default range extends two powers of ten to either side. A ratio above it has
    ``severity`` if it is above 1, or has risen to 5 times the lowest average before, and otherwise info; one
    below it has info, since a schedule that ends at 0 leads there. Updates that together have more than half
    the norm of all weights in 2 recorded steps are reported at once. Otherwise, only tensors of at least
    two dimensions count.

    With updates, the ratio is exact: the norms are those of the update and of the weight before it. If
    weights but no updates are recorded, the rule uses the change of a weight's norm since the last
    recorded step, divided by the number of steps. It is a lower bound of the largest update in between, so
    only a ratio above the range is reported. Without both there are no findings.

    Args:
        low, high: the range.
        severity: the severity of an update above the range.
    """

    name = "update_ratio"
    kinds: ClassVar[tuple[str, ...]] = CHANGES
    kept = (*TensorRule.kept, "seen", "ratios", "lowest", "before", "before_step", "streak", "since")
    low: float = 1e-5
    high: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(type(self).__name__, self.low, self.high)

    def restart(self, size: int) -> None:
        """Start a new history of ``size`` tensors."""
        super().restart(size)
        self.ratios = History(LEAST, WINDOW)
        self.ratios.restart(size)
        self.seen, self.before = torch.zeros(2, size, dtype=torch.float64, device="cpu").unbind()
        self.lowest = torch.full_like(self.seen, math.inf)
        self.before_step: int | None = None
        self.streak = self.since = 0

    def prepare(self, rows: Rows) -> None:
        """Find the tensors of at least two dimensions."""
        self.wide = mask([len(shape) >= 2 for shape in rows.shapes])

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Add this step's ratios to the averages, and compare these with the range."""
        exact = "updates" in record.catalog.kinds
        # squares of the norms of finite elements; NonFinite reports the others
        if exact:
            square, change = record.value("sumsq_b", "updates"), record.value("sumsq", "updates")
        else:
            square = record.value("sumsq", "weights")
            change = self._change(sqrt(square), record.step)
        change = by_optimizers(record, change)
        x = torch.where(self.wide, (change / square).log_().mul_(0.5), math.nan)
        self.seen = self.seen + x.isfinite()
        self.ratios.score(torch.where(self.seen > SETTLE, x, math.nan))
        mean = self.ratios.mean
        judged = self.ratios.count >= LEAST
        self.lowest = torch.where(judged, torch.minimum(self.lowest, mean), self.lowest)
        above = judged & (mean > math.log(self.high))
        below = judged & (mean < (math.log(self.low) if exact and self.low > 0 else -math.inf))
        # a frozen weight changes by 0, and a ratio that is not finite was not averaged
        found = (above | below) & x.isfinite()
        whole = self._whole(record, change) if exact else []
        if not found.any():
            return whole
        bound = "" if exact else "at least "
        # in a small or new model, updates of a fifth of the weights can be healthy
        too_fast = TOO_FAST + if_summed(record)
        fast = (mean > math.log(FAST)) | (mean > self.lowest + math.log(RISING))

        def describe(place: int) -> Observation:
            value = float(mean[place].exp())
            if above[place]:
                message = (
                    f"update is {bound}{value:.2g} of the weight's norm, above the range {self._range()}"
                )
                severity = self.severity if fast[place] else min(self.severity, Severity.INFO)
                return Observation(value, self.high, message, too_fast, severity)
            message = f"update is {value:.2g} of the weight's norm, below {self._range()}"
            return Observation(value, self.low, message, TOO_SLOW, min(self.severity, Severity.INFO))

        badness = torch.where(above, mean - math.log(self.high), -1 / (1 + mean.abs()))
        return whole + self.findings(record, "updates" if exact else "weights", found, badness, describe)

    def _whole(self, record: StepRecord, change: Tensor) -> list[Finding]:
        """Return a finding if all updates together are about as large as all weights, for a few steps."""
        if record.has("weights"):
            # also those that are frozen: an adapter that starts at 0 is small against them
            square = record.total("sumsq", "weights")
        elif record.measured("updates").all():
            square = record.total("sumsq_b", "updates")
        else:
            return []
        ratio = math.sqrt(float(change.sum()) / max(square, 1e-300))
        self.streak = self.streak + 1 if ratio > WHOLE else 0
        if self.streak == 1:
            self.since = record.step
        if self.streak < FEW:
            return []
        text = f"all updates together have {ratio:.2g} times the norm of all weights: "
        text += "the learning rate is too large, or the weights are too small for it"
        return [
            self.finding(
                record, self.since, None, ratio, WHOLE, text, TOO_FAST + if_summed(record), kind="updates"
            )
        ]

    def _change(self, norm: Tensor, step: int) -> Tensor:
        before, since = self.before, self.before_step
        self.before, self.before_step = norm.clone(), step
        if since is None or step <= since:
            return torch.full_like(norm, math.nan)
        # the earlier norm of a weight that was not measured then is 0
        return torch.where(before > 0, ((norm - before) / (step - since)).square(), math.nan)

    def _range(self) -> str:
        return f"the range {self.low:g} to {self.high:g}"


class GroupRatio(TensorRule):
    """A ratio of two groups' gradients, `gradiometer.group_ratio`, outside of bounds.

    Args:
        groups: name -> pattern, predicate, names or modules, as for `TensorStats.group`.
        numerator, denominator: names of two of the groups.
        low, high: the bounds. A step is left out if a group has no gradient, or one that is not finite.
        patience: number of recorded steps in a row outside of the bounds.
        model: the model that the modules in ``groups`` belong to, if there are any.
        severity: the severity of a finding.

    Raises:
        ValueError: for an unknown group, or bounds out of order; at the first record, for a group without
            tensors.

    >>> rule = GroupRatio({"head": r"^head", "encoder": r"^encoder"}, "head", "encoder", low=0.1, high=10.0)
    """

    name = "group_ratio"
    kept = (*TensorRule.kept, "streak", "since")

    def __init__(
        self,
        groups: Mapping[str, GroupRule],
        numerator: str,
        denominator: str,
        low: float = 0.0,
        high: float = math.inf,
        *,
        patience: int = 1,
        model: Parameters | None = None,
        severity: Severity = Severity.WARNING,
    ) -> None:
        super().__init__(severity=severity)
        _check_range(type(self).__name__, low, high)
        for name in (numerator, denominator):
            if name not in groups:
                msg = f"GroupRatio: there is no group {name!r}; choose from {', '.join(map(repr, groups))}"
                raise ValueError(msg)
        self.groups = {name: groups[name] for name in (numerator, denominator)}
        self.low, self.high, self.patience = low, high, patience
        self._model = None if model is None else Named(*named_parameters(model, "GroupRatio"))
        self._members: dict[str, list[int]] = {}

    def restart(self, size: int) -> None:
        """Start a new history."""
        super().restart(size)
        self.streak = self.since = 0

    def prepare(self, rows: Rows) -> None:
        """Find the groups' tensors."""
        for name, rule in self.groups.items():
            self._members[name] = grouping.members(rows.names, name, rule, self._model)
            if not self._members[name]:
                msg = f"GroupRatio: no tensor belongs to the group {name!r}; change its rule, {rule!r}"
                raise ValueError(msg)

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Compare this step's ratio with the bounds."""
        columns = torch.stack([TENSORS.merge_rows(record.columns()[rows]) for rows in self._members.values()])
        stats = TensorStats(
            tuple(self._members), columns, torch.zeros(2, dtype=torch.int32, device="cpu"), record.thresholds
        )
        above, below = self._members
        ratio = float(group_ratio(stats, above, below))
        # the ratio to a norm that is Inf would be 0
        if not (stats.numel > 0).all() or stats.found_inf or not math.isfinite(ratio):
            return []
        if self.low <= ratio <= self.high:
            self.streak = 0
            return []
        self.streak += 1
        if self.streak == 1:
            self.since = record.step
        if self.streak < self.patience:
            return []
        side, limit = ("above", self.high) if ratio > self.high else ("below", self.low)
        message = f"rms gradient of {above!r} is {ratio:.3g} times that of {below!r}, {side} {limit:g}"
        # a group is not a tensor, but two such rules need separate findings
        tensor = record.names()[self._members[above][0]]
        return [self.finding(record, self.since, tensor, ratio, limit, message, ADJUST)]


def _check_range(rule: str, low: float, high: float) -> None:
    if not 0 <= low < high:
        raise ValueError(f"{rule}(low={low!r}, high={high!r}): the bounds must satisfy 0 <= low < high")
