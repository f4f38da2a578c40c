"""The runs below a folder, and the state of each."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from gradiometer.cli import tables
from gradiometer.rules import Severity, summarize
from gradiometer.runs import RunError, is_taken, read_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from gradiometer.runs import Run

_STYLES: Final = {"running": "cyan", "closed": "green", "killed": "yellow", "damaged": "bold red"}


@dataclass(frozen=True)
class Listed:
    """One run, as the command lists it.

    Attributes:
        run: its path, from the folder that was searched.
        state: ``"running"`` while a process writes it, ``"closed"``, ``"killed"`` if it was not closed, or
            ``"damaged"`` if run.json, a journal or a file of steps cannot be read.
        attempts: the number of attempts that wrote steps.
        steps: the number of steps.
        step: the last step; None if there is none.
        age: seconds since the last step ended, or since the run began; None if unknown.
        model: the class of its model.
        findings: the number of findings that are warnings or errors.
        note: the fault that ended the last attempt, or what is damaged.
    """

    run: str
    state: Literal["running", "closed", "killed", "damaged"]
    attempts: int = 0
    steps: int = 0
    step: int | None = None
    age: float | None = None
    model: str = ""
    findings: int = 0
    note: str = ""


def look(folder: Path, now: float | None = None) -> list[Listed]:
    """Return the runs in a folder and below it, the latest first; ``now`` is the Unix time.

    Hidden folders are left out, and links are not followed. Raise RunError if there is no such folder.
    """
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder; pass one that has runs in it or below it")
    when = time.time() if now is None else now
    found = [_listed(path, path.relative_to(folder), when) for path in _runs(folder)]
    return sorted(found, key=lambda x: (x.age is None, x.age, x.run))


def _runs(folder: Path) -> Iterator[Path]:
    for path, folders, files in os.walk(folder):
        is_run = "run.json" in files and (Path(path) / "steps").is_dir()
        inner = {"steps", "tensors", "exponents"} if is_run else set()
        folders[:] = sorted(name for name in folders if name not in inner and not name.startswith("."))
        if is_run:
            yield Path(path)


def _listed(path: Path, name: Path, now: float) -> Listed:
    try:
        # before it is read, because it may be closed meanwhile
        is_running = is_taken(path)
        run = read_run(path)
        steps, findings = run.steps, run.findings
        last = steps.slice(max(len(steps) - 1, 0)).to_pylist()
    except (RunError, OSError) as error:
        return Listed(str(name), "damaged", note=str(error))
    began = [x.started for x in run.attempts if x.started is not None]
    times = [row["time"] for row in last] or began[-1:]
    return Listed(
        str(name),
        "closed" if run.info.get("closed") else "running" if is_running else "killed",
        attempts=sum(x.first_step is not None for x in run.attempts),
        steps=len(steps),
        step=last[0]["step"] if last else None,
        age=max(now - times[0], 0.0) if times else None,
        model=str(run.info.get("model", "")),
        findings=sum(x.severity >= Severity.WARNING for x in findings),
        note=_fault(run),
    )


def _fault(run: Run) -> str:
    """Return a summary of the fault of the last attempt, if it had one."""
    fault = run.blackbox
    last = run.attempts[-1].number if run.attempts else 1
    return "" if fault is None or fault.get("attempt", last) < last else str(summarize(fault))


def render(folder: Path, found: Sequence[Listed]) -> RenderableType:
    """Return a table of the runs."""
    if not found:
        return tables.text(f"no runs in or below {folder}")
    table = tables.grid(["run", "state", ">steps", ">age", ">attempts", ">warnings", "model", ""])
    for x in found:
        age = "" if x.age is None else tables.span(x.age)
        counts = [f"{n:,}" for n in (x.attempts, x.findings)]
        run, state = tables.text(x.run), tables.text((x.state, _STYLES[x.state]))
        note = tables.line(x.note)
        table.add_row(run, state, f"{x.steps:,}", age, *counts, tables.text(x.model), note)
    return table
