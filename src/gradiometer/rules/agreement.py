"""Micro-batches and ranks: equal data, a rank that disagrees, and gradients that are not averaged."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from gradiometer.rules.base import MOST, BaseRule
from gradiometer.rules.finding import Severity, modules_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from gradiometer.recorder import AgreementLook, StepRecord
    from gradiometer.rules.finding import Finding

SPLIT: Final = (
    "look at how micro-batches or ranks get their data: a DistributedSampler, an iterable dataset split by "
    "rank and worker, seeds, iterators that are re-created; and call agreement.add() before ranks average"
)
LOOK: Final = (
    "compare a batch, the loss and the weights of this rank with those of others; gm.check_replicas compares "
    "weights, and another device tells whether it is the hardware"
)
AVERAGE: Final = (
    "call the DistributedDataParallel model itself, not model.module, and the last backward of a step "
    "outside of no_sync(); look for parameters that DDP ignores, or that were added after it was created"
)

# of the mean over steps, about ten
_DECAY: Final = 0.9
# deviations of an estimated cosine, 1 / sqrt(k), and of the cosines of all ranks
_NOISE: Final = 3.0
_SPREAD: Final = 6.0 * 1.4826


@dataclass(eq=False, repr=False)
class AgreementRule(BaseRule):
    """A rule about each step that a `gradiometer.GradientAgreement` has looked at.

    It needs ``gm.watch(..., agreement=...)`` or ``gm.Monitor(..., agreement=...)``. It reports what has
    lasted for ``patience`` of these steps.
    """

    kept: ClassVar[tuple[str, ...]] = ("last", "names", "streaks", "since")
    _: KW_ONLY
    patience: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patience < 1:
            raise ValueError(f"{type(self).__name__}(patience={self.patience!r}): it must be at least 1")
        self.last = -1
        self.names: list[str] = []
        self.streaks, self.since = torch.zeros(2, 0, dtype=torch.int64, device="cpu").unbind()

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Return the findings about the looks that are new."""
        looks = () if record.model is None else record.model.agreements
        new = [look for look in looks if look.step > self.last]
        for look in new:
            self.last = look.step
            self._count(look.step, self.seen(look))
        streaks = self.streaks.tolist()
        found = [name for name, n in zip(self.names, streaks, strict=True) if n >= self.patience]
        return [self.about(record, new[-1], found)] if new and found else []

    def seen(self, look: AgreementLook) -> list[str]:
        """Return names of what holds in this step."""
        raise NotImplementedError

    def about(self, record: StepRecord, look: AgreementLook, found: list[str]) -> Finding:
        """Return a finding about what has lasted."""
        raise NotImplementedError

    def made(
        self, record: StepRecord, found: list[str], value: float, limit: float, text: str, advice: str
    ) -> Finding:
        """Return a finding that began with the first of ``found``."""
        known = dict(zip(self.names, self.since.tolist(), strict=True))
        begun = min(record.step, *[known[name] for name in found])
        return self.finding(record, begun, None, value, limit, text, advice)

    def _count(self, step: int, now: list[str]) -> None:
        counts = zip(self.streaks.tolist(), self.since.tolist(), strict=True)
        before = dict(zip(self.names, counts, strict=True))
        counted = [before.get(name, (0, step)) for name in now]
        self.names = now
        self.streaks = torch.tensor([n + 1 for n, _ in counted], dtype=torch.int64, device="cpu")
        self.since = torch.tensor([first for _, first in counted], dtype=torch.int64, device="cpu")


@dataclass(eq=False, repr=False)
class SameData(AgreementRule):
    """Ranks, or micro-batches of a step, whose gradients are equal, so that they got the same data.

    Their gradients have cosine 1 and equal norms, up to rounding. With dropout they differ, so it is not
    noticed then.
    """

    name = "same_data"

    def seen(self, look: AgreementLook) -> list[str]:
        """Return each rank and micro-batch with the first one that is equal."""
        found = {"ranks": look.rank_twins, "micro-batches": look.micro_batch_twins}
        return [
            f"{what} {twin} {i}" for what, twins in found.items() for i, twin in enumerate(twins) if twin != i
        ]

    def about(self, record: StepRecord, look: AgreementLook, found: list[str]) -> Finding:
        """Name the sets of ranks or micro-batches."""
        sets: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name in found:
            what, first, other = name.split(" ")
            sets[what, first].append(other)
        parts = []
        for (what, first), others in list(sets.items())[:MOST]:
            total = len(look.rank_twins if what == "ranks" else look.micro_batch_twins)
            is_all = len(others) + 1 == total > 2
            parts.append(f"all {total} {what}" if is_all else f"{what} {_listed([first, *others])}")
        more = f"; and {len(sets) - MOST} more sets" if len(sets) > MOST else ""
        text = f"{'; '.join(parts)}{more} get the same data: their gradients are equal, with cosine 1 and "
        text += f"equal norms, in {self.patience} measured steps or more"
        return self.made(record, found, 1.0, 1.0, text, SPLIT)


@dataclass(eq=False, repr=False)
class DisagreeingRank(AgreementRule):
    """A rank whose gradient points elsewhere than those of the other ranks, for many steps.

    The cosine of each rank's gradient with the median of all ranks is averaged over about ten measured steps.
    It needs three ranks: of two, nobody knows which one is right.
    """

    name = "disagreeing_rank"
    kept: ClassVar[tuple[str, ...]] = (*AgreementRule.kept, "cosines", "weights")
    patience: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        # the mean of each rank, and the weight of all steps in it
        self.cosines, self.weights = torch.zeros(2, 0, dtype=torch.float64, device="cpu").unbind()

    def seen(self, look: AgreementLook) -> list[str]:
        """Return the ranks that are clearly below the others."""
        now = torch.tensor(look.rank_cosines, dtype=torch.float64, device="cpu")
        if len(now) != len(self.cosines):
            self.cosines, self.weights = torch.zeros(2, len(now), dtype=torch.float64, device="cpu").unbind()
        known = ~now.isnan()
        # a NaN leaves a mean as it was
        self.cosines = torch.where(known, _DECAY * self.cosines + (1.0 - _DECAY) * now, self.cosines)
        self.weights = torch.where(known, _DECAY * self.weights + (1.0 - _DECAY), self.weights)
        means, usual, limit = self._limits(look)
        return [str(rank) for rank in (means < limit).nonzero().flatten().tolist()] if usual > 0 else []

    def about(self, record: StepRecord, look: AgreementLook, found: list[str]) -> Finding:
        """Name the ranks, the worst first."""
        means, usual, limit = self._limits(look)
        ranks = sorted(map(int, found), key=lambda rank: float(means[rank]))
        worst = float(means[ranks[0]])
        who = f"rank {ranks[0]} disagrees" if len(ranks) == 1 else f"ranks {_listed(ranks)} disagree"
        text = f"{who} with the other ranks: the gradient of rank {ranks[0]} has a cosine of {worst:.2f} "
        text += "with the median of all ranks, averaged over steps, while that of the usual rank has "
        text += f"{usual:.2f}"
        return self.made(record, found, worst, limit, text, LOOK)

    def _limits(self, look: AgreementLook) -> tuple[Tensor, float, float]:
        """Return the mean cosine of each rank, the usual one, and the limit below which a rank disagrees."""
        means = self.cosines / self.weights
        known = means[~means.isnan()]
        if len(known) < 3:
            return means, math.nan, -math.inf
        usual = float(known.median())
        spread = float((known - usual).abs().median())
        distance = max(_NOISE / math.sqrt(look.projections), _SPREAD * spread)
        return means, usual, min(usual / 2.0, usual - distance)


@dataclass(eq=False, repr=False)
class NotAveraged(AgreementRule):
    """Gradients that differ between ranks after the backward pass, although ranks have copies of weights.

    The weights then differ after the step. `ReplicaDivergence` compares the weights themselves.
    """

    name = "not_averaged"
    severity: Severity = Severity.ERROR

    def seen(self, look: AgreementLook) -> list[str]:
        """Return the tensors that differ."""
        return list(look.differing)

    def about(self, record: StepRecord, look: AgreementLook, found: list[str]) -> Finding:
        """Name the tensors."""
        names = record.catalog.names if set(found) <= set(record.catalog.names) else tuple(found)
        places = sorted(names.index(name) for name in found)
        text = f"gradients are not averaged over the {len(look.rank_twins)} ranks: after backward(), those "
        text += f"of {modules_text(names, places, MOST)} differ between ranks, and so will the weights"
        return self.made(record, found, float(len(found)), 0.0, text, AVERAGE)


def _listed(items: list[str] | list[int]) -> str:
    """Return items as text.

    >>> _listed([0, 1, 4])
    '0, 1 and 4'
    """
    texts = [str(item) for item in items[:MOST]]
    if len(items) > MOST:
        return f"{', '.join(texts)} and {len(items) - MOST} more"
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
