"""The segment that is being written: in memory, in a journal, and from time to time in Parquet files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gradiometer.runs.arrow import cut, joined
from gradiometer.runs.digest import Claims, with_claims
from gradiometer.runs.directory import prepare
from gradiometer.runs.format import segment_path
from gradiometer.runs.journal import JournalWriter
from gradiometer.runs.parquet import to_parquet
from gradiometer.runs.schema_table import schema_table, schemas_of
from gradiometer.runs.steps_table import steps_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import pyarrow as pa

    from gradiometer.recorder import Catalog, StepRecord

# the rows of so many steps are made at once
_BATCH: Final = 64
# a row of a sparse table takes about so many rows' memory
_SPARSE_ROW: Final = 16


def tables_of(records: Sequence[StepRecord], attempt: int, catalog: Catalog) -> dict[str, pa.Table]:
    """Return the table of steps, and those of the schemas of a catalog, by name."""
    return {"steps": steps_table(records, attempt, catalog)} | {
        name: schema_table(schema, records, attempt, catalog) for name, schema in schemas_of(catalog).items()
    }


def rows_of(record: StepRecord) -> int:
    """Return how many rows the memory of a step's tables is worth."""
    return sum(
        [
            len(table.rows) * (_SPARSE_ROW if table.kind.schema.storage == "sparse" else 1)
            for table in record.tables.values()
        ]
    )


class OpenSegment:
    """The steps after the last full segment.

    `append` writes new steps to a journal. `save` writes all steps to Parquet files; then the journal is
    removed, and the next one begins with the next step. The steps are made into rows as they come, so that
    `save` takes less time.

    Attributes:
        attempt: the attempt that writes.
        last: attempt, first step and digest of the last file of steps; None if unknown.
        saved: how many of the steps are in Parquet files; 0 if these were removed.
    """

    def __init__(
        self, run: Path, catalog: Catalog, attempt: int, last: tuple[int, int, str] | None, *, fsync: bool
    ) -> None:
        self.attempt = attempt
        self.last = last
        self._run, self._catalog, self._fsync = run, catalog, fsync
        # attempt and first step of the segment, and `last` when it was begun
        self._key: tuple[int, int] | None = None
        self._previous = last
        self._journal: JournalWriter | None = None
        self._sealed: int
        self.clear()

    def clear(self) -> None:
        """Go on with the steps after these."""
        # the steps whose rows are made, as tables; those after them; and the last ones, which are not on disk
        self._made = [tables_of([], 0, self._catalog)]
        self._new: list[StepRecord] = []
        self._unwritten: list[StepRecord] = []
        self._rows: list[int] = []  # of each step
        self.saved = 0
        self._close_journal(remove=False)

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self._rows)

    @property
    def rows(self) -> int:
        """How many rows its memory is worth."""
        return sum(self._rows)

    @property
    def first_step(self) -> int:
        """The first step, after `save`."""
        return int(self._tables()["steps"]["step"][0].as_py())

    @property
    def missing(self) -> int:
        """How many of the steps are not on disk, neither in Parquet files nor in the journal."""
        begin, end = self._journaled
        return len(self) - self.saved - (end - begin)

    def add(self, record: StepRecord) -> None:
        """Add a step, without writing it."""
        self._new.append(record)
        self._unwritten.append(record)
        self._rows.append(rows_of(record))

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
                self._journal = JournalWriter(self._run, *key, self._catalog)
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
        tables = self._tables()
        files: list[Callable[[], None]] = []
        digests: dict[str, str] = {}
        # steps come last, so that no step lacks its tables; all are written before any is replaced
        for name in [*[x for x in tables if x != "steps" and len(tables[x])], "steps"]:
            claims = Claims(name, *self._key, len(self))
            if name == "steps":
                claims = claims._replace(tables=dict(digests), previous=self._previous)
            data, digests[name] = with_claims(to_parquet(tables[name]), claims)
            path = segment_path(self._run, name, *self._key)
            path.parent.mkdir(exist_ok=True)
            files.append(prepare(self._run, path, data, sync=self._fsync))
        self.last = None
        for put in files:
            put()
        self.last = (*self._key, digests["steps"])
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
        tables = self._tables()
        first = tables["steps"]["step"][gone].as_py()
        self._made = [{name: cut(table, first, None) for name, table in tables.items()}]
        self.saved = 0
        self._rows = self._rows[gone:]
        self._journaled = max(begin - gone, 0), max(end - gone, 0)
        self._unwritten = self._unwritten[-len(self) :]
        return saved, lost

    def _make_rows(self) -> None:
        if self._new:
            self._made.append(tables_of(self._new, self.attempt, self._catalog))
            self._new = []

    def _tables(self) -> dict[str, pa.Table]:
        """Return the table of steps, and those of schemas, by name."""
        if len(self._made) > 1:
            # a table without rows has no columns of fingerprints
            made = self._made
            self._made = [{name: joined([x[name] for x in made]).combine_chunks() for name in made[0]}]
        return self._made[0]

    def _close_journal(self, *, remove: bool) -> None:
        journal, self._journal = self._journal, None
        # the first step in the journal and the one after its last; and how many others it has
        self._journaled = self.saved, self.saved
        self._sealed = 0
        if journal is not None:
            journal.close(remove=remove)
