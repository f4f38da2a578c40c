"""The protocol of a sink: any object with these methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.recorder import RunInfo, StepRecord
    from gradiometer.rules import Fault, Finding

__all__ = ["Sink"]


@runtime_checkable
class Sink(Protocol):
    """Takes what was recorded. Every method runs on a thread of the sink's own, one at a time.

    An error is reported once and counted; training goes on, and so do the other sinks. A sink may have a
    method ``tick()`` too, which is called in every second without a step: a time to write what waits.
    """

    def start(self, info: RunInfo) -> None:
        """Open; called once, before anything else."""
        ...

    def write(self, records: Sequence[StepRecord], findings: Sequence[Finding]) -> None:
        """Take steps, in order, and the findings that are new or have changed with them."""
        ...

    def fault(self, fault: Fault) -> None:
        """Take the report of a fault: what was written before it is to be on disk when this returns."""
        ...

    def close(self) -> None:
        """Write all and close; called once, at the end."""
        ...
