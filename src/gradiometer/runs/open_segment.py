"""The segment that is being written: in memory, in a journal, and from time to time in Parquet files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gradiometer.runs.digest import Claims, with_claims
from gradiometer.runs.directory import prepare
from gradiometer.runs.exponents import exponents_table
from gradiometer.runs.format import pyarrow, segment_path
from gradiometer.runs.journal import JournalWriter
from gradiometer.runs.parquet import steps_table, tensors_table, to_parquet
from gradiometer.runs.tables import cut

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

    from gradiometer.recorder import Roster, StepRecord

# the rows of so many steps are made at once
_BATCH: Final = 64


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
        fingerprint: whether the steps have fingerprints.

    Attributes:
        attempt: the attempt that writes.
        last: as above.
        recorded: how many of the steps were recorded.
        with_exponents: how many of the steps have histograms of exponents.
        saved: how many of the steps are in Parquet files.
    """

    def __init__(
        self,
        run: Path,
        roster: Roster,
        attempt: int,
        last: tuple[int, int, str] | None,
        *,
        fsync: bool,
        fingerprint: bool = False,
    ) -> None:
        self.attempt = attempt
        self.last = last
        self._run, self._roster, self._fsync, self._fingerprint = run, roster, fsync, fingerprint
        # attempt and first step of the segment, and `last` when it was begun
        self._key: tuple[int, int] | None = None
        self._previous = last
        self._journal: JournalWriter | None = None
        self._sealed: int
        self.clear()

    def clear(self) -> None:
        """Go on with the steps after these."""
        # the steps whose rows are made, as tables; those after them; and the last ones, which are not on disk
        self._rows = [(steps_table([], 0), tensors_table([], 0, self._roster), exponents_table([], 0))]
        self._done = 0
        self._new: list[StepRecord] = []
        self._unwritten: list[StepRecord] = []
        self.recorded = self.with_exponents = self.saved = 0
        self._close_journal(remove=False)

    def __len__(self) -> int:
        """Return the number of steps."""
        return self._done + len(self._new)

    @property
    def first_step(self) -> int:
        """The first step; there must be one."""
        steps = self._tables()[0]["step"]
        return int(steps[0].as_py()) if len(steps) else self._new[0].step

    @property
    def missing(self) -> int:
        """How many of the steps are not on disk, neither in Parquet files nor in the journal."""
        begin, end = self._journaled
        return len(self) - self.saved - (end - begin)

    def add(self, record: StepRecord) -> None:
        """Add a step, without writing it."""
        self._new.append(record)
        self._unwritten.append(record)
        self.recorded += record.recorded
        self.with_exponents += record.exponents is not None

    def check(self) -> int:
        """Notice that the journal was removed; return how many steps that were dropped are lost with it."""
        if self._journal is None or self._journal.is_there:
            return 0
        lost = self._sealed
        self._close_journal(remove=False)
        return lost

    def append(self) -> bool:
        """Append new steps to the journal; return False if there are others that only `save` can write."""
        if self._sealed:
            return True
        if self._unwritten:
            if self._journal is None:
                self._journaled = (len(self) - len(self._unwritten),) * 2
                key = self.attempt, self._unwritten[0].step
                self._journal = JournalWriter(self._run, *key, self._roster, fingerprint=self._fingerprint)
            self._journal.append(self._unwritten)
            self._journaled = self._journaled[0], len(self)
            self._unwritten = []
        if len(self._new) >= _BATCH:
            self._make_rows()
        return not self.missing

    def save(self) -> None:
        """Replace the segment's files with longer ones."""
        self._make_rows()
        first = self.first_step
        if self._key != (self.attempt, first):
            self._key, self._previous, self.last = (self.attempt, first), self.last, None
        of_steps, of_tensors, of_exponents = self._tables()
        claims = Claims("tensors", *self._key, len(self))
        tensors, digest = with_claims(to_parquet(of_tensors), claims)
        # steps come last, so that no step lacks its tensors; all are written before any is replaced
        files = [("tensors", tensors)]
        of_steps_claims = claims._replace(table="steps", tensors=digest, previous=self._previous)
        if len(of_exponents):
            exponents, digest = with_claims(to_parquet(of_exponents), claims._replace(table="exponents"))
            files.insert(0, ("exponents", exponents))
            of_steps_claims = of_steps_claims._replace(exponents=digest)
            (self._run / "exponents").mkdir(exist_ok=True)
        steps, digest = with_claims(to_parquet(of_steps), of_steps_claims)
        ready = [
            prepare(self._run, segment_path(self._run, name, *self._key), data, sync=self._fsync)
            for name, data in (*files, ("steps", steps))
        ]
        self.last = None
        for put in ready:
            put()
        self.last = (*self._key, digest)
        self.saved, self._unwritten = len(self), []
        self._close_journal(remove=not self._sealed)

    def drop(self) -> tuple[int, int]:
        """Drop the steps that are in Parquet files, or else the oldest one; at least one must be left.

        Returns:
            how many that are in Parquet files were dropped, and how many are lost.
        """
        self._make_rows()
        begin, end = self._journaled
        saved, gone = self.saved, max(self.saved, 1)
        lost = int(not saved and not begin < gone <= end)
        if not saved and not lost:
            # no more is appended: the journal must not grow without end
            self._sealed += 1
        steps, tensors, exponents = self._tables()
        steps = steps.slice(gone)
        tensors, exponents = [cut(x, steps["step"][0].as_py(), None) for x in (tensors, exponents)]
        self._rows = [(steps, tensors, exponents)]
        self._done, self.recorded, self.saved = len(steps), sum(steps["recorded"].to_pylist()), 0
        self.with_exponents = len({*exponents["step"].to_pylist()})
        self._journaled = max(begin - gone, 0), max(end - gone, 0)
        self._unwritten = self._unwritten[-len(self) :]
        return saved, lost

    def forget_saved(self) -> None:
        """Write all steps once more, because Parquet files were removed."""
        self.saved = 0

    def _make_rows(self) -> None:
        if self._new:
            tensors = tensors_table(self._new, self.attempt, self._roster)
            exponents = exponents_table(self._new, self.attempt)
            self._rows.append((steps_table(self._new, self.attempt), tensors, exponents))
            self._done += len(self._new)
            self._new = []

    def _tables(self) -> tuple[pa.Table, pa.Table, pa.Table]:
        """Return the tables of steps, of tensors and of exponents."""
        if len(self._rows) > 1:
            concat = pyarrow().concat_tables
            # a table without rows has no columns for fingerprints
            found = [concat(x, promote_options="default") for x in zip(*self._rows, strict=True)]
            steps, tensors, exponents = [x.combine_chunks() for x in found]
            self._rows = [(steps, tensors, exponents)]
        return self._rows[0]

    def _close_journal(self, *, remove: bool) -> None:
        journal, self._journal = self._journal, None
        # the first step in the journal and the one after its last; and how many others it has
        self._journaled = self.saved, self.saved
        self._sealed = 0
        if journal is not None:
            journal.close(remove=remove)
