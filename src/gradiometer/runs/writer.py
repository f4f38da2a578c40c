"""Write the run record: Parquet files with every step, for `gradiometer.read_run`."""

from __future__ import annotations

import collections
import logging
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gradiometer.runs.attempts import keep_changed
from gradiometer.runs.directory import is_at, release, remove_leftovers, take
from gradiometer.runs.files import RunError
from gradiometer.runs.format import list_segments, segment_path
from gradiometer.runs.info import load_catalog, merged_catalog
from gradiometer.runs.journal import list_damaged, list_journals
from gradiometer.runs.json_writer import JsonWriter, info_of
from gradiometer.runs.open_segment import OpenSegment
from gradiometer.runs.parquet import to_parquet
from gradiometer.runs.resume import earlier_info, recover
from gradiometer.runs.retry import Retry
from gradiometer.runs.schema_table import problem_of, schemas_of
from gradiometer.runs.segments import Segments
from gradiometer.runs.steps_table import steps_table
from gradiometer.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.recorder import Catalog, RunInfo, StepRecord
    from gradiometer.rules import Fault, Finding

_LOG = logging.getLogger("gradiometer")
# number of segments whose steps may wait for the disk
_WAITING: Final = 4


class RunRecord:
    """A sink that writes a run record, see ``docs/reference/run-record.md``.

    Steps are collected in a segment, and appended to a journal as they arrive. Every ``segment_seconds`` the
    segment's Parquet files are replaced by longer ones, and the journal begins anew; the replacement is
    atomic. A full segment is not written again, and the next one begins. If the process is killed, no step
    that has arrived is lost; a power failure loses at most the last ``segment_seconds`` or ``segment_steps``.
    A folder that is removed while the run goes on is made again, without the full segments that were in it.

    Args:
        run_dir: the folder, created if missing. A run that it already holds is continued: its rows from
            the first newly written step on are superseded.
        segment_steps: steps in a full segment.
        segment_rows: rows of tensors in a full segment; the limit that is reached first counts.
        segment_seconds: how long a step may be in the journal only; with 0, `write` writes Parquet files.
        fsync: whether written steps survive a power failure, not only the end of the process.

    Attributes:
        lost: steps that are not on disk, because it failed for too long, their tensors differ from the run's,
            or the folder was removed.

    Raises:
        ImportError: without pyarrow; ``pip install 'gradiometer[monitor]'`` installs it.
        ValueError: for a number out of range.
    """

    # a slow rule must not hold up the journal
    before_rules: Final = True

    def __init__(
        self,
        run_dir: Path | str,
        *,
        segment_steps: int = 1000,
        segment_rows: int = 1 << 19,
        segment_seconds: float = 10.0,
        fsync: bool = True,
    ) -> None:
        for name, value in (("segment_steps", segment_steps), ("segment_rows", segment_rows)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"RunRecord({name}={value!r}): {name} must be a positive integer")
        if not isinstance(segment_seconds, (int, float)) or not segment_seconds >= 0:
            msg = f"RunRecord(segment_seconds={segment_seconds!r}): segment_seconds must be a number >= 0"
            raise ValueError(msg)
        # with its first array, pyarrow imports pandas if it is installed: not in the middle of the training
        to_parquet(steps_table([], 0))
        # absolute, so that a change of the working directory does not look like a removed folder
        self.path = Path(run_dir).absolute()
        self.lost = 0
        self._limits = segment_steps, segment_rows
        self._seconds = segment_seconds
        self._fsync = fsync
        self._json = JsonWriter(self.path, fsync=fsync, restore=self._restore)
        self._lock: Any = None
        self._free: Any = None
        self._is_open = False
        self._attempt = 0
        self._has_written = False  # in this attempt
        self._fingerprint = False
        self._catalog: Catalog
        self._segment: OpenSegment
        self._saved_at = 0.0
        self._last_step = -1
        # steps of this run in segments that are on disk and no longer in memory
        self._first_step = self._num_written = 0
        # lost steps that the log does not report yet, and why the segment could not be written
        self._unreported, self._why = 0, ""
        self._removed = 0  # steps in removed folders that the log does not report yet
        self._retries: dict[str, Retry] = collections.defaultdict(Retry)  # of each file

    def start(self, info: RunInfo) -> None:
        """Lock the folder and begin an attempt.

        Raises:
            RunError: if the folder is already being written, or its content cannot be continued as a run.
            OSError: if the disk failed; there is no run record then.
        """
        self._catalog, self._fingerprint = info.catalog, info.fingerprint
        try:
            merged_catalog(info.catalog, None)
        except ValueError as error:
            raise RunError(f"{self.path} cannot hold these tables ({error}): rename it") from None
        try:
            self._make_folders()
        except (FileExistsError, NotADirectoryError) as error:
            msg = f"{error.filename} cannot be created, because it or one of its parents is a file: pass "
            raise RunError(msg + "another run_dir") from None
        self._take()
        try:
            self._start(info)
        except BaseException:
            self._free()
            raise
        self._is_open = True

    def _make_folders(self) -> None:
        for table in ("steps", *schemas_of(self._catalog)):
            (self.path / table).mkdir(parents=True, exist_ok=True)

    def _take(self) -> None:
        self._lock = take(self.path)
        # unlock when this object is garbage-collected without close(); at exit close() may still come
        self._free = weakref.finalize(self, release, self.path, self._lock)
        self._free.atexit = False

    def _start(self, info: RunInfo) -> None:
        remove_leftovers(self.path)
        old = earlier_info(self.path)
        recover(self.path, fsync=self._fsync)
        segments = Segments(self.path, list_segments(self.path))
        left = [*list_journals(self.path), *list_damaged(self.path)]
        known = [attempt for attempt, _ in (*segments.keys, *left)]
        self._attempt = max([*known, *(entry["attempt"] for entry in old.get("attempts", []))], default=0)
        if known and not info.first_step:
            text = "%s holds an earlier run; this one is attempt %d in the folder. Nothing is deleted: "
            text += "read_run(path, attempt=%d) and gradiometer show --attempt %d read the earlier one. "
            text += "To continue it instead, call load_state_dict; to separate them, pass another run_dir"
            before = self._attempt
            _LOG.warning(text, printable(str(self.path)), before + 1, before, before)
        try:
            earlier = load_catalog(old["catalog"]) if old else None
            catalog = merged_catalog(info.catalog, earlier)
        except ValueError as error:
            if info.first_step:
                raise RunError(f"{self.path} has other tables ({error}): pass another run_dir") from None
            catalog = merged_catalog(info.catalog, None)  # no step of the others is left
        self._json.start(info_of(info, catalog, old), old, self._attempt)
        last = segments.last_written()
        self._segment = OpenSegment(self.path, info.catalog, self._attempt, last, fsync=self._fsync)
        self._first_step = info.first_step
        self._begin(info.first_step, info.started)
        self._json.write_info()

    def _begin(self, first_step: int, started: float) -> None:
        """Begin another attempt without writing to disk; run.json is written with its first steps."""
        self._attempt += 1
        self._segment.clear()
        self._segment.attempt = self._attempt
        self._has_written = False
        entry = {"attempt": self._attempt, "started": started, "first_step": first_step, "ended": None}
        self._json.info["attempts"].append(entry)
        self._json.info_changed = True
        self._saved_at = time.monotonic()

    def write(self, records: Sequence[StepRecord], findings: Sequence[Finding]) -> None:
        """Add steps and findings, and write the segment if it is due.

        Raises:
            OSError: if the disk failed. Up to four segments of steps are kept, and a later call tries to
                write them again; beyond that the oldest are dropped and counted in ``lost``.
            ValueError: for a step with other tensors than the run; the other steps are still added.
            TypeError: for an object that is not a finding, or has a field of another type; all else is added.
        """
        refused: list[Exception] = []
        for finding in findings:
            try:
                self._json.add(finding, self._attempt)
            except TypeError as error:
                refused.append(error)
        errors: list[Exception] = []
        for record in records:
            try:
                self._add(record, full=not errors)
            except Exception as error:  # noqa: BLE001 the other steps must still be added
                errors.append(error)
        segment = self._segment
        waits = len(segment) > segment.saved or self._json.has_changed
        is_due = waits and not errors and time.monotonic() - self._saved_at >= self._seconds
        try:
            self._flush(all_files=is_due)
        except Exception as error:  # noqa: BLE001 raised below
            errors.append(error)
        self._drop()
        if errors or refused:
            raise [*errors, *refused][0]

    def _add(self, record: StepRecord, *, full: bool) -> None:
        """Add one step; with ``full``, write the segment if this step fills it."""
        if record.catalog is not self._catalog and record.catalog != self._catalog:
            self.lost += 1
            msg = f"RunRecord: step {record.step} has other tensors than the run was started with; "
            raise ValueError(msg + "pass another run_dir")
        tables = [table for table in record.tables.values() if table.kind.has_fingerprints]
        if any([(table.fingerprints is not None) is not self._fingerprint for table in tables]):
            self.lost += 1
            here, run = ("no ", "with") if self._fingerprint else ("", "without")
            msg = f"RunRecord: step {record.step} has {here}fingerprints, but the run was started {run} them"
            raise ValueError(f"{msg}; start it with RunInfo(fingerprint=...) as its steps are")
        failed: Exception | None = None
        for name, table in record.tables.items():
            if table.kind.measure is not None and (problem := problem_of(table)):
                failed = ValueError(f"RunRecord: {name} of step {record.step} are left out: {problem}")
                record = replace(record, tables={k: x for k, x in record.tables.items() if k != name})
        if record.step <= self._last_step:
            # the same process went back to a checkpoint: steps that cannot be written now are superseded
            try:
                self._flush(now=True)
            except Exception as error:  # noqa: BLE001 raised after the step is added
                failed = error
            missing = self._count_missing()
            self._num_written += len(self._segment) - missing
            # the others are superseded
            self._num_written = min(self._num_written, max(0, record.step - self._first_step))
            self._begin(record.step, record.time)
        self._last_step = record.step
        self._segment.add(record)
        if failed is not None:
            raise failed
        if full and self._holds(1):
            self._flush()

    def tick(self) -> None:
        """Write the segment if it is due although no step arrives."""
        self.write([], [])

    def fault(self, fault: Fault) -> None:
        """Write all steps and findings, and the report of the fault; `write` and `close` try it again."""
        self._json.report = fault.to_dict() | {"attempt": self._attempt}
        self._flush(now=True)

    def close(self) -> None:
        """Write all steps and findings, mark the run as closed, and unlock the folder."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._flush(now=True)
        finally:
            try:
                self._count_missing()
                self._report_lost()
                self._segment.clear()
                self._json.info["attempts"][-1] |= {"ended": time.time(), "lost": self.lost}
                self._json.info |= {"closed": True, "files": self._files()}
                self._json.write_info()
            finally:
                self._free()

    def _holds(self, segments: int) -> bool:
        """Return whether the steps in memory, or their rows, fill ``segments`` segments."""
        steps, rows = self._limits
        return len(self._segment) >= segments * steps or self._segment.rows >= segments * rows

    def _flush(self, *, now: bool = False, all_files: bool = True) -> None:
        """Write what has changed, or only the journal; a file that cannot be written holds up no other."""
        # the journal first, which takes less time; with 0 seconds, all else follows at once
        writes = [self._write_journal] if self._seconds else []
        if all_files:
            writes += [
                self._write_segment,
                self._json.write_new_info,
                self._json.write_new_findings,
                self._json.write_report,
            ]
        tries = [self._retries[write.__name__](write, now=now) for write in writes]
        errors = [error for error in tries if error is not None]
        if errors:
            raise errors[0]

    def _write_segment(self) -> None:
        try:
            self._restore()
            if len(self._segment) > self._segment.saved:
                self._segment.save()
                self._note_first_write()
        except Exception as error:
            self._why = f"{type(error).__name__}: {error}"
            raise
        self._report_lost()
        self._saved_at = time.monotonic()
        if self._holds(1):
            self._num_written += len(self._segment)
            self._segment.clear()

    def _write_journal(self) -> None:
        self._lose(self._segment.check())
        if self._segment.missing:
            self._restore()
            if not self._segment.append():
                self._write_segment()

    def _restore(self) -> None:
        """Make the folder again if it was removed, and write again what is in memory."""
        is_locked_here = is_at(self.path / ".lock", self._lock)
        folders = [self.path / table for table in ("steps", *schemas_of(self._catalog))]
        if is_locked_here and all([path.is_dir() for path in folders]):
            return
        gone = self._segment.check() + self._num_written
        self._segment.saved = 0
        self.lost += gone
        self._removed += gone
        self._num_written = 0
        self._json.forget(digests=not is_locked_here)
        self._make_folders()
        if not is_locked_here:
            self._free()
            self._take()
        text = "%s was removed while the run went on: it is made again, and %d steps that were in it are lost"
        _LOG.warning(text, self.path, self._removed)
        self._removed = 0

    def _count_missing(self) -> int:
        """Count the steps that are in memory only as lost, and return how many they are."""
        self._lose(self._segment.check())
        missing = self._segment.missing
        self._lose(missing)
        return missing

    def _lose(self, steps: int) -> None:
        self.lost += steps
        self._unreported += steps

    def _report_lost(self) -> None:
        if self._unreported:
            text = "%s: %d steps are lost, because they could not be written (%s)"
            _LOG.warning(text, self.path, self._unreported, self._why)
            self._unreported = 0

    def _note_first_write(self) -> None:
        if not self._has_written:
            self._has_written = self._json.info_changed = True
            info, first = self._json.info, self._segment.first_step
            info["attempts"][-1] |= {"first_step": first, "wrote": True}
            if all(start >= first for _, start in list_segments(self.path)):
                # everything that earlier attempts wrote is superseded
                catalog = {"catalog": merged_catalog(self._catalog, None).to_dict()}
                keep_changed(info | {"attempts": info["attempts"][:-1]}, info | catalog)
                info |= catalog

    def _drop(self) -> None:
        """Drop the oldest steps if too many wait for the disk."""
        while self._holds(_WAITING) and len(self._segment) > 1:
            saved, lost = self._segment.drop()
            self._lose(lost)
            self._num_written += saved

    def _files(self) -> dict[str, str]:
        """Return the digests of the files that a closed run must have: no other file has those."""
        files = self._json.digests
        if self._segment.last is not None:
            *segment, digest = self._segment.last
            files[f"steps/{segment_path(self.path, 'steps', *segment).name}"] = digest
        return files
