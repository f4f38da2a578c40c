"""A folder that one process writes: its lock, and the atomic replacement of its files."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

from gradiometer.runs.files import RunError, open_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# folders that this process writes; a process's locks do not exclude the process itself
_ours: set[Path] = set()


def take(run: Path) -> Any:
    """Lock a folder and return the lock, which is released when the process ends for any reason.

    Raise RunError if it is locked already.
    """
    home = run.resolve()
    if home in _ours:
        msg = f"{run} is already being written by this process: close that Monitor, or pass another run_dir"
        raise RunError(msg)
    file = open(run / ".lock", "a+", encoding="utf-8", opener=_no_link)  # noqa: SIM115 closed later
    try:
        import fcntl  # noqa: PLC0415 not on Windows, where two processes are not kept apart
    except ImportError:
        fcntl = None  # type: ignore[assignment]
    if fcntl is not None:
        try:
            # unlike flock, lockf is not inherited by forked workers, which may outlive a killed process
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.1)  # `is_taken` may hold it for a moment
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            msg = f"{run} is already being written by {holder}: end that process, or pass another run_dir"
            raise RunError(msg) from None
        except OSError:
            pass  # a file system without locks
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    _ours.add(home)
    return file


def is_taken(run: Path) -> bool:
    """Return whether a process has locked a folder; true where that cannot be found out."""
    if run.resolve() in _ours:
        return True
    try:
        file = open_file(run / ".lock")
    except OSError:
        return False
    with file:
        try:
            import fcntl  # noqa: PLC0415 as above

            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (ImportError, OSError):
            return True
    return False


def is_at(path: Path, file: IO[Any]) -> bool:
    """Return whether an open file still has this path."""
    # only stat: closing a second descriptor of a locked file would release the lock
    try:
        return not file.closed and os.path.samestat(os.fstat(file.fileno()), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def _no_link(path: str, flags: int) -> int:
    """Open a file, but not through a symbolic link, which may lead out of the folder."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _private(path: str, flags: int) -> int:
    """Open a new file that only its owner may read and write, whatever the umask is."""
    file = os.open(path, flags, 0o600)
    # the umask may have left less
    if hasattr(os, "fchmod"):
        os.fchmod(file, 0o600)
    return file


def release(run: Path, lock: Any) -> None:
    """Unlock a folder."""
    _ours.discard(run.resolve())
    lock.close()


def prepare(run: Path, path: Path, data: Any, *, sync: bool, private: bool = False) -> Callable[[], None]:
    """Write bytes to a hidden file in the folder and return a function that renames it to ``path``.

    The rename is atomic. With ``sync`` the file survives a power failure; with ``private`` only its owner may
    read it, from the first byte on.
    """
    temporary = run / f".{path.name}.{os.getpid()}.tmp"
    try:
        # a link that was put there is removed, not followed
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb", opener=_private if private else None) as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise

    def put() -> None:
        temporary.replace(path)
        if sync and os.name == "posix":
            # the new name must survive a power failure too
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    return put


def remove_leftovers(run: Path) -> None:
    """Remove the hidden files that a process left when it was killed while writing."""
    for path in run.glob(".*.tmp"):
        path.unlink(missing_ok=True)
