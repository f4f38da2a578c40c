"""Threads that each run whole operators, so that they do not wait for one another.

PyTorch splits an operator on 32,768 elements or more across OpenMP threads, which synchronize at its end. On
a busy machine they wait until a preempted thread is scheduled again, which takes milliseconds. Each thread
here sets its own number of OpenMP threads to 1; other threads keep their setting.
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

Item = TypeVar("Item")
Result = TypeVar("Result")


@cache
def _setter() -> Callable[[int], Any] | None:
    """Return the function that sets the calling thread's number of OpenMP threads, or None."""
    before = torch.get_num_threads()
    try:
        set_threads = ctypes.CDLL(None).omp_set_num_threads
    except (AttributeError, OSError, TypeError):
        return None
    set_threads.argtypes, set_threads.restype = [ctypes.c_int], None
    # check the effect: this OpenMP runtime may not be the one that PyTorch uses
    other = 1 if before > 1 else 2
    set_threads(other)
    found = torch.get_num_threads() == other
    set_threads(before)
    return set_threads if found else None


def can_run_alone() -> bool:
    """Return whether `one_thread` has an effect here."""
    return _setter() is not None


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the calling thread's operators on that thread alone; other threads are not affected."""
    set_threads, before = _setter(), torch.get_num_threads()
    if set_threads is None or before == 1:
        yield
        return
    try:
        # an interrupt may come at once
        set_threads(1)
        yield
    finally:
        set_threads(before)


def map_on_threads(
    start: Callable[[], Callable[[Item], Result]], items: Iterable[Item], threads: int
) -> list[Result]:
    """Call a function for each item on several threads; return the results in the order of the items.

    ``start`` is called once on each thread, and returns the function to call there; each item is taken by the
    next free thread. ``threads``: their number, at least 1, including the calling thread. Operators run on
    the thread that calls them, without gradients.

    Raises:
        BaseException: the first exception that a call raised; the remaining items are skipped.
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

    started = []
    for _ in range(threads - 1):
        helper = threading.Thread(target=run, name="gradiometer-collect", daemon=True)
        try:
            helper.start()
        except RuntimeError:
            # no more threads can start, for example at interpreter shutdown: the started ones do the work
            break
        started.append(helper)
    run()
    for helper in started:
        helper.join()
    if failed:
        raise failed[0]
    return [done[number] for number in sorted(done)]
