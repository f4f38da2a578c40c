"""The table of contracts: each is a function of a `Probe`, under its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gradiometer.checks.probe import Probe
    from gradiometer.checks.report import Evidence

GROUPS: Final = ("behaviour", "gradients", "initialization", "configuration")
# the names in each group in the order of a report
ORDER: Final = (
    *(
        "causal",
        "bidirectional",
        "padding",
        "examples",
        "order",
        "repeatable",
        "dropout",
        "cache",
        "attention",
    ),
    *("normalization", "parameter_gradients", "input_gradients", "tied_weights", "registered", "optimizer"),
    *("weight_decay", "repeated_weights", "initial_scales", "initial_spread", "first_loss"),
    *("configuration", "buffers", "modes"),
)


@dataclass(frozen=True)
class Contract:
    """A question about a model.

    Attributes:
        name: the name.
        group: one of `GROUPS`.
        text: what is true of a model for which it holds, one line.
        examine: returns the evidence that it is broken; nothing if it holds. Raises `NotApplicable`.
        is_static: whether it only looks at the structure of the model, and neither calls it nor reads values.
    """

    name: str
    group: str
    text: str
    examine: Callable[[Probe], Iterable[Evidence]]
    is_static: bool


CONTRACTS: Final[dict[str, Contract]] = {}


def contract(
    group: str, text: str, *, is_static: bool = False
) -> Callable[[Callable[[Probe], Iterable[Evidence]]], Callable[[Probe], Iterable[Evidence]]]:
    """Return a decorator that adds a function to the table, under its name."""

    def add(examine: Callable[[Probe], Iterable[Evidence]]) -> Callable[[Probe], Iterable[Evidence]]:
        name = examine.__name__
        CONTRACTS[name] = Contract(name, group, text, examine, is_static)
        return examine

    return add
