"""Units whose activation is always 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from gradiometer.rules.base import MOST, LastingRule, Sight
from gradiometer.rules.finding import Severity
from gradiometer.rules.flow import ROUTED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradiometer.recorder import StepRecord
    from gradiometer.rules.finding import Finding

__all__ = ["DeadUnits"]

# values of each channel in a call: with fewer, half of a layer of ReLUs may be 0 by chance
LEAST: Final = 32

REVIVE: Final = (
    "a ReLU that is 0 for every input has no gradient, so it stays 0: lower the learning rate, look for a "
    "large negative bias, or use an activation such as GELU or LeakyReLU"
)


class DeadUnits(LastingRule):
    """A tapped layer with at least this share of channels that are always 0, for a while.

    It needs a Monitor with ``taps``, which measure the output of the activation function, not only that of
    the linear layer before it. A channel counts in a step if all its values are 0, of all samples and
    positions of a call. Activations without a gradient, such as inputs, and calls with fewer than 32 values
    of each channel do not count: a small batch leaves channels at 0 by chance. Taps whose names contain
    ``expert`` have severity info.

    Args:
        fraction: limit of the share of channels.
        patience: number of recorded steps in a row.
        most: maximum number of taps named in a step.
        severity: the severity of a finding.
    """

    name = "dead_units"
    sees_taps: ClassVar[bool] = True

    def __init__(
        self,
        fraction: float = 0.5,
        *,
        patience: int = 20,
        most: int = MOST,
        severity: Severity = Severity.WARNING,
    ) -> None:
        super().__init__(severity, most, patience, 0)
        if not 0.0 < fraction <= 1.0:
            msg = f"DeadUnits(fraction={fraction!r}): fraction must be above 0 and at most 1"
            raise ValueError(msg)
        self.fraction = fraction

    def look(self, record: StepRecord) -> Iterable[Finding]:
        """Return findings about taps with dead units for ``patience`` steps."""
        if "activations" not in record.roster.kinds:
            return []
        share, channels = (record.value(x, "activations") for x in ("zero_channel_fraction", "n_channels"))
        # NaN, which compares as false, if these columns are not known
        known = (record.value("numel", "activations") >= LEAST * channels) & (channels > 0)
        known &= record.measured("activation_grads")
        found = self.lasting(known & (share >= self.fraction), known, record.step)
        if found is None or not found.any():
            return []

        def describe(place: int) -> Sight:
            value = float(share[place])
            part = "all channels are" if value == 1.0 else f"{value:.1%} of its channels are"
            message = f"{part} 0 in every sample, since step {int(self.since[place])}"
            is_routed = ROUTED in record.roster.names[place]
            severity = min(self.severity, Severity.INFO) if is_routed else self.severity
            return Sight(value, self.fraction, message, REVIVE, severity)

        return self.findings(record, "activations", found, share, describe, self.since)
