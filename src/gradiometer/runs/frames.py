"""The frames of a journal: a text and numbers with a digest that ties them to the frame before."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from typing import IO, TYPE_CHECKING, Any, Final

from gradiometer.runs.digest import DamageError
from gradiometer.runs.json_files import plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MAGIC: Final = b"GRADJNL1"
_SIZES: Final = struct.Struct("<8sQQ")
# with the digest and the CRC
_HEADER: Final = _SIZES.size + 32 + 4
# a power failure may leave so many zeros
_BLOCK: Final = 1 << 26


def frame(values: Any, numbers: Sequence[Any], previous: bytes) -> tuple[list[Any], bytes]:
    """Return the parts of a frame, and its digest.

    Args:
        values: of the text.
        numbers: buffers of Arrow.
        previous: the digest of the frame before; empty for the first one.
    """
    text = json.dumps(plain(values), allow_nan=False).encode()
    sizes = _SIZES.pack(_MAGIC, len(text), sum([part.size for part in numbers]))
    digest = _digest(previous, sizes, text, *numbers)
    head = sizes + digest
    return [head, zlib.crc32(head).to_bytes(4, "little"), text, *numbers], digest


def _digest(*parts: Any) -> bytes:
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(part)
    return hashed.digest()


def frames(file: IO[bytes]) -> Iterator[tuple[bytes, bytearray]]:
    """Return text and numbers of each whole frame.

    Raises:
        DamageError: for a frame that is not as it was written.
    """
    at, size, previous = 0, file.seek(0, 2), b""
    file.seek(0)
    while len(header := file.read(_HEADER)) == _HEADER:
        sizes, digest = header[: _SIZES.size], header[_SIZES.size : -4]
        if zlib.crc32(header[:-4]).to_bytes(4, "little") != header[-4:]:
            if not any(header) and not any(file.read(_BLOCK)) and file.tell() == size:
                return
            raise DamageError(f"there is no batch of steps at byte {at}")
        magic, text_size, numbers_size = _SIZES.unpack(sizes)
        if magic != _MAGIC:
            raise DamageError(f"there is no batch of steps at byte {at}")
        at += _HEADER + text_size + numbers_size
        if at > size:
            return
        text, numbers = file.read(text_size), bytearray(numbers_size)
        file.readinto(numbers)  # type: ignore[attr-defined]
        previous = _digest(previous, sizes, text, numbers)
        if previous != digest:
            raise DamageError(f"the batch of steps that ends at byte {at} does not match its digest")
        yield text, numbers
