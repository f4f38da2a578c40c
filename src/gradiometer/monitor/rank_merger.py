"""Merge the steps of all ranks into the steps of the job, on a background thread."""

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
from gradiometer.monitor.merge_exponents import ExponentMerger
from gradiometer.monitor.merge_window import MergeWindow, Told

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from gradiometer.columns import Thresholds
    from gradiometer.distributed import Ranks
    from gradiometer.monitor.failures import Failures
    from gradiometer.recorder import Roster, StepExponents, StepRecord

__all__ = ["RankMerger"]

# steps of a window, at most
_STEPS: Final = 64
# tensors of a step of which ranks exchange fingerprints, at most, if copies differ
_COMPARED: Final = 64
# seconds between two windows, while few steps wait
_INTERVAL = 0.2
# seconds after which a rank without a step signals that it is alive
_BEAT = 1.0
# seconds that a rank which ends with a fault waits for others to merge its last steps
_GRACE = 2.0
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
        ranks: the agreement of the ranks.
        local: the roster of this rank.
        thresholds: the thresholds of the flags.
        limit: steps that may wait; beyond that the oldest lose their tensors.
        failures: counts failures.
        group: a separate process group on the CPU.
        fingerprint: whether the steps have fingerprints.
        precision: steps divisible by this have histograms of exponents, which take one more all-reduce each;
            None: none has.

    Attributes:
        lost: the number of recorded steps of this rank that were not merged.
        roster: the roster of the job's steps.
        news: why another rank ended or does not respond.
    """

    def __init__(
        self,
        ranks: Ranks,
        local: Roster,
        thresholds: Thresholds,
        limit: int,
        failures: Failures,
        group: Any,
        *,
        fingerprint: bool = False,
        precision: int | None = None,
    ) -> None:
        self.lost = 0
        self.news: str | None = None
        self._ranks, self._limit, self._failures, self._group = ranks, limit, failures, group
        self._window = MergeWindow(ranks, local, thresholds, fingerprint=fingerprint)
        self._exponents = None if precision is None else ExponentMerger(ranks, local, precision)
        self.roster = self._window.roster
        # the callbacks of `start`
        self._deliver: Callable[[list[StepRecord]], None] = _to_nobody
        self._tell: Callable[[str], None] = _to_nobody
        self._poll: Callable[[], None] = _to_nobody
        self._queue: deque[StepRecord] = deque()
        self._stripped = 0  # steps at the head of the queue that have lost their tensors
        self._missed = 0  # steps that the last window merged before this rank had them
        self._given = self._done = 0
        self._hurried = 0  # callers that wait for steps to be merged
        self._leaves_at = math.inf
        self._fault: str | None = None
        self._has_fault = False
        # the reason if merging stops; and the reason once it has stopped
        self._why = "another rank has closed its Monitor"
        self._over: str | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        # for each step of the next window, whether its tensors are included; at first one step
        self._carried: tuple[bool, ...] = (True,)
        # whether ranks wait long for a step; whether this is the first round since the last window
        self._is_slow, self._is_first_try = False, True
        self._next = self._stalls_at = 0.0

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that gets the job's steps."""
        return self._ranks.rank == 0

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self._ranks.size

    def start(
        self,
        deliver: Callable[[list[StepRecord]], None],
        tell: Callable[[str], None],
        poll: Callable[[], None],
    ) -> None:
        """Start the thread that answers the other ranks.

        Args:
            deliver: called on the first rank with the job's steps, in order.
            tell: called on the first rank with `news`, unless this rank ends with a fault itself.
            poll: called when another rank is closing, while this one may wait for it inside a step; it must
                `put` the steps that have arrived.
        """
        self._poll = poll
        if self.is_first:
            self._deliver, self._tell = deliver, tell
        self._thread = threading.Thread(target=self._run, name="gradiometer ranks", daemon=True)
        self._thread.start()

    def put(self, records: Sequence[StepRecord]) -> None:
        """Add this rank's steps, in order and without gaps. Never waits for other ranks."""
        with self._changed:
            # steps that the last window merged without this rank are not delivered again
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
            text = f"other ranks cannot keep up: more than {self._limit} steps are waiting, so the "
            text += "tensors of the oldest are dropped"
            self._failures.add("queue for other ranks", text, self.lost - before)

    def wait(self, timeout: float) -> bool:
        """Wait until all steps so far have been merged; return whether they have."""
        with self._changed:
            goal = self._given
            self._hurried += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: self._done >= goal, timeout)
            finally:
                self._hurried -= 1

    def finish(self, fault: str | None, patience: float) -> None:
        """Leave once all steps of this rank are merged, or after ``patience`` seconds. Does not wait.

        A fault is reported to the first rank and shortens this time to 2 s.
        """
        with self._changed:
            self._fault, self._has_fault = fault, fault is not None
            self._leaves_at = time.monotonic() + (patience if fault is None else _GRACE)
            self._changed.notify_all()

    def join(self, timeout: float) -> bool:
        """Wait until the thread has ended; return whether it has."""
        return self._thread is None or self._ended.wait(timeout)

    # the methods below run on its thread

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
            # drop the last reference, so that ranks that wait for this one notice that it is gone
            del group
            self._ended.set()

    def _fail(self, error: BaseException) -> None:
        text = str(error) if isinstance(error, RankError) else describe(error)
        if distributed.is_active():
            self.news = text
        else:
            # a script that ends this way has no fault
            text = "the process group was destroyed before the Monitor was closed: close the Monitor first"
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
        """Run one round with the other ranks; return whether there is another."""
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
        """Wait for the steps of the window, but at most `_BEAT` s, so that others see this rank alive."""
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
        """Return a window's sums and maxima, the maximum of `Told`, and which waiting steps are recorded."""
        carried = self._carried
        sums, tops = self._window.pack(queue[: len(carried)], carried)
        ahead = [float(step.recorded) for step in queue]
        ahead += [0.0] * (2 * _STEPS - len(ahead))
        extra = torch.tensor([*told, *ahead], dtype=torch.float64, device="cpu")
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
        """Deliver a window to which all ranks contributed their steps."""
        if self._window.differ(tops, len(self._carried)):
            raise self._difference(mine)
        diverged = self._compare(self._window.diverged(sums, self._carried), mine)
        exponents = self._add_up([step.step for step in mine], mine)
        merged = self._window.unpack(sums, tops, self._carried, mine) if self.is_first else []
        for place, texts in diverged.items() if merged else ():
            merged[place] = replace(merged[place], diverged=texts)
        for place, found in exponents.items() if merged else ():
            merged[place] = replace(merged[place], exponents=found)
        with self._changed:
            for _ in mine:
                self._queue.popleft()
            self._stripped = max(0, self._stripped - len(mine))
            if merged:
                self._deliver(merged)
            self._done += len(mine)
            self._changed.notify_all()

    def _add_up(self, steps: Sequence[int], mine: Sequence[StepRecord]) -> dict[int, StepExponents]:
        """Return the histograms of all ranks, by the place of their step. All ranks call this."""
        if self._exponents is None:
            return {}
        group, timeout = self._group, self._ranks.timeout
        return self._exponents.merge(steps, mine, lambda x: distributed.all_reduce(x, "sum", group, timeout))

    def _compare(
        self, found: Mapping[int, Sequence[str]], mine: Sequence[StepRecord]
    ) -> dict[int, dict[str, str]]:
        """Find the ranks in the minority; all ranks call this, as all find the same copies different."""
        if not found:
            return {}
        own = {
            str(place): mine[place].bits_of("weights", names[:_COMPARED]) for place, names in found.items()
        }
        told = distributed.share(own, self._group, self._ranks.timeout, "compare copies of weights")
        return {
            place: {
                name: distributed.divergence_text(
                    self._ranks, name, [each[str(place)].get(name) for each in told]
                )
                for name in names[:_COMPARED]
            }
            | dict.fromkeys(names[_COMPARED:], "copies differ between ranks")
            for place, names in found.items()
        }

    def _choose(self, fewest: int, recorded: Sequence[bool], *, closes: bool) -> None:
        """Choose the next window from the reduced numbers, so that all ranks choose the same."""
        if fewest:
            ahead = recorded[: min(fewest, _STEPS)]
            fits = [count <= self._window.most for count in itertools.accumulate(ahead)]
            self._carried = tuple(itertools.compress(ahead, fits))
        else:
            self._carried = () if self._is_slow or closes else (True,)

    def _part(self) -> None:
        """Merge the remaining steps one last time, from the ranks that have them."""
        with self._changed:
            queue = list(self._queue)
        # ranks may have got more steps since they last sent their counts
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
        for place, found in self._add_up(self._window.numbers_of(tops, size), steps).items():
            merged[place] = replace(merged[place], exponents=found)
        with self._changed:
            before = [self._window.alone(step) for step in queue[: most - size]]
            self.lost += sum([step.recorded for step in queue[: most - size]])
            for _ in queue[:most]:
                self._queue.popleft()
            # steps that arrived since are at the end of the queue
            self._missed = max(0, most - len(queue))
            for _ in range(min(self._missed, len(self._queue))):
                self._queue.popleft()
                self._missed -= 1
            self._deliver(before + merged)

    def _hear(self, fault: str | None) -> None:
        """Learn why ranks end; all ranks call this."""
        told = distributed.share(fault, self._group)
        for rank, text in zip(self._ranks.global_ranks, told, strict=True):
            if text is not None and self.news is None and rank != self._ranks.global_ranks[self._ranks.rank]:
                self.news = f"rank {rank}: {text}"
        if fault is not None:
            self._fault = None

    def _watch(self, heard: Told, step: StepRecord, now: float) -> None:
        """Report a rank that makes the others wait for long."""
        self._stalls_at = self._stalls_at or now + self._ranks.timeout
        if now >= self._stalls_at:
            self._stalls_at = math.inf
            text = (
                f"rank {self._rank(heard.behind)} has not ended step {step.step}, which other ranks ended "
                f"{self._ranks.timeout:g} s ago"
            )
            self._failures.add("slow rank", text + ": no further step is delivered until it does")

    def _difference(self, mine: Sequence[StepRecord]) -> RankError:
        """Return the error for ranks in different steps. All ranks call this, as all see the same numbers."""
        told = distributed.share([step.step for step in mine], self._group)
        rank = next((rank for rank, steps in enumerate(told) if steps != told[0]), 0)
        pairs = zip(told[rank], told[0], strict=True)
        there, here = next(((a, b) for a, b in pairs if a != b), (told[rank][0], told[0][0]))
        first, other = self._ranks.global_ranks[0], self._ranks.global_ranks[rank]
        return RankError(
            f"rank {other} is in step {there}, but rank {first} is in step {here}: call advance() once per "
            "step on every rank, and set the same monitor.step"
        )

    def _rank(self, code: float) -> int:
        return self._ranks.global_ranks[self._ranks.size - int(code)]


def _to_nobody(*_: Any) -> None:
    pass
