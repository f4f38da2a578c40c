"""Weights that start wrong, and weights and modes that are not what they were meant to be."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from gradiometer.rules.base import BaseRule, WholeRule, mask
from gradiometer.rules.finding import Finding, Severity, modules_text, times
from gradiometer.rules.history import is_names
from gradiometer.rules.known import optimizers_of
from gradiometer.stats.initial_weights import odd_vectors, unusual_spread
from gradiometer.stats.repeated_lines import repeated

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from gradiometer.recorder import StepRecord


INITIALIZE: Final = (
    "look at how this layer is initialized or loaded, and whether it is initialized twice or scaled"
)
SYMMETRIC: Final = (
    "unless it only scales, initialize it at random: neurons with equal weights get equal gradients and stay "
    "equal"
)
ZERO: Final = (
    "if it is not meant to start at 0, initialize it at random; if it is, the layer that follows must not "
    "start at 0 too"
)
TIE: Final = (
    "if they are meant to be one weight, assign the same Parameter to both modules (head.weight = "
    "embedding.weight), after the model has been moved, loaded or wrapped; equal values are not enough"
)
KEEP_TIE: Final = (
    "train the copies as one parameter (in PEFT, ensure_weight_tying=True), or leave one of the modules out "
    "of modules_to_save, and save the model without tied weights"
)
TRAIN: Final = "call model.train() before the training steps, and again after each evaluation"
SHARE: Final = (
    "the p of torch.nn.Dropout is the share that is dropped, not the one that is kept: pass 1 - p if that "
    "was meant; 0.1 to 0.5 is usual"
)

# probabilities of Dropout
HIGH, VERY_HIGH = 0.8, 0.9
# findings in one step
_MOST: Final = 5
# a weight with less than this many times the usual scale is not too large
LARGE: Final = 5.0
# names of tensors that scale elements, which may start with equal values
_SCALES: Final = re.compile(r"norm|scale|gamma|gain", re.IGNORECASE)
# names of matrices that are not multiplied with activations, and so have no usual scale
_LOOKED_UP: Final = re.compile(r"emb|wte|wpe|token|pos", re.IGNORECASE)


@dataclass(eq=False, repr=False)
class Initialization(WholeRule):
    """Weights with an unusual scale in the first recorded step; needs a Monitor with ``weights=True``.

    It looks at tensors of at least two dimensions. The usual scale of a weight is ``1 / sqrt(fan_in)`` (LeCun
    et al. 1998, "Efficient BackProp"; Glorot and Bengio 2010; He et al. 2015, arXiv:1502.01852). A weight is
    too large if its rms is more than ``factor`` times the median of corresponding tensors in other layers, or
    of all matrices, after division by that scale. A weight whose elements are all equal is reported too,
    unless its name is that of a scale. A weight of 0 has severity info, since some layers start at 0; it
    becomes a warning if it is still 0 after ``patience`` recorded steps, and its gradient is 0 too.

    Without ``weights=True`` as well, all weights are read once when the monitor is created, by rows and
    columns: zero and equal rows, columns, heads and matrices are reported, and so are spreads, norm weights
    and biases that differ from those of other layers, as by the contracts of `gradiometer.check_model`. Of a
    model that is pretrained or was resumed, only rows, columns and heads. Sharded weights are left out.

    Args:
        factor: the limit of the ratio.
        patience: number of recorded steps.
    """

    name = "initialization"
    kinds: ClassVar[tuple[str, ...]] = ("weights",)
    kept = (*WholeRule.kept, "count", "zero", "is_examined", "told")
    _: KW_ONLY
    factor: float = 30.0
    patience: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        # whether the weights at the start were looked at, in this run or before it was resumed
        self.is_examined, self._has_examined = False, False
        self.told: list[str] = []

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Look at the weights as they were at the start, once they are known; then at those of the step."""
        return [*self._at_start(record), *super().check(record)]

    def _at_start(self, record: StepRecord) -> list[Finding]:
        if self._has_examined or record.model is None or not record.model.initial.weights:
            return []
        initial = record.model.initial
        is_old = initial.is_pretrained or self.is_examined
        self.is_examined = self._has_examined = True
        found = [*repeated(initial.weights, is_pretrained=is_old)]
        if not is_old:
            found += [*unusual_spread(initial.weights), *odd_vectors(initial.weights)]
        findings: list[Finding] = []
        for each in found:
            if each.is_sure and each.name not in self.told and len(findings) < _MOST:
                self.told.append(each.name)
                known = each.name if each.name in record.catalog.parameters.index else None
                value, limit = each.value, each.threshold
                finding = self.finding(
                    record, record.step, known, value, limit, each.text, each.advice, kind=None
                )
                findings.append(finding)
        return findings

    def restart(self, size: int) -> None:
        """Start a new history of ``size`` tensors."""
        super().restart(size)
        self.count = 0
        self.zero = torch.zeros(size, dtype=torch.bool, device="cpu")

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Look at the weights of the first step, and at those of 0 later again."""
        # later steps need the gradients, too
        if self.count > self.patience or (self.count and not record.has("grads")):
            return []
        self.count += 1
        if self.count == 1:
            return self._first(record)
        if self.count <= self.patience or not self.zero.any():
            return []
        # a gradient that is not 0 would move them, if the optimizer held them
        stuck = record.measured() & (record.value("abs_max") == 0) & (record.value("n_nonfinite") == 0)
        still = self.zero & (record.value("sumsq", "weights") == 0) & stuck
        places = still.nonzero().flatten().tolist()
        if not places:
            return []
        begun, names = record.step - self.patience, record.names("weights")
        text = f"{modules_text(names, places)}: weights are still 0, as at the start, and so are their "
        text += "gradients"
        return [self.finding(record, begun, names[places[0]], 0.0, 0.0, text, ZERO, kind="weights")]

    def _first(self, record: StepRecord) -> list[Finding]:
        rows = record.catalog.rows("weights")
        numel, squares, total = [record.value(name, "weights") for name in ("numel", "sumsq", "sum")]
        matrix = mask([len(shape) >= 2 for shape in rows.shapes]) & (numel > 1)
        self.zero = matrix & (squares == 0)
        found = []
        for place in (matrix & ~self.zero).nonzero().flatten().tolist():
            # scales of channels or heads are no neurons
            if sum(size > 1 for size in rows.shapes[place]) < 2 or _SCALES.search(rows.names[place]):
                continue
            if total[place] ** 2 >= squares[place] * numel[place] * (1 - 1e-12):
                size = int(numel[place])
                text = f"all {size:,} weights are equal, {float(total[place] / size):.3g}"
                found.append(self._about(record, place, 1.0, 1.0, text, SYMMETRIC))
        found += self._large(record, matrix & ~self.zero, (squares / numel.clamp(min=1.0)).sqrt())
        found = [finding for finding in found if finding.tensor not in self.told]
        zeros = self.zero.nonzero().flatten().tolist()
        # in an adapter or a branch that starts at 0 this is on purpose
        if zeros and len(zeros) <= max(2, int(matrix.sum()) // 4):
            text = f"{modules_text(rows.names, zeros)}: weights start at 0"
            severity, name = min(self.severity, Severity.INFO), rows.names[zeros[0]]
            found.append(self.finding(record, record.step, name, 0.0, 0.0, text, ZERO, severity, "weights"))
        return found

    def _large(self, record: StepRecord, which: Tensor, rms: Tensor) -> list[Finding]:
        rows = record.catalog.rows("weights")
        # for convolutions, too, dimension 0 is that of the output
        fan_in = [math.prod(shape[1:]) if shape else 1 for shape in rows.shapes]
        gain = rms * torch.tensor(fan_in, dtype=torch.float64, device="cpu").sqrt()
        places = which.nonzero().flatten().tolist()
        patterns = [re.sub(r"\d+", "#", rows.names[place]) + str(rows.shapes[place]) for place in places]
        families: dict[str, list[int]] = {}
        for place, pattern in zip(places, patterns, strict=True):
            families.setdefault(pattern, []).append(place)
        found = []
        for place, pattern in zip(places, patterns, strict=True):
            like = [other for other in families[pattern] if other != place]
            if like and gain[place] > LARGE:
                ratio = float(rms[place] / rms[like].median())
                against = "that of the corresponding weights of other layers"
            elif len(places) >= 3 and not _LOOKED_UP.search(rows.names[place]):
                others = [other for other in places if other != place]
                # an initialization for one layer alone, such as N(0, 1), is not a mistake yet
                ratio = min(float(gain[place] / gain[others].median()), float(gain[place]))
                against = "the usual 1 / sqrt(fan_in), which the others are near"
            else:
                continue
            if ratio > self.factor:
                text = f"weights start with rms {float(rms[place]):.3g}, {times(ratio)} {against}"
                found.append(self._about(record, place, ratio, self.factor, text, INITIALIZE))
        found.sort(key=lambda finding: -finding.value)
        return found[:5]

    def _about(
        self, record: StepRecord, place: int, value: float, limit: float, text: str, advice: str
    ) -> Finding:
        name = record.names("weights")[place]
        message = f"{name}: {text}"
        return self.finding(record, record.step, name, value, limit, message, advice, kind="weights")


@dataclass(eq=False, repr=False)
class Untied(WholeRule):
    """Two weights that were tied, or started as copies of one another, and are two weights now.

    A parameter that belonged to two modules when the monitor was created, and to one of them now, is
    reported at once. With ``weights=True``, so are two matrices of one shape whose values are equal
    in the first recorded step, and no longer later, while both get gradients: an assignment of values does
    not tie weights. Of three and more equal matrices, two must get gradients. Two trained copies of a tied
    weight, one in place of each of its modules, are reported as well; and, with severity info, one trained
    copy of a tied weight that is frozen. Layers that are copies by design are left out: those whose names
    differ only in numbers, or end alike, as in a teacher and a student; and, with `gradiometer.watch` and
    trainers, those of which no optimizer holds one, such as a target network.
    """

    name = "untied"
    kept = (*WholeRule.kept, "count", "pairs", "origins", "reported")

    def restart(self, size: int) -> None:
        """Start a new history."""
        super().restart(size)
        self.count = 0
        # names, first and second of each pair in turn
        self.pairs: list[str] = []
        # of each pair, the names of the tied weight that both are copies of
        self.origins: list[str] = []
        self.reported: list[str] = []

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Compare the weights that were equal in the first step."""
        found = []
        for first, second in () if record.model is None else record.model.untied:
            if second not in self.reported:
                self.reported.append(second)
                text = f"{first} and {second} were one parameter, and are two now: they are tied no more"
                found.append(self._about(record, second, text))
        if not record.has("weights"):
            return found
        self.count += 1
        columns, index = record.columns("weights"), record.catalog.parameters.index
        learns = record.measured()
        optimizers = optimizers_of(record)
        if optimizers is not None:
            learns = learns & (optimizers.held | optimizers.keeps_small_updates)
        groups = self._equal(record, columns) if self.count == 1 else []
        for group in groups:
            trained = [name for name in group if learns[index[name]]]
            origin = _origin(record, group, trained)
            if origin and len(trained) == 1:
                text = (
                    f"{trained[0]} is a copy of {' and '.join(origin)}, one weight that is frozen: they are "
                )
                text += "not tied any more, and a checkpoint of a tied model keeps only one of them"
                found.append(self._about(record, trained[0], text, KEEP_TIE, Severity.INFO))
            pair = group if len(group) == 2 else trained
            if len(pair) == 2 and (origin or _differ(*pair)):
                self.pairs += pair
                self.origins.append(" and ".join(origin))
        for first, second in list(zip(self.pairs[::2], self.pairs[1::2], strict=True)):
            # a target network, an average of other weights and a frozen copy are meant to part
            if not (learns[index[first]] and learns[index[second]]):
                continue
            if bool((columns[index[first]] != columns[index[second]]).any()):
                place = self.pairs.index(first)
                del self.pairs[place : place + 2]
                text = f"{first} and {second} had equal values at the start, and differ now: "
                text += "they are copies, not tied weights"
                tied = self.origins.pop(place // 2)
                if tied:
                    text += f", though both are copies of one weight, {tied}"
                found.append(self._about(record, second, text, KEEP_TIE if tied else TIE))
        return found

    def _equal(self, record: StepRecord, columns: Tensor) -> list[list[str]]:
        rows = record.catalog.rows("weights")
        numel, squares, total = [record.value(name, "weights") for name in ("numel", "sumsq", "sum")]
        # equal sums of unequal elements: a matrix of one value, such as 0, is not a copy
        varied = (squares * numel > total**2).tolist()
        groups: dict[tuple[Any, ...], list[int]] = {}
        for place, row in enumerate(columns.tolist()):
            if len(rows.shapes[place]) >= 2 and varied[place]:
                groups.setdefault((rows.shapes[place], *row), []).append(place)
        return [[rows.names[place] for place in group] for group in groups.values() if len(group) > 1]

    def _about(
        self, record: StepRecord, name: str, text: str, advice: str = TIE, severity: Severity | None = None
    ) -> Finding:
        known = name if name in record.catalog.parameters.index else None
        severity = self.severity if severity is None else min(self.severity, severity)
        return self.finding(record, record.step, known, 1.0, 0.0, text, advice, severity, "weights")

    def check_value(self, key: str, value: Any) -> None:
        """Raise an error unless the value can replace the attribute ``key``."""
        super().check_value(key, value)
        if key == "pairs" and (not is_names(value) or len(value) % 2):
            raise ValueError("expected a list of pairs of names")


def _origin(record: StepRecord, group: Sequence[str], trained: Sequence[str]) -> list[str]:
    """Return the names of a tied weight that is not trained, if these are copies in place of its modules."""
    ties: dict[str, list[str]] = {}
    for first, second in () if record.model is None else record.model.tied:
        ties.setdefault(first, [first]).append(second)
    for name in group:
        names = ties.get(name, [])
        if names and name not in trained and not any(copy in ties for copy in trained):
            places = {max(names, key=partial(_common, copy)) for copy in trained}
            if len(places) == len(trained) and all(
                max(map(partial(_common, copy), names)) for copy in trained
            ):
                return names
    return []


def _common(first: str, second: str) -> int:
    """Return the number of modules that two tensors have in common, from the outermost on."""
    pairs = zip(first.split(".")[:-1], second.split(".")[:-1], strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _differ(first: str, second: str) -> bool:
    """Return whether two names are not those of layers that are copies by design."""
    if re.sub(r"\d+", "#", first) == re.sub(r"\d+", "#", second):
        return False
    return first.split(".")[-2:] != second.split(".")[-2:] or "." not in first


@dataclass(eq=False, repr=False)
class EvalMode(BaseRule):
    """A model that is trained in evaluation mode, though it has BatchNorm or Dropout layers."""

    name = "eval_mode"
    kept = ("streak", "since")
    _: KW_ONLY
    patience: int = 10
    streak: int = field(default=0, init=False)
    since: int = field(default=0, init=False)

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Return a finding if the model has been in evaluation mode for ``patience`` steps."""
        if record.model is None or not record.recorded:
            return []
        layers = record.model.evaluating
        if not layers:
            self.streak = 0
            return []
        self.streak += 1
        if self.streak == 1:
            self.since = record.step
        if self.streak < self.patience:
            return []
        text = f"the model is trained in evaluation mode since step {self.since}: {layers} behave as in "
        text += "inference"
        patience = float(self.patience)
        return [self.finding(record, self.since, None, patience, 0.0, text, TRAIN, self.severity, None)]


@dataclass(eq=False, repr=False)
class HighDropout(BaseRule):
    """Dropout layers that drop at least 90 % of their input in training; info from 80 % on.

    The standard deviation of what dropout adds is sqrt(p / (1 - p)) times the magnitude of its input, 3 times
    for 0.9. Some libraries have taken the share that is kept.
    """

    name = "high_dropout"
    kept = ("since",)
    since: int = field(default=-1, init=False)

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Return a finding about the layers with the highest probability."""
        layers = () if record.model is None else record.model.dropouts
        if not layers:
            return []
        self.since = record.step if self.since < 0 else self.since
        name, p = max(layers, key=lambda layer: layer[1])
        text = f"{name} drops {p:.0%} of its input in training"
        text += f"; {len(layers)} Dropout layers drop {HIGH:.0%} or more" * (len(layers) > 1)
        severity = self.severity if p >= VERY_HIGH else min(self.severity, Severity.INFO)
        return [self.finding(record, self.since, name, p, HIGH, text, SHARE, severity, None)]
