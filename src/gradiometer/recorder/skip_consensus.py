"""Whether a step is skipped, decided by all ranks together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradiometer import distributed, ops
from gradiometer.columns import NUM_COLUMNS, Cursor, derived
from gradiometer.stats import Float64Module

if TYPE_CHECKING:
    from gradiometer.distributed import Ranks

__all__ = ["SkipConsensus"]


class SkipConsensus(Float64Module):
    """One answer for all ranks, from what each found and what the squares of all add up to.

    Of copies of a gradient only the first rank's squares count. What is not finite counts wherever it is.

    Args:
        names: of the gradients, N.
        ranks: what the ranks have agreed on.
        home: the device.

    Attributes:
        adds_up: whether squares are added up: no limit of the norm, no need.

    Raises:
        ValueError: for a name that ranks do not know.
    """

    _counted: Tensor
    _sumsq: Tensor

    def __init__(self, names: tuple[str, ...], ranks: Ranks, home: torch.device) -> None:
        super().__init__()
        known = set(ranks.local_names)
        unknown = [name for name in names if name not in known]
        if unknown:
            msg = f"Recorder: the ranks do not know {unknown[0]!r}; make gm.Ranks of the same model"
            raise ValueError(msg)
        counted = torch.tensor([name in ranks.counted for name in names], dtype=torch.float64, device=home)
        self.register_buffer("_counted", counted, persistent=False)
        self.register_buffer("_sumsq", counted.new_zeros(1), persistent=False)
        self._ranks = ranks
        self.adds_up = False
        # since the gradients were last measured; a list, which is no part of a module's state
        self._given: list[Tensor] = []

    def begin(self) -> None:
        """Forget the decision on what was measured before."""
        self._given.clear()

    def hear(self, columns: Tensor) -> None:
        """Take note of this rank's gradients, ``(N, C) float64``."""
        if self.adds_up:
            # not by a product: a sum of squares may be inf
            self._sumsq.fill_(torch.where(self._counted > 0, derived.value(columns, "sumsq"), 0.0).sum())

    def give(self, ring: Tensor, cursor: Tensor) -> Tensor:
        """Return the decision, 0-d bool. The ranks are asked in one collective, once after each `begin`.

        Args:
            ring: whose header of the current step is told.
            cursor: its state; has what this rank alone would do, and then what all do.
        """
        if not self._given:
            skip = cursor[Cursor.SKIP : Cursor.SKIP + 1]
            heard = torch.cat([skip, self._sumsq])
            heard = distributed.all_reduce(heard, "sum", self._ranks.group, self._ranks.timeout)
            skips = (heard[0] > 0) | (derived.sqrt(heard[1]) > cursor[Cursor.SKIP_ABOVE])
            skip.fill_(skips)
            # no rows: it writes the header
            nothing = ring.new_zeros(ring.shape[1] - 1, NUM_COLUMNS)
            ops.append_(nothing, nothing[:, 0].to(torch.int32), 0, ring, cursor)
            self._given.append(skips)
        return self._given[0]
