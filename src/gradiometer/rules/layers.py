"""Layers that do not learn, or do not learn at the pace of the others."""

from __future__ import annotations

import math
import re
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from gradiometer.columns import Flag
from gradiometer.recorder import label
from gradiometer.rules.base import LastingRule, Observation, TensorRule
from gradiometer.rules.finding import Severity
from gradiometer.rules.flow import ROUTED
from gradiometer.rules.history import NormHistory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from gradiometer.recorder import Rows, StepRecord
    from gradiometer.rules.finding import Finding


REVIVE: Final = (
    "look for ReLUs that are never active before or after this layer, inputs that are always 0, a branch "
    "that is multiplied by 0, an expert without tokens; or freeze it with requires_grad_(False)"
)
REBALANCE: Final = (
    "check the initialization and scale of these layers; look for saturated activations between them, and "
    "for a missing residual path or norm"
)


@dataclass(eq=False, repr=False)
class Dead(LastingRule):
    """A gradient with at least the threshold's share of zeros (all of them, by default) for a while.

    An expert without tokens in some steps, or a branch that starts at 0, does not count as dead. Layers whose
    names contain ``expert`` have severity info. Vectors are left out: the gradient of a bias before a norm
    may be exactly 0 in a healthy model.

    Args:
        min_dims: minimum number of dimensions of the tensors.
    """

    name = "dead"
    _: KW_ONLY
    patience: int = 20
    min_dims: int = 2

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Return findings about gradients that have been dead for ``patience`` steps."""
        flagged = record.flags() & Flag.DEAD
        if not (self.counting or flagged.any()):
            return []
        lasting = self.lasting((flagged > 0) & self.wide, record.measured(), record.step)
        if lasting is None:
            return []

        def describe(place: int) -> Observation:
            zeros = float(record.value("zero_fraction")[place])
            share = "all elements are 0" if zeros == 1.0 else f"{zeros:.1%} of its elements are 0"
            message = f"{share}, since step {int(self.since[place])}"
            is_routed = ROUTED in record.names()[place]
            severity = min(self.severity, Severity.INFO) if is_routed else self.severity
            return Observation(zeros, record.thresholds.dead, message, REVIVE, severity)

        return self.findings(record, "grads", lasting, self.streak, describe, self.since)


@dataclass(eq=False, repr=False)
class LayerImbalance(TensorRule):
    """Corresponding tensors of different layers, whose gradients differ by a large factor.

    The rule compares tensors of at least two dimensions whose names differ only in numbers, such as
    ``blocks.0.up.weight`` and ``blocks.7.up.weight``, by the smoothed logarithm of their rms. It names
    one tensor of each such family: the smallest, or the largest if that is above the threshold of `EXPLODING`
    and further from the median.

    Args:
        limit: the limit of the ratio of the largest to the smallest rms of a family. Query and key weights
            of a healthy transformer differ by a factor of up to 600 in a slow warm-up.
        most: maximum number of families named in a step.
    """

    name = "imbalance"
    kept = (*TensorRule.kept, "norms")
    _: KW_ONLY
    limit: float = 1e4
    norms: NormHistory = field(default_factory=NormHistory)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.limit > 1:
            raise ValueError(f"LayerImbalance(limit={self.limit!r}): limit must be greater than 1")

    def prepare(self, rows: Rows) -> None:
        """Find the families; tensors without a family get the last index."""
        patterns = [
            re.sub(r"\d+", "#", name) if len(shape) >= 2 else None
            for name, shape in zip(rows.names, rows.shapes, strict=True)
        ]
        self.families = sorted({p for p in patterns if p is not None and patterns.count(p) > 1})
        number = {pattern: i for i, pattern in enumerate(self.families)}
        self.family = torch.tensor(
            [number.get(str(p), len(number)) for p in patterns], dtype=torch.int64, device="cpu"
        )
        self.related = self.family < len(number)
        numel = torch.tensor([math.prod(shape) for shape in rows.shapes], dtype=torch.float64, device="cpu")
        self.half_log_numel = numel.clamp_(min=1.0).log_().mul_(0.5)

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Compare the layers of each family."""
        norms = self.norms.of(record)
        known = norms.known & self.norms.settled & self.related
        level = self.norms.level - self.half_log_numel
        low, high = torch.where(known, level, math.inf).amin(), torch.where(known, level, -math.inf).amax()
        # if all of them together are within the limit, so is each family
        if not high - low > math.log(self.limit):
            return []
        spread = self._spread(torch.where(known, torch.stack([level, -level]), -math.inf))
        found = torch.zeros_like(known)
        badness = torch.zeros_like(level)
        others: dict[int, tuple[int, int]] = {}
        for i in (spread > math.log(self.limit)).nonzero().flatten().tolist():
            rows = ((self.family == i) & known).nonzero().flatten()
            levels = level[rows]
            place, other = int(rows[levels.argmin()]), int(rows[levels.argmax()])
            # the smallest has vanished, unless the largest explodes: a healthy head is not the cause
            if norms.flags[other] & Flag.EXPLODING and levels.median() * 2 < level[place] + level[other]:
                place, other = other, place
            found[place], badness[place], others[place] = True, spread[i], (other, len(rows))

        def describe(place: int) -> Observation:
            other, size = others[place]
            ratio = math.exp(min(float(badness[place]), 700.0))
            side = "smaller" if level[place] < level[other] else "larger"
            message = (
                f"rms {float(level[place].exp()):.2g} is {side} than that of "
                f"{label('grads', record.names()[other])}, {float(level[other].exp()):.2g}, "
                f"by a factor of {ratio:.2g} ({size} layers have such a tensor)"
            )
            return Observation(ratio, self.limit, message, REBALANCE, self.severity)

        return self.findings(record, "grads", found, badness, describe)

    def _spread(self, signed: Tensor) -> Tensor:
        """Return the range of each family; ``signed`` has the values and their negatives, ``(2, N)``."""
        ends = torch.full((2, len(self.families) + 1), -math.inf, dtype=torch.float64, device="cpu")
        return ends.scatter_reduce(1, self.family.expand(2, -1), signed, "amax").sum(dim=0)[:-1]
