"""The JSON files of a run: non-finite numbers, digests, and limits of what is read."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final

from gradiometer.runs.digest import json_digest, pop_digest
from gradiometer.runs.files import file_error, open_file, summary

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# digits of an integer, which those of int64 do not exceed, and levels
_DIGITS: Final = 19
_DEPTH: Final = 50


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
    # a line for each key: names and shapes of a thousand tensors would be thousands of lines
    pairs = (content | {"digest": digest}).items()
    lines = [f" {json.dumps(key)}: {to_json(x, indent=None)}" for key, x in pairs]
    return ("{\n" + ",\n".join(lines) + "\n}").encode(), digest


def read_json(path: Path, closed_with: str | None = None) -> Any:
    """Return the content of a run's JSON file without its digest; None if the file is missing.

    ``closed_with``: the digest that it must have, unless it was set to null by hand. Raise RunError if it
    cannot be read, or is not as it was written.
    """
    return read_with_digest(path, closed_with)[0]


def read_with_digest(path: Path, closed_with: str | None = None) -> tuple[Any, str | None]:
    """Return what `read_json` does, and the digest; None if it is null, or the file is missing."""
    try:
        with open_file(path) as file:
            value = parse_json(file.read())
        # a run.json of something else has neither
        is_foreign = not isinstance(value, dict) or not {"format", "digest"} & value.keys()
        if path.name == "run.json" and is_foreign:
            return value, None
        digest = pop_digest(path.name, value)
        if digest is not None and closed_with not in {None, digest}:
            raise ValueError("it is not the version that the run was closed with")  # noqa: TRY301 as for other damage
    except (FileNotFoundError, NotADirectoryError):
        return None, None
    except (OSError, ValueError, RecursionError) as error:
        is_info = path.name == "run.json"
        advice = "restore it from a copy, or set its digest to null" if is_info else "fix or delete it"
        raise file_error(path, summary(error), advice) from None
    return value, digest


def parse_json(data: bytes) -> Any:
    """Return the value of a JSON text.

    Raise ValueError if it is not JSON, or has too long integers or too many levels; raise RecursionError for
    far too many levels.
    """
    value = json.loads(data.decode(), parse_int=_int)
    _check_depth(value)
    return value


def _int(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"the integer {text:.12}... is too long")
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
    raise ValueError(f"it is nested more than {_DEPTH} levels deep")
