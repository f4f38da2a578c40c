"""Retries of a write to a disk that fails."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

# seconds between two tries, at most
_LONGEST_PAUSE: Final = 60.0


class Retry:
    """Calls a write; after it has failed, once more at once, and then after 1 s, 2 s, 4 s, up to a minute."""

    def __init__(self) -> None:
        self._failures = 0
        self._pause_until = -math.inf

    def __call__(self, write: Callable[[], None], *, now: bool) -> Exception | None:
        """Return the error of the write; during a pause, call it only with ``now``."""
        if not now and time.monotonic() < self._pause_until:
            return None
        try:
            write()
        except Exception as error:  # noqa: BLE001 returned
            pause = min(2.0 ** (self._failures - 1), _LONGEST_PAUSE) if self._failures else 0.0
            self._pause_until = time.monotonic() + pause
            self._failures = min(self._failures + 1, 10)
            return error
        self._failures = 0
        return None
