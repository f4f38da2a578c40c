"""What the host knows of a model beside the values of its tensors."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ModelState"]


@dataclass(frozen=True, eq=False)
class ModelState:
    """The state of a model at the end of a step, which costs no wait for the device.

    Attributes:
        requires_grad: for each parameter of the roster, whether it requires a gradient.
        reached: whether the autograd graph of the loss leads to any of these parameters; None if the loss was
            given without its graph.
        evaluating: the layers that behave differently in evaluation mode, if the model is in that mode, such
            as ``"2 BatchNorm2d, 1 Dropout"``; empty in training mode.
        untied: pairs of names that were one parameter when the monitor was created, and are two now.
        grad_writes: how often the first gradient was written in place since the end of the step before: once,
            if one ``backward()`` has added to it and nothing has cleared it. 0 if it is another tensor now.
        has_loss_scale: whether gradients have a loss scale: ``record`` was called with ``inv_scale``.

    >>> ModelState((True, False)).evaluating
    ''
    """

    requires_grad: tuple[bool, ...]
    reached: bool | None = None
    evaluating: str = ""
    untied: tuple[tuple[str, str], ...] = ()
    grad_writes: int = 0
    has_loss_scale: bool = False
