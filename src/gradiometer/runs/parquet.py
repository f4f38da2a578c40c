"""Write steps as Parquet: records to Arrow tables, and a table to a file."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, Final

import torch

from gradiometer.columns import (
    COLUMN_INDEX,
    COLUMNS,
    NUM_COLUMNS,
    NUM_TAP_COLUMNS,
    NUM_UPDATE_COLUMNS,
    RING_WIDTH,
    UPDATE_NAMES,
    derived,
    update_value,
)
from gradiometer.extras import require
from gradiometer.recorder import KINDS, TAP_KINDS
from gradiometer.runs.format import FINGERPRINTS, STEPS, TAPS, TENSORS, UPDATES, arrow_schema, pyarrow
from gradiometer.runs.json_files import encodable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from torch import Tensor

    from gradiometer.recorder import Kind, Roster, StepRecord

# a measured tensor has elements, and a flagged one has flags
_COUNTED: Final = [COLUMN_INDEX["numel"], NUM_COLUMNS]


def tensors_table(records: Sequence[StepRecord], attempt: int, roster: Roster) -> pa.Table:
    """Return one row per step, kind and measured parameter or tap, in that order.

    The table has the columns of `FINGERPRINTS` only if the steps have fingerprints, those of `UPDATES` only
    if they have updates, and those of `TAPS` only if they have activations.
    """
    pa = pyarrow()
    fields, schema = [*TENSORS], arrow_schema(TENSORS)
    recorded = [record for record in records if record.values is not None]
    if not recorded:
        return schema.empty_table()
    rows = torch.stack([record.values for record in recorded])  # type: ignore[misc]
    rows = rows.flatten(0, 2)  # (S * K * N, C + 1), and 3 more with fingerprints
    places = torch.arange(len(rows), device="cpu")
    measured = rows[:, COLUMN_INDEX["numel"]] > 0
    if not measured.all():
        rows, places = rows[measured], places[measured]
    if not len(rows):
        return schema.empty_table()
    columns = rows.t().contiguous()
    norm = derived.value(columns[:NUM_COLUMNS].t(), "norm")
    steps = torch.tensor([record.step for record in recorded], device="cpu")
    names = places % len(roster.names)
    kinds = places // len(roster.names) % len(roster.kinds)
    # clones, because views would keep the memory of all columns
    raw = [
        x.round().to(torch.int64) if c.scaling == "1" else x.clone()
        for c, x in zip(COLUMNS, columns, strict=False)
    ]
    arrays = [
        array(steps[places // roster.num_rows]),
        array(torch.full_like(names, attempt, dtype=torch.int32)),
        words(kinds, roster.kinds),
        words(names, roster.names),
        *map(array, raw),
        array(columns[NUM_COLUMNS].to(torch.int32)),
        array(norm),
    ]
    if rows.shape[1] > RING_WIDTH:
        fields += FINGERPRINTS
        bits = columns[RING_WIDTH:].view(torch.int64)
        arrays += _or_null(bits, arrow_schema(FINGERPRINTS).types)
    if any([record.further is not None for record in recorded]):
        fields += UPDATES
        further = _further(recorded)[places // roster.num_rows, names]
        of_updates = kinds == roster.place("updates")
        arrays += _where(of_updates, further, arrow_schema(UPDATES).types)
    if any([record.tap_sums is not None for record in recorded]):
        fields += TAPS
        kind = kinds - roster.place(TAP_KINDS[0])
        of_taps = _tap_sums(recorded)[places // roster.num_rows, kind.clamp(min=0), names]
        arrays += _where(kind >= 0, of_taps, arrow_schema(TAPS).types)
    return pa.Table.from_arrays(arrays, schema=arrow_schema(fields))


def steps_table(records: Sequence[StepRecord], attempt: int) -> pa.Table:
    """Return one row per step."""
    columns: dict[str, list[Any]] = {
        "step": [record.step for record in records],
        "attempt": [attempt] * len(records),
        "time": [record.time for record in records],
        "recorded": [record.recorded for record in records],
        "skipped": [record.skipped for record in records],
        "loss": [record.scalars.get("loss") for record in records],
        "lr": [record.scalars.get("lr") for record in records],
        "scalars": [
            [(encodable(name), x) for name, x in record.scalars.items() if name not in {"loss", "lr"}]
            for record in records
        ],
    }
    recorded = [record for record in records if record.recorded]
    for kind in (kind for kind in KINDS if kind not in TAP_KINDS):
        of_kind = [record for record in recorded if kind in record.roster.kinds]
        totals = _totals(of_kind, kind)
        if kind != "grads":
            totals = {f"{kind}_norm": totals["total_norm"]}
        for name, numbers in totals.items():
            left = iter(numbers)
            columns[name] = [
                next(left) if record.recorded and kind in record.roster.kinds else None for record in records
            ]
    left = iter(_update_totals([record for record in recorded if "updates" in record.roster.kinds]))
    pairs = [
        next(left) if record.recorded and "updates" in record.roster.kinds else (None, None)
        for record in records
    ]
    columns["update_ratio"], columns["stuck_fraction"] = (
        (list(x) for x in zip(*pairs, strict=True)) if pairs else ([], [])
    )
    schema = arrow_schema(STEPS)
    return pyarrow().Table.from_pydict({name: columns[name] for name in schema.names}, schema=schema)


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


def _totals(records: Sequence[StepRecord], kind: Kind) -> dict[str, list[Any]]:
    """Return the statistics of all tensors of a kind together, one value per record."""
    none = torch.zeros((0, NUM_COLUMNS), dtype=torch.float64, device="cpu")
    merged = torch.cat([none, *[record.merged(kind)[None] for record in records]])
    values = [record.values[record.roster.place(kind), :, _COUNTED] for record in records]  # type: ignore[index]
    counts = torch.stack(values).count_nonzero(dim=1) if values else none
    totals = {
        "total_norm": derived.value(merged, "norm"),
        "n_measured": counts[:, 0],
        "n_flagged": counts[:, 1],
    }
    totals |= {name: derived.value(merged, name) for name in ("finite_norm", "abs_max")}
    for name in ("numel", "n_zero", "n_nan", "n_inf"):
        totals[name] = derived.value(merged, name).to(torch.int64)
    return {name: x.tolist() for name, x in totals.items()}


def _further(records: Sequence[StepRecord]) -> Tensor:
    """Return the further columns of updates, ``(S, N, 5) float64``; NaN where they are not known."""
    return torch.stack(
        [
            torch.full(
                (len(x.roster.names), NUM_UPDATE_COLUMNS), torch.nan, dtype=torch.float64, device="cpu"
            )
            if x.further is None
            else x.further
            for x in records
        ]
    )


def _tap_sums(records: Sequence[StepRecord]) -> Tensor:
    """Return the further columns of activations, ``(S, 2, N, 4) float64``; NaN where they are not known."""
    size = len(TAP_KINDS), len(records[0].roster.names), NUM_TAP_COLUMNS
    none = torch.full(size, torch.nan, dtype=torch.float64, device="cpu")
    return torch.stack([none if x.tap_sums is None else x.tap_sums for x in records])


def _update_totals(records: Sequence[StepRecord]) -> list[tuple[float | None, float | None]]:
    """Return the update ratio and the fraction of stuck elements of each step; None if it is not known."""
    if not records:
        return []
    merged = torch.stack([record.merged("updates") for record in records])
    further = _further(records).sum(dim=1)
    ratios = update_value(merged, further, "update_ratio")
    ratios = torch.where(derived.value(merged, "numel") > 0, ratios, torch.nan)
    known = further[:, UPDATE_NAMES.index("n_nonzero_g")] > 0
    stuck = torch.where(known, update_value(merged, further, "stuck_fraction"), torch.nan)
    found = [[None if math.isnan(x) else x for x in values.tolist()] for values in (ratios, stuck)]
    return list(zip(*found, strict=True))


def _where(kept: Tensor, values: Tensor, types: Sequence[pa.DataType]) -> list[pa.Array]:
    """Return columns ``(n, ...)`` as arrays; null where they are not kept, or NaN."""
    compute = require("pyarrow.compute", "monitor", "A run record")
    arrays = []
    for column, kind in zip(values.unbind(1), types, strict=True):
        known = kept & ~column.isnan()
        numbers = torch.where(known, column, 0.0)
        numbers = numbers.round().to(torch.int64) if kind == pyarrow().int64() else numbers
        there = compute.not_equal(array(known.to(torch.int32)), 0)
        arrays.append(compute.if_else(there, array(numbers), pyarrow().scalar(None, kind)))
    return arrays


def _or_null(bits: Tensor, types: Sequence[pa.DataType]) -> list[pa.Array]:
    """Return the columns of fingerprints, ``(3, n) int64``, as arrays; null where there is none."""
    arrays = [array(column.clone()).view(kind) for column, kind in zip(bits, types, strict=True)]
    none = bits[0] < 0
    if none.any():
        compute = require("pyarrow.compute", "monitor", "A run record")
        known = pyarrow().array((~none).tolist())
        arrays = [compute.if_else(known, x, pyarrow().scalar(None, x.type)) for x in arrays]
    return arrays


def words(codes: Tensor, names: Sequence[str]) -> pa.Array:
    """Return ``names[code]`` for each code as a dictionary array."""
    indices = array(codes.to(torch.int32))
    return pyarrow().DictionaryArray.from_arrays(indices, _dictionary(tuple(names)))


@functools.lru_cache(maxsize=4)
def _dictionary(names: tuple[str, ...]) -> pa.Array:
    pa = pyarrow()
    return pa.array([encodable(name) for name in names], pa.string())


def array(numbers: Tensor) -> pa.Array:
    """Return a vector as an Arrow array that shares its memory."""
    pa = pyarrow()
    numbers = numbers.contiguous()
    types = {torch.int64: pa.int64(), torch.int32: pa.int32(), torch.float64: pa.float64()}
    data = pa.foreign_buffer(numbers.data_ptr(), numbers.numel() * numbers.itemsize, base=numbers)
    return pa.Array.from_buffers(types[numbers.dtype], len(numbers), [None, data])
