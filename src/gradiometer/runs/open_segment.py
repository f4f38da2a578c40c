"""The segment that is being written: in memory, in a journal, and from time to time in Parquet files."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gradiometer.runs.digest import Claims, with_claims
from gradiometer.runs.directory import prepare
from gradiometer.runs.format import RunError, list_segments, segment_path
from gradiometer.runs.journal import JournalWriter, journal_path, list_journals, read_journal
from gradiometer.runs.parquet import steps_table, tensors_table, to_parquet
from gradiometer.runs.segments import Segments

if TYPE_CHECKING:
    from pathlib import Path

    from gradiometer.recorder import Roster, StepRecord

__all__ = ["OpenSegment", "recover"]

_LOG = logging.getLogger("gradiometer")


class OpenSegment:
    """The steps after the last full segment.

    `append` adds new steps to a journal. `save` writes all steps to Parquet files; then the journal is
    removed, and the next one begins with the next step.

    Args:
        run: the folder.
        roster: the tensors of all steps.
        attempt: the attempt that writes.
        last: attempt, first step and digest of the last file of steps; None if unknown.
        fsync: whether the Parquet files survive a power failure.

    Attributes:
        attempt: the attempt that writes.
        records: the steps in memory.
        saved: how many of them are in Parquet files.
        kept: how many of them are on disk, in Parquet files or in a journal.
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
        self.records: list[StepRecord] = []
        self.saved = self.kept = 0
        self._close_journal(remove=False)

    def append(self) -> None:
        """Append the steps that are not on disk to the journal."""
        if self._journal is not None and not self._journal.is_there:
            self.kept = self.saved
            self._close_journal(remove=False)
        if self.kept == len(self.records) or self._is_sealed:
            return
        new = self.records[self.kept :]
        if self._journal is None:
            self._journal = JournalWriter(self._run, self.attempt, new[0].step, self._roster)
        self._journal.append(new)
        self.kept = len(self.records)

    def save(self) -> None:
        """Replace the segment's files with longer ones."""
        first = self.records[0].step
        if self._key != (self.attempt, first):
            self._key, self._previous, self.last = (self.attempt, first), self.last, None
        claims = Claims("tensors", *self._key, len(self.records))
        table = tensors_table(self.records, self.attempt, self._roster)
        tensors, digest = with_claims(to_parquet(table), claims)
        claims = claims._replace(table="steps", tensors=digest, previous=self._previous)
        steps, digest = with_claims(to_parquet(steps_table(self.records, self.attempt)), claims)
        # tensors before steps, so that no step lacks its tensors; both are written before either is replaced
        ready = [
            prepare(self._run, segment_path(self._run, name, *self._key), data, sync=self._fsync)
            for name, data in (("tensors", tensors), ("steps", steps))
        ]
        self.last = None
        for put in ready:
            put()
        self.last = (*self._key, digest)
        self.saved = self.kept = len(self.records)
        self._close_journal(remove=not self._is_sealed)

    def drop(self) -> tuple[int, int]:
        """Drop the steps that are in Parquet files, or else the oldest one, from memory.

        Returns:
            how many were dropped, and how many of them are lost.
        """
        gone = max(self.saved, 1)
        lost = max(gone - self.kept, 0)
        # no more is appended: the journal must not grow without end
        self._is_sealed |= not self.saved and not lost
        del self.records[:gone]
        self.saved, self.kept = 0, max(self.kept - gone, 0)
        return gone, lost

    def write_anew(self) -> None:
        """Write all steps in memory once more, as the folder was removed."""
        self.saved = self.kept = 0
        self._close_journal(remove=not self._is_sealed)

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
            segment.records = records
            segment.save()
        if journal.error is None:
            path.unlink(missing_ok=True)
        else:
            damaged = path.with_name(f"damaged-{path.name}")
            path.replace(damaged)
            _LOG.warning(
                "%s. It is now %s, and the run goes on with the steps before", journal.error, damaged.name
            )
