"""Parquet files: tables to the content of a file, and files to tables, within limits."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any, Final

from gradiometer.extras import require
from gradiometer.runs.files import file_error, open_file, summary
from gradiometer.runs.format import arrow_schema, pyarrow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import pyarrow as pa

    from gradiometer.runs.files import RunError
    from gradiometer.runs.format import Field

# the rows of a file take at most _LARGEST bytes of memory, or _RATIO times the size of the file; and a larger
# file takes at most twice the bytes of its rows
_LARGEST: Final = 290 * 10**6
_RATIO: Final = 100


def to_parquet(table: pa.Table) -> pa.Buffer:
    """Return one of the tables as the content of a Parquet file."""
    pq = require("pyarrow.parquet", "monitor", "A run record")
    floats = [field.name for field in table.schema if field.type == "double"]
    # a dictionary of sums that are all different would only add to them
    hashes = [field.name for field in table.schema if field.type == "uint64"]
    others = [field.name for field in table.schema if field.name not in {*floats, *hashes}]
    out = pyarrow().BufferOutputStream()
    pq.write_table(
        table,
        out,
        # higher levels save 1 %; see docs/reference/run-record.md
        compression="zstd",
        compression_level=1,
        use_byte_stream_split=floats,
        use_dictionary=others,
        # statistics of floats leave NaN out, and DuckDB then assumes that there is none
        write_statistics=others,
        # a dictionary of ten thousand names must still fit into one page
        dictionary_pagesize_limit=1 << 26,
        # small row groups, so that reading one step need not read its whole segment
        row_group_size=1 << 17,
        write_page_checksum=True,
    )
    return out.getvalue()


def read_table(
    path: Path,
    check: Callable[[IO[bytes]], object],
    fields: Sequence[Field],
    columns: Sequence[str] | None = None,
    where: Any = None,
    *,
    check_rows: Callable[[pa.Table], None] | None = None,
) -> pa.Table:
    """Return the rows of one file for which the expression ``where`` is true.

    ``check`` raises for a file that it does not accept, and ``check_rows`` for rows. ``fields``: the columns
    that the file may have; those of ``columns`` that it lacks are left out.

    Raises:
        RunError: if the file cannot be read or is not accepted.
    """
    pq = require("pyarrow.parquet", "monitor", "A run record")
    options = {"page_checksum_verification": True, "pre_buffer": False}
    try:
        with open_file(path) as file:
            check(file)
            size = file.seek(0, 2)
            parquet = pq.ParquetFile(_in_memory(file, size - _footer_size(file, size), size))
            _check_form(parquet, fields, columns, size)
            content = _in_memory(file, 0, size)
        if columns is not None:
            columns = [name for name in columns if name in parquet.schema_arrow.names]
        if where is None:
            table = pq.ParquetFile(content, metadata=parquet.metadata, **options).read(columns=columns)
        else:
            table = pq.read_table(content, filters=where, columns=columns, **options)
        for field in fields:
            if not field.nullable and field.name in table.column_names and table[field.name].null_count:
                raise ValueError(f"column {field.name} has nulls")  # noqa: TRY301 as for other content
        if check_rows is not None:
            check_rows(table)
    except (OSError, ValueError, pyarrow().ArrowException) as error:
        raise unreadable(path, error) from None
    return table


def _footer_size(file: IO[bytes], size: int) -> int:
    """Return the bytes of a Parquet file's footer, with its length and the magic number."""
    file.seek(max(size - 8, 0))
    found = 8 + int.from_bytes(file.read(4), "little")
    if found > min(size, _LARGEST):
        raise ValueError(f"it has a footer of {found} bytes")
    return found


def _in_memory(file: IO[bytes], start: int, end: int) -> pa.BufferReader:
    """Return a part of a file, in memory that Arrow has allocated.

    Arrow's threads may release what they read while the interpreter exits. They would call Python to release
    a file object or `bytes`, and that aborts the process.
    """
    buffer = pyarrow().allocate_buffer(end - start)
    file.seek(start)
    if file.readinto(buffer) != end - start:  # type: ignore[attr-defined]
        raise ValueError("it became shorter while it was read")
    return pyarrow().BufferReader(buffer)


def _check_form(parquet: Any, fields: Sequence[Field], columns: Sequence[str] | None, size: int) -> None:
    """Check a file's columns and sizes before anything is allocated for its rows."""
    schema, metadata = parquet.schema_arrow, parquet.metadata
    for field, expected in zip(fields, arrow_schema(fields), strict=True):
        places = schema.get_all_field_indices(field.name)
        needed = not field.nullable and (columns is None or field.name in columns)
        if len(places) > 1 or (needed and not places):
            raise ValueError(f"it has {len(places) or 'no'} column{'s' * bool(places)} {field.name}")
        if places and (found := schema.field(places[0]).type) != expected.type:
            raise ValueError(f"column {field.name} has the type {found!s:.60}, not {expected.type}")
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    stored = sum(
        [
            max(group.column(i).total_uncompressed_size, 8 * group.column(i).num_values)
            for group in groups
            for i in range(group.num_columns)
        ]
    )
    if stored > max(_LARGEST, _RATIO * size):
        msg = f"its {metadata.num_rows} rows would take {stored >> 20} MiB, too many for {size} bytes on disk"
        raise ValueError(msg)
    if size > max(_LARGEST, 2 * stored):
        msg = f"its {metadata.num_rows} rows take {stored >> 20} MiB, too few for {size} bytes on disk"
        raise ValueError(msg)


def unreadable(path: Path, error: Exception) -> RunError:
    """Return the error for a file that cannot be read."""
    advice = "to read the other steps, move its segment's files away, or pass skip_damaged=True to read_run"
    return file_error(path, summary(error), advice)
