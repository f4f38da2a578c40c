"""The arguments of a monitor: which of them exclude one another, and which must be equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from gradiometer.columns import Thresholds
    from gradiometer.distributed import Ranks
    from gradiometer.recorder import Kind
    from gradiometer.rules import Rule
    from gradiometer.sinks import Sink
    from gradiometer.stats import Taps


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of `Monitor`, except the model."""

    run_dir: str | Path | bool | None
    every: int
    capacity: int
    weights: bool
    updates: bool
    rules: Iterable[Rule] | None
    sinks: Iterable[Sink | Callable[..., object]]
    thresholds: Thresholds
    skip_nonfinite: bool
    skip_above: float
    queue: int
    ranks: bool | Ranks
    redact: bool
    fingerprint: bool
    keep_weights: bool
    taps: Taps | None
    precision: int | None
    kinds: Sequence[Kind]

    def shared(self) -> dict[str, Any]:
        """Return the settings that must be equal on all ranks, as plain values."""
        return {
            "every": self.every,
            "weights": bool(self.weights),
            "updates": bool(self.updates),
            "skip_nonfinite": bool(self.skip_nonfinite),
            "skip_above": self.skip_above,
            "thresholds": repr(self.thresholds),
            "redact": bool(self.redact),
            "fingerprint": bool(self.fingerprint),
            "keep_weights": bool(self.keep_weights),
            "precision": self.precision,
            "taps": getattr(self.taps, "names", None),
            "kinds": [repr(kind) for kind in self.kinds],
        }

    def of_recorder(self) -> dict[str, Any]:
        """Return the arguments of the recorder, except the model and the ranks."""
        names = (
            "every weights updates capacity skip_nonfinite skip_above thresholds fingerprint taps precision"
        )
        return {name: getattr(self, name) for name in (*names.split(), "kinds")}

    def check(self, folder: str | Path | None) -> None:
        """Check the settings that no part of the monitor checks itself.

        Args:
            folder: the folder of the run record, if there is one.

        Raises:
            ValueError: for a value out of range, or for settings that exclude one another.
        """
        if not isinstance(self.queue, int) or self.queue < 1:
            msg = f"Monitor(queue={self.queue!r}): queue must be a positive integer"
            raise ValueError(msg)
        if self.keep_weights and self.redact:
            msg = "Monitor(redact=True, keep_weights=True): a copy of the weights is not redacted; pass one"
            raise ValueError(msg)
        if self.keep_weights and (folder is None or not self.skip_nonfinite):
            needs = "run_dir" if folder is None else "skip_nonfinite=True"
            msg = f"Monitor(keep_weights=True) needs {needs}: pass it, too"
            raise ValueError(msg)
