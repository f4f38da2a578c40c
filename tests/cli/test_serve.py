"""`gradiometer serve`: it prints an address, answers there, and ends at Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("typer")

from gradiometer.cli import Exit
from support.processes import PATH
from support.synthetic_run import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "a", steps=20)


@pytest.mark.parametrize("as_json", [False, True])
def test_it_prints_the_address_and_serves_until_ctrl_c(run, as_json):
    command = [sys.executable, "-m", "gradiometer", "serve", str(run), *(["--json"] if as_json else [])]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | PATH, **pipes) as process:
        line = process.stdout.readline()
        if as_json:
            address = json.loads(line)["url"]
        else:
            assert line.startswith(f"{run} at http://127.0.0.1:")
            assert line.endswith(" (Ctrl-C ends)\n")
            address = line.split()[2]
        with urllib.request.urlopen(address, timeout=60) as answer:  # noqa: S310 http
            assert answer.read().startswith(b"<!doctype html>")
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == Exit.INTERRUPTED


def test_a_port_in_use_and_no_run_are_one_line(run, tmp_path, call, refused):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        err = refused("serve", run, "--port", port)
    assert f"port {port} of 127.0.0.1 cannot be used" in err
    assert "pass another --port, or none" in err
    assert "no such folder" in refused("serve", tmp_path / "none")
    assert call("serve", run, "--port", "70000")[0] == Exit.USAGE
