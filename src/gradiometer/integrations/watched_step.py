"""Replace the ``step`` of an object while it is watched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class WatchedStep:
    """The ``step`` of a watched scaler or wrapper. A copy of it, also a pickled one, has its own step.

    Once undone, it calls the step as it was, in case somebody else has wrapped it again.
    """

    def __init__(self, owner: Any, call: Callable[..., Any]) -> None:
        self._call: Callable[..., Any] | None = call
        self._owner, self._step = owner, owner.step
        self._had_own = "step" in vars(owner)
        owner.step = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make the call that watches the step."""
        return self._step(*args, **kwargs) if self._call is None else self._call(self._step, *args, **kwargs)

    @property
    def __func__(self) -> Any:
        """The step: learning rate schedulers ask a method for its function, and bind it again."""
        return self

    def __get__(self, instance: Any, owner: Any) -> Any:
        """Return the step, which is bound already."""
        return self

    def __reduce__(self) -> Any:
        return getattr, (self._owner, "step")

    def unwrap(self) -> None:
        """Restore the step."""
        self._call = None
        if vars(self._owner).get("step") is self:
            if self._had_own:
                self._owner.step = self._step
            else:
                del self._owner.step
