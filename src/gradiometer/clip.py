"""Clipping by the collected norm: the read that serves telemetry serves clipping too.

The coefficient is torch's, ``min(1, max_norm / (norm + 1e-6))``, of a norm that does not overflow and
leaves NaN and Inf out: no finite gradient becomes 0 or NaN by it, whatever its neighbours are.
"""

from __future__ import annotations

import math
import types
import warnings
from numbers import Real
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from gradiometer import derived
from gradiometer.collect import grads_of, measure, over_ranks, settled
from gradiometer.inputs import Named, is_plain_subclass, local_shards, named_parameters
from gradiometer.materialize import materialize
from gradiometer.scaling import Part, parts_of, scale_
from gradiometer.schema import DEFAULT_THRESHOLDS, Thresholds
from gradiometer.stats import TensorStats

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradiometer.inputs import Parameters
    from gradiometer.ranks import Ranks

__all__ = ["clip_coefficient", "clip_grad_norm_", "collect_and_clip_"]

# torch's own: what is added to a norm before it divides
_EPS: Final = 1e-6
# elements that are widened to fp64 at a time, for other orders than 2 and infinity
_PIECE: Final = 2**20
_MAX: Final = torch.finfo(torch.float64).max
# names in an error message
_NAMES: Final = 10


def clip_grad_norm_(
    parameters: Tensor | Parameters,
    max_norm: float | Tensor,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,  # noqa: FBT001, FBT002 torch's signature
    foreach: bool | None = None,  # noqa: FBT001
    *,
    reduce: bool | Ranks | None = None,
) -> Tensor:
    """Clip the norm of all gradients together, in place; `torch.nn.utils.clip_grad_norm_` without its faults.

    Works the same inside and outside ``torch.compile``, and does not wait for a device. Where torch
    is right the results are torch's, up to the rounding of its norm. Three things differ:

    - The norm is computed in fp64, and the coefficient is never rounded to half precision. So finite
      gradients are not clipped to 0 where the norm overflows fp16 or fp32.
    - NaN and infinite elements do not count when the coefficient is computed, and stay what and where
      they are (with ``max_norm=0`` an Inf becomes NaN, as ``inf * 0`` is). The returned norm tells of
      them, and finite elements are clipped as if they were not there. In torch all gradients
      turn NaN, or 0.
    - Outside a compiled step nothing is written where nothing is clipped; torch multiplies by 1.

    Otherwise it is torch's formula, ``c = min(1, max_norm / (norm + 1e-6))``: gradients are unchanged
    while ``norm + 1e-6 <= max_norm``. A gradient shared by several parameters counts for each of
    them and is scaled once; in a compiled function where it is the same tensor, not another view of
    it. Gradients on the CPU beside others on a device have to wait for it.

    With several ranks the norm is that of the whole model, and every rank multiplies what it holds by the
    same number. DTensors may be of several meshes, as with expert parallelism, and ranks may hold
    different layers, as the stages of a pipeline do: ``reduce=gm.Ranks(model)`` is all that they need.

    Args:
        parameters: a module, a tensor, or parameters as a mapping, an iterable, or (name, parameter)
            pairs; names make better errors. Those without a gradient are left out.
        max_norm: not negative; ``math.inf`` clips nothing. A tensor of one element is not looked
            at, so that in a compiled step it changes without the recompilation that each new
            number costs: NaN clips nothing there, and what is negative is 0.
        norm_type: any order that `torch.linalg.vector_norm` takes, ``"inf"`` too. Orders other
            than 2 and infinity read the gradients several times more, in fp64 copies of a million
            elements.
        error_if_nonfinite: whether to wait for the norm, in one transfer, and raise if it is NaN or inf.
        foreach: ignored; there is one implementation, and it takes all tensors at once.
        reduce: whether the norm is that of all ranks: True, False, or what they have agreed on,
            `gradiometer.Ranks`; None: where a parameter is a DTensor. All ranks have to come here then.
            Orders other than 2 and infinity take two more collectives, of one number.

    Returns:
        The norm before clipping, 0-d float64 on the gradients' device; 0 with no gradient.

    Raises:
        ValueError: for a ``max_norm`` that is negative, NaN or no number; with several ranks for an order
            that is not above 0.
        TypeError: for a gradient that cannot be measured, or not be scaled in place.
        RuntimeError: with ``error_if_nonfinite``, for a norm that is NaN or inf; the message names
            the gradients, and of several ranks the first that has such an element. Inside a compiled
            function, where nothing can be raised from a value.
        RankError: where ranks differ or one does not answer.

        Gradients are then unchanged, on every rank.

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.Linear(2, 1)
    >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
    >>> gm.clip_grad_norm_(model.parameters(), 1.0)
    tensor(5.0990, dtype=torch.float64)
    >>> model.weight.grad
    tensor([[0.5883, 0.7845]])
    """
    del foreach
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    elif not torch.compiler.is_compiling() and isinstance(parameters, types.GeneratorType):
        parameters = list(parameters)
        if not parameters:
            said = "`parameters` is an empty generator, no gradient clipping will occur."
            warnings.warn(said, stacklevel=2)
    what = "clip_grad_norm_"
    return _clip(parameters, max_norm, norm_type, error_if_nonfinite, what, reduce=reduce)[1]


def collect_and_clip_(
    model: Parameters,
    max_norm: float | Tensor,
    *,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
    inv_scale: Tensor | float | None = None,
    skip_nonfinite: bool = False,
    reduce: bool | Ranks | None = None,
) -> TensorStats:
    """Measure every gradient and clip their norm, in place, after one read for both.

    Args:
        model: as for `gradiometer.collect_grads`.
        max_norm: as for `clip_grad_norm_`.
        norm_type: as for `clip_grad_norm_`.
        error_if_nonfinite: as for `clip_grad_norm_`.
        thresholds: where flags begin.
        inv_scale: as for `gradiometer.collect_grads`. The norm and ``max_norm`` are those of the
            unscaled gradients; the gradients stay scaled.
        skip_nonfinite: as for `gradiometer.collect_grads`.
        reduce: as for `clip_grad_norm_`.

    Returns:
        TensorStats of the gradients before clipping; with several ranks those of the whole model, and
        ``.local`` of them this rank's.

    Raises:
        ValueError, TypeError, RuntimeError, RankError: as for `clip_grad_norm_`.

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.Linear(2, 1)
    >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
    >>> gm.collect_and_clip_(model, 1.0).total_norm, gm.grad_norm(model) < 1.0
    (tensor(5.0990, dtype=torch.float64), True)
    """
    options: dict[str, Any] = {"thresholds": thresholds, "skip_nonfinite": skip_nonfinite}
    options |= {"inv_scale": inv_scale, "reduce": reduce}
    return _clip(model, max_norm, norm_type, error_if_nonfinite, "collect_and_clip_", **options)[0]


def clip_coefficient(stats: TensorStats, max_norm: float | Tensor, norm_type: float | str = 2.0) -> Tensor:
    """Return what gradients have to be multiplied by so that their norm is at most ``max_norm``.

    ``min(1, max_norm / (norm + 1e-6))``, of the finite elements' norm: never NaN. In a step that
    updates by hand it serves as a factor of the learning rate, and no gradient is written.

    Args:
        stats: of all tensors that are to be clipped together.
        max_norm: as for `clip_grad_norm_`.
        norm_type: 2 or infinity, which ``stats`` hold.

    Returns:
        0-d float64 from 0 to 1, on the device of ``stats``.

    Raises:
        ValueError: for a ``max_norm`` that is negative, NaN or no number, and for other orders.
        TypeError: for what are no stats.

    >>> import torch, gradiometer as gm
    >>> gm.clip_coefficient(gm.collect([torch.tensor([3.0, -4.0])]), 10.0)
    tensor(1., dtype=torch.float64)
    """
    what = "clip_coefficient"
    if not isinstance(stats, TensorStats):
        msg = f"{what}: expected the TensorStats of the gradients, as collect_grads returns them; got "
        raise TypeError(msg + type(stats).__name__)
    order, limit = _order(norm_type, what), _limit(max_norm, what)
    if order not in {2.0, math.inf}:
        msg = f"{what}: norm_type must be 2 or inf, which the stats hold, got {norm_type!r}; "
        raise ValueError(msg + "clip_grad_norm_ takes any order")
    with torch.no_grad():
        return _coefficient(_norms_of_stats(stats, order).finite, limit)


class _Norms(NamedTuple):
    """The norm as torch would say it, and that of the finite elements; 0-d float64, one device."""

    said: Tensor
    finite: Tensor


@torch.no_grad()
def _clip(
    model: Parameters,
    max_norm: float | Tensor,
    norm_type: float | str,
    error_if_nonfinite: bool,  # noqa: FBT001
    what: str,
    *,
    reduce: bool | Ranks | None,
    inv_scale: Tensor | float | None = None,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
    skip_nonfinite: bool = False,
) -> tuple[TensorStats, Tensor]:
    """Return the stats and the norm before clipping. All checks come before the first write."""
    order, limit = _order(norm_type, what), _limit(max_norm, what)
    if error_if_nonfinite and torch.compiler.is_compiling():
        msg = f"{what}: error_if_nonfinite=True has to wait for the norm, and a compiled function cannot; "
        raise RuntimeError(msg + "leave it out, return stats.found_inf and look at it outside")
    parameters = named_parameters(model, what)
    grads, home = grads_of(parameters, what)
    parts: list[Part] = []
    norms: _Norms | None = None
    over: Ranks | None = None

    def measured(ranks: Ranks | None) -> TensorStats:
        # whatever is refused is refused before other ranks hear of this one
        nonlocal parts, norms, over
        if ranks is not None and ranks.size > 1:
            over = ranks
            if order <= 0.0:
                msg = f"{what}: with several ranks norm_type must be above 0, got {norm_type!r}"
                raise ValueError(msg)
        local = settled(grads, parameters, ranks, what)
        stats = measure(local, what, thresholds, inv_scale, skip_nonfinite=skip_nonfinite, home=home)
        parts = parts_of(grads, what)
        # a complex element is measured as two real ones, but its largest magnitude is its own
        if order != 2.0 and (order != math.inf or _any_complex(local, over)):
            norms = _norms_of_tensors(_counted(local, over), order, stats.columns.device)
        return stats

    stats = over_ranks(reduce, parameters, what, measured)
    if norms is None:
        norms = _norms_of_stats(stats, order)
    else:
        if over is not None:
            norms = _as_torch_says(stats.total, over.norm_of(norms.finite, order))
        if inv_scale is not None and order != 0.0:
            norms = _Norms(*(_unscaled(norm, inv_scale) for norm in norms))
    if error_if_nonfinite:
        _refuse_nonfinite(stats, norms.said, order, over)
    coefficient = _coefficient(norms.finite, limit)
    for part in parts:
        scale_(part, coefficient)
    return stats, norms.said


# what is asked for


def _order(norm_type: float | str, what: str) -> float:
    try:
        order = float(norm_type)
    except (TypeError, ValueError):
        order = math.nan
    if order != order:  # noqa: PLR0124 NaN, which math.isnan tells no Dynamo
        msg = f"{what}: norm_type must be the order of a norm, 2 or 'inf' say, got {norm_type!r}"
        raise ValueError(msg)
    return order


def _limit(max_norm: float | Tensor, what: str) -> float | Tensor:
    if isinstance(max_norm, Tensor):
        if max_norm.numel() == 1 and not max_norm.is_complex() and max_norm.dtype != torch.bool:
            return max_norm.detach()
        got = f"a tensor of shape {tuple(max_norm.shape)} and dtype {max_norm.dtype}"
    else:
        # NumPy's scalars too
        if isinstance(max_norm, Real) and max_norm >= 0:
            return float(max_norm)
        # of a number that Dynamo has made an input of the graph there is no repr
        got = f"{max_norm}" if isinstance(max_norm, Real) else repr(max_norm)
    msg = f"{what}: max_norm must be a number that is not negative, or a tensor of one; got {got}"
    raise ValueError(msg)


# norms


def _norms_of_stats(stats: TensorStats, order: float) -> _Norms:
    total = stats.total
    top = derived.value(total, "abs_max")
    if order == math.inf:
        return _as_torch_says(total, top)
    norm = derived.value(total, "finite_norm")
    # beyond 1e154 the squares of fp64 overflow: this is no less than the norm
    bound = top * derived.value(total, "numel").sqrt()
    return _Norms(_as_torch_says(total, norm).said, torch.where(norm < math.inf, norm, bound))


def _as_torch_says(total: Tensor, norm: Tensor) -> _Norms:
    """Return a norm of the finite elements, and what it is with the others."""
    nan, inf = (derived.value(total, name) for name in ("n_nan", "n_inf"))
    said = norm + torch.where(inf > 0, math.inf, 0.0) + torch.where(nan > 0, math.nan, 0.0)
    return _Norms(said, norm)


def _any_complex(named: Named, ranks: Ranks | None) -> bool:
    """Tell whether any gradient is complex; with ranks, on any of them."""
    if ranks is None:
        return any([x.is_complex() for x in named.tensors])
    return any([holding.dtype.startswith("complex") for holding in ranks.agreement.holdings])


def _counted(named: Named, ranks: Ranks | None) -> list[Tensor]:
    """Return the tensors that this rank counts, and no other one with a copy; of DTensors the shards."""
    names, tensors = local_shards(named, "clip")
    if ranks is None:
        return tensors
    return [x for name, x in zip(names, tensors, strict=True) if name in ranks.counted]


def _norms_of_tensors(tensors: list[Tensor], order: float, home: torch.device) -> _Norms:
    """Compute torch's own norms in fp64, and that of finite elements, one piece of a tensor at a time."""
    # what adds nothing to a sum of powers
    nothing = 0.0 if order >= 0 else math.inf
    said, finite = [], []
    for tensor in tensors:
        if tensor.numel() > 0:
            pieces = [
                (vector_norm(x, order), _norm_in_range(torch.where(x.isfinite(), x, nothing), order))
                for x in _wide(tensor)
            ]
            of_all, of_finite = (torch.stack(norms) for norms in zip(*pieces, strict=True))
            if order == 0.0:
                of_all, of_finite = of_all.sum(), of_finite.sum()
            else:
                of_all, of_finite = vector_norm(of_all, order), _norm_in_range(of_finite, order)
            said.append(of_all.to(home, non_blocking=True))
            finite.append(of_finite.to(home, non_blocking=True))
    if not said:
        none = torch.zeros((), dtype=torch.float64, device=home)
        return _Norms(none, none)
    # torch's norm of norms: of order 0 that counts tensors, not elements
    return _Norms(vector_norm(torch.stack(said), order), _norm_in_range(torch.stack(finite), order))


def _norm_in_range(x: Tensor, order: float) -> Tensor:
    """Return what torch's own norm would be if no power left the range of fp64, as 1e35 to the tenth does."""
    if order == 0.0 or math.inf in {order, -order}:
        exact: Tensor = vector_norm(x, order)
        return exact
    # in units of what weighs most
    size = x.abs()
    unit = size.amax() if order > 0.0 else size.amin()
    unit = torch.where((unit > 0.0) & (unit < math.inf), unit, 1.0)
    norm: Tensor = vector_norm(size / unit, order) * unit
    return norm


def _wide(tensor: Tensor) -> Iterator[Tensor]:
    x = tensor.as_subclass(Tensor) if is_plain_subclass(type(tensor)) else tensor
    if x.layout == torch.sparse_coo:
        values = x.coalesce().values()
        # for all zeros that are not stored
        zeros = values.new_zeros(1 if values.numel() < x.numel() else 0)
        x = torch.cat([values.reshape(-1), zeros])
    for piece in x.reshape(-1).split(_PIECE):
        yield piece.to(torch.complex128 if piece.is_complex() else torch.float64)


def _unscaled(norm: Tensor, inv_scale: Tensor | float) -> Tensor:
    if isinstance(inv_scale, Tensor):
        inv_scale = _arrived(inv_scale.detach(), norm.device).reshape(()).abs()
    return norm * inv_scale


def _arrived(number: Tensor, device: torch.device) -> Tensor:
    # on the CPU it is used at once
    return number.to(device, torch.float64, non_blocking=device.type != "cpu")


def _coefficient(norm: Tensor, limit: float | Tensor) -> Tensor:
    if isinstance(limit, Tensor):
        limit = _arrived(limit, norm.device).reshape(())
    else:
        limit = derived.number(limit, norm.device)
    ratio = limit / (norm + _EPS).clamp(max=_MAX)
    # what a tensor holds was not looked at: a NaN clips nothing
    return derived.realized(torch.where(ratio < 1.0, ratio, 1.0)).clamp(min=0.0)


def _refuse_nonfinite(stats: TensorStats, norm: Tensor, order: float, ranks: Ranks | None) -> None:
    report, said = materialize((stats, norm))
    if said.isfinite():
        return
    rows = [row for row in report if row.n_nonfinite]
    found = [f"{row.name!r} has {row.n_nan} NaN and {row.n_inf} Inf of {row.numel}" for row in rows[:_NAMES]]
    if ranks is not None:
        where = [ranks.where(row.name, report.ranks[row.name]) for row in rows[:_NAMES]]
        found = [f"{text} (first on {place})" for text, place in zip(found, where, strict=True)]
    if len(rows) > _NAMES:
        found.append(f"{len(rows) - _NAMES} more")
    reason = ", ".join(found) or "All elements are finite, but their powers are beyond float64"
    # it begins as torch's does
    msg = f"The total norm of order {order} for gradients from `parameters` is non-finite, so it cannot be"
    msg += f" clipped. {reason}. To clip finite elements and leave the others, set `error_if_nonfinite=False`"
    raise RuntimeError(msg)
