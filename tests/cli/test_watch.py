"""`gradiometer watch`: the frames that it shows while a run is written, and when it exits."""

from __future__ import annotations

import io
import json
import math
import signal
import sys
from dataclasses import replace

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("rich")

from rich.console import Console

from gradiometer.cli import watch
from gradiometer.rules.finding import Finding, Severity
from gradiometer.runs.reader import read_run
from support.findings import finding
from support.synthetic_run import STARTED, edit_info, write_run

CULPRIT = finding(15, message="3 NaN", advice="skip it")
MINOR = Finding("mine", Severity.INFO, 18, 19, "grads", "blocks.1.bias", 1.0, 1.0, "all zeros", "", count=2)


def console(*, terminal=False, width=80, height=24):
    size = {"width": width, "height": height}
    return Console(file=io.StringIO(), force_terminal=terminal, highlight=False, no_color=True, **size)


def text(seen, width=80, height=24):
    terminal = console(width=width)
    terminal.print(watch.render(seen, width, height))
    return terminal.file.getvalue()


@pytest.fixture
def run(tmp_path):
    path = write_run(tmp_path / "run", steps=20, nonfinite_at=15, findings=[MINOR, CULPRIT], close=False)
    return read_run(path)


def test_what_is_seen_of_a_run(run):
    seen = watch.look(run, now=STARTED + 0.1 * 19 + 5)

    assert (seen.step, seen.recorded_step, seen.steps, seen.closed) == (19, 19, 20, False)
    assert (seen.skipped, seen.nonfinite) == (1, 1)
    assert seen.age == pytest.approx(5)
    assert seen.steps_per_second == pytest.approx(10)
    assert seen.findings == [CULPRIT, MINOR]
    assert seen.total_norm == run.record(19).total("norm")
    assert seen.scalars == run.record(19).scalars
    assert seen.report.to_dict() == run.record(19).report().to_dict()
    assert len(seen.loss_curve) == 20
    assert math.isnan(seen.loss_curve[15])


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 15), (120, 40), (40, 10)])
@pytest.mark.parametrize("fault", [None, "exception at step 19: " + 200 * "x"], ids=["well", "fault"])
def test_a_frame_fits_the_terminal(run, width, height, fault):
    lines = text(replace(watch.look(run), fault=fault), width, height).splitlines()

    assert len(lines) < height
    assert max(map(len, lines)) <= width
    assert any("3 NaN" in line for line in lines)
    rows = height - 12 - (fault is not None)
    assert sum(line.startswith("blocks.") for line in lines) == max(0, min(20, rows))


def test_a_frame_tells_what_matters(run):
    shown = text(watch.look(run, now=STARTED + 200))

    assert "being written, last step 3.3 min ago" in shown
    assert "1 skipped  1 not finite" in shown
    assert shown.index("error") < shown.index("info")
    assert "blocks.0.weight" in shown


def test_a_run_without_a_step_yet_is_shown_as_such(tmp_path):
    seen = watch.look(read_run(write_run(tmp_path / "run", steps=0, close=False)))

    assert seen.step is None
    assert "no step is on disk yet" in text(seen)
    assert json.loads(json.dumps(seen.to_dict()))["steps"] == 0


def test_steps_without_tensors_show_the_last_that_has_some(tmp_path):
    seen = watch.look(read_run(write_run(tmp_path / "run", steps=20, every=7)))

    assert (seen.step, seen.recorded_step) == (19, 14)
    assert "tensors of step 14" in text(seen)


def test_the_pace_is_that_of_the_last_attempt(tmp_path):
    write_run(tmp_path / "run", steps=10, close=False)
    run = read_run(write_run(tmp_path / "run", steps=10, first=30))

    seen = watch.look(run)

    assert seen.attempt == 2
    # the two seconds between the attempts are not counted
    assert seen.steps_per_second == pytest.approx(10)
    assert "attempt 2" in text(seen)


def test_the_fault_of_an_earlier_attempt_is_over(run):
    info = json.loads((run.path / "run.json").read_text())
    info["attempts"].append({**info["attempts"][-1], "attempt": 2, "wrote": False})
    edit_info(run.path, attempts=info["attempts"])
    fault = {"reason": "exception", "message": "", "step": 19, "first_nonfinite": None}
    for attempt, told in ((1, False), (2, True)):
        (run.path / "blackbox.json").write_text(json.dumps({**fault, "attempt": attempt, "digest": None}))
        assert (watch.look(read_run(run.path)).fault is not None) == told


def test_a_fault_is_told(run):
    seen = watch.look(run)
    fault = {"reason": "exception", "message": "out of memory", "step": 19, "first_nonfinite": "step 15, w"}
    (run.path / "blackbox.json").write_text(json.dumps(fault | {"digest": None}))
    run.refresh()

    assert watch.look(run).fault == ("exception in step 19: out of memory; first non-finite: step 15, w")
    assert watch.look(run).changes != seen.changes
    assert "out of memory" in text(watch.look(run))


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ([], 5, ""),
        ([3.0], 5, "▁"),
        ([1.0, 1.0], 5, "▁▁"),
        ([0.0, 9.0, 1.0, 1.0], 2, "█▁"),
        ([math.nan, math.inf], 2, "!!"),
        ([0.0, 1.0], 0, ""),
        ([1.0, 10.0, 1000.0, 1e7], 4, "▁▂▄█"),
        ([0.0, 10.0, 1000.0, 1e7], 4, "▁▁▁█"),
    ],
)
def test_curves(values, width, drawn):
    assert watch.sparkline(values, width) == drawn


# following a run


class _Acts:
    """Replaces time.sleep: instead of waiting, performs one action per call, then raises Ctrl-C."""

    def __init__(self, *acts):
        self.acts = list(acts)

    def __call__(self, _seconds):
        if not self.acts:
            raise KeyboardInterrupt
        self.acts.pop(0)()


def test_it_follows_a_run_and_ends_when_that_is_closed(run, monkeypatch, capsys):
    def more(first, **options):
        return lambda: write_run(run.path, steps=5, first=first, **options)

    monkeypatch.setattr(watch.time, "sleep", _Acts(more(20, close=False), lambda: None, more(25)))

    watch.watch(run, console())

    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 19", "step 24", "step 29"]
    assert lines[-1].endswith("closed")


def test_with_follow_it_goes_on_when_the_run_is_closed(tmp_path, monkeypatch, capsys):
    path = write_run(tmp_path / "run", steps=5)
    monkeypatch.setattr(watch.time, "sleep", _Acts(lambda: write_run(path, steps=5, first=5)))

    with pytest.raises(KeyboardInterrupt):
        watch.watch(read_run(path), console(), follow=True)

    assert len(capsys.readouterr().out.splitlines()) == 2


def test_json_is_one_object_a_line(run, monkeypatch, capsys):
    monkeypatch.setattr(watch.time, "sleep", _Acts(lambda: write_run(run.path, steps=5, first=20)))

    watch.watch(run, console(), as_json=True)

    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["step"], second["step"], second["closed"]) == (19, 24, True)
    assert first["findings"][0]["rule"] == "nonfinite"
    assert len(first["worst"]) == 10


def test_a_terminal_shows_one_frame_that_changes(run, monkeypatch):
    monkeypatch.setattr(watch.time, "sleep", _Acts(lambda: write_run(run.path, steps=5, first=20)))
    terminal = console(terminal=True)

    watch.watch(run, terminal)

    shown = terminal.file.getvalue()
    assert shown.index("step 19 ") < shown.index("step 24 ")
    assert "closed" in shown


def test_where_nothing_is_new_nothing_is_read(run, monkeypatch):
    read, shown = [], []
    real_look, real_render = watch.look, watch.render
    monkeypatch.setattr(watch, "look", lambda *args: (read.append(1), real_look(*args))[1])
    monkeypatch.setattr(watch, "render", lambda *args: (shown.append(args[0]), real_render(*args))[1])
    more = _Acts(lambda: None, lambda: None, lambda: write_run(run.path, steps=5, first=20))
    monkeypatch.setattr(watch.time, "sleep", more)
    clock = iter(range(2_000_000_000, 2_000_000_100, 10))
    monkeypatch.setattr(watch.time, "time", lambda: next(clock))

    watch.watch(run, console(terminal=True))

    assert (len(read), len(shown)) == (2, 4)
    # only the age of the last step changes
    assert [seen.age - shown[0].age for seen in shown[:3]] == [0, 10, 20]


def test_a_ctrl_c_that_python_loses_ends_it_at_the_next_look(run, monkeypatch):
    class Lost:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(watch.time, "sleep", lambda _: Lost() and None)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)

    with pytest.raises(KeyboardInterrupt):
        watch.watch(run, console(), follow=True)

    assert signal.getsignal(signal.SIGINT) is before


def test_no_tensor_name_is_taken_for_markup(tmp_path):
    shown = text(watch.look(read_run(write_run(tmp_path / "run", names=["[red]w[/]", "a\tb"], steps=3))))

    assert "[red]w[/]" in shown
    assert "a\\tb" in shown


def test_a_long_name_keeps_its_end(tmp_path):
    names = [f"model.decoder.layers.{i}.self_attention.query_key_value.weight" for i in range(3)]
    shown = text(watch.look(read_run(write_run(tmp_path / "run", names=names, steps=3))), width=60)

    assert "key_value.weight" in shown
    assert max(map(len, shown.splitlines())) <= 60
