"""Shared by the tests on a real GPU, and by their rehearsal on interpreted kernels.

    TRITON_INTERPRET=1 GPU_TESTS_DEVICE=cpu python -m pytest -m gpu tests/gpu

then runs on tensors of the CPU what needs no device: a capture is a call, a replay is another one, and a
read of a value by the host is the wait that the device would report.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    import gradiometer as gm

DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda")
REHEARSED = DEVICE == "cpu"
# kernels are a thousand times slower there, so that most rehearsals leave out cases
FEW = REHEARSED and os.environ.get("HYPOTHESIS_PROFILE") != "deep"
on_a_gpu = pytest.mark.skipif(REHEARSED, reason="streams, memory or captures of a GPU")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# around the tile size of 1024 and the chunk size of 2**15 elements
SIZES = (1, 2, 3, 7, 8, 9, 255, 1023, 1024, 1025, 2**15 - 1, 2**15, 2**15 + 1, 3 * 2**15 + 1029, 1_000_003)
if FEW:
    SIZES = (1, 7, 1025, 2**15 + 1)


def no_waits() -> AbstractContextManager[Any]:
    """Turn every operation that CUDA reports as a wait for the device into an error."""
    if not REHEARSED:
        return _no_waits()
    from support.fake_device import watch  # imports gradiometer, which conftest.py must not do first

    return watch()


def no_waits_on_a_gpu() -> AbstractContextManager[Any]:
    """Return `no_waits` for code that may read tensors of the CPU, or is compiled, which traces its modes."""
    return nullcontext() if REHEARSED else no_waits()


@contextmanager
def _no_waits() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def fewer(cases: Sequence[Any]) -> Sequence[Any]:
    """Return the cases; in a short rehearsal the first two."""
    return cases[:2] if FEW else cases


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


class Rehearsal:
    """Replaces a captured graph: a replay calls the function, and overwrites the result of the capture."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function, self.result = function, function()

    def replay(self) -> None:
        pairs = zip(*map(pytree.tree_leaves, (self.result, self._function())), strict=True)
        for kept, new in pairs:
            if isinstance(kept, Tensor) and kept is not new:
                kept.detach().copy_(new.detach())


def record(
    function: Callable[[], Any],
    stream: torch.cuda.Stream | None = None,
    pool: Any = None,
    errors: str = "global",
) -> tuple[Any, Any]:
    """Warm up on a side stream, as the documentation of CUDA graphs requires, and capture.

    The function runs three times; the capture itself runs nothing. ``errors``: "thread_local" if a thread of
    another library, such as NCCL's, may query events during the capture.
    """
    if REHEARSED:
        for _ in range(2):
            function()
        rehearsal = Rehearsal(function)
        return rehearsal, rehearsal.result
    stream = stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=errors):
        result = function()
    return graph, result


def compiled(function: Callable[..., Any], mode: str = "default") -> Callable[..., Any]:
    """Compile with Inductor; in a rehearsal trace the same graph, and run it as it is."""
    options = {"backend": "aot_eager"} if REHEARSED else {"mode": mode}
    return torch.compile(function, fullgraph=True, **options)


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
