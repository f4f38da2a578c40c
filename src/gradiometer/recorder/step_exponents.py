"""The histograms of magnitudes of one step on the host."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from gradiometer.columns import NUM_EXPONENT_COLUMNS
from gradiometer.stats import ExponentStats

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from gradiometer.recorder.step_record import Kind

__all__ = ["StepExponents"]


class StepExponents:
    """Histograms of the gradients of a step and, if they were measured, of its weights.

    Most counts are 0, so only the others are kept, once they were asked for.

    Args:
        kinds: K kinds: ``"grads"``, or ``"grads"`` and ``"weights"``.
        names: of the N parameters.
        counts: ``(K, N, C) int64`` on the host, see `gradiometer.columns.exponents`; or a function that
            returns it, called by the first thread that needs it.

    >>> counts = torch.zeros(1, 2, NUM_EXPONENT_COLUMNS, dtype=torch.int64)
    >>> counts[0, 1, 0] = 3
    >>> StepExponents(("grads",), ("a", "b"), counts).stats("grads").n_zero
    tensor([3])
    """

    def __init__(
        self, kinds: tuple[Kind, ...], names: tuple[str, ...], counts: Tensor | Callable[[], Tensor]
    ) -> None:
        self.kinds, self.names = kinds, names
        self._counts: Tensor | Callable[[], Tensor] | tuple[Tensor, Tensor] = counts

    @classmethod
    def of_places(
        cls, kinds: tuple[Kind, ...], names: tuple[str, ...], places: Tensor, counts: Tensor
    ) -> StepExponents:
        """Return histograms from what `sparse` returns."""
        found = cls(kinds, names, counts)
        found._counts = places, counts
        return found

    @property
    def size(self) -> tuple[int, int, int]:
        """K, N and C."""
        return len(self.kinds), len(self.names), NUM_EXPONENT_COLUMNS

    def sparse(self) -> tuple[Tensor, Tensor]:
        """Return where counts above 0 are in ``(K, N, C)``, flat, ascending, and these; ``(M,) int64``."""
        # read once: another thread may do the same
        kept = self._counts
        if not isinstance(kept, tuple):
            flat = (kept if isinstance(kept, torch.Tensor) else kept()).reshape(-1)
            places = flat.nonzero().view(-1)
            self._counts = kept = places, flat[places]
        return kept

    def dense(self) -> Tensor:
        """Return all counts, ``(K, N, C) int64``."""
        places, counts = self.sparse()
        flat = torch.zeros(math.prod(self.size), dtype=torch.int64, device="cpu")
        return flat.index_copy_(0, places, counts).view(self.size)

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
