"""Tell observers, such as `gradiometer.watch`, of each clip of gradients, right before and after it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


class Clip(NamedTuple):
    """A clip of gradients by their norm.

    Attributes:
        parameters: whose gradients are clipped.
        max_norm: the limit of the 2-norm; None if another norm is limited, or by something else.
        factor: returns what the gradients are multiplied by, 0-d on a device; None if that is not one number.
    """

    parameters: Sequence[Tensor]
    max_norm: float | Tensor | None
    factor: Callable[[], Tensor | None]


class ClipObserver(Protocol):
    """Is told of clips outside of compiled functions; must not raise."""

    def before_norm(self, tensors: Sequence[Tensor]) -> None:
        """See tensors of which torch is about to compute the total norm, and which may be gradients."""

    def before_clip(self, clip: Clip) -> None:
        """See gradients that are about to be clipped."""

    def after_clip(self, clip: Clip) -> None:
        """See gradients that were clipped."""

    def before_value_clip(self, parameters: Sequence[Tensor]) -> None:
        """See gradients whose elements are about to be clamped."""


# not kept alive by this
observers: weakref.WeakKeyDictionary[ClipObserver, None] = weakref.WeakKeyDictionary()


def observers_now() -> list[ClipObserver]:
    """Return the observers, while other threads may add some."""
    return [each for ref in observers.keyrefs() if (each := ref()) is not None]


def clip_begins(
    parameters: Sequence[Tensor], max_norm: float | Tensor | None, factor: Callable[[], Tensor | None]
) -> Clip | None:
    """Tell the observers of a clip; `clip_ended` is to follow. None without any, or in compiled code."""
    if torch.compiler.is_compiling() or not observers:
        return None
    clip = Clip(parameters, max_norm, factor)
    for observer in observers_now():
        observer.before_clip(clip)
    return clip


def value_clip_begins(parameters: Sequence[Tensor]) -> None:
    """Tell the observers that gradients are about to be clamped, outside of compiled code."""
    if not torch.compiler.is_compiling():
        for observer in observers_now():
            observer.before_value_clip(parameters)


def clip_ended(clip: Clip | None) -> None:
    """Tell the observers that the gradients were clipped."""
    if clip is not None:
        for observer in observers_now():
            observer.after_clip(clip)
