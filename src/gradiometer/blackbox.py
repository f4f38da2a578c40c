"""The black box: the last steps, where the first non-finite value was, and why the run ended."""

from __future__ import annotations

import math
import os
import signal
import threading
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from gradiometer.culprit import culprit_text
from gradiometer.fault import Fault

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType

    from gradiometer.findings import Finding
    from gradiometer.steps import StepRecord

__all__ = ["BlackBox", "ends", "reason_of", "unwatch", "watch"]

# steps that a fault shows: the last ones, and those before the first non-finite one
_LAST: Final = 64
_BEFORE: Final = 16


class BlackBox:
    """Sees every record, on the background thread, and keeps what a fault is made of.

    Where the run is not finite now, the first non-finite step is the one with which that began; a step
    that was overcome earlier, such as one that a GradScaler skipped, is named only while there is no other.

    Args:
        rank: whose steps it sees, where each rank has one of its own.

    Attributes:
        lost_the_loss: whether the record seen last is the run's first with a loss that is not finite.
    """

    def __init__(self, rank: int | None = None) -> None:
        self.lost_the_loss = False
        self._rank = rank
        self._recent: deque[StepRecord] = deque(maxlen=_LAST)
        self._before: list[StepRecord] = []
        self._first: str | None = None
        self._is_broken = False
        self._had_bad_loss = False

    def see(self, record: StepRecord) -> None:
        """Take the next record."""
        self._recent.append(record)
        bad_loss = record.loss is not None and not math.isfinite(record.loss)
        self.lost_the_loss = bad_loss and not self._had_bad_loss
        self._had_bad_loss = self._had_bad_loss or bad_loss
        if not record.recorded:
            return
        text = culprit_text(record)
        if text is None:
            if self._is_broken and self._first is not None:
                self._first += f"; finite again in step {record.step}"
            self._is_broken = False
        elif not self._is_broken:
            self._first, self._is_broken = text, True
            self._before = list(self._recent)[-_BEFORE:]

    def fault(self, reason: str, message: str, step: int, findings: Sequence[Finding]) -> Fault:
        """Return what is known now."""
        steps = {record.step: record for record in [*self._before, *self._recent]}
        last = [steps[number] for number in sorted(steps)]
        return Fault(reason, message, step, self._first, tuple(findings), tuple(last), self._rank)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run goes on with."""
        return {"first": self._first, "is_broken": self._is_broken, "had_bad_loss": self._had_bad_loss}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._first, self._is_broken = state["first"], state["is_broken"]
        self._had_bad_loss = state["had_bad_loss"]


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


class _Watched(Protocol):
    def note_signal(self, name: str) -> None: ...


_watched: list[weakref.ref[_Watched]] = []
# the handler that is set here, which knows the one before it
_handler: Any = None
# whether the process ends by itself: nothing is left to be ended by SIGTERM
_is_ending = False


def watch(watched: _Watched) -> None:
    """Tell it of a SIGTERM by its ``note_signal``, until `unwatch`. Only from the main thread; else nothing.

    Then a handler that was there before is called; if it returns, so does training. Without one SystemExit
    is raised, with code 143: ``with`` blocks and ``finally`` clauses run, as they do after Ctrl-C.
    A SIGTERM that is ignored stays so.
    """
    global _handler  # noqa: PLW0603 a process has one handler
    is_known = any(ref() is watched for ref in _watched)
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
    _watched.append(weakref.ref(watched))


def unwatch(watched: _Watched) -> None:
    """Tell it no more; after the last one the handler before it is put back."""
    _watched[:] = [ref for ref in _watched if ref() not in (None, watched)]
    if not _watched and threading.current_thread() is threading.main_thread():
        _put_back()


def ends() -> None:
    """Take SIGTERM for no more than a note from here on: the process ends, and is to write what there is."""
    global _is_ending  # noqa: PLW0603 a process ends once
    _is_ending = True


def _put_back() -> None:
    # another one in its place may call it: it stays where it is
    if _handler is not None and bool(signal.getsignal(signal.SIGTERM) == _handler):
        signal.signal(signal.SIGTERM, _handler.args[0])


def _on_sigterm(previous: Any, number: int, frame: FrameType | None) -> None:
    told = [watched for ref in _watched if (watched := ref()) is not None]
    for watched in told:
        watched.note_signal("SIGTERM")
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
    _watched.clear()
    _put_back()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
