"""Merge the steps of all ranks into the steps of the job, on a background thread."""

from __future__ import annotations

import itertools
import math
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from gradiometer import distributed
from gradiometer.distributed import RankError
from gradiometer.monitor.failures import describe
from gradiometer.monitor.merge_state import (
    MAX_STEPS,
    MergeState,
    Phase,
    RankStatus,
    StepQueue,
    WindowSchedule,
)
from gradiometer.monitor.merge_window import differing_copies, step_difference

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from gradiometer.distributed import Ranks
    from gradiometer.monitor.failures import Failures
    from gradiometer.monitor.merge_window import MergeWindow
    from gradiometer.recorder import StepRecord

# seconds between two windows, while few steps wait
_INTERVAL = 0.2
# seconds after which a rank without a step signals that it is alive
_BEAT = 1.0
# waiting steps of which ranks exchange whether they were recorded
_AHEAD: Final = 2 * MAX_STEPS
_CLOSED: Final = "another rank has closed its Monitor"
_WITHOUT: Final = "; later steps have no tensors"


class RankMerger:
    """Merges the steps of this rank with those of the others, and delivers the job's steps on the first rank.

    A window of steps takes one SUM and one MAX all-reduce. All ranks compute the size of the next window
    from the same numbers: the steps that wait on every rank, or one step if a rank has none; the others
    then wait for it here, in the background. A rank without a step for a second only signals that it is
    alive, in a MAX of a few numbers, so that only a rank that is gone leaves the others without an answer.

    When a rank ends, the remaining steps are merged once more from the ranks that have them. After that, or
    when a rank is gone, steps have scalars but no tensors.

    All ranks must create it, `start` it and `finish` it.

    Args:
        ranks, window: the agreement of the ranks; packs and unpacks the steps.
        limit: steps that may wait; beyond that the oldest lose their tensors.
        group: a separate process group on the CPU.

    Attributes:
        is_first: whether this is the rank that gets the job's steps.
        catalog: the catalog of the job's steps.
        news: why another rank ended or does not respond.
    """

    def __init__(self, ranks: Ranks, window: MergeWindow, limit: int, failures: Failures, group: Any) -> None:
        self.is_first, self.catalog = ranks.rank == 0, window.catalog
        self.news: str | None = None
        self._ranks, self._limit, self._failures, self._group = ranks, limit, failures, group
        self._window, self._schedule = window, WindowSchedule(window.most)
        # the callbacks of `start`
        self._deliver: Callable[[list[StepRecord]], None] = _to_nobody
        self._report: Callable[[str], None] = _to_nobody
        self._poll: Callable[[], None] = _to_nobody
        # with the lock: the steps, the state, and the number of callers that wait for steps to be merged
        self._changed = threading.Condition()
        self._queue = StepQueue(limit)
        self._state = MergeState()
        self._waiters = 0
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        # when the next window is due, and when a rank that has no step is reported
        self._next = self._stalls_at = 0.0

    @property
    def lost(self) -> int:
        """The number of recorded steps of this rank that were not merged."""
        return self._queue.lost

    def start(
        self,
        deliver: Callable[[list[StepRecord]], None],
        report: Callable[[str], None],
        poll: Callable[[], None],
    ) -> None:
        """Start the thread that answers the other ranks.

        Args:
            deliver: called on the first rank with the job's steps, in order.
            report: called on the first rank with `news`, unless this rank ends with a fault itself.
            poll: called when another rank is closing, while this one may wait for it inside a step; it must
                `put` the steps that have arrived.
        """
        self._poll = poll
        if self.is_first:
            self._deliver, self._report = deliver, report
        self._thread = threading.Thread(target=self._run, name="gradiometer ranks", daemon=True)
        self._thread.start()

    def put(self, records: Sequence[StepRecord]) -> None:
        """Add this rank's steps, in order and without gaps. Never waits for other ranks."""
        with self._changed:
            are_new = self._queue.add(records)
            if self._state.phase is Phase.ENDED:
                if are_new:
                    self._failures.add("ranks", self._state.reason)
                self._deliver_alone()
                return
            lost = self._queue.strip()
            self._changed.notify_all()
        if lost:
            text = f"other ranks cannot keep up: more than {self._limit} steps are waiting, so the "
            self._failures.add("queue for other ranks", text + "tensors of the oldest are dropped", lost)

    def wait(self, timeout: float) -> bool:
        """Wait until all steps so far have been merged; return whether they have."""
        with self._changed:
            goal = self._queue.num_added
            self._waiters += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: self._queue.num_done >= goal, timeout)
            finally:
                self._waiters -= 1

    def finish(self, fault: str | None, patience: float) -> None:
        """Leave once all steps of this rank are merged, or after ``patience`` seconds. Does not wait.

        A fault is reported to the first rank and shortens this time to 2 s.
        """
        with self._changed:
            self._state.close(fault, patience)
            self._changed.notify_all()

    def join(self, timeout: float) -> bool:
        """Wait until the thread has ended; return whether it has."""
        return self._thread is None or self._ended.wait(timeout)

    # the methods below run on its thread

    def _run(self) -> None:
        reason = None
        try:
            while reason is None:
                reason = self._round()
        except BaseException as error:  # noqa: BLE001 training goes on, whatever the ranks do
            reason = self._describe_failure(error)
            self._failures.add("ranks", reason + _WITHOUT)
        finally:
            with self._changed:
                self._state.end((reason or _CLOSED) + _WITHOUT)
                self._deliver_alone()
            if self.news is not None and self._state.fault is None:
                self._report(self.news)
            group, self._group = self._group, None
            with suppress(Exception):
                distributed.close(group)
            # drop the last reference, so that ranks that wait for this one notice that it is gone
            del group
            self._ended.set()

    def _describe_failure(self, error: BaseException) -> str:
        if not distributed.is_active():
            # a script that ends this way has no fault
            return "the process group was destroyed before the Monitor was closed: close the Monitor first"
        self.news = str(error) if isinstance(error, RankError) else describe(error)
        return self.news

    def _deliver_alone(self) -> None:
        steps = self._queue.remove_all()
        if steps:
            self._deliver([self._window.alone(step) for step in steps])
        self._changed.notify_all()

    def _round(self) -> str | None:
        """Run one round with the other ranks; return why it was the last one, or None."""
        self._await_turn()
        now = time.monotonic()
        with self._changed:
            steps, waiting = self._queue.first(_AHEAD), len(self._queue)
            closes, fault = self._state.phase is Phase.CLOSING, self._state.fault_to_share
            leaves = closes and (not waiting or now >= self._state.deadline)
        names = self._window.new_scalars(steps)
        me = self._ranks.size - self._ranks.rank
        status = RankStatus(
            fewest=-waiting,
            most=waiting,
            behind=0 if waiting else me,
            leaves=me if leaves else 0,
            fault=0 if fault is None else me,
            is_closing=closes,
            is_flooded=waiting > self._limit,
            has_new_scalars=bool(names),
        )
        size = self._schedule.size
        sums, tops, ranks, recorded = self._exchange(steps, status)
        if ranks.fault:
            self._share_faults(fault)
        if ranks.is_closing and not closes:
            self._poll()
        if ranks.has_new_scalars:
            found = distributed.share(names, self._group)
            self._window.add_scalars(itertools.chain(*found))
            return None
        fewest, most = -int(ranks.fewest), int(ranks.most)
        if self._schedule.observe(fewest):
            self._merge(sums, tops, steps[:size])
            fewest, most = fewest - size, most - size
            recorded = recorded[size:]
            self._next, self._stalls_at = now + _INTERVAL, 0.0
        elif ranks.behind and waiting:
            self._report_slow_rank(ranks, steps[0], now)
        if ranks.is_flooded and ranks.behind:
            reason = f"rank {self._rank(ranks.behind)} is {most} steps behind: call advance() on every rank"
            self._failures.add("ranks", reason + _WITHOUT)
        elif ranks.leaves:
            reason = _CLOSED
        else:
            self._schedule.choose(fewest, recorded, is_closing=bool(ranks.is_closing))
            return None
        self._merge_last()
        return reason

    def _await_turn(self) -> None:
        """Wait for the steps of the window, but at most `_BEAT` s, so that others see this rank alive."""
        beat = time.monotonic() + _BEAT
        needed = max(1, self._schedule.size)
        with self._changed:
            while self._state.phase is Phase.MERGING and (now := time.monotonic()) < beat:
                waiting = len(self._queue)
                until = beat
                if waiting >= needed:
                    if now >= self._next or self._waiters or waiting >= self._schedule.is_full_at:
                        return
                    until = min(beat, self._next)
                self._changed.wait(until - now)

    def _exchange(
        self, steps: Sequence[StepRecord], status: RankStatus
    ) -> tuple[Tensor, Tensor, RankStatus, list[bool]]:
        """Return a window's sums and maxima, the ranks' status, and which waiting steps are recorded."""
        window = self._schedule.recorded
        sums, tops = self._window.pack(steps[: len(window)], window)
        ahead = [float(step.recorded) for step in steps]
        ahead += [0.0] * (_AHEAD - len(ahead))
        extra = torch.tensor([*status, *ahead], dtype=torch.float64, device="cpu")
        tops = torch.cat([tops, extra])
        if window:
            sums, tops = self._all_reduce(sums, tops)
        else:
            tops = distributed.all_reduce(tops, "max", self._group, self._ranks.timeout)
        tops, extra = tops.split([len(tops) - len(extra), len(extra)])
        numbers = extra.tolist()
        ranks = RankStatus(*numbers[: len(status)])
        return sums, tops, ranks, [number > 0 for number in numbers[len(status) :]]

    def _merge(self, sums: Tensor, tops: Tensor, steps: Sequence[StepRecord]) -> None:
        """Deliver a window to which all ranks contributed their steps."""
        window = self._schedule.recorded
        numbers = self._window.numbers_of(sums, tops, window)
        if numbers is None:
            raise step_difference(self._ranks, self._group, steps)
        diverged = self._window.diverged(sums, tops, window)
        texts = differing_copies(self._ranks, self._group, diverged, steps)
        sparse = self._window.merge_sparse(numbers, steps, self._all_reduce)
        merged = self._window.unpack(sums, tops, window, steps, sparse) if self.is_first else []
        for index, found in texts.items() if merged else ():
            merged[index] = replace(merged[index], diverged=found)
        with self._changed:
            self._queue.remove(len(steps))
            if merged:
                self._deliver(merged)
            self._changed.notify_all()

    def _all_reduce(self, sums: Tensor, tops: Tensor) -> list[Tensor]:
        parts = [(sums, "sum"), (tops, "max")]
        return distributed.all_reduce_pair(parts, self._group, self._ranks.timeout)

    def _merge_last(self) -> None:
        """Merge the remaining steps one last time, from the ranks that have them."""
        with self._changed:
            queue = self._queue.first(len(self._queue))
        # ranks may have got more steps since they last sent their counts
        self._schedule.choose_last(0)
        status = RankStatus(fewest=0, most=len(queue))
        most = int(self._exchange([], status)[2].most)
        if not most:
            return
        size = self._schedule.choose_last(most)
        steps = queue[most - size : most]
        sums, tops, _, _ = self._exchange(steps, status)
        window = self._schedule.recorded
        numbers = self._window.numbers_of(sums, tops, window)
        if numbers is None:
            return
        sparse = self._window.merge_sparse(numbers, steps, self._all_reduce)
        merged = self._window.unpack(sums, tops, window, steps, sparse)
        with self._changed:
            before = queue[: most - size]
            self._queue.lost += sum([step.recorded for step in before])
            self._queue.remove(most)
            self._deliver([*[self._window.alone(step) for step in before], *merged])

    def _share_faults(self, fault: str | None) -> None:
        """Learn why ranks end; all ranks call this."""
        faults = distributed.share(fault, self._group)
        for rank, text in zip(self._ranks.global_ranks, faults, strict=True):
            if text is not None and self.news is None and rank != self._ranks.global_ranks[self._ranks.rank]:
                self.news = f"rank {rank}: {text}"
        if fault is not None:
            self._state.is_fault_shared = True

    def _report_slow_rank(self, ranks: RankStatus, step: StepRecord, now: float) -> None:
        """Report a rank that makes the others wait for long."""
        self._stalls_at = self._stalls_at or now + self._ranks.timeout
        if now >= self._stalls_at:
            self._stalls_at = math.inf
            text = (
                f"rank {self._rank(ranks.behind)} has not ended step {step.step}, which other ranks ended "
                f"{self._ranks.timeout:g} s ago"
            )
            self._failures.add("slow rank", text + ": no further step is delivered until it does")

    def _rank(self, code: float) -> int:
        return self._ranks.global_ranks[self._ranks.size - int(code)]


def _to_nobody(*_: Any) -> None:
    pass
