"""The states of the optimizer: lost, out of step with the gradients, or outweighed by eps.

The mean of a second moment v over a tensor is the running average of the mean square of its gradients: the
average is linear, so ``mean(v_t) = beta2 mean(v_{t-1}) + (1 - beta2) mean(g_t**2)`` exactly. So it never
falls by more than ``beta2**n`` in n updates, and it reaches ``(1 - beta2**n)`` of the smallest mean square
since. The rules compare what was measured with these bounds, which hold for any gradients.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from gradiometer.rules.base import Observation, TensorRule, WholeRule
from gradiometer.rules.finding import Severity, times
from gradiometer.rules.history import History
from gradiometer.rules.known import optimizers_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from gradiometer.recorder import OptimizerState, StepRecord
    from gradiometer.rules.finding import Finding

# states that are running averages of squares -> the option with their decay
SECOND: Final = {"exp_avg_sq": "beta2", "square_avg": "alpha"}
# of the bound: rounding of a state in half precision stays above it
_BELOW: Final = 0.5
# of the bound, if the updates between two steps are not counted: 6,900 of them with beta2 = 0.999
_FAR_BELOW: Final = 1e-3
# updates after which a counter that starts again is measured: two steps are due after a start
FRESH: Final = 2
# steps from which on a run that starts is one that was resumed
_RESUMED: Final = 20
# A momentum that begins is the gradient, with weight decay nearly: relative difference of the norms, of a few
# tensors and of more than two; before, it has to be this far from it, as with a momentum of 0.6 or more
_EQUAL, _NEARLY, _APART = 1e-6, 0.02, 0.2
# Updates after a resume differ if those of most tensors change by this many deviations, by this factor: a
# fresh Adam moves each element by lr, 2 to 10 times the usual
_DEVIATIONS, _CHANGE, _MOST = 4.0, math.log(1.5), 0.5

# the distance from 1 of a share that is all up to rounding; with beta2 < 0.95 that may happen to any state
_ALL, _LEAST_RATIO = 1e-3, 20.0

RESTORE: Final = (
    "save optimizer.state_dict() with the model, and load it when the run is resumed; if the new state is "
    "meant, warm up the learning rate after it"
)
REFRESH: Final = (
    "lower beta2 or warm up the learning rate, so that the second moment follows the gradients; if the state "
    "was loaded, check that its gradients had the same scale (a loss scale, or a loss that was summed)"
)


def second_moment(record: StepRecord) -> str | None:
    """Return the kind of a step that is a running average of squares; None if none was measured."""
    return next((kind for kind in SECOND if record.has(kind)), None)


def options_of(known: OptimizerState, name: str) -> Tensor:
    """Return a hyperparameter of each parameter, ``(N,)``; NaN where there is none."""
    groups = [options.get(name, math.nan) for options in known.options]
    found = [groups[group] if 0 <= group < len(groups) else math.nan for group in known.groups]
    return torch.tensor(found, dtype=torch.float64, device="cpu")


def counters_of(known: OptimizerState) -> Tensor:
    """Return how often each parameter was updated, ``(N,)``; NaN where that is not known."""
    counts = known.updates or (math.nan,) * len(known.groups)
    return torch.tensor(counts, dtype=torch.float64, device="cpu")


@dataclass(eq=False, repr=False)
class StateReset(WholeRule):
    """An optimizer whose state was lost, above all when a run was resumed without it.

    It knows this from counters that restart, from a second moment that falls below its bound, see this
    module, and from a momentum that is equal to the gradient. In the first step after a resume with
    `gradiometer.Monitor.load_state_dict`, it also compares the norms of updates with those of the step
    before, if they are recorded: a finding needs most tensors to change by a factor of 1.5 and by 4
    deviations of their changes before, while their gradients and learning rates do not.

    Only tensors whose state was measured before count, so parameters that are unfrozen or added have none.
    States that are reset again and again are info: some methods do that on purpose.

    Args:
        severity: of a state that was lost for the first time.
    """

    name = "state_reset"
    kept = (
        *WholeRule.kept,
        "counters",
        "moments",
        "ratios",
        "momenta",
        "before_step",
        "times",
        "updates",
        "grads",
        "norms",
        "last_step",
    )

    def __post_init__(self) -> None:
        self.is_first = True
        super().__post_init__()

    def restart(self, size: int) -> None:
        """Start a new history of ``size`` tensors."""
        super().restart(size)
        nothing = torch.full((4, size), math.nan, dtype=torch.float64, device="cpu")
        self.counters, self.moments, self.ratios, self.momenta = nothing.unbind()
        self.before_step: int | None = None
        self.times = 0
        self.updates, self.grads = History(floor=1e-3), History(floor=1e-3)
        self.updates.restart(size)
        self.grads.restart(size)
        self.norms = torch.full((2, size), math.nan, dtype=torch.float64, device="cpu")
        self.last_step = -1

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a history; the next step is the first after a resume."""
        super().load_state_dict(state)
        self.is_first = True

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Compare the states with those that were measured last."""
        known = optimizers_of(record)
        if known is None or record.skipped:
            # it did not begin with an update
            self.before_step = record.step if self.before_step is None else self.before_step
            return []
        is_first, self.is_first = self.is_first, False
        found = self._states(record, known) if known.updates else ""
        if self.before_step is None and record.step >= _RESUMED:
            found = self._began(record, known)
        changed = self._changed(record, known) if record.has("updates") else ""
        found = found or changed * is_first
        if known.updates:
            self.before_step = record.step
        if not found:
            return []
        self.times += 1
        severity = self.severity if self.times == 1 or is_first else min(self.severity, Severity.INFO)
        text = f"the optimizer's state was {found} (found at step {record.step})"
        return [self.finding(record, record.step, None, 0.0, 1.0, text, RESTORE, severity, None)]

    def _states(self, record: StepRecord, known: OptimizerState) -> str:
        counters, before = counters_of(known), self.counters
        self.counters = torch.where(counters.isnan(), before, counters)
        steps = float(record.step - (self.before_step or 0))
        restarted = (counters < before) & (counters <= max(steps, FRESH))
        fallen, share = self._fallen(record, known, counters - before, steps)
        equals = self._equals(record)
        size = int((~before.isnan()).sum())
        if restarted.any():
            count = int(counters[restarted].max())
            text = f"lost: it counts {count} update{'s' * (count != 1)} of {of(restarted, size)} now, after "
            return text + f"{before[restarted].max():.0f} before"
        if fallen.any():
            text = f"replaced: the second moment of {of(fallen, int(share.isfinite().sum()))} fell to "
            return text + f"{float(share[fallen].median()):.2g} times what its decay allows"
        if equals:
            which = "the tensor" if equals == 1 else f"{equals} tensors"
            return f"lost: the momentum of {which} is the gradient of this step, as in a first step"
        return ""

    def _fallen(
        self, record: StepRecord, known: OptimizerState, counted: Tensor, steps: float
    ) -> tuple[Tensor, Tensor]:
        """Return where the second moment is below its bound, and its share of the bound, ``(N,)`` each."""
        kind = second_moment(record)
        if kind is None:
            return torch.zeros_like(counted, dtype=torch.bool), torch.full_like(counted, math.nan)
        is_known = record.measured(kind) & (record.value("n_nonfinite", kind) == 0)
        now = torch.where(is_known, record.value("sum", kind), math.nan)
        before, self.moments = self.moments, torch.where(is_known, now, self.moments)
        count = torch.where(counted >= 0, counted, steps)
        kept = options_of(known, SECOND[kind]).pow(count)
        # of an average whose decay rises from 0, the first updates have a share in proportion to their number
        earlier = torch.where(counted >= 0, self.counters - counted, math.inf)
        share = now / (
            before * torch.minimum(kept, (earlier / self.counters).nan_to_num(nan=1.0, posinf=1.0))
        )
        limit = torch.where(counted >= 0, _BELOW, _FAR_BELOW)
        return (share < limit) & (counted.isnan() | (counted >= 0)), share

    def _equals(self, record: StepRecord) -> int:
        """Return how many tensors have a momentum that has become equal to the gradient, if most have."""
        if not record.has("momentum_buffer"):
            return 0
        now = record.value("norm", "momentum_buffer")
        ratio = now / (record.value("norm") * record.scalars.get("clip_factor", 1.0))
        before, momenta = self.ratios, self.momenta
        self.ratios, self.momenta = ratio, now
        # a gradient that is much larger than those before makes up nearly all of the momentum
        judged = ratio.isfinite() & before.isfinite() & (now <= 1.5 * momenta)
        if not judged.any() or float((before[judged] - 1.0).abs().median()) < _APART:
            return 0
        equal = (ratio[judged] - 1.0).abs() < (_NEARLY if int(judged.sum()) > 2 else _EQUAL)
        return int(equal.sum()) if equal.double().mean() > _MOST else 0

    def _began(self, record: StepRecord, known: OptimizerState) -> str:
        """Return a text if a run that begins at a later step has a fresh optimizer."""
        counters = counters_of(known)
        if not (counters > 0).any() or (counters > FRESH).any():
            return ""
        return f"not restored: the run goes on at step {record.step}, but no parameter was updated before"

    def _changed(self, record: StepRecord, known: OptimizerState) -> str:
        """Return a text if the updates of most tensors change as they never do, and the gradients do not.

        From one step to the next, on a logarithmic scale; each is compared with its own changes before.
        """
        rates = [math.nan if rate is None else rate for rate in known.rates]
        rate = [rates[group] if group >= 0 else math.nan for group in known.groups]
        scale = torch.tensor(rate, dtype=torch.float64, device="cpu")
        now = torch.stack([record.value("norm", "updates") / scale, record.value("norm")]).log()
        changes = now - (self.norms if record.step == self.last_step + 1 else math.nan)
        self.norms, self.last_step = now, record.step
        of_updates, of_grads = self.updates.score(changes[0]), self.grads.score(changes[1])
        judged = (of_updates.z != 0) & (of_grads.z != 0)
        if not judged.any():
            return ""
        z, z_grads = of_updates.z[judged].abs(), of_grads.z[judged].abs()
        middle = float(changes[0][judged].median())
        most = float((z > _DEVIATIONS).double().mean())
        if most <= _MOST or abs(middle) < _CHANGE or z_grads.median() > z.median() / 2:
            return ""
        text = f"lost: updates are {_times(math.exp(middle))} those of the step before, by the median of all "
        return text + "tensors and for their learning rates, while the gradients are as usual"


def _times(ratio: float) -> str:
    return times(ratio) if ratio >= 1.0 else f"{ratio:.2g} times"


def of(where: Tensor, size: int) -> str:
    """Return how many of some tensors these are, as text."""
    count = int(where.sum())
    if count == size:
        return "all tensors" if count != 1 else "the tensor"
    return f"{count} of {size} tensors"


@dataclass(eq=False, repr=False)
class StaleSecondMoment(TensorRule):
    """A second moment far below the squares of the gradients for long, so that updates are too large.

    With beta2 = 0.999, this needs gradients that keep growing: a second moment reaches 4 % of their squares
    in 40 steps. A beta2 close to 1, or a state that was loaded from a run with smaller gradients, can keep it
    low for thousands of steps. If it is below its bound, see this module, then the optimizer does not get the
    gradients that are recorded, as if they are clipped after that, and there is no finding.

    A state that is loaded is reported at once if its second moment is 100,000 times the squares of the
    gradients, or if the first gradient makes up 99.9 % of it, in most tensors: it was computed from gradients
    of another scale.

    Args:
        ratio: limit of the mean square of the gradient divided by the second moment.
        steps: number of steps above it.
        scale: limit for a state that was loaded.
    """

    name = "stale_second_moment"
    kept = (*TensorRule.kept, "since", "least")
    _: KW_ONLY
    ratio: float = 100.0
    steps: int = 40
    scale: float = 1e5

    def __post_init__(self) -> None:
        self.is_first = True
        super().__post_init__()

    def restart(self, size: int) -> None:
        """Start a new history of ``size`` tensors."""
        super().restart(size)
        # the step since which it is low, and the smallest square of the gradient since
        self.since = torch.full((size,), math.nan, dtype=torch.float64, device="cpu")
        self.least = torch.full_like(self.since, math.inf)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a history; the next state is one that was loaded."""
        super().load_state_dict(state)
        self.is_first = True

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Compare the second moments with the squares of the gradients."""
        known, kind = optimizers_of(record), second_moment(record)
        square = record.value("rms").square() * record.scalars.get("clip_factor", 1.0) ** 2
        square = torch.where(square > 0, square, math.inf)
        self.least = torch.minimum(self.least, square)
        if known is None or kind is None or not known.updates:
            return []
        beta = options_of(known, SECOND[kind])
        counters = counters_of(known)
        # without a counter, fewer updates are possible: v is then taken for larger
        count = torch.where(counters.isnan(), float(record.step + 1), counters)
        moment = record.value("mean", kind)
        corrected = moment / (1.0 - beta.pow(count)) if kind == "exp_avg_sq" else moment
        is_known = (moment > 0) & square.isfinite() & (record.value("n_nonfinite", kind) == 0) & (count > 0)
        ratio = torch.where(is_known, square / corrected, math.nan)
        is_first, self.is_first = self.is_first, False
        loaded = self._loaded(record, ratio, counters, (1.0 - beta) * square / moment) if is_first else None
        if loaded is not None:
            return [loaded]
        now = ratio > self.ratio
        has_lasted = now & (self.since < record.step)
        self.since = torch.where(has_lasted, self.since, torch.where(now, float(record.step), math.nan))
        self.least = torch.where(has_lasted, self.least, square)
        lasted = record.step - self.since
        # 4: what one large gradient in the last step may add to the ratio of two bounds
        follows = moment >= (1.0 - beta.pow(lasted)) * self.least / 4
        found = now & (lasted >= self.steps) & follows

        def describe(place: int) -> Observation:
            value = float(ratio[place])
            message = f"the gradient's square is {times(value)} the second moment since step "
            message += (
                f"{int(self.since[place])}, so updates are up to {times(math.sqrt(value))} the learning rate"
            )
            return Observation(value, self.ratio, message, REFRESH, self.severity)

        return self.findings(record, kind, found, ratio.nan_to_num(nan=0.0), describe, self.since)

    def _loaded(self, record: StepRecord, ratio: Tensor, counters: Tensor, last: Tensor) -> Finding | None:
        """Return a finding if a state that was loaded has another scale than the gradients.

        ``last``: the share of this step's gradient in the second moment.
        """
        judged = (counters > FRESH) & ratio.isfinite()
        if not judged.any():
            return None
        middle = float(ratio[judged].median())
        if middle < 1 / self.scale:
            text = f"is {times(1 / middle)} the square of the gradients, by the median of all tensors"
        elif float(((last[judged] - 1.0).abs() < _ALL).double().mean()) > _MOST and middle > _LEAST_RATIO:
            text = "was so small that the first gradient makes up all of it in most tensors"
        else:
            return None
        text = f"the second moment that was loaded {text}: it was computed from gradients of another scale"
        return self.finding(record, record.step, None, middle, self.scale, text, REFRESH, kind=None)
