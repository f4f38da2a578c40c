"""The pipeline of steps from the ring buffer on the device to rules and sinks, and its end."""

from __future__ import annotations

import atexit
import logging
import math
import os
import shlex
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from gradiometer.monitor.blackbox import BlackBox
from gradiometer.monitor.capture_mode import beside_captures
from gradiometer.monitor.dispatcher import Dispatcher
from gradiometer.monitor.failures import reason_of
from gradiometer.monitor.ring_reader import RingReader
from gradiometer.monitor.signals import record_only, subscribe, unsubscribe
from gradiometer.monitor.summary import Summary, lost_text
from gradiometer.ops import is_capturing
from gradiometer.rules import Severity, counts_text
from gradiometer.runs import RunRecord
from gradiometer.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from gradiometer.monitor.failures import Failures
    from gradiometer.monitor.rank_merger import RankMerger
    from gradiometer.recorder import ModelState, Recorder, RunInfo, StepRecord
    from gradiometer.rules import Rule
    from gradiometer.sinks import Sink

# seconds between two copies to the host, unless the ring fills earlier
INTERVAL = 0.2
# with this many copies under way, the next one starts only when the ring is half full
UNDER_WAY = 4
# seconds to wait at the end of a run for a device, for other ranks and for sinks
PATIENCE = 60.0
# seconds to wait during a run for other ranks
RANKS_PATIENCE = 5.0


class Pipeline:
    """A ring reader, a dispatcher and a black box, from the first step to the end.

    Only the process that created it uses it. It ends by `end`, or with the process if `end` was not called.

    Args:
        recorder, rules, sinks: the recorder whose steps are delivered to rules and sinks.
        queue: steps that may wait for them.
        describe: returns the run's information for the sinks, given its first step.
        merger: merges steps with other ranks; then rules and sinks get the job's steps on the first rank. On
            other ranks they get this rank's own steps, which its black box needs.
        rank: the rank in the black box's reports; None for all ranks, or the only one.
        redact: leave the text of an exception out of the fault.

    Attributes:
        command: the command that shows more; empty without a run record.
        last: the newest step.
        is_started: whether it has taken a step or was flushed.
        is_ended: whether `end` has returned.
    """

    def __init__(
        self,
        recorder: Recorder,
        rules: Iterable[Rule],
        sinks: Iterable[Sink],
        queue: int,
        failures: Failures,
        describe: Callable[[int], RunInfo],
        merger: RankMerger | None = None,
        rank: int | None = None,
        *,
        redact: bool = False,
    ) -> None:
        sinks = list(sinks)
        path = next((sink.path for sink in sinks if isinstance(sink, RunRecord)), None)
        self.command = "" if path is None else printable(f"gradiometer show {shlex.quote(str(path))}")
        self.box = BlackBox(rank)
        self.dispatcher = Dispatcher(rules, sinks, queue, self.box, failures)
        self.merger = merger
        self.last: StepRecord | None = None
        self._steps = self._recorded = 0
        self._rank = rank
        self.reader = RingReader(recorder, self._pass_on, failures)
        self._device = recorder.ring.device
        # the training thread owns the reader, except while it waits for a rank that is ending
        self._draining = threading.RLock()
        self._failures = failures
        self._describe = describe
        self._redact = redact
        self._next = 0.0
        self._signal: str | None = None
        self._pid = os.getpid()
        self.is_started = self.is_ended = False
        self._has_reported_signal = self._has_reported_end = False
        self._deadline: float | None = None
        if merger is not None:
            # the other ranks wait for answers of this one, even if it takes no steps
            _open[self] = None
            merger.start(self._put, partial(self._report_fault, "other rank"), self._poll)

    def is_open(self) -> bool:
        """Return whether steps are accepted; report those of a fork, in a capture or after the end."""
        if os.getpid() != self._pid:
            text = "the monitor was created in the parent process: create it in the process that uses it"
            self._failures.add("fork", text)
        elif self.is_ended:
            text = "advance() was called after close(), so its step is lost: call close() last"
            self._failures.add("closed", text)
        elif is_capturing(self._device):
            text = "advance() was called while a CUDA graph was captured: call it after each replay"
            self._failures.add("capture", text)
        else:
            return True
        return False

    def take(self, scalars: Mapping[str, Any], model: ModelState | None = None) -> None:
        """Add a step that has ended, start a copy if one is due, and deliver copies that have arrived."""
        if not self.is_started:
            self._start()
        reader = self.reader
        with self._draining:
            reader.take(scalars, model)
            now = time.monotonic()
            if reader.is_full or (now >= self._next and reader.under_way < UNDER_WAY):
                self._next = now + INTERVAL
                reader.start()
            if reader.under_way:
                reader.poll()
        if self._signal is not None and not self._has_reported_signal:
            # the previous handler returned, so training goes on
            self._has_reported_signal = True
            self._report_fault(self._signal, "")

    def flush(self, timeout: float | None) -> bool:
        """Wait until all steps so far have been written; return whether they have."""
        if self.is_ended or os.getpid() != self._pid:
            return True
        if is_capturing(self._device):
            return False
        if not self.is_started:
            self._start()
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with self._draining:
            arrived = self.reader.bring(deadline)
        if self.merger is not None:
            # a bounded wait: other ranks may not be flushing
            arrived &= self.merger.wait(min(max(0.0, deadline - time.monotonic()), PATIENCE))
        remaining = None if timeout is None else max(0.0, deadline - time.monotonic())
        return self.dispatcher.wait(remaining) and arrived

    def end(self, fault: tuple[str, str] | None = None) -> None:
        """Write all steps, and a fault with this reason and message if given, to the sinks; close them."""
        if self.is_ended or os.getpid() != self._pid:
            return
        if self._signal is not None and (fault is None or fault[0] == "exit"):
            fault = (self._signal, "")
        if fault is not None and not self.is_started:
            self._start()
        # an interrupt may call this again; both calls share one deadline
        if self._deadline is None:
            self._deadline = time.monotonic() + PATIENCE
        # keep half of the time for the sinks, in case the device does not respond
        with self._draining:
            if self.is_started and not self.reader.bring(self._deadline - PATIENCE / 2, cut=True):
                self.reader.give_up()
        if self.merger is not None:
            fault = self._end_merger(self.merger, fault, self._deadline)
        if self.is_started:
            if fault is not None and not self._has_reported_end:
                self._has_reported_end = True
                self._report_fault(*fault)
            if not self.dispatcher.stop(max(0.0, self._deadline - time.monotonic())):
                text = f"a sink has not finished after {PATIENCE:g} s: its last steps may be missing"
                self._failures.add("close", text)
            self._report_end()
        self.is_ended = True
        _open.pop(self, None)
        unsubscribe(self.note_signal)
        # references to the model
        self.box.kept = None
        del self._describe

    def end_by(self, error: BaseException) -> None:
        """Do what `end` does, with the fault for an exception."""
        self.end(reason_of(error, redact=self._redact))

    def forget(self) -> None:
        """End a pipeline whose monitor was garbage-collected; may be called on any thread."""
        if is_capturing(self._device):
            # nothing can be copied now; it ends with the process
            return
        if self.merger is None or threading.current_thread() is threading.main_thread():
            self._end_anywhere()
        else:
            # garbage collection may run on any thread, even on one that `end` joins
            threading.Thread(target=self._end_anywhere, name="gradiometer end", daemon=True).start()

    def _end_anywhere(self) -> None:
        with beside_captures(self._device):
            self.end()

    def _end_merger(
        self, merger: RankMerger, fault: tuple[str, str] | None, deadline: float
    ) -> tuple[str, str] | None:
        """Stop merging with other ranks; return the fault, with the news of another rank's fault added."""
        left = max(0.0, deadline - time.monotonic())
        text = None if fault is None or fault[0] == "exit" else f"{fault[0]}, {fault[1]}".removesuffix(", ")
        merger.finish(text, left / 2)
        # keep a quarter for the sinks
        if not merger.join(left * 3 / 4):
            news = "another rank does not respond at the end: the last steps may be missing"
            self._failures.add("ranks", news)
        if fault is not None and merger.news is not None and (text or fault[0]) not in merger.news:
            return fault[0], f"{fault[1]} (before that, {merger.news})".lstrip()
        return fault

    def _report_end(self) -> None:
        """Log in one line what was recorded, dropped and failed."""
        failures, dropped = dict(self._failures.counts), self.dropped
        findings = self.dispatcher.ledger.findings
        bad = bool(failures or dropped or [f for f in findings if f.severity >= Severity.WARNING])
        if not bad and self.merger is not None and not self.merger.is_first:
            return  # the first rank says it for all
        who = "the run" if self._rank is None else f"the run on rank {self._rank}"
        text = "%s ended: %d steps, %d of them with tensors; %s"
        level = logging.WARNING if bad else logging.INFO
        more = [*lost_text(dropped, failures), *([self.command] if self.command else [])]
        found = "; ".join([counts_text(findings), *more])
        self.dispatcher.finding_log.logger.log(level, text, who, self._steps, self._recorded, found)

    def summary(self) -> Summary:
        """Return what the run has found so far."""
        findings, failures = list(self.dispatcher.ledger.findings), dict(self._failures.counts)
        about = self._steps, self._recorded, self.last
        return Summary(*about, findings, self.dropped, failures, self.command)

    @property
    def dropped(self) -> int:
        """As `Monitor.dropped`."""
        unmerged = 0 if self.merger is None else self.merger.lost
        return self.dispatcher.dropped + self.reader.lost + unmerged

    def note_signal(self, name: str) -> None:
        """Record a signal that ends the run; called by its handler."""
        self._signal = name

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run. First waits as `rewind` does."""
        self._flush_briefly()
        return {"step": self.reader.step, "black_box": self.box.state_dict(), **self.dispatcher.state_dict()}

    def rewind(self, step: int) -> None:
        """Continue at another step. First waits, for a limited time, until sinks have all steps so far."""
        self._flush_briefly()
        self.reader.rewind(step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`. First waits as `rewind` does.

        Raises:
            ValueError: for a state that does not fit; nothing has changed then.
        """
        self.box.check_state(state["black_box"])
        self._flush_briefly()
        if self.merger is None or self.merger.is_first:
            self.dispatcher.load_state_dict(state)
        self.box.load_state_dict(state["black_box"])
        self.reader.rewind(state["step"])

    def _flush_briefly(self) -> None:
        if self.is_started:
            self.flush(PATIENCE if self.merger is None else RANKS_PATIENCE)

    def _pass_on(self, records: list[StepRecord]) -> None:
        """Pass this rank's steps on as they arrive."""
        if self.merger is None or not self.merger.is_first:
            self._put(records)
        if self.merger is not None:
            self.merger.put(records)

    def _poll(self) -> None:
        """Deliver arrived copies from another thread, unless the training thread uses the reader."""
        if self._draining.acquire(blocking=False):
            try:
                with beside_captures(self._device) as may_poll:
                    if may_poll:
                        self.reader.poll()
            finally:
                self._draining.release()

    def _put(self, records: list[StepRecord]) -> None:
        self.last = records[-1]
        self._steps += len(records)
        self._recorded += sum([record.recorded for record in records])
        self.dispatcher.put(records)

    def _start(self) -> None:
        # from here on there are steps to lose
        _open[self] = None
        subscribe(self.note_signal)
        try:
            self.dispatcher.start(self._describe(self.reader.step))
        except Exception as error:  # noqa: BLE001 training goes on
            self._failures.add("start", error)
        # last: after an interrupt, the next call starts what is not started
        self.is_started = True

    def _report_fault(self, reason: str, message: str) -> None:
        box, ledger, step = self.box, self.dispatcher.ledger, self.reader.step
        self.dispatcher.put_fault(lambda: box.fault(reason, message, step, ledger.findings))


# pipelines to end at exit, in order: all ranks must end them in the same order, or they wait for one another
_open: dict[Pipeline, None] = {}


@atexit.register
def _at_exit() -> None:
    record_only()
    # the exception that the interpreter has printed
    error = getattr(sys, "last_value", None)
    fault = ("exit", "the process ended before the monitor was closed")
    for pipeline in list(_open):
        if not pipeline.is_started:
            pipeline.end()
        elif error is None:
            pipeline.end(fault)
        else:
            pipeline.end_by(error)
