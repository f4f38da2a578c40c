"""What the demo prints while something takes long."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Print ``what`` at once, and the seconds that the block took after it; a terminal also counts them."""
    start, done, is_terminal = time.perf_counter(), threading.Event(), sys.stdout.isatty()

    def write(end: str = "") -> None:
        print(f"\r{what} ... {time.perf_counter() - start:.0f} s", end=end, flush=True)

    def count() -> None:
        while not done.wait(1.0):
            write()

    print(f"{what} ... ", end="", flush=True)
    counter = threading.Thread(target=count, daemon=True)
    if is_terminal:
        counter.start()
    try:
        yield
    finally:
        done.set()
        if is_terminal:
            counter.join()
            write("\n")
        else:
            print(f"{time.perf_counter() - start:.0f} s", flush=True)
