"""The protocol of a sink."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.recorder import RunInfo, StepRecord
    from gradiometer.rules import Fault, Finding


@runtime_checkable
class Sink(Protocol):
    """Receives recorded steps, findings and faults.

    All methods are called on the sink's own thread, one at a time. An error is logged once and counted;
    training and the other sinks go on. An optional method ``tick()`` is called in every second without a
    step, for example to write buffered steps. An optional attribute ``lost`` is the number of steps that it
    could not write, which `gradiometer.Monitor.dropped` includes. If it has a true attribute
    ``before_rules``, it does not wait for the rules: it gets each step at once, and the step's findings in a
    later call of `write`, which may have no steps.
    """

    def start(self, info: RunInfo) -> None:
        """Open the sink; called once, before any other method."""
        ...

    def write(self, records: Sequence[StepRecord], findings: Sequence[Finding]) -> None:
        """Write steps, in order, and the findings that are new or have changed with them."""
        ...

    def fault(self, fault: Fault) -> None:
        """Write a fault; on return, all that was written before must be on disk."""
        ...

    def close(self) -> None:
        """Write everything and close the sink; called once, at the end."""
        ...
