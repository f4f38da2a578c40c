"""Another commit of ours, in a process of its own that takes its turn in the same rounds.

The providers and cases are those of this tree; only the package `gradiometer` is the other commit's. Its
sources come out of `git archive` into a temporary folder, so that the clone is left as it is.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BENCH = Path(__file__).with_name("bench.py")


class BaseError(Exception):
    """The other commit cannot be measured, and why."""


@contextmanager
def sources(ref, root=ROOT):
    """Yield the folder that another commit's package is imported from, and the commit's short name."""

    def git(*arguments):
        try:
            return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=False)  # noqa: S607
        except OSError as failure:
            raise BaseError(f"--base needs git: {failure}") from None

    commit = git("rev-parse", "--verify", "--quiet", "--short", "--end-of-options", f"{ref}^{{commit}}")
    if commit.returncode:
        raise BaseError(f"--base: no commit {ref!r} in {root}; `git log --oneline` lists some")
    name = commit.stdout.decode().strip()
    archive = git("archive", "--format=tar", name, "src")
    if archive.returncode:
        raise BaseError(f"--base: commit {name} has no folder src")
    with tempfile.TemporaryDirectory(prefix="gradiometer-base-") as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(folder, filter="data")
        yield Path(folder) / "src", name


class Remote:
    """A `measure.Bench` in another process: each method is sent there as a line of JSON and waited for."""

    def __init__(self, source):
        path = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, str(BENCH), "--worker"],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            origin = Path(self._receive())
        except BaseError:
            self.close()
            raise
        if not origin.is_relative_to(source):
            self.close()
            raise BaseError(f"--base: {origin} was imported instead of the other commit's sources")

    def __getattr__(self, method):
        def call(*arguments):
            try:
                self.process.stdin.write(json.dumps([method, arguments]) + "\n")
                self.process.stdin.flush()
            except BrokenPipeError:
                raise BaseError("the other commit's process has ended") from None
            return self._receive()

        return call

    def _receive(self):
        line = self.process.stdout.readline()
        if not line:
            raise BaseError("the other commit's process has ended; its last words are above")
        result, error = json.loads(line)
        if error is not None:
            raise RuntimeError(error)  # a row's matter, not the end
        return result

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


@contextmanager
def remote(ref):
    """Yield the Bench of another commit, and the commit; or two Nones for no ``ref``."""
    if ref is None:
        yield None, None
        return
    with sources(ref) as (source, name):
        worker = Remote(source)
        try:
            yield worker, name
        finally:
            worker.close()


def serve(bench, origin):
    """Answer lines of JSON on the standard input until it ends; what else is printed goes to the errors."""
    answers, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps([str(origin), None]), file=answers, flush=True)
    for line in sys.stdin:
        method, arguments = json.loads(line)
        try:
            answer = [getattr(bench, method)(*arguments), None]
        except Exception as failure:  # noqa: BLE001 said at the other end
            answer = [None, f"{type(failure).__name__}: {failure}".strip()]
        print(json.dumps(answer), file=answers, flush=True)
