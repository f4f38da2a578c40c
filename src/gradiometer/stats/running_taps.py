"""Which taps measure a call of `gradiometer.tap`: those of the innermost model that runs and lists the name.

Hooks of each model keep a stack for each thread. Dynamo traces them as changes of a list, with guards on the
content of the list when a graph is called. Eager code also notes the frame that calls the model, since a
forward pass may end without its hooks, by Ctrl-C or in a traced function that catches an exception. It does
not keep the frame, whose variables would keep the model and its batch.

Activation checkpointing calls parts of a model again in the backward pass, after the model's forward pass.
The sequence number of the autograd node that does so tells in which forward pass the node was created.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from types import FrameType

    from torch import Tensor, nn


class Taps(Protocol):
    """What a call of `gradiometer.tap` needs of a `gradiometer.Taps`."""

    rows: dict[str, int]
    heads: dict[str, int]

    @property
    def model(self) -> nn.Module:
        """The model that is tapped."""

    def is_due(self) -> bool:
        """Return whether a value may be measured now."""

    def check(self, x: object, what: str) -> None:
        """Raise a TypeError that begins with ``what``, unless the value can be measured."""

    def measure(self, x: Tensor, row: int, channel_dim: int) -> Tensor:
        """Return ``x``, measured in a row."""

    def refusal(self, x: object) -> str | None:
        """Return why a value cannot be measured, or None."""

    def measure_rows(self, columns: Tensor, row: int) -> None:
        """Merge columns of heads or blocks into rows of their store."""


class _Mark:
    """A local variable of a frame that calls a model. It is freed with the frame."""


class _Call(NamedTuple):
    """A call of a model in eager code."""

    taps: weakref.ref[Taps]
    # the id of the frame that calls the model, which no other frame has while the mark exists
    frame: int
    mark: weakref.ref[_Mark]
    # the next autograd node's number at the beginning
    first: int


class _Thread(threading.local):
    """The taps whose models run in this thread, the innermost last."""

    def __init__(self) -> None:
        # Dynamo reads attributes of this thread only if they are set here, and traces changes of lists
        self.taps: list[Taps] = []
        # one for each in eager code
        self.calls: list[_Call] = []
        # another thread may get this one's identifier later
        self.token = object()


class _Span(NamedTuple):
    """The numbers of the autograd nodes of one forward pass; each thread counts its own."""

    first: int
    end: int
    thread: object
    taps: weakref.ref[Taps]


_THREAD: Final = _Thread()
# forward passes whose backward pass may still come
_SPANS: Final[deque[_Span]] = deque(maxlen=4096)


def begin(taps: Taps) -> None:
    """Note that the model of these taps runs. Call it in a hook of the model."""
    if not torch.compiler.is_dynamo_compiling():
        _drop_ended()
        frame, running, calls = _caller_of_hook(), _THREAD.taps, _THREAD.calls
        # several taps of one model have the same frame
        mark = frame.f_locals.setdefault("__gradiometer_mark__", _Mark())
        # the garbage collector of another thread may free the frame
        freed = weakref.ref(mark, partial(_drop_freed, running, calls))
        calls.append(_Call(weakref.ref(taps), id(frame), freed, torch._C._autograd._get_sequence_nr()))  # noqa: SLF001 neither has a public name
    _THREAD.taps.append(taps)


def end(taps: Taps) -> None:
    """Note that the model of these taps has returned, or raised. Call it in a hook of the model."""
    if torch.compiler.is_dynamo_compiling():
        places = [place for place, running in enumerate(_THREAD.taps) if running is taps]
        del _THREAD.taps[places[-1]]
        return
    # an exception has ended the frame of the call already
    _drop_ended()
    frame = id(_caller_of_hook())
    for call in list(_THREAD.calls):
        if call.frame == frame and call.taps() is taps:
            _keep(_THREAD.taps, _THREAD.calls, [other for other in _THREAD.calls if other is not call])
            if torch.is_grad_enabled():
                _remember(taps, call.first)
            return


def forget(taps: Taps) -> None:
    """Drop taps that were removed while their model runs."""
    _keep(_THREAD.taps, _THREAD.calls, [call for call in _THREAD.calls if call.taps() is not taps])


def taps_of(name: str) -> list[tuple[Taps, int]]:
    """Return the taps that measure a call of this name now, and its row in each.

    These are all taps of one model. Outside of a tapped model's forward pass there are none, but for what
    activation checkpointing computes again.
    """
    is_traced = torch.compiler.is_dynamo_compiling()
    running = _THREAD.taps
    if running and not is_traced:
        _drop_ended()
    if not running:
        return [] if is_traced or not is_in_backward() else _taps_in_backward(name)
    # a copy: the garbage collector may run here and drop calls
    return _listed(running[::-1], name)


def is_in_backward() -> bool:
    """Return whether a backward pass runs in this thread; it may call parts of a model."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001 as above


def _listed(running: list[Taps], name: str) -> list[tuple[Taps, int]]:
    """Return the first of these taps that lists a name, and all others of its model, with their rows."""
    found: list[tuple[Taps, int]] = []
    for taps in running:
        row = taps.rows.get(name)
        # a model may call itself
        if row is not None and all([taps is not other and taps.model is other.model for other, _ in found]):
            found.append((taps, row))
    return found


def _taps_in_backward(name: str) -> list[tuple[Taps, int]]:
    """Return the taps in whose model's forward pass the current autograd node was created."""
    node = torch._C._current_autograd_node()  # noqa: SLF001 as above
    number = -1 if node is None else node._sequence_nr()  # noqa: SLF001 as above
    spans = [span for span in list(_SPANS) if span.first <= number < span.end]
    if not spans:
        return []
    # on a GPU another thread than that of the forward pass runs the backward pass
    is_here = any([span.thread is _THREAD.token for span in spans])
    thread = _THREAD.token if is_here else spans[-1].thread
    # the innermost of nested models has begun last
    spans = sorted([span for span in spans if span.thread is thread], key=lambda span: -span.first)
    found = _listed([taps for span in spans if (taps := span.taps()) is not None], name)
    if not torch.is_grad_enabled():
        # a checkpoint inside of another one, whose node was created just now
        for taps, _ in found:
            _remember(taps, torch._C._autograd._get_sequence_nr() - 1)  # noqa: SLF001 as above
    return found


def _remember(taps: Taps, first: int) -> None:
    number = torch._C._autograd._get_sequence_nr()  # noqa: SLF001 as above
    _SPANS.append(_Span(first, number, _THREAD.token, weakref.ref(taps)))


def _caller_of_hook() -> FrameType:
    # after this function, `begin` or `end`, and the hook
    return sys._getframe(3)  # noqa: SLF001 it has no public name


def _drop_ended() -> None:
    """Drop models whose forward pass was left by an exception, without their hooks."""
    running, calls = _THREAD.taps, list(_THREAD.calls)
    while calls and not _is_on_stack(calls[-1]):
        calls.pop()
    # a traced function that caught an exception leaves taps without a call
    if len(running) != len(calls) or len(calls) != len(_THREAD.calls):
        _keep(running, _THREAD.calls, calls)


def _is_on_stack(call: _Call) -> bool:
    if call.mark() is None:
        return False
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 as above
    while frame is not None and id(frame) != call.frame:
        frame = frame.f_back
    return frame is not None


def _drop_freed(running: list[Taps], calls: list[_Call], mark: weakref.ref[_Mark]) -> None:
    _keep(running, calls, [call for call in calls if call.mark is not mark])


def _keep(running: list[Taps], calls: list[_Call], kept: list[_Call]) -> None:
    """Keep these calls of a thread, and their taps."""
    calls[:] = kept
    running[:] = [taps for call in kept if (taps := call.taps()) is not None]
