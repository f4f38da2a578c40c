"""The tables of a step in a journal, as numbers of 8 bytes each."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from gradiometer.columns import NUM_FINGERPRINT_COLUMNS
from gradiometer.recorder import Table
from gradiometer.runs.format import MOST, pyarrow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gradiometer.recorder import Catalog, Kind


def entry_of(table: Table) -> list[Any]:
    """Return ``[kind, size, has_fingerprints]``, from which `TableReader.read` reads a table again."""
    is_sparse = table.kind.schema.storage == "sparse"
    size = len(table.sparse()[0]) if is_sparse else len(table.rows)
    return [table.kind.name, size, not is_sparse and table.fingerprints is not None]


def buffers_of(table: Table) -> list[Any]:
    """Return the numbers of a table as buffers of Arrow."""
    if table.kind.schema.storage == "sparse":
        return [_buffer(part) for part in table.sparse()]
    parts = [table.values]
    if table.kind.schema.flags:
        parts.append(table.flags.to(torch.int64))
    if table.fingerprints is not None:
        parts.append(table.fingerprints)
    return [_buffer(part) for part in parts]


def _buffer(values: Tensor) -> Any:
    values = values.contiguous()
    return pyarrow().foreign_buffer(values.data_ptr(), values.nbytes, base=values)


class TableReader:
    """Reads tables one after another from the numbers of a frame.

    A ValueError, KeyError or TypeError if the numbers are not those of these tables; so does `read`.
    """

    def __init__(self, catalog: Catalog, entries: Sequence[Any], numbers: bytearray) -> None:
        self._catalog = catalog
        # tables without numbers are one: a text of a few bytes must not take a table for each step
        self._empty: dict[str, Table] = {}
        size = 8 * sum([self._words(*entry) for entry in entries])
        if size != len(numbers):
            raise ValueError(f"{len(numbers)} bytes of numbers for {len(entries)} tables")
        self._left = torch.zeros(0, dtype=torch.int64, device="cpu")
        if size:
            self._left = torch.frombuffer(numbers, dtype=torch.int64)

    def _words(self, kind: str, size: int, has_fingerprints: object) -> int:
        """Return how many numbers a table has."""
        of, rows = self._catalog.kinds[kind], len(self._catalog.rows(kind))
        is_sparse = of.schema.storage == "sparse"
        most = rows * of.schema.width if is_sparse else rows
        if type(size) is not int or not 0 <= size <= most or not (is_sparse or size == rows):
            raise ValueError(f"table {kind!r:.20} has size {size!r:.20}")
        width = 2 if is_sparse else of.schema.width + bool(of.schema.flags)
        return size * (width + NUM_FINGERPRINT_COLUMNS * (has_fingerprints is True and not is_sparse))

    def _take(self, *shape: int) -> Tensor:
        count = math.prod(shape)
        taken, self._left = self._left[:count], self._left[count:]
        return taken.view(shape)

    def read(self, kind: str, size: int, has_fingerprints: object) -> Table:
        """Return the next table."""
        if size == 0:
            if kind not in self._empty:
                self._empty[kind] = self._next(self._catalog.kinds[kind], size, has_fingerprints)
            return self._empty[kind]
        return self._next(self._catalog.kinds[kind], size, has_fingerprints)

    def _next(self, kind: Kind, size: int, has_fingerprints: object) -> Table:
        rows, schema = self._catalog.rows(kind.name), kind.schema
        if schema.storage == "sparse":
            places, values = self._take(size).clone(), self._take(size).clone().view(schema.dtype)
            cells = len(rows) * schema.width
            # limits first, lest differences overflow
            inside = not size or (int(places.min()) >= 0 and int(places.max()) < cells)
            if not inside or not (places.diff() > 0).all():
                raise ValueError(f"a table of {kind.name} has places outside of its columns")
            if schema.dtype == torch.int64 and bool(((values <= 0) | (values > MOST)).any()):
                raise ValueError(f"a table of {kind.name} has counts that no tensor has")
            return Table.of_sparse(kind, rows, places, values)
        columns = self._take(size, schema.width).view(schema.dtype)
        flags = self._take(size).to(torch.int32) if schema.flags else None
        bits = self._take(size, NUM_FINGERPRINT_COLUMNS) if has_fingerprints is True else None
        return Table(kind, rows, columns, flags, fingerprints=bits)
