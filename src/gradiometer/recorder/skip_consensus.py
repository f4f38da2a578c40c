"""The decision of all ranks together whether to skip a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradiometer import distributed, ops
from gradiometer.columns import TENSORS, Cursor, sqrt
from gradiometer.stats import Float64Module

if TYPE_CHECKING:
    from gradiometer.distributed import Ranks
    from gradiometer.recorder.store import RingLayout


class SkipConsensus(Float64Module):
    """One skip decision for all ranks, from each rank's own decision and the sum of all squares.

    For copies of a gradient only the first rank's squares count. Non-finite values count on every rank.

    Attributes:
        adds_up: whether squares are summed; only a limit of the norm needs this.

    Raises:
        ValueError: for a name that the ranks have not agreed on.
    """

    _counted: Tensor
    _sumsq: Tensor

    def __init__(self, names: tuple[str, ...], ranks: Ranks, home: torch.device) -> None:
        super().__init__()
        known = set(ranks.local_names)
        unknown = [name for name in names if name not in known]
        if unknown:
            msg = f"Recorder: {unknown[0]!r} is not among the tensors that gm.Ranks was created with; "
            msg += "create gm.Ranks from the same model"
            raise ValueError(msg)
        counted = torch.tensor([name in ranks.counted for name in names], dtype=torch.float64, device=home)
        self.register_buffer("_counted", counted, persistent=False)
        self.register_buffer("_sumsq", counted.new_zeros(1), persistent=False)
        self._ranks = ranks
        self.adds_up = False
        # the decision since the last measurement, if any; in a list, which is not part of a module's state
        self._decided: list[Tensor] = []

    def begin(self) -> None:
        """Forget the decision on earlier measurements."""
        self._decided.clear()

    def observe(self, columns: Tensor) -> None:
        """If ``adds_up``, store the sum of squares of this rank's gradients; ``columns (N, C) float64``."""
        if self.adds_up:
            # not a product with the mask: a sum of squares may be inf
            self._sumsq.fill_(torch.where(self._counted > 0, TENSORS.value(columns, "sumsq"), 0.0).sum())

    def decide(self, ring: Tensor, cursor: Tensor, layout: RingLayout) -> Tensor:
        """Return the decision, 0-d bool. It takes one collective, once after each `begin`.

        It is written into the header of the ring's current step, and into the cursor in place of this rank's.
        """
        if not self._decided:
            skip = cursor[Cursor.SKIP : Cursor.SKIP + 1]
            both = torch.cat([skip, self._sumsq])
            both = distributed.all_reduce(both, "sum", self._ranks.group, self._ranks.timeout)
            skips = (both[0] > 0) | (sqrt(both[1]) > cursor[Cursor.SKIP_ABOVE])
            skip.fill_(skips)
            # without rows this only writes the header
            nothing = ring.new_zeros(0, TENSORS.width)
            ops.append_(nothing, nothing[:, 0].to(torch.int32), 0, ring, cursor, layout.header_only)
            self._decided.append(skips)
        return self._decided[0]
