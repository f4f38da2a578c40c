"""Shared by the tests on a real GPU."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import gradiometer as gm

DEVICE = "cuda"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# around the tile size of 1024 and the chunk size of 2**15 elements
SIZES = (1, 2, 3, 7, 8, 9, 255, 1023, 1024, 1025, 2**15 - 1, 2**15, 2**15 + 1, 3 * 2**15 + 1029, 1_000_003)


@contextmanager
def no_waits() -> Iterator[None]:
    """Turn every operation that CUDA reports as a wait for the device into an error."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def values(size: int, dtype: torch.dtype = torch.float32, device: str | torch.device = DEVICE) -> Tensor:
    """Return numbers of several magnitudes, some of them 0 or -0."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, generator=generator, dtype=torch.float64)
    x *= torch.pow(10.0, torch.randint(-3, 3, (size,), generator=generator))
    x[torch.rand(size, generator=generator) < 0.1] = -0.0
    return x.to(dtype).to(device)


def assert_same_bits(a: gm.TensorStats, b: gm.TensorStats) -> None:
    assert a.names == b.names
    assert torch.equal(a.columns, b.columns)
    assert torch.equal(a.flags, b.flags)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 5)).to(DEVICE)


def record(
    function: Callable[[], Any], stream: torch.cuda.Stream | None = None, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Warm up on a side stream, as the documentation of CUDA graphs requires, and capture."""
    stream = stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        result = function()
    return graph, result


# cycles: about half a second at 2 GHz, a thousand times the time to queue a collection
LONG = 1_000_000_000


def keep_busy() -> torch.cuda.Event:
    """Keep the current stream busy; return an event that completes with this work."""
    torch.cuda._sleep(LONG)
    done = torch.cuda.Event()
    done.record()
    return done


def queued(function: Callable[[], Any]) -> tuple[torch.cuda.Event, Any]:
    """Call a function while the current stream is busy; it must not wait for that work.

    The function is called before, too: the first calls may wait for compilation, loading or pinning.
    """
    # two results at a time, so that there is enough pinned memory for the next call
    before = [function() for _ in range(2)]
    torch.cuda.synchronize()
    del before
    busy = keep_busy()
    with no_waits():
        result = function()
    assert not busy.query(), "it waited for the device, or took longer than the device"
    return busy, result
