"""The steps of this rank that wait to be merged with those of other ranks."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.recorder import StepRecord


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
