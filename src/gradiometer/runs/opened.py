"""A run that was opened to be read: its attempts, its segments, and its table of steps."""

from __future__ import annotations

import bisect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradiometer.columns import Thresholds
from gradiometer.runs.arrow import cut, joined
from gradiometer.runs.attempts import Attempt, as_of, list_attempts
from gradiometer.runs.files import RunError, stamp
from gradiometer.runs.findings import FOREVER
from gradiometer.runs.format import arrow_schema, list_segments, pyarrow, segment_path, step_fields
from gradiometer.runs.info import catalog_of, read_info
from gradiometer.runs.journal import list_damaged, list_journals, read_journal
from gradiometer.runs.parquet import unreadable
from gradiometer.runs.segments import Segments
from gradiometer.runs.steps_table import check_steps
from gradiometer.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pyarrow as pa

    from gradiometer.recorder import Catalog
    from gradiometer.runs.journal import Journal


class OpenedRun:
    """A run on disk, as of when it was opened or last refreshed; `gradiometer.runs.Run` documents it."""

    info: dict[str, Any]
    catalog: Catalog
    thresholds: Thresholds
    attempts: tuple[Attempt, ...]

    def __init__(self, path: Path | str, *, attempt: int | None = None, skip_damaged: bool = False) -> None:
        self.path = Path(path)
        # attempts after this one are left out
        self._last = FOREVER if attempt is None else attempt
        self._skip = skip_damaged
        self._files = Segments(self.path)
        self._seen: Any = None
        # a segment is identified by its attempt and its first step
        self._segments: list[tuple[int, int]] = []
        self._stamps: Mapping[tuple[int, int], Any] = {}
        self._begins: dict[int, int] = {}  # for each attempt, the first step that it wrote
        self._ends: dict[int, int] = {}  # for each attempt, its first superseded step
        self._limits: dict[tuple[int, int], int] = {}
        self._journals: dict[tuple[int, int], Journal] = {}
        self._kept: dict[tuple[int, int], tuple[Any, pa.Table]] = {}
        self._steps: pa.Table | None = None
        # tables of segments that are left out
        self._without: set[tuple[str, tuple[int, int]]] = set()
        pyarrow()
        self.refresh()

    def __repr__(self) -> str:
        """Return one line, without reading files."""
        path, tensors = printable(str(self.path)), len(self.catalog.names)
        return f"<Run: {path}, {len(self._segments)} segments, {tensors} tensors>"

    def refresh(self) -> bool:
        """Load what was written since the last call; return whether anything was. Reads only new files."""
        journals, segments = list_journals(self.path), list_segments(self.path)
        files = [stamp(self.path / name) for name in ("run.json", "findings.json", "blackbox.json")]
        if (journals, segments, files) == self._seen:
            return False
        info = read_info(self.path)
        # before the Parquet files, which get what a journal loses
        found = [(key, read_journal(self.path, *key)) for key in list_journals(self.path)]
        for _, journal in found:
            if journal is not None and journal.error is not None and not self._skip:
                raise journal.error
        segments = list_segments(self.path)  # again, so that none is older than run.json
        whole, info = info, as_of(info, self._last)
        catalog = catalog_of(self.path, info)
        try:
            thresholds = Thresholds(**{name: float(value) for name, value in info["thresholds"].items()})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunError(f"{self.path / 'run.json'} has unexpected content ({error!r}): fix it") from None
        self.info, self.catalog, self.thresholds = info, catalog, thresholds
        self._journals = {key: journal for key, journal in found if journal is not None}
        self._files.update(segments, info, catalog, self._journals)
        self._seen = journals, segments, files
        self._stamps, self._steps = segments, None
        self._order(whole.get("attempts", []))
        self._kept = {key: kept for key, kept in self._kept.items() if key in segments}
        self._without = set()
        return True

    def _order(self, entries: list[dict[str, Any]]) -> None:
        """Find what each attempt has written and which segments are not superseded."""
        keys = sorted({*self._stamps, *self._files.journals})
        damaged = [key for key, journal in self._journals.items() if journal.error is not None]
        # from the written segments, so that an attempt that wrote nothing supersedes nothing
        begins: dict[int, int] = {}
        # also those whose files are missing or damaged, lest rows come back that do not belong to the run
        wrote = [(x["attempt"], x["first_step"]) for x in entries if x.get("wrote") is True]
        for attempt, first in sorted([*keys, *damaged, *list_damaged(self.path), *wrote]):
            begins.setdefault(attempt, first)
        self.attempts = list_attempts(entries, begins)
        known = [attempt.number for attempt in self.attempts]
        if self._last != FOREVER and self._last not in known:
            there = f"it has {known[0]} to {known[-1]}" if known else "it has none"
            raise RunError(f"{self.path} has no attempt {self._last}; {there}")
        self._begins = {attempt: first for attempt, first in begins.items() if attempt <= self._last}
        self._ends = {
            attempt: min([first for later, first in self._begins.items() if later > attempt], default=FOREVER)
            for attempt in self._begins
        }
        self._segments = [key for key in keys if key[1] < self._ends.get(key[0], -1)]
        # the first step after each: a file may have got more since the next one was listed
        nexts = [first for _, first in self._segments[1:]]
        self._limits = {
            key: min(self._ends[key[0]], following)
            for key, following in zip(self._segments, [*nexts, FOREVER], strict=False)
        }

    @property
    def has_fingerprints(self) -> bool:
        """Whether an attempt has recorded fingerprints; `StepRecord.fingerprints` returns those of a step."""
        return any([x.get("fingerprint") is True for x in (self.info, *self.info.get("attempts", []))])

    @property
    def steps(self) -> pa.Table:
        """One row per step, ascending; the columns are `STEPS`, and the norm of each other kind."""
        if self._steps is None:
            tables = [arrow_schema(step_fields(self.catalog)).empty_table()]
            self._steps = pyarrow().concat_tables([*tables, *map(self._steps_of, self._segments)])
        return self._steps

    def _steps_of(self, key: tuple[int, int]) -> pa.Table:
        """Return the rows of a segment that are not superseded."""
        seen = self._stamps.get(key), self._limits[key]
        if key not in self._kept or self._kept[key][0] != seen:
            table = self._files.read("steps", key)
            # other attempts may have other kinds
            none = arrow_schema(step_fields(self.catalog)).empty_table()
            try:
                table = joined([none, table]).select(none.column_names)
                check_steps(table, key[1])
            except (ValueError, pyarrow().ArrowException) as error:
                raise unreadable(segment_path(self.path, "steps", *key), error) from None
            self._kept[key] = seen, cut(table, None, self._limits[key] - 1).combine_chunks()
        return self._kept[key][1]

    def _between(self, first: int | None, last: int | None) -> list[tuple[int, int]]:
        """Return the segments that may have steps from ``first`` to ``last``."""
        # segments that are not superseded are in the order of steps, whatever their attempt
        starts = [start for _, start in self._segments]
        low = 0 if first is None else max(bisect.bisect_right(starts, first) - 1, 0)
        high = len(starts) if last is None else bisect.bisect_right(starts, last)
        return self._segments[low:high]

    def _bounds(self, key: tuple[int, int], first: int | None, last: int | None) -> tuple[int, int]:
        """Return the first and last step to read from a segment, inclusive."""
        # from the steps file: the others have more, if the writer was killed between the two
        known = self._steps_of(key)["step"]
        low, high = (known[0].as_py(), known[-1].as_py()) if len(known) else (0, -1)
        return low if first is None else max(low, first), high if last is None else min(high, last)

    def _segments_with(self, table: str, first: int | None, last: int | None) -> Iterator[tuple[int, int]]:
        """Iterate over the segments that have rows of a schema, and may have steps of a range."""
        for key in self._between(first, last):
            if (table, key) not in self._without and table in self._files.tables(key):
                yield key
