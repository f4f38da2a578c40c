"""The files of a run: opening them, their stamps, and the error for one that cannot be read."""

from __future__ import annotations

import math
import os
import stat as stat_
from typing import IO, TYPE_CHECKING, Final

from gradiometer.terminal import one_line

if TYPE_CHECKING:
    from pathlib import Path

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


def open_file(path: Path) -> IO[bytes]:
    """Open a regular file to read it: to open a pipe could block, and a device may have no end."""
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 the caller closes it
    stat = os.fstat(file.fileno())
    # a file of some bytes can have holes of terabytes, which would be read as zeros
    on_disk = 512 * getattr(stat, "st_blocks", math.inf)
    is_sparse = stat.st_size > max(_LARGEST_HOLE, _HOLES * on_disk)
    if stat_.S_ISREG(stat.st_mode) and not is_sparse:
        return file
    file.close()
    raise OSError("it has large holes" if is_sparse else "it is not a regular file")


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def unfit(path: Path, found: object) -> RunError:
    """Return the error for a JSON file with unexpected content."""
    advice = "fix it" if path.name == "run.json" else "fix or delete it"
    return RunError(f"{path} has unexpected content ({found}): {advice}")


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
