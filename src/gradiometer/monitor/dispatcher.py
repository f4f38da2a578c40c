"""The background threads: one runs the rules on recorded steps, and each sink has its own."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gradiometer.monitor.failures import LOG, Failures, describe
from gradiometer.monitor.sink_thread import Calls, SinkThread
from gradiometer.monitor.summary import FindingLog
from gradiometer.rules import Finding, Ledger, checked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gradiometer.monitor.blackbox import BlackBox
    from gradiometer.recorder import RunInfo, StepRecord
    from gradiometer.rules import Fault, Rule
    from gradiometer.sinks import Sink


class Dispatcher:
    """Runs rules and the black box on one thread, in the order of the steps, and each sink on its own.

    A sink that is slow or hangs does not delay the rules or the other sinks, and a slow rule does not delay a
    sink that takes steps ``before_rules``.

    Args:
        rules, sinks: the rules and sinks to run; their errors are counted in ``failures`` and stop nothing.
        limit: steps that may wait for the rules, and for each sink; a full queue drops its oldest steps.
        box: sees every record.
        failures: counts errors, and the steps dropped by each queue.

    Attributes:
        ledger: the findings of the rules.
        finding_log: logs them as they begin.
    """

    def __init__(
        self, rules: Iterable[Rule], sinks: Iterable[Sink], limit: int, box: BlackBox, failures: Failures
    ) -> None:
        named = _named(list(sinks))
        self._rules = [(getattr(rule, "name", type(rule).__name__), rule) for rule in rules]
        self.ledger = Ledger()
        is_shown = any([getattr(sink, "shows_findings", False) for sink in named.values()])
        self.finding_log = FindingLog(is_shown=is_shown)
        # held while rules run, so that its holder sees a consistent history
        self._state = threading.Lock()
        self._box = box
        self._failures = failures
        threads = {name: SinkThread(name, Calls.of(sink), limit, failures) for name, sink in named.items()}
        self._sink_threads = list(threads.values())
        # those that get steps before the rules
        self._ahead = [threads[name] for name in named if getattr(named[name], "before_rules", False)]
        own = Calls(self._open_sinks, self._check_batch, self._build_fault, self._close_sinks)
        # all steps pass this thread first; it counts its errors and goes on
        self._first = SinkThread("the rules", own, limit, failures)

    def start(self, info: RunInfo) -> None:
        """Start the threads; each sink's thread first opens the sink."""
        self.ledger.span(info.every)
        self._first.start(info)

    def put(self, records: Sequence[StepRecord]) -> None:
        """Add steps, in order. Never waits for rules or sinks."""
        for thread in [*self._ahead, self._first]:
            thread.put((record, ()) for record in records)

    def put_fault(self, make: Callable[[], Fault]) -> None:
        """Add a fault, built when all steps so far have passed the rules; sinks get it after those steps."""
        self._first.put_fault(make)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until everything added so far has been written or dropped; return whether it has.

        It does not wait if called on one of its own threads.
        """
        if self._is_own_thread():
            timeout = 0.0
        end = _deadline(timeout)
        # first the thread that feeds the others
        return all([thread.wait(_left(end)) for thread in [self._first, *self._sink_threads]])

    def stop(self, timeout: float | None = None) -> bool:
        """Let the threads write all waiting steps, close the sinks and end; return whether all have ended.

        Threads that have not ended after ``timeout`` seconds are abandoned. It may be called again after an
        interrupt.
        """
        self._first.finish()
        if self._is_own_thread():
            return True
        end = _deadline(timeout)
        return all([thread.join(_left(end)) for thread in [self._first, *self._sink_threads]])

    @property
    def dropped(self) -> int:
        """Steps dropped by queues and lost by sinks; a step that two sinks miss counts twice."""
        return sum(thread.dropped + thread.lost for thread in [self._first, *self._sink_threads])

    def state_dict(self) -> dict[str, Any]:
        """Return the history of the rules, and the findings."""
        with self._state:
            return {
                "rules": [(name, rule.state_dict()) for name, rule in self._rules],
                "findings": [finding.to_dict() for finding in self.ledger.findings],
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`. A rule restores the history saved under its name, if there is one.

        Raises:
            ValueError: for a state that does not fit, or that a rule refuses; nothing has changed then.
        """
        histories: dict[str, list[Any]] = {}
        part = "rules"
        try:
            for name, history in state["rules"]:
                histories.setdefault(name, []).append(history)
            part = "findings"
            findings = [checked(Finding.from_dict(values)) for values in state["findings"]]
        except Exception as error:
            msg = f"the state's {part} do not fit ({describe(error)}); pass the result of "
            raise ValueError(msg + "Monitor.state_dict()") from error
        with self._state:
            before: list[tuple[Rule, Any]] = []
            for name, rule in self._rules:
                if not histories.get(name):
                    continue
                try:
                    before.append((rule, copy.deepcopy(rule.state_dict())))
                    rule.load_state_dict(histories[name].pop(0))
                except Exception as error:
                    for changed, history in before:
                        with suppress(Exception):
                            changed.load_state_dict(history)
                    msg = f"the rule {name} does not accept its part of the state ({describe(error)})"
                    raise ValueError(msg) from error
            self.ledger.load(findings)
            self.finding_log.load(findings)

    def _check_batch(self, batch: Sequence[StepRecord], _: Sequence[Finding]) -> None:
        steps: list[tuple[StepRecord, Sequence[Finding]]] = []
        faults: list[Fault] = []
        with self._state:
            for record in batch:
                for table in record.tables.values():
                    if table.kind.schema.storage == "sparse":
                        # here, so that neither the training nor a full queue has to keep all counts
                        table.sparse()
                steps.append((record, self._check(record)))
                try:
                    self._box.see(record)
                    if self._box.lost_the_loss:
                        # build it now, because later steps of the batch change what is known
                        why = "non-finite loss", f"loss {record.loss_text}"
                        faults.append(self._box.fault(*why, record.step, self.ledger.findings))
                except BaseException as error:  # noqa: BLE001 the sinks must still get the step
                    self._failures.add("black box", error)
        for thread in self._sink_threads:
            if thread in self._ahead:
                thread.put_findings([finding for _, findings in steps for finding in findings])
            else:
                thread.put(steps)
        for fault in faults:
            self._send_fault(fault)

    def _check(self, record: StepRecord) -> list[Finding]:
        changed: list[Finding] = []
        for name, rule in self._rules:
            try:
                found = rule.check(record)
                if not isinstance(found, Iterable):
                    text = f"check() returned an object of type {type(found).__name__}, "
                    self._failures.add(f"rule {name}", text + "not a list of findings")
                    continue
                for sighting in found:
                    try:
                        changed += self.ledger.add([sighting])
                    except TypeError as error:
                        self._failures.add(f"rule {name}", f"a finding was refused: {error}")
            except BaseException as error:  # noqa: BLE001 the other rules go on
                self._failures.add(f"rule {name}", error)
        if changed:
            self.finding_log.see(self.ledger.findings, changed)
        return changed

    def _build_fault(self, make: Callable[[], Fault]) -> None:
        try:
            fault = make()
        except BaseException as error:  # noqa: BLE001 the thread goes on
            self._failures.add("black box", error)
        else:
            self._send_fault(fault)

    def _send_fault(self, fault: Fault) -> None:
        for thread in self._sink_threads:
            thread.put_fault(fault)
        # a process that exits, with any status, without a non-finite value logs nothing
        if fault.reason != "exit" or fault.first_nonfinite is not None:
            LOG.warning("%s", fault)

    def _open_sinks(self, info: RunInfo) -> None:
        for thread in self._sink_threads:
            thread.start(info)

    def _close_sinks(self) -> None:
        for thread in self._sink_threads:
            thread.finish()

    def _is_own_thread(self) -> bool:
        return any(thread.is_own_thread for thread in [self._first, *self._sink_threads])


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


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
