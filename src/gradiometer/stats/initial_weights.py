"""What is unusual about weights that have not been trained: spreads, norms and biases.

Contracts of a model and the rule of a run decide by the same functions. All of them look at `WeightValues`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from statistics import median
from typing import TYPE_CHECKING, Final

from gradiometer.stats.repeated_lines import Anomaly, last_layer, pattern

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gradiometer.stats.line_stats import WeightValues

SPREAD: Final = "look at how this layer is initialized: its fan-in, its gain, and whether it is scaled twice"
SCALE: Final = (
    "start norm layers at weight 1 (0 if they multiply by 1 + weight) and bias 0, and other biases at 0"
)

# Gains, rms * sqrt(fan), of the initializations in use: LeCun 1, Glorot 0.7 to 1.2, He 1.41, torch's default
# 0.58, orthogonal 1, tanh 1.67; N(0, 0.02) of transformers 0.08 to 2.6 for fans of 16 to 16,384, divided by
# sqrt(2 * layers) of residual branches, 0.02 at the least. He's fan-out mode gives 1.41 by the fan-out, and
# 2 to 7 by the fan-in, as of squeeze-and-excitation. So the fan is the lesser one for the upper limit. In 75
# models of transformers and timm these gains are 0.02 to 1.5; heads are apart: 0.0003 in BEiT, and 5.7 in T5
HIGH: Final = 4.0
# that of one weight against the median of all others
RATIO, ABOVE = 12.0, 1.7
LOW, LOW_RATIO = 2e-3, 1e-2
# against the nearest of other layers. Scales by depth, as of BEiT and DeepNet, differ by sqrt(2) at most
# between neighbours; rms of equal distributions by a few percent
SIBLINGS, MANY_SIBLINGS = 4.0, 2.0
# the mean against the standard deviation: 1.7 for U(0, 1), 1.3 for |N(0, 1)|
MEAN: Final = 0.5
# of gains of one convention
_CLOSE: Final = 0.06
_HEADS: Final = re.compile(
    r"head|classifier|logits|proj_out|qa_outputs|score|output_projection|(^|\.)fc\.|decoder\.weight$",
    re.IGNORECASE,
)
_WEIGHTS: Final = re.compile(r"(weight|gamma|scale|\bg)$")
# biases that are meant to be large: of gates, of steps of state-space models
_GATES: Final = re.compile(r"gate|forget|(^|[._])dt([._]|_)|sampling_offsets", re.IGNORECASE)


def families(values: Iterable[WeightValues]) -> list[list[WeightValues]]:
    """Return the weights of the same shape and role in several layers."""
    found: dict[tuple[str, tuple[int, int]], list[WeightValues]] = {}
    for each in values:
        found.setdefault((pattern(each.weight.name), each.weight.shape), []).append(each)
    return [family for family in found.values() if len(family) > 1]


# spreads


def unusual_spread(values: Sequence[WeightValues]) -> Iterator[Anomaly]:
    """Yield weights whose spread is not that of an initialization in use, or not that of other layers."""
    kinds = {"linear", "conv", "depthwise", "embedding", "raw"}
    matrices = [x for x in values if x.weight.kind in kinds and x.std and not x.n_nonfinite]
    matrices = [x for x in matrices if x.weight.is_trained and x.numel >= 16]
    told: set[str] = set()
    for anomaly in [
        *_against_siblings(matrices),
        *_against_fan_in(matrices),
        *_fan_out(matrices),
        *_shape_of(matrices),
    ]:
        if anomaly.name not in told:
            told.add(anomaly.name)
            yield anomaly


def _against_siblings(matrices: Sequence[WeightValues]) -> Iterator[Anomaly]:
    for family in families(matrices):
        if family[0].numel < 64:
            continue
        for each in family:
            others = [x.rms for x in family if x is not each]
            low, high = min(others), max(others)
            ratio = max(each.rms / high, low / each.rms)
            alike = len(others) >= 3 and high <= 1.5 * low and each.numel >= 256
            limit = MANY_SIBLINGS if alike else SIBLINGS
            # two layers that differ: the one whose gain is further from the usual
            if len(others) == 1 and _oddness(each, matrices) < _oddness(
                next(x for x in family if x is not each), matrices
            ):
                continue
            if ratio > limit:
                against = f"those of other layers start with {median(others):.3g}"
                text = f"{each.weight.name}: weights start with rms {each.rms:.3g}, {against}"
                yield Anomaly(each.weight.parameter, text, SPREAD, ratio, limit)


def _oddness(each: WeightValues, matrices: Sequence[WeightValues]) -> float:
    return abs(math.log(each.rms / median(x.rms for x in matrices)))


def _against_fan_in(matrices: Sequence[WeightValues]) -> Iterator[Anomaly]:
    used = [x for x in matrices if x.weight.kind in {"linear", "conv"}]
    last = last_layer(used)
    for each in matrices:
        weight = each.weight
        if weight.kind == "embedding":
            if each.rms > HIGH:
                text = f"{weight.name}: weights start with rms {each.rms:.3g}, usual are 0.02 to 1"
                yield Anomaly(weight.parameter, text, SPREAD, each.rms, HIGH)
            continue
        if each is last or _HEADS.search(weight.name) or weight.kind == "raw":
            continue
        others = [_gain(x) for x in used if x is not each]
        gain, usual = _gain(each), median(others) if len(others) >= 3 else 0.0
        if gain > HIGH or (usual and gain > max(RATIO * usual, ABOVE)):
            text = f"{weight.name}: weights start with rms {each.rms:.3g}, {gain:.3g} / sqrt(fan)"
            text += f"; usual are 0.02 to 1.5{f', and {usual:.2g} in other layers' if usual else ''}"
            yield Anomaly(weight.parameter, text, SPREAD, gain, HIGH)
        elif gain < max(LOW_RATIO * usual, LOW):
            text = f"{weight.name}: weights start with rms {each.rms:.3g}, {gain:.2g} / sqrt(fan)"
            text += f"{f', and other layers with {usual:.2g}' if usual else ''}: it is next to 0"
            yield Anomaly(weight.parameter, text, SPREAD, gain, max(LOW_RATIO * usual, LOW))


def _gain(each: WeightValues) -> float:
    return each.rms * math.sqrt(min(each.weight.shape))


def _fan_out(matrices: Sequence[WeightValues]) -> Iterator[Anomaly]:
    """Yield linear layers that are initialized by their fan-out, where others are by their fan-in.

    A square matrix shows the gain, but not which of both it is divided by; with one spread for all shapes,
    there is no gain.
    """
    linear = [x for x in matrices if x.weight.kind == "linear" and x.numel >= 256]
    linear = [x for x in linear if not _HEADS.search(x.weight.name)]
    if len(linear) < 3:
        return
    by_in = [x.rms * math.sqrt(x.weight.fan_in) for x in linear]
    square = [y for x, y in zip(linear, by_in, strict=True) if x.weight.fan_in == x.weight.fan_out]
    usual = median(square or by_in)
    agree = [x for x, gain in zip(linear, by_in, strict=True) if abs(gain / usual - 1) < _CLOSE]
    others = [
        x for x in linear if x not in agree and abs(x.rms * math.sqrt(x.weight.fan_out) / usual - 1) < _CLOSE
    ]
    # a convention that nearly all follow, and one that a single spread does not explain
    some = [x.rms for x in [*agree, *others]]
    if not agree or not others or len(some) < 0.8 * len(linear) or max(some) < 1.2 * min(some):
        return
    for each in others:
        text = f"{each.weight.name}: weights start with rms {each.rms:.3g}, {usual:.2g} / sqrt(fan-out); "
        text += f"others with {usual:.2g} / sqrt(fan-in)"
        yield Anomaly(each.weight.parameter, text, SPREAD, each.rms, usual / math.sqrt(each.weight.fan_in))


def _shape_of(matrices: Sequence[WeightValues]) -> Iterator[Anomaly]:
    """Means far from 0, and elements of one magnitude."""
    for each in matrices:
        weight = each.weight
        shift = abs(each.mean) / each.std
        if weight.kind == "raw" or each.numel < 64:
            continue
        if shift > MEAN and shift * math.sqrt(each.numel) > 8:
            text = f"{weight.name}: weights start with mean {each.mean:.3g} and deviation {each.std:.3g}"
            advice = "initialize it with mean 0, such as uniform in (-a, a), not in (0, a)"
            yield Anomaly(weight.parameter, text, advice, shift, MEAN)
        elif each.abs_max**2 * each.numel <= each.sumsq * (1 + 1e-9):
            text = f"{weight.name}: all elements are {each.abs_max:.3g} or -{each.abs_max:.3g}"
            yield Anomaly(weight.parameter, text, SPREAD, 1.0, 1.0)


# norms and biases


def odd_vectors(values: Sequence[WeightValues]) -> Iterator[Anomaly]:
    """Yield norm weights, norm biases and other biases that differ in kind from those of most layers."""
    vectors = [x for x in values if x.weight.kind in {"norm", "bias"} and not x.n_nonfinite]
    for family in families(vectors):
        # with two layers, it is the one that is not as usual
        for each in family:
            others = [x for x in family if x is not each]
            if each.weight.kind == "norm":
                yield from _odd_norm(each, others)
            else:
                yield from _odd_bias(each, others)


def _odd_norm(each: WeightValues, others: Sequence[WeightValues]) -> Iterator[Anomaly]:
    name = each.weight.name
    is_weight = bool(_WEIGHTS.search(name))
    known = {0.0, 1.0} if is_weight else {0.0}
    # the last norm of a residual branch may start at 0, in some layers
    if is_weight and not each.std and each.mean in known:
        return
    plain = Counter([x.mean for x in others if not x.std and x.mean in known])
    if plain.total() <= 0.6 * len(others):
        return
    usual = plain.most_common(1)[0][0]
    distance = math.hypot(each.mean - usual, each.std)
    limit = 0.15 if is_weight else 0.005
    if distance > limit:
        text = f"{name} starts with {_about(each)}, and those of other layers with {usual:.2g}"
        yield Anomaly(name, text, SCALE, distance, limit)


def _odd_bias(each: WeightValues, others: Sequence[WeightValues]) -> Iterator[Anomaly]:
    name = each.weight.name
    if _GATES.search(name):
        return
    zeros = sum(1 for x in others if not x.sumsq)
    if each.sumsq and zeros > len(others) * 0.6:
        text = f"{name} starts with {_about(each)}, and those of other layers with 0"
        yield Anomaly(name, text, SCALE, each.rms, 0.0)
    elif others and not zeros:
        usual = median(x.rms for x in others)
        if each.rms > 5 * usual and each.rms > 0.02:
            text = f"{name} starts with {_about(each)}, and those of other layers with rms {usual:.2g}"
            yield Anomaly(name, text, SCALE, each.rms, 5 * usual)


def _about(each: WeightValues) -> str:
    if not each.std:
        return f"{each.mean:.3g}"
    return f"mean {each.mean:.2g} and standard deviation {each.std:.2g}"


def is_large_bias(each: WeightValues, fan_in: int) -> bool:
    """Return whether a bias is far above the usual, 0 or uniform within 1 / sqrt(fan_in)."""
    return each.rms > 0.5 and each.rms > 5 / math.sqrt(max(fan_in, 1)) and not _GATES.search(each.weight.name)


def is_head(name: str) -> bool:
    """Return whether a parameter is one of the last layer, by its name."""
    return bool(_HEADS.search(name))
