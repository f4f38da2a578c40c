"""What micro-batches and ranks have in common in one step, on the host."""

from __future__ import annotations

from typing import NamedTuple


class AgreementLook(NamedTuple):
    """What rules use of the cosines of one step, see `gradiometer.GradientAgreement`; of all parameters.

    Attributes:
        step: the step.
        projections: the number k of projections.
        micro_batch_twins: for each micro-batch, the first one with an equal gradient, or itself.
        rank_twins: likewise, for each rank.
        rank_cosines: the cosine of each rank's gradient with the median of all ranks; NaN if not known.
        differing: the tensors whose gradients differ between ranks after averaging.
    """

    step: int
    projections: int
    micro_batch_twins: tuple[int, ...] = ()
    rank_twins: tuple[int, ...] = ()
    rank_cosines: tuple[float, ...] = ()
    differing: tuple[str, ...] = ()
