"""The format of a run on disk: folder, files, columns. ``docs/reference/run-record.md`` describes it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gradiometer.columns import COLUMNS, FINGERPRINT_COLUMNS, TAP_COLUMNS, UPDATE_COLUMNS
from gradiometer.extras import require
from gradiometer.recorder import KINDS, TAP_KINDS, Roster
from gradiometer.rules import Finding, checked
from gradiometer.runs.files import RunError, stamp, unfit
from gradiometer.runs.json_files import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa

FORMAT: Final = "gradiometer-run"
VERSION: Final = 1
LARGEST_ATTEMPT: Final = 2**31 - 1


class Field(NamedTuple):
    """A column of a Parquet file: its name, Arrow type, unit, whether it may be null, and its meaning."""

    name: str
    type: str
    unit: str
    nullable: bool
    meaning: str


# one row per step
STEPS: Final = (
    Field("step", "int64", "", False, "the step's number"),
    Field("attempt", "int32", "", False, "the attempt that wrote the row, from 1"),
    Field("time", "double", "s", False, "when the step ended, as Unix time"),
    Field("recorded", "bool", "", False, "whether its tensors were recorded"),
    Field("skipped", "bool", "", False, "whether the update was skipped"),
    Field("loss", "double", "", True, "the loss passed to `advance`; null if none was passed; NaN stays NaN"),
    Field("lr", "double", "", True, "the learning rate passed to `advance`; null if none was passed"),
    Field("scalars", "map<string, double>", "", False, "the other scalars passed to `advance`, by name"),
    # over all gradients; null where the step was not recorded
    Field("total_norm", "double", "", True, "L2 norm; NaN with any NaN, else inf with any Inf"),
    Field("finite_norm", "double", "", True, "L2 norm of the finite elements"),
    Field("abs_max", "double", "", True, "largest finite magnitude"),
    Field("numel", "int64", "elements", True, "all elements"),
    Field("n_zero", "int64", "elements", True, "elements equal to 0"),
    Field("n_nan", "int64", "elements", True, "NaN elements"),
    Field("n_inf", "int64", "elements", True, "+Inf and -Inf elements"),
    Field("n_measured", "int32", "tensors", True, "tensors with a gradient"),
    Field("n_flagged", "int32", "tensors", True, "tensors with any flag"),
    # null where that kind was not recorded
    Field("weights_norm", "double", "", True, "L2 norm of all weights"),
    Field("updates_norm", "double", "", True, "L2 norm of all updates"),
    Field("update_ratio", "double", "", True, "norm of all updates / norm of their weights before the step"),
    Field(
        "stuck_fraction",
        "double",
        "",
        True,
        "unchanged elements whose gradient is not 0 / all such elements; null without gradients",
    ),
)

# the type of a column of names
NAMES: Final = "dictionary<values=string, indices=int32, ordered=0>"

# one row per step, kind and measured parameter or tap
TENSORS: Final = (
    Field("step", "int64", "", False, "the step's number"),
    Field("attempt", "int32", "", False, "the attempt that wrote the row, from 1"),
    Field("kind", NAMES, "", False, "`grads`, `weights`, `updates`, `activations` or `activation_grads`"),
    Field("name", NAMES, "", False, "the name of the parameter or tap"),
    *(
        Field(c.name, "int64", "elements", False, c.meaning)
        if c.scaling == "1"
        else Field(c.name, "double", "", False, c.meaning)
        for c in COLUMNS
    ),
    Field("flags", "int32", "", False, "bits of `gradiometer.Flag`"),
    Field("norm", "double", "", False, "L2 norm; NaN with any NaN, else inf with any Inf"),
)

# more columns of `TENSORS`, in the files of an attempt that recorded fingerprints; null in a row without one
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

_TAP_UNITS: Final = {"n_calls": "calls", "n_channels": "channels", "n_zero_channels": "channels"}

# more columns of `TENSORS`, in the files of an attempt that recorded updates; null in rows of other kinds
UPDATES: Final = tuple(
    Field(c.name, "int64", "elements", True, c.meaning)
    if c.name.startswith("n_")
    else Field(c.name, "double", "", True, c.meaning)
    for c in UPDATE_COLUMNS
)

# more columns of `TENSORS`, in the files of an attempt that recorded activations; null in rows of other kinds
TAPS: Final = tuple(
    Field(c.name, "int64", _TAP_UNITS[c.name], True, c.meaning)
    if c.name in _TAP_UNITS
    else Field(c.name, "double", "", True, c.meaning)
    for c in TAP_COLUMNS
)

# one row per step, kind and measured parameter, in the steps that ``precision`` divides
EXPONENTS: Final = (
    Field("step", "int64", "", False, "the step's number"),
    Field("attempt", "int32", "", False, "the attempt that wrote the row, from 1"),
    Field("kind", NAMES, "", False, "`grads` or `weights`"),
    Field("name", NAMES, "", False, "the name of the parameter"),
    Field("n_zero", "int64", "elements", False, "elements equal to 0"),
    Field("n_inf", "int64", "elements", False, "+Inf and -Inf elements"),
    Field("n_nan", "int64", "elements", False, "NaN elements"),
    Field("first_bin", "int32", "", False, "the bin of the first of `counts`, from 0"),
    Field("counts", "list<item: int64>", "elements", False, "elements in each bin, up to the last with any"),
)


def arrow_schema(fields: Sequence[Field]) -> pa.Schema:
    """Return the schema of a Parquet file."""
    pa = pyarrow()
    types = {
        "int64": pa.int64(),
        "uint64": pa.uint64(),
        "int32": pa.int32(),
        "double": pa.float64(),
        "bool": pa.bool_(),
        "map<string, double>": pa.map_(pa.string(), pa.float64()),
        "list<item: int64>": pa.list_(pa.field("item", pa.int64())),
        NAMES: pa.dictionary(pa.int32(), pa.string()),
    }
    return pa.schema([pa.field(f.name, types[f.type], nullable=f.nullable) for f in fields])


def segment_path(run: Path, table: str, attempt: int, first_step: int) -> Path:
    """Return the path of a segment of ``"steps"``, ``"tensors"`` or ``"exponents"``."""
    return run / table / f"{table}-{attempt:04d}-{first_step:010d}.parquet"


def list_segments(run: Path, table: str = "steps") -> dict[tuple[int, int], Any]:
    """Return the `stamp` of each segment's file in a table, by attempt and first step, ascending."""
    found = {}
    for path in (run / table).glob(f"{table}-*.parquet"):
        if match := re.fullmatch(rf"{table}-(\d+)-(\d+)\.parquet", path.name):
            found[int(match[1]), int(match[2])] = path
    # after the last name: a segment that has a following one is not replaced any more
    return {key: stamp(path) for key, path in sorted(found.items())}


def pyarrow() -> Any:
    """Return the package; if it is missing, the ImportError says how to install it."""
    return require("pyarrow", "monitor", "A run record")


def read_info(path: Path) -> dict[str, Any]:
    """Return run.json, after checking its version and the fields that every reader needs."""
    info: dict[str, Any] | None = read_json(path / "run.json")
    if info is None:
        there = "it is a file, not a folder" if path.exists() else "there is no such folder"
        what = "there is no run.json in it" if path.is_dir() else there
        inner = next(path.glob("*/run.json"), None)
        advice = (
            "the run_dir of a Monitor" if inner is None else f"one of the runs in it, such as {inner.parent}"
        )
        msg = f"{path} is not a run: {what}; pass {advice}"
        raise RunError(msg)
    if not isinstance(info, dict) or info.get("format") != FORMAT:
        msg = f"{path / 'run.json'} does not have the format {FORMAT}: pass the run_dir of a Monitor"
        raise RunError(msg)
    version, attempts, files = info.get("version"), info.get("attempts", []), info.get("files", {})
    if isinstance(version, int) and version > VERSION:
        msg = f"{path} is a run of version {version}, but this gradiometer reads only up to {VERSION}: "
        raise RunError(msg + "pip install -U gradiometer")
    fits = {
        "version": isinstance(version, int),
        "created": isinstance(info.get("created", 0.0), (int, float)),
        "attempts": isinstance(attempts, list)
        and all([isinstance(x, dict) and isinstance(x.get("attempt"), int) for x in attempts])
        and all([0 <= x["attempt"] < LARGEST_ATTEMPT for x in attempts])
        and all([isinstance(x.get(name, 0), int) for x in attempts for name in ("first_step", "lost")]),
        "versions": isinstance(info.get("versions", {}), dict),
        "digests_from": isinstance(info.get("digests_from", 1), int),
        "files": isinstance(files, dict) and all([isinstance(x, str) for x in files.values()]),
    }
    if wrong := [key for key, fit in fits.items() if not fit]:
        said = ", ".join([f"{key}: {info.get(key)!r:.40}" for key in wrong])
        msg = f"{path / 'run.json'} has unexpected content ({said}): fix it"
        raise RunError(msg)
    return info


def load_roster(values: Mapping[str, Any]) -> Roster:
    """Return the roster of run.json; a ValueError or another error if it is not one."""
    lists = [values[name] for name in ("names", "shapes", "dtypes", "kinds")]
    if not all([isinstance(x, list) for x in [*lists, *values["shapes"]]]):
        msg = "roster: lists"
        raise ValueError(msg)
    shapes = tuple([tuple(shape) for shape in values["shapes"]])
    found = Roster(tuple(values["names"]), shapes, tuple(values["dtypes"]), tuple(values["kinds"]))
    fits = {
        "names": all([isinstance(x, str) for x in found.names]) and len({*found.names}) == len(found.names),
        "shapes": all([isinstance(x, int) and x >= 0 for shape in shapes for x in shape]),
        "dtypes": all([isinstance(x, str) for x in found.dtypes]),
        "kinds": {*found.kinds} <= {*KINDS}
        and found.kinds[:1] == KINDS[:1]
        and len({*found.kinds}) == len(found.kinds)
        # both or none, at the end
        and (found.kinds[-len(TAP_KINDS) :] == TAP_KINDS or not {*found.kinds} & {*TAP_KINDS}),
        "lengths": len(found.names) == len(shapes) == len(found.dtypes),
    }
    for name, fit in fits.items():
        if not fit:
            msg = f"roster: {name}"
            raise ValueError(msg)
    return found


def has_digests(info: Mapping[str, Any]) -> bool:
    """Return whether all files of a run were written with digests."""
    return info.get("digests_from") == 1


def read_findings(
    path: Path, info: Mapping[str, Any], closed_with: str | None = None
) -> list[dict[str, Any]]:
    """Return the findings of findings.json; each finding has the attempt that saw it last."""
    content = read_json(path / "findings.json", closed_with, needs_digest=has_digests(info))
    if content is None:
        return []
    # a list before files had digests
    found = content.get("findings") if isinstance(content, dict) else content
    keys = {"attempt", "rule", "kind", "tensor", "first_step", "last_step", "value", "threshold"}
    steps = ("attempt", "first_step", "last_step")
    if (
        not isinstance(found, list)
        or not all([isinstance(x, dict) and keys <= x.keys() for x in found])
        or not all([isinstance(x[name], int) for x in found for name in steps])
    ):
        raise unfit(path / "findings.json", f"{content!r:.40}")
    try:
        for values in found:
            finding_of(values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise unfit(path / "findings.json", repr(error)) from None
    return found


def finding_of(values: Mapping[str, Any]) -> Finding:
    """Return a finding of findings.json; a TypeError or another error if it is not one."""
    numbers = {name: float(values[name]) for name in ("value", "threshold")}
    return checked(Finding.from_dict({k: x for k, x in values.items() if k != "attempt"} | numbers))
