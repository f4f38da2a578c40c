"""Cosines between the gradients of micro-batches and of ranks, from their projections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from gradiometer.columns import sqrt

if TYPE_CHECKING:
    from collections.abc import Sequence

# a distance, relative to the norm, that rounding may cause, and one that another gradient has
_ROUNDING: Final = 1e-4
_DIFFERENT: Final = 1e-3


class GradientCosines(NamedTuple):
    """Cosines between the gradients of one step, for the total and G groups; snapshots on the device.

    With k projections, the standard deviation of the estimate of one cosine c is about
    ``(1 - c²) / sqrt(k)``, whatever the number of tensors: 0.125 at most for 64 projections. A value that is
    not known is NaN.

    Attributes:
        names: ``"total"`` and the names of the groups.
        micro_batches: the number K of micro-batches whose gradients were compared, 0-d float64.
        cosine: the mean cosine between pairs of micro-batches, ``(1 + G,) float64``.
        lowest: the smallest of these cosines, ``(1 + G,) float64``.
        lowest_pair: the micro-batches with the smallest cosine, ``(1 + G, 2) int64``, counted from 0.
        twins: for each micro-batch, the first one with an equal gradient, itself if there is none, ``(64,)
            int64``; from K on without meaning.
        rank_cosine: the mean cosine between pairs of ranks, ``(1 + G,) float64``.
        rank_cosines: the cosine of each of R ranks with the median of all ranks, projection by projection,
            ``(R,) float64``; of the total. NaN with less than 3 ranks, which have no majority.
        rank_twins: as ``twins``, of ranks, ``(R,) int64``.
        differing: which of T tensors have other gradients on other ranks after averaging, ``(T,) bool``.
    """

    names: tuple[str, ...]
    micro_batches: Tensor
    cosine: Tensor
    lowest: Tensor
    lowest_pair: Tensor
    twins: Tensor
    rank_cosine: Tensor
    rank_cosines: Tensor
    rank_twins: Tensor
    differing: Tensor


def cosines_of(
    names: Sequence[str], number: Tensor, gradients: Tensor, ranks: Tensor, differing: Tensor
) -> GradientCosines:
    """Return the cosines of a step.

    Args:
        names: of the 1 + G rows.
        number: the number of micro-batches, 0-d float64.
        gradients: projections of each micro-batch, ``(M, 1 + G, k)``; NaN in unknown ones.
        ranks: projections of each rank, ``(R, 1 + G, k)``.
        differing: as in the result.
    """
    units, of_ranks = unit(gradients), unit(ranks)
    size = len(gradients)
    by_row = units.transpose(0, 1)
    pairs = (by_row @ by_row.transpose(1, 2)).clamp(-1.0, 1.0)
    # each pair once; others are NaN
    is_pair = torch.ones(size, size, dtype=torch.bool, device=pairs.device).triu(1)
    pairs = torch.where(is_pair & ~pairs.isnan(), pairs, torch.inf).flatten(1)
    lowest, place = pairs.min(dim=1)
    median = of_ranks[:, 0].nanmedian(dim=0).values
    has_majority = (~of_ranks[:, 0, 0].isnan()).sum() > 2
    with_median = (of_ranks[:, 0] @ unit(median)).clamp(-1.0, 1.0)
    return GradientCosines(
        tuple(names),
        number.clamp(max=float(size)),
        mean_cosine(units),
        torch.where(lowest < torch.inf, lowest, torch.nan),
        torch.stack([place.div(size, rounding_mode="floor"), place % size], dim=1),
        twins(gradients[:, 0]),
        mean_cosine(of_ranks),
        torch.where(has_majority, with_median, torch.nan),
        twins(ranks[:, 0]),
        differing,
    )


def unit(projections: Tensor) -> Tensor:
    """Return vectors of norm 1 in the last dimension; NaN for a vector that is 0 or not finite."""
    return projections / sqrt((projections * projections).sum(dim=-1, keepdim=True))


def mean_cosine(units: Tensor) -> Tensor:
    """Return the mean cosine of all pairs of N vectors, ``(N, G, k) -> (G,)``; NaN ones are left out."""
    known = ~units[..., :1].isnan()
    count = known.sum(dim=(0, 2)).to(torch.float64)
    total = torch.where(known, units, 0.0).sum(dim=0)
    # the square of the sum of n vectors of norm 1 is n plus the cosines of n (n - 1) pairs
    mean = ((total * total).sum(dim=-1) - count) / (count * (count - 1.0))
    return torch.where(count > 1.0, mean.clamp(-1.0, 1.0), torch.nan)


def twins(projections: Tensor) -> Tensor:
    """Return for each of N vectors the place of the first that is equal, up to rounding, ``(N, k) -> (N,)``.

    Vectors that are 0, or not finite, equal no other. It compares neighbours in the order of one sum.
    """
    count, k = projections.shape
    squares = (projections * projections).sum(dim=1)
    known = (squares > 0.0) & squares.isfinite()
    projections = torch.where(known.unsqueeze(1), projections, torch.nan)
    weights = torch.arange(1, k + 1, dtype=torch.float64, device=projections.device).cos()
    order = torch.where(known, projections @ weights, torch.inf).argsort()
    ordered = projections[order]
    steps = ordered[1:] - ordered[:-1]
    is_same = (steps * steps).sum(dim=1) <= _ROUNDING**2 * squares[order][1:]
    run = torch.cat([is_same.new_zeros(1), is_same]).logical_not().cumsum(0) - 1
    first = torch.full_like(order, count).scatter_reduce(0, run, order, "amin")
    return torch.empty_like(order).scatter(0, order, first[run])


def differing_of(most: Tensor, least: Tensor) -> Tensor:
    """Return which tensors differ between ranks, from the largest and smallest projections, ``(T, P)``."""
    sizes = torch.maximum(most.abs(), least.abs()).amax(dim=1)
    return (most - least).amax(dim=1) > _DIFFERENT * sizes
