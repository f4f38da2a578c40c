"""The segment that is being written: in memory, in a journal, and from time to time in Parquet files."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from gradiometer.runs.digest import Claims, with_claims
from gradiometer.runs.directory import prepare
from gradiometer.runs.format import RunError, list_segments, pyarrow, segment_path
from gradiometer.runs.journal import JournalWriter, journal_path, list_journals, read_journal
from gradiometer.runs.parquet import steps_table, tensors_table, to_parquet
from gradiometer.runs.segments import Segments
from gradiometer.runs.tables import cut

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

    from gradiometer.recorder import Roster, StepRecord

__all__ = ["OpenSegment", "recover"]

# the rows of so many steps are made at once
_BATCH: Final = 64

_LOG = logging.getLogger("gradiometer")


class OpenSegment:
    """The steps after the last full segment.

    `append` writes new steps to a journal. `save` writes all steps to Parquet files; then the journal is
    removed, and the next one begins with the next step. The steps are made into rows as they come, so that
    `save` takes less time.

    Args:
        run: the folder.
        roster: the tensors of all steps.
        attempt: the attempt that writes.
        last: attempt, first step and digest of the last file of steps; None if unknown.
        fsync: whether the Parquet files survive a power failure.

    Attributes:
        attempt: the attempt that writes.
        saved: how many of the steps are in Parquet files.
        kept: how many of the steps are on disk, in Parquet files or in a journal.
        last: as above.
    """

    def __init__(
        self, run: Path, roster: Roster, attempt: int, last: tuple[int, int, str] | None, *, fsync: bool
    ) -> None:
        self.attempt = attempt
        self.last = last
        self._run, self._roster, self._fsync = run, roster, fsync
        # attempt and first step of the segment, and `last` when it was begun
        self._key: tuple[int, int] | None = None
        self._previous = last
        self._journal: JournalWriter | None = None
        self._is_sealed = False  # the journal has steps that are nowhere else
        self.clear()

    def clear(self) -> None:
        """Go on with the steps after these."""
        # the steps whose rows are made, as tables, and those after them
        self._rows = [(steps_table([], 0), tensors_table([], 0, self._roster))]
        self._done = 0
        self._new: list[StepRecord] = []
        self.recorded = self.saved = self.kept = 0
        self._close_journal(remove=False)

    def __len__(self) -> int:
        """Return the number of steps."""
        return self._done + len(self._new)

    @property
    def first_step(self) -> int:
        """The first step; there must be one."""
        steps = self._tables()[0]["step"]
        return int(steps[0].as_py()) if len(steps) else self._new[0].step

    def add(self, record: StepRecord) -> None:
        """Add a step, without writing it."""
        self._new.append(record)
        self.recorded += record.recorded

    def append(self) -> bool:
        """Append steps that are not on disk to the journal; return False if only `save` can write them."""
        if self._journal is not None and not self._journal.is_there:
            self.kept = self.saved
            self._close_journal(remove=False)
        if self.kept == len(self) or self._is_sealed:
            return True
        if self.kept < self._done:
            return False  # only their rows are left
        new = self._new[self.kept - self._done :]
        if self._journal is None:
            self._journal = JournalWriter(self._run, self.attempt, new[0].step, self._roster)
        self._journal.append(new)
        self.kept = len(self)
        if len(self._new) >= _BATCH:
            self._make_rows()
        return True

    def save(self) -> None:
        """Replace the segment's files with longer ones."""
        self._make_rows()
        first = self.first_step
        if self._key != (self.attempt, first):
            self._key, self._previous, self.last = (self.attempt, first), self.last, None
        of_steps, of_tensors = self._tables()
        claims = Claims("tensors", *self._key, len(self))
        tensors, digest = with_claims(to_parquet(of_tensors), claims)
        claims = claims._replace(table="steps", tensors=digest, previous=self._previous)
        steps, digest = with_claims(to_parquet(of_steps), claims)
        # tensors before steps, so that no step lacks its tensors; both are written before either is replaced
        ready = [
            prepare(self._run, segment_path(self._run, name, *self._key), data, sync=self._fsync)
            for name, data in (("tensors", tensors), ("steps", steps))
        ]
        self.last = None
        for put in ready:
            put()
        self.last = (*self._key, digest)
        self.saved = self.kept = len(self)
        self._close_journal(remove=not self._is_sealed)

    def drop(self) -> tuple[int, int]:
        """Drop the steps that are in Parquet files, or else the oldest one; at least one must be left.

        Returns:
            how many were dropped, and how many of them are lost.
        """
        self._make_rows()
        gone = max(self.saved, 1)
        lost = max(gone - self.kept, 0)
        # no more is appended: the journal must not grow without end
        self._is_sealed |= not self.saved and not lost
        steps, tensors = self._tables()
        steps = steps.slice(gone)
        self._rows = [(steps, cut(tensors, steps["step"][0].as_py(), None))]
        self._done, self.recorded = len(steps), sum(steps["recorded"].to_pylist())
        self.saved, self.kept = 0, max(self.kept - gone, 0)
        return gone, lost

    def write_anew(self) -> None:
        """Write all steps in memory once more, as the folder was removed."""
        self.saved = self.kept = 0
        self._close_journal(remove=not self._is_sealed)

    def _make_rows(self) -> None:
        if self._new:
            tensors = tensors_table(self._new, self.attempt, self._roster)
            self._rows.append((steps_table(self._new, self.attempt), tensors))
            self._done += len(self._new)
            self._new = []

    def _tables(self) -> tuple[pa.Table, pa.Table]:
        """Return the tables of steps and of tensors."""
        if len(self._rows) > 1:
            steps, tensors = zip(*self._rows, strict=True)
            concat = pyarrow().concat_tables
            self._rows = [(concat(steps).combine_chunks(), concat(tensors).combine_chunks())]
        return self._rows[0]

    def _close_journal(self, *, remove: bool) -> None:
        journal, self._journal, self._is_sealed = self._journal, None, False
        if journal is not None:
            journal.close(remove=remove)


def recover(run: Path, *, fsync: bool) -> None:
    """Write the steps in journals, which a killed process has left, to Parquet files."""
    for key in list_journals(run):
        path = journal_path(run, *key)
        journal = read_journal(run, *key)
        if journal is None:
            continue
        segments = Segments(run, list_segments(run))
        try:
            records = segments.without(key[0], journal.records)
        except RunError:
            continue  # its steps stay there, beside a damaged Parquet file
        if journal.roster is not None and records:
            segment = OpenSegment(run, journal.roster, key[0], segments.last_written(), fsync=fsync)
            for record in records:
                segment.add(record)
            segment.save()
        if journal.error is None:
            path.unlink(missing_ok=True)
        else:
            damaged = path.with_name(f"damaged-{path.name}")
            path.replace(damaged)
            _LOG.warning(
                "%s. It is now %s, and the run goes on with the steps before", journal.error, damaged.name
            )
