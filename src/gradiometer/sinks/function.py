"""Any callable as a sink."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradiometer.recorder import RunInfo, StepRecord
    from gradiometer.rules import Fault, Finding

__all__ = ["Function"]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Function:
    """Calls a function for each step, on the background thread.

    Args:
        function: ``f(record)``, or ``f(record, findings)``: the second gets the findings that are new or
            have changed with this step, often none. An error that it raises is counted as a sink's.
        every: call it for the steps that this divides. Findings of the others come with the next.

    Raises:
        TypeError: for something that cannot be called so.
    """

    def __init__(self, function: Callable[..., object], *, every: int = 1) -> None:
        self._takes_findings = _takes_findings(function)
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r}: a whole number of steps, at least 1")
        self.function = function
        # what a report of failures calls it
        self.name = getattr(function, "__qualname__", None) or type(function).__name__
        self.every = every
        self._held: list[Finding] = []

    def __repr__(self) -> str:
        """Return the function's name."""
        return f"Function({self.name})"

    def start(self, info: RunInfo) -> None:
        """Do nothing."""

    def write(self, records: Sequence[StepRecord], findings: Sequence[Finding]) -> None:
        """Call the function for each step; of those that raise, the first error is passed on at the end."""
        self._held += findings
        failure: Exception | None = None
        last = records[-1] if records else None
        for record in records:
            if record.step % self.every:
                continue
            arguments: tuple[Any, ...] = (record,)
            if self._takes_findings:
                # of a batch each step gets its own; the last one whatever is left
                due = [f for f in self._held if f.last_step <= record.step or record is last]
                self._held = [f for f in self._held if f not in due]
                arguments = (record, due)
            try:
                self.function(*arguments)
            except Exception as error:  # noqa: BLE001 one bad step does not cost the others of its batch
                failure = failure or error
        if failure is not None:
            raise failure

    def fault(self, fault: Fault) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def _takes_findings(function: object) -> bool:
    if not callable(function):
        raise TypeError(f"Function: {function!r} cannot be called")
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin that does not tell
        return False
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    required = [p for p in positional if p.default is p.empty]
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(required) > 2 or keywords or not (positional or variadic):
        raise TypeError(f"Function: {function!r} must take (record) or (record, findings)")
    return len(required) == 2 or (len(positional) > 1 and positional[1].name == "findings")
