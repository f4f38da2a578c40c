"""The format of a run on disk: folder, files, columns. ``docs/reference/run-record.md`` describes it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from gradiometer.columns import FINGERPRINT_COLUMNS
from gradiometer.extras import require
from gradiometer.runs.files import stamp

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pyarrow as pa

    from gradiometer.columns import Column, Schema
    from gradiometer.recorder import Catalog

FORMAT: Final = "gradiometer-run"
VERSION: Final = 1
LARGEST_ATTEMPT: Final = 2**31 - 1
MOST: Final = 2**53
"""The largest count: sums of many fit into int64, and each is exact in float64."""


class Field(NamedTuple):
    """A column of a Parquet file: its name, Arrow type, unit, whether it may be null, and its meaning."""

    name: str
    type: str
    unit: str
    nullable: bool
    meaning: str


# the type of a column of names
NAMES: Final = "dictionary<values=string, indices=int32, ordered=0>"

# one row per step; `<kind>_norm` columns follow, see `step_fields`
STEPS: Final = (
    Field("step", "int64", "", False, "the step's number"),
    Field("attempt", "int32", "", False, "the attempt that wrote the row, from 1"),
    Field("time", "double", "s", False, "when the step ended, as Unix time"),
    Field("recorded", "bool", "", False, "whether its tensors were recorded"),
    Field("skipped", "bool", "", False, "whether the update was skipped"),
    Field("kinds", "list<item: string>", "", False, "the kinds that were measured in this step"),
    Field("loss", "double", "", True, "the loss passed to `advance`; null if none was passed; NaN stays NaN"),
    Field("lr", "double", "", True, "the learning rate passed to `advance`; null if none was passed"),
    Field("scalars", "map<string, double>", "", False, "the other scalars passed to `advance`, by name"),
    # over all gradients; null where they were not recorded
    Field("total_norm", "double", "", True, "L2 norm; NaN with any NaN, else inf with any Inf"),
    Field("finite_norm", "double", "", True, "L2 norm of the finite elements"),
    Field("abs_max", "double", "", True, "largest finite magnitude"),
    Field("numel", "int64", "elements", True, "all elements"),
    Field("n_zero", "int64", "elements", True, "elements equal to 0"),
    Field("n_nan", "int64", "elements", True, "NaN elements"),
    Field("n_inf", "int64", "elements", True, "+Inf and -Inf elements"),
    Field("n_measured", "int32", "tensors", True, "tensors with a gradient"),
    Field("n_flagged", "int32", "tensors", True, "tensors with any flag"),
    # of the kind that has them; null where it was not recorded
    Field("update_ratio", "double", "", True, "norm of all updates / norm of their weights before the step"),
    Field(
        "stuck_fraction",
        "double",
        "",
        True,
        "unchanged elements whose gradient is not 0 / all such elements; null without gradients",
    ),
)

# the first columns of a table: one row per step, kind and measured parameter or tap
ROW: Final = (
    Field("step", "int64", "", False, "the step's number"),
    Field("attempt", "int32", "", False, "the attempt that wrote the row, from 1"),
    Field("kind", NAMES, "", False, "the kind"),
    Field("name", NAMES, "", False, "the name of the parameter or tap"),
)

# in the files of an attempt that recorded fingerprints, of schemas of kinds that have them
FINGERPRINTS: Final = tuple(
    Field(name, kind, unit, True, meaning)
    for name, (kind, unit, meaning) in zip(
        FINGERPRINT_COLUMNS,
        (
            ("int64", "bytes", "bytes of all elements"),
            ("uint64", "", "sum of all words, modulo 2**64"),
            ("uint64", "", "sum of all words weighted by their position, modulo 2**64"),
        ),
        strict=True,
    )
)


def is_integer(schema: Schema, column: Column) -> bool:
    """Return whether a column of a schema is stored as integers."""
    return column.is_count or schema.dtype == torch.int64


def fields_of(schema: Schema, *, fingerprints: bool = False) -> tuple[Field, ...]:
    """Return the columns of the Parquet files of a schema, with those of fingerprints if asked."""
    if schema.storage == "sparse":
        of = "int64" if schema.dtype == torch.int64 else "double"
        return (
            *ROW,
            Field("positions", "list<item: int32>", "", False, "the columns that are not 0, ascending"),
            Field("values", f"list<item: {of}>", "", False, "the values of these columns"),
        )
    own = [
        Field(c.name, "int64" if is_integer(schema, c) else "double", c.unit, False, c.meaning)
        for c in schema.columns
    ]
    if schema.flags:
        own.append(Field("flags", "int32", "", False, "bits of `gradiometer.Flag`"))
    if "norm" in schema and "norm" not in schema.index:
        own.append(Field("norm", "double", "", False, schema["norm"].meaning))
    return (*ROW, *own, *(FINGERPRINTS if fingerprints else ()))


def step_fields(catalog: Catalog | None = None) -> tuple[Field, ...]:
    """Return the columns of the table of steps: `STEPS`, and the norm of each other kind that has one."""
    others = [] if catalog is None else [kind for kind in catalog.dense if kind.name != "grads"]
    return (
        *STEPS,
        *[
            Field(f"{kind.name}_norm", "double", "", True, f"L2 norm of all rows of {kind.name}")
            for kind in others
            if "norm" in kind.schema
        ],
    )


def arrow_schema(fields: Sequence[Field]) -> pa.Schema:
    """Return the schema of a Parquet file."""
    pa = pyarrow()
    types = {
        "map<string, double>": pa.map_(pa.string(), pa.float64()),
        "list<item: string>": pa.list_(pa.field("item", pa.string())),
        "list<item: int32>": pa.list_(pa.field("item", pa.int32())),
        "list<item: int64>": pa.list_(pa.field("item", pa.int64())),
        "list<item: double>": pa.list_(pa.field("item", pa.float64())),
        NAMES: pa.dictionary(pa.int32(), pa.string()),
    }
    found = [types.get(f.type) or pa.type_for_alias(f.type) for f in fields]
    return pa.schema([pa.field(f.name, x, nullable=f.nullable) for f, x in zip(fields, found, strict=True)])


def segment_path(run: Path, table: str, attempt: int, first_step: int) -> Path:
    """Return the path of a segment's file of ``"steps"``, or of a schema by name."""
    return run / table / f"{table}-{attempt:04d}-{first_step:010d}.parquet"


def list_segments(run: Path, table: str = "steps") -> dict[tuple[int, int], Any]:
    """Return the `stamp` of each segment's file in a table, by attempt and first step, ascending."""
    return list_files(run / table, table, "parquet")


def list_files(folder: Path, name: str, suffix: str) -> dict[tuple[int, int], Any]:
    """Return the `stamp` of each file of this kind, by attempt and first step, ascending."""
    found = {}
    for path in folder.glob(f"{name}-*.{suffix}"):
        if match := re.fullmatch(rf"{name}-(\d+)-(\d+)\.{suffix}", path.name):
            found[int(match[1]), int(match[2])] = path
    # after the last name: a segment that has a following one is not replaced any more
    return {key: stamp(path) for key, path in sorted(found.items())}


def list_tables(run: Path) -> list[str]:
    """Return the names of the folders with segments of schemas."""
    names = [path.name for path in run.iterdir() if TABLE_NAME.fullmatch(path.name) and path.is_dir()]
    return sorted([name for name in names if name != "steps" and list_segments(run, name)])


TABLE_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


def pyarrow() -> Any:
    """Return the package; if it is missing, the ImportError says how to install it."""
    return require("pyarrow", "monitor", "A run record")
