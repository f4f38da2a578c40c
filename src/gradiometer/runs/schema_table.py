"""The table of a schema: records to rows, and rows to tensors, by the columns of the schema alone.

A schema that is stored as columns has a column for each of its own; one that is stored sparsely has lists of
the columns that are not 0 and of their values.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from gradiometer.extras import require
from gradiometer.runs.arrow import array, numbers, within, words
from gradiometer.runs.format import FINGERPRINTS, MOST, arrow_schema, fields_of, is_integer, pyarrow

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from torch import Tensor

    from gradiometer.columns import Schema
    from gradiometer.recorder import Catalog, StepRecord, Table


def schemas_of(catalog: Catalog) -> dict[str, Schema]:
    """Return the schemas of a catalog by name."""
    return {kind.schema.name: kind.schema for kind in catalog.kinds.values()}


def schema_table(schema: Schema, records: Sequence[StepRecord], attempt: int, catalog: Catalog) -> pa.Table:
    """Return one row per step, kind and measured parameter or tap, in that order.

    It has columns of fingerprints only if the steps have some.
    """
    kinds = [kind for kind in catalog.kinds.values() if kind.schema.name == schema.name]
    spaces = {kind.rows: catalog.rows(kind.name).names for kind in kinds}
    # of the first name of each kind among those of all row spaces
    first: dict[str, int] = {}
    names: list[str] = []
    for space, of_space in spaces.items():
        first[space] = len(names)
        names += of_space
    parts = [
        (record.step, i, record.tables[kind.name])
        for record in records
        for i, kind in enumerate(kinds)
        if kind.name in record.tables
    ]
    if not parts:
        return arrow_schema(fields_of(schema)).empty_table()
    tables = [table for _, _, table in parts]
    is_sparse = schema.storage == "sparse"
    has_bits = not is_sparse and any([table.fingerprints is not None for table in tables])
    # the part and the place in it of each row
    part, row, own = (_sparse_columns if is_sparse else _dense_columns)(schema, tables)
    steps = torch.tensor([step for step, _, _ in parts], device="cpu")[part]
    kind = torch.tensor([i for _, i, _ in parts], device="cpu")[part]
    starts = torch.tensor([first[x.rows] for x in kinds], device="cpu")[kind]
    arrays = [
        array(steps),
        array(torch.full_like(part, attempt, dtype=torch.int32)),
        words(kind, [x.name for x in kinds]),
        words(starts + row, names),
        *own,
    ]
    fields = fields_of(schema, fingerprints=has_bits)
    return pyarrow().Table.from_arrays(arrays, schema=arrow_schema(fields))


def _dense_columns(schema: Schema, tables: Sequence[Table]) -> tuple[Tensor, Tensor, list[pa.Array]]:
    values = torch.cat([table.values for table in tables])  # (n, C)
    part = _repeated([len(table.rows) for table in tables])
    row = torch.cat([torch.arange(len(table.rows), device="cpu") for table in tables])
    more = []
    if schema.flags:
        more.append(torch.cat([table.flags for table in tables]).to(torch.int32))
    has_bits = any([table.fingerprints is not None for table in tables])
    bits = torch.cat([_bits_of(table) for table in tables]) if has_bits else None
    measured = values[:, 0] > 0
    if not measured.all():
        values, part, row = values[measured], part[measured], row[measured]
        more = [x[measured] for x in more]
        bits = None if bits is None else bits[measured]
    columns = values.t().contiguous()
    if "norm" in schema and "norm" not in schema.index:
        more.append(schema.value(columns.t(), "norm"))
    arrays = [
        # clones, because views would keep the memory of all columns
        array(x.round().to(torch.int64) if is_integer(schema, column) else x.clone())
        for column, x in zip(schema.columns, columns, strict=True)
    ]
    arrays += map(array, more)
    return part, row, arrays if bits is None else arrays + _or_null(bits)


def _sparse_columns(schema: Schema, tables: Sequence[Table]) -> tuple[Tensor, Tensor, list[pa.Array]]:
    pa, width = pyarrow(), schema.width
    found = [table.sparse() for table in tables]
    part = _repeated([len(positions) for positions, _ in found])
    positions = torch.cat([positions for positions, _ in found])
    values = torch.cat([values for _, values in found])
    row = positions // width
    # a new list where the part or the row changes
    starts = torch.ones(len(row), dtype=torch.bool, device="cpu")
    starts[1:] = (row[1:] != row[:-1]) | (part[1:] != part[:-1])
    begins = starts.nonzero().view(-1)
    ends = array(torch.cat([begins, torch.tensor([len(row)], device="cpu")]).to(torch.int32))
    lists = [
        pa.ListArray.from_arrays(ends, array((positions % width).to(torch.int32))),
        pa.ListArray.from_arrays(ends, array(values)),
    ]
    return part[begins], row[begins], lists


def _repeated(sizes: Sequence[int]) -> Tensor:
    """Return each index as often as its size says."""
    # repeat_interleave would start threads, as many as the machine has cores, beside the thread that writes
    parts = [torch.full((size,), i, dtype=torch.int64, device="cpu") for i, size in enumerate(sizes)]
    return torch.cat(parts)


def _bits_of(table: Table) -> Tensor:
    """Return the fingerprints of a table; -1 bytes where there is none."""
    if table.fingerprints is not None:
        return table.fingerprints
    none = torch.zeros((len(table.rows), len(FINGERPRINTS)), dtype=torch.int64, device="cpu")
    none[:, 0] = -1
    return none


def _or_null(bits: Tensor) -> list[pa.Array]:
    """Return the columns of fingerprints, ``(n, 3) int64``, as arrays; null where there is none."""
    types = arrow_schema(FINGERPRINTS).types
    arrays = [array(column.clone()).view(kind) for column, kind in zip(bits.t(), types, strict=True)]
    none = bits[:, 0] < 0
    if none.any():
        compute = require("pyarrow.compute", "monitor", "A run record")
        known = pyarrow().array((~none).tolist())
        arrays = [compute.if_else(known, x, pyarrow().scalar(None, x.type)) for x in arrays]
    return arrays


def columns_of(schema: Schema, table: pa.Table) -> Tensor:
    """Return the raw columns of all rows, ``(n, C)``."""
    if schema.storage == "columns":
        return torch.stack([numbers(table[name]).to(schema.dtype) for name in schema.index], dim=1)
    rows, positions, values = sparse_of(table)
    out = torch.zeros((len(table), schema.width), dtype=schema.dtype, device="cpu")
    out[rows, positions] = values
    return out


def sparse_of(table: pa.Table) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, column and value of what is not 0 in a table that is stored sparsely."""
    compute = require("pyarrow.compute", "monitor", "A run record")
    sizes = numbers(compute.list_value_length(table["positions"])).to(torch.int64)
    rows = torch.arange(len(table), device="cpu").repeat_interleave(sizes)
    return rows, numbers(_items(table, "positions")).to(torch.int64), numbers(_items(table, "values"))


def _items(table: pa.Table, name: str) -> pa.ChunkedArray:
    column = table[name]
    return pyarrow().chunked_array([x.flatten() for x in column.chunks], column.type.value_type)


def fingerprints_of(table: pa.Table) -> Tensor | None:
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


def problem_of(table: Table) -> str:
    """Return why readers would refuse a table of a kind of the user's own; empty if they would not."""
    schema, values = table.kind.schema, table.values
    for i, column in enumerate(schema.columns if len(values) else ()):
        found = values[:, i]
        most = values[:, 0].clamp(max=MOST) if column.unit == "elements" else MOST
        if column.is_count and not bool(((found <= most) & (found >= (-MOST if column.signed else 0))).all()):
            return f"column {column.name} is a count, and has a number that is none, see gm.Column"
        if not column.signed and bool((found < 0).any()):
            return f"column {column.name} has a number below 0, but is not signed, see gm.Column"
    return ""


def check_rows(schema: Schema, table: pa.Table) -> None:
    """Raise a ValueError for a number that no tensor has, in the columns that were read."""
    (_check_sparse if schema.storage == "sparse" else _check_dense)(schema, table)


def _check_dense(schema: Schema, table: pa.Table) -> None:
    compute = require("pyarrow.compute", "monitor", "A run record")
    columns = {name: table[name] for name in table.column_names}
    numel = columns.get("numel")
    for column in schema.columns:
        found = columns.get(column.name)
        if found is None:
            continue
        if not column.is_count:
            # NaN is what an `inv_scale` of NaN makes of a magnitude
            if not column.signed and not within(found, 0, math.inf):
                raise ValueError(f"column {column.name} has a number below 0")
            continue
        if not within(found, -MOST if column.signed else 0, MOST):
            msg = f"column {column.name} has a count below {'-2**53' if column.signed else 0} or above 2**53"
            raise ValueError(msg)
        if column.unit == "elements" and numel is not None:
            fits = compute.all(compute.less_equal(found, numel)).as_py()
            if fits is False:
                raise ValueError(f"column {column.name} has a count above numel")
    if "norm" in columns and "norm" not in schema.index and not within(columns["norm"], 0, math.inf):
        raise ValueError("column norm has a number below 0")


def _check_sparse(schema: Schema, table: pa.Table) -> None:
    compute = require("pyarrow.compute", "monitor", "A run record")
    there = {*table.column_names}
    if "step" in there and bool((numbers(table["step"]).diff() < 0).any()):
        raise ValueError("its steps do not ascend")
    lists = [name for name in ("positions", "values") if name in there]
    items = {name: _items(table, name) for name in lists}
    fits = all([column.null_count == 0 for column in items.values()])
    if len(lists) == 2:
        lengths = [compute.list_value_length(table[name]).combine_chunks() for name in lists]
        fits = fits and lengths[0].equals(lengths[1])
    if fits and "positions" in there:
        found = numbers(items["positions"]).to(torch.int64)
        sizes = numbers(compute.list_value_length(table["positions"])).to(torch.int64)
        rows = torch.arange(len(table), device="cpu").repeat_interleave(sizes)
        ascends = bool(((rows * schema.width + found).diff() > 0).all())
        fits = ascends and within(items["positions"], 0, schema.width - 1)
    if fits and "values" in there:
        signed = any([column.signed for column in schema.columns])
        most = MOST if schema.dtype == torch.int64 else math.inf
        fits = within(items["values"], -most if signed else 0, most)
    if not fits:
        raise ValueError(f"it has values outside of the {schema.width} columns, or that no tensor has")
