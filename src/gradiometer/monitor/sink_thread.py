"""A bounded queue of steps, and the thread that passes them to one sink."""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gradiometer.monitor.failures import Failures
    from gradiometer.recorder import RunInfo, StepRecord
    from gradiometer.rules import Finding

# steps in one call of a sink, at most
_BATCH: Final = 64
# seconds without a step after which a sink's `tick` is called
_TICK = 1.0


class Calls(NamedTuple):
    """The functions that a thread calls: the methods of a sink or of the dispatcher."""

    start: Callable[[RunInfo], object]
    write: Callable[[Sequence[StepRecord], Sequence[Finding]], object]
    fault: Callable[[Any], object]
    close: Callable[[], object]
    tick: Callable[[], object] | None = None
    lost: Callable[[], object] = int

    @classmethod
    def of(cls, sink: Any) -> Calls:
        """Return the methods of a sink."""
        lost = partial(getattr, sink, "lost", 0)
        return cls(sink.start, sink.write, sink.fault, sink.close, getattr(sink, "tick", None), lost)


class SinkThread:
    """Calls the methods of one sink on a thread of its own, one at a time and in order.

    Producers never block. A full queue drops its oldest steps; their findings are passed with the next ones.
    Faults are never dropped. An error in the sink is counted, and the thread continues.

    ``name``: the name under which failures are counted. ``limit``: the maximum number of steps in the queue.

    Attributes:
        dropped: the number of dropped steps, and of those for a sink that could not be opened.
    """

    def __init__(self, name: str, calls: Calls, limit: int, failures: Failures) -> None:
        self.dropped = 0
        self._name, self._calls, self._limit, self._failures = name, calls, limit, failures
        # in order: (number, step or None, findings), or (number, fault, None)
        self._items: deque[tuple[int, Any, Sequence[Finding] | None]] = deque()
        self._steps = 0  # the number of steps in the items
        self._findings_of_dropped: dict[tuple[Any, ...], Finding] = {}
        self._given = self._done = 0  # numbers of the last item added and the last one finished
        self._finishing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        # not Thread.is_alive(): up to Python 3.12 an interrupted join() marks the thread as ended
        self._ended = threading.Event()

    def start(self, info: RunInfo) -> None:
        """Start the thread, which first opens the sink. A sink that fails to open gets no steps.

        A second call, after an interrupt, does nothing if the thread runs.
        """
        if self._thread is None:
            name = f"gradiometer {self._name}"
            self._thread = threading.Thread(target=self._run, args=(info,), name=name, daemon=True)
        elif self._thread.ident is not None:
            return
        try:
            self._thread.start()
        except Exception as error:  # noqa: BLE001 the thread cannot start; the other sinks continue
            self._failures.add(self._name, error)
            self._end()

    def put(self, steps: Iterable[tuple[StepRecord, Sequence[Finding]]]) -> None:
        """Add steps, in order, each with the findings that it created or changed."""
        with self._changed:
            if self._ended.is_set():
                self.dropped += sum(1 for _ in steps)
                return
            for record, findings in steps:
                self._append(record, findings)
                self._steps += 1
            excess = self._steps - self._limit
            for _ in range(excess):
                self._drop()
            self._changed.notify_all()
        if excess > 0:
            text = f"{self._name} cannot keep up: more than {self._limit} steps are waiting, "
            self._failures.add(f"queue of {self._name}", text + "so the oldest are dropped", excess)

    def put_findings(self, findings: Sequence[Finding]) -> None:
        """Add findings of steps that were added before."""
        with self._changed:
            if findings and not self._ended.is_set():
                self._append(None, findings)
                self._changed.notify_all()

    def put_fault(self, fault: Any) -> None:
        """Add a fault, which follows all steps so far."""
        with self._changed:
            if not self._ended.is_set():
                self._append(fault, None)
                self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all items added so far are written or dropped; return False on a timeout."""
        with self._changed:
            goal = self._given
            return self._changed.wait_for(lambda: self._done >= goal or self._ended.is_set(), timeout)

    def finish(self) -> None:
        """Let the thread write all waiting steps, close the sink and end. Does not wait for it."""
        with self._changed:
            self._finishing = True
            self._changed.notify_all()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the thread has ended; return False on a timeout."""
        return self._thread is None or self._ended.wait(timeout)

    @property
    def lost(self) -> int:
        """Steps that the sink itself has lost, if it has such an attribute."""
        lost = self._calls.lost()
        return lost if isinstance(lost, int) else 0

    @property
    def is_own_thread(self) -> bool:
        """Whether the current thread is this one."""
        return self._thread is threading.current_thread()

    def _append(self, item: Any, findings: Sequence[Finding] | None) -> None:
        self._given += 1
        self._items.append((self._given, item, findings))

    def _drop(self) -> None:
        items = enumerate(self._items)
        index = next(i for i, (_, step, found) in items if step is not None and found is not None)
        self._findings_of_dropped |= _by_key(self._items[index][2] or ())
        del self._items[index]
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
            # small batches, so that a full queue has room again soon
            while items and (found := items[0][2]) is not None and len(records) < _BATCH:
                record = items.popleft()[1]
                records += [] if record is None else [record]
                findings |= _by_key(found)
            self._steps -= len(records)
            if records or findings:
                findings, self._findings_of_dropped = self._findings_of_dropped | findings, {}
            elif items:
                fault.append(items.popleft()[1])
            elif self._finishing:
                return False
        if records or findings:
            self._guard(self._calls.write, records, list(findings.values()))
        elif fault:
            self._guard(self._calls.fault, *fault)
        elif self._calls.tick is not None:
            # lets a sink that writes at fixed intervals do so even while a step hangs
            self._guard(self._calls.tick)
        with self._changed:
            self._done = self._items[0][0] - 1 if self._items else self._given
            self._changed.notify_all()
        return True

    def _end(self) -> None:
        with self._changed:
            self._ended.set()
            self.dropped += self._steps
            self._steps = 0
            self._items.clear()
            self._changed.notify_all()

    def _guard(self, call: Callable[..., Any], *args: Any) -> bool:
        try:
            call(*args)
        except BaseException as error:  # noqa: BLE001 the thread continues, whatever a sink raises
            self._failures.add(self._name, error)
            return False
        return True


def _by_key(findings: Iterable[Finding]) -> dict[tuple[Any, ...], Finding]:
    return {(*finding.key, finding.first_step): finding for finding in findings}
