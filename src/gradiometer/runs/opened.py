"""A run that was opened to be read: its attempts, its segments, its table of steps, and its JSON files."""

from __future__ import annotations

import bisect
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gradiometer.columns import Thresholds
from gradiometer.runs.arrow import cut, joined
from gradiometer.runs.attempts import Attempt, as_of, list_attempts
from gradiometer.runs.files import RunError, stamp, unfit
from gradiometer.runs.format import arrow_schema, list_segments, pyarrow, segment_path, step_fields
from gradiometer.runs.info import catalog_of, finding_of, read_findings, read_info
from gradiometer.runs.journal import journal_path, list_damaged, list_journals, read_journal
from gradiometer.runs.json_files import from_json, read_json
from gradiometer.runs.parquet import unreadable
from gradiometer.runs.segments import Segments
from gradiometer.runs.steps_table import check_steps
from gradiometer.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pyarrow as pa

    from gradiometer.recorder import Catalog
    from gradiometer.rules import Finding
    from gradiometer.runs.journal import Journal

_LOG = logging.getLogger("gradiometer")
# no step or attempt is later
_LAST: Final = 2**63 - 1


class OpenedRun:
    """A run on disk, as of when it was opened or last refreshed; `gradiometer.runs.Run` documents it."""

    info: dict[str, Any]
    catalog: Catalog
    thresholds: Thresholds
    attempts: tuple[Attempt, ...]

    def __init__(self, path: Path | str, *, attempt: int | None = None, skip_damaged: bool = False) -> None:
        self.path = Path(path)
        # attempts after this one are left out
        self._last = _LAST if attempt is None else attempt
        self._skip = skip_damaged
        self.damaged: dict[str, str] = {}
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
            raise unfit(self.path / "run.json", repr(error)) from None
        self.info, self.catalog, self.thresholds = info, catalog, thresholds
        self._journals = {key: journal for key, journal in found if journal is not None}
        self._files.update(segments, info, catalog, self._journals)
        self._seen = journals, segments, files
        self._stamps, self._steps = segments, None
        self._order(whole.get("attempts", []))
        self._kept = {key: kept for key, kept in self._kept.items() if key in segments}
        self._without = set()
        if self._skip:
            self._skip_damaged()
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
        if self._last != _LAST and self._last not in known:
            there = f"it has {known[0]} to {known[-1]}" if known else "it has none"
            raise RunError(f"{self.path} has no attempt {self._last}; {there}")
        self._begins = {attempt: first for attempt, first in begins.items() if attempt <= self._last}
        self._ends = {
            attempt: min([first for later, first in self._begins.items() if later > attempt], default=_LAST)
            for attempt in self._begins
        }
        self._segments = [key for key in keys if key[1] < self._ends.get(key[0], -1)]
        # the first step after each: a file may have got more since the next one was listed
        nexts = [first for _, first in self._segments[1:]]
        self._limits = {
            key: min(self._ends[key[0]], following)
            for key, following in zip(self._segments, [*nexts, _LAST], strict=False)
        }

    @property
    def has_fingerprints(self) -> bool:
        """Whether an attempt has recorded fingerprints; `StepRecord.fingerprints` returns those of a step."""
        return any([x.get("fingerprint") is True for x in (self.info, *self.info.get("attempts", []))])

    @property
    def steps(self) -> pa.Table:
        """One row per step, ascending; the columns are `STEPS`, and the norm of each other kind."""
        if self._steps is None:
            none = arrow_schema(step_fields(self.catalog)).empty_table()
            self._steps = pyarrow().concat_tables([none, *map(self._steps_of, self._segments)])
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

    def _skip_damaged(self) -> None:
        """Leave out segments with a damaged file, and note what is damaged."""
        before, self.damaged, left = self.damaged, {}, dict.fromkeys(self._segments)
        sparse = {kind.schema.name for kind in self.catalog.sparse}
        for key, journal in self._journals.items():
            if journal.error is not None:
                self.damaged[journal_path(self.path, *key).name] = str(journal.error)
        for key in self._segments:
            try:
                tables = self._files.tables(key)
            except RunError as error:
                self._leave_out("steps", key, error)
                del left[key]
                continue
            for table in tables:
                try:
                    self._files.claims(table, key)
                except RunError as error:
                    self._leave_out(table, key, error)
                    if table not in sparse:
                        left.pop(key, None)
        # they still supersede what their names say, lest rows come back that do not belong to the run
        self._segments = list(left)
        for name, read in (("findings.json", self._read_findings), ("blackbox.json", self._read_blackbox)):
            try:
                read()
            except RunError as error:
                self.damaged[name] = str(error)
        for name in self.damaged.keys() - before.keys():
            _LOG.warning("left out: %s", self.damaged[name])

    def _leave_out(self, table: str, key: tuple[int, int], error: RunError) -> None:
        self._without.add((table, key))
        self.damaged[f"{table}/{segment_path(self.path, table, *key).name}"] = str(error)

    @property
    def findings(self) -> list[Finding]:
        """The findings of the rules, without those that later attempts have superseded."""
        return [] if "findings.json" in self.damaged else self._read_findings()

    @property
    def blackbox(self) -> dict[str, Any] | None:
        """The report of the last fault in any of the attempts that are read; None if there was none."""
        return None if "blackbox.json" in self.damaged else self._read_blackbox()

    def _read_findings(self) -> list[Finding]:
        """Return the findings, each up to where its attempt was superseded."""
        # a later attempt that continues a finding replaces it
        known: dict[tuple[Any, ...], Finding] = {}
        for values in read_findings(self.path, self._closed_with("findings.json")):
            if values["attempt"] > self._last:
                continue
            end = self._ends.get(values["attempt"], _LAST)
            if values["last_step"] >= end:
                # the end comes from names of files: check these before anything is left out
                for key in sorted(self._begins.items() & self._stamps.keys()):
                    self._files.claims("steps", key)
            if values["first_step"] < end:
                found = finding_of(values)
                if found.last_step >= end:
                    count = min(found.count, end - found.first_step)
                    worst = found.worst_step if (found.worst_step or 0) < end else None
                    found = replace(found, last_step=end - 1, count=count, worst_step=worst)
                known[found.key, found.first_step] = found
        return list(known.values())

    def _read_blackbox(self) -> dict[str, Any] | None:
        # the newest, and those that the faults of later attempts have replaced
        earlier = [] if self._last == _LAST else sorted(self.path.glob("blackbox-[0-9]*.json"))[::-1]
        for path in (self.path / "blackbox.json", *earlier):
            content = read_json(path, self._closed_with(path.name))
            found: dict[str, Any] | None = from_json(content)
            if not isinstance(found, dict | None):
                raise unfit(path, f"{found!r:.40}")
            attempt = 1 if found is None else found.get("attempt", 1)
            if not isinstance(attempt, int):
                raise unfit(path, f"attempt: {attempt!r:.40}")
            if found is not None and attempt <= self._last:
                return found
        return None

    def _closed_with(self, name: str) -> str | None:
        """Return the digest of a JSON file of a closed run; None if it is not known, or out of date."""
        # a writer that continues the run replaces run.json first
        is_current = stamp(self.path / "run.json") == self._seen[-1][0]
        return self.info.get("files", {}).get(name) if is_current else None
