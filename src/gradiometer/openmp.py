"""Threads that do not wait for one another: several at once, and each runs its operators alone.

PyTorch spreads an operator on more than 32,768 elements over OpenMP threads, which meet at its end. On a busy
machine each meeting waits until the thread that was interrupted goes on, some milliseconds. A thread whose own
OpenMP setting is 1 runs whole operators by itself; the setting of every other thread stays as it is.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["can_run_alone", "map_on_threads", "one_thread"]

Item = TypeVar("Item")
Result = TypeVar("Result")


@cache
def _setter() -> Callable[[int], Any] | None:
    """Return what sets the number of OpenMP threads for the calling thread; None where there is no such thing."""
    before = torch.get_num_threads()
    try:
        set_threads = ctypes.CDLL(None).omp_set_num_threads
    except (AttributeError, OSError, TypeError):
        return None
    set_threads.argtypes, set_threads.restype = [ctypes.c_int], None
    # another OpenMP runtime than PyTorch's may have been found
    other = 1 if before > 1 else 2
    set_threads(other)
    found = torch.get_num_threads() == other
    set_threads(before)
    return set_threads if found else None


def can_run_alone() -> bool:
    """Tell whether `one_thread` has an effect here."""
    return _setter() is not None


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the operators of the calling thread on it alone; those of other threads are not affected."""
    set_threads, before = _setter(), torch.get_num_threads()
    if set_threads is None or before == 1:
        yield
        return
    set_threads(1)
    try:
        yield
    finally:
        set_threads(before)


def map_on_threads(
    start: Callable[[], Callable[[Item], Result]], items: Iterable[Item], threads: int
) -> list[Result]:
    """Return the result for each item, in order, from so many threads, the calling one among them.

    Args:
        start: called once on each thread; returns the function that is called for items there.
        items: taken one at a time by whichever thread is free.
        threads: at least 1. Each runs its operators alone, without gradients.

    Raises:
        BaseException: what the first item that failed raised; items after it may not have been looked at.
    """
    todo = enumerate(items)
    lock = threading.Lock()
    done: dict[int, Result] = {}
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with torch.no_grad(), one_thread():
                function = start()
                while not failed:
                    with lock:
                        number, item = next(todo, (-1, None))
                    if number < 0:
                        return
                    done[number] = function(item)  # type: ignore[arg-type]
        except BaseException as error:  # noqa: BLE001 raised again below, on the calling thread
            failed.append(error)

    helpers = [
        threading.Thread(target=run, name="gradiometer-collect", daemon=True) for _ in range(threads - 1)
    ]
    started = []
    for helper in helpers:
        try:
            helper.start()
        except RuntimeError:
            # no more threads, or the interpreter is ending: those that are there do it
            break
        started.append(helper)
    run()
    for helper in started:
        helper.join()
    if failed:
        raise failed[0]
    return [done[number] for number in sorted(done)]
