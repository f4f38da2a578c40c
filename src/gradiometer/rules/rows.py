"""Rows of embeddings and codebooks that never get a gradient."""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from gradiometer.rules.base import LastingRule, Observation, mask
from gradiometer.rules.finding import Severity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradiometer.recorder import Rows, StepRecord
    from gradiometer.rules.finding import Finding

# the second moments of an optimizer, if they are recorded: 0 where no gradient has ever been other than 0
MOMENTS: Final = "exp_avg_sq"
# names of tables of rows that are looked up
_LOOKED_UP: Final = re.compile(r"emb|wte|wpe|codebook|code_book|dictionary", re.IGNORECASE)

# of which a batch uses only a part of the rows, however long the run is
_CODES: Final = re.compile(r"codebook|code_book", re.IGNORECASE)
# steps that the share must stay the same: rows that come up in one of 20 batches come up in 99 % of them
STEPS: Final = 100

USE: Final = (
    "look at which rows are used: for a codebook, restart dead codes, or initialize it from the data; for an "
    "embedding, compare its size with the vocabulary of the data, and look for tokens that are never fed"
)


@dataclass(eq=False, repr=False)
class UnusedRows(LastingRule):
    """An embedding or codebook, from its name, of which most elements get no gradient in any step.

    With a kind ``exp_avg_sq``, the second moments of Adam, an element of 0 has never had a gradient.
    Otherwise the rule uses the zeros of the gradient: with other batches, their share varies from step to
    step. There is a finding if the share is above ``fraction`` and has stayed the same for ``patience``
    recorded steps, and 100 steps. It has ``severity`` for a codebook. For other embeddings it has info, since
    a vocabulary may have words that the data lacks, and positions that no sequence reaches.

    Args:
        fraction: limit of the share.
    """

    name = "unused_rows"
    kinds: ClassVar[tuple[str, ...]] = (MOMENTS, "grads")
    kept = (*LastingRule.kept, "share")
    _: KW_ONLY
    fraction: float = 0.5

    def restart(self, size: int) -> None:
        """Start a new history of ``size`` tensors."""
        super().restart(size)
        self.share = torch.full((size,), torch.nan, dtype=torch.float64, device="cpu")

    def prepare(self, rows: Rows) -> None:
        """Find embeddings and codebooks."""
        super().prepare(rows)
        named = [bool(_LOOKED_UP.search(name)) and len(shape) == 2 for name, shape in _pairs(rows)]
        self.looked_up = mask(named)

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Compare the shares of zeros with those of the step before."""
        kind = MOMENTS if MOMENTS in record.catalog.kinds else "grads"
        known = record.measured(kind) & self.looked_up
        if not known.any():
            return []
        share = record.value("zero_fraction", kind)
        # a gradient of zeros alone is that of a module that was not used; `Dead` reports it
        same = known & (share == self.share) & (share > self.fraction) & (share < 1.0)
        self.share = torch.where(known, share, self.share)
        lasting = self.lasting(same, known, record.step)
        if lasting is None:
            return []
        lasting = lasting & (record.step - self.since >= STEPS)

        def describe(place: int) -> Observation:
            name, value = record.names(kind)[place], float(share[place])
            message = f"{value:.0%} of the elements have had no gradient in any step "
            message += f"from {int(self.since[place])} to {record.step}: these rows are not used"
            severity = self.severity if _CODES.search(name) else min(self.severity, Severity.INFO)
            return Observation(value, self.fraction, message, USE, severity)

        return self.findings(record, kind, lasting, share, describe, self.since)


def _pairs(rows: Rows) -> Iterable[tuple[str, tuple[int, ...]]]:
    return zip(rows.names, rows.shapes, strict=True)
