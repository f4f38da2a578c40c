"""The journal of a run: steps that no Parquet file has yet, appended to a file as they arrive.

A journal is a sequence of frames. A frame is a header of 60 bytes, a JSON text, and numbers. The header has
`_MAGIC`; the number of bytes of the text and of the numbers, 8 bytes each; a SHA-256 digest in 32 bytes; and
the CRC-32 of these. The digest is that of the digest of the frame before, the header up to here, the text and
the numbers. All integers are little-endian.

The first frame has no numbers; its text has the attempt, its first step, and the catalog. The text of each
other frame is a list of ``[step, time, skipped, scalars, tables]``, where tables is a list of
``[kind, size, has_fingerprints]``, one for each table of the step. The numbers are those of these tables, one
after another, 8 bytes each. A table of N rows of a kind that is stored as columns has size N: its columns,
``(N, C)``; its flags, ``(N,) int64``, if the schema has flags; and its fingerprints, ``(N, 3) int64``, if it
has some. One that is stored sparsely has size M: where its values are in ``(N, C)``, flat, ``(M,) int64``,
and these values, ``(M,)``. The numbers are not compressed, so a small file can't take much memory.

A killed process leaves at most the beginning of a frame, and a power failure may leave zeros; both are
ignored.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import struct
import weakref
import zlib
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

import torch

from gradiometer.columns import NUM_FINGERPRINT_COLUMNS
from gradiometer.recorder import Catalog, StepRecord, Table
from gradiometer.runs.directory import is_at
from gradiometer.runs.files import RunError, file_error, open_file, summary
from gradiometer.runs.format import LARGEST_ATTEMPT, MOST, list_files, pyarrow
from gradiometer.runs.info import load_catalog
from gradiometer.runs.json_files import from_json, parse_json, plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from gradiometer.recorder import Kind

_DAMAGED: Final = "damaged-"
_MAGIC: Final = b"GRADJNL1"
_SIZES: Final = struct.Struct("<8sQQ")
# with the digest and the CRC
_HEADER: Final = _SIZES.size + 32 + 4
# a power failure may leave so many zeros
_BLOCK: Final = 1 << 26
_LARGEST_STEP: Final = 2**63 - 1


class Journal(NamedTuple):
    """The content of a journal.

    Attributes:
        catalog: the tables of its steps; None if nothing can be read.
        records: the steps, ascending, up to the first damage.
        error: what is damaged; None if nothing is.
        is_unreadable: whether the error is not damage, but that the file cannot be read now.
    """

    catalog: Catalog | None
    records: list[StepRecord]
    error: RunError | None = None
    is_unreadable: bool = False


def journal_path(run: Path, attempt: int, first_step: int) -> Path:
    """Return the path of a journal."""
    return run / f"journal-{attempt:04d}-{first_step:010d}.bin"


def list_journals(run: Path, prefix: str = "") -> dict[tuple[int, int], Any]:
    """Return the `stamp` of each journal by attempt and first step, ascending."""
    return list_files(run, f"{prefix}journal", "bin")


def keep_damaged(path: Path) -> Path:
    """Give a damaged journal a name under which it is not read, and return its path.

    It still supersedes steps of earlier attempts; `list_damaged` lists it.
    """
    kept = path.with_name(_DAMAGED + path.name)
    if kept.exists():
        return path
    try:
        return path.rename(kept)
    except OSError:
        return path


def list_damaged(run: Path) -> list[tuple[int, int]]:
    """Return attempt and first step of each journal that `keep_damaged` has kept."""
    return list(list_journals(run, _DAMAGED))


def frame(values: Any, numbers: Sequence[Any], previous: bytes) -> tuple[list[Any], bytes]:
    """Return the parts of a frame, and its digest; the first frame has an empty one before it.

    ``values`` become the text, and ``numbers`` are buffers of Arrow.
    """
    text = json.dumps(plain(values), allow_nan=False).encode()
    sizes = _SIZES.pack(_MAGIC, len(text), sum([part.size for part in numbers]))
    digest = _digest(previous, sizes, text, *numbers)
    head = sizes + digest
    return [head, zlib.crc32(head).to_bytes(4, "little"), text, *numbers], digest


def _digest(*parts: Any) -> bytes:
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(part)
    return hashed.digest()


def frames(file: IO[bytes]) -> Iterator[tuple[bytes, bytearray]]:
    """Return text and numbers of each whole frame; raise ValueError for one that is not as it was written."""
    at, size, previous = 0, file.seek(0, 2), b""
    file.seek(0)
    while len(header := file.read(_HEADER)) == _HEADER:
        sizes, digest = header[: _SIZES.size], header[_SIZES.size : -4]
        magic, text_size, numbers_size = _SIZES.unpack(sizes)
        if magic != _MAGIC or zlib.crc32(header[:-4]).to_bytes(4, "little") != header[-4:]:
            if not any(header) and not any(file.read(_BLOCK)) and file.tell() == size:
                return
            raise ValueError(f"there is no batch of steps at byte {at}")
        at += _HEADER + text_size + numbers_size
        if at > size:
            return
        text, numbers = file.read(text_size), bytearray(numbers_size)
        file.readinto(numbers)  # type: ignore[attr-defined]
        previous = _digest(previous, sizes, text, numbers)
        if previous != digest:
            raise ValueError(f"the batch of steps that ends at byte {at} does not match its digest")
        yield text, numbers


class JournalWriter:
    """Appends the steps of an attempt to a new journal, from ``first_step`` on."""

    def __init__(self, run: Path, attempt: int, first_step: int, catalog: Catalog) -> None:
        self.path = journal_path(run, attempt, first_step)
        self._head = {"attempt": attempt, "first_step": first_step, "catalog": catalog.to_dict()}
        self._file: IO[bytes] | None = None
        self._size = 0  # of whole frames
        self._digest = b""

    def append(self, records: Sequence[StepRecord]) -> None:
        """Append steps; if that fails, it can be called again."""
        made = [] if self._size else [frame(self._head, [], b"")]
        digest = made[0][1] if made else self._digest
        numbers = [part for x in records for table in x.tables.values() for part in _buffers_of(table)]
        entries = [
            [x.step, x.time, x.skipped, x.scalars, [_entry_of(table) for table in x.tables.values()]]
            for x in records
        ]
        made.append(frame(entries, numbers, digest))
        data = memoryview(b"".join([part for parts, _ in made for part in parts]))
        if self._file is None:
            # a link that was put there is removed, not followed
            self.path.unlink(missing_ok=True)
            self._file = self.path.open("xb", buffering=0)
            # also if this object is garbage-collected
            weakref.finalize(self, self._file.close)
        try:
            # over what a failed call has left
            self._file.seek(self._size)
            self._file.truncate()
            left = data
            while left:
                left = left[self._file.write(left) :]
        except BaseException:
            if not self._size:
                self.close(remove=True)
            raise
        self._size += len(data)
        self._digest = made[-1][1]

    @property
    def is_there(self) -> bool:
        """Whether nobody has removed the file."""
        return self._file is None or is_at(self.path, self._file)

    def close(self, *, remove: bool) -> None:
        """Close the file, and remove it if its steps are in Parquet files."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
            if remove:
                self.path.unlink(missing_ok=True)


def read_journal(run: Path, attempt: int, first_step: int) -> Journal | None:
    """Return what a journal holds up to its first damage; None if the file is missing."""
    path = journal_path(run, attempt, first_step)
    catalog: Catalog | None = None
    records: list[StepRecord] = []
    try:
        with open_file(path) as file:
            for text, numbers in frames(file):
                values = parse_json(text)
                try:
                    if catalog is None:
                        key, catalog = _read_head(values)
                    else:
                        records += _read_steps(values, numbers, catalog, records[-1:])
                except (AttributeError, LookupError, TypeError, ValueError) as error:
                    raise ValueError(f"unexpected content: {error!r:.80}") from None
                if key != (attempt, first_step):
                    raise ValueError(f"its content is that of {journal_path(run, *key).name}")  # noqa: TRY301 as for other damage
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (MemoryError, OSError, ValueError, RecursionError) as error:
        advice = "to read the other steps, move it away, or pass skip_damaged=True to read_run"
        failed = file_error(path, summary(error), advice)
        return Journal(catalog, records, failed, isinstance(error, (MemoryError, OSError)))
    return Journal(catalog, records)


def _read_head(values: Any) -> tuple[tuple[int, int], Catalog]:
    attempt, first_step = operator.index(values["attempt"]), operator.index(values["first_step"])
    if not 0 <= attempt <= LARGEST_ATTEMPT:
        raise ValueError(f"attempt {attempt}")
    return (attempt, first_step), load_catalog(values["catalog"])


def _read_steps(
    entries: Any, numbers: bytearray, catalog: Catalog, before: Sequence[StepRecord]
) -> list[StepRecord]:
    last = before[-1].step if before else -1
    records = []
    reader = _TableReader(catalog, [table for *_, tables in entries for table in tables], numbers)
    for step, time, skipped, scalars, tables in entries:
        if not (type(step) is int and last < step <= _LARGEST_STEP):
            raise ValueError(f"step {step!r:.20} after step {last}")
        last = step
        found = {name: float(x) for name, x in from_json(scalars).items()}
        kept = {table[0]: reader.read(*table) for table in tables}
        if len(kept) < len(tables):
            raise ValueError(f"step {step} has a table twice")
        records.append(StepRecord(step, float(time), found, catalog, kept, bool(skipped)))
    return records


def _entry_of(table: Table) -> list[Any]:
    """Return ``[kind, size, has_fingerprints]``, from which `_TableReader.read` reads a table again."""
    is_sparse = table.kind.schema.storage == "sparse"
    size = len(table.sparse()[0]) if is_sparse else len(table.rows)
    return [table.kind.name, size, not is_sparse and table.fingerprints is not None]


def _buffers_of(table: Table) -> list[Any]:
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


class _TableReader:
    """Reads tables one after another from the numbers of a frame.

    It and `read` raise ValueError, KeyError or TypeError if the numbers are not those of these tables.
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
