"""A pytest plugin that writes the result of each test when it is known, so that a run that is cut keeps it.

    python -m pytest -p kernels_bench.gpu.progress --progress results.jsonl tests/gpu

The lines are JSON objects: the number of selected tests, the start of a test, and its result. In a rehearsal
without a GPU (see `tests/support/gpu.py`) each test runs once, with its first parameters.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

OUTCOMES = ("passed", "failed", "errors", "skipped")
# of a report that is neither "passed" nor "skipped"
_WORST = {"call": "failed", "setup": "errors", "teardown": "errors"}


class Progress(NamedTuple):
    """``selected``: the number of tests, None before they are known; ``running``: the test that was cut."""

    selected: int | None
    outcomes: dict[str, str]
    running: str | None

    def counts(self) -> dict[str, int]:
        found = list(self.outcomes.values())
        return {"tests": len(found), **{outcome: found.count(outcome) for outcome in OUTCOMES}}

    def cut(self) -> str:
        """Return how a run ended that was cut."""
        of_all = "" if self.selected is None else f" of {self.selected}"
        counts = self.counts()
        found = [f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome]]
        during = "" if self.running is None else f", in {self.running}"
        return f"cut after {counts['tests']}{of_all} tests, {', '.join(found) or '0 passed'}{during}"


def read(path: Path) -> Progress:
    """Return what a run has written so far; its last line may be incomplete."""
    selected, running, outcomes = None, None, {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            break
        selected = entry.get("selected", selected)
        if "outcome" in entry:
            outcomes[entry["test"]] = entry["outcome"]
            running = None
        else:
            running = entry.get("test")
    return Progress(selected, outcomes, running)


def pytest_addoption(parser):
    parser.addoption("--progress", help="a file for the results, a line of JSON each")


def pytest_configure(config):
    if path := config.getoption("--progress"):
        Path(path).unlink(missing_ok=True)
        config.pluginmanager.register(_Writer(Path(path)))


def pytest_collection_modifyitems(config, items):
    if os.environ.get("GPU_TESTS_DEVICE") != "cpu" or os.environ.get("HYPOTHESIS_PROFILE") == "deep":
        return
    first = {}
    for item in items:
        first.setdefault((item.path, getattr(item, "originalname", item.name)), item)
    kept = set(first.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


class _Writer:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcome = "passed"

    def write(self, **entry):
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def pytest_collection_finish(self, session):
        self.write(selected=len(session.items))

    def pytest_runtest_logstart(self, nodeid):
        self.outcome = "passed"
        self.write(test=nodeid)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.outcome = _WORST[report.when]
        elif report.skipped and self.outcome == "passed":
            self.outcome = "skipped"
        if report.when == "teardown":
            self.write(test=report.nodeid, outcome=self.outcome, seconds=round(report.duration, 3))
