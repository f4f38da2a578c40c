"""The table of steps: records to rows with the totals of their tensors, and rows to scalars."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, Final

import torch

from gradiometer.runs.arrow import numbers
from gradiometer.runs.format import arrow_schema, pyarrow, step_fields
from gradiometer.runs.json_files import encodable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from gradiometer.recorder import Catalog, Kind, StepRecord

# scalars of steps whose gradients are clipped: the limit, and what the gradients were multiplied by
CLIP_LIMIT: Final = "clip_max_norm"
CLIP_FACTOR: Final = "clip_factor"
# columns of `STEPS` with a total of the gradients -> the statistic
_TOTALS: Final = {"total_norm": "norm"} | {
    name: name for name in ("finite_norm", "abs_max", "numel", "n_zero", "n_nan", "n_inf")
}
# those of the first kind that has the statistic -> the count without which it is null
_RATIOS: Final = {"update_ratio": "numel", "stuck_fraction": "n_nonzero_g"}


def steps_table(records: Sequence[StepRecord], attempt: int, catalog: Catalog | None = None) -> pa.Table:
    """Return one row per step, with the totals of the kinds of a catalog."""
    columns: dict[str, list[Any]] = {
        "step": [record.step for record in records],
        "attempt": [attempt] * len(records),
        "time": [record.time for record in records],
        "recorded": [record.recorded for record in records],
        "skipped": [record.skipped for record in records],
        "kinds": [[*record.tables] for record in records],
        "loss": [record.scalars.get("loss") for record in records],
        "lr": [record.scalars.get("lr") for record in records],
        "scalars": [
            [(encodable(name), x) for name, x in record.scalars.items() if name not in {"loss", "lr"}]
            for record in records
        ],
    }
    dense = () if catalog is None else catalog.dense
    totals = _Totals(records, dense)
    for name, statistic in _TOTALS.items():
        columns[name] = totals.of("grads", statistic)
    tables = [record.tables.get("grads") for record in records]
    for name, attribute in (("n_measured", "measured"), ("n_flagged", "flags")):
        columns[name] = [None if x is None else int(getattr(x, attribute).count_nonzero()) for x in tables]
    for kind in dense:
        columns[f"{kind.name}_norm"] = totals.of(kind.name, "norm")
    for name, needed in _RATIOS.items():
        of = next((kind.name for kind in dense if name in kind.schema), "")
        columns[name] = [
            x if known and not math.isnan(x) else None
            for x, known in zip(totals.of(of, name), totals.of(of, needed), strict=True)
        ]
    schema = arrow_schema(step_fields(catalog))
    return pyarrow().Table.from_pydict({name: columns[name] for name in schema.names}, schema=schema)


class _Totals:
    """Statistics of all tensors of a kind together, one value per step."""

    def __init__(self, records: Sequence[StepRecord], kinds: Sequence[Kind]) -> None:
        self._records = records
        self._merged = {}
        for kind in kinds:
            found = [record.tables[kind.name].merged for record in records if kind.name in record.tables]
            if found:
                self._merged[kind.name] = kind.schema, torch.stack(found)

    def of(self, kind: str, statistic: str) -> list[Any]:
        """Return a statistic for each step; None where the kind was not measured, or does not have it."""
        schema, merged = self._merged.get(kind, (None, None))
        if schema is None or merged is None or statistic not in schema:
            return [None] * len(self._records)
        values = schema.value(merged, statistic)
        known = iter((values.to(torch.int64) if schema[statistic].is_count else values).tolist())
        return [next(known) if kind in record.tables else None for record in self._records]


def check_steps(table: pa.Table, first: int) -> None:
    """Raise a ValueError unless steps ascend from ``first`` on, and each of their scalars is a number."""
    steps = numbers(table["step"])
    if len(steps) and (int(steps.min()) < first or bool((steps.diff() <= 0).any())):
        raise ValueError(f"its steps do not ascend from {first} on")
    if any([part.null_count for chunk in table["scalars"].chunks for part in (chunk.keys, chunk.items)]):
        raise ValueError("column scalars has nulls")


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
