"""Calls of CUDA on a background thread, while another thread may capture a CUDA graph."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

# CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: captures of other threads do not concern this one
_THREAD_LOCAL: Final = 1


@contextmanager
def beside_captures(device: torch.device) -> Iterator[bool]:
    """Let this thread query events and allocate memory without invalidating the captures of other threads.

    A capture in the default mode, "global", is invalidated by such a call on any thread that is in that mode
    too. The result is whether this thread may make them: where the driver has no such mode, it may not.
    """
    if device.type != "cuda":
        yield True
        return
    exchange = _exchange()
    mode = ctypes.c_int(_THREAD_LOCAL)
    # swaps the thread's mode and ours
    may = exchange is not None and exchange(ctypes.byref(mode)) == 0
    try:
        yield may
    finally:
        if may:
            exchange(ctypes.byref(mode))


@lru_cache(maxsize=1)
def _exchange() -> Any:
    # torch has no function for it; with ROCm there is no such library
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None
