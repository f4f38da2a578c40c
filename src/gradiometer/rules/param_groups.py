"""Param groups of one optimizer whose options do not fit each other."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from gradiometer.rules.base import CHANGES, BaseRule, recorded_kind
from gradiometer.rules.finding import Finding, Severity, modules_text, times
from gradiometer.rules.known import optimizers_of
from gradiometer.rules.optimizer import RATE_OF_GROUP

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gradiometer.recorder import OptimizerState, StepRecord

# Ratios of neighbouring rates, in order of size, that are in use: 16 in LoRA+ (Hayou et al. 2024,
# arXiv:2402.12354); the ratio of widths in muP, 64 from 128 to 8,192 (Yang et al. 2022, arXiv:2203.03466);
# 2.6 per layer in ULMFiT (Howard and Ruder 2018, arXiv:1801.06146) and 1.5 in BEiT (Bao et al. 2022,
# arXiv:2106.08254), which add up to 50,000 over 26 layers, but not from one group to the next; about 300
# between the groups of 3D Gaussian splatting (Kerbl et al. 2023, arXiv:2308.04079). 10 times more is left.
FAR: Final = 1e3
VERY_FAR: Final = 1e4
# a rate that stays, while a scheduler divides that of others by this
FOLLOWS: Final = 2.0
# the same without knowing of a scheduler
LEFT_BEHIND: Final = 10.0

COMPARE: Final = "compare the learning rates in optimizer.param_groups with what you meant them to be"
LATE: Final = (
    "create the scheduler after all calls of add_param_group(), or set the learning rate of this group "
    "yourself"
)
SCHEDULES: Final = (
    "if it is meant to follow a schedule, too, set the learning rate of every group in optimizer.param_groups"
)
SPLIT: Final = (
    "if these are meant to be without weight decay, too, look at the names or shapes by which the param "
    "groups are split"
)

FREEZE: Final = (
    "freeze them with requires_grad_(False) before the optimizer is created, or pass it the adapters alone"
)

# what begins the name of a part of a LoRA adapter, such as lora_a, lora_A.default.weight, lora.down or
# lora_magnitude_vector; and the names of the layer's own weight, beside it
_ADAPTER: Final = re.compile(r"(|.*\.)lora(?:_[^.]*|[ab]?)(?:\.|$)", re.IGNORECASE)
_BASES: Final = ("weight", "base.weight", "base_layer.weight", "linear.weight")
# names of the scales and shifts of normalization layers
_NORMS: Final = re.compile(r"norm|(?:^|[._])(?:ln|bn|gn)[_\d]*(?:[._]|$)|gamma|beta$", re.IGNORECASE)


@dataclass(eq=False, repr=False)
class GroupRates(BaseRule):
    """A param group whose learning rate is far from those of the others, or that no schedule changes.

    It needs `gradiometer.watch` or the callback of a trainer, and several groups in one optimizer.

    * Far: when the highest rates of the groups are sorted, two neighbours differ by more than 10,000 times,
      or by more than 1,000 times with severity info. So a decay from layer to layer has no finding. A group
      whose rate rises, as in a warm-up, does not count yet; a rate of 0 is left to `NotUpdated`, if weights
      or updates are recorded, and otherwise is info.
    * Left behind: a group without the ``initial_lr`` that a scheduler of `torch.optim` gives those that it
      knows, because it was added later. Its rate stays the same, while that of another group changes to
      half. Without such a scheduler, a rate that stays the same while another falls to a tenth is info.

    Args:
        patience: number of steps without a rise of the rate.
    """

    name = "group_lr"
    kept = ("steady", "highest", "lowest", "last", "zeros", "since")
    _: KW_ONLY
    patience: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        self._restart(0)

    def _restart(self, size: int) -> None:
        start = torch.zeros(5, size, dtype=torch.float64, device="cpu")
        # of each group: steps since its rate has risen, its extremes, the last one, and steps at 0
        self.steady, self.highest, self.lowest, self.last, self.zeros = start.unbind()
        self.lowest = torch.full_like(self.highest, math.inf)
        self.since = -1

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Compare the learning rates of the groups."""
        known = optimizers_of(record)
        if known is None or len(known.rates) < 2:
            return []
        rates = [math.nan if rate is None else rate for rate in known.rates]
        now = torch.tensor(rates, dtype=torch.float64, device="cpu")
        if len(now) != len(self.steady):
            # a group that is added is compared with the others from here on
            self._restart(len(now))
            self.since = record.step
        self.steady = torch.where((now > 0) & (now <= self.last), self.steady + 1.0, 0.0)
        self.zeros = torch.where((now == 0) & (self.highest == 0), self.zeros + 1.0, 0.0)
        self.highest, self.lowest = self.highest.fmax(now), self.lowest.fmin(now)
        self.last = now
        if known.rates.count(known.rates[0]) == len(known.rates):
            return []
        return [
            found
            for groups in _groups_of(record, known)
            for found in (*self._far(record, known, groups), *self._behind(record, known, groups))
        ]

    def _far(self, record: StepRecord, known: OptimizerState, groups: list[int]) -> Iterator[Finding]:
        learn = sorted((float(self.highest[x]), x) for x in groups if self.highest[x] > 0)
        for (low, group), (high, other) in itertools.pairwise(learn):
            if min(self.steady[group], self.steady[other]) < self.patience or high <= FAR * low:
                continue
            severity = self.severity if high > VERY_FAR * low else min(self.severity, Severity.INFO)
            text = f"the learning rate of {_text(record, known, group)} is {low:.3g} at most, and that of "
            text += f"{_text(record, known, other)} {high:.3g}, {times(high / low)} as high"
            yield self._finding(record, known, group, high / low, FAR, text, COMPARE, severity)
        if recorded_kind(record, CHANGES) is not None or not learn:
            return
        for group in groups:
            if self.zeros[group] >= self.patience:
                text = f"the learning rate of {_text(record, known, group)} is 0, while others learn"
                severity = min(self.severity, Severity.INFO)
                yield self._finding(record, known, group, 0.0, 0.0, text, RATE_OF_GROUP, severity)

    def _behind(self, record: StepRecord, known: OptimizerState, groups: list[int]) -> Iterator[Finding]:
        same = [x for x in groups if self.highest[x] == self.lowest[x] > 0]
        # a rise may be a warm-up of its own
        moving = {x: float(self.highest[x] / self.last[x]) for x in groups if self.last[x] > 0}
        scheduled = known.scheduled or (False,) * len(known.rates)
        for group in same:
            if self.steady[group] < self.patience:
                continue
            is_late = not scheduled[group] and any(scheduled[x] for x in moving)
            most = max(moving, key=lambda x: moving[x] * (scheduled[x] or not is_late))
            if moving[most] < (FOLLOWS if is_late else LEFT_BEHIND):
                continue
            text = f"the learning rate of {_text(record, known, group)} stays {float(self.last[group]):.3g}, "
            text += f"while that of {_text(record, known, most)} has fallen from "
            text += f"{float(self.highest[most]):.3g} to {float(self.last[most]):.3g}"
            severity, advice = min(self.severity, Severity.INFO), SCHEDULES
            if is_late:
                text += ": the group was added after the scheduler was created, which does not change it"
                severity, advice = self.severity, LATE
            limit = FOLLOWS if is_late else LEFT_BEHIND
            yield self._finding(record, known, group, moving[most], limit, text, advice, severity)

    def _finding(
        self,
        record: StepRecord,
        known: OptimizerState,
        group: int,
        value: float,
        limit: float,
        text: str,
        advice: str,
        severity: Severity,
    ) -> Finding:
        first = record.names()[known.groups.index(group)]
        return self.finding(record, max(self.since, 0), first, value, limit, text, advice, severity, None)


@dataclass(eq=False, repr=False)
class DecayedNorms(BaseRule):
    """Normalization layers with weight decay, though other parameters have none; reported once.

    It needs `gradiometer.watch` or the callback of a trainer. If all parameters have weight decay, as is
    usual for convolutional networks, there is no finding: only if a group of the optimizer has none, and
    holds vectors, such as biases, while the scales or shifts of some norms are in a group that has it.
    """

    name = "decayed_norms"
    kept = ("is_done",)
    _: KW_ONLY
    severity: Severity = Severity.INFO
    is_done: bool = field(default=False, init=False)

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Look at the groups of the first step."""
        known = None if self.is_done else optimizers_of(record)
        if known is None or not known.options:
            return []
        self.is_done = True
        rows = record.catalog.parameters
        decay = [known.options[x].get("weight_decay", 0.0) if x >= 0 else 0.0 for x in known.groups]
        vectors = [i for i, shape in enumerate(rows.shapes) if len(shape) == 1 and known.groups[i] >= 0]
        spared = {known.owners[known.groups[i]] for i in vectors if not decay[i]}
        places = [
            i
            for i in vectors
            if decay[i] > 0 and known.owners[known.groups[i]] in spared and _NORMS.search(rows.names[i])
        ]
        if not places:
            return []
        text = f"{modules_text(rows.names, places)}: scales or shifts of norms have weight decay "
        text += f"{decay[places[0]]:.3g}, though other vectors of the same optimizer have none"
        first, share = rows.names[places[0]], decay[places[0]]
        return [self.finding(record, record.step, first, share, 0.0, text, SPLIT, self.severity, None)]


@dataclass(eq=False, repr=False)
class BaseNotFrozen(BaseRule):
    """Weights of layers with LoRA adapters that are trained together with these; reported once.

    It needs `gradiometer.watch` or the callback of a trainer. A layer's own weight is known by its name, as
    in ``q.lora_a`` and ``q.weight``, ``q.base.weight``, ``q.base_layer.weight`` or ``q.linear.weight``.
    Layers without adapters may be trained beside them, so they do not count, and neither do biases. If these
    weights have another learning rate than all adapters, they are meant to be trained, and the severity is
    info.
    """

    name = "base_not_frozen"
    kept = ("is_done",)
    _: KW_ONLY
    is_done: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rows: object = None
        self._adapters: dict[int, list[int]] = {}

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Look for base weights with a learning rate above 0, beside adapters with one."""
        known = None if self.is_done else optimizers_of(record)
        if known is None or record.model is None:
            return []
        rows = record.catalog.parameters
        if rows is not self._rows:
            self._rows, self._adapters = rows, _adapters_of(rows.names)
        learns = record.model.requires_grad
        if not self._adapters or len(learns) != len(known.groups):
            return []
        of_groups = [rate or 0.0 for rate in known.rates]
        rates = [
            of_groups[group] if learn and group >= 0 else 0.0
            for group, learn in zip(known.groups, learns, strict=True)
        ]
        of_adapters = {rates[x] for adapters in self._adapters.values() for x in adapters}
        bases = [
            base
            for base, adapters in self._adapters.items()
            if rates[base] > 0 and any(rates[x] > 0 for x in adapters)
        ]
        if not bases:
            return []
        self.is_done = True
        is_alike = any(rates[base] in of_adapters for base in bases)
        severity = self.severity if is_alike else min(self.severity, Severity.INFO)
        count = len(bases)
        first, rate = rows.names[bases[0]], rates[bases[0]]
        text = f"the base weights of {count:,} {'layer' if count == 1 else 'layers'} with LoRA adapters are "
        text += f"trained as well, with the learning rate {rate:.3g}, beginning with {first}"
        return [self.finding(record, record.step, first, rate, 0.0, text, FREEZE, severity, None)]


def _adapters_of(names: Sequence[str]) -> dict[int, list[int]]:
    """Return the places of the adapters of each base weight, by its place."""
    places = {name: place for place, name in enumerate(names)}
    found: dict[int, list[int]] = {}
    for place, name in enumerate(names):
        adapter = _ADAPTER.match(name)
        bases = () if adapter is None else [places.get(adapter[1] + x) for x in _BASES]
        for base in bases:
            if base is not None:
                found.setdefault(base, []).append(place)
    return found


def _groups_of(record: StepRecord, known: OptimizerState) -> list[list[int]]:
    """Return the groups of each optimizer that hold parameters which require a gradient."""
    learns = (True,) * len(known.groups) if record.model is None else record.model.requires_grad
    if len(learns) != len(known.groups):
        return []
    present = sorted(
        {group for group, learn in zip(known.groups, learns, strict=True) if learn and group >= 0}
    )
    owners = sorted({known.owners[group] for group in present})
    return [[group for group in present if known.owners[group] == owner] for owner in owners]


def _text(record: StepRecord, known: OptimizerState, group: int) -> str:
    places = [place for place, x in enumerate(known.groups) if x == group]
    return f"the param group of {modules_text(record.names(), places, most=1)}"
