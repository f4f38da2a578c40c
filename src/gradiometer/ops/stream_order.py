"""Order uses of the same memory on several streams, without a wait of the host."""

from __future__ import annotations

import threading
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from gradiometer.ops.uploads import is_capturing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager


class StreamOrder:
    """Makes each use of some memory wait for the one before, if that was queued on another stream.

    The host does not wait, but for another thread that is queuing a use. Uses in a compiled function or a
    captured graph are not seen, because a replay runs no Python code: the caller has to make streams wait
    for it.
    """

    def __init__(self) -> None:
        self._last: tuple[torch.Stream, torch.Event] | None = None
        # a backward pass queues on a thread of autograd; a garbage collection may run here, and use it again
        self._lock = threading.RLock()

    def on(self, device: torch.device, *others: StreamOrder) -> AbstractContextManager[None]:
        """Return a context for one use of the memory, and that of others, on the device's current stream."""
        # a capture cannot wait for an event from outside of it
        if device.type == "cpu" or torch.compiler.is_compiling() or is_capturing(device):
            return nullcontext()
        return self._use(device, others)

    @contextmanager
    def _use(self, device: torch.device, others: tuple[StreamOrder, ...]) -> Iterator[None]:
        stream = torch.accelerator.current_stream(device)
        with self._lock, others[0].on(device, *others[1:]) if others else nullcontext():
            if self._last is not None and self._last[0] == stream:
                event = self._last[1]
            else:
                event = torch.Event(device)
                if self._last is not None:
                    stream.wait_event(self._last[1])
            try:
                yield
            finally:
                event.record(stream)
                self._last = stream, event

    def __reduce__(self) -> Any:
        # events can be neither copied nor pickled; a copy of the memory has no uses yet
        return StreamOrder, ()
