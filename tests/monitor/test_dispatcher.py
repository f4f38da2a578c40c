"""The background threads: order, bounded queues, and failing or hanging rules and sinks."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time

import pytest
import torch

from gradiometer.columns import DEFAULT_THRESHOLDS, TENSORS
from gradiometer.monitor.blackbox import BlackBox
from gradiometer.monitor.dispatcher import Dispatcher
from gradiometer.monitor.failures import Failures
from gradiometer.recorder import Catalog, RunInfo
from gradiometer.rules.finding import Finding, Severity
from support.recording import record_of
from support.watching import handled

CATALOG = Catalog.of(("w",), ((2,),), ("float32",))
INFO = RunInfo(CATALOG, DEFAULT_THRESHOLDS, 1, 8, "Made", 0.0, 0, {}, "cpu")


def record(step, loss=1.0, n_nan=0):
    columns = torch.zeros(1, TENSORS.width, dtype=torch.float64)
    columns[0, TENSORS.index["numel"]], columns[0, TENSORS.index["n_nan"]] = 2, n_nan
    return record_of(step, CATALOG, {"grads": columns}, {"loss": loss})


class Log:
    """A sink that keeps its input, and can be made to block or fail."""

    def __init__(self, fails=(), error=None):
        self.calls, self.steps, self.findings, self.faults = [], [], [], []
        self.thread = None
        self.go = threading.Event()
        self.go.set()
        self.entered = threading.Event()
        self.fails, self.error = fails, error or OSError(28, "No space left on device")

    def _called(self, name):
        self.calls.append(name)
        self.thread = threading.current_thread().name
        if name in self.fails:
            raise self.error

    def start(self, info):
        assert info is INFO
        self._called("start")

    def write(self, records, findings):
        self.entered.set()
        assert self.go.wait(60)
        self._called("write")
        self.steps += [r.step for r in records]
        self.findings += findings

    def fault(self, fault):
        self._called("fault")
        self.faults.append(fault)

    def close(self):
        self._called("close")


class Odd:
    """A rule with a finding for odd steps."""

    name = "odd"

    def __init__(self):
        self.seen = []

    def check(self, record):
        self.seen.append(record.step)
        if record.step % 2:
            yield Finding("odd", Severity.INFO, record.step, record.step, None, None, 1.0, 0.0, "odd", "even")

    def state_dict(self):
        return {"seen": list(self.seen)}

    def load_state_dict(self, state):
        self.seen = list(state["seen"])


class Others(Odd):
    """A rule with a different finding in every step."""

    def check(self, record):
        step = record.step
        self.seen.append(step)
        yield Finding(f"own {step}", Severity.INFO, step, step, None, None, 1.0, 0.0, "", "")


class Slow(Others):
    """A rule that waits until it may go on."""

    def __init__(self):
        super().__init__()
        self.entered, self.go = threading.Event(), threading.Event()

    def check(self, record):
        self.entered.set()
        assert self.go.wait(60)
        yield from super().check(record)


class Broken(Odd):
    name = "broken"

    def check(self, record):
        raise ZeroDivisionError(f"step {record.step}")


def make(*sinks, rules=(), limit=100, box=None, failures=None):
    dispatcher = Dispatcher(rules, sinks, limit, box or BlackBox(), failures or Failures())
    dispatcher.start(INFO)
    return dispatcher


def fault(reason="exception", message="", step=0):
    return BlackBox().fault(reason, message, step, ())


@pytest.fixture
def failures():
    return Failures()


def test_steps_pass_rules_and_sinks_in_order_on_a_thread_of_its_own(failures):
    log, rule = Log(), Odd()
    dispatcher = make(log, rules=[rule], failures=failures)
    for step in range(0, 30, 3):
        dispatcher.put([record(step), record(step + 1), record(step + 2)])
    assert dispatcher.wait(60)
    assert log.steps == rule.seen == list(range(30))
    assert dispatcher.stop(60)
    assert log.calls[0] == "start"
    assert log.calls[-1] == "close"
    assert log.calls.count("close") == 1
    assert log.thread == "gradiometer sink Log"
    (finding,) = dispatcher.ledger.findings
    assert (finding.first_step, finding.last_step, finding.count) == (1, 29, 15)
    assert log.findings[-1] == finding
    assert failures.counts == {}


class Record(Log):
    """A second sink with another name."""


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def put_each(dispatcher, good, steps):
    """Put one step after the other, each after an unblocked sink has written the one before."""
    for step in steps:
        dispatcher.put([record(step)])
        until(lambda: good.steps[-1:] == [step])  # noqa: B023 called at once


def blocked(**options):
    """Return a sink that hangs in its first step, one that does not, and their dispatcher."""
    slow, good = Log(), Record()
    slow.go.clear()
    dispatcher = make(slow, good, **options)
    put_each(dispatcher, good, [0])
    assert slow.entered.wait(60)
    return slow, good, dispatcher


TOO_SLOW = "{} cannot keep up: more than 10 steps are waiting, so the oldest are dropped"


def test_a_slow_sink_holds_up_nobody_and_loses_its_own_oldest_steps(caplog, failures):
    slow, good, dispatcher = blocked(limit=10, failures=failures)
    put_each(dispatcher, good, range(1, 40))
    assert good.steps == list(range(40))
    assert dispatcher.dropped == 29
    assert failures.counts == {"queue of sink Log": 29}
    assert caplog.text.count(TOO_SLOW.format("sink Log")) == 1
    assert not dispatcher.wait(0.01)
    slow.go.set()
    assert dispatcher.wait(60)
    assert slow.steps == [0, *range(30, 40)]
    assert dispatcher.stop(60)


def test_of_a_slow_sink_all_that_waits_is_written_at_the_end():
    slow, good, dispatcher = blocked(limit=4)
    put_each(dispatcher, good, range(1, 40))
    threading.Timer(0.1, slow.go.set).start()
    assert dispatcher.stop(60)
    assert good.steps == list(range(40))
    assert slow.steps[-4:] == [36, 37, 38, 39]
    assert len(slow.steps) + dispatcher.dropped == 40
    assert slow.calls[-1] == good.calls[-1] == "close"


def test_a_slow_rule_holds_up_nobody_and_the_oldest_steps_go(caplog, failures):
    rule = Slow()
    dispatcher = make(rules=[rule], limit=10, failures=failures)
    dispatcher.put([record(0)])
    assert rule.entered.wait(60)
    for step in range(1, 40):
        dispatcher.put([record(step)])
    assert dispatcher.dropped == 29
    assert not dispatcher.wait(0.01)
    rule.go.set()
    assert dispatcher.stop(60)
    assert rule.seen == [0, *range(30, 40)]
    assert TOO_SLOW.format("the rules") in caplog.text
    assert failures.counts == {"queue of the rules": 29}


def test_a_sink_that_asks_for_steps_before_the_rules_gets_their_findings_later():
    early, late, rule = Log(), Log(), Slow()
    early.before_rules = True
    dispatcher = make(early, late, rules=[rule])
    dispatcher.put([record(step) for step in range(10)])
    assert rule.entered.wait(60)
    dispatcher.put([record(step) for step in range(10, 30)])
    dispatcher.put_fault(fault)
    until(lambda: len(early.steps) == 30)
    assert (early.findings, late.steps) == ([], [])
    rule.go.set()
    assert dispatcher.stop(60)
    assert early.steps == late.steps == list(range(30))
    assert [found.first_step for found in early.findings] == list(range(30))
    assert late.findings == early.findings
    # the fault follows the findings
    assert early.calls[-2:] == late.calls[-2:] == ["fault", "close"]


def test_what_waits_for_a_sink_is_not_taken_for_written_when_later_steps_push_others_out():
    slow, good, dispatcher = blocked(limit=2)
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(dispatcher.wait(0.3)))
    waiting.start()
    put_each(dispatcher, good, range(1, 10))
    waiting.join(60)
    assert answers == [False]
    slow.go.set()
    assert dispatcher.stop(60)


@pytest.mark.parametrize("where", ["start", "write", "fault", "close"])
def test_a_sink_that_hangs_for_ever_costs_the_others_nothing(where):
    entered, forever = threading.Event(), threading.Event()

    class Hangs(Log):
        def _called(self, name):
            super()._called(name)
            if name == where:
                entered.set()
                forever.wait(600)

    hangs, good = Hangs(), Record()
    dispatcher = make(hangs, good, limit=4)
    put_each(dispatcher, good, range(40))
    dispatcher.put_fault(fault)
    began = time.perf_counter()
    assert not dispatcher.stop(0.5)
    # far below the time for which it hangs
    assert time.perf_counter() - began < 60
    assert entered.is_set()
    until(lambda: good.calls[-1] == "close")
    assert good.steps == list(range(40))
    assert [fault.message for fault in good.faults] == [""]
    forever.set()
    assert dispatcher.stop(60)
    assert hangs.calls[-1] == "close"


def test_an_interrupted_stop_can_be_called_again():
    slow, good, dispatcher = blocked()
    interrupt = threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))

    def stop():
        interrupt.start()
        dispatcher.stop(60)

    with handled(signal.SIGINT, signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        stop()
    assert not dispatcher.stop(0.01)
    slow.go.set()
    assert dispatcher.stop(60)
    assert slow.calls == good.calls == ["start", "write", "close"]


def test_findings_and_faults_outlive_the_steps_that_are_dropped():
    slow, good, dispatcher = blocked(rules=[Odd(), Others()], limit=2)
    put_each(dispatcher, good, range(1, 10))
    dispatcher.put_fault(lambda: fault(message="first"))
    until(lambda: good.faults)
    put_each(dispatcher, good, range(10, 20))
    slow.go.set()
    assert dispatcher.stop(60)
    assert slow.steps == [0, 18, 19]
    # each once, in its latest form
    assert sorted(slow.findings, key=str) == sorted(dispatcher.ledger.findings, key=str)
    assert len(slow.findings) == 1 + 20
    assert slow.calls == ["start", "write", "fault", "write", "close"]
    assert [fault.message for fault in slow.faults] == ["first"]


def test_more_at_once_than_may_wait():
    log = Log()
    dispatcher = make(log, limit=4)
    dispatcher.put([record(step) for step in range(100)])
    assert dispatcher.stop(60)
    assert dispatcher.dropped + len(log.steps) == 100
    assert log.steps[-4:] == [96, 97, 98, 99]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SystemExit(3), KeyboardInterrupt()]
)
def test_a_failing_sink_is_said_once_and_counted_and_the_others_go_on(caplog, error, failures):
    bad, good = Log(fails={"write", "fault", "close"}, error=error), Log()
    dispatcher = make(bad, good, failures=failures)
    for step in range(5):
        dispatcher.put([record(step)])
        assert dispatcher.wait(60)
    dispatcher.put_fault(fault)
    assert dispatcher.stop(60)
    assert good.steps == [0, 1, 2, 3, 4]
    assert len(good.faults) == 1
    assert bad.calls == ["start", *["write"] * 5, "fault", "close"]
    assert failures.counts == {"sink Log": 7}
    assert [r.levelno for r in caplog.records if "sink Log" in r.message] == [logging.WARNING]


def test_a_sink_that_cannot_start_is_left_out(failures):
    bad, good = Log(fails={"start"}), Log()
    dispatcher = make(good, bad, failures=failures)
    dispatcher.put([record(0)])
    assert dispatcher.stop(60)
    # the second sink of the same name gets a number
    assert failures.counts == {"sink Log 2": 1}
    assert bad.calls == ["start"]
    assert good.steps == [0]


def test_a_failing_rule_is_counted_and_the_others_go_on(failures):
    rule, log = Odd(), Log()
    dispatcher = make(log, rules=[Broken(), rule], failures=failures)
    dispatcher.put([record(step) for step in range(6)])
    assert dispatcher.stop(60)
    assert failures.counts == {"rule broken": 6}
    assert rule.seen == log.steps == list(range(6))


def test_the_first_loss_that_is_not_finite_is_told_once_after_its_step_was_written():
    log = Log()
    dispatcher = make(log)
    dispatcher.put([record(0), record(1), record(2, math.nan, n_nan=1), record(3)])
    assert dispatcher.wait(60)
    dispatcher.put([record(4, math.inf)])
    assert dispatcher.stop(60)
    assert log.calls == ["start", "write", "fault", "write", "close"]
    (fault,) = log.faults
    assert (fault.reason, fault.message, fault.step) == ("non-finite loss", "loss nan", 2)
    # as it was at that step
    assert fault.first_nonfinite == "step 2, w.grad, 1 NaN of 2"
    assert [r.step for r in fault.last] == [0, 1, 2]


def test_a_fault_comes_after_all_steps_before_it():
    log = Log()
    log.go.clear()
    box = BlackBox()
    dispatcher = make(log, limit=1000, box=box)
    dispatcher.put([record(step) for step in range(300)])
    assert log.entered.wait(60)
    dispatcher.put_fault(lambda: box.fault("exception", "x", 300, ()))
    log.go.set()
    assert dispatcher.stop(60)
    assert log.calls[-2:] == ["fault", "close"]
    assert log.faults[0].last[-1].step == 299


def test_a_sink_may_ask_to_wait_without_waiting_for_itself():
    answers = []

    class Asking(Log):
        def write(self, records, findings):
            super().write(records, findings)
            answers.append(dispatcher.wait())

    dispatcher = make(Asking())
    dispatcher.put([record(0)])
    assert dispatcher.stop(60)
    assert answers == [False]


def test_what_rules_remember_and_found_goes_on_in_another():
    dispatcher = make(rules=[Odd(), Odd()])
    dispatcher.put([record(step) for step in range(4)])
    assert dispatcher.wait(60)
    state = dispatcher.state_dict()
    dispatcher.stop(60)
    rules = [Odd(), Broken(), Odd()]
    again = Dispatcher(rules, (), 10, BlackBox(), Failures())
    again.load_state_dict(state)
    assert [rule.seen for rule in rules] == [[0, 1, 2, 3], [], [0, 1, 2, 3]]
    assert again.ledger.findings == dispatcher.ledger.findings
    # and another occurrence extends the finding
    again.start(INFO)
    again.put([record(5)])
    assert again.stop(60)
    (finding,) = again.ledger.findings
    assert (finding.first_step, finding.last_step) == (1, 5)


def test_failures_are_logged_once_of_a_kind(caplog):
    failures = Failures()
    for _ in range(3):
        failures.add("record", ValueError("no"))
    failures.add("sink", "gone", times=4)
    assert failures.counts == {"record": 3, "sink": 4}
    once = "(logged once, later ones only counted; training continues)"
    assert [r.message for r in caplog.records] == [f"record: ValueError: no {once}", f"sink: gone {once}"]


def test_no_step_and_no_sink_that_hangs_hold_up_what_another_sink_writes_by_the_clock(monkeypatch):
    monkeypatch.setattr("gradiometer.monitor.sink_thread._TICK", 0.01)
    slow, ticks = Log(), []

    class Clock(Log):
        def tick(self):
            ticks.append(len(self.steps))

    slow.go.clear()
    dispatcher = make(slow, Clock())
    until(lambda: len(ticks) > 2)
    assert ticks[:3] == [0, 0, 0]
    dispatcher.put([record(0)])
    assert slow.entered.wait(60)
    until(lambda: 1 in ticks)
    slow.go.set()
    assert dispatcher.stop(60)


def test_a_rule_without_a_name_and_an_error_without_a_text_end_nothing(caplog, failures):
    class NoTextError(Exception):
        def __str__(self):
            raise ValueError

    class Nameless:
        def check(self, _):
            raise NoTextError

        def state_dict(self):
            return {}

    log = Log()
    dispatcher = make(log, rules=[Nameless()], failures=failures)
    dispatcher.put([record(0), record(1)])
    assert dispatcher.wait(60)
    assert dispatcher.state_dict()["rules"] == [("Nameless", {})]
    assert dispatcher.stop(60)
    assert log.steps == [0, 1]
    assert failures.counts == {"rule Nameless": 2}
    assert "rule Nameless: NoTextError" in caplog.text


def test_whatever_else_fails_is_counted_and_the_thread_goes_on(monkeypatch, failures):
    log = Log()
    dispatcher = make(log, failures=failures)
    with monkeypatch.context() as patch:
        patch.setattr(dispatcher, "_check", lambda _: 1 / 0)
        dispatcher.put([record(0)])
        assert dispatcher.wait(60)
    assert failures.counts == {"the rules": 1}
    dispatcher.put([record(1)])
    assert dispatcher.stop(60)
    assert log.steps == [1]


@pytest.mark.parametrize(
    ("reason", "said"),
    [("exception", 1), ("interrupt", 1), ("SIGTERM", 1), ("non-finite loss", 1), ("exit", 0)],
)
def test_an_abnormal_end_is_one_warning_even_where_all_is_finite(caplog, reason, said):
    dispatcher = make(Log(), Record())
    dispatcher.put_fault(lambda: fault(reason, "why", 7))
    assert dispatcher.stop(60)
    lines = [(entry.levelno, entry.message) for entry in caplog.records]
    assert lines == [(logging.WARNING, f"{reason} in step 7: why")] * said
