"""The histograms of magnitudes of one step on the host."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradiometer.columns import NUM_EXPONENT_COLUMNS
from gradiometer.stats import ExponentStats

if TYPE_CHECKING:
    from torch import Tensor

    from gradiometer.recorder.step_record import Kind

__all__ = ["StepExponents"]


@dataclass(frozen=True, eq=False)
class StepExponents:
    """Histograms of the gradients of a step and, if they were measured, of its weights.

    Most counts are 0, so only the others are kept.

    Attributes:
        kinds: K kinds: ``"grads"``, or ``"grads"`` and ``"weights"``.
        names: of the N parameters.
        places: ``(M,) int64``, ascending: where the counts are in ``(K, N, C)``, flat.
        counts: ``(M,) int64``, above 0; for C see `gradiometer.columns.exponents`.

    >>> counts = torch.zeros(1, 2, NUM_EXPONENT_COLUMNS, dtype=torch.int64)
    >>> counts[0, 1, 0] = 3
    >>> StepExponents.of(("grads",), ("a", "b"), counts).stats("grads").n_zero
    tensor([3])
    """

    kinds: tuple[Kind, ...]
    names: tuple[str, ...]
    places: Tensor
    counts: Tensor

    @classmethod
    def of(cls, kinds: tuple[Kind, ...], names: tuple[str, ...], counts: Tensor) -> StepExponents:
        """Return the histograms that ``counts``, ``(K, N, C) int64`` on the host, hold."""
        flat = counts.reshape(-1)
        places = flat.nonzero().view(-1)
        return cls(kinds, names, places, flat[places])

    @property
    def size(self) -> tuple[int, int, int]:
        """K, N and C."""
        return len(self.kinds), len(self.names), NUM_EXPONENT_COLUMNS

    def dense(self) -> Tensor:
        """Return all counts, ``(K, N, C) int64``."""
        flat = torch.zeros(math.prod(self.size), dtype=torch.int64, device="cpu")
        return flat.index_copy_(0, self.places, self.counts).view(self.size)

    def stats(self, kind: Kind = "grads") -> ExponentStats:
        """Return the histograms of the tensors of a kind that were measured.

        Raises:
            KeyError: for a kind that was not measured.
        """
        if kind not in self.kinds:
            msg = f"there are no histograms of {kind}, only of {' and '.join(self.kinds)}"
            raise KeyError(msg)
        rows = self.dense()[self.kinds.index(kind)]
        kept = (rows.amax(dim=1) > 0).nonzero().view(-1).tolist()
        return ExponentStats(tuple([self.names[i] for i in kept]), rows[kept])
