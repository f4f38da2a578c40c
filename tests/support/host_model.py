"""A model of a device: its streams, PyTorch's two caching allocators, and CUDA graphs.

It takes the place of pinning, uploads, launches and stream queries in `gradiometer.ops.uploads`, and runs
queued work only when it is told to. Each launch checks, when it runs, and at each replay, that the memory it
reads holds what its call was made with. The rules are those of PyTorch 2.11 to 2.14:

- A stream runs its work in order, streams run in any order. A copy from pinned memory reads it when it runs.
- Device memory that is freed is reused at once by later allocations on the stream it was allocated on.
- Pinned memory that is freed is reused when an event on each stream that has copied from it is done. If such
  a stream is being captured, the event becomes part of the graph, and the next allocation fails when it
  queries it. No event is recorded for memory that was pinned during a capture. (PyTorch never reuses it; the
  model does, so that nothing depends on this.)
- Memory that is allocated during a capture, or while a graph tree warms up, is of the graph's pool, which
  replays overwrite. After the warm-up it is free, whoever still refers to it.

See ATen/core/CachingHostAllocator.h, c10/cuda/CUDACachingAllocator.cpp, torch/_inductor/cudagraph_trees.py.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from gradiometer import kernels
from gradiometer.columns import TENSORS
from gradiometer.ops import dispatch, launch_plans, uploads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GARBAGE = 0xA5
GRAPH_TREES = "torch._inductor.cudagraph_trees"


class ModelError(AssertionError):
    """The device would have read wrong memory, or the driver would have reported an error."""


# compared by identity: two blocks are never the same memory
@dataclass(eq=False)
class Block:
    memory: bytearray
    # of device memory: where it is free again
    stream: int | None = None
    # who has it; memory without an owner is free
    owner: object = None
    # of pinned memory: the streams that have copied from it, and events that are not done
    used_on: set[int] = field(default_factory=set)
    events: list[Event] = field(default_factory=list)
    of_capture: bool = False

    def fill(self) -> None:
        self.memory[:] = bytes([GARBAGE]) * len(self.memory)

    @property
    def reusable(self) -> bool:
        return self.owner is None and not self.events


@dataclass(eq=False)
class Event:
    captured: bool
    done: bool = False


@dataclass(eq=False)
class Pool:
    """Device memory of one or more graphs, or all other device memory."""

    blocks: list[Block] = field(default_factory=list)


@dataclass(eq=False)
class Graph:
    pool: Pool
    work: list[Callable[[], None]] = field(default_factory=list)


class HostModel:
    """A device. Threads have a current stream each."""

    def __init__(self) -> None:
        self.queues: dict[int, deque[Callable[[], None]]] = {}
        self.captures: dict[int, Graph] = {}
        self.pool = Pool()
        self.pinned: list[Block] = []
        # called once, at the next point where another thread may run
        self.interruption: Callable[[], None] | None = None
        self._at: dict[int, Block] = {}
        self._thread = threading.local()

    # what the package calls

    def stream_of(self, _: torch.device) -> int:
        return self._thread.stream

    def is_capturing(self, _: torch.device | None = None) -> bool:
        return self._thread.stream in self.captures

    def pin(self, host: Tensor, _: torch.device | None = None) -> Tensor:
        self._interrupt()
        block = self._pinned_block(host.nbytes)
        block.of_capture = self.is_capturing()
        pinned = self._tensor(block, host.numel(), partial(self._free_pinned, block))
        return pinned.copy_(host)

    def upload(self, host: Tensor, _: torch.device | None = None) -> Tensor:
        self._interrupt()
        stream, source = self._thread.stream, self._block_of(host)
        if source not in self.pinned:
            raise ModelError("copies from memory that is not pinned: the host waits")
        source.used_on.add(stream)
        target = self._device_block(host.nbytes)
        start, size = 8 * host.storage_offset(), host.nbytes

        def copy() -> None:
            target.memory[:size] = source.memory[start : start + size]

        self._queue(copy)
        return self._tensor(target, host.numel(), lambda: None)

    def launch(self, pointers: Tensor | None, table: Tensor) -> None:
        """Queue a kernel that reads these tables."""
        addresses, static = self._thread.expected
        if pointers is not None:
            self._queue(self._read(pointers, addresses, "pointers"))
        self._queue(self._read(table, static, "table"))

    # what training code does

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Make a stream current."""
        self.queues.setdefault(stream, deque())
        before, self._thread.stream = getattr(self._thread, "stream", 0), stream
        yield
        self._thread.stream = before

    @contextmanager
    def expecting(self, addresses: list[int], static: list[int]) -> Iterator[None]:
        """What launches have to read."""
        before, self._thread.expected = getattr(self._thread, "expected", None), (addresses, static)
        yield
        self._thread.expected = before

    def capture(self, stream: int, pool: Pool | None = None) -> Graph:
        self.captures[stream] = graph = Graph(pool or Pool())
        return graph

    def end_capture(self, stream: int) -> None:
        del self.captures[stream]

    def replay(self, graph: Graph, stream: int) -> None:
        # graphs that share memory are replayed one after the other
        self.synchronize()
        with self.on(stream):
            for block in graph.pool.blocks:
                self._queue(block.fill)
            for work in graph.work:
                self._queue(work)

    @contextmanager
    def warm_up(self, pool: Pool) -> Iterator[None]:
        """Allocate from a pool on this thread, without capturing, as a graph tree does in its first run."""
        self.synchronize()
        sys.modules.setdefault(GRAPH_TREES, ModuleType(GRAPH_TREES))
        # Inductor makes the device current as well, with a function mode
        with torch.device("cpu"):
            self._thread.pool = pool
            yield
            self._thread.pool = None
        for block in pool.blocks:
            block.owner = None

    def use_free_memory(self, stream: int) -> None:
        """Allocate, write and free all memory that is free for this stream."""
        with self.on(stream):
            for block in self._pool().blocks:
                if block.owner is None and block.stream == stream:
                    self._queue(block.fill)
            if not self.is_capturing():
                self._process_events()
                for block in self.pinned:
                    if block.reusable:
                        block.fill()

    def run(self, stream: int, count: int) -> None:
        """Run the oldest work of a stream."""
        queue = self.queues[stream]
        for _ in range(min(count, len(queue))):
            queue.popleft()()

    def synchronize(self) -> None:
        for stream, queue in self.queues.items():
            self.run(stream, len(queue))

    # allocators

    def _pool(self) -> Pool:
        if self.is_capturing():
            return self.captures[self._thread.stream].pool
        return getattr(self._thread, "pool", None) or self.pool

    def _device_block(self, size: int) -> Block:
        stream, pool = self._thread.stream, self._pool()
        for block in reversed(pool.blocks):
            if block.owner is None and block.stream == stream and len(block.memory) == _rounded(size):
                return block
        pool.blocks.append(self._block(size, stream))
        return pool.blocks[-1]

    def _pinned_block(self, size: int) -> Block:
        # a capture has a pool of its own
        if not self.is_capturing():
            self._process_events()
            for block in self.pinned:
                if block.reusable and len(block.memory) == _rounded(size):
                    return block
        self.pinned.append(self._block(size))
        return self.pinned[-1]

    def _block(self, size: int, stream: int | None = None) -> Block:
        block = Block(bytearray(_rounded(size)), stream)
        block.fill()
        self._at[torch.frombuffer(block.memory, dtype=torch.uint8).data_ptr()] = block
        return block

    def _block_of(self, tensor: Tensor) -> Block | None:
        return self._at.get(tensor.untyped_storage().data_ptr())

    def _tensor(self, block: Block, count: int, freed: Callable[[], None]) -> Tensor:
        owner = block.owner = object()

        def release() -> None:
            # else the pool has taken it back
            if block.owner is owner:
                block.owner = None
                freed()

        # the tensor's storage, and so each view of it, keeps the memoryview alive
        view = memoryview(block.memory)
        weakref.finalize(view, release).atexit = False
        return torch.frombuffer(view, dtype=torch.int64, count=count)

    def _free_pinned(self, block: Block) -> None:
        for stream in [] if block.of_capture else block.used_on:
            event = Event(captured=stream in self.captures)
            block.events.append(event)
            if not event.captured:
                self.queues[stream].append(partial(setattr, event, "done", True))
        block.used_on.clear()

    def _process_events(self) -> None:
        for block in self.pinned:
            if any(event.captured for event in block.events):
                raise ModelError("cudaErrorCapturedEvent: pinned memory was freed during a capture")
            block.events = [event for event in block.events if not event.done]

    # streams

    def _queue(self, work: Callable[[], None]) -> None:
        stream = self._thread.stream
        graph = self.captures.get(stream)
        (self.queues[stream] if graph is None else graph.work).append(work)

    def _read(self, tensor: Tensor, expected: list[int], what: str) -> Callable[[], None]:
        block, start = self._block_of(tensor), 8 * tensor.storage_offset()
        if block is None or block.stream is None:
            raise ModelError(f"the {what} of a launch are not in device memory")

        def read() -> None:
            found = memoryview(block.memory)[start : start + 8 * len(expected)].cast("q").tolist()
            if found != expected:
                raise ModelError(f"a kernel reads wrong {what}")

        return read

    def _interrupt(self) -> None:
        interruption, self.interruption = self.interruption, None
        if interruption is not None:
            failures: list[BaseException] = []
            thread = threading.Thread(target=_caught, args=(interruption, failures))
            thread.start()
            thread.join()
            for failure in failures:
                raise failure


def _caught(run: Callable[[], None], failures: list[BaseException]) -> None:
    try:
        run()
    except BaseException as error:  # noqa: BLE001 raised again on the thread that waits
        failures.append(error)


def _rounded(size: int) -> int:
    return max(64, 1 << (size - 1).bit_length())


@contextmanager
def installed(lists_kept: int) -> Iterator[HostModel]:
    """Make the package use a new model instead of a device, with nothing known to it."""
    model = HostModel()

    def moments(pointers: Tensor, table: Tensor, *_: Any) -> None:
        model.launch(pointers, table)

    def finalize(table: Tensor, _: Tensor, count: int, *__: Any) -> tuple[Tensor, Tensor]:
        model.launch(None, table)
        return torch.zeros(count, TENSORS.width, dtype=torch.float64), torch.zeros(count, dtype=torch.int32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uploads, "_pinned", model.pin)
        patch.setattr(uploads, "_upload", model.upload)
        patch.setattr(uploads, "stream_of", model.stream_of)
        patch.setattr(uploads, "is_capturing", model.is_capturing)
        patch.setattr(launch_plans, "LISTS_KEPT", lists_kept)
        patch.setattr(uploads, "_captured", [])
        # put back at the end
        patch.delitem(sys.modules, GRAPH_TREES, raising=False)
        patch.setattr(dispatch, "uses_kernels", lambda _: True)
        patch.setattr(kernels, "moments", moments)
        patch.setattr(kernels, "scale", moments)
        patch.setattr(kernels, "finalize", finalize)
        launch_plans.clear()
        try:
            yield model
        finally:
            launch_plans.clear()
            sys.modules.pop(GRAPH_TREES, None)
