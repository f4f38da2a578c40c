"""Repeats in weights: zero and equal rows, columns, heads and thirds of a fused QKV, and equal matrices.

Contracts of a model and the rule of a run decide by this. It looks at `WeightValues`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradiometer.stats.line_stats import Weight, WeightValues

SYMMETRIC: Final = (
    "initialize each line at random: neurons, heads and tokens with equal weights get equal gradients"
)
ZERO: Final = (
    "initialize it at random, unless it is meant to start at 0: what multiplies it gets no gradient then"
)
COPIED: Final = "initialize each layer after it was copied, unless they are meant to start equal"
# networks that start as copies of others on purpose
_COPIES: Final = re.compile(
    r"target|online|ema|teacher|student|moment|frozen|ref(erence)?(\.|_)|old|copy|average|swa", re.IGNORECASE
)
# numbered layers
_LAYERS: Final = re.compile(
    r"((layer|stage|block|group|level|unit|cell|feature|dense(layer|block)|resblock)s?_?|s|b|h)?\d+",
    re.IGNORECASE,
)
_TYPES: Final = re.compile(r"type|segment", re.IGNORECASE)


class Anomaly(NamedTuple):
    """Something unusual about a weight.

    Attributes:
        name: the parameter.
        text: one line.
        advice: what to do.
        value: what was measured, and
        threshold: what it is compared with.
        is_sure: whether it cannot be on purpose, as far as is known.
    """

    name: str
    text: str
    advice: str
    value: float = 1.0
    threshold: float = 0.0
    is_sure: bool = True


def pattern(name: str) -> str:
    """Return the name without the numbers of the layers that it is in; those of its modules stay.

    >>> pattern("blocks.3.net.2.weight"), pattern("layer1.0.conv2.bn.weight")
    ('blocks.#.net.2.weight', 'layer#.#.conv2.bn.weight')
    """
    parts = name.split(".")
    return ".".join(
        [*(re.sub(r"\d+", "#", x) if _LAYERS.fullmatch(x) else x for x in parts[:-2]), *parts[-2:]]
    )


def is_type(name: str) -> bool:
    """Return whether a table is one of types of tokens, by its name."""
    return bool(_TYPES.search(name))


def last_layer(matrices: Sequence[WeightValues]) -> WeightValues | None:
    """Return the last matrix of a layer, usually the head."""
    found = [x for x in matrices if x.weight.kind in {"linear", "conv"}]
    return found[-1] if found else None


def repeated(values: Sequence[WeightValues], *, is_pretrained: bool = False) -> Iterator[Anomaly]:
    """Yield what is equal or zero in weights, and should not be."""
    matrices = [x for x in values if x.weight.is_matrix and not x.n_nonfinite]
    last = last_layer(matrices)
    varied = {pattern(x.weight.name) for x in matrices if x.sumsq}
    for each in matrices:
        weight = each.weight
        is_sure = weight.is_trained and (not is_pretrained or (weight.kind == "linear" and each is not last))
        if each.sumsq == 0:
            yield from _all_zero(weight, others=pattern(weight.name) in varied and not is_pretrained)
        elif each.std == 0:
            text = f"all {each.numel:,} weights are equal, {each.mean:.3g}"
            yield Anomaly(weight.parameter, f"{weight.name}: {text}", SYMMETRIC, is_sure=weight.is_trained)
        else:
            for lines in ("rows", "columns"):
                found = _of_lines(each, lines)
                if found is not None:
                    yield found._replace(is_sure=found.is_sure and is_sure)
    if not is_pretrained:
        yield from _equal_matrices(matrices)


def _all_zero(weight: Weight, *, others: bool) -> Iterator[Anomaly]:
    name = weight.name
    if weight.is_position and "bias" not in name:
        # vision transformers have tables of their own, some of which start at 0 on purpose
        text = f"{name}: all positions start at 0"
        yield Anomaly(weight.parameter, text, SYMMETRIC, is_sure=weight.kind == "embedding")
    elif weight.kind == "embedding" and not _TYPES.search(name):
        yield Anomaly(weight.parameter, f"{name}: all vectors are 0, so that tokens look alike", SYMMETRIC)
    elif others and not weight.is_position:
        text = f"{name}: all weights are 0, and those of other layers are not"
        yield Anomaly(weight.parameter, text, ZERO)


def _of_lines(each: WeightValues, lines: str) -> Anomaly | None:
    """Return what the rows or the columns of a matrix have in common."""
    weight = each.weight
    is_rows = lines == "rows"
    zeros, zero, repeats, first, source, _ = each.rows if is_rows else each.columns
    count, length = weight.shape if is_rows else weight.shape[::-1]
    # lines of a few rounded numbers are equal by chance
    if length < 2 or count < 2:
        return None
    by_chance = length * weight.digits < 2 * math.log2(count) + 16
    word = _word(weight, is_rows=is_rows)
    padding = is_rows and weight.padding >= 0 and zeros > 0
    if padding and (zero == weight.padding or zeros > 1):
        zeros -= 1
        # the first one may be the padding
        zero = -1 if zero == weight.padding else zero
    # what is sparse on purpose has zeros elsewhere, too
    left = (weight.shape[0] - each.rows[0]) * (weight.shape[1] - each.columns[0])
    outside = each.share_of_zeros * each.numel - (each.numel - left)
    if zeros and outside < 0.3 * max(left, 1):
        block = _block(weight, zero, zeros, count, is_rows=is_rows) if zero >= 0 else ""
        some = f"{word} {zero} is" if zeros == 1 and zero >= 0 else f"{zeros} of {count} {word}s are"
        # one vector for nothing, such as padding that is not declared
        is_nothing = weight.kind == "embedding" and weight.padding < 0 and zeros == 1
        is_gate = bool(re.search(r"modulation|ada_?(ln|norm)", weight.name, re.IGNORECASE))
        text = f"{weight.name}: {block or some + ' 0'}"
        sure = not is_nothing and not is_gate
        return Anomaly(weight.parameter, text, ZERO, zeros / count, 0.0, sure)
    if not repeats or (by_chance and repeats < count / 4):
        return None
    offset = first - source
    # sub-pixel convolutions start with equal filters for each pixel
    is_shuffled = weight.kind == "conv" and offset == 1 and repeats in {count * 3 // 4, count * 8 // 9}
    block = _equal_block(weight, first, source, repeats, count, is_rows=is_rows)
    text = block or f"{word} {first} equals {word} {source}"
    if repeats > 1 and not block:
        text += f", and {repeats} of {count} {word}s equal an earlier one"
    text = f"{weight.name}: {text}"
    return Anomaly(weight.parameter, text, SYMMETRIC, repeats / count, 0.0, not is_shuffled)


def _word(weight: Weight, *, is_rows: bool) -> str:
    if weight.kind == "embedding" and is_rows:
        return "position" if weight.is_position else "vector"
    if weight.is_position and is_rows:
        return "position"
    return "row" if is_rows else "column"


def _parts(weight: Weight, count: int, *, is_rows: bool) -> list[tuple[str, int]]:
    """Return the parts that lines are in: thirds of a fused QKV, and heads, with their sizes."""
    if weight.kind != "linear":
        return []
    inside = weight.shape[1] if is_rows else weight.shape[0]
    found = []
    is_fused = count == 3 * inside and is_rows != weight.is_transposed
    if is_fused:
        found.append(("third", count // 3))
    if weight.heads > 1 and count % (weight.heads * (3 if is_fused else 1)) == 0:
        found.append(("head", count // weight.heads // (3 if is_fused else 1)))
    return found


def _block(weight: Weight, zero: int, zeros: int, count: int, *, is_rows: bool) -> str:
    for part, size in _parts(weight, count, is_rows=is_rows):
        if zeros >= size and zero % size == 0 and size > 1:
            where = f"{part} {zero // size}" if part == "head" else f"the {_third(zero // size)} third"
            return f"{where} of its {'rows' if is_rows else 'columns'} is 0"
    return ""


def _equal_block(weight: Weight, first: int, source: int, repeats: int, count: int, *, is_rows: bool) -> str:
    for part, size in _parts(weight, count, is_rows=is_rows):
        if size > 1 and repeats >= size and (first - source) % size == 0 and first % size == 0:
            a, b = source // size, first // size
            lines = "rows" if is_rows else "columns"
            if part == "head":
                return f"head {b} has the {lines} of head {a}"
            return f"the {_third(b)} third of its {lines} equals the {_third(a)} (queries, keys, values)"
    return ""


def _third(index: int) -> str:
    return ("first", "second", "third")[index] if index < 3 else f"{index}th"


def _equal_matrices(matrices: Sequence[WeightValues]) -> Iterator[Anomaly]:
    groups: dict[tuple[tuple[int, int], float, float, str], list[WeightValues]] = {}
    for x in matrices:
        if x.std:
            # sums in another order differ by their rounding
            key = (x.weight.shape, x.abs_max, round(math.log(x.sumsq), 9), f"{x.key / x.abs_max:.9e}")
            groups.setdefault(key, []).append(x)
    copies: dict[str, list[tuple[Weight, Weight]]] = {}
    per_layer = Counter(_layer(x.weight.parameter) for x in matrices)
    for group in groups.values():
        first = group[0].weight
        for other in (x.weight for x in group[1:]):
            # an output that is not tied to an embedding is another question
            is_tie = (first.kind == "embedding") != (other.kind == "embedding")
            # a copy that is not trained is a teacher, a target, or what is to be saved of a fine-tuned layer
            if (
                is_tie
                or first.is_trained != other.is_trained
                or _COPIES.search(first.name)
                or _COPIES.search(other.name)
            ):
                continue
            is_stack = first.parameter == other.parameter or "expert" in other.name
            if is_stack or first.parameter.split(".")[:-2] == other.parameter.split(".")[:-2]:
                yield Anomaly(other.parameter, f"{other.name} equals {first.name}", SYMMETRIC)
            elif _same_role(first.parameter, other.parameter):
                copies.setdefault(_layer(other.parameter), []).append((first, other))
            elif first.parameter.split(".")[-2:] != other.parameter.split(".")[-2:] and not {
                first.kind,
                other.kind,
            } & {"embedding"}:
                yield Anomaly(other.parameter, f"{other.name} equals {first.name}", COPIED)
    for layer, pairs in copies.items():
        first, other = pairs[0]
        # a copy of a whole layer, as `copy.deepcopy` makes it, may be meant so
        is_whole = len(pairs) >= per_layer[layer]
        if is_whole:
            text = f"{layer} starts as a copy of {_layer(first.parameter)}: {len(pairs)} equal matrices"
        else:
            text = f"{other.name} equals {first.name}, and other weights of these layers differ"
        is_sure = not (is_whole and other.may_be_copied)
        yield Anomaly(other.parameter, text, COPIED, float(len(pairs)), 0.0, is_sure)


def _layer(name: str) -> str:
    """Return the layer that a parameter is in: its name up to its last number, if a module follows."""
    parts = name.split(".")
    places = [i for i, part in enumerate(parts[:-2]) if part.isdigit()]
    return ".".join(parts[: places[-1] + 1]) if places else parts[0]


def _same_role(a: str, b: str) -> bool:
    return re.sub(r"\d+", "#", a) == re.sub(r"\d+", "#", b)
