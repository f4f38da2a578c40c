"""What a rule and a sink are: any object with these methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gradiometer.fault import Fault
    from gradiometer.findings import Finding
    from gradiometer.steps import RunInfo, StepRecord

__all__ = ["Rule", "Sink"]


@runtime_checkable
class Rule(Protocol):
    """Looks at one step after the other, in order, and says what it sees. Runs on a background thread.

    A sighting is a `Finding` of one step; a `Ledger` joins those that belong together.
    """

    name: str

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Return what is to be said of this step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return its history, as plain values and tensors."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a history."""
        ...


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
