"""The usual level of a value, and a robust z-score of new values against that history.

For every finite value x, with the count n of values including x, and the rate ``r = max(1/n, 1/window)``:

    s = max(1.2533 d, floor)           the standard deviation, from d as for a normal distribution
    z = (x - m) / s                    the score, against the history before x
    e = clip(x - m, -4 s, 4 s)         the difference, clipped for outliers
    m <- m + r e                       the mean
    d <- d + r (|e| - d)               the mean absolute deviation

The first value initializes the mean; its deviation is 0. During the warm-up z is 0, and e is not clipped. At
first all values have equal weight; then they fade over ``window`` steps. The clip, as in ZClip (Kumar et
al. 2025, arXiv:2504.02507), keeps a spike from hiding the next one, and a new level is still learned within
some tens of steps. A median over a window would have to read the whole window in every step.
"""

from __future__ import annotations

import itertools
import math
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gradiometer.columns.roots import sqrt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradiometer.recorder import Rows, StepRecord


# no scores at the start of a run, where norms fall by a factor of 10 to 100
WARMUP = 20
# as in OLMo-core's SkipStepOptimizer
WINDOW = 128
# for logarithms: a nearly constant norm is assumed to vary by a fifth
FLOOR = 0.2

# tensors without gradients that change in a larger share of the steps are averages
_RARE = 0.1
# of a rise that such a change explains
MEANT = ", right after tensors without gradients were changed, such as a target network"

# sqrt(pi / 2): the standard deviation of a normal distribution, divided by its mean absolute deviation
_NORMAL = 1.2533
_CLIP = 4.0
# values in the median, and in the differences; values before rises count
_NEAR, _FAR, _SETTLED = 16, 33, 5
# from a median absolute difference and from a mean rise to a standard deviation
_STEP, _RISE = 1.4826 / math.sqrt(2.0), math.sqrt(2.0 * math.pi)


class Score(NamedTuple):
    """For each value: z (0 in the warm-up and if it is not finite), the usual value, and its deviation."""

    z: Tensor
    usual: Tensor
    deviation: Tensor


class History:
    """The history of ``(N,)`` values, each with its own count, mean and mean absolute deviation.

    Args:
        warmup: number of values before the first score; 2 or more.
        window: number of values over which the past fades.
        floor: the minimum deviation, in units of the values.

    >>> history = History(warmup=3)
    >>> history.restart(1)
    >>> for x in (1.0, 1.1, 0.9, 3.0):
    ...     score = history.score(torch.tensor([x], dtype=torch.float64))
    >>> [round(float(part), 2) for part in score]
    [10.0, 1.0, 0.2]
    """

    def __init__(self, warmup: int = WARMUP, window: int = WINDOW, floor: float = FLOOR) -> None:
        if warmup < 2 or window < 2 or not floor >= 0:
            msg = f"History(warmup={warmup}, window={window}, floor={floor}): "
            raise ValueError(msg + "warmup and window must be at least 2, and floor must not be negative")
        self.warmup, self.window, self.floor = warmup, window, floor
        self.restart(0)

    def restart(self, size: int) -> None:
        """Forget the history; from now on, expect ``size`` values per step."""
        start = torch.zeros(3, size, dtype=torch.float64, device="cpu")
        self.count, self.mean, self.deviation = start.unbind()

    def score(self, x: Tensor, floor: float | None = None) -> Score:
        """Score the values ``(N,) float64`` against their past, then add them to it."""
        # isfinite() takes twice as many operators
        known = x.abs() < math.inf
        d = torch.where(known, x - self.mean, 0.0)
        s = (self.deviation * _NORMAL).clamp_(min=self.floor if floor is None else floor)
        ready = self.count >= self.warmup
        z = (d / s).mul_(ready)
        score = Score(z, self.mean, s)
        e = torch.where(ready, z.clamp(-_CLIP, _CLIP).mul_(s), d)
        # The first value initializes the mean; its deviation is 0.
        begun = self.count > 0
        self.count = self.count + known
        rate = known / self.count.clamp(1.0, self.window)
        self.mean = torch.addcmul(self.mean, rate, e)
        self.deviation = torch.addcmul(self.deviation, rate, e.abs_().mul_(begun).sub_(self.deviation))
        return score

    def state_dict(self) -> dict[str, Any]:
        """Return count, mean and deviation, ``(N,)`` each."""
        return {"count": self.count, "mean": self.mean, "deviation": self.deviation}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise a ValueError unless the state has count, mean and deviation, of one length."""
        parts = [state.get(name) for name in ("count", "mean", "deviation")]
        fit = [isinstance(x, Tensor) and x.dtype == torch.float64 and x.dim() == 1 for x in parts]
        if not all(fit) or len({len(x) for x in parts if x is not None}) > 1:
            raise ValueError("a history's count, mean and deviation must be float64 vectors of one length")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a history; raise ValueError as `check_state` does."""
        self.check_state(state)
        self.count, self.mean, self.deviation = state["count"], state["mean"], state["deviation"]


class SpikeHistory:
    """The recent past of one value that may fall or drift, and a score for jumps above it.

    The usual value is the median of the last 16. The deviation is the largest of three: the median of the
    last 32 absolute differences, which a steady descent hardly raises; the mean rise above the median, over
    128 values, which occasional high values raise; and the minimum that the caller gives. The first two are
    scaled to the standard deviation of independent, normally distributed values: by ``1.4826 / sqrt(2)`` and
    ``sqrt(2 pi)``. A rise counts as at most four deviations.

    Args:
        warmup: number of values before the first score.

    >>> history = SpikeHistory()
    >>> scores = [history.score(10.0 - 0.2 * i + 0.1 * (i % 2), 0.01) for i in range(40)]
    >>> max(z for z, *_ in scores) < 2, history.score(9.0, 0.01)[0] > 8
    (True, True)
    """

    def __init__(self, warmup: int = WARMUP) -> None:
        if warmup < 2:
            raise ValueError(f"SpikeHistory(warmup={warmup}): warmup must be at least 2")
        self.warmup = warmup
        self.restart()

    def restart(self) -> None:
        """Forget the history."""
        self.count, self.rise = 0, 0.0
        self.recent: list[float] = []

    @property
    def usual(self) -> float:
        """The median of the last 16 values; 0 if there are none."""
        return median(self.recent[-_NEAR:]) if self.recent else 0.0

    def score(self, x: float, floor: float) -> tuple[float, float, float]:
        """Score a finite value against its past, then add it; return z, the usual value, its deviation."""
        recent, usual = self.recent, self.usual
        if not recent:
            self.recent, self.count = [x], 1
            return 0.0, x, floor
        steps = [abs(b - a) for a, b in itertools.pairwise(recent)]
        deviation = max(floor, self.rise * _RISE, median(steps) * _STEP if steps else 0.0)
        z = (x - usual) / deviation if self.count >= self.warmup else 0.0
        if self.count >= _SETTLED:
            rise = min(max(x - usual, 0.0), _CLIP * deviation)
            self.rise += (rise - self.rise) / min(self.count - _SETTLED + 1.0, WINDOW)
        self.count += 1
        self.recent = [*recent[1 - _FAR :], x]
        return z, usual, deviation

    def state_dict(self) -> dict[str, Any]:
        """Return the recent values, the number of all values, and their mean rise."""
        return {"recent": list(self.recent), "count": self.count, "rise": self.rise}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise a ValueError unless the state is one of `state_dict`."""
        recent = state.get("recent")
        if (
            not isinstance(recent, list)
            or len(recent) > _FAR
            or not all([isinstance(x, float) for x in recent])
            or type(state.get("count")) is not int
            or not isinstance(state.get("rise"), float)
        ):
            raise ValueError(f"a history must have at most {_FAR} recent floats, a count and a rise")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a history; raise ValueError as `check_state` does."""
        self.check_state(state)
        self.recent, self.count, self.rise = list(state["recent"]), state["count"], state["rise"]


class CopyHistory:
    """When tensors without gradients have changed, such as a target network that is updated now and then.

    Tensors that change in more than a tenth of the steps are moving averages. It needs the weights.
    """

    def __init__(self) -> None:
        self._squares, self._step = math.nan, 0
        self.compared = self.changes = 0

    def add(self, record: StepRecord) -> None:
        """Compare these tensors with those of the step before."""
        if not (record.has("weights") and record.has("grads")):
            return
        squares = float(record.value("sumsq", "weights")[~record.measured()].sum())
        if self.compared and squares != self._squares:
            self.changes, self._step = self.changes + 1, record.step
        self._squares, self.compared = squares, self.compared + 1

    def changed_within(self, steps: int, step: int) -> bool:
        """Return whether they changed in a step or up to so many steps before, which they rarely do."""
        return 0 < self.changes <= _RARE * self.compared and step - self._step <= steps

    def state_dict(self) -> dict[str, Any]:
        """Return the last sum of squares, when it changed, and the number of steps and changes."""
        return {"at": [self._squares, self._step], "counts": [self.compared, self.changes]}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise a ValueError unless the state is one of `state_dict`."""
        numbers = [*state["at"], *state["counts"]]
        if [type(x) for x in numbers] != [float, int, int, int]:
            raise ValueError("expected a float and a step, and two counts")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a history; raise ValueError as `check_state` does."""
        self.check_state(state)
        (self._squares, self._step), (self.compared, self.changes) = state["at"], state["counts"]


class Norms(NamedTuple):
    """The gradient norms of one step, and their scores against the past.

    ``(N,)`` each: ``norm``, its logarithm ``x``, ``known`` where that is finite, ``flags``, ``score``.
    ``any_flag``: whether a flag is set.
    """

    norm: Tensor
    x: Tensor
    known: Tensor
    flags: Tensor
    any_flag: bool
    score: Score


class NormHistory:
    """The history of the logarithms of all gradient norms.

    Rules that share a history read each step once: the norms of the last record are kept.

    Args:
        warmup, window: as for `History`, in recorded steps.
    """

    def __init__(self, warmup: int = WARMUP, window: int = WINDOW) -> None:
        self.history = History(warmup, window, FLOOR)
        self.names: list[str] = []
        self._last: tuple[StepRecord, Norms] | None = None
        self._rows: Rows | None = None

    @property
    def settled(self) -> Tensor:
        """Which norms have a history longer than the warm-up, ``(N,) bool``."""
        return self.history.count > self.history.warmup

    @property
    def level(self) -> Tensor:
        """The usual logarithm of each norm, including this step, ``(N,)``."""
        return self.history.mean

    def of(self, record: StepRecord) -> Norms:
        """Return the norms of a step with gradients; the first call for a step adds them to the history."""
        if self._last is not None and self._last[0] is record:
            return self._last[1]
        if record.catalog.parameters is not self._rows:
            self._rows = record.catalog.parameters
            if self.names != list(record.names()):
                self.names = list(record.names())
                self.history.restart(len(self.names))
        # nearly every step is finite, so its norms are just square roots
        norm = record.value("norm") if record.total("n_nonfinite") else sqrt(record.value("sumsq"))
        x, flags = norm.log(), record.flags()
        norms = Norms(norm, x, x.abs() < math.inf, flags, bool(flags.any()), self.history.score(x))
        self._last = record, norms
        return norms

    def state_dict(self) -> dict[str, Any]:
        """Return the history and the names of its parameters."""
        return self.history.state_dict() | {"names": self.names}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise a ValueError unless the state has names and a history of their norms."""
        self.history.check_state(state)
        names = state.get("names")
        if not isinstance(names, list) or not is_names(names) or len(state["count"]) != len(names):
            raise ValueError("a norm history's names must be a list of str, one for each norm")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a history; raise ValueError as `check_state` does."""
        self.check_state(state)
        self.names = list(state["names"])
        self._rows = None
        self.history.load_state_dict(state)
        self._last = None


def is_names(names: Any) -> bool:
    """Return whether this is a list of str."""
    return isinstance(names, list) and all([isinstance(name, str) for name in names])
