"""`gradiometer ls`, and `show` on a folder that holds runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("typer")

from gradiometer.cli import Exit, ls
from gradiometer.rules.finding import Finding, Severity
from support.processes import PATH, python
from support.synthetic_run import STARTED, make_catalog, open_run, write_run

SPIKE = Finding("norm_spike", Severity.WARNING, 2, 2, "grads", "blocks.0.weight", 3.0, 0.0, "x", "y")


@pytest.fixture
def runs(tmp_path):
    write_run(tmp_path / "a", steps=20, tensors=2, findings=[SPIKE])
    write_run(tmp_path / "twice", steps=20, tensors=4)
    write_run(tmp_path / "twice", steps=5, tensors=2)
    write_run(tmp_path / "deep" / "killed", steps=10, tensors=2, close=False)
    write_run(tmp_path / "damaged", steps=5, tensors=2)
    (tmp_path / "damaged" / "run.json").write_text("{")
    write_run(tmp_path / ".hidden", steps=5, tensors=2)
    # of another program
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text('{"format": "other"}')
    return tmp_path


def test_each_run_has_its_state(runs):
    found = {x.run: x for x in ls.look(runs, now=STARTED + 100.0)}

    assert {name: x.state for name, x in found.items()} == {
        "a": "closed",
        "twice": "closed",
        str(Path("deep", "killed")): "killed",
        "damaged": "damaged",
    }
    a = found["a"]
    assert (a.attempts, a.steps, a.step, a.model, a.findings) == (1, 20, 19, "Synthetic", 1)
    assert a.age == pytest.approx(100 - 1.9)
    # the second one began at step 0 too
    assert (found["twice"].attempts, found["twice"].steps) == (2, 5)
    assert "run.json cannot be read" in found["damaged"].note


def test_the_latest_run_is_the_first(tmp_path):
    for name, steps in (("old", 5), ("new", 50), ("middle", 20)):
        write_run(tmp_path / name, steps=steps, tensors=2)

    assert [x.run for x in ls.look(tmp_path)] == ["new", "middle", "old"]


def test_a_run_that_another_process_writes_is_running(tmp_path):
    code = """
import sys
from support.synthetic_run import make_catalog, open_run
sink = open_run(sys.argv[1], make_catalog(2))
print("started", flush=True)
sys.stdin.read()
"""
    command, pipe = [sys.executable, "-c", code, tmp_path / "run"], subprocess.PIPE
    with subprocess.Popen(command, env=os.environ | PATH, stdin=pipe, stdout=pipe) as writer:
        assert writer.stdout.readline() == b"started\n"
        assert ls.look(tmp_path)[0].state == "running"
        writer.kill()
    assert ls.look(tmp_path)[0].state == "killed"


def test_a_run_of_this_process_is_running_and_stays_locked(tmp_path):
    sink = open_run(tmp_path / "run", make_catalog(2))
    assert ls.look(tmp_path)[0].state == "running"
    code = "import sys, pathlib, gradiometer.runs as runs; print(runs.is_taken(pathlib.Path(sys.argv[1])))"
    assert python("-c", code, sink.path).stdout == "True\n"
    sink.close()
    assert ls.look(tmp_path)[0].state == "closed"


@pytest.mark.parametrize("command", ["ls", "show"])
def test_a_folder_of_runs_is_listed(runs, call, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = call(command, runs)
    assert code == Exit.OK
    assert [line.split()[0] for line in out.splitlines()[1:]] == [x.run for x in ls.look(runs)]

    found = json.loads(call(command, runs, "--json")[1])
    assert found["folder"] == str(runs)
    keys = "run state attempts steps step age model findings note"
    assert set(found["runs"][0]) == set(keys.split())


def test_a_folder_without_runs_and_one_that_is_not_there(tmp_path, call, refused):
    code, out, _ = call("ls", tmp_path)
    assert code == Exit.OK
    assert out.startswith("no runs in or below ")
    assert "there is no run.json in it" in refused("show", tmp_path)
    assert "is not a folder; pass one that has runs" in refused("ls", tmp_path / "none")


@pytest.mark.parametrize("command", ["watch", "report", "verify"])
def test_other_commands_name_a_run_of_the_folder(tmp_path, refused, command):
    path = write_run(tmp_path / "a", steps=5, tensors=2)

    said = f"there is no run.json in it; pass one of the runs in it, such as {path}"
    assert said in refused(command, tmp_path)


def test_names_in_the_list_are_printable(tmp_path, call):
    write_run(tmp_path / "a\x1b[31m", steps=5, tensors=2)

    code, out, _ = call("ls", tmp_path)
    assert code == Exit.OK
    assert "\x1b" not in out
    assert "a\\x1b[31m" in out


def test_a_folder_that_is_linked_is_not_followed(tmp_path):
    write_run(tmp_path / "runs" / "a", steps=5, tensors=2)
    (tmp_path / "runs" / "loop").symlink_to(tmp_path / "runs")

    assert [x.run for x in ls.look(tmp_path / "runs")] == ["a"]
