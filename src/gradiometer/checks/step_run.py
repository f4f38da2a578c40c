"""What one run of a training step gave: outputs, and gradients in the order of the backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from gradiometer.stats import leaves

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def outputs_of(output: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a step returned, in nested containers and data classes, with names.

    >>> list(outputs_of({"loss": 0.5}))
    [('output.loss', 0.5)]
    """
    yield from leaves("output", _in_containers(output))


def _in_containers(value: Any) -> Any:
    """Return a value with data classes as mappings."""
    if isinstance(value, Mapping):
        return {key: _in_containers(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_in_containers(x) for x in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _in_containers(getattr(value, each.name, None)) for each in fields(value)}
    return value
