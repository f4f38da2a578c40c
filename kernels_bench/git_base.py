"""Measure another commit of gradiometer in a separate process, interleaved in the same rounds.

The process runs the benchmark of this tree; only the package `gradiometer` comes from the other commit. So
the other commit needs no such benchmark, but its package must have the names that `providers.py` uses.
`git archive` writes its sources to a temporary folder; the clone is unchanged.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import tempfile
from contextlib import contextmanager
from pathlib import Path

from kernels_bench import scripts

NEEDED = (
    "--base: this tree's benchmark cannot start with the package of that commit (the error is above); "
    "it needs gm.collect, gm.COLUMNS, gm.Thresholds and gradiometer.ops.tensor_stats"
)


class BaseError(Exception):
    """The other commit cannot be measured; the message says why."""


@contextmanager
def sources(ref, root=scripts.ROOT):
    """Yield the folder from which to import another commit's package, and the commit's short name."""

    def git(*arguments):
        try:
            return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=False)  # noqa: S607
        except OSError as failure:
            raise BaseError(f"--base needs git: {failure}") from None

    commit = git("rev-parse", "--verify", "--quiet", "--short", "--end-of-options", f"{ref}^{{commit}}")
    if commit.returncode:
        raise BaseError(f"--base: no commit {ref!r} in {root}; `git log --oneline` lists commits")
    name = commit.stdout.decode().strip()
    archive = git("archive", "--format=tar", name, "src")
    if archive.returncode:
        raise BaseError(f"--base: commit {name} has no folder src")
    with tempfile.TemporaryDirectory(prefix="gradiometer-base-") as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(folder, filter="data")
        yield Path(folder) / "src", name


class Remote:
    """A `measure.Bench` in another process: each call sends a line of JSON and waits for the answer."""

    def __init__(self, source):
        # -P: Python would put the working directory, perhaps src of this tree, before the other sources
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kernels_bench", "--worker"],
            env=scripts.environment(source),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            origin = Path(self._receive())
        except BaseError:
            self.close()
            raise BaseError(NEEDED) from None
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
            raise BaseError("the other commit's process has ended; the error is above")
        result, error = json.loads(line)
        if error is not None:
            raise RuntimeError(error)  # only this row fails; the run continues
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
    """Yield the Bench of another commit, and the commit; or (None, None) if ``ref`` is None."""
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
    """Answer lines of JSON on standard input until it is closed; other output goes to standard error."""
    answers, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps([str(origin), None]), file=answers, flush=True)
    for line in sys.stdin:
        method, arguments = json.loads(line)
        try:
            answer = [getattr(bench, method)(*arguments), None]
        except Exception as failure:  # noqa: BLE001 the other end reports it
            answer = [None, f"{type(failure).__name__}: {failure}".strip()]
        print(json.dumps(answer), file=answers, flush=True)
