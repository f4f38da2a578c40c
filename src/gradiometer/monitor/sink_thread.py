"""A bounded queue of steps, and the thread that brings them to one sink."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gradiometer.monitor.failures import Failures
    from gradiometer.recorder import RunInfo, StepRecord
    from gradiometer.rules import Finding

__all__ = ["Calls", "SinkThread"]

# steps that a sink is given at once
_BATCH: Final = 64
# seconds without a step after which a sink is asked to write what waits
_TICK = 1.0


class Calls(NamedTuple):
    """What a thread calls, one at a time and in order: the methods of a sink, or the dispatcher's own."""

    start: Callable[[RunInfo], object]
    write: Callable[[Sequence[StepRecord], Sequence[Finding]], object]
    fault: Callable[[Any], object]
    close: Callable[[], object]
    tick: Callable[[], object] | None = None

    @classmethod
    def of(cls, sink: Any) -> Calls:
        """Return the methods of a sink."""
        return cls(sink.start, sink.write, sink.fault, sink.close, getattr(sink, "tick", None))


class SinkThread:
    """Calls the methods of one sink on a thread of its own, one at a time and in order.

    Who hands over never waits. Of too many steps the oldest go, and what was found in them comes with the
    next; faults are kept. An error in the sink is counted, and the thread goes on.

    Args:
        name: what failures call it.
        calls: what is called.
        limit: steps that may wait.
        failures: counts errors, and the steps that were dropped.

    Attributes:
        dropped: steps that were dropped.

    >>> from gradiometer.monitor.failures import Failures
    >>> seen = []
    >>> calls = Calls(
    ...     start=lambda info: seen.append("start"),
    ...     write=lambda records, findings: seen.append(len(records)),
    ...     fault=lambda fault: seen.append(fault),
    ...     close=lambda: seen.append("close"),
    ... )
    >>> thread = SinkThread("sink", calls, 2, Failures())
    >>> thread.put([("step 0", ()), ("step 1", ()), ("step 2", ())])
    >>> thread.put_fault("the end")
    >>> thread.start(None)
    >>> thread.finish()
    >>> thread.join(10), seen, thread.dropped
    (True, ['start', 2, 'the end', 'close'], 1)
    """

    def __init__(self, name: str, calls: Calls, limit: int, failures: Failures) -> None:
        self.dropped = 0
        self._name, self._calls, self._limit, self._failures = name, calls, limit, failures
        # in order: a number, a step with what was found in it, or a fault with None
        self._items: deque[tuple[int, Any, Sequence[Finding] | None]] = deque()
        self._steps = 0  # of the items
        self._homeless: dict[tuple[Any, ...], Finding] = {}  # found in steps that were dropped
        self._given = self._done = 0  # all items up to this number
        self._finishing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        # not the thread's own word: an interrupted join() of Python 3.12 and before calls it ended
        self._ended = threading.Event()

    def start(self, info: RunInfo) -> None:
        """Start the thread, which opens the sink first. A sink that cannot open takes nothing."""
        name = f"gradiometer {self._name}"
        self._thread = threading.Thread(target=self._run, args=(info,), name=name, daemon=True)
        try:
            self._thread.start()
        except Exception as error:  # noqa: BLE001 no thread to be had; the others go on
            self._failures.add(self._name, error)
            self._end()

    def put(self, steps: Iterable[tuple[StepRecord, Sequence[Finding]]]) -> None:
        """Hand over steps, in order, each with the findings that are new or have changed with it."""
        with self._changed:
            if self._ended.is_set():
                return
            for record, findings in steps:
                self._append(record, findings)
                self._steps += 1
            excess = self._steps - self._limit
            for _ in range(excess):
                self._drop()
            self._changed.notify_all()
        if excess > 0:
            text = f"{self._name} can't keep up, the oldest of {self._limit} steps go"
            self._failures.add(f"queue of {self._name}", text, excess)

    def put_fault(self, fault: Any) -> None:
        """Hand over a fault. It comes after all steps so far."""
        with self._changed:
            if not self._ended.is_set():
                self._append(fault, None)
                self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all that was handed over has been written or dropped; tell whether it has."""
        with self._changed:
            goal = self._given
            return self._changed.wait_for(lambda: self._done >= goal or self._ended.is_set(), timeout)

    def finish(self) -> None:
        """Let the thread write all that waits, close the sink and end. Does not wait for it."""
        with self._changed:
            self._finishing = True
            self._changed.notify_all()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the thread has ended; tell whether it has. A thread that never began has."""
        return self._thread is None or self._ended.wait(timeout)

    @property
    def is_own_thread(self) -> bool:
        """Whether this is called on this thread."""
        return self._thread is threading.current_thread()

    def _append(self, what: Any, findings: Sequence[Finding] | None) -> None:
        self._given += 1
        self._items.append((self._given, what, findings))

    def _drop(self) -> None:
        place = next(i for i, (_, _, findings) in enumerate(self._items) if findings is not None)
        self._homeless |= _by_key(self._items[place][2] or ())
        del self._items[place]
        self._steps -= 1
        self.dropped += 1

    def _run(self, info: RunInfo) -> None:
        try:
            if self._guard(self._calls.start, info):
                while self._turn():
                    pass
                self._guard(self._calls.close)
        finally:
            self._end()

    def _turn(self) -> bool:
        records: list[StepRecord] = []
        findings: dict[tuple[Any, ...], Finding] = {}
        fault: list[Any] = []
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._finishing, _TICK)
            items = self._items
            # little at a time, so that what is full soon has room
            while items and (found := items[0][2]) is not None and len(records) < _BATCH:
                records.append(items.popleft()[1])
                findings |= _by_key(found)
            self._steps -= len(records)
            if records:
                findings, self._homeless = self._homeless | findings, {}
            elif items:
                fault.append(items.popleft()[1])
            elif self._finishing:
                return False
        if records:
            self._guard(self._calls.write, records, list(findings.values()))
        elif fault:
            self._guard(self._calls.fault, *fault)
        elif self._calls.tick is not None:
            # what a sink writes by the clock is not held up by a step that hangs
            self._guard(self._calls.tick)
        with self._changed:
            self._done = self._items[0][0] - 1 if self._items else self._given
            self._changed.notify_all()
        return True

    def _end(self) -> None:
        with self._changed:
            self._ended.set()
            self._items.clear()
            self._changed.notify_all()

    def _guard(self, call: Callable[..., Any], *args: Any) -> bool:
        try:
            call(*args)
        except BaseException as error:  # noqa: BLE001 the thread goes on, whatever a sink does
            self._failures.add(self._name, error)
            return False
        return True


def _by_key(findings: Iterable[Finding]) -> dict[tuple[Any, ...], Finding]:
    return {(*finding.key, finding.first_step): finding for finding in findings}
