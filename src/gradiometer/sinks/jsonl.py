"""JSON lines: a line a step, for anything that reads text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradiometer.runs import to_json
from gradiometer.sinks.selection import News, Options, Selection

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Unpack

    from gradiometer.recorder import RunInfo, StepRecord
    from gradiometer.rules import Fault, Finding

__all__ = ["JSONLines"]

_TAIL = 2**16


class JSONLines:
    """Appends a line of JSON a step: ``step``, ``time``, ``skipped``, and a value for each key.

    JSON has no NaN: what is not finite is the string ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``, which
    Python's ``float()`` and JavaScript's ``Number()`` take back. A step in which findings began or
    became worse has them in ``findings``. A fault is a line of its own, the only one with ``fault``.

    Lines are complete or not there: each batch is one write, what a killed process left unfinished is cut
    off when the file is opened again, and a resumed run goes on below. Of a step that is there twice
    the last line counts.

    Args:
        path: of the file; folders are made.
        **options: which steps and values, as for `gradiometer.sinks.Selection`.
    """

    def __init__(self, path: str | os.PathLike[str], **options: Unpack[Options]) -> None:
        self.path = Path(path)
        self.selection = Selection(**options)
        self._file = -1
        self._news = News()
        self._waiting: list[Finding] = []

    def __repr__(self) -> str:
        """Return the path."""
        return f"JSONLines({str(self.path)!r})"

    def start(self, info: RunInfo) -> None:
        """Open the file."""
        del info
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        _cut_torn_line(self._file)

    def write(self, records: Sequence[StepRecord], findings: Sequence[Finding]) -> None:
        """Append the steps, in one write."""
        self._waiting += self._news.take(findings)
        lines = []
        for record in records:
            due = [f for f in self._waiting if f.first_step <= record.step]
            # a step with a finding has a line, whatever `every` says
            if not due and not self.selection.takes(record):
                continue
            line: dict[str, Any] = {"step": record.step, "time": record.time, "skipped": record.skipped}
            line |= self.selection.values(record)
            if due:
                self._waiting = [f for f in self._waiting if f.first_step > record.step]
                line |= {"findings": [finding.to_dict() for finding in due]}
            lines.append(line)
        self._append(lines)

    def fault(self, fault: Fault) -> None:
        """Append the fault and wait for the disk."""
        self._append([{"step": fault.step, "fault": fault.to_dict()}])
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _append(self, lines: Sequence[dict[str, Any]]) -> None:
        if not lines:
            return
        left = memoryview("".join([to_json(line, indent=None) + "\n" for line in lines]).encode())
        size = os.fstat(self._file).st_size
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            # a full disk takes half a line
            os.ftruncate(self._file, size)
            raise


def _cut_torn_line(file: int) -> None:
    """Cut off what follows the last line break."""
    end = size = os.fstat(file).st_size
    while end > 0:
        begin = max(0, end - _TAIL)
        found = os.pread(file, end - begin, begin).rfind(b"\n")
        if found >= 0:
            end = begin + found + 1
            break
        end = begin
    if end < size:
        os.ftruncate(file, end)
