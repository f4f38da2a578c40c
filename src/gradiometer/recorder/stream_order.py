"""The order of all uses of a recorder's memory, on whichever streams they are queued."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from gradiometer.ops import is_capturing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager


class StreamOrder:
    """Makes each use of some memory wait for the one before, if that was queued on another stream.

    The host does not wait. Uses in a compiled function or a captured graph are not seen, because a replay
    runs no Python code: the caller has to make streams wait for it.

    >>> import torch
    >>> order = StreamOrder()
    >>> with order.on(torch.device("cpu")):  # a GPU's current stream comes after all uses before
    ...     pass
    """

    def __init__(self) -> None:
        self._last: tuple[torch.Stream, torch.Event] | None = None

    def on(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a context for one use of the memory, on the device's current stream."""
        if device.type == "cpu" or torch.compiler.is_compiling() or is_capturing(device):
            return nullcontext()
        return self._use(device)

    @contextmanager
    def _use(self, device: torch.device) -> Iterator[None]:
        stream = torch.accelerator.current_stream(device)
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
