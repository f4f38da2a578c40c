"""What a run says about formats: the histograms of one step, and the precision report of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradiometer.stats import ExponentStats, PrecisionReport

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradiometer.recorder import Kind

__all__ = ["StepPrecision"]


class StepPrecision(PrecisionReport):
    """Which tensors of a recorded step fit which format: a `gradiometer.PrecisionReport` of one step.

    Attributes:
        step: its number.
        kind: ``"grads"`` or ``"weights"``.
        stats: the histograms, `gradiometer.ExponentStats` on the CPU, for other formats and scales.
    """

    def __init__(
        self, step: int, kind: Kind, stats: ExponentStats, formats: Iterable[Any] | None = None
    ) -> None:
        super().__init__(stats.names, stats.columns, formats)
        self.step, self.kind, self.stats = step, kind, stats

    def _headline(self) -> str:
        return f"{self.kind} of step {self.step}: {super()._headline()}"
