"""A rule about attention that only looks back, though it may look ahead."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from gradiometer.rules.attention import LayerRule
from gradiometer.rules.base import Observation
from gradiometer.rules.finding import Severity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradiometer.recorder import StepRecord
    from gradiometer.rules.finding import Finding

UNMASK: Final = (
    "remove the causal mask, since an encoder and cross attention see all positions; if it is meant to be "
    "causal, pass is_causal=True to gm.tap_attention"
)


@dataclass(eq=False, repr=False)
class AttentionDirection(LayerRule):
    """A layer whose queries attend to no later key, though its mask allows that and it is not causal.

    It needs a Monitor with ``taps`` that have ``attention``. A softmax gives a key exactly 0 by a mask, or
    where it underflows, which does not happen to later keys alone. So there is a causal mask in an encoder
    or in cross attention, or `gradiometer.tap_attention` was not told of it. The severity is info unless the
    mask that the tap gets has a row for each query: that of padding alone, or none, may be all that a causal
    model passes.
    """

    name = "attention_direction"
    kinds: ClassVar[tuple[str, ...]] = ("attention",)
    _: KW_ONLY
    patience: int = 3

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Return findings about layers that have looked back only for ``patience`` steps."""
        open_calls, blind, masks = (
            record.value(x, "attention") for x in ("n_two_way", "n_one_way", "n_one_way_masks")
        )
        # the number of calls that look ahead, in any head
        seeing = self.over_layers(open_calls - blind, least=False)
        known = self.over_layers(open_calls, least=True) > 0
        found = self.lasting(known & (seeing == 0), known, record.step)
        if found is None:
            return []

        def describe(place: int) -> Observation:
            message = (
                f"in {self.heads_of(place)}, no query attends to a later position, since step "
                f"{int(self.since[place])}: "
            )
            is_meant = bool(masks[place] == open_calls[place])
            if is_meant:
                message += "a causal mask, though is_causal is False and the mask that was passed allows it"
            else:
                message += "a causal mask, though is_causal is False"
            severity = self.severity if is_meant else min(self.severity, Severity.INFO)
            return Observation(0.0, 0.0, message, UNMASK, severity)

        return self.findings(record, "attention", found, open_calls, describe, self.since)
