"""Histograms of exponents in a run: steps to an Arrow table, and rows of such a table to histograms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from gradiometer.columns import NUM_EXPONENT_COLUMNS
from gradiometer.extras import require
from gradiometer.runs.format import EXPONENTS, arrow_schema, pyarrow
from gradiometer.runs.parquet import array, words
from gradiometer.runs.tables import MOST, numbers, within

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from torch import Tensor

    from gradiometer.recorder import StepExponents, StepRecord

# the bins of finite numbers that are not 0
_BINS: Final = slice(1, NUM_EXPONENT_COLUMNS - 2)


def exponents_table(records: Sequence[StepRecord], attempt: int) -> pa.Table:
    """Return one row per step, kind and measured parameter, in that order; steps may have none."""
    pa = pyarrow()
    schema = arrow_schema(EXPONENTS)
    tables = [
        _table(record.step, record.exponents, attempt) for record in records if record.exponents is not None
    ]
    return pa.concat_tables([schema.empty_table(), *tables]).unify_dictionaries().combine_chunks()


def _table(step: int, exponents: StepExponents, attempt: int) -> pa.Table:
    pa = pyarrow()
    rows = exponents.dense().flatten(0, 1)
    places = (rows.amax(dim=1) > 0).nonzero().view(-1)
    rows = rows[places]
    bins = rows[:, _BINS]
    # from the first bin that is not empty to the last one
    found = bins > 0
    some, size = found.any(dim=1), bins.shape[1]
    first = torch.where(some, found.to(torch.int8).argmax(dim=1), 0)
    end = torch.where(some, size - found.flip(1).to(torch.int8).argmax(dim=1), 0)
    index = torch.arange(size, device="cpu")
    kept = bins[(index >= first[:, None]) & (index < end[:, None])]
    ends = torch.cat([first.new_zeros(1), (end - first).cumsum(0)]).to(torch.int32)
    names = len(exponents.names)
    arrays = [
        array(torch.full_like(places, step)),
        array(torch.full_like(places, attempt, dtype=torch.int32)),
        words(places // names, exponents.kinds),
        words(places % names, exponents.names),
        *[array(rows[:, i].clone()) for i in (0, -2, -1)],
        array(first.to(torch.int32)),
        pa.ListArray.from_arrays(array(ends), array(kept)),
    ]
    return pa.Table.from_arrays(arrays, schema=arrow_schema(EXPONENTS))


def check_histograms(table: pa.Table) -> None:
    """Check the columns that a table of histograms has, before anything is made of them.

    Raises:
        ValueError: if they are not those of histograms.
    """
    compute = require("pyarrow.compute", "monitor", "A run record")
    pa = pyarrow()
    steps = (
        numbers(table["step"])
        if "step" in table.column_names
        else torch.zeros(0, dtype=torch.int64, device="cpu")
    )
    if bool((steps[1:] < steps[:-1]).any()):
        msg = "its steps do not ascend"
        raise ValueError(msg)
    numbers_of = [table[name] for name in ("n_zero", "n_inf", "n_nan") if name in table.column_names]
    bins = _BINS.stop - _BINS.start
    first = table["first_bin"].cast("int64") if "first_bin" in table.column_names else None
    fits = first is None or within(first, bins)
    if "counts" in table.column_names:
        counts = table["counts"]
        numbers_of.append(pa.chunked_array([x.flatten() for x in counts.chunks], pa.int64()))
        sizes = compute.list_value_length(counts).cast("int64")
        fits = fits and within(sizes if first is None else compute.add(first, sizes), bins)
    if not fits or not all([x.null_count == 0 and within(x, MOST) for x in numbers_of]):
        msg = "it has counts outside of the bins"
        raise ValueError(msg)


def histograms(table: pa.Table) -> Tensor:
    """Return the histograms of all rows, which `check_histograms` has accepted, ``(n, C) int64``."""
    compute = require("pyarrow.compute", "monitor", "A run record")
    counts = table["counts"].combine_chunks()
    out = torch.zeros((len(table), NUM_EXPONENT_COLUMNS), dtype=torch.int64, device="cpu")
    for place, name in zip((0, -2, -1), ("n_zero", "n_inf", "n_nan"), strict=True):
        out[:, place] = numbers(table[name])
    sizes = _vector(compute.list_value_length(counts)).to(torch.int64)
    values, first = _vector(counts.flatten()), numbers(table["first_bin"]).to(torch.int64)
    bins = out[:, _BINS]
    rows = torch.arange(len(sizes), device="cpu").repeat_interleave(sizes)
    starts = sizes.cumsum(0) - sizes
    within = torch.arange(len(values), device="cpu") - starts[rows]
    bins[rows, first[rows] + within] = values
    return out


def _vector(column: Any) -> Tensor:
    return numbers(pyarrow().chunked_array([column]))
