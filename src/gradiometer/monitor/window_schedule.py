"""Choose which steps ranks merge next; all ranks choose the same, from reduced numbers."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

# steps of a window, at most
MAX_STEPS: Final = 64


class WindowSchedule:
    """Chooses the steps of each window.

    If no rank waited long for the last window, the next one has a step before it is known whether all ranks
    have it: fast loops then need one all-reduce a window. In slow loops ranks first exchange only their
    status.

    Args:
        most: the maximum number of recorded steps in a window.

    Attributes:
        recorded: for each step of the next window, whether it was recorded, so that its tensors are included.
            Without steps, ranks only exchange their status.

    >>> schedule = WindowSchedule(most=2)
    >>> schedule.observe(fewest=0)
    False
    >>> schedule.choose(3, [True, False, True], is_closing=False)
    >>> schedule.recorded, schedule.observe(fewest=3)
    ((True, False, True), True)
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.recorded: tuple[bool, ...] = (True,)
        # rounds since the last window; whether the first of them came too early for a rank
        self._tries = 0
        self._is_slow = False

    @property
    def size(self) -> int:
        """The number of steps of the next window."""
        return len(self.recorded)

    @property
    def is_full_at(self) -> int:
        """The number of waiting steps from which a window need not wait for more."""
        return min(MAX_STEPS, self._most)

    def observe(self, fewest: int) -> bool:
        """Return whether a window is complete, given the number of steps that waited on every rank."""
        if self._tries == 0:
            self._is_slow = fewest < max(1, self.size)
        is_complete = 0 < self.size <= fewest
        self._tries = 0 if is_complete else self._tries + 1
        return is_complete

    def choose(self, fewest: int, recorded: Sequence[bool], *, is_closing: bool) -> None:
        """Choose the steps of the next window.

        Args:
            fewest: the number of steps that wait on every rank.
            recorded: whether these steps were recorded on any rank.
            is_closing: whether any rank is closing.
        """
        if fewest:
            ahead = recorded[: min(fewest, MAX_STEPS)]
            fits = [count <= self._most for count in itertools.accumulate(ahead)]
            self.recorded = tuple(itertools.compress(ahead, fits))
        else:
            self.recorded = () if self._is_slow or is_closing else (True,)

    def choose_last(self, most: int) -> int:
        """Choose the last steps of the rank that has ``most`` steps; return how many fit into a window."""
        size = min(most, MAX_STEPS, self._most)
        self.recorded = (True,) * size
        return size
