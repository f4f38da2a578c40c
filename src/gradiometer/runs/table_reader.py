"""The part of a run that reads tables of schemas: as Arrow tables, as matrices, and as records."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gradiometer.extras import require
from gradiometer.recorder import KINDS, StepRecord, Table
from gradiometer.runs.arrow import codes, cut, joined, numbers, put
from gradiometer.runs.files import RunError
from gradiometer.runs.format import FINGERPRINTS, ROW, arrow_schema, fields_of, pyarrow
from gradiometer.runs.opened import OpenedRun
from gradiometer.runs.schema_table import columns_of, fingerprints_of, schemas_of, sparse_of
from gradiometer.runs.steps_table import scalars_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    import pyarrow as pa
    from torch import Tensor

    from gradiometer.columns import Schema
    from gradiometer.recorder import Kind

# rows of a sparse table that are made dense at once
_CHUNK = 4096


class TableReader(OpenedRun):
    """Reads tables of schemas; `gradiometer.runs.Run` documents it."""

    def table(
        self,
        schema: str,
        *,
        columns: Collection[str] | None = None,
        kind: str | None = None,
        names: Collection[str] | str | None = None,
        first: int | None = None,
        last: int | None = None,
    ) -> pa.Table:
        """Return the rows of a schema: one per step, kind and measured parameter or tap, in that order.

        Args:
            schema: the name of a schema, such as ``"tensors"``, ``"pairs"`` or ``"activations"``.
            columns: names of columns, those of `fields_of` for the schema; None for all, but for the columns
                of fingerprints only if some were recorded. They are null where none was.
            kind: only rows of this kind.
            names: only rows of these parameters or taps; a string is one name.
            first: only from this step on.
            last: only up to and including this step.
        """
        of = self._schema(schema)
        fields = arrow_schema(fields_of(of, fingerprints=of.storage == "columns"))
        # at first those that every file has
        own = arrow_schema(fields_of(of)).names if columns is None else list(columns)
        columns = fields.names if columns is None else own
        for name in columns:
            if name not in fields.names:
                msg = f"there is no column {name!r} of {schema}; choose from {', '.join(fields.names)}"
                raise RunError(msg)
        if kind is not None:
            self._kind(kind)
        ds = require("pyarrow.dataset", "monitor", "A run record")
        tables = [pyarrow().schema([fields.field(name) for name in own]).empty_table()]
        for key in self._segments_with(schema, first, last):
            low, high = self._bounds(key, first, last)
            where = (ds.field("step") >= low) & (ds.field("step") <= high)
            if kind is not None:
                where &= ds.field("kind") == kind
            if names is not None:
                where &= ds.field("name").isin([names] if isinstance(names, str) else list(names))
            tables.append(self._files.read(schema, key, columns, where))
        return joined(tables).unify_dictionaries()

    def tensors(
        self,
        *,
        columns: Collection[str] | None = None,
        kind: str | None = None,
        names: Collection[str] | str | None = None,
        first: int | None = None,
        last: int | None = None,
    ) -> pa.Table:
        """Return the rows of tensors, as `table` does; with ``kind``, those of the schema of that kind."""
        schema = "tensors" if kind is None else self._kind(kind).schema.name
        return self.table(schema, columns=columns, kind=kind, names=names, first=first, last=last)

    def matrix(
        self, statistic: str, kind: str = "grads", *, first: int | None = None, last: int | None = None
    ) -> tuple[list[int], Tensor]:
        """Return one statistic of every tensor in every recorded step.

        Args:
            statistic: a raw column or derived value of the kind's schema, such as ``"rms"``, or ``"flags"``;
                for example, updates have ``"update_ratio"``, and activations ``"kurtosis"``.
            kind: one of ``catalog.kinds``.
            first: only from this step on.
            last: only up to and including this step.

        Returns:
            S steps, ascending, and ``(S, N) float64``, of ``catalog.names_of(kind)``. NaN where the
            tensor was not measured in that step. A norm is also NaN or inf where the tensor has a NaN or Inf;
            ``matrix("n_nan")`` distinguishes the cases, and ``matrix("finite_norm")`` is the norm of the
            finite elements. Of a kind that is stored sparsely, only steps that have it.
        """
        steps, found = self.matrices([statistic], kind, first=first, last=last)
        return steps, found[statistic]

    def matrices(
        self,
        statistics: Sequence[str],
        kind: str = "grads",
        *,
        first: int | None = None,
        last: int | None = None,
    ) -> tuple[list[int], dict[str, Tensor]]:
        """Return several statistics by name, each as `matrix` returns it; files are read only once."""
        schema = self._kind(kind).schema
        is_sparse = schema.storage == "sparse"
        stored = [] if is_sparse else [field.name for field in fields_of(schema)[len(ROW) :]]
        for statistic in statistics:
            if statistic not in schema and statistic not in stored:
                names = ", ".join(dict.fromkeys([*stored, *schema.names]))
                raise RunError(f"there is no statistic {statistic!r}; choose from {names}")
        steps = self._steps_with(kind, first, last)
        size = len(steps), len(self.catalog.names_of(kind))
        keys = [*self._segments_with(schema.name, first, last)] if statistics else []
        self._files.check_cells(schema.name, keys, len(statistics) * math.prod(size))
        out = {name: torch.full(size, torch.nan, dtype=torch.float64, device="cpu") for name in statistics}
        needs_all = any([name not in stored for name in out])
        needed = [*(schema.index if needs_all else ()), *[name for name in out if name in stored]]
        columns = ["positions", "values"] if is_sparse else [*dict.fromkeys(needed)]
        for key in keys:
            table = self._rows_of(schema.name, key, columns, first, last)
            # a dense matrix of a sparse table takes far more memory than its file
            size_of_part = _CHUNK if is_sparse else max(len(table), 1)
            for start in range(0, len(table), size_of_part):
                rows = table.slice(start, size_of_part)
                places = self._places(rows, steps, kind)
                raw = columns_of(schema, rows) if needs_all else torch.empty(0, device="cpu")
                for name, to in out.items():
                    found = numbers(rows[name]) if name in stored else schema.value(raw, name)
                    put(to, found.to(torch.float64), places)
        return steps.tolist(), out

    def record(self, step: int) -> StepRecord:
        """Return one step.

        Raises:
            RunError: if the run has no such step.
        """
        for record in self.records(step, step):
            return record
        known = self.steps["step"]
        there = f"it has {len(known)}, from {known[0]} to {known[-1]}" if len(known) else "it has none yet"
        raise RunError(f"{self.path} has no step {step}; {there}")

    def records(self, first: int | None = None, last: int | None = None) -> Iterator[StepRecord]:
        """Iterate over the steps, ascending, from ``first`` to ``last`` inclusive.

        Files are read lazily, and those of kinds that are stored sparsely only when their values are asked.
        """
        for key in self._between(first, last):
            rows = cut(self._steps_of(key), first, last)
            steps, kinds = rows["step"].to_pylist(), rows["kinds"].to_pylist()
            # the steps of each kind
            of = {
                name: [step for step, found in zip(steps, kinds, strict=True) if name in found]
                for name in self.catalog.kinds
            }
            tables: dict[tuple[str, int], Table] = {}
            for schema in schemas_of(self.catalog).values():
                own = {
                    self.catalog.kinds[name]: found
                    for name, found in of.items()
                    if found and self.catalog.kinds[name].schema is schema
                }
                if own and (schema.name, key) not in self._without:
                    read = self._sparse_tables if schema.storage == "sparse" else self._dense_tables
                    tables |= read(key, schema, own)
            columns = [rows[name].to_pylist() for name in ("time", "skipped")]
            for step, scalars, time, skipped in zip(steps, scalars_of(rows), *columns, strict=True):
                found = {name: tables[name, step] for name in of if (name, step) in tables}
                yield StepRecord(step, time, scalars, self.catalog, found, skipped, self.thresholds)

    def _sparse_tables(
        self, key: tuple[int, int], _: Schema, kinds: Mapping[Kind, list[int]]
    ) -> dict[tuple[str, int], Table]:
        """Return the tables of kinds by kind and step, which are read when their values are asked."""
        rows = self.catalog.rows
        return {
            (kind.name, step): Table(kind, rows(kind.name), partial(self._sparse, key, kind, step))
            for kind, steps in kinds.items()
            for step in steps
        }

    def _dense_tables(
        self, key: tuple[int, int], schema: Schema, kinds: Mapping[Kind, list[int]]
    ) -> dict[tuple[str, int], Table]:
        """Return the tables of kinds of one schema by kind and step, for steps of a segment that have one."""
        has_bits = any([kind.has_fingerprints for kind in kinds])
        cells = sum([len(steps) * len(self.catalog.rows(kind.name)) for kind, steps in kinds.items()])
        width = schema.width + 1 + len(FINGERPRINTS) * (has_bits and self.has_fingerprints)
        self._files.check_cells(schema.name, [key], cells * width)
        fields = fields_of(schema, fingerprints=has_bits)[len(ROW) :]
        columns = [field.name for field in fields if field.name != "norm" or "norm" in schema.index]
        rows = arrow_schema(fields_of(schema)).empty_table()
        if schema.name in self._files.tables(key):
            ends = [step for steps in kinds.values() for step in (steps[0], steps[-1])]
            rows = self._rows_of(schema.name, key, columns, min(ends), max(ends))
        # of all rows
        stored = {"values": columns_of(schema, rows)}
        if schema.flags:
            stored["flags"] = numbers(rows["flags"])
        if has_bits and (bits := fingerprints_of(rows)) is not None:
            stored["fingerprints"] = bits
        tables = {}
        for kind, steps in kinds.items():
            names = self.catalog.rows(kind.name)
            places = self._places(rows, torch.tensor(steps, device="cpu"), kind.name)
            # 0 where nothing was measured
            own = {
                part: put(x.new_zeros((len(steps), len(names), *x.shape[1:])), x, places)
                for part, x in stored.items()
                if part != "fingerprints" or kind.has_fingerprints
            }
            for i, step in enumerate(steps):
                parts = {part: x[i] for part, x in own.items()}
                tables[kind.name, step] = Table(kind, names, **parts, thresholds=self.thresholds)
        return tables

    def _sparse(self, key: tuple[int, int], kind: Kind, step: int) -> Tensor:
        """Return the raw columns of a step of a kind that is stored sparsely, ``(N, C)``."""
        names, schema = self.catalog.names_of(kind.name), kind.schema
        self._files.check_cells(schema.name, [key], len(names) * schema.width)
        out = torch.zeros((1, len(names), schema.width), dtype=schema.dtype, device="cpu")
        if schema.name in self._files.tables(key):
            table = self._rows_of(schema.name, key, ["positions", "values"], step, step)
            of, index = self._places(table, torch.tensor([step], device="cpu"), kind.name)
            rows, positions, values = sparse_of(table)
            known = (of[rows] >= 0) & (index[rows] >= 0)
            out[0, index[rows][known], positions[known]] = values[known]
        return out[0]

    def _steps_with(self, kind: str, first: int | None, last: int | None) -> Tensor:
        """Return the recorded steps; of a kind that is stored sparsely, those that have it."""
        steps = cut(self.steps, first, last)
        if self._kind(kind).schema.storage == "sparse":
            having = [kind in kinds for kinds in steps["kinds"].to_pylist()]
            return numbers(steps.filter(pyarrow().array(having, pyarrow().bool_()))["step"])
        return numbers(steps.filter(steps["recorded"])["step"])

    def _rows_of(
        self, schema: str, key: tuple[int, int], columns: Sequence[str], first: int | None, last: int | None
    ) -> pa.Table:
        """Return rows of a segment with the columns that identify them; other steps may be included."""
        where: Any = None
        low, high = self._bounds(key, first, last)
        if (low, high) != self._bounds(key, None, None):
            ds = require("pyarrow.dataset", "monitor", "A run record")
            where = (ds.field("step") >= low) & (ds.field("step") <= high)
        return self._files.read(schema, key, ["step", "kind", "name", *columns], where)

    def _places(self, table: pa.Table, steps: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Return the indices of each row's step and name; -1 where one is unknown, or of another kind."""
        found = numbers(table["step"])
        if len(steps):
            rows = torch.searchsorted(steps, found).clamp_(max=len(steps) - 1)
            rows.masked_fill_(steps[rows] != found, -1)
        else:
            rows = torch.full_like(found, -1)
        rows.masked_fill_(codes(table["kind"], {kind: 0}) < 0, -1)
        return rows, codes(table["name"], self.catalog.rows(kind).index)

    def _schema(self, name: str) -> Schema:
        # also those that this run does not record, which have no rows
        schemas = {kind.schema.name: kind.schema for kind in KINDS.values()} | schemas_of(self.catalog)
        if name not in schemas:
            raise RunError(f"{self.path} has no table {name!r}; choose from {', '.join(schemas)}")
        return schemas[name]

    def _kind(self, kind: str) -> Kind:
        if kind not in self.catalog.kinds:
            kinds, known = self.catalog.kinds, [*KINDS.values()]
            more = ", ".join(dict.fromkeys([x.option for x in known if x.name not in kinds]))
            msg = f"{self.path} has no {kind!r}; choose from {', '.join(kinds)}, or record more with "
            raise RunError(f"{msg}Monitor({more})")
        return self.catalog.kinds[kind]
