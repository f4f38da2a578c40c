"""What a planted fault is, and which contracts tell it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels_bench.zoo.contracts.subjects import Subject

# the contracts of `check_model`, by group
CONTRACTS = {
    "behaviour": "causal bidirectional padding examples order repeatable dropout cache attention "
    "normalization",
    "gradients": "parameter_gradients input_gradients tied_weights registered optimizer weight_decay",
    "initialization": "repeated_weights initial_scales initial_spread first_loss",
    "configuration": "configuration buffers modes",
}
GROUPS = tuple(CONTRACTS)


@dataclass(frozen=True)
class Fault:
    """A mistake in a model.

    Attributes:
        group: one of `GROUPS`.
        plant: changes the subject.
        where: the architectures in which it is planted.
        contracts: the names of the contracts that tell it; each of them is right.
    """

    group: str
    plant: Callable[[Subject], object]
    where: tuple[str, ...]
    contracts: tuple[str, ...]


def adder(table):
    """Return a decorator that adds faults to a table, under the function's name."""

    def fault(group, contracts, *, where):
        def add(plant):
            name = plant.__name__.replace("_", "-")
            table[name] = Fault(group, plant, tuple(where.split()), tuple(contracts.split()))
            return plant

        return add

    return fault
