"""The way of a step from the ring on the device to rules and sinks, and how it ends."""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from gradiometer.monitor.blackbox import BlackBox
from gradiometer.monitor.dispatcher import Dispatcher
from gradiometer.monitor.failures import reason_of
from gradiometer.monitor.ring_reader import RingReader
from gradiometer.monitor.sigterm import record_only, subscribe, unsubscribe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from gradiometer.monitor.failures import Failures
    from gradiometer.monitor.rank_merger import RankMerger
    from gradiometer.recorder import Recorder, RunInfo, StepRecord
    from gradiometer.rules import Rule
    from gradiometer.sinks import Sink

__all__ = ["Pipeline"]

# seconds between two copies to the host, where the ring has room for longer
INTERVAL = 0.2
# copies that do not arrive are not added to, before the ring is half full again
UNDER_WAY = 4
# seconds that the end of a run waits for a device, for other ranks and for sinks
PATIENCE = 60.0
# and, in the middle of a run, for other ranks
RANKS_PATIENCE = 5.0


class Pipeline:
    """A ring reader, a dispatcher and a black box, from the first step to the end.

    Only the process that made it uses it. It ends by `end`; or with the process, if that was forgotten.

    Args:
        recorder: whose steps are delivered.
        rules, sinks: to whom.
        queue: steps that may wait for them.
        failures: counts what fails.
        describe: makes the sinks' information of the run, of its first step.
        merger: with other ranks; then rules and sinks get the job's steps on the first rank. On the others
            they get this rank's own, for the sake of its black box.
        rank: that the black box speaks of; None: all, or the only one.
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
    ) -> None:
        self.box = BlackBox(rank)
        self.dispatcher = Dispatcher(rules, sinks, queue, self.box, failures)
        self.merger = merger
        self.last: StepRecord | None = None
        self.reader = RingReader(recorder, self._pass_on, failures)
        # the reader belongs to the training's thread, except where that waits for a rank that ends
        self._draining = threading.RLock()
        self._failures = failures
        self._describe = describe
        self._next = 0.0
        self._signal: str | None = None
        self._pid = os.getpid()
        self._is_started = self._is_ended = False
        self._has_told_signal = self._has_told_end = False
        self._deadline: float | None = None
        if merger is not None:
            # the other ranks wait for answers of this one, whether it takes steps or not
            _open[self] = None
            merger.start(self._put, partial(self._tell, "other rank"), self._poll)

    def is_open(self) -> bool:
        """Tell whether steps are taken; where somebody else's or none any more are offered, say so."""
        if os.getpid() != self._pid:
            self._failures.add("fork", "the monitor was made in the parent process; make it where it is used")
        elif self._is_ended:
            self._failures.add("closed", "advance() after close(): such steps are not kept")
        else:
            return True
        return False

    def take(self, scalars: Mapping[str, Any]) -> None:
        """Take a step that has ended, start a copy if one is due, and deliver what has arrived."""
        if not self._is_started:
            self._start()
        reader = self.reader
        with self._draining:
            reader.take(scalars)
            now = time.monotonic()
            if reader.is_full or (now >= self._next and reader.under_way < UNDER_WAY):
                self._next = now + INTERVAL
                reader.start()
            if reader.under_way:
                reader.poll()
        if self._signal is not None and not self._has_told_signal:
            # a handler of somebody else's let training go on
            self._has_told_signal = True
            self._tell(self._signal, "")

    def flush(self, timeout: float | None) -> bool:
        """Wait until all that was taken has been written; tell whether it has."""
        if self._is_ended or os.getpid() != self._pid:
            return True
        if not self._is_started:
            self._start()
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with self._draining:
            arrived = self.reader.bring(deadline)
        if self.merger is not None:
            # not for ever: of this alone other ranks know nothing
            arrived &= self.merger.wait(min(max(0.0, deadline - time.monotonic()), PATIENCE))
        remaining = None if timeout is None else max(0.0, deadline - time.monotonic())
        return self.dispatcher.wait(remaining) and arrived

    def end(self, fault: tuple[str, str] | None = None) -> None:
        """Bring all to the sinks, with the reason and message of a fault if there is one, and close them."""
        if self._is_ended or os.getpid() != self._pid:
            return
        if self._signal is not None and (fault is None or fault[0] == "exit"):
            fault = (self._signal, "")
        if fault is not None and not self._is_started:
            self._start()
        # what interrupts this may come here once more: it has no more time for that
        if self._deadline is None:
            self._deadline = time.monotonic() + PATIENCE
        # a device that does not answer leaves half of the time to the sinks
        with self._draining:
            if self._is_started and not self.reader.bring(self._deadline - PATIENCE / 2, cut=True):
                self.reader.give_up()
        if self.merger is not None:
            fault = self._end_merger(self.merger, fault, self._deadline)
        if self._is_started:
            if fault is not None and not self._has_told_end:
                self._has_told_end = True
                self._tell(*fault)
            if not self.dispatcher.stop(max(0.0, self._deadline - time.monotonic())):
                self._failures.add("close", f"a sink is not done after {PATIENCE:g} s and is left behind")
        self._is_ended = True
        _open.pop(self, None)
        unsubscribe(self)

    def forget(self) -> None:
        """End it, as nobody can any more; may be called on any thread."""
        if self.merger is None or threading.current_thread() is threading.main_thread():
            self.end()
        else:
            # garbage is collected anywhere: on a thread whose end this waits for, say
            threading.Thread(target=self.end, name="gradiometer end", daemon=True).start()

    def _end_merger(
        self, merger: RankMerger, fault: tuple[str, str] | None, deadline: float
    ) -> tuple[str, str] | None:
        """Leave the other ranks; return the fault, with what is known of theirs."""
        left = max(0.0, deadline - time.monotonic())
        said = None if fault is None or fault[0] == "exit" else f"{fault[0]}, {fault[1]}".removesuffix(", ")
        merger.finish(said, left / 2)
        # a quarter for the sinks
        if not merger.join(left * 3 / 4):
            self._failures.add("ranks", "another rank has not answered at the end, and is not waited for")
        if fault is not None and merger.news is not None and (said or fault[0]) not in merger.news:
            return fault[0], f"{fault[1]} (before that {merger.news})".lstrip()
        return fault

    @property
    def has_begun(self) -> bool:
        """Whether it has taken a step, or been asked to bring what there is."""
        return self._is_started

    def note_signal(self, name: str) -> None:
        """Take note of a signal that ends the run; called by its handler."""
        self._signal = name

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run goes on with. Waits until all steps so far have reached the rules."""
        self._settle()
        return {"step": self.reader.step, "black_box": self.box.state_dict(), **self.dispatcher.state_dict()}

    def rewind(self, step: int) -> None:
        """Go on with another step, when all so far have reached the rules."""
        self._settle()
        self.reader.rewind(step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, at a step to which it was rewound."""
        self.box.load_state_dict(state["black_box"])
        if self.merger is None or self.merger.is_first:
            self.dispatcher.load_state_dict(state)

    def _settle(self) -> None:
        if self._is_started:
            self.flush(PATIENCE if self.merger is None else RANKS_PATIENCE)

    def _pass_on(self, records: list[StepRecord]) -> None:
        """Take this rank's steps as they arrive."""
        if self.merger is None or not self.merger.is_first:
            self._put(records)
        if self.merger is not None:
            self.merger.put(records)

    def _poll(self) -> None:
        """Take what has arrived, from another thread, unless the training's is about to."""
        if self._draining.acquire(blocking=False):
            try:
                self.reader.poll()
            finally:
                self._draining.release()

    def _put(self, records: list[StepRecord]) -> None:
        self.last = records[-1]
        self.dispatcher.put(records)

    def _start(self) -> None:
        self._is_started = True
        # from here on there is something to lose
        _open[self] = None
        subscribe(self)
        try:
            self.dispatcher.start(self._describe(self.reader.step))
        except Exception as error:  # noqa: BLE001 training goes on
            self._failures.add("start", error)

    def _tell(self, reason: str, message: str) -> None:
        box, ledger, step = self.box, self.dispatcher.ledger, self.reader.step
        self.dispatcher.put_fault(lambda: box.fault(reason, message, step, ledger.findings))


# those that have begun and not ended; in order, as on other ranks: else each waits for another one's end
_open: dict[Pipeline, None] = {}


@atexit.register
def _at_exit() -> None:
    record_only()
    # what the interpreter has printed
    error = getattr(sys, "last_value", None)
    fault = ("exit", "the process ended before the monitor was closed")
    for pipeline in list(_open):
        if pipeline.has_begun:
            pipeline.end(fault if error is None else reason_of(error))
        else:
            pipeline.end()
