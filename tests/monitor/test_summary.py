"""Findings are seen: log lines as they begin, one line at the end, and a summary on one screen."""

from __future__ import annotations

import io
import logging
import math

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.rules import Finding, Severity
from gradiometer.sinks import Console
from support.watching import Stateless


class Says(Stateless):
    """A rule that reports what it is given, by step."""

    name = "says"

    def __init__(self, findings):
        self.findings = findings

    def check(self, record):
        return self.findings.get(record.step, [])


def sighting(step, text="too <b>large</b>\x1b[31m", *, rule="says", severity=Severity.WARNING, tensor=None):
    return Finding(rule, severity, step, step, None, tensor, 2.0, 1.0, text, "try less")


def run(findings, steps=6, **options):
    monitor = gm.Monitor(nn.Linear(2, 1), rules=[Says(findings)], **options)
    with monitor:
        for _ in range(steps):
            monitor.advance(loss=1.0, lr=0.5)
            monitor.flush()
    return monitor


def lines(caplog, level=logging.WARNING):
    return [entry.getMessage() for entry in caplog.records if entry.levelno >= level]


def test_a_warning_is_one_line_when_it_begins_and_the_end_counts_all(caplog):
    found = {step: [sighting(step)] for step in range(2, 6)}
    found[4] = [*found[4], sighting(4, "only worth knowing", severity=Severity.INFO, tensor="w")]
    run(found)
    begun, end = lines(caplog)
    assert begun == "step 2: too <b>large</b>\\x1b[31m; try less"
    counts = "findings: 1 warning, 1 info"
    assert end == f"the run ended: 6 steps, 0 of them with tensors; {counts}"


def test_every_count_is_of_the_same_findings(caplog, tmp_path):
    """One cause with two findings that follow from it, and one alone: four findings of three causes."""
    pytest.importorskip("pyarrow")
    pytest.importorskip("typer")
    from gradiometer.cli import ls, watch
    from gradiometer.web import data

    found = [sighting(1, "jump", rule="learning_rate"), sighting(1, "alone", severity=Severity.INFO)]
    found += [sighting(1, f"spike of {rule}", rule=rule) for rule in ("loss_spike", "norm_spike")]
    path = tmp_path / "run"
    monitor = run({1: found}, run_dir=path)
    told = "findings: 3 warnings, 1 info, from 2 causes"
    assert told in str(monitor.summary())
    assert f"; {told}" in monitor._repr_html_()
    assert f"{told}; gradiometer show" in lines(caplog)[-1]
    assert repr(monitor) == f"<Monitor: step 6, 2 tensors, {told}>"
    seen = watch.look(gm.read_run(path))
    assert f"{told}; the first: jump" in watch._line(seen)
    screen = io.StringIO()
    pytest.importorskip("rich.console").Console(file=screen, width=80).print(watch.render(seen, 80, 24))
    assert told in screen.getvalue()
    (listed,) = ls.look(tmp_path)
    assert listed.findings == 3
    values = data.page_of(gm.read_run(path)).values
    assert len(values["findings"]) + values["more_findings"] == 4
    assert sum(one["under"] is None for one in values["findings"]) == 2


def test_a_finding_that_becomes_a_warning_is_logged_then(caplog):
    run({1: [sighting(1, severity=Severity.INFO)], 3: [sighting(3, severity=Severity.ERROR)]})
    assert [entry.levelno for entry in caplog.records] == [logging.ERROR, logging.WARNING]


def test_what_a_known_cause_explains_is_not_logged_again(caplog):
    run({1: [sighting(1, "jump", rule="learning_rate")], 3: [sighting(3, "spike", rule="loss_spike")]})
    assert [line.partition(";")[0] for line in lines(caplog)][:-1] == ["step 1: jump"]


def test_the_log_of_findings_is_bounded(caplog):
    run({2: [sighting(2, rule=f"rule {i}", tensor="w") for i in range(40)]})
    assert len(lines(caplog)) == 22
    assert lines(caplog)[20] == "more findings are not logged: see monitor.summary()"


def test_a_quiet_run_says_nothing_above_info(caplog):
    caplog.set_level(logging.INFO, "gradiometer")
    run({})
    assert lines(caplog) == []
    assert lines(caplog, logging.INFO)[-1].endswith("0 of them with tensors; no findings")


def test_a_sink_that_shows_findings_keeps_the_log_at_info(caplog, tmp_path):
    pytest.importorskip("rich")
    caplog.set_level(logging.INFO, "gradiometer")
    with (tmp_path / "console").open("w") as file:
        run({2: [sighting(2)]}, sinks=[Console(file=file)])
    assert [entry.levelno for entry in caplog.records if "too" in entry.getMessage()] == [logging.INFO]


def test_the_logger_can_be_set(caplog):
    other = logging.getLogger("trainer.gradiometer")
    monitor = gm.Monitor(nn.Linear(2, 1), rules=[Says({0: [sighting(0)]})])
    monitor.logger = other
    with monitor:
        monitor.advance()
    assert {entry.name for entry in caplog.records} == {"trainer.gradiometer"}
    assert monitor.logger is other


def test_a_summary_fits_a_screen_and_escapes_what_it_shows(tmp_path):
    found = {step: [sighting(step, rule=f"rule {step}", tensor="w")] for step in range(9)}
    found[5] += [sighting(5, "info", severity=Severity.INFO)]
    monitor = run(found, steps=12, run_dir=tmp_path / "a run")
    text = str(monitor.summary())
    assert text.splitlines()[0] == "12 steps, 0 with tensors; step 11: loss 1, lr 0.5"
    assert "findings: 9 warnings, 1 info" in text
    assert "and 4 more" in text
    assert len(text.splitlines()) < 24
    assert "\x1b" not in text
    assert text.splitlines()[-1] == f"gradiometer show '{tmp_path / 'a run'}'"
    page = monitor._repr_html_()
    assert "&lt;b&gt;large" in page
    assert "<b>" not in page
    assert "\x1b" not in page
    assert repr(monitor) == "<Monitor: step 12, 2 tensors, findings: 9 warnings, 1 info>"


def test_a_summary_of_a_real_run_has_its_norm():
    model = nn.Linear(2, 1)
    with gm.Monitor(model) as monitor:
        model(torch.tensor([[3.0, 4.0]])).sum().backward()
        monitor.record()
        monitor.advance(loss=math.pi)
        monitor.flush()
        assert "step 0: loss 3.142, gradient norm 5.1" in str(monitor.summary())
