"""Columns of Arrow tables as tensors, tensors as columns, and rows by step."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.dlpack import from_dlpack

from gradiometer.extras import require
from gradiometer.runs.format import pyarrow
from gradiometer.runs.json_files import encodable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa
    from torch import Tensor


def array(numbers: Tensor) -> pa.Array:
    """Return a vector as an Arrow array that shares its memory."""
    pa = pyarrow()
    numbers = numbers.contiguous()
    types = {torch.int64: pa.int64(), torch.int32: pa.int32(), torch.float64: pa.float64()}
    data = pa.foreign_buffer(numbers.data_ptr(), numbers.numel() * numbers.itemsize, base=numbers)
    return pa.Array.from_buffers(types[numbers.dtype], len(numbers), [None, data])


def words(codes: Tensor, names: Sequence[str]) -> pa.Array:
    """Return ``names[code]`` for each code as a dictionary array."""
    indices = array(codes.to(torch.int32))
    return pyarrow().DictionaryArray.from_arrays(indices, _dictionary(tuple(names)))


@functools.lru_cache(maxsize=8)
def _dictionary(names: tuple[str, ...]) -> pa.Array:
    pa = pyarrow()
    return pa.array([encodable(name) for name in names], pa.string())


def numbers(column: Any) -> Tensor:
    """Return a column of numbers without nulls as a tensor."""
    if isinstance(column, pyarrow().Array):
        column = pyarrow().chunked_array([column])
    chunks = [from_dlpack(chunk) for chunk in column.chunks if len(chunk)]
    if not chunks:
        return from_dlpack(column.combine_chunks())
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)


def codes(column: pa.ChunkedArray, index: Mapping[str, int]) -> Tensor:
    """Return the index of each word of a dictionary column, ``(n,) int64``; -1 for unknown words."""
    parts = [torch.empty(0, dtype=torch.int64, device="cpu")]
    for chunk in column.chunks:
        if len(chunk):
            found = [index.get(word, -1) for word in chunk.dictionary.to_pylist()]
            places = torch.tensor(found, device="cpu")
            parts.append(places.index_select(0, from_dlpack(chunk.indices)))
    return torch.cat(parts)


def within(column: pa.ChunkedArray, least: float, most: float) -> bool:
    """Return whether all numbers are from ``least`` to ``most``, or null or NaN."""
    ends = require("pyarrow.compute", "monitor", "A run record").min_max(column).as_py()
    return ends["min"] is None or not (ends["min"] < least or ends["max"] > most)


def filtered(table: pa.Table, where: Any) -> pa.Table:
    """Return the rows for which an expression is true.

    `Table.filter` would do this on Arrow's threads, which must not hold the Python objects of a table.
    """
    ds = require("pyarrow.dataset", "monitor", "A run record")
    return ds.dataset(table).to_table(filter=where, use_threads=False)


def cut(table: pa.Table, first: int | None, last: int | None) -> pa.Table:
    """Return the rows of steps from ``first`` to ``last``; the steps are ascending."""
    steps = numbers(table["step"])
    low = 0 if first is None else int(torch.searchsorted(steps, first))
    high = len(steps) if last is None else int(torch.searchsorted(steps, last, right=True))
    return table.slice(low, max(high - low, 0))


def joined(tables: Sequence[pa.Table]) -> pa.Table:
    """Return the rows of several tables; null in columns that a table lacks."""
    return pyarrow().concat_tables(tables, promote_options="default")


def put(out: Tensor, values: Tensor, places: tuple[Tensor, Tensor]) -> Tensor:
    """Write ``(n, ...)`` values to their places ``(S, N)`` in ``out``, and return it; -1 is no place."""
    rows, names = places
    bad = (rows | names) < 0
    if bad.any():
        keep = ~bad
        rows, names, values = rows[keep], names[keep], values[keep]
    out.flatten(0, 1).index_copy_(0, (rows * out.shape[1]).add_(names), values)
    return out
