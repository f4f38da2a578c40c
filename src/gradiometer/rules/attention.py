"""Rules about attention weights and residual streams, which taps measure."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from gradiometer.rules.base import LastingRule, Observation
from gradiometer.rules.finding import Severity, times
from gradiometer.stats import HEAD

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from gradiometer.recorder import Rows, StepRecord
    from gradiometer.rules.finding import Finding

_KIND: Final = "attention"


@dataclass(eq=False, repr=False)
class AttentionMask(LastingRule):
    """A head that attends to keys that it may not attend to: its mask leaks.

    It needs a Monitor with ``taps`` that have ``attention``. A softmax of logits with a mask of -inf, or of
    -1e4 as in BERT, gives exactly 0 on masked keys, so any mass there is a fault of the model or of the mask
    that `gradiometer.tap_attention` gets.

    Args:
        limit: of the mean over queries of the weights on such keys.
    """

    name = "attention_mask"
    kinds: ClassVar[tuple[str, ...]] = (_KIND,)
    limit: float = 1e-5
    _: KW_ONLY
    patience: int = 3

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Return findings about heads whose mask has leaked for ``patience`` steps."""
        masked, future = (record.value(x, _KIND) for x in ("masked_mass", "future_mass"))
        worst = torch.maximum(masked, future)
        found = self.lasting(worst > self.limit, record.measured(_KIND), record.step)
        if found is None:
            return []

        def describe(place: int) -> Observation:
            value, since = float(worst[place]), f"since step {int(self.since[place])}"
            if future[place] >= masked[place]:
                message = f"{value:.2%} of its attention goes to keys after the query, {since}"
                advice = (
                    "the causal mask is missing, applied after the softmax, or to another dimension: exclude "
                    "keys after the query before the softmax; if they may be seen, pass is_causal=False to "
                    "gm.tap_attention"
                )
            else:
                message = f"{value:.2%} of its attention goes to keys that the mask excludes, {since}"
                advice = (
                    "the mask is missing, inverted, broadcast along another dimension, or its number is not "
                    "low enough: add -inf before the softmax; gm.tap_attention takes True as may attend"
                )
            return Observation(value, self.limit, message, advice, self.severity)

        return self.findings(record, _KIND, found, worst, describe, self.since)


# Of equal weights of i keys and a sink, i / (i + 1) is left. Its mean over i is below 0.9 only for fewer than
# 40 keys, and then its maximum is at most 0.975.
_MOSTLY, _WHOLE = 0.9, 1e-3
MASK_FIRST: Final = (
    "add -inf to the logits of keys that may not be attended before the softmax, instead of multiplying its "
    "result by 0"
)
# share of all weights: without dropout, an allowed weight is 0 only where it underflows
_DROPPED: Final = 0.01


@dataclass(eq=False, repr=False)
class AttentionSum(LastingRule):
    """A head whose weights do not sum to 1 for each query.

    It needs a Monitor with ``taps`` that have ``attention``. Dropout before the tap, which leaves zeros, and
    sums that are never above 1, as with an attention sink, have severity info. A mask that is applied after
    the softmax is no sink: in all these heads, the sum is far below 1 on average, and exactly 1 where a query
    may attend to every key.

    Args:
        fraction: limit of the share of queries.
    """

    name = "attention_sum"
    kinds: ClassVar[tuple[str, ...]] = (_KIND,)
    fraction: float = 0.01
    _: KW_ONLY
    patience: int = 3

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Return findings about heads whose weights have not summed to 1 for ``patience`` steps."""
        share, mean, top = (record.value(x, _KIND) for x in ("unnormalized_fraction", "row_sum", "max_sum"))
        zeros = record.value("n_zero", _KIND) / record.value("numel", _KIND).clamp(min=1.0)
        found = self.lasting(share > self.fraction, record.measured(_KIND), record.step)
        if found is None:
            return []
        is_masked_late = bool(((mean < _MOSTLY) & ((top - 1.0).abs() < _WHOLE))[found].all())

        def describe(place: int) -> Observation:
            since = f"since step {int(self.since[place])}"
            value, limit = float(share[place]), self.fraction
            sums = f"from those of other queries, up to {float(top[place]):.3g}"
            message = f"the attention weights of a query sum to {float(mean[place]):.3g} on average, not to 1"
            if abs(float(mean[place]) - 1.0) < 0.05:
                message = (
                    f"the attention weights of {value:.0%} of the queries do not sum to 1, but differ {sums}"
                )
            info = min(self.severity, Severity.INFO)
            if float(zeros[place]) > _DROPPED and abs(float(mean[place]) - 1.0) < 0.2:
                advice = "they were measured after dropout: pass gm.tap_attention the weights before it"
                return Observation(value, limit, f"{message}, {since}: dropout?", advice, info)
            if is_masked_late:
                text = f"{message}, but to exactly 1 where it may attend to all keys, {since}: the mask is "
                text += "applied after the softmax?"
                return Observation(value, limit, text, MASK_FIRST, self.severity)
            if float(mean[place]) >= 0.0 and float(top[place]) <= 1.05:
                advice = "pass all weights that the softmax returns, before dropout; a sink takes the rest"
                return Observation(value, limit, f"{message}, {since}", advice, info)
            advice = (
                "apply the softmax to the last dimension, the keys, after the mask and scale, and do not "
                "multiply its result"
            )
            text = f"{message}, {since}: no softmax, or over the wrong dimension?"
            return Observation(value, limit, text, advice, self.severity)

        return self.findings(record, _KIND, found, share, describe, self.since)


@dataclass(eq=False, repr=False)
class LayerRule(LastingRule):
    """A rule about all heads of a call together; a finding names its first head."""

    kinds: ClassVar[tuple[str, ...]] = (_KIND,)

    def prepare(self, rows: Rows) -> None:
        """Find the heads of each call."""
        super().prepare(rows)
        self.layers: dict[str, list[int]] = {}
        for place, name in enumerate(rows.names):
            call, _, number = name.rpartition(HEAD)
            if call and number.isdecimal():
                self.layers.setdefault(call, []).append(place)

    def over_layers(self, values: Tensor, *, least: bool) -> Tensor:
        """Return the least or largest value of each layer, in the row of its first head; NaN in others."""
        found = torch.full_like(values, math.nan)
        for places in self.layers.values():
            part = values[places]
            found[places[0]] = part.amin() if least else part.amax()
        return found

    def heads_of(self, place: int) -> str:
        """Return the text of the heads of the call with this first row."""
        count = next(len(places) for places in self.layers.values() if places[0] == place)
        return "this head" if count == 1 else f"all {count} heads of this layer"


@dataclass(eq=False, repr=False)
class AttentionEntropy(LayerRule):
    """A layer whose heads all attend to one key each, and did not before, or never leave equal weights.

    It needs a Monitor with ``taps`` that have ``attention``. Entropy is relative to that of equal weights.
    Entropy collapse precedes divergence (Zhai et al. 2023, arXiv:2303.06296). A healthy layer may become
    sharp, too, so the severity is info while the loss is below what it was before. Equal weights are
    healthy at first: they are info after ``uniform_patience`` steps in which another layer has left them.

    Args:
        limit: of the largest entropy of the layer's heads; 0.01 of that of 64 keys leaves 0.7% to others.
        before: the entropy that they all had in an earlier step.
        uniform: entropy of all heads from which weights are equal.
        uniform_patience: recorded steps.
    """

    name = "attention_entropy"
    kept: ClassVar[tuple[str, ...]] = (*LastingRule.kept, "highest", "level", "loss_before", "equal")
    limit: float = 0.01
    _: KW_ONLY
    before: float = 0.1
    uniform: float = 0.995
    uniform_patience: int = 300
    patience: int = 20

    def restart(self, size: int) -> None:
        """Start a new history of ``size`` tensors."""
        super().restart(size)
        self.highest, self.equal = torch.zeros(2, size, dtype=torch.float64, device="cpu").unbind()
        # a running mean of the loss, and its value when the entropy was last high
        self.level = torch.full((1,), math.nan, dtype=torch.float64, device="cpu")
        self.loss_before = torch.full((size,), math.nan, dtype=torch.float64, device="cpu")

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Return findings about layers that have collapsed for ``patience`` steps, or stay uniform."""
        entropy, known = record.value("entropy", _KIND), record.value("n_choices", _KIND) > 0
        top, least = self.over_layers(entropy, least=False), self.over_layers(entropy, least=True)
        loss = math.nan if record.loss is None else record.loss
        level = float(self.level)
        self.level = torch.full_like(self.level, loss if math.isnan(level) else 0.9 * level + 0.1 * loss)
        self.highest = torch.where(known & (least > self.highest), least, self.highest)
        is_high = known & (top >= self.before)
        self.loss_before = torch.where(is_high, float(self.level), self.loss_before)
        self.equal = torch.where(known, (self.equal + 1.0) * (least >= self.uniform), self.equal)
        uniform = known & (self.equal >= self.uniform_patience)
        # another layer has left it
        uniform &= bool((known & (least < 0.9)).any())
        collapsed = self.lasting(
            known & (top <= self.limit) & (self.highest >= self.before), known, record.step
        )
        found = uniform if collapsed is None else uniform | collapsed
        if not found.any():
            return []
        info = min(self.severity, Severity.INFO)

        def describe(place: int) -> Observation:
            if uniform[place]:
                count = int(self.equal[place])
                message = f"equal weights of all keys, in {self.heads_of(place)}, for {count} recorded steps"
                advice = "look at the scale of the logits, and whether the weights of q and k are trained"
                return Observation(float(least[place]), self.uniform, message, advice, info)
            is_worse = bool(self.level >= self.loss_before[place])
            message = (
                f"each query attends to one key, in {self.heads_of(place)}, since step "
                f"{int(self.since[place])}: the entropy of the attention weights is at most "
                f"{float(top[place]):.2%} of that of equal weights"
            )
            message += ", and the loss has not fallen since" if is_worse else ""
            advice = (
                "normalize queries and keys (QK-norm, sigma-reparam), warm up, or lower the learning rate"
            )
            severity = self.severity if is_worse else info
            return Observation(float(top[place]), self.limit, message, advice, severity)

        since = torch.where(uniform, float(record.step), self.since)
        return self.findings(record, _KIND, found, -top, describe, since)


@dataclass(eq=False, repr=False)
class LogitScale(LayerRule):
    """A layer whose logits are not q·k times the expected scale.

    It needs a Monitor with ``taps`` that have ``attention``. Without ``scale``, `gradiometer.tap_attention`
    expects 1 / sqrt(d). Other scales may be meant, so the severity is info, unless the logits are q·k itself.
    Models without a scale, as T5, pass ``scale=1.0``.

    Args:
        factor: between the logits and what is expected, from which on it is found.
    """

    name = "logit_scale"
    factor: float = 1.25
    _: KW_ONLY
    patience: int = 10

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Return findings about layers with another scale for ``patience`` steps."""
        ratio = torch.where(record.value("n_scales", _KIND) > 0, record.value("logit_scale", _KIND), math.nan)
        # NaN, which compares as false, unless the scale of all heads is known
        least, top = self.over_layers(ratio, least=True), self.over_layers(ratio, least=False)
        now = (least > self.factor) | (top < 1.0 / self.factor)
        found = self.lasting(now, ~least.isnan(), record.step)
        if found is None:
            return []
        scale = record.value("max_scale", _KIND)

        def describe(place: int) -> Observation:
            value, expected = float(ratio[place]), float(scale[place])
            actual = value * expected
            is_missing = abs(actual - 1.0) < 0.02 and abs(float(top[place] / least[place]) - 1.0) < 0.05
            message = (
                f"the attention logits of {self.heads_of(place)} are q·k times {actual:.3g}, "
                f"{times(value) if value > 1.0 else f'{value:.3g} times'} the expected {expected:.3g}"
            )
            message += ": the division by sqrt(d) is missing" if is_missing and expected < 1.0 else ""
            advice = (
                "divide q·k by sqrt(d) once, d being the size of a head; if another scale is meant, pass "
            )
            is_problem = is_missing and expected < 1.0
            severity = self.severity if is_problem else min(self.severity, Severity.INFO)
            return Observation(value, self.factor, message, advice + "scale= to gm.tap_attention", severity)

        return self.findings(record, _KIND, found, ratio.log().abs(), describe, self.since)


@dataclass(eq=False, repr=False)
class Residual(LastingRule):
    """A block whose output does not contain its input, that adds nothing to it, or far more than the others.

    It needs a Monitor with ``taps`` that have ``residual``. Let ``out = b in + rest``, with the rest
    orthogonal to the input. A block ``in + f(in)`` has b near 1, since f of random weights is about
    orthogonal to its input. The connection is missing if b is near 0 in all steps. Where a block adds more
    than twice its input, as to small embeddings, b says nothing.

    Args:
        share: limit of the magnitude of b.
        nothing: limit of the ratio ‖out - in‖ / ‖in‖ of a block that adds nothing, while another one adds ten
            times as much; info unless it is exactly 0. Branches that start with a small scale grow.
        outweighs: limit of this ratio over the median of the other blocks, if it has grown tenfold; info.
        patience: recorded steps; five times as many for a block that adds nothing.
    """

    name = "residual"
    kinds: ClassVar[tuple[str, ...]] = ("residual",)
    kept: ClassVar[tuple[str, ...]] = (*LastingRule.kept, "steps", "missing", "idle", "lowest")
    share: float = 0.3
    _: KW_ONLY
    nothing: float = 1e-3
    outweighs: float = 100.0
    patience: int = 20

    def restart(self, size: int) -> None:
        """Start a new history of ``size`` tensors."""
        super().restart(size)
        # the steps of each block, those without its input in the output, the last ones without a change
        self.steps, self.missing, self.idle = torch.zeros(3, size, dtype=torch.float64, device="cpu").unbind()
        self.lowest = torch.full((size,), torch.inf, dtype=torch.float64, device="cpu")

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Return findings about blocks of which one of the three is true."""
        known = record.measured("residual") & (record.value("sumsq_in", "residual") > 0)
        ratio, cosine = (record.value(x, "residual") for x in ("added_ratio", "cosine"))
        b = cosine * record.value("norm_out", "residual") / record.value("norm_in", "residual")
        self.steps = self.steps + known
        self.missing = self.missing + (known & (b.abs() < self.share) & (ratio <= 2.0))
        missing = known & (self.missing == self.steps) & (self.steps >= self.patience)
        self.idle = torch.where(known, (self.idle + 1.0) * (ratio < self.nothing), self.idle)
        largest = float(ratio[known].amax()) if known.any() else 0.0
        idle = known & (self.idle >= 5 * self.patience) & (largest >= 10.0 * self.nothing)
        self.lowest = torch.where(known, torch.minimum(self.lowest, ratio), self.lowest)
        usual = ratio[known].median() if known.any() else ratio.new_zeros(())
        now = known & (ratio > self.outweighs * usual) & (ratio > 10.0 * self.lowest) & (ratio > 1.0)
        heavy = self.lasting(now, known, record.step)
        found = missing | idle if heavy is None else missing | idle | heavy
        if not found.any():
            return []
        info = min(self.severity, Severity.INFO)

        def describe(place: int) -> Observation:
            value = float(ratio[place])
            if missing[place]:
                message = (
                    f"its output does not contain its input, in all {int(self.steps[place])} steps: the "
                    f"residual connection is missing (cosine of both {float(cosine[place]):.2f})"
                )
                advice = (
                    "return x + f(x); if this block has no residual connection, leave it out of residual="
                )
                return Observation(float(b[place]), self.share, message, advice, self.severity)
            if idle[place]:
                message = (
                    f"it adds {value:.2g} of its input's norm to its input, for {int(self.idle[place])} steps"
                )
                advice = (
                    "look for a branch that is multiplied by 0, frozen at 0, or left out of the optimizer"
                )
                return Observation(value, self.nothing, message, advice, info if value else self.severity)
            message = (
                f"what it adds has {value:.3g} times the norm of its input, {times(value / float(usual))} "
                f"that of the other blocks, since step {int(self.since[place])}"
            )
            advice = "normalize the block's input, scale its last layer down, or lower the learning rate"
            return Observation(value, self.outweighs * float(usual), message, advice, info)

        since = torch.where(missing, record.step - self.steps + 1.0, record.step - self.idle + 1.0)
        since = torch.where(missing | idle, since, self.since)
        return self.findings(record, "residual", found, ratio, describe, since.clamp(min=0.0))
