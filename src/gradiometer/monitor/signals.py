"""Handle SIGTERM and SIGHUP: notify the monitors, then continue as the process would without them."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_subscribers: list[weakref.WeakMethod[Callable[[str], object]]] = []
# SIGHUP: the terminal was closed; Windows does not have it
_SIGNALS: Final = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
# the handlers that we installed; the argument of each is the previous one
_handlers: dict[int, Any] = {}
# whether the process is already ending, so that a signal does not raise SystemExit
_is_ending = False


def subscribe(method: Callable[[str], object]) -> None:
    """Call a method with the name of a signal, until `unsubscribe`. Only the main thread can subscribe.

    Afterwards the previous handler is called; if it returns, training continues. Without a previous handler,
    SystemExit is raised with code 128 + the signal's number, so that ``with`` blocks and ``finally`` clauses
    run, as after Ctrl-C. A process that ignores a signal still ignores it, for example SIGHUP under nohup.
    """
    is_known = any(ref() == method for ref in _subscribers)
    if is_known or threading.current_thread() is not threading.main_thread():
        return
    for number in _SIGNALS:
        now = signal.getsignal(number)
        # None: a handler that was not installed from Python, which could not be restored
        if now is None or now is signal.SIG_IGN:
            continue
        if now is not _handlers.get(number):
            # a new handler each time: `now` may itself call an earlier one of ours
            _handlers[number] = partial(_on_signal, now)
            signal.signal(number, _handlers[number])
    _subscribers.append(weakref.WeakMethod(method))


def unsubscribe(method: Callable[[str], object]) -> None:
    """Remove a method; after the last one, restore the previous handlers."""
    _subscribers[:] = [ref for ref in _subscribers if ref() not in (None, method)]
    if not _subscribers and threading.current_thread() is threading.main_thread():
        _put_back()


def record_only() -> None:
    """From now on, only record signals: the process is ending and must still write its steps."""
    global _is_ending  # noqa: PLW0603 a process ends once
    _is_ending = True


def _put_back() -> None:
    for number, handler in _handlers.items():
        # if another handler has replaced ours, leave it: it may call ours
        if signal.getsignal(number) == handler:
            signal.signal(number, handler.args[0])
    # the previous handlers may hold a trainer with its model
    _handlers.clear()


def _on_signal(previous: Any, number: int, frame: FrameType | None) -> None:
    notified = [method for ref in _subscribers if (method := ref()) is not None]
    for method in notified:
        method(signal.Signals(number).name)
    if callable(previous):
        previous(number, frame)
    elif notified:
        if not _is_ending:
            raise SystemExit(128 + number)
    else:
        # restore the default and deliver the signal again
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _after_fork() -> None:
    # a forked process, such as a DataLoader worker, does not train
    _subscribers.clear()
    _put_back()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
