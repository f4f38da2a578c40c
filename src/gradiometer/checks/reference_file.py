"""The file of a saved reference: JSON, written at once or not at all, and read with every value checked."""

from __future__ import annotations

import hashlib
import json
import math
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from gradiometer.checks.saved_reference import DTYPES, SavedReference, SavedTensor
from gradiometer.columns import PROJECTIONS
from gradiometer.terminal import one_line

_FORMAT: Final = "gradiometer reference"
_VERSION: Final = 1


def write_reference(path: str | os.PathLike[str], saved: SavedReference) -> None:
    """Write a reference to a file, which is replaced if it exists.

    Raises:
        OSError: if the file can't be written; an existing one is as before.
    """
    # that which a link leads to is replaced
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        raise OSError(f"{str(path)!r} is a folder or a device; pass the path of a file")
    values = _finite({"format": _FORMAT, "version": _VERSION, **asdict(saved)})
    text = _text_of({**values, "sha256": _digest(values)})
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # a link that was put there is removed, not followed
        temporary.unlink(missing_ok=True)
        with temporary.open("x", encoding="ascii") as file:
            file.write(text)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def read_reference(path: str | os.PathLike[str]) -> SavedReference:
    """Return the reference in a file of `save_reference`. Nothing in the file is run.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not a saved reference, is damaged, or is of a later version.
    """
    path = Path(path)
    try:
        values = json.loads(path.read_bytes(), parse_constant=_refuse)
    except FileNotFoundError as error:
        msg = f"no saved reference {str(path)!r}; write one with gm.save_reference"
        raise FileNotFoundError(msg) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is not a saved reference, or damaged: {one_line(error)}") from error
    if not isinstance(values, dict) or values.get("format") != _FORMAT:
        raise ValueError(f"{str(path)!r} is not a saved reference; write one with gm.save_reference")
    version = values.get("version")
    if version != _VERSION:
        reads = f"this gradiometer reads {_VERSION}; save it anew"
        raise ValueError(f"{str(path)!r} is a saved reference of version {version!r:.50}, {reads}")
    try:
        return _reference(values)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        what = f"{type(error).__name__}: {one_line(error)}"
        raise ValueError(f"the saved reference {str(path)!r} is damaged: {what}; save it anew") from error


def _text_of(values: Any) -> str:
    # a name that is not valid Unicode is escaped
    return json.dumps(values, allow_nan=False, separators=(",", ":"))


def _digest(values: dict[str, Any]) -> str:
    """Return the SHA-256 of the values, in the order of the file, without that of the file itself."""
    rest = {name: x for name, x in values.items() if name != "sha256"}
    return hashlib.sha256(_text_of(rest).encode()).hexdigest()


def _reference(values: dict[str, Any]) -> SavedReference:
    count = _integer(values["projections"])
    if count not in PROJECTIONS:
        raise ValueError(f"projections = {count}")
    found = _parsed(values, count)
    if values["sha256"] != _digest(values):
        raise ValueError("the contents do not have the SHA-256 in the file")
    return found


def _parsed(values: dict[str, Any], count: int) -> SavedReference:
    return SavedReference(
        {_text(name): _tensor(x, count) for name, x in values["grads"].items()},
        {_text(name): _tensor(x, count) for name, x in values["weights"].items()},
        {
            _text(name): (_number(value), None if wide is None else _number(wide), _dtype(dtype))
            for name, (value, wide, dtype) in values["outputs"].items()
        },
        count,
        _integer(values["seed"]),
        _is(values["is_exact"], bool),
        tuple([_text(x) for x in values["notes"]]),
    )


def _tensor(values: dict[str, Any], count: int) -> SavedTensor:
    projections = tuple([_number(x) for x in values["projections"]])
    if len(projections) != count:
        raise ValueError(f"{len(projections)} projections of {count}")
    coarse = values["coarse"]
    return SavedTensor(
        tuple([_integer(x) for x in values["shape"]]),
        _dtype(values["dtype"]),
        _size(values["norm"]),
        _integer(values["n_nonfinite"]),
        projections,
        _size(values["error"]),
        None if coarse is None else _size(coarse),
    )


def _is(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.50} in place of {kind.__name__}")
    return value


def _text(value: Any) -> str:
    return _is(value, str)  # type: ignore[no-any-return]


def _dtype(value: Any) -> str:
    if value not in DTYPES:
        raise ValueError(f"dtype {value!r:.50}")
    return _text(value)


def _integer(value: Any) -> int:
    if _is(value, int) < 0:
        raise ValueError(f"{value!r:.50} is negative")
    return value  # type: ignore[no-any-return]


def _number(value: Any) -> float:
    # what is not finite has no number in JSON
    if isinstance(value, str):
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[value]
    found = float(_is(value, float if isinstance(value, float) else int))
    if not math.isfinite(found):
        raise ValueError(f"{value!r:.50} is too large")
    return found


def _size(value: Any) -> float:
    found = _number(value)
    if not 0 <= found < math.inf:
        raise ValueError(f"{found} is not the norm of a tensor")
    return found


def _finite(value: Any) -> Any:
    """Return values with numbers that are not finite as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _finite(x) for key, x in value.items()}
    return [_finite(x) for x in value] if isinstance(value, list | tuple) else value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
