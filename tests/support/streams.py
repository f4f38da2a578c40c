"""Fake streams and events, and a detector of uses of one memory by two streams in no order."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gradiometer.ops import stream_order

if TYPE_CHECKING:
    from collections.abc import Iterator


class Stream:
    """A stream. Its clock has, for each stream, the number of the last operation that comes before now."""

    def __init__(self) -> None:
        self.clock: dict[Stream, int] = {self: 0}
        # the capture that it is part of
        self.capture: object = None

    def wait_event(self, event: Event) -> None:
        if event.capture is not self.capture:
            raise RaceError("cudaErrorStreamCaptureIsolation: a wait from inside of a capture, or for one")
        for stream, number in event.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), number)

    def wait_stream(self, stream: Stream) -> None:
        event = Event(None)
        event.record(stream)
        self.wait_event(event)


class Event:
    """Replaces `torch.Event`; the copy that it follows has arrived."""

    def __init__(self, _: Any) -> None:
        self.clock: dict[Stream, int] = {}
        self.capture: object = None

    def record(self, stream: Stream) -> None:
        self.clock, self.capture = dict(stream.clock), stream.capture

    def query(self) -> bool:
        return True


class RaceError(AssertionError):
    """Two streams use the same memory, at least one writes, and neither waits for the other."""


class _Use(NamedTuple):
    stream: Stream
    number: int
    writes: bool
    what: str


class Streams(TorchDispatchMode):
    """Tracks which stream uses which memory, for all operators that are called in this mode."""

    def __init__(self) -> None:
        super().__init__()
        self.current = Stream()
        self._uses: dict[int, list[_Use]] = {}
        self._alive: list[Any] = []

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture the current stream; what it does then is part of a graph, and is not tracked."""
        stream, uses = self.current, self._uses
        stream.capture, self._uses = object(), {}
        yield
        stream.capture, self._uses = None, uses

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        schema = func._schema.arguments
        if func.is_view:
            return out
        self.current.clock[self.current] += 1
        given = [(schema[i], value) for i, value in enumerate(args)]
        given += [(next(a for a in schema if a.name == name), value) for name, value in kwargs.items()]
        # these read only the shape
        makes = any(part in func.__name__ for part in ("new_", "_like")) or func.namespace == "prim"
        for argument, value in [] if makes else given:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            self._use(value, str(func), writes=writes)
        self._use(out, str(func), writes=True)
        return out

    def _use(self, tree: Any, what: str, *, writes: bool) -> None:
        stream = self.current
        for tensor in pytree.tree_leaves(tree):
            if not isinstance(tensor, Tensor) or tensor.device.type == "cpu":
                continue
            storage = tensor.untyped_storage()
            self._alive.append(storage)
            uses = self._uses.setdefault(storage._cdata, [])
            for use in uses:
                if (use.writes or writes) and stream.clock.get(use.stream, 0) < use.number:
                    msg = f"{what} uses memory that {use.what} uses on another stream"
                    raise RaceError(msg)
            uses.append(_Use(stream, stream.clock[stream], writes, what))


@contextmanager
def streams() -> Iterator[Streams]:
    """Replace streams and events by fakes, for tensors of a fake device."""
    found = Streams()
    with (
        patch.object(torch, "Event", Event),
        patch.object(torch.accelerator, "current_stream", lambda _: found.current),
        patch.object(stream_order, "is_capturing", lambda _: found.current.capture is not None),
        found,
    ):
        yield found
