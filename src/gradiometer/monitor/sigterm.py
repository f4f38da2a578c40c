"""SIGTERM: tell the monitors, then go on as the process would have without them."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from types import FrameType


__all__ = ["record_only", "subscribe", "unsubscribe"]


class _Subscriber(Protocol):
    def note_signal(self, name: str) -> None: ...


_subscribers: list[weakref.ref[_Subscriber]] = []
# the handler that is set here, which knows the one before it
_handler: Any = None
# whether the process ends by itself: nothing is left to be ended by SIGTERM
_is_ending = False


def subscribe(subscriber: _Subscriber) -> None:
    """Call ``subscriber.note_signal`` on SIGTERM, until `unsubscribe`. Only the main thread can subscribe.

    Then a handler that was there before is called; if it returns, so does training. Without one SystemExit
    is raised, with code 143: ``with`` blocks and ``finally`` clauses run, as they do after Ctrl-C.
    A SIGTERM that is ignored stays so.
    """
    global _handler  # noqa: PLW0603 a process has one handler
    is_known = any(ref() is subscriber for ref in _subscribers)
    if is_known or threading.current_thread() is not threading.main_thread():
        return
    now = signal.getsignal(signal.SIGTERM)
    # None: a handler that is not Python's, which could not be put back
    if now is None or now is signal.SIG_IGN:
        return
    if now is not _handler:
        # each its own: one on top of an earlier one of ours may call that
        _handler = partial(_on_sigterm, now)
        signal.signal(signal.SIGTERM, _handler)
    _subscribers.append(weakref.ref(subscriber))


def unsubscribe(subscriber: _Subscriber) -> None:
    """Remove a subscriber; after the last one, restore the previous handler."""
    _subscribers[:] = [ref for ref in _subscribers if ref() not in (None, subscriber)]
    if not _subscribers and threading.current_thread() is threading.main_thread():
        _put_back()


def record_only() -> None:
    """From now on, only record SIGTERM: the process is ending, and has to write what there is."""
    global _is_ending  # noqa: PLW0603 a process ends once
    _is_ending = True


def _put_back() -> None:
    # another one in its place may call it: it stays where it is
    if _handler is not None and bool(signal.getsignal(signal.SIGTERM) == _handler):
        signal.signal(signal.SIGTERM, _handler.args[0])


def _on_sigterm(previous: Any, number: int, frame: FrameType | None) -> None:
    told = [subscriber for ref in _subscribers if (subscriber := ref()) is not None]
    for subscriber in told:
        subscriber.note_signal("SIGTERM")
    if callable(previous):
        previous(number, frame)
    elif told:
        if not _is_ending:
            raise SystemExit(128 + number)
    else:
        # as if it had never been here
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _after_fork() -> None:
    # a worker of a data loader is no training process
    _subscribers.clear()
    _put_back()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
