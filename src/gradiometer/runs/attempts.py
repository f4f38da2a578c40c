"""The attempts of a run: the processes that wrote it, one after the other, in one folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gradiometer.runs.json_files import plain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# the keys of run.json that another attempt may change
_CHANGING: Final = "model catalog thresholds every capacity versions device ranks fingerprint precision"


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run.

    Attributes:
        number: from 1.
        first_step: the first step that it wrote; None if it wrote none.
        superseded: the first step that later attempts wrote, from which on this one's steps are superseded;
            None if there is none.
        started, ended: Unix times; None if unknown, and ``ended`` also if it was not closed.
    """

    number: int
    first_step: int | None
    superseded: int | None
    started: float | None
    ended: float | None


def list_attempts(entries: Sequence[Mapping[str, Any]], begins: Mapping[int, int]) -> tuple[Attempt, ...]:
    """Return the attempts, from those of run.json and the first step that each wrote, by names of files."""
    known = {entry["attempt"]: entry for entry in entries}
    found = []
    for number in sorted({*begins, *known}):
        times = (known.get(number, {}).get(name) for name in ("started", "ended"))
        started, ended = (x if isinstance(x, (int, float)) else None for x in times)
        later = min([first for other, first in begins.items() if other > number], default=None)
        found.append(Attempt(number, begins.get(number), later, started, ended))
    return tuple(found)


def keep_changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Keep what a new attempt changes of run.json in the entry of the attempt before."""
    if not old.get("attempts"):
        return
    before, now = old["attempts"][-1], plain(dict(new))
    for key in _CHANGING.split():
        if key in old and old[key] != now.get(key):
            before.setdefault(key, old[key])


def as_of(info: Mapping[str, Any], attempt: int) -> dict[str, Any]:
    """Return run.json as it was after an attempt."""
    entries = info.get("attempts", [])
    found = {**info, "attempts": [entry for entry in entries if entry["attempt"] <= attempt]}
    for entry in reversed([entry for entry in entries if entry["attempt"] >= attempt]):
        found |= {key: entry[key] for key in _CHANGING.split() if key in entry}
    if len(found["attempts"]) < len(entries):
        found["closed"] = any(entry.get("ended") is not None for entry in found["attempts"][-1:])
    return found
