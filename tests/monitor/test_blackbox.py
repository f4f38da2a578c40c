"""The black box: how a run ends, the first non-finite tensor, and the signal handler."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch
from torch import nn

from gradiometer.columns import TENSORS
from gradiometer.monitor import signals
from gradiometer.monitor.blackbox import BlackBox
from gradiometer.monitor.failures import reason_of
from gradiometer.monitor.monitor import Monitor
from gradiometer.recorder import KINDS, Catalog
from gradiometer.rules.fault import Fault
from gradiometer.rules.finding import Finding, Severity
from gradiometer.rules.first_nonfinite import FirstNonfinite, amount, first_nonfinite, first_nonfinite_text
from gradiometer.sinks import Console, JSONLines
from support.processes import python
from support.recording import record_of
from support.watching import handled

CATALOG = Catalog.of(
    ("emb.w", "blocks.3.mlp.w1", "head.w"),
    ((10, 4), (2048, 2048), (3,)),
    ("float32",) * 3,
    ("grads", "weights"),
)


def record(step, bad=(), loss=None, values=True, catalog=CATALOG):
    """``bad``: (kind, place, column, count)."""
    tables = {}
    for name in catalog.kinds if values else ():
        columns = torch.zeros(len(catalog.names), TENSORS.width, dtype=torch.float64)
        columns[:, TENSORS.index["numel"]] = torch.tensor([*map(math.prod, catalog.parameters.shapes)])
        for kind, place, column, count in bad:
            if kind == name:
                columns[place, TENSORS.index[column]] = count
        tables[name] = columns
    return record_of(step, catalog, tables, scalars={} if loss is None else {"loss": loss})


class Keeps:
    def __init__(self):
        self.calls, self.faults, self.steps, self.slow = [], [], [], 0.0

    def start(self, info):
        self.info = info
        self.calls.append("start")

    def write(self, records, findings):
        del findings
        time.sleep(self.slow)
        self.steps += [r.step for r in records]
        self.calls.append("write")

    def fault(self, fault):
        self.faults.append(fault)
        self.calls.append("fault")

    def close(self):
        self.calls.append("close")


def steps(monitor, model, count, factor=1.0, **scalars):
    for _ in range(count):
        model.zero_grad()
        (model(torch.ones(2, 3)).square().sum() * factor).backward()
        monitor.record()
        monitor.advance(**scalars)


def made(sink=None):
    model, sink = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), sink or Keeps()
    return model, sink, Monitor(model, rules=(), sinks=[sink])


# the text of an exception


@pytest.mark.parametrize("redact", [False, True])
@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_the_text_of_an_exception_can_be_left_out_everywhere(kind, redact, tmp_path, caplog):
    pytest.importorskip("pyarrow")
    pytest.importorskip("rich")
    sink, screen = Keeps(), io.StringIO()
    sinks = [sink, Console(file=screen), JSONLines(tmp_path / "lines.jsonl")]
    model = nn.Sequential(nn.Linear(3, 1))

    def train():
        with Monitor(model, run_dir=tmp_path / "run", rules=(), sinks=sinks, redact=redact) as monitor:
            steps(monitor, model, 2, factor=math.nan)
            message = "token=SECRET"
            raise kind(message)

    with pytest.raises(kind):
        train()
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    shown = [screen.getvalue(), caplog.text, *[str(fault) for fault in sink.faults]]
    holding = [text for text in shown if "SECRET" in text] + [data for data in files if b"SECRET" in data]
    # no other file has it: the black box, and the line of the fault
    assert len(holding) == (0 if redact else {ValueError: 5, SystemExit: 4}[kind])
    assert kind.__name__ in caplog.text
    assert json.loads((tmp_path / "run" / "blackbox.json").read_text())["message"].startswith(kind.__name__)


# the first non-finite tensor


def test_it_is_named_with_its_counts():
    found = record(1207, [("grads", 1, "n_nan", 12)])
    counts = {"n_nonfinite": 12, "n_nan": 12, "n_inf": 0, "numel": 2048 * 2048}
    assert first_nonfinite(found) == FirstNonfinite(KINDS["grads"], "blocks.3.mlp.w1", **counts)
    assert first_nonfinite_text(found) == "step 1207, blocks.3.mlp.w1.grad, 12 NaN of 4.2 M"


def test_of_gradients_the_last_and_of_weights_the_first_is_where_it_began():
    bad = [("grads", 0, "n_nan", 40), ("grads", 1, "n_neginf", 1), ("grads", 1, "n_posinf", 2)]
    backwards, text = record(3, bad), "step 3, blocks.3.mlp.w1.grad, 3 Inf of 4.2 M (and 1 of 2 others)"
    assert first_nonfinite_text(backwards) == text
    assert backwards.value("n_nonfinite").tolist() == [40, 3, 0]
    bad = [(kind, place, "n_nan", 2) for kind in CATALOG.kinds for place in range(3)]
    assert first_nonfinite_text(record(3, bad)) == "step 3, emb.w, 2 NaN of 40 (and all 2 others)"
    text = "step 3, head.w.grad, 2 NaN and 1 Inf of 3 (and all 2 others)"
    assert first_nonfinite_text(record(3, [*bad[:3], ("grads", 2, "n_posinf", 1)])) == text


def test_it_is_where_a_nan_arises_in_a_real_backward():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])
    hidden = model[2](model[1](model[0](torch.randn(2, 4))))
    # non-finite gradients enter the third layer, and all layers before it
    hidden.register_hook(lambda grad: grad * math.nan)
    model[4](model[3](hidden)).sum().backward()
    seen = []
    with Monitor(model, rules=(), sinks=[seen.append]) as monitor:
        monitor.record()
        monitor.advance()
    assert first_nonfinite_text(seen[0]) == "step 0, 2.bias.grad, 4 NaN of 4 (and 5 of 9 others)"


def test_where_all_is_finite_or_nothing_is_known_there_is_none():
    assert first_nonfinite_text(record(0)) is None
    assert first_nonfinite(record(0, values=False)) is None


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0"), (12, "12"), (9999, "9,999"), (10_000, "10.0 k"), (999_949, "999.9 k"), (999_950, "1.0 M"),
     (4_194_304, "4.2 M"), (7 * 10**9, "7.0 B"), (3 * 10**12, "3000.0 B")],
)  # fmt: skip
def test_amounts(n, text):
    assert amount(n) == text


# the contents of the box


def test_the_first_step_of_the_fault_that_lasts():
    box = BlackBox()
    bad = [("grads", 2, "n_nan", 1)]
    for i in range(200):
        box.see(record(i, bad if i == 3 or i >= 100 else ()))
        if i == 50:
            text = "step 3, head.w.grad, 1 NaN of 3; finite again in step 4"
            assert box.fault("exit", "", 51, ()).first_nonfinite == text
    fault = box.fault("exception", "x", 200, ())
    assert fault.first_nonfinite == "step 100, head.w.grad, 1 NaN of 3"
    # the steps before it are kept, however long ago they were
    assert [r.step for r in fault.last] == [*range(85, 101), *range(136, 200)]


def test_steps_that_were_not_recorded_say_nothing():
    box = BlackBox()
    box.see(record(0, [("grads", 0, "n_posinf", 1)]))
    box.see(record(1, values=False))
    assert box.fault("exit", "", 2, ()).first_nonfinite == "step 0, emb.w.grad, 1 Inf of 40"


def test_only_the_first_bad_loss_is_news_and_a_resumed_run_knows():
    box, news = BlackBox(), []
    for i, loss in enumerate([1.0, None, math.inf, math.nan, 2.0, math.nan]):
        box.see(record(i, loss=loss))
        news.append(box.lost_the_loss)
    assert news == [False, False, True, False, False, False]
    again = BlackBox()
    again.load_state_dict(box.state_dict())
    again.see(record(6, loss=math.nan))
    assert not again.lost_the_loss


def test_a_fault_as_plain_values():
    finding = Finding("dead", Severity.INFO, 1, 2, "grads", "emb.w", 1.0, 1.0, "m", "a")
    last = [record(1, loss=math.nan, values=False), record(2, [("grads", 0, "n_nan", 2)], loss=0.5)]
    values = Fault("exception", "E: x", 3, "step 2, ...", [finding], last).to_dict()
    assert values["findings"] == [finding.to_dict()]
    assert [row["step"] for row in values["last"]] == [1, 2]
    assert "total_norm" not in values["last"][0]
    assert values["last"][1]["n_nonfinite"] == 2
    assert math.isnan(values["last"][1]["total_norm"])
    assert values["last"][1]["scalars"] == {"loss": 0.5}
    json.dumps(values)


# how a run ends


@pytest.mark.parametrize(
    ("error", "reason", "message"),
    [
        (ZeroDivisionError("by zero"), "exception", "ZeroDivisionError: by zero"),
        (KeyboardInterrupt(), "interrupt", "KeyboardInterrupt"),
        (SystemExit(3), "exit", "SystemExit: 3"),
        (GeneratorExit(), "exception", "GeneratorExit: "),
    ],
)
def test_the_end_is_told_with_the_last_steps_and_the_error_goes_on(error, reason, message):
    model, sink, monitor = made()

    def run():
        with monitor:
            steps(monitor, model, 3, loss=1.0)
            steps(monitor, model, 2, factor=math.nan, loss=1.0)
            monitor.record()
            raise error

    with pytest.raises(type(error)) as raised:
        run()
    assert raised.value is error
    assert reason_of(error) == (reason, message)
    (fault,) = sink.faults
    assert (fault.reason, fault.message, fault.step) == (reason, message, 5)
    assert fault.first_nonfinite == "step 3, 1.bias.grad, 1 NaN of 1 (and all 3 others)"
    # the interrupted step is included too
    assert [r.step for r in fault.last] == sink.steps == [0, 1, 2, 3, 4, 5]
    assert sink.calls[-2:] == ["fault", "close"]
    assert monitor.failures == {}


def test_an_error_before_the_first_step_is_told():
    _, sink, monitor = made()
    with pytest.raises(ValueError, match="early"), monitor:
        raise ValueError("early")
    assert sink.calls == ["start", "fault", "close"]
    assert sink.faults[0].step == 0


@pytest.mark.parametrize("code", ["no exit", 0, None])
def test_a_good_end_is_no_fault(code):
    model, sink, monitor = made()
    with suppress(SystemExit), monitor:
        steps(monitor, model, 2)
        if code != "no exit":
            sys.exit(code)
    assert sink.faults == []
    assert sink.calls[-1] == "close"


def test_a_loss_that_is_not_finite_is_told_while_training_goes_on(caplog):
    model, sink, monitor = made()
    with monitor:
        steps(monitor, model, 2, loss=1.0)
        steps(monitor, model, 2, factor=math.nan, loss=torch.tensor(math.nan))
        assert monitor.flush(20)
        assert [fault.reason for fault in sink.faults] == ["non-finite loss"]
        steps(monitor, model, 1, loss=1.0)
    (fault,) = sink.faults
    assert fault.step == 2
    (said,) = [entry.message for entry in caplog.records]
    assert said == f"non-finite loss in step 2: loss nan; first non-finite: {fault.first_nonfinite}"
    assert fault.first_nonfinite == "step 2, 1.bias.grad, 1 NaN of 1 (and all 3 others)"


def test_an_error_while_the_end_is_told_does_not_hide_the_first():
    broken = Keeps()
    broken.close = broken.fault = lambda *_: 1 / 0
    model, _, monitor = made(broken)
    steps(monitor, model, 1)
    with pytest.raises(ValueError, match="the real one"), monitor:
        raise ValueError("the real one")
    assert monitor.failures == {"sink Keeps": 2}


def test_ctrl_c_at_the_end_can_be_followed_by_another_try():
    model, sink, monitor = made()
    steps(monitor, model, 2)
    assert monitor.flush(20)
    sink.slow = 1.0
    steps(monitor, model, 1)
    interrupt = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    # a shell that starts pytest in the background ignores SIGINT
    with handled(signal.SIGINT, signal.default_int_handler):
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            monitor.close()
    assert sink.calls[-1] != "close"
    monitor.close()
    assert sink.calls[-1] == "close"
    assert sink.steps == [0, 1, 2]


# SIGTERM and SIGHUP

main_thread = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="only the main thread sets handlers"
)


@pytest.fixture(params=[signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def number(request):
    """Restore the signal's handler."""
    before = signal.getsignal(request.param)
    yield request.param
    signal.signal(request.param, before)
    signals._subscribers.clear()


def terminate(number):
    os.kill(os.getpid(), number)


@main_thread
def test_it_unwinds_tells_and_puts_the_handler_back(number):
    signal.signal(number, signal.SIG_DFL)
    (model, sink, monitor), (other_model, other_sink, other) = made(), made()
    unwound = []

    def run():
        with monitor, other:
            try:
                steps(monitor, model, 2)
                steps(other, other_model, 1)
                terminate(number)
                steps(monitor, model, 100)
            finally:
                unwound.append(True)

    with pytest.raises(SystemExit) as exit_:
        run()
    assert exit_.value.code == 128 + number
    assert unwound == [True]
    for sink_ in (sink, other_sink):
        assert [fault.reason for fault in sink_.faults] == [number.name]
        assert sink_.calls[-1] == "close"
    assert sink.steps == [0, 1]
    assert signal.getsignal(number) is signal.SIG_DFL


@main_thread
def test_a_handler_that_was_there_is_called_and_may_let_training_go_on(number):
    called = []
    mine = lambda number, _: called.append(number)  # noqa: E731 compared by identity below
    signal.signal(number, mine)
    model, sink, monitor = made()
    with monitor:
        steps(monitor, model, 2)
        terminate(number)
        steps(monitor, model, 3)
        assert monitor.flush(20)
        assert [fault.reason for fault in sink.faults] == [number.name]
    assert called == [number]
    assert sink.steps == [0, 1, 2, 3, 4]
    assert [fault.reason for fault in sink.faults] == [number.name, number.name]
    assert [r.step for r in sink.faults[-1].last] == [0, 1, 2, 3, 4]
    assert signal.getsignal(number) is mine


@main_thread
def test_ignored_stays_ignored_and_a_handler_on_top_stays_there(number):
    model, sink, monitor = made()
    signal.signal(number, signal.SIG_IGN)
    with monitor:
        steps(monitor, model, 1)
        terminate(number)
    assert sink.faults == []
    assert signal.getsignal(number) is signal.SIG_IGN

    signal.signal(number, signal.SIG_DFL)
    model, sink, monitor = made()
    on_top = lambda *_: None  # noqa: E731
    with monitor:
        below = signal.getsignal(number)
        assert below is signals._handlers[number]
        signal.signal(number, on_top)
    assert signal.getsignal(number) is on_top


@main_thread
def test_on_another_thread_no_handler_is_touched(number):
    before = signal.getsignal(number)
    model, sink, monitor = made()

    def run():
        with monitor:
            steps(monitor, model, 2)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert sink.steps == [0, 1]
    assert signal.getsignal(number) == before


SCRIPT = """
import os, signal, sys, torch
from gradiometer.monitor.monitor import Monitor

class Prints:
    def start(self, info): print("start", flush=True)
    def write(self, records, findings): print("write", *[r.step for r in records], flush=True)
    def fault(self, fault): print("fault", fault.reason, "|", fault.message, "|", fault.step, flush=True)
    def close(self): print("close", flush=True)

# nohup ignores it
signal.signal(signal.SIGHUP, signal.SIG_DFL)
model = torch.nn.Linear(2, 1)
monitor = Monitor(model, rules=(), sinks=[Prints()])
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    monitor.record()
    monitor.advance()
monitor.flush()
child = os.fork()
if child == 0:
    # a worker of a data loader: leaves no trace, and SIGTERM ends it as ever
    monitor.record()
    if "sys.exit(4)" in sys.argv[1]:
        sys.exit(0)
    os.kill(os.getpid(), signal.SIGTERM)
assert os.waitpid(child, 0)[1] == (0 if "sys.exit(4)" in sys.argv[1] else signal.SIGTERM)
monitor.record()
exec(sys.argv[1])
"""


LEFT_OPEN = "exit | the process ended before the monitor was closed | 3"
TERMINATED_AT_EXIT = """
import time
said = Prints.fault
def fault(self, fault):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)
    said(self, fault)
Prints.fault = fault
sys.exit(4)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize(
    ("end", "code", "fault"),
    [
        ("1 / 0", 1, "exception | ZeroDivisionError: division by zero | 3"),
        pytest.param("os.kill(os.getpid(), signal.SIGTERM)", 143, "SIGTERM |  | 3", marks=pytest.mark.deep),
        ("os.kill(os.getpid(), signal.SIGHUP)", 129, "SIGHUP |  | 3"),
        pytest.param("sys.exit(4)", 4, LEFT_OPEN, marks=pytest.mark.deep),
        # torchrun ends all ranks like this after one has failed
        (TERMINATED_AT_EXIT, 4, LEFT_OPEN),
    ],
)
def test_the_end_of_a_process_closes_what_was_left_open(end, code, fault):
    done = python("-c", SCRIPT, end)
    assert done.returncode == code, done.stderr
    assert "Exception ignored" not in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "start"
    assert " ".join(line.removeprefix("write ") for line in lines if line.startswith("write")) == "0 1 2 3"
    assert lines[-2:] == [f"fault {fault}", "close"]
