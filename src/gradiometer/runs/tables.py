"""Read Parquet files of a run record as Arrow tables, and their columns as tensors."""

from __future__ import annotations

import itertools
import math
from typing import IO, TYPE_CHECKING, Any, Final

import torch
from torch.utils.dlpack import from_dlpack

from gradiometer.extras import require
from gradiometer.runs.files import file_error, open_file, summary
from gradiometer.runs.format import (
    EXPONENTS,
    FINGERPRINTS,
    STEPS,
    TAPS,
    TENSORS,
    UPDATES,
    arrow_schema,
    pyarrow,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa
    from torch import Tensor

    from gradiometer.runs.files import RunError
    from gradiometer.runs.format import Field

# the rows of a file take at most _LARGEST bytes of memory, or _RATIO times the size of the file; and a larger
# file takes at most twice the bytes of its rows
_LARGEST: Final = 290 * 10**6
_RATIO: Final = 100

_FIELDS: Final = {
    "steps": STEPS,
    "tensors": (*TENSORS, *FINGERPRINTS, *UPDATES, *TAPS),
    "exponents": EXPONENTS,
}

# a count, at most: sums of many fit into int64, and each is exact in float64
MOST: Final = 2**53
_COUNTS: Final = [field for field in (*TENSORS, *UPDATES, *TAPS) if field.type == "int64" and field.unit]
_MAGNITUDES: Final = ("sumsq", "abs_max", "norm", "sumsq_a", "sumsq_b", "sumsq_g", "sum4")


def read_table(
    path: Path,
    check: Callable[[IO[bytes]], object],
    columns: Sequence[str] | None = None,
    where: Any = None,
) -> pa.Table:
    """Read one file, after ``check`` has accepted it; columns that it may lack are left out then."""
    pq = require("pyarrow.parquet", "monitor", "A run record")
    options = {"page_checksum_verification": True, "pre_buffer": False}
    try:
        with open_file(path) as file:
            check(file)
            fields = _FIELDS[path.parent.name]
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
        if path.parent.name == "tensors":
            _check_tensors(table)
    except (OSError, ValueError, pyarrow().ArrowException) as error:
        raise unreadable(path, error) from None
    for field in fields:
        if not field.nullable and field.name in table.column_names and table[field.name].null_count:
            raise unreadable(path, ValueError(f"column {field.name} has nulls"))
    return table


def filtered(table: pa.Table, where: Any) -> pa.Table:
    """Return the rows for which an expression is true.

    `Table.filter` would do this on Arrow's threads, which must not hold the Python objects of a table.
    """
    ds = require("pyarrow.dataset", "monitor", "A run record")
    return ds.dataset(table).to_table(filter=where, use_threads=False)


def _footer_size(file: IO[bytes], size: int) -> int:
    """Return the bytes of a Parquet file's footer, with its length and the magic number."""
    file.seek(max(size - 8, 0))
    found = 8 + int.from_bytes(file.read(4), "little")
    if found > min(size, _LARGEST):
        msg = f"it has a footer of {found} bytes"
        raise ValueError(msg)
    return found


def _in_memory(file: IO[bytes], start: int, end: int) -> pa.BufferReader:
    """Return a part of a file, in memory that Arrow has allocated.

    Arrow's threads may release what they read while the interpreter exits. They would call Python to release
    a file object or `bytes`, and that aborts the process.
    """
    buffer = pyarrow().allocate_buffer(end - start)
    file.seek(start)
    if file.readinto(buffer) != end - start:  # type: ignore[attr-defined]
        msg = "it became shorter while it was read"
        raise ValueError(msg)
    return pyarrow().BufferReader(buffer)


def _check_form(parquet: Any, fields: Sequence[Field], columns: Sequence[str] | None, size: int) -> None:
    """Check a file's columns and sizes before anything is allocated for its rows."""
    schema, metadata = parquet.schema_arrow, parquet.metadata
    for field, expected in zip(fields, arrow_schema(fields), strict=True):
        places = schema.get_all_field_indices(field.name)
        needed = not field.nullable and (columns is None or field.name in columns)
        if len(places) > 1 or (needed and not places):
            msg = f"it has {len(places) or 'no'} column{'s' * bool(places)} {field.name}"
            raise ValueError(msg)
        if places and (found := schema.field(places[0]).type) != expected.type:
            msg = f"column {field.name} has the type {found!s:.60}, not {expected.type}"
            raise ValueError(msg)
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


def _check_tensors(table: pa.Table) -> None:
    """Raise a ValueError for a count or a magnitude that no tensor has, in the columns that were read."""
    compute = require("pyarrow.compute", "monitor", "A run record")
    columns = {name: table[name] for name in table.column_names}
    numel = columns.get("numel")
    for field in _COUNTS:
        found = columns.get(field.name)
        if found is None:
            continue
        if not within(found, MOST):
            msg = f"column {field.name} has a count below 0 or above 2**53"
            raise ValueError(msg)
        if field.unit == "elements" and numel is not None:
            fits = compute.all(compute.less_equal(found, numel)).as_py()
            if fits is False:
                msg = f"column {field.name} has a count above numel"
                raise ValueError(msg)
    for name in _MAGNITUDES:
        # NaN is what an `inv_scale` of NaN makes of a magnitude
        if name in columns and not within(columns[name], math.inf):
            msg = f"column {name} has a number below 0"
            raise ValueError(msg)


def within(column: pa.ChunkedArray, most: float) -> bool:
    """Return whether all numbers are from 0 to ``most``, or null or NaN."""
    ends = require("pyarrow.compute", "monitor", "A run record").min_max(column).as_py()
    return ends["min"] is None or not (ends["min"] < 0 or ends["max"] > most)


def unreadable(path: Path, error: Exception) -> RunError:
    """Return the error for a file that cannot be read."""
    # the segment's other file
    table = path.parent.name
    if table == "exponents":
        return file_error(path, summary(error), "to read the others, pass skip_damaged=True to read_run")
    other = "tensors" if table == "steps" else "steps"
    twin = f"{other}/{other}{path.name.removeprefix(table)}"
    advice = f"to read the other steps, move it and {twin} away, or pass skip_damaged=True to read_run"
    return file_error(path, summary(error), advice)


def scalars_of(rows: pa.Table) -> list[dict[str, float]]:
    """Return the scalars of each row of `STEPS`: the loss, the learning rate and the others, by name."""
    found = []
    others: list[dict[str, float]] = []
    for chunk in rows["scalars"].chunks:
        # convert the whole chunk at once: converting each row's map alone takes thirty times as long
        ends = chunk.offsets.to_pylist()
        low, high = ends[0], ends[-1]
        names, numbers = (x.slice(low, high - low).to_pylist() for x in (chunk.keys, chunk.items))
        for a, b in itertools.pairwise(ends):
            others.append(dict(zip(names[a - low : b - low], numbers[a - low : b - low], strict=True)))
    for loss, lr, more in zip(rows["loss"].to_pylist(), rows["lr"].to_pylist(), others, strict=True):
        scalars = {} if loss is None else {"loss": loss}
        if lr is not None:
            scalars["lr"] = lr
        found.append(scalars | more)
    return found


def check_steps(table: pa.Table, first: int) -> None:
    """Raise a ValueError unless steps ascend from ``first`` on, and each of their scalars is a number."""
    steps = numbers(table["step"])
    if len(steps) and (int(steps.min()) < first or bool((steps.diff() <= 0).any())):
        msg = f"its steps do not ascend from {first} on"
        raise ValueError(msg)
    if any([part.null_count for chunk in table["scalars"].chunks for part in (chunk.keys, chunk.items)]):
        msg = "column scalars has nulls"
        raise ValueError(msg)


def cut(table: pa.Table, first: int | None, last: int | None) -> pa.Table:
    """Return the rows of steps from ``first`` to ``last``; the steps are ascending."""
    steps = numbers(table["step"])
    low = 0 if first is None else int(torch.searchsorted(steps, first))
    high = len(steps) if last is None else int(torch.searchsorted(steps, last, right=True))
    return table.slice(low, max(high - low, 0))


def numbers(column: pa.ChunkedArray) -> Tensor:
    """Return a column of numbers without nulls as a tensor."""
    chunks = [from_dlpack(chunk) for chunk in column.chunks if len(chunk)]
    if not chunks:
        return from_dlpack(column.combine_chunks())
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)


def fingerprints(table: pa.Table) -> Tensor | None:
    """Return the fingerprints of all rows, ``(n, 3) int64``; None if the table lacks their columns."""
    names = [field.name for field in FINGERPRINTS]
    if not set(names) <= set(table.column_names):
        return None
    compute = require("pyarrow.compute", "monitor", "A run record")
    columns = []
    for name in names:
        column = table[name]
        if column.null_count:
            column = compute.fill_null(column, -1 if name == names[0] else 0)
        # the same bits, for a sum of 2**63 and more too
        columns.append(numbers(column.cast("int64", safe=False)))
    return torch.stack(columns, dim=1)


def further(table: pa.Table, fields: Sequence[Field] = UPDATES) -> Tensor:
    """Return the further columns of updates or activations of all rows, ``(n, len(fields)) float64``.

    NaN where they are not known.
    """
    compute = require("pyarrow.compute", "monitor", "A run record")
    none = torch.full((len(table),), torch.nan, dtype=torch.float64, device="cpu")
    columns = [
        numbers(compute.fill_null(table[field.name].cast("double", safe=False), float("nan")))
        if field.name in table.column_names
        else none
        for field in fields
    ]
    return torch.stack(columns, dim=1)


def codes(column: pa.ChunkedArray, index: Mapping[str, int]) -> Tensor:
    """Return the index of each word of a dictionary column, ``(n,) int64``; -1 for unknown words."""
    parts = [torch.empty(0, dtype=torch.int64, device="cpu")]
    for chunk in column.chunks:
        if len(chunk):
            places = torch.tensor(
                [index.get(word, -1) for word in chunk.dictionary.to_pylist()], device="cpu"
            )
            parts.append(places.index_select(0, from_dlpack(chunk.indices)))
    return torch.cat(parts)


def put(out: Tensor, values: Tensor, places: tuple[Tensor, ...]) -> None:
    """Write ``(n, ...)`` values to their places ``(S, K, N)`` in ``out``; skip rows with an index of -1."""
    rows, kinds, names = places
    bad = (rows | kinds | names) < 0
    if bad.any():
        keep = ~bad
        rows, kinds, names, values = rows[keep], kinds[keep], names[keep], values[keep]
    _, k, n = out.shape[:3]
    out.flatten(0, 2).index_copy_(0, (rows * k + kinds).mul_(n).add_(names), values)
