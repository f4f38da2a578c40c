"""What a case of this family is: a step and its reference, and for a fault what is really wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.optim import Optimizer

# what a wrong gradient is: of "other" no simple relation to the right one is known
KINDS = ("factor", "sign", "zeros", "rows", "permutation", "non-finite", "other")


@dataclass
class Case:
    """What `gradiometer.check_gradients` is called with.

    Attributes:
        step: runs forward and backward, and returns the loss.
        args: its arguments.
        model: the model whose gradients are compared.
        against: "eager", "float64", or a callable with the same arguments.
        optimizer: an optimizer whose update is compared, too.
        plain: the right step, for tests of the case itself; by default the reference in eager mode.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    model: nn.Module
    against: str | Callable[..., Any] = "eager"
    optimizer: Optimizer | None = None
    plain: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Fault:
    """A mistake in a step.

    Attributes:
        make: returns the case, from a seed that is already set.
        first: the name of the parameter whose gradient (or update) is the first wrong one in backward order.
        kind: one of `KINDS`, of that gradient.
        what: "gradient", or "update" if only the optimizer's update is wrong.
        ranks: the number of processes it needs.
        factor: what the right gradient is multiplied by, where ``kind`` is "factor".
    """

    make: Callable[[], Case]
    first: str
    kind: str
    what: str = "gradient"
    ranks: int = 1
    factor: float | None = None


def adder(table):
    """Return a decorator that adds faults to a table, under the function's name."""

    def fault(first, kind, *, what="gradient", ranks=1, factor=None):
        def add(make):
            if kind not in KINDS:
                msg = f"unknown kind: {kind}"
                raise ValueError(msg)
            table[make.__name__.replace("_", "-")] = Fault(make, first, kind, what, ranks, factor)
            return make

        return add

    return fault


def step_of(model, loss, *, forward=None):
    """Return a step: the loss of what the model, or ``forward``, makes of a batch, and its backward."""
    call = model if forward is None else forward

    def step(x, y):
        value = loss(call(x), y)
        value.backward()
        return value

    return step
