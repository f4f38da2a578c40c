"""The state of merging on a rank: its phase, its waiting steps, and the steps that ranks merge next."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.recorder import StepRecord

# seconds that a rank which ends with a fault waits for others to merge its last steps
_GRACE = 2.0
# steps of a window, at most
MAX_STEPS: Final = 64


class RankStatus(NamedTuple):
    """The numbers that a rank exchanges in addition to its steps, or their maximum over all ranks.

    A rank is encoded as ``size - rank``, so that the maximum is the first such rank; 0 stands for none.
    """

    fewest: float  # minus the number of waiting steps
    most: float  # the number of waiting steps
    behind: float = 0  # a rank without waiting steps
    leaves: float = 0  # a rank that no longer takes part
    fault: float = 0  # a rank that ends with a fault that the others do not know
    is_closing: float = 0
    is_flooded: float = 0  # more steps wait than the limit
    has_new_scalars: float = 0  # a scalar has no index in the window yet


class Phase(Enum):
    """The phases of merging on one rank, in order."""

    MERGING = auto()  # it merges its steps with those of the others
    CLOSING = auto()  # it leaves once its steps are merged, or at a deadline
    ENDED = auto()  # later steps have no tensors


@dataclass
class MergeState:
    """The phase of merging on this rank.

    Attributes:
        deadline: when it leaves at the latest; infinite until it is closing.
        fault: the fault with which this rank ends; None without one.
        is_fault_shared: whether the other ranks know the fault.
        reason: why merging has ended; empty until then.
    """

    phase: Phase = Phase.MERGING
    deadline: float = math.inf
    fault: str | None = None
    is_fault_shared: bool = False
    reason: str = ""

    def close(self, fault: str | None, patience: float) -> None:
        """Leave within ``patience`` seconds, or within 2 s with a fault, which is to be shared."""
        self.fault, self.is_fault_shared = fault, False
        self.deadline = time.monotonic() + (patience if fault is None else _GRACE)
        if self.phase is Phase.MERGING:
            self.phase = Phase.CLOSING

    def end(self, reason: str) -> None:
        """End the merging."""
        self.phase, self.reason = Phase.ENDED, reason

    @property
    def fault_to_share(self) -> str | None:
        """The fault that other ranks do not know yet."""
        return None if self.is_fault_shared else self.fault


class StepQueue:
    """A queue of steps, in order and without gaps; its users hold a lock.

    Args:
        limit: the number of steps whose tensors may wait.

    Attributes:
        num_added: the number of steps added.
        num_done: the number of these that have left the queue.
        lost: the number of recorded steps that lost their tensors.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._steps: deque[StepRecord] = deque()
        self._stripped = 0  # steps at the head of the queue that have lost their tensors
        self._merged_ahead = 0  # steps that other ranks merged before this one added them
        self.num_added = self.num_done = self.lost = 0

    def __len__(self) -> int:
        """Return the number of waiting steps."""
        return len(self._steps)

    def add(self, steps: Sequence[StepRecord]) -> bool:
        """Add steps, except for those that were merged before; return whether any were added."""
        ahead, self._merged_ahead = self._merged_ahead, max(0, self._merged_ahead - len(steps))
        steps = steps[ahead:]
        self.num_added += len(steps)
        self._steps.extend(steps)
        return bool(steps)

    def strip(self) -> int:
        """Drop the tensors of the oldest steps beyond the limit; return how many were lost."""
        before = self.lost
        while len(self._steps) - self._stripped > self._limit:
            self.lost += self._steps[self._stripped].recorded
            self._steps[self._stripped] = replace(self._steps[self._stripped], tables={})
            self._stripped += 1
        return self.lost - before

    def first(self, count: int) -> list[StepRecord]:
        """Return the oldest steps."""
        return list(itertools.islice(self._steps, count))

    def remove(self, count: int) -> None:
        """Remove the oldest steps, which were merged; those that are missing are left out when added."""
        present = min(count, len(self._steps))
        for _ in range(present):
            self._steps.popleft()
        self._stripped = max(0, self._stripped - present)
        self._merged_ahead = count - present
        self.num_done += present

    def remove_all(self) -> list[StepRecord]:
        """Remove and return all steps, whose tensors are lost."""
        steps = list(self._steps)
        self._steps.clear()
        self._stripped = 0
        self.lost += sum([step.recorded for step in steps])
        self.num_done = self.num_added
        return steps


class WindowSchedule:
    """Chooses the steps of each window.

    If no rank waited long for the last window, the next one has a step before it is known whether all ranks
    have it: fast loops then need one all-reduce a window. In slow loops ranks first exchange only their
    status.

    Args:
        most: the maximum number of recorded steps in a window.

    Attributes:
        is_full_at: the number of waiting steps from which a window need not wait for more.
        recorded: for each step of the next window, whether it was recorded, so that its tensors are included.
            Without steps, ranks only exchange their status.
    """

    def __init__(self, most: int) -> None:
        self._most, self.is_full_at = most, min(MAX_STEPS, most)
        self.recorded: tuple[bool, ...] = (True,)
        # rounds since the last window; whether the first of them came too early for a rank
        self._tries = 0
        self._is_slow = False

    @property
    def size(self) -> int:
        """The number of steps of the next window."""
        return len(self.recorded)

    def observe(self, fewest: int) -> bool:
        """Return whether a window is complete, given the number of steps that waited on every rank."""
        if self._tries == 0:
            self._is_slow = fewest < max(1, self.size)
        is_complete = 0 < self.size <= fewest
        self._tries = 0 if is_complete else self._tries + 1
        return is_complete

    def choose(self, fewest: int, recorded: Sequence[bool], *, is_closing: bool) -> None:
        """Choose the steps of the next window, of ``fewest`` steps that wait on every rank.

        ``recorded``: whether any rank recorded these. ``is_closing``: whether any rank is closing.
        """
        if fewest:
            ahead = recorded[: min(fewest, MAX_STEPS)]
            fits = [count <= self._most for count in itertools.accumulate(ahead)]
            self.recorded = tuple(itertools.compress(ahead, fits))
        else:
            self.recorded = () if self._is_slow or is_closing else (True,)

    def choose_last(self, most: int) -> int:
        """Choose the last steps of the rank that has ``most`` steps; return how many fit into a window."""
        size = min(most, self.is_full_at)
        self.recorded = (True,) * size
        return size
