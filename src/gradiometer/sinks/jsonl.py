"""JSON Lines: one line per step."""

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

_TAIL = 2**16


class JSONLines:
    """Appends one line of JSON per step: ``step``, ``time``, ``skipped``, and a value for each key.

    JSON has no NaN, so non-finite values are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which
    Python's ``float()`` and JavaScript's ``Number()`` accept. Findings that are new or have become more
    severe are in the list ``findings`` of a line. A fault is a separate line with the key ``fault``.

    Each batch is one write. A line that a killed process left incomplete is cut off when the file is opened
    again, and a resumed run appends to the file. If a step occurs twice, use the last line.

    Args:
        path: the path of the file; missing folders are created.
        **options: which steps and values to write, as for `gradiometer.sinks.Selection`.
    """

    def __init__(self, path: str | os.PathLike[str], **options: Unpack[Options]) -> None:
        self.path = Path(path)
        self.selection = Selection(**options)
        self._file = -1
        self._news = News()
        self._waiting: list[Finding] = []

    def __repr__(self) -> str:
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
            # a step with a finding always has a line, regardless of `every`
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
            # a full disk may have taken half a line
            os.ftruncate(self._file, size)
            raise


def _cut_torn_line(file: int) -> None:
    """Cut off the text after the last line break."""
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
