"""Compare the steps that two runs have in common: scalars, statistics of tensors, and fingerprints."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from gradiometer.extras import require
from gradiometer.recorder import OPTION
from gradiometer.runs.comparison import BitDifference, Difference
from gradiometer.runs.format import pyarrow
from gradiometer.runs.steps_table import scalars_of

if TYPE_CHECKING:
    import re
    from collections.abc import Iterator, Mapping

    import pyarrow as pa
    from torch import Tensor

    from gradiometer.columns import Schema
    from gradiometer.recorder import StepRecord
    from gradiometer.runs.reader import Run

# the kind and name of a tensor
Key = tuple[str, str]

# rows of the two runs that are compared at once
_BLOCK: Final = 1000


class RunTensors(NamedTuple):
    """The tensors of a run that are compared: the row of each, by its kind and name."""

    run: Run
    rows: Mapping[Key, int]

    def form(self, key: Key) -> str:
        """Return the dtype and shape of a parameter; empty for a tap."""
        rows, row = self.run.catalog.rows(key[0]), self.rows[key]
        return f"{rows.dtypes[row]} {list(rows.shapes[row])}" if rows.shapes else ""

    @property
    def steps(self) -> set[int]:
        """The steps with tables."""
        rows = self.run.steps
        pairs = zip(rows["step"].to_pylist(), rows["kinds"].to_pylist(), strict=True)
        return {step for step, kinds in pairs if kinds}

    def indices(self, keys: list[Key]) -> dict[str, Tensor]:
        """Return, for each kind, the rows of its tensors."""
        return {
            kind: torch.tensor([self.rows[kind, name] for name in names], device="cpu")
            for kind, names in _names(keys).items()
        }


def scalars(
    a: Run, b: Run, common: list[int], rtol: float, ignore: re.Pattern[str] | None
) -> list[Difference]:
    """Return the first difference of each scalar."""
    found: dict[str, Difference] = {}
    tables = [_rows_of(run, common) for run in (a, b)]
    for start in range(0, len(common), _BLOCK):
        here, there = (table.slice(start, _BLOCK) for table in tables)
        # most blocks are equal, and Arrow detects that a hundred times faster
        if here.equals(there):
            continue
        for step, one, other in zip(common[start:], _given(here), _given(there), strict=False):
            for name in {**one, **other}:
                pair = one.get(name), other.get(name)
                if None in pair and name.startswith(OPTION):
                    # recorded when it changes, and at the start of an attempt
                    continue
                if name in found or _is_close(*pair, rtol) or (ignore is not None and ignore.search(name)):
                    continue
                found[name] = Difference(step, name, None, {"value": pair})
    return list(found.values())


def _rows_of(run: Run, steps: list[int]) -> pa.Table:
    """Return the scalars of steps that are in the run."""
    compute = require("pyarrow.compute", "monitor", "A run record")
    rows = run.steps.select(["step", "lr", "loss", "scalars", "skipped"])
    if len(rows) != len(steps):
        kept = compute.index_in(pyarrow().array(steps, pyarrow().int64()), rows["step"])
        rows = rows.take(kept)
    return rows.drop_columns(["step"]).combine_chunks()


def _given(rows: pa.Table) -> list[dict[str, float]]:
    skipped = rows["skipped"].to_pylist()
    return [x | {"skipped": float(y)} for x, y in zip(scalars_of(rows), skipped, strict=True)]


def _is_close(x: float | None, y: float | None, rtol: float) -> bool:
    if x is None or y is None:
        return x is y
    if math.isnan(x) or math.isnan(y):
        return math.isnan(x) and math.isnan(y)
    return x == y or (math.isfinite(x - y) and abs(x - y) <= rtol * max(abs(x), abs(y)))


def tensors(
    a: RunTensors,
    b: RunTensors,
    steps: list[int],
    keys: list[Key],
    rtol: float,
    *,
    is_unrounded: bool = False,
) -> tuple[list[Difference], int]:
    """Return the tensors that differ in the first step where any does, and the number of compared steps.

    ``keys``: the tensors, those of a kind one after the other. ``is_unrounded``: compare only columns that do
    not depend on the order of summation.
    """
    if not steps or not keys:
        return [], 0
    compared, kinds = 0, a.run.catalog.kinds
    indices, names = (a.indices(keys), b.indices(keys)), _names(keys)
    for compared, pair in enumerate(_pairs(a.run, b.run, steps), 1):
        found: list[Difference] = []
        for kind, own in names.items():
            schema, tables = kinds[kind].schema, [record.tables.get(kind) for record in pair]
            is_rare = schema.storage == "sparse" or kinds[kind].of == "states"
            if None in tables and (tables == [None, None] or is_rare):
                # histograms and states may be recorded in other steps
                continue
            here, there = (
                record.columns(kind)[index[kind]].nan_to_num(nan=0.0)
                if table is None
                else table.values[index[kind]]
                for record, table, index in zip(pair, tables, indices, strict=True)
            )
            differ = _differ(schema, here, there, rtol)
            if is_unrounded:
                differ[:, [c.merge == "sum" and not c.is_count for c in schema.columns]] = False
            found += [
                Difference(
                    pair[0].step,
                    kinds[kind].label(own[i]),
                    kind,
                    _values(schema, here[i], there[i], differ[i]),
                )
                for i in differ.any(dim=1).nonzero().flatten().tolist()
            ]
        if found:
            return found, compared
    return [], compared


def bits(
    a: RunTensors, b: RunTensors, steps: list[int], keys: list[Key]
) -> tuple[BitDifference | None, int, tuple[str, ...]]:
    """Compare the fingerprints of all steps.

    Returns the first tensor whose bits differ, the number of steps with all fingerprints until then, and the
    tensors that have none in the last step: these are left out. ``keys``: as for `tensors`.
    """
    if not steps or not keys:
        return None, 0, ()
    whole, indices = 0, (a.indices(keys), b.indices(keys))
    labels = [a.run.catalog.kinds[kind].label(name) for kind, name in keys]
    needed: Tensor | None = None
    for pair in itertools.chain(_pairs(a.run, b.run, steps[-1:]), _pairs(a.run, b.run, steps)):
        here, there = (_fingerprints(record, rows) for record, rows in zip(pair, indices, strict=True))
        known = (here[:, 0] >= 0) & (there[:, 0] >= 0)
        if needed is None:
            needed = known if known.any() else known.logical_not()
            continue
        whole += bool((known | ~needed).all())
        differ = (here != there).any(dim=1) & known
        if differ.any():
            first = int(differ.nonzero()[0])
            return BitDifference(pair[0].step, labels[first], keys[first][0], int(differ.sum())), whole, ()
    unknown = () if needed is None else tuple(itertools.compress(labels, needed.logical_not().tolist()))
    return None, whole, unknown if whole else ()


def _names(keys: list[Key]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for kind, name in keys:
        found.setdefault(kind, []).append(name)
    return found


def _fingerprints(record: StepRecord, rows: Mapping[str, Tensor]) -> Tensor:
    """Return the fingerprints of some rows of each kind, ``(M, 3) int64``; -1 bytes where there are none."""
    found = []
    for kind, index in rows.items():
        bits = record.fingerprints(kind)
        # weights may be recorded only since the run was resumed
        if bits is None or not record.measured(kind).any():
            bits = torch.full((len(record.names(kind)), 3), -1, dtype=torch.int64, device="cpu")
        found.append(bits[index])
    return torch.cat(found)


def _pairs(a: Run, b: Run, steps: list[int]) -> Iterator[tuple[StepRecord, StepRecord]]:
    """Iterate over some steps that both runs have, ascending."""
    wanted = set(steps)
    streams = [run.records(steps[0], steps[-1]) for run in (a, b)]
    return zip(*((r for r in stream if r.step in wanted) for stream in streams), strict=True)


def _values(
    schema: Schema, here: Tensor, there: Tensor, differ: Tensor
) -> dict[str, tuple[float | None, float | None]]:
    pairs = zip(schema.index, here.tolist(), there.tolist(), differ.tolist(), strict=True)
    return {name: (x, y) for name, x, y, differs in pairs if differs}


def _differ(schema: Schema, a: Tensor, b: Tensor, rtol: float) -> Tensor:
    """Return which values differ by more than the tolerance. ``(M, C), (M, C) -> (M, C) bool``."""
    unequal = (a != b) & ~(a.isnan() & b.isnan())
    if rtol == 0:
        return unequal
    larger = torch.maximum(a.abs(), b.abs()).double()
    nothing = larger.new_zeros(larger.shape[0])
    numel, sumsq = [schema.value(larger, x).double() if x in schema else nothing for x in ("numel", "sumsq")]
    squares = [i for i, c in enumerate(schema.columns) if c.scaling == "s*s" and not c.signed]
    allowed = torch.zeros_like(larger)
    for i, column in enumerate(schema.columns):
        value, power = larger[:, i], column.scaling.count("s")
        if column.is_count:
            # other counts, and those that are usually 0, must be equal
            is_share = column.style == "count" and column.unit == "elements" and column.name != "numel"
            allowed[:, i] = rtol * numel if is_share else 0.0
        elif column.signed:
            # terms cancel in a sum, so the sum may be small where its terms are not
            bound = larger[:, squares].sum(dim=1) if power > 1 else (numel * sumsq).sqrt()
            allowed[:, i] = max(power, 1) * rtol * bound
        else:
            # a norm with a relative error of rtol has a square with a relative error of 2 * rtol
            allowed[:, i] = rtol * value * (1 if column.merge == "max" else max(power, 2))
    return unequal & ~((a - b).abs() <= allowed.nan_to_num(posinf=0.0))
