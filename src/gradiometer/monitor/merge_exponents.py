"""Histograms of exponents of all ranks, added up: one SUM of int64 for each step that has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradiometer.columns import NUM_EXPONENT_COLUMNS
from gradiometer.recorder import StepExponents

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from gradiometer.distributed import Ranks
    from gradiometer.recorder import Roster, StepRecord

__all__ = ["ExponentMerger"]


class ExponentMerger:
    """Adds up the histograms of the steps that are due.

    Copies count once, as for other columns. In a step that only some ranks have measured, the tensors that
    are complete are kept.

    Args:
        ranks: the agreement of the ranks.
        local: the roster of this rank.
        every: steps divisible by this are due, on all ranks.

    >>> import gradiometer as gm
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> recorder, ranks = gm.Recorder(model, precision=1), gm.Ranks(model)  # of a job of one
    >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
    >>> recorder.record()
    >>> merger = ExponentMerger(ranks, recorder.roster, 1)
    >>> packed = merger.pack(recorder.read_exponents(0))
    >>> merger.unpack(packed).stats("grads").numel
    tensor([2])
    """

    def __init__(self, ranks: Ranks, local: Roster, every: int) -> None:
        self._ranks, self._every = ranks, every
        local = local.of_parameters
        self._local = local.names
        self._kinds = tuple([kind for kind in local.kinds if kind in {"grads", "weights"}])
        # NaN where the full size is not known
        sizes = [float("nan") if h.numel is None else float(h.numel) for h in ranks.plan.specs]
        self._whole = torch.tensor(sizes, dtype=torch.float64, device="cpu")

    def merge(
        self, steps: Sequence[int], mine: Sequence[StepRecord], add_up: Callable[[Tensor], Tensor]
    ) -> dict[int, StepExponents]:
        """Return the histograms of the steps that are due, by their place. All ranks call this.

        Args:
            steps: the numbers of the steps, the same on all ranks.
            mine: this rank's records of the first of them.
            add_up: the sum of a tensor over the ranks.
        """
        found = {}
        for place, step in enumerate(steps):
            if step % self._every == 0:
                own = mine[place].exponents if place < len(mine) else None
                merged = self.unpack(add_up(self.pack(own)))
                if merged is not None:
                    found[place] = merged
        return found

    def pack(self, own: StepExponents | None) -> Tensor:
        """Return what this rank adds, ``(T + 1, K * C) int64``; the last row counts the ranks."""
        size = len(self._ranks.names) + 1, len(self._kinds) * NUM_EXPONENT_COLUMNS
        packed = torch.zeros(size, dtype=torch.int64, device="cpu")
        if own is not None:
            rows = own.dense().transpose(0, 1).flatten(1)
            packed[:-1] = self._ranks.to_rows(self._local, rows)
            packed[-1] = 1
        return packed

    def unpack(self, total: Tensor) -> StepExponents | None:
        """Return the histograms of the job from the sum over the ranks; None if no rank has measured any."""
        reporting = int(total[-1, 0])
        if not reporting:
            return None
        counts = total[:-1].unflatten(1, (len(self._kinds), NUM_EXPONENT_COLUMNS)).transpose(0, 1)
        if reporting < self._ranks.size:
            # a part of a tensor must not look like the whole
            counts = torch.where((counts.sum(dim=2) == self._whole).unsqueeze(2), counts, 0)
        return StepExponents(self._kinds, self._ranks.names, counts)
