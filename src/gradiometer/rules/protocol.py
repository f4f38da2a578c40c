"""The protocol of a rule: any object with these methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gradiometer.recorder import StepRecord
    from gradiometer.rules.finding import Finding


@runtime_checkable
class Rule(Protocol):
    """Checks one step after the other, in order, and reports findings. Runs on a background thread.

    Each check returns findings that end at this step. A `Ledger` joins those that belong together.
    """

    name: str

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Return the findings of this step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the history as plain values and tensors."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a history."""
        ...
