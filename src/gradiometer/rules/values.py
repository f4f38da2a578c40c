"""Buffers that are not finite, and parameters that must stay positive and do not."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Final

from gradiometer.rules.base import BaseRule

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradiometer.recorder import StepRecord
    from gradiometer.rules.finding import Finding

RESET: Final = (
    "go back to a checkpoint whose buffers are finite, or reset them (for BatchNorm, reset_running_stats()), "
    "and look for the batch that was not finite: a skipped update does not undo what the forward wrote"
)
POSITIVE: Final = (
    "train its logarithm and use exp(), or use softplus() or clamp(min=...), so that it can't become 0 or "
    "negative"
)
# findings in one step
_MOST: Final = 5


@dataclass(eq=False, repr=False)
class NonFiniteBuffer(BaseRule):
    """A buffer with a NaN or Inf, such as the running statistics of BatchNorm, that was finite before.

    Buffers are read at least every 8 steps without waiting for the device. Those of more than 2**24 elements,
    and those that hold -inf from the start, such as masks, are left out.
    """

    name = "nonfinite_buffer"
    kept = ("named",)

    def __post_init__(self) -> None:
        super().__post_init__()
        # the first ones, which are named again as long as they are not finite
        self.named: list[str] = []

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Return a finding for the first buffers that are not finite."""
        found = () if record.model is None else record.model.values.nonfinite
        findings: list[Finding] = []
        self.named += [name for name, *_ in found if name not in self.named][: _MOST - len(self.named)]
        for name, kind, since in [one for one in found if one[0] in self.named]:
            more = f", and {len(found) - 1} more buffers do" if len(found) > 1 and not findings else ""
            what = "the output in evaluation mode" if "running_" in name else "what is computed from it"
            text = (
                f"{name} holds {kind} since step {since} or a few steps before{more}: {what} will be {kind}"
            )
            value = float(kind)
            begun = min(since, record.step)
            finding = self.finding(record, begun, name, value, 0.0, text, RESET, self.severity, None)
            findings.append(finding)
        return findings


@dataclass(eq=False, repr=False)
class CrossedZero(BaseRule):
    """A parameter that must stay positive, from its name, and is not any more, or soon will not be.

    It looks at small parameters whose last name is a standard deviation, a variance, a temperature or a
    length scale, such as ``std`` or ``temperature``, and whose elements are all positive at the start. They
    are read at least every 8 steps; near 0 in every step.

    Args:
        near: also report an element that has fallen below a tenth of the least at the start, and that would
            be 0 in this number of steps if it went on as between the last two looks.
    """

    name = "crossed_zero"
    kept = ("names", "before", "before_step")
    _: KW_ONLY
    near: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.names: list[str] = []
        self.before: list[str] = []
        self.before_step = -1

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Return a finding for each such parameter."""
        if record.model is None:
            return []
        values, last_step = record.model.values, self.before_step
        if not values.least or values.step == last_step:
            return []
        last = dict(zip(self.names, map(float, self.before), strict=True))
        self.names = [name for name, *_ in values.least]
        self.before = [repr(now) for *_, now in values.least]
        self.before_step = values.step
        found = []
        for name, first, now in values.least:
            if now <= 0:
                text = (
                    f"{name} has crossed 0: its least element was {first:.3g} at the start, and is {now:.3g} "
                )
                text += f"in step {values.step}"
            elif now < first / 10 and name in last and last_step < values.step:
                fall = (last[name] - now) / (values.step - last_step)
                if fall * self.near < now:
                    continue
                text = f"{name} is about to cross 0: its least element was {first:.3g} at the start, and has "
                text += f"fallen to {now:.3g}, by {fall:.2g} in a step"
            else:
                continue
            step = min(values.step, record.step)
            fallen, limit = first - now, 0.9 * first
            found.append(self.finding(record, step, name, fallen, limit, text, POSITIVE, kind="weights"))
        return found
