"""Compare the steps that two runs have in common: scalars, statistics of tensors, and fingerprints."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from gradiometer.columns import COLUMN_INDEX, COLUMN_NAMES, NUM_COLUMNS, derived
from gradiometer.extras import require
from gradiometer.runs.comparison import BitDifference, Difference
from gradiometer.runs.format import pyarrow
from gradiometer.runs.tables import scalars_of

if TYPE_CHECKING:
    import re
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa
    from torch import Tensor

    from gradiometer.recorder import Kind, StepRecord
    from gradiometer.runs.reader import Run

# columns that do not depend on the order of summation
UNROUNDED: Final = [i for name, i in COLUMN_INDEX.items() if name not in {"sumsq", "sum"}]

# rows of the two runs that are compared at once
_BLOCK: Final = 1000


class RunTensors(NamedTuple):
    """The tensors of a run that are compared: the kind and row of each, by its label."""

    run: Run
    rows: Mapping[str, tuple[Kind, int]]

    def form(self, name: str) -> str:
        """Return a tensor's dtype and shape."""
        roster, row = self.run.roster, self.rows[name][1]
        return f"{roster.dtypes[row]} {list(roster.shapes[row])}"

    def indices(self, names: list[str]) -> Tensor:
        """Return the indices of tensors among the rows of all kinds."""
        roster, rows = self.run.roster, [self.rows[name] for name in names]
        return torch.tensor([roster.place(kind) * len(roster.names) + i for kind, i in rows], device="cpu")


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
    names: list[str],
    rtol: float,
    *,
    columns: Sequence[int] = range(NUM_COLUMNS),
) -> tuple[list[Difference], int]:
    """Return the tensors that differ in the first step where any does, and the number of compared steps.

    ``columns``: those that are compared.
    """
    if not steps or not names:
        return [], 0
    compared, indices = 0, (a.indices(names), b.indices(names))
    for compared, pair in enumerate(_pairs(a.run, b.run, steps), 1):
        here, there = (_columns(record)[index] for record, index in zip(pair, indices, strict=True))
        differ = _differ(here, there, rtol)
        differ[:, [i for i in range(NUM_COLUMNS) if i not in columns]] = False
        if differ.any():
            return [
                Difference(pair[0].step, names[i], a.rows[names[i]][0], _values(here[i], there[i], differ[i]))
                for i in differ.any(dim=1).nonzero().flatten().tolist()
            ], compared
    return [], compared


def bits(
    a: RunTensors, b: RunTensors, steps: list[int], names: list[str]
) -> tuple[BitDifference | None, int, tuple[str, ...]]:
    """Compare the fingerprints of all steps.

    Returns the first tensor whose bits differ, the number of steps with all fingerprints until then, and the
    tensors that have none in the last step: these are left out.
    """
    if not steps or not names:
        return None, 0, ()
    whole, indices = 0, (a.indices(names), b.indices(names))
    needed: Tensor | None = None
    for pair in itertools.chain(_pairs(a.run, b.run, steps[-1:]), _pairs(a.run, b.run, steps)):
        found = [_fingerprints(record) for record in pair]
        if found[0] is None or found[1] is None:
            needed = torch.ones(len(names), dtype=torch.bool, device="cpu") if needed is None else needed
            continue
        here, there = found[0][indices[0]], found[1][indices[1]]
        known = (here[:, 0] >= 0) & (there[:, 0] >= 0)
        if needed is None:
            needed = known if known.any() else known.logical_not()
            continue
        whole += bool((known | ~needed).all())
        differ = (here != there).any(dim=1) & known
        if differ.any():
            name = names[int(differ.nonzero()[0])]
            return BitDifference(pair[0].step, name, a.rows[name][0], int(differ.sum())), whole, ()
    unknown = () if needed is None else tuple(itertools.compress(names, needed.logical_not().tolist()))
    unknown = tuple([name for name in unknown if a.rows[name][0] != "updates"])
    return None, whole, unknown if whole else ()


def _fingerprints(record: StepRecord) -> Tensor | None:
    """Return the fingerprints of all kinds, ``(K * N, 3) int64``; -1 bytes in a kind that is not measured."""
    found = []
    for kind in record.roster.kinds:
        bits = record.fingerprints(kind)
        if bits is None:
            return None
        # weights may be recorded only since the run was resumed
        found.append(bits if record.measured(kind).any() else torch.full_like(bits, -1))
    return torch.cat(found)


def _pairs(a: Run, b: Run, steps: list[int]) -> Iterator[tuple[StepRecord, StepRecord]]:
    """Iterate over some steps that both runs have, ascending."""
    wanted = set(steps)
    streams = [run.records(steps[0], steps[-1]) for run in (a, b)]
    return zip(*((r for r in stream if r.step in wanted) for stream in streams), strict=True)


def _columns(record: StepRecord) -> Tensor:
    """Return the raw columns of all kinds, ``(K * N, C)``."""
    return torch.cat([record.columns(kind) for kind in record.roster.kinds])


def _values(here: Tensor, there: Tensor, differ: Tensor) -> dict[str, tuple[float | None, float | None]]:
    pairs = zip(COLUMN_NAMES, here.tolist(), there.tolist(), differ.tolist(), strict=True)
    return {name: (x, y) for name, x, y, differs in pairs if differs}


def _differ(a: Tensor, b: Tensor, rtol: float) -> Tensor:
    """Return which values differ by more than the tolerance. ``(M, C), (M, C) -> (M, C) bool``."""
    unequal = (a != b) & ~(a.isnan() & b.isnan())
    if rtol == 0:
        return unequal
    larger = torch.maximum(a.abs(), b.abs())
    numel, sumsq = larger[:, COLUMN_INDEX["numel"]], larger[:, COLUMN_INDEX["sumsq"]]
    allowed = torch.zeros_like(larger)
    # a norm with a relative error of rtol has a square with a relative error of 2 * rtol
    allowed[:, COLUMN_INDEX["sumsq"]] = 2 * rtol * sumsq
    allowed[:, COLUMN_INDEX["abs_max"]] = rtol * larger[:, COLUMN_INDEX["abs_max"]]
    # terms cancel in a sum, so the sum may be small where its terms are not
    allowed[:, COLUMN_INDEX["sum"]] = rtol * derived.sqrt(numel * sumsq)
    allowed[:, COLUMN_INDEX["n_zero"]] = rtol * numel
    return unequal & ~((a - b).abs() <= allowed.nan_to_num(posinf=0.0))
