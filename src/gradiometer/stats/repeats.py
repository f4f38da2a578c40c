"""Repeats of a step: `gradiometer.locate_nonfinite` and `gradiometer.check_deterministic` run a step again.

A repeat is not a step of the training run: meanwhile monitors do nothing, and afterwards the buffers that
recorders and taps have written are as before.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor


class _Owner(Protocol):
    """A recorder, taps, or another object with buffers that a step writes."""

    def repeated(self) -> tuple[Iterable[Tensor], Iterable[Tensor]]:
        """Return the parameters of the model, and the buffers that its steps write."""


_owners: weakref.WeakSet[Any] = weakref.WeakSet()
# The parameters of each repeat. The thread is not enough: on a GPU, hooks run on a thread of autograd
_repeated: list[set[int]] = []
_of_thread = threading.local()


def keep_in_repeats(owner: _Owner) -> None:
    """Restore the buffers of an object after each repeat of a step of its model, as long as it lives."""
    _owners.add(owner)


def is_repeating(parameters: Iterable[Tensor] = ()) -> bool:
    """Return whether this thread repeats a step, or any thread one of a model with these parameters."""
    if not _repeated:
        return False
    return getattr(_of_thread, "depth", 0) > 0 or any([id(p) in own for own in _repeated for p in parameters])


@contextmanager
def repeating(parameters: Iterable[Tensor], state: Iterable[object] = ()) -> Iterator[None]:
    """Enclose repeats of a step that uses these parameters; the caller restores the objects in ``state``."""
    own, left_out = {id(p) for p in parameters}, {id(x) for x in state}
    kept = []
    for owner in list(_owners):
        used, buffers = owner.repeated()
        if id(owner) not in left_out and any([id(p) in own for p in used]):
            kept += [(x, x.clone()) for x in buffers]
    _repeated.append(own)
    _of_thread.depth = getattr(_of_thread, "depth", 0) + 1
    try:
        yield
    finally:
        _of_thread.depth -= 1
        _repeated.remove(own)
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)
