"""Text that reaches a terminal: hostile names and messages through every command, sink, log and report."""

from __future__ import annotations

import copy
import io
import logging
import re
import shutil

import pytest
import torch
from torch import nn

pytest.importorskip("pyarrow")
pytest.importorskip("typer")

import gradiometer as gm
from gradiometer.cli import app as cli
from gradiometer.cli import doctor
from gradiometer.cli.devices import Device
from gradiometer.rules import Finding, Severity
from gradiometer.runs import read_run
from gradiometer.sinks import Console
from gradiometer.terminal import one_line, printable

# clear the screen, set the title, C1's CSI, a bidirectional override, BEL, a return, and a line of its own
HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\x08\rdone\n\x7f\u2028ok"
NAME = f"layer{HOSTILE}.weight"


class Hostile:
    name = f"rule{HOSTILE}"

    def check(self, record):
        message, advice = f"message{HOSTILE}", f"advice{HOSTILE}"
        return [
            Finding(
                self.name, Severity.ERROR, record.step, record.step, "grads", NAME, 1.0, 0.0, message, advice
            )
        ]

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        del state


def assert_harmless(text, *, seen=None):
    """A terminal gets nothing to obey but line ends, and what was passed is still there, escaped."""
    bad = {x for x in text if not x.isprintable() and x != "\n"}
    assert not bad, (bad, text)
    if seen is not None:
        assert f"{seen}\\x1b[2J" in text


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A run with hostile text in all places, and what the console and the log got of it."""
    run = tmp_path_factory.mktemp("runs") / "run\x1b[2J"
    log, screen = io.StringIO(), io.StringIO()
    handler, logger = logging.StreamHandler(log), logging.getLogger("gradiometer")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    weight = nn.Parameter(torch.ones(3))
    options = {"run_dir": run, "rules": [Hostile()], "sinks": [Console(file=screen), fails]}

    def train():
        with gm.Monitor({NAME: weight, "b": nn.Parameter(torch.ones(1))}, **options) as monitor:
            for step in range(3):
                weight.grad = torch.full((3,), float("nan") if step == 2 else 1.0)
                monitor.record()
                monitor.advance(loss=1.0, **{f"scalar{HOSTILE}": 2.0})
            raise RuntimeError(f"failed{HOSTILE}")

    try:
        with pytest.raises(RuntimeError, match="failed"):
            train()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return run, screen.getvalue(), log.getvalue()


def fails(record):
    del record
    raise ValueError(f"sink{HOSTILE}")


def test_the_console_obeys_nothing(hostile):
    assert_harmless(hostile[1], seen="message")
    for seen in ("advice", "failed", "layer"):
        assert f"{seen}\\x1b" in hostile[1]


def test_the_log_obeys_nothing(hostile):
    assert_harmless(hostile[2], seen="sink")
    # the fault at the end of the run, and a traceback at the level DEBUG
    assert "failed\\x1b" in hostile[2]
    assert "Traceback" in hostile[2]


COMMANDS = {
    "show": ["show", "RUN"],
    "show a step": ["show", "RUN", "--step", "0"],
    "a step that is missing": ["show", "RUN", "--step", "77"],
    "a name that is missing": ["show", "RUN", "--name", "\x1b"],
    "watch once": ["watch", "RUN", "--once"],
    "watch": ["watch", "RUN"],
    "diff": ["diff", "RUN", "OTHER"],
    "report": ["report", "RUN"],
    "a run that is missing": ["show", "RUN\x1b[2J"],
    "an option that is missing": ["show", "RUN", "--\x1b[2J"],
    "show as JSON": ["show", "RUN", "--json"],
    "watch as JSON": ["watch", "RUN", "--json"],
    "diff as JSON": ["diff", "RUN", "OTHER", "--json"],
}


NARROW = ("show", "watch once", "diff")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another run, whose tensors and scalars differ from the first step on."""
    run = tmp_path_factory.mktemp("runs") / "other\x9b"
    weights = {name + HOSTILE: nn.Parameter(torch.ones(3)) for name in (NAME, "more")}
    weights[NAME] = nn.Parameter(torch.ones(3))
    weights[NAME].grad = torch.full((3,), 2.0)
    with gm.Monitor(weights, run_dir=run, rules=()) as monitor:
        monitor.record()
        monitor.advance(loss=2.0, **{f"scalar{HOSTILE}": 3.0})
    return run


@pytest.mark.parametrize(
    ("case", "width"), [*((case, None) for case in COMMANDS), *((case, "70") for case in NARROW)]
)
def test_a_command_prints_nothing_that_a_terminal_obeys(case, width, hostile, other, capsys, monkeypatch):
    run = hostile[0]
    monkeypatch.delenv("COLUMNS", raising=False)
    if width is not None:
        monkeypatch.setenv("COLUMNS", width)
    cli.main([x.replace("RUN", str(run)).replace("OTHER", str(other)) for x in COMMANDS[case]])
    out, err = capsys.readouterr()
    assert out + err
    assert_harmless(out + err)
    assert "\\x1b" in out + err or "\\u001b" in out + err


def test_the_doctor_prints_nothing_that_a_terminal_obeys(capsys, monkeypatch):
    problem = doctor.Problem(HOSTILE, HOSTILE)
    device = Device(HOSTILE, HOSTILE, HOSTILE, HOSTILE, None, None, True, None)
    found = doctor.Doctor({"torch": "2"}, [device], HOSTILE, HOSTILE, True, False, {}, HOSTILE, 1, [problem])
    monkeypatch.setattr(doctor, "examine", lambda _: found)
    cli.main(["doctor"])
    assert_harmless(capsys.readouterr().out, seen="")


def test_a_reader_of_a_run_names_what_it_holds_without_obeying_it(hostile, tmp_path):
    run = read_run(hostile[0])
    record = run.record(2)
    for shown in (repr(run), repr(record), str(record.report()), str(record.report().by_module())):
        assert_harmless(shown)
    for finding in run.findings:
        assert_harmless(str(finding), seen="message")
        assert_harmless(repr(finding))
    broken = tmp_path / "broken\x1b[2J"
    shutil.copytree(hostile[0], broken)
    (broken / "run.json").write_text("{")
    with pytest.raises(gm.RunError) as caught:
        read_run(broken)
    assert_harmless(str(caught.value), seen="broken")


def test_reports_and_errors_of_a_model_name_tensors_without_obeying_them():
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.tensor([1.0, float("inf"), 3.0])
    report = gm.check_finite({NAME: weight})
    for shown in (str(report), repr(report), str(report.grads), repr(report.grads[NAME])):
        assert_harmless(shown)
    with pytest.raises(TypeError) as caught:
        gm.collect({NAME: torch.ones(1, dtype=torch.int64)})
    assert_harmless(str(caught.value))
    assert_harmless(str(gm.RankError(f"rank 1: {HOSTILE}")))


def test_printable_keeps_text_and_escapes_the_rest():
    for text in ("blocks.0.weight", "größe·β", "a\\nb", "数据", ""):
        assert printable(text) == text
    assert printable("a\x1b\n\ud800") == "a\\x1b\\n\\ud800"
    assert one_line(copy.copy("two\r\n  lines\x1b")) == "two lines\\x1b"
    every = "".join(map(chr, range(0x3000)))
    assert printable(every).isprintable()
    assert re.fullmatch(r"(\\x[01][0-9a-f]|\\[tnr])+", printable("".join(map(chr, range(32)))))
