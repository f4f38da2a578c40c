"""The background thread: takes recorded steps from a bounded queue, through the rules, to the sinks."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from gradiometer.findings import Finding, Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gradiometer.blackbox import BlackBox
    from gradiometer.fault import Fault
    from gradiometer.protocols import Rule, Sink
    from gradiometer.steps import RunInfo, StepRecord

__all__ = ["Failures", "Worker"]

_LOG = logging.getLogger("gradiometer")
# steps that sinks are given at once
_BATCH = 64
# seconds without a step after which sinks are asked to write what waits
_TICK = 1.0


class Failures:
    """What went wrong in the telemetry: each kind is logged once, as a warning, and counted.

    >>> failures = Failures()
    >>> failures.add("record", ValueError("no such name"))
    >>> failures.counts
    {'record': 1}
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, what: str, error: BaseException | str, times: int = 1) -> None:
        """Count a failure; say so, if it is the first of its kind."""
        with self._lock:
            first = what not in self.counts
            self.counts[what] = self.counts.get(what, 0) + times
        if first:
            text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
            trace = None if isinstance(error, str) else error
            _LOG.warning("%s: %s (said once, counted from here on; training goes on)", what, text)
            _LOG.debug("where it failed", exc_info=trace)


class Worker:
    """Runs rules and sinks on a thread of its own, in the order of the steps.

    Args:
        rules, sinks: what is run; errors in them are counted in ``failures`` and stop nothing.
        limit: steps that may wait. Of more the oldest are dropped, and counted in `dropped`.
        box: sees every record.
        failures: counts errors.

    Attributes:
        dropped: steps that were dropped.
        ledger: what the rules found.
    """

    def __init__(
        self, rules: Iterable[Rule], sinks: Iterable[Sink], limit: int, box: BlackBox, failures: Failures
    ) -> None:
        self._rules = list(rules)
        self.dropped = 0
        self.ledger = Ledger()
        # held while rules run: who has it sees their history at rest
        self._state = threading.Lock()
        self._sinks = _named(list(sinks))
        self._limit = limit
        self._box = box
        self._failures = failures
        self._records: deque[StepRecord] = deque()
        self._faults: list[Callable[[], Fault]] = []
        self._given = self._done = 0
        self._stopping = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        # not the thread's own word: an interrupted join() of Python 3.12 and before calls it ended
        self._ended = threading.Event()

    def start(self, info: RunInfo) -> None:
        """Start the thread, which opens the sinks first."""
        self.ledger.span(info.every)
        self._thread = threading.Thread(target=self._run, args=(info,), name="gradiometer", daemon=True)
        self._thread.start()

    def put(self, records: Sequence[StepRecord]) -> None:
        """Hand over steps, in order. Never waits for rules or sinks."""
        if not records:
            return
        with self._changed:
            self._given += len(records)
            self._records.extend(records)
            excess = len(self._records) - self._limit
            for _ in range(excess):
                self._records.popleft()
            self._changed.notify_all()
        if excess > 0:
            self.dropped += excess
            self._done_with(excess)
            self._failures.add(
                "queue", f"the sinks can't keep up, the oldest of {self._limit} steps go", excess
            )

    def put_fault(self, make: Callable[[], Fault]) -> None:
        """Hand over a fault, made on the thread once all steps that wait have been written."""
        with self._changed:
            self._given += 1
            self._faults.append(make)
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all that was handed over has been written or dropped; tell whether it has."""
        if not self.is_running or self._thread is threading.current_thread():
            return self._done >= self._given
        with self._changed:
            goal = self._given
            return self._changed.wait_for(lambda: self._done >= goal, timeout)

    def stop(self, timeout: float | None = None) -> bool:
        """Let the thread write all that waits, close the sinks and end; tell whether it has."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        return self._ended.wait(timeout)

    @property
    def is_running(self) -> bool:
        """Whether the thread was started and has not ended."""
        return self._thread is not None and not self._ended.is_set()

    def state_dict(self) -> dict[str, Any]:
        """Return what the rules remember, and the findings."""
        with self._state:
            return {
                "rules": [(rule.name, rule.state_dict()) for rule in self._rules],
                "findings": [finding.to_dict() for finding in self.ledger.findings],
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. A rule takes up the history of one with its name; the others begin anew."""
        histories: dict[str, list[Any]] = {}
        for name, history in state["rules"]:
            histories.setdefault(name, []).append(history)
        with self._state:
            for rule in self._rules:
                if histories.get(rule.name):
                    rule.load_state_dict(histories[rule.name].pop(0))
            self.ledger.load([Finding.from_dict(values) for values in state["findings"]])

    def _run(self, info: RunInfo) -> None:
        try:
            self._work(info)
        finally:
            self._ended.set()

    def _work(self, info: RunInfo) -> None:
        # a sink that could not open is left out
        self._sinks = {
            name: sink for name, sink in self._sinks.items() if self._guard(name, sink.start, info)
        }
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._records or self._faults or self._stopping, _TICK)
                # before a fault everything; otherwise little at a time, so that what is full soon has room
                size = len(self._records) if self._faults else min(_BATCH, len(self._records))
                batch = [self._records.popleft() for _ in range(size)]
                faults, self._faults = self._faults, []
            if not batch and not faults:
                if self._stopping:
                    break
                # what a sink writes by the clock is not held up by a step that hangs
                for name, sink in self._sinks.items():
                    if hasattr(sink, "tick"):
                        self._guard(name, sink.tick)
                continue
            self._write(batch)
            for make in faults:
                self._tell_made(make)
            self._done_with(len(batch) + len(faults))
        for name, sink in self._sinks.items():
            self._guard(name, sink.close)

    def _write(self, batch: list[StepRecord]) -> None:
        if not batch:
            return
        changed: dict[tuple[Any, ...], Finding] = {}
        faults: list[Fault] = []
        with self._state:
            for record in batch:
                for finding in self._look(record):
                    changed[*finding.key, finding.first_step] = finding
                if self._guard("black box", self._box.see, record) and self._box.lost_the_loss:
                    message = f"loss {record.loss}"
                    # of what was known then: the batch goes on
                    faults.append(
                        self._box.fault("non-finite loss", message, record.step, self.ledger.findings)
                    )
        for name, sink in self._sinks.items():
            self._guard(name, sink.write, batch, list(changed.values()))
        for fault in faults:
            self._tell(fault)

    def _look(self, record: StepRecord) -> list[Finding]:
        changed: list[Finding] = []
        for rule in self._rules:
            try:
                changed += self.ledger.add(rule.check(record))
            except BaseException as error:  # noqa: BLE001 the other rules go on
                self._failures.add(f"rule {rule.name}", error)
        return changed

    def _tell_made(self, make: Callable[[], Fault]) -> None:
        try:
            fault = make()
        except BaseException as error:  # noqa: BLE001 the thread goes on
            self._failures.add("black box", error)
        else:
            self._tell(fault)

    def _tell(self, fault: Fault) -> None:
        if fault.first_nonfinite is not None or fault.reason == "non-finite loss":
            _LOG.warning("%s", fault)
        for name, sink in self._sinks.items():
            self._guard(name, sink.fault, fault)

    def _done_with(self, count: int) -> None:
        with self._changed:
            self._done += count
            self._changed.notify_all()

    def _guard(self, what: str, call: Callable[..., Any], *args: Any) -> bool:
        try:
            call(*args)
        except BaseException as error:  # noqa: BLE001 the thread goes on, whatever a sink does
            self._failures.add(what, error)
            return False
        return True


def _named(sinks: Sequence[Sink]) -> dict[str, Sink]:
    named: dict[str, Sink] = {}
    for sink in sinks:
        name = base = f"sink {getattr(sink, 'name', type(sink).__name__)}"
        count = 1
        while name in named:
            count += 1
            name = f"{base} {count}"
        named[name] = sink
    return named
