"""``kill -9`` at any moment: the run on disk opens, is consistent, and lacks at most the open segment."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from conftest import PROFILE
from gradiometer.runs.reader import RunError, read_run
from support.killing import SEGMENT, loss_of

ROOT = Path(__file__).parents[2]
RUNS, KILLS = 12 if PROFILE == "deep" else 2, 9

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


@pytest.fixture(scope="module")
def victim():
    """Return a function that trains in a process, kills it, and returns what it had reported."""
    script = [sys.executable, str(ROOT / "tests/support/killing.py")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(script, text=True, env=os.environ | {"PYTHONPATH": path}, **pipes) as process:

        def kill(run, first, steps, delay):
            order = {"run": str(run), "first": first, "steps": steps, "delay": delay}
            process.stdin.write(json.dumps(order) + "\n")
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


def test_what_a_killed_process_leaves(victim, tmp_path):
    choose = random.Random(0)  # noqa: S311 the same every time
    began, on_disk = 0, 0
    for i in range(RUNS):
        path = tmp_path / f"run {i}"
        first = 0
        for _ in range(KILLS):
            # some are killed before or at the start, most after some steps
            steps = choose.choice([0, choose.randrange(130), choose.randrange(130)])
            told = victim(path, first, steps, choose.uniform(0.0, 0.02 if steps else 0.25))
            assert told["killed"]
            last = read(path)
            if told["last"] is not None:
                began += 1
                # every full segment of the steps that the sink has accepted
                full = (told["last"] + 1 - first) // SEGMENT * SEGMENT
                assert last is not None
                assert last >= first + full - 1
                on_disk += last + 1 - first
            # continue at the end, or from an earlier checkpoint
            first = 0 if last is None else max(0, last + 1 - choose.choice([0, 0, 3, 40]))
    # most processes were killed while writing
    assert began > RUNS * KILLS / 2
    assert on_disk > 20 * began
