"""Digests that the files of a run carry, to notice that a file was damaged, exchanged or put back.

A JSON file has a key ``digest``. A Parquet file has a block before its footer, where readers of Parquet look
at nothing: what the file claims to be as JSON, the length of that JSON in 4 bytes, the digest in 32 bytes,
and `_MAGIC`. The digest is SHA-256 of all other bytes of the file.

The message of an error about a digest completes ``<file> cannot be read (...)``.
"""

from __future__ import annotations

import hashlib
import json
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

from gradiometer.runs.format import TABLE_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAGIC: Final = b"GRADDIG1"
_PARQUET: Final = b"PAR1"
_SIZE: Final = 32
_BLOCK: Final = 1 << 20
_PREFIX: Final = "sha256:"


class Claims(NamedTuple):
    """What a Parquet file says it is.

    Attributes:
        table: ``"steps"``, or the name of a schema.
        attempt: the attempt that wrote it.
        first_step: the first step of its segment.
        steps: the number of steps that the segment had.
        tables: in a file of steps, the digest of each of the segment's other files, by its schema's name.
        previous: in a file of steps, attempt, first step and digest of the file of steps before it.
        digest: this file's own, in hexadecimal.
    """

    table: str
    attempt: int
    first_step: int
    steps: int
    tables: Mapping[str, str] = {}
    previous: tuple[int, int, str] | None = None
    digest: str = ""


def with_claims(parquet: Any, claims: Claims) -> tuple[bytes, str]:
    """Return the content of a Parquet file with a digest, and the digest."""
    view = memoryview(parquet)
    footer = len(view) - 8 - int.from_bytes(view[-8:-4], "little")
    text = json.dumps({k: v for k, v in claims._asdict().items() if k != "digest"}).encode()
    head, tail = (view[:footer], text, len(text).to_bytes(4, "little")), (_MAGIC, view[footer:])
    hashed = hashlib.sha256()
    for part in (*head, *tail):
        hashed.update(part)
    return b"".join((*head, hashed.digest(), *tail)), hashed.hexdigest()


def read_claims(file: IO[bytes]) -> Claims:
    """Check a Parquet file against its digest and return what it claims to be.

    Raises:
        ValueError: if they differ, the file has no digest, or it is not a Parquet file.
    """
    size = file.seek(0, 2)
    file.seek(max(size - 8, 0))
    end = file.read(8)
    footer = size - 8 - int.from_bytes(end[:4], "little")
    at = footer - len(_MAGIC) - _SIZE
    if end[4:] != _PARQUET or footer < len(_PARQUET):
        raise ValueError("it does not end as a Parquet file does")
    file.seek(max(at - 4, 0))
    length, digest, magic = int.from_bytes(file.read(4), "little"), file.read(_SIZE), file.read(len(_MAGIC))
    if at < 4 or magic != _MAGIC:
        raise ValueError("its digest is missing")
    hashed = hashlib.sha256()
    file.seek(0)
    left = at
    while left and (part := file.read(min(left, _BLOCK))):
        hashed.update(part)
        left -= len(part)
    file.seek(at + _SIZE)
    while part := file.read(_BLOCK):
        hashed.update(part)
    if hashed.digest() != digest:
        raise ValueError("its content does not match its digest")
    file.seek(max(at - 4 - length, 0))
    return _claims(json.loads(file.read(length)), digest.hex())


def _claims(values: Any, digest: str) -> Claims:
    try:
        found = Claims(**values | {"digest": digest})
        previous = found.previous
        if previous is not None:
            attempt, first, of = previous
            found = found._replace(previous=(int(attempt), int(first), str(of)))
        integers = (found.attempt, found.first_step, found.steps)
        are_names = all([TABLE_NAME.fullmatch(x) for x in (found.table, *found.tables)])
        if not all([isinstance(x, int) for x in integers]) or not are_names:
            raise TypeError  # noqa: TRY301 as for other wrong types
    except (AttributeError, TypeError, ValueError):
        raise ValueError("what it says about itself is not understood") from None
    return found


def json_digest(name: str, value: Mapping[str, Any]) -> str:
    """Return the digest of a JSON file: of its name and its content, in whatever way it is formatted."""
    text = json.dumps([name, value], sort_keys=True, separators=(",", ":"), allow_nan=False)
    return _PREFIX + hashlib.sha256(text.encode()).hexdigest()


def pop_digest(name: str, value: Any) -> str | None:
    """Remove the digest from the content of a JSON file of this name, and return it; None if it is null.

    Raises:
        ValueError: if the content has another digest, or none.
    """
    if not isinstance(value, dict) or "digest" not in value:
        # a damaged key must not make it a file without a digest
        raise ValueError("its digest is missing; a change by hand must set it to null")
    digest = value.pop("digest")
    if digest not in {None, json_digest(name, value)}:
        msg = "its content does not match its digest; a change by hand must set the digest to null"
        raise ValueError(msg)
    return digest if digest is None else str(digest)
