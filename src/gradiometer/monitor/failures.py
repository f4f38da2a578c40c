"""Errors of sinks and rules: reported once, counted; and their descriptions."""

from __future__ import annotations

import logging
import threading

__all__ = ["LOG", "Failures", "describe", "is_quiet", "reason_of"]


def reason_of(error: BaseException) -> tuple[str, str]:
    """Return the reason and the message of a fault that ends a run with this exception.

    >>> reason_of(ZeroDivisionError("division by zero"))
    ('exception', 'ZeroDivisionError: division by zero')
    """
    if isinstance(error, KeyboardInterrupt):
        return "interrupt", "KeyboardInterrupt"
    if isinstance(error, SystemExit):
        return "exit", f"SystemExit: {error.code}"
    return "exception", describe(error)


def is_quiet(error: BaseException) -> bool:
    """Tell whether an exception is no more than the end of a program that went well: ``sys.exit(0)``."""
    return isinstance(error, SystemExit) and error.code in {None, 0}


def describe(error: BaseException) -> str:
    """Return an exception's class and message; the class alone, where its message is an error itself."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 whatever it is, there is nothing to say
        return type(error).__name__


LOG = logging.getLogger("gradiometer")


class Failures:
    """What went wrong in the telemetry: each kind is logged once, as a warning, and counted.

    >>> failures = Failures()
    >>> failures.add("record", ValueError("no such name"))
    >>> failures.counts
    {'record': 1}
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, what: str, error: BaseException | str, times: int = 1) -> None:
        """Count a failure; say so, if it is the first of its kind."""
        with self._lock:
            first = what not in self.counts
            self.counts[what] = self.counts.get(what, 0) + times
        if first:
            text = error if isinstance(error, str) else describe(error)
            trace = None if isinstance(error, str) else error
            LOG.warning("%s: %s (said once, counted from here on; training goes on)", what, text)
            LOG.debug("where it failed", exc_info=trace)
