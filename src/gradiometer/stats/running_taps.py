"""Which taps measure a call of `gradiometer.tap`: those of the innermost model that runs and lists the name.

Hooks of each model keep a stack for each thread. Dynamo traces them as changes of a list, with guards on the
content of the list when a graph is called. Eager code also keeps the frame that calls the model, since a
forward pass may end without its hooks, by Ctrl-C or in a traced function that catches an exception.

Activation checkpointing calls parts of a model again in the backward pass, after the model's forward pass.
The sequence number of the autograd node that does so tells in which forward pass the node was created.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

if TYPE_CHECKING:
    from types import FrameType

    from gradiometer.stats.taps import Taps

__all__ = ["begin", "end", "forget", "is_in_backward", "taps_of"]


class _Thread(threading.local):
    """The taps whose models run in this thread, the innermost last."""

    def __init__(self) -> None:
        # Dynamo reads attributes of this thread only if they are set here, and traces changes of lists
        self.taps: list[Taps] = []
        # for each: the frame that calls the model, and the next autograd node's number when it did
        self.calls: list[tuple[FrameType, int]] = []
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
        _THREAD.calls.append((_caller_of_hook(), torch._C._autograd._get_sequence_nr()))  # noqa: SLF001 neither has a public name
    _THREAD.taps.append(taps)


def end(taps: Taps) -> None:
    """Note that the model of these taps has returned, or raised. Call it in a hook of the model."""
    is_traced = torch.compiler.is_dynamo_compiling()
    if not is_traced:
        # an exception has ended the frame of the call already
        _drop_ended()
    places = [place for place, running in enumerate(_THREAD.taps) if running is taps]
    if is_traced:
        del _THREAD.taps[places[-1]]
        return
    frame = _caller_of_hook()
    for place in places:
        if _THREAD.calls[place][0] is frame:
            _, first = _THREAD.calls.pop(place)
            del _THREAD.taps[place]
            if torch.is_grad_enabled():
                _remember(taps, first)
            return


def forget(taps: Taps) -> None:
    """Drop taps that were removed while their model runs."""
    kept = [pair for pair in zip(_THREAD.taps, _THREAD.calls, strict=False) if pair[0] is not taps]
    _THREAD.taps[:] = [running for running, _ in kept]
    _THREAD.calls[:] = [call for _, call in kept]


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
    found: list[tuple[Taps, int]] = []
    for taps in reversed(running):
        row = taps.rows.get(name)
        if row is not None and _is_another(taps, found):
            found.append((taps, row))
    return found


def is_in_backward() -> bool:
    """Return whether a backward pass runs in this thread; it may call parts of a model."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001 as above


def _is_another(taps: Taps, found: list[tuple[Taps, int]]) -> bool:
    """Return whether taps are others of the same model as those that were found; a model may call itself."""
    return all([taps is not other and taps.model is other.model for other, _ in found])


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
    found: list[tuple[Taps, int]] = []
    for span in spans:
        taps = span.taps()
        row = None if taps is None else taps.rows.get(name)
        if taps is not None and row is not None and _is_another(taps, found):
            found.append((taps, row))
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
    running, calls = _THREAD.taps, _THREAD.calls
    if len(running) > len(calls):
        # a traced function that caught an exception leaves taps without a call
        del running[len(calls) :]
    while calls:
        called = calls[-1][0]
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 as above
        while frame is not None and frame is not called:
            frame = frame.f_back
        if frame is not None:
            return
        calls.pop()
        running.pop()
