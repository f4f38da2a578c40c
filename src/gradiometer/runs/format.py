"""The format of a run on disk: folder, files, columns. ``docs/reference/run-record.md`` describes it."""

from __future__ import annotations

import json
import math
import os
import re
import stat as stat_
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

from gradiometer.columns import COLUMNS
from gradiometer.extras import require
from gradiometer.recorder import KINDS, Roster
from gradiometer.runs.digest import DamageError, json_digest, pop_digest
from gradiometer.terminal import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa

__all__ = [
    "FORMAT",
    "NAMES",
    "STEPS",
    "TENSORS",
    "VERSION",
    "Field",
    "RunError",
    "arrow_schema",
    "encodable",
    "file_error",
    "from_json",
    "has_digests",
    "json_file",
    "list_segments",
    "load_roster",
    "open_file",
    "parse_json",
    "plain",
    "pyarrow",
    "read_findings",
    "read_info",
    "read_json",
    "read_with_digest",
    "segment_path",
    "stamp",
    "stamp_of",
    "summary",
    "to_json",
    "unfit",
]

FORMAT: Final = "gradiometer-run"
VERSION: Final = 1

# of JSON: digits of an integer, which those of int64 do not exceed, and levels
_DIGITS: Final = 19
_DEPTH: Final = 50
# a file of more bytes takes this part of it on disk, at least
_LARGEST_HOLE: Final = 1 << 30
_HOLES: Final = 100


class RunError(ValueError):
    """A run cannot be read or written; the message is one line that says what to do.

    Attributes:
        reason: for a file that cannot be read, what is wrong with it; otherwise empty.
    """

    reason = ""

    def __str__(self) -> str:
        """Return the message; it may name what a file contains."""
        return one_line(super().__str__())


def file_error(path: Path, reason: str, advice: str) -> RunError:
    """Return the error for a file that cannot be read."""
    error = RunError(f"{path} cannot be read ({reason}): {advice}")
    error.reason = reason
    return error


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
)

# the type of a column of names
NAMES: Final = "dictionary<values=string, indices=int32, ordered=0>"

# one row per step, kind and measured parameter
TENSORS: Final = (
    Field("step", "int64", "", False, "the step's number"),
    Field("attempt", "int32", "", False, "the attempt that wrote the row, from 1"),
    Field("kind", NAMES, "", False, "`grads`, `weights` or `updates`"),
    Field("name", NAMES, "", False, "the parameter's name"),
    *(
        Field(c.name, "int64", "elements", False, c.meaning)
        if c.scaling == "1"
        else Field(c.name, "double", "", False, c.meaning)
        for c in COLUMNS
    ),
    Field("flags", "int32", "", False, "bits of `gradiometer.Flag`"),
    Field("norm", "double", "", False, "L2 norm; NaN with any NaN, else inf with any Inf"),
)


def arrow_schema(fields: Sequence[Field]) -> pa.Schema:
    """Return the schema of a Parquet file."""
    pa = pyarrow()
    types = {
        "int64": pa.int64(),
        "int32": pa.int32(),
        "double": pa.float64(),
        "bool": pa.bool_(),
        "map<string, double>": pa.map_(pa.string(), pa.float64()),
        NAMES: pa.dictionary(pa.int32(), pa.string()),
    }
    return pa.schema([pa.field(f.name, types[f.type], nullable=f.nullable) for f in fields])


def segment_path(run: Path, table: str, attempt: int, first_step: int) -> Path:
    """Return the path of a segment of ``"steps"`` or ``"tensors"``."""
    return run / table / f"{table}-{attempt:04d}-{first_step:010d}.parquet"


def list_segments(run: Path, table: str = "steps") -> dict[tuple[int, int], Any]:
    """Return the `stamp` of each segment's file in a table, by attempt and first step, ascending."""
    found = {}
    for path in (run / table).glob(f"{table}-*.parquet"):
        if match := re.fullmatch(rf"{table}-(\d+)-(\d+)\.parquet", path.name):
            found[int(match[1]), int(match[2])] = path
    # after the last name: a segment that has a following one is not replaced any more
    return {key: stamp(path) for key, path in sorted(found.items())}


def encodable(text: str) -> str:
    """Return text that UTF-8 can encode; a lone surrogate becomes a backslash escape."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


_NONFINITE: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def plain(value: Any) -> Any:
    """Return a value for JSON; non-finite numbers become ``"NaN"``, ``"Infinity"``, ``"-Infinity"``."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {encodable(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def to_json(value: Any, *, indent: int | None = 1) -> str:
    """Return strict JSON; NaN and infinities become the strings that JavaScript uses for them."""
    return json.dumps(plain(value), indent=indent, allow_nan=False)


def from_json(value: Any) -> Any:
    """Undo `plain`: convert its strings for non-finite numbers back to floats."""
    if isinstance(value, dict):
        return {key: from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_json(item) for item in value]
    return _NONFINITE.get(value, value) if isinstance(value, str) else value


def json_file(name: str, value: Mapping[str, Any]) -> tuple[bytes, str]:
    """Return the content of a run's JSON file, with its digest, and the digest."""
    content: dict[str, Any] = plain(value)
    digest = json_digest(name, content)
    return to_json(content | {"digest": digest}).encode(), digest


def open_file(path: Path) -> IO[bytes]:
    """Open a regular file to read it: to open a pipe could block, and a device may have no end."""
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 the caller closes it
    stat = os.fstat(file.fileno())
    # a file of some bytes can have holes of terabytes, which would be read as zeros
    is_sparse = stat.st_size > _LARGEST_HOLE and stat.st_size > _HOLES * 512 * getattr(
        stat, "st_blocks", math.inf
    )
    if stat_.S_ISREG(stat.st_mode) and not is_sparse:
        return file
    file.close()
    msg = "it has large holes" if is_sparse else "it is not a regular file"
    raise OSError(msg)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_json(path: Path, closed_with: str | None = None, *, needs_digest: bool = False) -> Any:
    """Return the content of a run's JSON file without its digest; None if the file is missing.

    Args:
        path: the file.
        closed_with: the digest that it must have, if it has one.
        needs_digest: whether it was written with a digest, which may be null now; for run.json, it says so.

    Raises:
        RunError: if it cannot be read, or is not as it was written.
    """
    return read_with_digest(path, closed_with, needs_digest=needs_digest)[0]


def read_with_digest(
    path: Path, closed_with: str | None = None, *, needs_digest: bool = False
) -> tuple[Any, str | None]:
    """Return what `read_json` does, and the digest; None if the file has none or is missing."""
    try:
        with open_file(path) as file:
            value = parse_json(file.read())
        needs_digest |= isinstance(value, dict) and "digests_from" in value
        digest = pop_digest(path.name, value, needed=needs_digest)
        if digest is not None and closed_with not in {None, digest}:
            msg = "it is not the version that the run was closed with"
            raise DamageError(msg)
    except (FileNotFoundError, NotADirectoryError):
        return None, None
    except (OSError, ValueError, RecursionError) as error:
        is_info = path.name == "run.json"
        advice = "restore it from a copy, or set its digest to null" if is_info else "fix or delete it"
        raise file_error(path, summary(error), advice) from None
    return value, digest


def has_digests(info: Mapping[str, Any]) -> bool:
    """Return whether all files of a run were written with digests."""
    return info.get("digests_from") == 1


def parse_json(data: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: if it is not JSON, or has integers too long or levels too many.
        RecursionError: if it has far too many levels.
    """
    value = json.loads(data.decode(), parse_int=_int)
    _check_depth(value)
    return value


def _int(text: str) -> int:
    if len(text) > _DIGITS:
        msg = f"the integer {text:.12}... is too long"
        raise ValueError(msg)
    return int(text)


def _check_depth(value: Any) -> None:
    """Refuse values nested so deeply that functions which recurse into them would fail."""
    level = [value]
    for _ in range(_DEPTH):
        level = [
            item
            for x in level
            if isinstance(x, dict | list)
            for item in (x.values() if isinstance(x, dict) else x)
        ]
        if not level:
            return
    msg = f"it is nested more than {_DEPTH} levels deep"
    raise ValueError(msg)


def pyarrow() -> Any:
    """Return the package; if it is missing, the ImportError says how to install it."""
    return require("pyarrow", "monitor", "A run record")


def read_info(path: Path) -> dict[str, Any]:
    """Return run.json, after checking its version and the fields that every reader needs."""
    info: dict[str, Any] | None = read_json(path / "run.json")
    if info is None:
        there = "it is a file, not a folder" if path.exists() else "there is no such folder"
        what = "there is no run.json in it" if path.is_dir() else there
        msg = f"{path} is not a run: {what}; pass the run_dir of a Monitor"
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
    shapes = tuple([tuple(shape) for shape in values["shapes"]])
    found = Roster(tuple(values["names"]), shapes, tuple(values["dtypes"]), tuple(values["kinds"]))
    fits = {
        "names": all([isinstance(x, str) for x in found.names]) and len({*found.names}) == len(found.names),
        "shapes": all([isinstance(x, int) and x >= 0 for shape in shapes for x in shape]),
        "dtypes": all([isinstance(x, str) for x in found.dtypes]),
        "kinds": {*found.kinds} <= {*KINDS} and len({*found.kinds}) == len(found.kinds),
        "lengths": len(found.names) == len(shapes) == len(found.dtypes),
    }
    for name, fit in fits.items():
        if not fit:
            msg = f"roster: {name}"
            raise ValueError(msg)
    return found


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
    return found


def unfit(path: Path, said: object) -> RunError:
    """Return the error for a JSON file with unexpected content."""
    return RunError(f"{path} has unexpected content ({said}): fix or delete it")


def stamp(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes when a file is replaced; None if it is missing or cannot be read."""
    try:
        return stamp_of(path.stat())
    except OSError:
        return None


def stamp_of(stat: os.stat_result) -> tuple[int, int, int]:
    """Return `stamp` from the result of stat."""
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def summary(error: Exception) -> str:
    """Return the first line of an error's message; for one of the system, without the path."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).split("\n", 1)[0].strip() or type(error).__name__
