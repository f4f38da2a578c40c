"""Rules about taps: units that are always 0, attention logits that grow, routers that collapse."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from gradiometer.rules.base import LastingRule, Observation
from gradiometer.rules.finding import Severity, times
from gradiometer.rules.flow import ROUTED
from gradiometer.stats import EXPERT_LOAD, MAX_LOGIT, MAX_LOGIT_BOUND, ROUTER_ENTROPY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradiometer.recorder import Rows, StepRecord
    from gradiometer.rules.finding import Finding


# values of each channel in a call: with fewer, half of a layer of ReLUs may be 0 by chance
LEAST: Final = 32

REVIVE: Final = (
    "if this is a ReLU, it has no gradient where it is 0 for every input, and may stay 0: lower the learning "
    "rate, look for a large negative bias, or use an activation such as GELU or LeakyReLU"
)


@dataclass(eq=False, repr=False)
class DeadUnits(LastingRule):
    """A tapped layer with at least this share of channels that are always 0, for a while.

    It needs a Monitor with ``taps``, which measure the output of the activation function, not only that of
    the linear layer before it. A channel counts in a step if all its values are 0, of all samples and
    positions of a call. Activations without a gradient, such as inputs, and calls with fewer than 32 values
    of each channel do not count: a small batch leaves channels at 0 by chance. Taps whose names contain
    ``expert`` have severity info.

    Args:
        fraction: limit of the share of channels.
    """

    name = "dead_units"
    kinds: ClassVar[tuple[str, ...]] = ("activations",)
    fraction: float = 0.5
    _: KW_ONLY
    patience: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.fraction <= 1.0:
            raise ValueError(f"DeadUnits(fraction={self.fraction!r}): fraction must be above 0 and at most 1")

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Return findings about taps with dead units for ``patience`` steps."""
        share, channels = (record.value(x, "activations") for x in ("zero_channel_fraction", "n_channels"))
        # NaN, which compares as false, if these columns are not known
        known = (record.value("numel", "activations") >= LEAST * channels) & (channels > 0)
        known &= record.measured("activation_grads")
        found = self.lasting(known & (share >= self.fraction), known, record.step)
        if found is None:
            return []

        def describe(place: int) -> Observation:
            value = float(share[place])
            part = "all channels are" if value == 1.0 else f"{value:.1%} of its channels are"
            message = f"{part} 0 in every sample, since step {int(self.since[place])}"
            is_routed = ROUTED in record.names("activations")[place]
            severity = min(self.severity, Severity.INFO) if is_routed else self.severity
            return Observation(value, self.fraction, message, REVIVE, severity)

        return self.findings(record, "activations", found, share, describe, self.since)


# A bound is looser than the logits it bounds. The largest cosine of a million pairs of random vectors of 128
# elements is about sqrt(2 ln 1e6 / 128), which is about 1/2; the longest query and key may not meet, either.
LOOSENESS: Final = 4.0
# of the limit; Kimi K2 (arXiv:2507.20534) keeps logits below 100
NOTABLE: Final = 0.1

CAP: Final = (
    "the softmax of such logits can be one-hot, so that its gradient vanishes: normalize queries and keys "
    "(QK-norm), cap the logits, clip the weights of q and k (QK-Clip), or lower the learning rate"
)


@dataclass(eq=False, repr=False)
class GrowingLogits(LastingRule):
    """An attention logit that is too large for the softmax, and has grown, for a while.

    It needs a Monitor with ``taps`` that list the row ``.max_logit`` or ``.max_logit_bound`` of
    `gradiometer.tap_attention`. For a bound, the limits are four times as large. From a tenth of the limit on
    the severity is info.

    The default limit is from Kimi K2 (arXiv:2507.20534), where logits beyond 1,000 precede instabilities; a
    model with logits beyond 10,000 diverges (Wortsman et al., arXiv:2309.14322).

    Args:
        limit: of the largest logit.
        factor: the logit must also be this many times its lowest value so far.
    """

    name = "growing_logits"
    kept: ClassVar[tuple[str, ...]] = (*LastingRule.kept, "lowest")
    kinds: ClassVar[tuple[str, ...]] = ("activations",)
    limit: float = 1000.0
    _: KW_ONLY
    factor: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.limit > 0.0 or not self.factor >= 1.0:
            msg = f"GrowingLogits({self.limit!r}, factor={self.factor!r}): "
            raise ValueError(msg + "limit must be above 0, factor at least 1")

    def restart(self, size: int) -> None:
        """Start a new history of ``size`` tensors."""
        super().restart(size)
        self.lowest = torch.full((size,), torch.inf, dtype=torch.float64, device="cpu")

    def prepare(self, rows: Rows) -> None:
        """Find the taps of logits and of bounds; other rows have an infinite limit."""
        super().prepare(rows)
        ends = {MAX_LOGIT: self.limit, MAX_LOGIT_BOUND: LOOSENESS * self.limit}
        limits = [next((ends[end] for end in ends if name.endswith(end)), torch.inf) for name in rows.names]
        self.limits = torch.tensor(limits, dtype=torch.float64, device="cpu")

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Return findings about logits that have been too large for ``patience`` steps."""
        top = record.value("abs_max", "activations")
        known = record.measured("activations") & (record.value("n_nonfinite", "activations") == 0)
        self.lowest = torch.where(known, torch.minimum(self.lowest, top), self.lowest)
        now = known & (top >= NOTABLE * self.limits) & (top >= self.factor * self.lowest)
        found = self.lasting(now, known, record.step)
        if found is None:
            return []

        def describe(place: int) -> Observation:
            value, limit, lowest = (float(x[place]) for x in (top, self.limits, self.lowest))
            is_bound = record.names("activations")[place].endswith(MAX_LOGIT_BOUND)
            reach = "attention logits may reach" if is_bound else "attention logits reach"
            growth = f", {times(value / lowest)} the lowest value before" if lowest else ""
            message = f"{reach} {value:,.0f}{growth}, since step {int(self.since[place])}"
            if value < limit:
                return Observation(value, NOTABLE * limit, message, CAP, min(self.severity, Severity.INFO))
            return Observation(value, limit, message, CAP, self.severity)

        return self.findings(record, "activations", found, top / self.limits, describe, self.since)


# tokens of a call for each expert, and each of its tokens: with fewer, the load is uneven by chance
TOKENS: Final = 4

BALANCE: Final = (
    "experts without tokens learn nothing: add or strengthen a load-balancing loss or a bias for each "
    "expert, a z-loss of the router's logits or noise, or lower the router's learning rate"
)


@dataclass(eq=False, repr=False)
class CollapsingRouter(LastingRule):
    """A router that sends nearly all tokens to the same experts, for a while.

    It needs a Monitor with ``taps`` that list the two rows of `gradiometer.tap_router`. If expert e gets the
    share s_e of the tokens, and each token k of E experts, the load is that of ``n = k² / Σ s_e²`` experts
    with equal shares: E if it is balanced, k if all tokens go to the same. The rule compares
    ``(n - k) / (E - k)``, the share of the other experts that are in use. Certain but balanced routers, with
    an entropy of 0, are healthy. Calls with fewer than ``4 E / k`` tokens do not count: their load is uneven
    by chance.

    Args:
        limit: of the share of the other experts that are in use.
    """

    name = "collapsing_router"
    kinds: ClassVar[tuple[str, ...]] = ("activations",)
    limit: float = 0.1
    _: KW_ONLY
    patience: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.limit < 1.0:
            raise ValueError(f"CollapsingRouter({self.limit!r}): limit must be at least 0 and below 1")

    def prepare(self, rows: Rows) -> None:
        """Find the two rows of each router."""
        super().prepare(rows)
        ends = {name: name.removesuffix(EXPERT_LOAD) + ROUTER_ENTROPY for name in rows.names}
        self.pairs: list[tuple[int, int]] = [
            (place, rows.index[ends[name]])
            for name, place in rows.index.items()
            if name.endswith(EXPERT_LOAD) and ends[name] in rows.index
        ]

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Return findings about routers that have collapsed for ``patience`` steps."""
        if not self.pairs:
            return []
        of = {x: record.value(x, "activations") for x in ("numel", "n_calls", "sum", "sumsq", "abs_max")}
        calls, tokens = of["n_calls"].clamp(min=1.0), torch.zeros_like(of["numel"])
        for place, entropy in self.pairs:
            tokens[place] = of["numel"][entropy] / calls[entropy]
        experts, chosen = of["numel"] / calls, of["sum"] / calls
        used = chosen.square() * calls / of["sumsq"].clamp(min=torch.finfo(torch.float64).tiny)
        share = (used - chosen) / (experts - chosen).clamp(min=1e-6)
        # a row without a pair has no tokens
        known = (tokens * chosen >= TOKENS * experts) & (experts > 1.0) & (chosen < experts)
        known &= record.value("n_nonfinite", "activations") == 0
        found = self.lasting(known & (share <= self.limit), known, record.step)
        if found is None:
            return []

        def describe(place: int) -> Observation:
            idle = f"{record.value('zero_fraction', 'activations')[place]:.0%} of the experts get none"
            message = (
                f"{of['abs_max'][place]:.1%} of the tokens go to one expert, {idle}; the load is that of "
                f"{used[place]:.1f} of {experts[place]:.0f} experts, since step {int(self.since[place])}"
            )
            return Observation(float(share[place]), self.limit, message, BALANCE, self.severity)

        return self.findings(record, "activations", found, -share, describe, self.since)
