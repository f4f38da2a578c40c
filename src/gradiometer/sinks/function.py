"""Any callable as a sink."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from gradiometer.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradiometer.recorder import RunInfo, StepRecord
    from gradiometer.rules import Fault, Finding

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Function:
    """Calls a function for each step, on the background thread.

    Args:
        function: ``f(record)`` or ``f(record, findings)``. ``findings`` lists the findings that were added or
            changed by this step, and by earlier steps without a call; it is often empty. An error that the
            function raises is counted as an error of this sink.
        every: call it for steps divisible by this. Findings of other steps are passed with the next call.

    Raises:
        TypeError: for an object that cannot be called this way.
        ValueError: if ``every`` is not a positive integer.
    """

    def __init__(self, function: Callable[..., object], *, every: int = 1) -> None:
        self._takes_findings = _takes_findings(function)
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"Function(every={every!r}): every must be a positive integer")
        self.function = function
        # the name in reports of failures
        self.name = getattr(function, "__qualname__", None) or type(function).__name__
        self.every = every
        self._held: list[Finding] = []

    def __repr__(self) -> str:
        return f"Function({printable(self.name)})"

    def start(self, info: RunInfo) -> None:
        """Do nothing."""

    def write(self, records: Sequence[StepRecord], findings: Sequence[Finding]) -> None:
        """Call the function for each step; if calls raise, re-raise the first error after the last step."""
        self._held += findings
        failure: Exception | None = None
        last = records[-1] if records else None
        for record in records:
            if record.step % self.every:
                continue
            arguments: tuple[Any, ...] = (record,)
            if self._takes_findings:
                # each step of a batch gets its own findings, and the last one also the rest
                due = [f for f in self._held if f.last_step <= record.step or record is last]
                self._held = [f for f in self._held if f not in due]
                arguments = (record, due)
            try:
                self.function(*arguments)
            except Exception as error:  # noqa: BLE001 the other steps of the batch must still be passed
                failure = failure or error
        if failure is not None:
            raise failure

    def fault(self, fault: Fault) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def _takes_findings(function: object) -> bool:
    if not callable(function):
        msg = f"Function: {function!r} is not callable; pass a function of (record) or (record, findings)"
        raise TypeError(msg)
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin without a signature
        return False
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    required = [p for p in positional if p.default is p.empty]
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(required) > 2 or keywords or not (positional or variadic):
        raise TypeError(f"Function: {function!r} must take (record) or (record, findings)")
    return len(required) == 2 or (len(positional) > 1 and positional[1].name == "findings")
