"""Copies of weights that differ between ranks."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Final

import torch

from gradiometer.rules.base import MOST, BaseRule
from gradiometer.rules.finding import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradiometer.recorder import StepRecord


ADVICE: Final = (
    "look for an update that only some ranks make, for weights that were not broadcast at the start, and for "
    "a faulty device; go back to a checkpoint before this step, or broadcast the weights of most ranks"
)


@dataclass(eq=False, repr=False)
class ReplicaDivergence(BaseRule):
    """Copies of a weight whose bits differ between ranks, as after silent data corruption.

    It needs the fingerprints of weights of a job with several ranks: ``Monitor(weights=True,
    fingerprint=True)``.
    """

    name = "replica_divergence"
    kept = ("names", "since")
    _: KW_ONLY
    most: int = MOST
    severity: Severity = Severity.ERROR

    def __post_init__(self) -> None:
        super().__post_init__()
        # parameters that differ, and the step in which that was first seen
        self.names: list[str] = []
        self.since = torch.zeros(0, dtype=torch.int64, device="cpu")

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Return a finding about each of the first weights that differ."""
        if not record.has("weights") or not (record.diverged or self.names):
            return []
        before = dict(zip(self.names, self.since.tolist(), strict=False))
        steps = {name: before.get(name, record.step) for name in record.diverged}
        self.names = list(steps)
        self.since = torch.tensor(list(steps.values()), dtype=torch.int64, device="cpu")
        # those that were named before come first: they began earlier
        named = sorted(steps, key=steps.__getitem__)[: self.most]
        more = len(record.diverged) - len(named)
        others = f"; {more:,} more {'tensor differs' if more == 1 else 'tensors differ'}" if more else ""
        count = float(len(record.diverged))
        findings: list[Finding] = []
        for name in named:
            since = steps[name]
            message = f"{name}: {record.diverged[name]} since step {since}{'' if findings else others}"
            findings.append(self.finding(record, since, name, count, 0.0, message, ADVICE, kind="weights"))
        return findings
