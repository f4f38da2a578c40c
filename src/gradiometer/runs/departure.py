"""Where two runs leave what rounding explains: the limits of distances, and the first that is beyond them.

Two runs that differ only by rounding, as by another kernel, layout or order of summation, drift apart: a
difference of weights makes one of gradients, and that one of the next weights. All distances here are
relative: ``norm(a - b) / max(norm(a), norm(b))``. In a step, let W be the distance of all weights together,
or the median distance of gradients if that is less: weights without effect, as a bias in front of a
normalization, may drift far apart. It is what the step has inherited, whatever happened before. Three laws
bound the distance of a gradient:

- It is about L * max(u, W), where u is the unit roundoff of the computation and L the sensitivity of that
  gradient. L changes little from step to step, so the last 10 compared steps tell it: this step explains
  ``H = max over them of d * max(1, W / W then)``.
- Where a function is not smooth (ReLU, max pooling, routing to experts), a share of about max(u, W) of its
  elements takes another branch. Each of these changes its share of the gradient entirely, so the distance is
  about ``sqrt(max(u, W))``, in steps where an element does; up to three times that where the shares of a few
  layers add up, and where few elements make most of a gradient. Elements whose gradient is near 0 do the same
  to the updates of Adam, which depend on the sign.
- A gradient that is much smaller than others of its size, such as that of a bias in front of a normalization,
  is 0 but for rounding: the terms of its sums cancel. If its norm is r times what is usual for its number of
  elements, its distance is up to ``16 u / r``.

The limit of a distance is ``max(3 H, 3 sqrt(max(u, W)), 16 u / r)``, times ``1 + 2 sqrt(2 / k)`` for the
deviation of estimates, 1.7 for 16 projections. A distance leaves what rounding explains if it is beyond the
limit in a step, and one is in each of the next two compared steps; if it does not last, it may be an element
that takes another branch. In the second to the 11th compared step, the root has a factor of 1.5: little
history tells which gradients have such elements, and all of them may begin to differ at once.

u is the smallest of 2**-24 (float32), 2**-11 (TF32, float16) and 2**-8 (bfloat16) that explains the distances
of a quarter of the gradients in the first steps. Without projections of weights, nothing tells a fault in
half of the gradients, other than a factor, from what a step has inherited.

Rounding has no preferred direction, so next to nothing of its differences is parallel to the gradient. A
wrong factor, as of a loss that is not averaged, is nothing else, and often in all gradients. W and u are
therefore found from the distances to the nearest multiple, so that a factor in all gradients is found as one
in a single gradient is. A departure of which at most a tenth is not parallel is a factor; it lasts as long as
at most half is not, even where the limit has grown with the weights.

An optimizer's updates, which are differences of projected weights, are compared in the same way: with the
distances of gradients in place of W, and not below the rounding of the weights. The gradients of a tensor's
elements may differ by orders of magnitude, and some are 0 but for rounding, as those of a bias of keys in
attention; Adam makes updates of these, too. Only history tells which tensors have such elements, so the limit
of the first 10 updates has twice the fourth root in place of the square root. A factor is found as in
gradients. One factor in most updates of a step, as of another learning rate, is a departure in any case, and
counts as one that lasts: the weights move apart by it, so that later limits tell nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from gradiometer.recorder import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# compared steps that tell what is usual, and those in which a distance must stay beyond its limit
_HISTORY: Final = 10
_LASTING: Final = 3
# factors of the three laws
_OF_HISTORY: Final = 3.0
_OF_ROOT: Final = 3.0
_OF_TERMS: Final = 16.0
# of the second law, while there is little history
_EARLY: Final = 1.5
# the share of a factor's distance that is not parallel to the gradient, in its first step and in later ones
_ACROSS: Final = 0.1
_ACROSS_LATER: Final = 0.5
# the relative deviation of factors that are the same
_SHARED: Final = 0.01
# unit roundoffs, and the largest distance of most gradients that each explains
ROUNDOFFS: Final = {
    "float32": (2.0**-24, 2e-5),
    "TF32 or float16": (2.0**-11, 2e-3),
    "bfloat16": (2.0**-8, 0.25),
}


class Measured(NamedTuple):
    """Distances between two runs in S compared steps of T tensors, relative and float64.

    Attributes:
        grads: ``(S, T)``, NaN where there is none.
        across: distances of gradients from the nearest multiple of each other, ``(S, T)``.
        factors: of which multiple of the first run's gradients those of the second are nearest, ``(S, T)``.
        size: norms of gradients, relative to what is usual for their numbers of elements, ``(S, T)``.
        total: of all weights together, ``(S,)``; None if they are not projected.
        updates: of the updates since the compared step before, ``(S, T)``; None likewise.
        updates_across, update_factors: what `across` and `factors` are of gradients; None likewise.
        update_size: the norm of these updates, relative to that of the weights, ``(S, T)``; None likewise.
        consecutive: whether no step is between a compared step and the one before, ``(S,) bool``.
        deviation: the relative standard deviation of a squared distance, ``sqrt(2 / k)``.
        roundoff: the largest unit roundoff of the parameters' dtypes.
    """

    grads: Tensor
    across: Tensor
    factors: Tensor
    size: Tensor
    total: Tensor | None
    updates: Tensor | None
    updates_across: Tensor | None
    update_factors: Tensor | None
    update_size: Tensor | None
    consecutive: Tensor
    deviation: float
    roundoff: float = 2.0**-24


@dataclass(frozen=True)
class Departure:
    """The first step and tensor that leave what rounding explains.

    Attributes:
        step: the step.
        name: ``w.grad`` for a gradient, the first that leaves in the order of the backward pass; ``w.update``
            for the last update of a weight before this step.
        kind: ``"grads"`` or ``"updates"``.
        distance: its relative distance.
        explained: the distance that the compared steps before explain; in the first one, the limit.
        ratio: ``distance / explained``.
        lasts: whether a distance is beyond its limit in each of the next two compared steps, too; None if
            there are fewer, or if the limits in them are above this distance. True if most updates have one
            factor in this step.
        factor: of which multiple of the first run's tensor the second run's is; None if it is not nearly one
            of it.
        shared: the share of tensors of this kind and step that have this factor, too, of those that tell.
    """

    step: int
    name: str
    kind: str
    distance: float
    explained: float
    ratio: float
    lasts: bool | None
    factor: float | None = None
    shared: float = 0.0


class Found(NamedTuple):
    """What rounding explains, and what it does not.

    Attributes:
        rounding: the key of `ROUNDOFFS` that explains the first steps.
        limits: the largest distances of gradients that rounding explains, ``(S, T)``.
        update_limits: those of updates; None if weights are not projected.
        departure: the first that is beyond; None if there is none.
    """

    rounding: str
    limits: Tensor
    update_limits: Tensor | None
    departure: Departure | None


class _Beyond(NamedTuple):
    """Where distances x are beyond their limits, ``(S, T)``.

    ``beyond`` and ``limits`` are lists: for the steps themselves, and for the steps after them, by what was
    before. ``usual`` is what the steps before explain; ``is_factor`` tells where b is nearly a multiple of a,
    by one of ``factors``.
    """

    x: Tensor
    beyond: list[Tensor]
    usual: Tensor
    limits: list[Tensor]
    is_factor: Tensor
    factors: Tensor


def find(measured: Measured, steps: Sequence[int], names: Sequence[str]) -> Found:
    """Return the limits, and the first step and tensor beyond them: one that lasts, if there is one."""
    grads, across, margin = measured.grads, measured.across, 1 + 2 * measured.deviation
    rounding, roundoff = _roundoff(across, measured.roundoff)
    inherited = across.nanmedian(dim=1).values
    if measured.total is not None:
        inherited = torch.fmin(inherited, measured.total)
    inherited = inherited.nan_to_num(nan=0.0).clamp(min=roundoff)[:, None]
    # of a gradient that is 0 but for rounding, the terms of its sums round
    small = _OF_TERMS * roundoff / measured.size.nan_to_num(nan=1.0)
    root = _OF_ROOT * inherited.sqrt()
    # which tensors have such elements is not known yet
    root[1 : _HISTORY + 1] *= _EARLY
    limit = margin * torch.maximum(root, small)
    found = {"grads": _beyond(grads, inherited, limit, margin, across, measured.factors)}
    update_limits: Tensor | None = None
    if measured.updates is not None:
        # of one step, updates come before the gradients
        found = {"updates": _updates(measured, roundoff, margin), **found}
        update_limits = found["updates"].limits[0]
    limits = found["grads"].limits[0]
    place = _first([one.beyond for one in found.values()])
    if place is None:
        return Found(rounding, limits, update_limits, None)
    kind, row, column, lasts = [*found][place[0]], *place[1:]
    one = found[kind]
    distance = float(one.x[row, column])
    explained = max(float(one.usual[row, column]), roundoff) if row else float(one.limits[0][row, column])
    if lasts is False:
        # where a limit has grown above the distance, nothing tells
        failed = [k for k in range(1, _LASTING) if not one.beyond[k][row, column]]
        if failed and all(float(one.limits[k][row, column]) >= distance for k in failed):
            lasts = None
    factor, shared = _factor(one, row, column)
    departure = Departure(
        step=steps[row],
        name=KINDS[kind].label(names[column]),
        kind=kind,
        distance=distance,
        explained=explained,
        ratio=distance / explained,
        lasts=lasts,
        factor=factor,
        shared=shared,
    )
    return Found(rounding, limits, update_limits, departure)


def _updates(measured: Measured, roundoff: float, margin: float) -> _Beyond:
    """Return where updates are beyond their limits."""
    x, across, factors = measured.updates, measured.updates_across, measured.update_factors
    if x is None or across is None or factors is None or measured.update_size is None:
        msg = "find: updates are given without their norms, factors, or distances across"
        raise ValueError(msg)
    own = measured.grads.nan_to_num(nan=0.0).clamp(min=roundoff)
    before = own.roll(1, 0)
    before[0] = roundoff
    # of a step that was not compared, the gradients are not known
    drive = _recent(torch.where(measured.consecutive[:, None], before, torch.maximum(own, before)))
    # an update of 0 has no direction
    rounded = 4 * measured.roundoff / measured.update_size.nan_to_num(nan=0.0)
    usual = _OF_ROOT * margin * drive.sqrt() + rounded
    # of the first updates, what is usual is not known
    first, limit = slice(_HISTORY + 1), usual.clone()
    limit[first] = 2 * _OF_ROOT * margin * drive[first] ** 0.25 + rounded[first]
    found = _beyond(x, drive, limit, margin, across, factors)
    # one factor in most updates is not rounding, in the first ones either
    parallel = (across < _ACROSS * x) & (x > usual)
    middle = torch.where(parallel, factors, math.nan).nanmedian(dim=1, keepdim=True).values
    parallel &= (factors / middle - 1).abs() < _SHARED
    known = x.isfinite().sum(dim=1, keepdim=True)
    number = parallel.sum(dim=1, keepdim=True)
    parallel &= (2 * number > known) & (number > 1)
    for beyond in found.beyond:
        beyond.logical_or_(parallel[: len(beyond)])
    return found._replace(is_factor=found.is_factor | parallel)


def _factor(found: _Beyond, row: int, column: int) -> tuple[float | None, float]:
    """Return the factor of a tensor, None if it is none, and the share of tensors that have it."""
    factors, factor = found.factors[row], float(found.factors[row, column])
    # of a tensor of few elements only others tell
    middle = float(factors[found.is_factor[row]].nanmedian())
    if not found.is_factor[row, column] and not abs(factor / middle - 1) < _SHARED:
        return None, 0.0
    known = factors[factors.isfinite()]
    return factor, float(((known / factor - 1).abs() < _SHARED).to(torch.float64).mean())


def _beyond(
    x: Tensor, inherited: Tensor, root: Tensor, margin: float, across: Tensor, factors: Tensor
) -> _Beyond:
    known, inherited = x.nan_to_num(nan=0.0), inherited.expand_as(x)
    explained = x
    beyond: list[Tensor] = []
    limits: list[Tensor] = []
    for later in range(min(_LASTING, len(x))):
        now, usual = inherited[later:], torch.zeros_like(x[later:])
        for back in range(1, min(_HISTORY, len(x) - later - 1) + 1):
            size = len(x) - later - back
            growth = (now[back:] / inherited[:size]).clamp(min=1)
            torch.maximum(usual[back:], known[:size] * growth, out=usual[back:])
        limits.append(torch.maximum(_OF_HISTORY * margin * usual, root[later:].expand_as(usual)))
        beyond.append(x[later:] > limits[-1])
        if not later:
            explained = usual
    is_factor = (across < _ACROSS * x) & beyond[0]
    for later in range(1, len(beyond)):
        beyond[later] |= is_factor[:-later] & (across < _ACROSS_LATER * x)[later:]
    return _Beyond(x, beyond, explained, limits, is_factor, factors)


def _first(found: list[list[Tensor]]) -> tuple[int, int, int, bool | None] | None:
    """Return the table, row and column of the first that is beyond its limit, and whether that lasts."""
    now = torch.stack([beyond[0] for beyond in found])
    lasts = torch.zeros_like(now) if len(found[0]) < _LASTING else now.clone()
    for table, beyond in zip(lasts, found, strict=True):
        for later in beyond[1:]:
            table[: len(later)] &= later
            table[len(later) :] = False
    rows, lasting = (x.any(dim=2).any(dim=0).nonzero().flatten().tolist() for x in (now, lasts))
    if not rows:
        return None
    # a departure may last in another tensor than the one where it begins
    row = next(row for row in rows if not lasting or row > lasting[0] - _LASTING)
    table, column = now[:, row].nonzero()[0].tolist()
    is_known = lasting or row + _LASTING <= now.shape[1]
    return table, row, column, bool(lasting) if is_known else None


def _recent(x: Tensor) -> Tensor:
    """Return the largest of each compared step and those that tell what is usual."""
    found = x.clone()
    for back in range(1, min(_HISTORY, len(x) - 1) + 1):
        torch.maximum(found[back:], x[:-back], out=found[back:])
    return found


def _roundoff(across: Tensor, least: float) -> tuple[str, float]:
    """Return the rounding that explains the distances in the first compared steps, and its unit roundoff."""
    # of a quarter of the gradients, so that a fault in the others is not taken for rounding
    level = torch.nanquantile(across[:_LASTING], 0.25, dim=1)
    level = level[~level.isnan()]
    lowest = float(level.min()) if len(level) else 0.0
    fits = {
        name: roundoff for name, (roundoff, most) in ROUNDOFFS.items() if lowest <= most and roundoff >= least
    }
    name = next(iter(fits), [*ROUNDOFFS][-1])
    return name, max(ROUNDOFFS[name][0], least)
