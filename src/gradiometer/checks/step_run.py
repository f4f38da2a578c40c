"""What one run of a training step gave: outputs, and gradients in the order of the backward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


@dataclass(frozen=True, eq=False)
class StepRun:
    """What one run of a step gave.

    Attributes:
        outputs: copies of the tensors that the step returned, by name: ``"output"``, ``"output.loss"``.
        grads: copies of the gradients by parameter name, in the order of the backward pass where it is known:
            the first is the one that autograd completed first. Parameters without a gradient are left out.
        notes: what a reader must know of this run, such as operators that ran in another dtype than asked.
    """

    outputs: Mapping[str, Tensor]
    grads: Mapping[str, Tensor]
    notes: tuple[str, ...] = field(default=())
