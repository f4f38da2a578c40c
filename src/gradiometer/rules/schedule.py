"""Schedules of the learning rate that go on after their end."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

# rates that are kept: those around a minimum, with as many before as after it
_KEPT: Final = 11
# a minimum is the end of a schedule below this share of the highest rate
_LOW: Final = 0.01
# rates that rise as they fell are equal to within this share, far above rounding
_EQUAL: Final = 0.01
# a rate below this share of the highest, which hardly moves a weight, for so many steps and share of all
_TINY: Final = 1e-3
_STEPS: Final = 50
_SHARE: Final = 0.1


class Ended(NamedTuple):
    """Where a schedule has ended, and what its rate does since then."""

    since: int
    text: str


def follow(state: list[float], step: int, rate: float) -> Ended | None:
    """Add the rate of a step; return where its schedule has ended, once it is known.

    Restarts of a schedule jump, and warm-ups rise otherwise than the rate fell, so neither is an end.

    Args:
        state: of this rate, empty at first; it is changed.
        step: the number of the step.
        rate: the learning rate.

    >>> state, rates = [], [0.05 * (1 + math.cos(math.pi * step / 50)) for step in range(60)]
    >>> [found.since for step, rate in enumerate(rates) if (found := follow(state, step, rate))]
    [50]
    """
    highest, count, same, *last = state or [rate, 0.0, 0.0]
    highest, count = max(highest, rate), count + 1.0
    same = same + 1.0 if last and rate == last[-1] else 1.0
    last = [*last, rate][-_KEPT:]
    state[:] = highest, count, same, *last
    middle = _KEPT // 2
    if same >= max(_STEPS, _SHARE * count) and 0.0 < rate < _TINY * highest:
        return Ended(step - int(same) + 1, f"has stayed at {rate:.3g}, after {highest:.3g} at most")
    if len(last) == _KEPT and last[middle] < _LOW * highest and min(last) == last[middle] < last[-1]:
        pairs = list(zip(last[middle::-1], last[middle:], strict=True))
        if all(math.isclose(*pair, rel_tol=_EQUAL) for pair in pairs) and pairs == sorted(pairs):
            return Ended(step - middle, f"rises again as it fell, after {last[middle]:.3g}")
    return None
