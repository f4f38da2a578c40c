"""The Parquet files of a run, checked against their digests and against each other."""

from __future__ import annotations

import os
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Final

from gradiometer.runs.digest import Claims, DamageError, read_claims
from gradiometer.runs.format import RunError, open_file, segment_path, stamp, stamp_of
from gradiometer.runs.tables import read_table, unreadable

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa

__all__ = ["Segments"]

# a matrix takes at most _LARGEST bytes of memory, or _RATIO times the size of the files that it is read from;
# a tensor that was not measured has a value in the matrix, but no row in a file
_LARGEST: Final = 1 << 28
_RATIO: Final = 500


class Segments:
    """The Parquet files of a run.

    A file is checked against its digest when it is first read; page checksums protect later reads. The
    file of steps has the digest of its file of tensors, and that of the segment before it, so that an older
    version of a file is noticed. The last one is in run.json after the run is closed.

    Args:
        run: the folder.
        keys: attempt and first step of all segments, ascending.
        info: the content of run.json.
    """

    def __init__(self, run: Path, keys: Collection[tuple[int, int]] = (), info: Any = None) -> None:
        self.run = run
        # what the files whose digest was right claim to be, for as long as they are not replaced
        self._whole: dict[Path, tuple[Any, Claims | None]] = {}
        self.update(keys, info or {})

    def update(self, keys: Collection[tuple[int, int]], info: Mapping[str, Any]) -> None:
        """Set the segments and the content of run.json."""
        self._following = dict(zip(keys, [*keys][1:], strict=False))
        self._from = info.get("digests_from")
        self._closed_with = info.get("files", {})
        known = {segment_path(self.run, table, *key) for table in ("steps", "tensors") for key in keys}
        self._whole = {path: whole for path, whole in self._whole.items() if path in known}

    def read(
        self, table: str, key: tuple[int, int], columns: Sequence[str] | None = None, where: Any = None
    ) -> pa.Table:
        """Return the rows of a file.

        Raises:
            RunError: if it cannot be read or is not as it was written.
        """
        path = segment_path(self.run, table, *key)
        return read_table(path, partial(self._check, table, key), columns, where)

    def claims(self, table: str, key: tuple[int, int]) -> Claims | None:
        """Check a file, and return what it claims to be; None if it has no digest.

        Raises:
            RunError: if it cannot be read or is not as it was written.
        """
        path = segment_path(self.run, table, *key)
        try:
            with open_file(path) as file:
                return self._check(table, key, file)
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from None

    def check_cells(self, keys: Collection[tuple[int, int]], cells: int) -> None:
        """Check that a dense matrix of some segments fits to what is on disk, before it is allocated.

        Raises:
            RunError: if there are too few bytes for so many values.
        """
        seen = [stamp(segment_path(self.run, "tensors", *key)) for key in keys]
        size = sum([found[1] for found in seen if found is not None])
        if 8 * cells > max(_LARGEST, _RATIO * size):
            msg = f"{self.run}: {cells} values of its steps and tensors would take {8 * cells >> 20} MiB, "
            msg += f"too many for {size} bytes on disk: choose fewer steps with first= and last="
            raise RunError(msg)

    def _check(self, table: str, key: tuple[int, int], file: IO[bytes]) -> Claims | None:
        claims = self._alone(table, key, file)
        if table == "steps":
            self._check_order(key, claims)
            return claims
        path = segment_path(self.run, "steps", *key)
        try:
            with open_file(path) as of_steps:
                steps = self._alone("steps", key, of_steps)
        except (OSError, ValueError):
            return claims  # it says nothing about this one
        if steps is None or steps.tensors == (claims and claims.digest):
            return claims
        # a process that was killed between the two has replaced only this one
        if claims is None or claims.steps <= steps.steps:
            msg = f"it is not the version that {path.name} was written with"
            raise DamageError(msg)
        return claims

    def _alone(self, table: str, key: tuple[int, int], file: IO[bytes]) -> Claims | None:
        """Check a file without looking at others."""
        path = segment_path(self.run, table, *key)
        now = stamp_of(os.fstat(file.fileno()))
        known = self._whole.get(path)
        if known is not None and known[0] == now:
            return known[1]
        claims = read_claims(file)
        if claims is None and isinstance(self._from, int) and key[0] >= self._from:
            msg = "its digest is missing"
            raise DamageError(msg)
        if claims is not None and (claims.table, claims.attempt, claims.first_step) != (table, *key):
            of = segment_path(self.run, claims.table, claims.attempt, claims.first_step)
            msg = f"its content is that of {of.name}"
            raise DamageError(msg)
        self._whole[path] = now, claims
        return claims

    def _check_order(self, key: tuple[int, int], claims: Claims | None) -> None:
        """Check that a file of steps is the version that was there when the run went on."""
        digest = None if claims is None else claims.digest
        path = segment_path(self.run, "steps", *key)
        if self._closed_with.get(f"steps/{path.name}", digest) != digest:
            msg = "it is not the version that the run was closed with"
            raise DamageError(msg)
        following = self._following.get(key)
        if following is None:
            return
        after = segment_path(self.run, "steps", *following)
        try:
            with open_file(after) as file:
                later = self._alone("steps", following, file)
        except (OSError, ValueError):
            return  # it is damaged too, and says nothing about this one
        if later and later.previous and later.previous[:2] == key and later.previous[2] != digest:
            msg = f"it is not the version that was there when {after.name} was begun"
            raise DamageError(msg)
