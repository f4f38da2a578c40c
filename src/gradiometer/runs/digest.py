"""Digests that the files of a run carry, to notice that a file was damaged, exchanged or put back.

A JSON file has a key ``digest``. A Parquet file has a block before its footer, where readers of Parquet look
at nothing: what the file claims to be as JSON, the length of that JSON in 4 bytes, the digest in 32 bytes,
and `_MAGIC`. The digest is SHA-256 of all other bytes of the file.
"""

from __future__ import annotations

import hashlib
import json
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAGIC: Final = b"GRADDIG1"
_PARQUET: Final = b"PAR1"
_SIZE: Final = 32
_BLOCK: Final = 1 << 20
_PREFIX: Final = "sha256:"


class DamageError(ValueError):
    """A file is not as it was written; the message completes ``<file> cannot be read (...)``."""


class Claims(NamedTuple):
    """What a Parquet file says it is.

    Attributes:
        table: ``"steps"``, ``"tensors"`` or ``"exponents"``.
        attempt: the attempt that wrote it.
        first_step: the first step of its segment.
        steps: the number of steps that the segment had.
        tensors: in a file of steps, the digest of the segment's file of tensors.
        previous: in a file of steps, attempt, first step and digest of the file of steps before it.
        digest: this file's own, in hexadecimal.
        exponents: in a file of steps, the digest of the segment's file of exponents; None without one.
    """

    table: str
    attempt: int
    first_step: int
    steps: int
    tensors: str | None = None
    previous: tuple[int, int, str] | None = None
    digest: str = ""
    exponents: str | None = None


def with_claims(parquet: Any, claims: Claims) -> tuple[bytes, str]:
    """Return the content of a Parquet file with a digest, and the digest."""
    view = memoryview(parquet)
    footer = len(view) - 8 - int.from_bytes(view[-8:-4], "little")
    left_out = {"digest"} if claims.exponents else {"digest", "exponents"}
    said = json.dumps({k: v for k, v in claims._asdict().items() if k not in left_out}).encode()
    head, tail = (view[:footer], said, len(said).to_bytes(4, "little")), (_MAGIC, view[footer:])
    hashed = hashlib.sha256()
    for part in (*head, *tail):
        hashed.update(part)
    return b"".join((*head, hashed.digest(), *tail)), hashed.hexdigest()


def read_claims(file: IO[bytes]) -> Claims | None:
    """Check a Parquet file against its digest and return what it claims to be; None if it has no digest.

    Raises:
        DamageError: if they differ, or the file is not a Parquet file.
    """
    size = file.seek(0, 2)
    file.seek(max(size - 8, 0))
    end = file.read(8)
    footer = size - 8 - int.from_bytes(end[:4], "little")
    at = footer - len(_MAGIC) - _SIZE
    if end[4:] != _PARQUET or footer < len(_PARQUET):
        msg = "it does not end as a Parquet file does"
        raise DamageError(msg)
    if at < 4:
        return None
    file.seek(at - 4)
    length, digest, magic = int.from_bytes(file.read(4), "little"), file.read(_SIZE), file.read(len(_MAGIC))
    if magic != _MAGIC:
        return None
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
        msg = "its content does not match its digest"
        raise DamageError(msg)
    file.seek(max(at - 4 - length, 0))
    return _claims(json.loads(file.read(length)), digest.hex())


def _claims(said: Any, digest: str) -> Claims:
    try:
        found = Claims(**said | {"digest": digest})
        previous = found.previous
        if previous is not None:
            attempt, first, of = previous
            found = found._replace(previous=(int(attempt), int(first), str(of)))
        if not all([isinstance(x, int) for x in (found.attempt, found.first_step, found.steps)]):
            raise TypeError  # noqa: TRY301 as for other wrong types
    except (TypeError, ValueError):
        msg = "what it says about itself is not understood"
        raise DamageError(msg) from None
    return found


def json_digest(name: str, value: Mapping[str, Any]) -> str:
    """Return the digest of a JSON file: of its name and its content, in whatever way it is formatted."""
    text = json.dumps([name, value], sort_keys=True, separators=(",", ":"), allow_nan=False)
    return _PREFIX + hashlib.sha256(text.encode()).hexdigest()


def pop_digest(name: str, value: Any, *, needed: bool) -> str | None:
    """Check the content of a JSON file against its digest, which is removed and returned.

    Args:
        name: the file's name.
        value: its content.
        needed: whether it was written with a digest.

    Returns:
        the digest; None without one, or if it is null.

    Raises:
        DamageError: if they differ, or it is missing.
    """
    if not isinstance(value, dict) or "digest" not in value:
        if needed:
            # a damaged key must not make it a file without a digest
            msg = "its digest is missing; a change by hand must set it to null"
            raise DamageError(msg)
        return None
    digest = value.pop("digest")
    if digest not in {None, json_digest(name, value)}:
        msg = "its content does not match its digest; a change by hand must set the digest to null"
        raise DamageError(msg)
    return digest if digest is None else str(digest)
