"""``kill -9`` at any moment: the run on disk opens, is consistent, and has every step that was written."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys

import pytest

pytest.importorskip("pyarrow")

from conftest import PROFILE
from gradiometer.runs.reader import RunError, read_run
from gradiometer.runs.verify import verify
from support.killing import loss_of
from support.processes import PATH

DEEP = PROFILE == "deep"
RUNS, KILLS = 12 if DEEP else 5, 12
# kills of trainings with the defaults; for how many seconds they train; and how many seconds before the kill
# a step must have left the device to be on disk. By default the machine may be busy and its disk slow, so
# these seconds are more, and nothing is synced
DEFAULTS, SECONDS, LOST = (30, (1.0, 14.0), 0.5) if DEEP else (3, (3.0, 5.0), 2.0)
RATES = (5, 500) if DEEP else (5, 100)

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


@pytest.fixture(scope="module")
def victim():
    """Return a function that trains in a process, kills it, and returns what it had reported."""
    script = [sys.executable, "-m", "support.killing"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(script, text=True, env=os.environ | PATH, **pipes) as process:

        def kill(run, **order):
            process.stdin.write(json.dumps({"run": str(run)} | order) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield kill
        process.stdin.close()


def read(path):
    """Return the last step on disk, after reading every row; None if the run had not begun."""
    try:
        run = read_run(path)
    except RunError:
        # killed before the first file was written
        assert not (path / "run.json").exists()
        return None
    steps = run.steps.to_pydict()
    count = len(steps["step"])
    assert steps["step"] == list(range(count))
    assert steps["loss"] == [loss_of(step) for step in range(count)]
    assert all(steps["recorded"])
    tensors = run.tensors().to_pydict()
    assert tensors["step"] == list(range(count))
    assert tensors["abs_max"] == [float(step) for step in range(count)]
    assert run.findings == []
    assert run.blackbox is None
    if count:
        assert run.record(count - 1).total("sum") == 2.0 * (count - 1)
    return count - 1


def test_what_a_killed_process_leaves(victim, tmp_path, capsys):
    choose = random.Random(0)  # noqa: S311 the same every time
    began, on_disk, journals = 0, 0, 0
    for i in range(RUNS):
        path = tmp_path / f"run {i}"
        first = 0
        for _ in range(KILLS):
            # some are killed before or at the start, most after some steps
            steps = choose.choice([0, choose.randrange(130), choose.randrange(130)])
            told = victim(path, first=first, steps=steps, delay=choose.uniform(0.0, 0.02 if steps else 0.25))
            assert told["killed"]
            last = read(path)
            if told["last"] is not None:
                began += 1
                # every step that the sink has accepted
                assert last is not None
                assert last >= told["last"]
                on_disk += last + 1 - first
            assert last is None or verify(path).whole
            journals += bool(list(path.glob("journal-*")))
            # continue at the end, or from an earlier checkpoint
            first = 0 if last is None else max(0, last + 1 - choose.choice([0, 0, 3, 40]))
    # most processes were killed while writing
    assert began > RUNS * KILLS / 2
    assert on_disk > 20 * began
    assert journals
    with capsys.disabled():
        print(f"\n{RUNS * KILLS} kills, {journals} of them left a journal: no step was lost")  # noqa: T201


@pytest.mark.parametrize("rate", RATES)
def test_with_the_defaults_at_most_half_a_second_of_steps_that_have_left_the_device_is_lost(
    victim, tmp_path, capsys, rate
):
    choose = random.Random(rate)  # noqa: S311 the same every time
    lost = []
    for i in range(DEFAULTS):
        path = tmp_path / f"run {i}"
        # a segment is written after 2 s at 500 steps/s, and after 10 s at 5
        told = victim(path, delay=choose.uniform(*SECONDS), rate=rate, lost=LOST, fsync=DEEP)
        run = read_run(path)
        steps = run.steps["step"].to_pylist()
        assert steps == list(range(len(steps)))
        assert verify(path).whole
        assert run.tensors().num_rows == 12 * len(steps)
        lost.append(told["last"] + 1 - len(steps))
        assert len(steps) > told["left"], f"{told}, {len(steps)} steps on disk"
    with capsys.disabled():
        print(f"\n{DEFAULTS} kills at {rate} steps/s: at most {max(lost)} steps were lost")  # noqa: T201


@pytest.mark.parametrize("end", ["close", "exception", "sys.exit", "end of the process", "SIGTERM", "SIGHUP"])
def test_however_else_a_process_ends_the_run_is_whole_and_closed(victim, tmp_path, end):
    path = tmp_path / "run"
    status = victim(path, end=end)["status"]
    codes = {"exception": 1, "sys.exit": 3, "SIGTERM": 128 + signal.SIGTERM, "SIGHUP": 128 + signal.SIGHUP}
    assert os.waitstatus_to_exitcode(status) == codes.get(end, 0)
    run = read_run(path)
    assert run.steps["step"].to_pylist() == list(range(10))
    assert run.tensors(names="weight").num_rows == 10
    bad = [(found.rule, found.first_step) for found in run.findings]
    assert ("nonfinite", 9) in bad
    assert run.info["closed"]
    assert not list(path.glob("journal-*"))
    assert verify(path).whole
    reasons = {"exception": "exception", "sys.exit": "exit", "end of the process": "exit"}
    assert (None if end == "close" else reasons.get(end, end)) == (run.blackbox and run.blackbox["reason"])
