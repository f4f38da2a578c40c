"""Errors in the telemetry: log each kind once, count all, and describe them."""

from __future__ import annotations

import functools
import logging
import signal
import threading
import traceback
from types import CodeType, MethodType
from typing import TYPE_CHECKING, Any, TypeVar

from gradiometer.terminal import one_line, printable

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


def reason_of(error: BaseException, *, redact: bool = False) -> tuple[str, str]:
    """Return the reason and the message of the fault for an exception that ends a run.

    With ``redact`` the message is the class of the exception, without its text.

    >>> reason_of(ZeroDivisionError("division by zero"))
    ('exception', 'ZeroDivisionError: division by zero')
    """
    if isinstance(error, KeyboardInterrupt):
        return "interrupt", "KeyboardInterrupt"
    if isinstance(error, SystemExit):
        return "exit", "SystemExit" if redact else f"SystemExit: {error.code}"
    return "exception", type(error).__name__ if redact else describe(error)


def is_quiet(error: BaseException) -> bool:
    """Return whether an exception is a successful exit: ``sys.exit(0)``."""
    return isinstance(error, SystemExit) and error.code in {None, 0}


def describe(error: BaseException) -> str:
    """Return an exception's class and message; only the class if its ``str`` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 `__str__` may raise anything
        return type(error).__name__


def raise_of_handlers(error: BaseException) -> None:
    """Raise the exception if a signal handler has raised it, or its cause: it is for the program, not for us.

    Python calls handlers of signals, such as a timeout's, in the main thread, wherever it is.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    remember_handlers()
    found: BaseException | None = error
    while found is not None:
        if any([frame.f_code in _handlers for frame, _ in traceback.walk_tb(found.__traceback__)]):
            raise found
        found = found.__cause__


# the code of handlers that are or were installed: one that runs only once replaces itself before it raises
_handlers: set[CodeType] = set()


def remember_handlers() -> None:
    """Remember the signal handlers that are installed now; takes some 0.2 ms."""
    _handlers.update([x for number in signal.valid_signals() for x in _codes_of(signal.getsignal(number))])


def _codes_of(handler: Any) -> list[CodeType]:
    """Return the code of a signal handler, and of what it calls first: ours call the one before."""
    if isinstance(handler, functools.partial):
        return [code for part in (handler.func, *handler.args) for code in _codes_of(part)]
    if isinstance(handler, MethodType):
        return _codes_of(handler.__func__)
    if not callable(handler) or isinstance(handler, type):
        return []
    inner = getattr(handler, "__wrapped__", None)
    own = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
    return [code for code in (own, *_codes_of(inner)) if isinstance(code, CodeType)]


LOG = logging.getLogger("gradiometer")


class Failures:
    """Failures of the telemetry: each kind is logged once, as a warning, and counted."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def attempt(self, kind: str, call: Callable[..., _T], *args: object, **options: object) -> _T | None:
        """Call a function and return its result; after an exception, count the failure and return None."""
        try:
            return call(*args, **options)
        except Exception as error:  # noqa: BLE001 training goes on
            self.add(kind, error)
            return None

    def add(self, kind: str, error: BaseException | str, times: int = 1) -> None:
        """Count a failure; log it if it is the first of its kind.

        An exception that a signal handler has raised is not a failure: it propagates.
        """
        if isinstance(error, BaseException):
            raise_of_handlers(error)
        with self._lock:
            first = kind not in self.counts
            self.counts[kind] = self.counts.get(kind, 0) + times
        if first:
            text = one_line(error if isinstance(error, str) else describe(error))
            once = "(logged once, later ones only counted; training continues)"
            LOG.warning("%s: %s %s", printable(kind), text, once)
            if not isinstance(error, str) and LOG.isEnabledFor(logging.DEBUG):
                trace = "".join(traceback.format_exception(error)).splitlines()
                LOG.debug("traceback of this failure:\n%s", "\n".join(map(printable, trace)))
