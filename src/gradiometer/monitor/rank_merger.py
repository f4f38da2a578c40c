"""The steps of all ranks become those of the job, on a thread of its own, beside training."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from gradiometer import distributed
from gradiometer.distributed import RankError
from gradiometer.monitor.failures import describe
from gradiometer.monitor.merge_window import MergeWindow, Told

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from gradiometer.columns import Thresholds
    from gradiometer.distributed import Ranks
    from gradiometer.monitor.failures import Failures
    from gradiometer.recorder import Roster, StepRecord

__all__ = ["RankMerger"]

# steps of a window, at most
_STEPS: Final = 64
# seconds between two windows, while little waits
_INTERVAL = 0.2
# seconds after which a rank without a step says that it is there
_BEAT = 1.0
# seconds that a rank which ends with a fault waits for others to have its last steps
_GRACE = 2.0
_WITHOUT: Final = "; steps have no tensors from here on"


class RankMerger:
    """Brings steps of this rank together with those of the others, and hands the job's to the first rank.

    A window of steps takes one sum and one maximum over the ranks. How many steps the next window has follows
    from what all have heard: as many as wait on every rank; where one has none, one step, for which all
    others wait here, in the background. A rank that has none for a second says no more than that it is
    there, in a maximum of some numbers, so that only one that is gone leaves the others without an answer.

    Where a rank ends or is gone, what the others still have comes once more as far as they have it; from then
    on steps have their scalars and no tensors.

    All ranks make it, start it, and `finish` it.

    Args:
        ranks: what they have agreed on.
        local: what this rank records.
        thresholds: where flags begin.
        limit: steps that may wait; of more the oldest lose their tensors.
        failures: counts what goes wrong.
        group: a group of its own, on the CPU.

    Attributes:
        lost: steps of this rank that were not merged.
        roster: of the job's steps.
        news: why another rank ended, or does not answer.
    """

    def __init__(
        self, ranks: Ranks, local: Roster, thresholds: Thresholds, limit: int, failures: Failures, group: Any
    ) -> None:
        self.lost = 0
        self.news: str | None = None
        self._ranks, self._limit, self._failures, self._group = ranks, limit, failures, group
        self._window = MergeWindow(ranks, local, thresholds)
        self.roster = self._window.roster
        # where the first rank's steps go
        self._deliver: Callable[[list[StepRecord]], None] = _to_nobody
        self._tell: Callable[[str], None] = _to_nobody
        self._poll: Callable[[], None] = _to_nobody
        self._queue: deque[StepRecord] = deque()
        self._stripped = 0  # of the queue, from its head on
        self._missed = 0  # steps of which the last window was without this rank's
        self._given = self._done = 0
        self._hurried = 0  # who waits here for steps to be merged
        self._leaves_at = math.inf
        self._fault: str | None = None
        self._has_fault = False
        # why steps will be merged no longer; and why they are not
        self._why = "another rank has closed its Monitor"
        self._over: str | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        # of the next window, for each step whether its tensors travel; at first one step
        self._carried: tuple[bool, ...] = (True,)
        # whether ranks wait long for a step; whether they meet for the first time since the last window
        self._is_slow, self._is_first_try = False, True
        self._next = self._stalls_at = 0.0

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that has the job's steps."""
        return self._ranks.rank == 0

    @property
    def num_ranks(self) -> int:
        """How many ranks take part."""
        return self._ranks.size

    def start(
        self,
        deliver: Callable[[list[StepRecord]], None],
        tell: Callable[[str], None],
        poll: Callable[[], None],
    ) -> None:
        """Begin to answer the other ranks.

        Args:
            deliver: is called with the job's steps, on the first rank, in order.
            tell: and with `news`, unless this rank ends with a fault itself.
            poll: is called where another rank ends, which this one may wait for in a step: hands over the
                steps that have arrived.
        """
        self._poll = poll
        if self.is_first:
            self._deliver, self._tell = deliver, tell
        self._thread = threading.Thread(target=self._run, name="gradiometer ranks", daemon=True)
        self._thread.start()

    def put(self, records: Sequence[StepRecord]) -> None:
        """Hand over this rank's steps, in order, none left out. Never waits for other ranks."""
        with self._changed:
            # what came without this rank, at the end, does not come twice
            missed, self._missed = self._missed, max(0, self._missed - len(records))
            records = records[missed:]
            self._given += len(records)
            self._queue.extend(records)
            if self._over is not None:
                if records:
                    self._failures.add("ranks", self._over)
                self._deliver_alone()
                return
            before = self.lost
            while len(self._queue) - self._stripped > self._limit:
                self.lost += self._queue[self._stripped].recorded
                self._queue[self._stripped] = replace(self._queue[self._stripped], values=None)
                self._stripped += 1
            self._changed.notify_all()
        if self.lost > before:
            text = f"other ranks can't keep up, of more than {self._limit} steps the oldest have no tensors"
            self._failures.add("queue for other ranks", text, self.lost - before)

    def wait(self, timeout: float) -> bool:
        """Wait until all steps so far have been merged; tell whether they have."""
        with self._changed:
            goal = self._given
            self._hurried += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: self._done >= goal, timeout)
            finally:
                self._hurried -= 1

    def finish(self, fault: str | None, patience: float) -> None:
        """Take part until all that this rank has is merged, but no longer than so many seconds.

        With a fault, which the first rank is told, only a moment. Does not wait.
        """
        with self._changed:
            self._fault, self._has_fault = fault, fault is not None
            self._leaves_at = time.monotonic() + (patience if fault is None else _GRACE)
            self._changed.notify_all()

    def join(self, timeout: float) -> bool:
        """Wait until that has ended; tell whether it has."""
        return self._thread is None or self._ended.wait(timeout)

    # on its thread from here on

    def _run(self) -> None:
        try:
            while self._round():
                pass
        except BaseException as error:  # noqa: BLE001 training goes on, whatever the ranks do
            self._fail(error)
        finally:
            with self._changed:
                self._over = self._over or self._why + _WITHOUT
                self._deliver_alone()
            if self.news is not None and not self._has_fault:
                self._tell(self.news)
            group, self._group = self._group, None
            with suppress(Exception):
                distributed.close(group)
            # nobody holds it any more: ranks that wait for this one hear that it is gone
            del group
            self._ended.set()

    def _fail(self, error: BaseException) -> None:
        text = str(error) if isinstance(error, RankError) else describe(error)
        if distributed.is_active():
            self.news = text
        else:
            # a script that ends so has no fault
            text = "the process group was destroyed before the Monitor was closed: close it first"
        self._over = text = text + _WITHOUT
        self._failures.add("ranks", text)

    def _deliver_alone(self) -> None:
        if self._queue:
            steps = list(self._queue)
            self._queue.clear()
            self._stripped = 0
            self.lost += sum([step.recorded for step in steps])
            self._deliver([self._window.alone(step) for step in steps])
        self._done = self._given
        self._changed.notify_all()

    def _round(self) -> bool:
        """Meet the other ranks once; tell whether there is a next time."""
        self._await_turn()
        now = time.monotonic()
        with self._changed:
            queue = list(itertools.islice(self._queue, 2 * _STEPS))
            waiting, fault, closes = len(self._queue), self._fault, self._leaves_at < math.inf
        names = self._window.unplaced(queue)
        me = self._ranks.size - self._ranks.rank
        told = Told(
            fewest=-waiting,
            most=waiting,
            behind=0 if waiting else me,
            leaves=me if now >= self._leaves_at or (closes and not waiting) else 0,
            fault=0 if fault is None else me,
            is_closing=closes,
            is_flooded=waiting > self._limit,
            is_unplaced=bool(names),
        )
        size = len(self._carried)
        sums, tops, heard, recorded = self._meet(queue, told)
        if heard.fault:
            self._hear(fault)
        if heard.is_closing and not told.is_closing:
            self._poll()
        if heard.is_unplaced:
            found = distributed.share(names, self._group)
            self._window.place(itertools.chain(*found))
            return True
        fewest, most = -int(heard.fewest), int(heard.most)
        if self._is_first_try:
            self._is_slow = fewest < max(1, size)
        self._is_first_try = 0 < size <= fewest
        if self._is_first_try:
            self._merge(sums, tops, queue[:size])
            fewest, most = fewest - size, most - size
            recorded = recorded[size:]
            self._next, self._stalls_at = now + _INTERVAL, 0.0
        elif heard.behind and waiting:
            self._watch(heard, queue[0], now)
        if heard.is_flooded and heard.behind:
            self._why = (
                f"rank {self._rank(heard.behind)} is {most} steps behind: call advance() on every rank"
            )
            self._failures.add("ranks", self._why + _WITHOUT)
        elif not heard.leaves:
            self._choose(fewest, recorded, closes=bool(heard.is_closing))
            return True
        self._part()
        return False

    def _await_turn(self) -> None:
        """Wait for the steps of the window, but not so long that others doubt whether this rank is there."""
        beat = time.monotonic() + _BEAT
        needed = max(1, len(self._carried))
        with self._changed:
            while self._leaves_at == math.inf and (now := time.monotonic()) < beat:
                waiting = len(self._queue)
                until = beat
                if waiting >= needed:
                    if now >= self._next or self._hurried or waiting >= min(_STEPS, self._window.most):
                        return
                    until = min(beat, self._next)
                self._changed.wait(until - now)

    def _meet(self, queue: Sequence[StepRecord], told: Told) -> tuple[Tensor, Tensor, Told, list[bool]]:
        """Return a window's sums and maxima, what is heard, and which of the steps that wait are recorded."""
        carried = self._carried
        sums, tops = self._window.pack(queue[: len(carried)], carried)
        ahead = [float(step.recorded) for step in queue]
        ahead += [0.0] * (2 * _STEPS - len(ahead))
        extra = torch.tensor([*told, *ahead], dtype=torch.float64)
        tops = torch.cat([tops, extra])
        if carried:
            parts = [(sums, "sum"), (tops, "max")]
            sums, tops = distributed.all_reduce_pair(parts, self._group, self._ranks.timeout)
        else:
            tops = distributed.all_reduce(tops, "max", self._group, self._ranks.timeout)
        tops, extra = tops.split([len(tops) - len(extra), len(extra)])
        numbers = extra.tolist()
        heard = Told(*numbers[: len(told)])
        return sums, tops, heard, [number > 0 for number in numbers[len(told) :]]

    def _merge(self, sums: Tensor, tops: Tensor, mine: Sequence[StepRecord]) -> None:
        """Deliver a window for which all ranks had their steps."""
        if self._window.differ(tops, len(self._carried)):
            raise self._difference(mine)
        merged = self._window.unpack(sums, tops, self._carried, mine) if self.is_first else []
        with self._changed:
            for _ in mine:
                self._queue.popleft()
            self._stripped = max(0, self._stripped - len(mine))
            if merged:
                self._deliver(merged)
            self._done += len(mine)
            self._changed.notify_all()

    def _choose(self, fewest: int, recorded: Sequence[bool], *, closes: bool) -> None:
        """Choose the next window; from what all have heard, so that all choose the same."""
        if fewest:
            ahead = recorded[: min(fewest, _STEPS)]
            fits = [count <= self._window.most for count in itertools.accumulate(ahead)]
            self._carried = tuple(itertools.compress(ahead, fits))
        else:
            self._carried = () if self._is_slow or closes else (True,)

    def _part(self) -> None:
        """Bring together what is left, as far as each rank has it, for the last time."""
        with self._changed:
            queue = list(self._queue)
        # steps may have come since ranks told of theirs
        self._carried = ()
        told = Told(*[0.0] * len(Told._fields))._replace(most=len(queue))
        most = int(self._meet([], told)[2].most)
        if not most:
            return
        size = min(most, _STEPS, self._window.most)
        self._carried = (True,) * size
        steps = queue[most - size : most]
        sums, tops, _, _ = self._meet(steps, told)
        if self._window.differ(tops, size):
            return
        merged = self._window.unpack(sums, tops, self._carried, steps)
        with self._changed:
            before = [self._window.alone(step) for step in queue[: most - size]]
            self.lost += sum([step.recorded for step in queue[: most - size]])
            for _ in queue[:most]:
                self._queue.popleft()
            # those that have come since are behind it
            self._missed = max(0, most - len(queue))
            for _ in range(min(self._missed, len(self._queue))):
                self._queue.popleft()
                self._missed -= 1
            self._deliver(before + merged)

    def _hear(self, fault: str | None) -> None:
        """Hear why ranks end; all ranks come here."""
        told = distributed.share(fault, self._group)
        for rank, text in zip(self._ranks.global_ranks, told, strict=True):
            if text is not None and self.news is None and rank != self._ranks.global_ranks[self._ranks.rank]:
                self.news = f"rank {rank}: {text}"
        if fault is not None:
            self._fault = None

    def _watch(self, heard: Told, step: StepRecord, now: float) -> None:
        """Say so, if a rank makes the others wait for long."""
        self._stalls_at = self._stalls_at or now + self._ranks.timeout
        if now >= self._stalls_at:
            self._stalls_at = math.inf
            text = (
                f"rank {self._rank(heard.behind)} has not ended step {step.step} {self._ranks.timeout:g} s "
            )
            self._failures.add("slow rank", text + "after others: until it has, steps are not delivered")

    def _difference(self, mine: Sequence[StepRecord]) -> RankError:
        """Find out who is where. All ranks come here, as all see the same numbers."""
        told = distributed.share([step.step for step in mine], self._group)
        rank = next((rank for rank, steps in enumerate(told) if steps != told[0]), 0)
        pairs = zip(told[rank], told[0], strict=True)
        there, here = next(((a, b) for a, b in pairs if a != b), (told[rank][0], told[0][0]))
        first, other = self._ranks.global_ranks[0], self._ranks.global_ranks[rank]
        return RankError(
            f"rank {other} is in step {there} where rank {first} is in step {here}: every rank has to call "
            "advance() once per step, and to set the same monitor.step"
        )

    def _rank(self, code: float) -> int:
        return self._ranks.global_ranks[self._ranks.size - int(code)]


def _to_nobody(*_: Any) -> None:
    pass
