"""The steps of a run: its Parquet files, checked against their digests and each other, and its journals."""

from __future__ import annotations

import bisect
import itertools
import os
from contextlib import suppress
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar

from gradiometer.runs.arrow import filtered
from gradiometer.runs.digest import Claims, read_claims
from gradiometer.runs.files import RunError, open_file, stamp, stamp_of
from gradiometer.runs.format import ROW, fields_of, segment_path, step_fields
from gradiometer.runs.parquet import read_table, unreadable
from gradiometer.runs.schema_table import check_rows, schema_table, schemas_of
from gradiometer.runs.steps_table import steps_table

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa

    from gradiometer.recorder import Catalog, StepRecord
    from gradiometer.runs.format import Field
    from gradiometer.runs.journal import Journal

# a matrix takes at most _LARGEST bytes of memory, or _RATIO times the size of the files that it is read from;
# a tensor that was not measured has a value in the matrix, but no row in a file
_LARGEST: Final = 1 << 28
_RATIO: Final = 500
_TRIES: Final = 5
_T = TypeVar("_T")


class Segments:
    """The Parquet files of a run, and its journals.

    The steps of a journal that are in no Parquet file are a segment, too.

    A file is checked against its digest when it is first read; page checksums protect later reads. The
    file of steps has the digests of the segment's other files, and that of the segment before it, so that an
    older version of a file is noticed. The last one is in run.json after the run is closed.

    Without a catalog, only the steps are read. Methods that read a file raise a RunError if it cannot be read
    or is not as it was written.

    Attributes:
        keys: attempt and first step of all Parquet files, ascending.
        journals: the steps of journals, by attempt and first step.
    """

    def __init__(
        self,
        run: Path,
        keys: Collection[tuple[int, int]] = (),
        info: Mapping[str, Any] | None = None,
        catalog: Catalog | None = None,
    ) -> None:
        self.run = run
        # what the files whose digest was right claim to be, for as long as they are not replaced
        self._whole: dict[Path, tuple[Any, Claims]] = {}
        self.update(keys, info or {}, catalog, {})

    def update(
        self,
        keys: Collection[tuple[int, int]],
        info: Mapping[str, Any],
        catalog: Catalog | None,
        journals: Mapping[tuple[int, int], Journal],
    ) -> None:
        """Set the Parquet files, the content of run.json, the tables, and the content of the journals."""
        self.keys = list(keys)
        self._following = dict(itertools.pairwise(self.keys))
        self._closed_with = info.get("files", {})
        self._schemas = {} if catalog is None else schemas_of(catalog)
        self._step_fields = step_fields(catalog)
        known = {segment_path(self.run, table, *key) for table in ("steps", *self._schemas) for key in keys}
        self._whole = {path: whole for path, whole in self._whole.items() if path in known}
        self._made: dict[tuple[str, tuple[int, int]], pa.Table] = {}
        self.journals: dict[tuple[int, int], list[StepRecord]] = {}
        for (attempt, _), journal in journals.items():
            records = journal.records
            with suppress(RunError):  # raised where those rows are read
                records = self.without(attempt, records)
            if records and (key := (attempt, records[0].step)) not in keys:
                self.journals[key] = records

    def read(
        self, table: str, key: tuple[int, int], columns: Sequence[str] | None = None, where: Any = None
    ) -> pa.Table:
        """Return the rows of a file of steps, or of a schema by name."""
        if key not in self.journals:
            path, schema = segment_path(self.run, table, *key), self._schemas.get(table)
            check = partial(self._check, table, key)
            accepts = None if schema is None else partial(check_rows, schema)
            fields = self._fields(table)
            return _again_if_replaced(
                path, lambda: read_table(path, check, fields, columns, where, check_rows=accepts)
            )
        if (table, key) not in self._made:
            self._made[table, key] = self._of_journal(table, key[0], self.journals[key])
        rows = self._made[table, key]
        rows = rows if where is None else filtered(rows, where)
        return rows if columns is None else rows.select([x for x in columns if x in rows.column_names])

    def _of_journal(self, table: str, attempt: int, records: Sequence[StepRecord]) -> pa.Table:
        catalog = records[0].catalog
        if table == "steps":
            return steps_table(records, attempt, catalog)
        schema, own = self._schemas[table], schemas_of(catalog).get(table)
        if own is not None and not own.stores_the_same(schema):
            msg = f"{self.run}: the journal of attempt {attempt} has other columns of {table} than run.json"
            raise RunError(msg)
        return schema_table(schema, records, attempt, catalog)

    def _fields(self, table: str) -> Sequence[Field]:
        if table == "steps":
            return self._step_fields
        return fields_of(self._schemas[table], fingerprints=True) if table in self._schemas else ROW

    def claims(self, table: str, key: tuple[int, int]) -> Claims | None:
        """Check a Parquet file, and return what it claims to be; None for a journal."""
        if key in self.journals:
            return None
        path = segment_path(self.run, table, *key)

        def check() -> Claims:
            try:
                with open_file(path) as file:
                    return self._check(table, key, file)
            except (OSError, ValueError) as error:
                raise unreadable(path, error) from None

        return _again_if_replaced(path, check)

    def tables(self, key: tuple[int, int]) -> list[str]:
        """Return the names of the schemas that a segment has rows of, according to its file of steps."""
        if key in self.journals:
            kinds = [table.kind for record in self.journals[key] for table in record.tables.values()]
            found = {kind.schema.name for kind in kinds}
        else:
            claims = self.claims("steps", key)
            found = set() if claims is None else {*claims.tables}
        return [name for name in self._schemas if name in found]

    def last_written(self) -> tuple[int, int, str] | None:
        """Return attempt, first step and digest of the last file of steps; None without, or if damaged."""
        with suppress(RunError):
            if self.keys and (found := self.claims("steps", self.keys[-1])):
                return found.attempt, found.first_step, found.digest
        return None

    def without(self, attempt: int, records: Sequence[StepRecord]) -> list[StepRecord]:
        """Return those of an attempt's steps that are in none of its Parquet files."""
        starts = [first for of, first in self.keys if of == attempt]
        lasts: dict[int, int] = {}
        left = []
        for record in records:
            place = bisect.bisect_right(starts, record.step) - 1
            if place >= 0 and place not in lasts:
                steps = self.read("steps", (attempt, starts[place]), ["step"])["step"]
                lasts[place] = steps[-1].as_py() if len(steps) else -1
            if place < 0 or record.step > lasts[place]:
                left.append(record)
        return left

    def check_cells(self, table: str, keys: Collection[tuple[int, int]], cells: int) -> None:
        """Raise a RunError for a dense matrix that has too many values for the bytes of some segments."""
        size = sum([self._size(table, key) for key in keys])
        if 8 * cells > max(_LARGEST, _RATIO * size):
            msg = f"{self.run}: {cells} values of its steps and tensors would take {8 * cells >> 20} MiB, "
            msg += f"too many for {size} bytes on disk: choose fewer steps with first= and last="
            raise RunError(msg)

    def _size(self, table: str, key: tuple[int, int]) -> int:
        if key in self.journals:
            found = [x for record in self.journals[key] for x in record.tables.values()]
            own = [x for x in found if x.kind.schema.name == table]
            parts = [x.sparse() if x.kind.schema.storage == "sparse" else [x.values] for x in own]
            return sum([part.nbytes for of_table in parts for part in of_table])
        seen = stamp(segment_path(self.run, table, *key))
        return 0 if seen is None else seen[1]

    def _check(self, table: str, key: tuple[int, int], file: IO[bytes]) -> Claims:
        claims = self._alone(table, key, file)
        if table == "steps":
            self._check_order(key, claims)
            return claims
        path = segment_path(self.run, "steps", *key)
        try:
            with open_file(path) as of_steps:
                steps = self._alone("steps", key, of_steps)
        except (OSError, ValueError):
            return claims  # it says nothing about this one
        # a process that was killed between the two has replaced only this one
        if steps.tables.get(table) != claims.digest and claims.steps <= steps.steps:
            raise ValueError(f"it is not the version that {path.name} was written with")
        return claims

    def _alone(self, table: str, key: tuple[int, int], file: IO[bytes]) -> Claims:
        """Check a file without looking at others."""
        path = segment_path(self.run, table, *key)
        now = stamp_of(os.fstat(file.fileno()))
        known = self._whole.get(path)
        if known is not None and known[0] == now:
            return known[1]
        claims = read_claims(file)
        if (claims.table, claims.attempt, claims.first_step) != (table, *key):
            of = segment_path(self.run, claims.table, claims.attempt, claims.first_step)
            raise ValueError(f"its content is that of {of.name}")
        self._whole[path] = now, claims
        return claims

    def _check_order(self, key: tuple[int, int], claims: Claims) -> None:
        """Check that a file of steps is the version that was there when the run went on."""
        path = segment_path(self.run, "steps", *key)
        if self._closed_with.get(f"steps/{path.name}", claims.digest) != claims.digest:
            raise ValueError("it is not the version that the run was closed with")
        following = self._following.get(key)
        if following is None:
            return
        after = segment_path(self.run, "steps", *following)
        try:
            with open_file(after) as file:
                previous = self._alone("steps", following, file).previous
        except (OSError, ValueError):
            return  # it is damaged too, and says nothing about this one
        if previous and previous[:2] == key and previous[2] != claims.digest:
            raise ValueError(f"it is not the version that was there when {after.name} was begun")


def _again_if_replaced(path: Path, read: Callable[[], _T]) -> _T:
    """Call a function; if it fails because the writer replaced the file meanwhile, call it again."""
    for _ in range(_TRIES):
        before = stamp(path)
        try:
            return read()
        except RunError:
            if stamp(path) == before:
                raise
    return read()
