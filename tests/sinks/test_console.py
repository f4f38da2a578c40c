"""The console: its lines on a terminal, in a file, and above a progress bar."""

from __future__ import annotations

import io
import re
import sys
import time
from dataclasses import replace

import pytest
import torch

from gradiometer.columns import Flag
from gradiometer.recorder import Table
from gradiometer.rules.fault import Fault
from gradiometer.rules.finding import Severity
from support.findings import finding
from support.synthetic_run import make_catalog, make_info, make_records

pytest.importorskip("rich")

from gradiometer.sinks import Console
from gradiometer.sinks.protocol import Sink

CATALOG = make_catalog(6)


def records(steps=10, **more):
    return list(make_records(CATALOG, steps, **more))


class Screen(io.StringIO):
    """A file that may claim to be a terminal."""

    def __init__(self, *, tty=False):
        super().__init__()
        self.tty = tty

    def isatty(self):
        return self.tty

    def lines(self):
        return self.getvalue().splitlines()


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def opened(**options):
    """Return a console and the screen that it prints to."""
    screen = Screen()
    return Console(file=screen, **options), screen


def shown(screen):
    return [int(match[1]) for match in re.finditer(r"^step +(\d+)", screen.getvalue(), flags=re.MULTILINE)]


def test_a_line_has_what_matters():
    console, screen = opened()
    assert isinstance(console, Sink)
    console.start(make_info(CATALOG, every=5))
    console.write(records(1), [])
    start, line = screen.lines()
    assert start == "watching Synthetic: grads of 6 tensors, every 5 steps"
    (record,) = records(1)
    assert (
        re.sub(" +", " ", line)
        == f"step 0 loss {record.loss:.3f} lr 1.00e-03 grad norm {record.total():.3f} ok"
    )
    console.write([], [])
    console.close()
    assert screen.lines() == [start, line]


def test_lines_come_at_the_rate_and_the_last_step_at_the_end(clock):
    console, screen = opened(seconds=5)
    for i, record in enumerate(records(100)):
        clock[0] = 100 + i
        console.write([record], [])
    assert shown(screen) == list(range(0, 100, 5))
    console.close()
    assert shown(screen) == [*range(0, 100, 5), 99]
    # 0.1 s per step, by the times of the steps
    assert "100.0 ms/step" in screen.lines()[-1]


def test_a_step_with_gradients_is_preferred_and_one_without_says_so(clock):
    console, screen = opened(seconds=5)
    steps = records(20, every=8)
    console.write(steps[:10], [])
    clock[0] += 5
    console.write(steps[10:14], [])
    assert shown(screen) == [8, 13]
    assert re.search(r"grad norm +- .* not recorded$", screen.lines()[-1])


def test_only_what_is_allowed_is_shown():
    console, screen = opened(show=("train/accuracy", "grads/blocks.0.weight/rms", "weights/total_norm"))
    steps = records(1)
    steps[0].scalars["accuracy"] = 0.5
    console.write(steps, [])
    (line,) = screen.lines()
    rms = steps[0].value("rms")[0].item()
    values = f"accuracy 0.5000 grads/blocks.0.weight/rms {rms:#.4g} weights/total_norm -"
    assert re.sub(" +", " ", line) == f"step 0 {values} ok"
    with pytest.raises(ValueError, match="'loss' is not a key"):
        Console("loss")


def test_flags_are_counted_in_words():
    (record,) = records(1, nonfinite_at=0)
    table = record.tables["grads"]
    assert table.value("n_nan")[0] == 3
    flags = table.flags.clone()
    flags[2:] = torch.tensor([int(Flag.EXPLODING), int(Flag.DEAD | Flag.VANISHING), 0, 0])
    record = replace(record, tables={"grads": Table(table.kind, table.rows, table.values, flags)})
    console, screen = opened()
    console.write([record], [])
    (line,) = screen.lines()
    assert line.endswith("   1 with NaN, 1 with Inf, 1 exploding, 1 dead, 1 vanishing   skipped")
    assert "loss nan" in line
    assert "grad norm nan" in line


def test_a_finding_is_printed_at_once_and_once(clock):
    console, screen = opened(seconds=1e9)
    console.write(records(1), [])
    seen = finding(severity=Severity.WARNING)
    for i in range(3):
        clock[0] += 1
        console.write(records(1, first=4 + i), [replace(seen, last_step=4 + i, count=1 + i)])
    assert screen.lines()[1:] == [
        "warning  step 3: blocks.0.weight.grad: 3 NaN",
        "         try: look at the loss scale",
    ]
    console.write(records(1, first=9), [replace(seen, severity=Severity.ERROR)])
    assert screen.lines()[3].startswith("error    step 3")
    console.close()
    assert screen.lines()[-1] == "findings: 1 error"


def test_of_many_findings_the_worst_are_printed_and_the_rest_counted():
    console, screen = opened(most=2, severity=Severity.WARNING)
    many = [finding(3, f"w{i}", Severity.WARNING, "dead") for i in range(100)]
    console.write([], [finding(1, "x", Severity.INFO), *many, finding(5, "y")])
    lines = screen.lines()
    assert [line.split()[0] for line in lines] == ["error", "try:", "warning", "and"]
    assert lines[-1].strip() == "and 99 more: 99 dead"
    console.close()
    assert screen.lines()[-1] == "findings: 1 error, 100 warnings"


def test_a_fault_is_a_panel_and_an_ordinary_end_is_not():
    console, screen = opened()
    steps = records(20, nonfinite_at=19)
    where = "step 19, blocks.0.weight.grad, 3 NaN of 4096"
    fault = Fault("exception", "ValueError: [bold]x[/bold]", 20, where, [finding(19)], steps)
    console.fault(replace(fault, reason="exit"))
    assert screen.getvalue() == ""
    console.fault(fault)
    text = screen.getvalue()
    assert len({len(line) for line in screen.lines()}) == 1  # all lines of a frame have the same width
    for part in (
        "before step 20",
        "exception  ValueError: [bold]x[/bold]",
        f"first non-finite: {where}",
        "error",
    ):
        assert part in text
    assert re.search(r"19 +nan +nan +5 +2 ", text)
    console.fault(Fault("SIGTERM", "", 0, None, [], []))
    assert "SIGTERM" in screen.getvalue()


def test_a_terminal_gets_colours_and_a_file_none(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for tty in (True, False):
        screen = Screen(tty=tty)
        console = Console(file=screen)
        console.write(records(1), [finding()])
        console.fault(Fault("exception", "", 1, None, [], records(1)))
        assert ("\x1b[" in screen.getvalue()) is tty


def test_names_are_no_markup_and_a_narrow_encoding_is_no_error():
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=screen).write([], [finding(tensor="[red]ü[/red]\udc80")])
    screen.seek(0)
    assert r"[red]\xfc[/red]\udc80" in screen.read()


def test_it_writes_to_what_stderr_is_then(monkeypatch):
    console = Console()
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    console.write(records(1), [])
    assert shown(screen) == [0]
    monkeypatch.setattr(sys, "stderr", None)  # as under pythonw
    console.write([], [finding()])


def test_lines_stay_above_a_bar_of_tqdm(monkeypatch):
    tqdm = pytest.importorskip("tqdm")
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    with tqdm.tqdm(total=10, file=screen, mininterval=0, ncols=40) as bar:
        bar.update(3)
        Console().write(records(1), [])
        bar.update(3)
    rows = [row.split("\r")[-1] for row in screen.getvalue().split("\n")]
    # the bar was cleared before the line, and its row is empty
    assert rows[0].startswith("step")
    assert rows[0].rstrip().endswith("ok")
    assert "6/10" in rows[1]


def test_lines_stay_above_a_bar_of_rich(monkeypatch):
    from rich.console import Console as RichConsole
    from rich.progress import Progress

    monkeypatch.setenv("TERM", "xterm-256color")
    screen = Screen(tty=True)
    monkeypatch.setattr(sys, "stderr", screen)
    live = RichConsole(file=screen, force_terminal=True, width=100)
    with Progress(console=live, auto_refresh=False) as progress:
        progress.add_task("training", total=10, completed=3)
        progress.refresh()
        before = len(screen.getvalue())
        Console().write(records(1), [])
        after = screen.getvalue()[before:]
    plain = re.sub(r"\x1b\[[0-9;]*m", "", after)
    line, bar = plain.index("step "), plain.index("training")
    assert line < bar  # and the bar is drawn again below
    assert "\x1b[2K" in plain[:line]  # after its row was cleared


def test_a_severity_that_is_not_one_is_refused():
    said = r"severity='warning' is not a severity; pass one of gm\.Severity\.INFO, "
    with pytest.raises(TypeError, match=said):
        Console(severity="warning")
