"""Clipping by the collected norm: telemetry and clipping share one read of the gradients.

The coefficient is torch's, ``min(1, max_norm / (norm + 1e-6))``, with a norm that does not overflow and
leaves NaN and Inf out. So NaN, Inf or a huge norm does not turn all gradients into 0 or NaN. A module in
place of ``max_norm`` decides otherwise, see `gradiometer.control.adaptive_clip`.
"""

from __future__ import annotations

import math
import types
import warnings
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from gradiometer.columns import DEFAULT_THRESHOLDS, Thresholds, number, take
from gradiometer.control.adaptive_clip import AdaptiveClip, Gradients, stats_given
from gradiometer.control.clip_events import clip_begins, clip_ended
from gradiometer.control.scale import Part, coefficient_of, limit_of, parts_of, scale_, unscaled
from gradiometer.control.weight_norm_clip import WeightNormClip
from gradiometer.distributed import is_active
from gradiometer.inputs import check, is_dtensor, named_parameters, present
from gradiometer.stats import (
    Norms,
    TensorStats,
    finite_norm,
    grads_of,
    materialize,
    measure,
    norms_of,
    order_of,
    over_ranks,
    over_ranks_with,
    redistributed,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradiometer.distributed import Ranks
    from gradiometer.inputs import Named, Parameters

# maximum number of names in an error message
_NAMES: Final = 10


def clip_grad_norm_(
    parameters: Tensor | Parameters,
    max_norm: float | Tensor | AdaptiveClip,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,  # noqa: FBT001, FBT002 torch's signature
    foreach: bool | None = None,  # noqa: FBT001
    *,
    reduce: bool | Ranks | None = None,
) -> Tensor:
    """Clip the total norm of all gradients in place; a robust `torch.nn.utils.clip_grad_norm_`.

    Works the same inside and outside ``torch.compile``, and does not wait for a device. Results equal
    torch's up to the rounding of its norm, with three differences:

    - The norm is computed in fp64, and the coefficient is never rounded to half precision. So finite
      gradients are not clipped to 0 if the norm overflows fp16 or fp32.
    - NaN and infinite elements are left out of the coefficient and stay unchanged (except that with
      ``max_norm=0`` an Inf becomes NaN, as ``inf * 0`` does). The returned norm includes them, and finite
      elements are clipped as if they were not there. In torch all gradients become NaN or 0.
    - Outside a compiled step nothing is written if nothing is clipped; torch multiplies by 1. On a GPU this
      holds only for gradients that the kernels can scale, so not if two parameters share a gradient.

    The formula is torch's, ``c = min(1, max_norm / (norm + 1e-6))``: gradients are unchanged
    while ``norm + 1e-6 <= max_norm``. A gradient shared by several parameters counts for each of
    them and is scaled once; in a compiled function only if it is the same tensor, not another view
    of it. If some gradients are on the CPU and others on a device, clipping those on the CPU waits for it.

    Merged over ranks (``reduce``), the norm is that of the whole model, and every rank scales its part by
    the same number. DTensors may be on several meshes, as with expert parallelism, and ranks may hold
    different layers, as with pipeline stages; both only need ``reduce=gm.Ranks(model)``.

    Args:
        parameters: a module, a tensor, or parameters as a mapping, an iterable, or (name, parameter)
            pairs; names make better errors. Parameters without a gradient are left out.
        max_norm: not negative; ``math.inf`` clips nothing. The value of a one-element tensor is not
            checked, so that it can change in a compiled step without the recompilation that each new
            number costs. A tensor that is NaN clips nothing, and a negative one counts as 0.
            Or a module that decides itself, such as `gradiometer.ZScoreClip`.
        norm_type: any order of `torch.linalg.vector_norm`, including ``"inf"``. Orders other
            than 0, 2 and infinity read the gradients once more, in fp64 copies of a million elements.
        error_if_nonfinite: whether to wait for the norm, in one transfer, and raise if it is NaN or inf.
        foreach: ignored; the only implementation takes all tensors at once.
        reduce: whether the norm is that of all ranks: True, False, or a `gradiometer.Ranks`; None: only
            if a parameter is a DTensor. If so, all ranks have to make this call. Orders other than 0, 2
            and infinity take one or two more collectives of one number.

    Returns:
        The norm before clipping, 0-d float64 on the gradients' device; 0 without gradients.

    Raises:
        ValueError: for a ``max_norm`` that is negative, NaN or not a number, and for an invalid order.
        TypeError: for a gradient that cannot be measured, or cannot be scaled in place.
        RuntimeError: with ``error_if_nonfinite``, for a norm that is NaN or inf; the message names
            the gradients and, with several ranks, the first rank with such an element. It is also
            raised inside a compiled function, where no error can depend on a value.
        RankError: if the ranks disagree or one does not respond.

    If an error is raised, the gradients are unchanged on every rank.

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
            text = "`parameters` is an empty generator, no gradient clipping will occur."
            warnings.warn(text, stacklevel=2)
    what = "clip_grad_norm_"
    return _clip(parameters, max_norm, norm_type, error_if_nonfinite, what, reduce=reduce)[1]().norm


@torch.no_grad()
def clip_grads_with_norm_(
    parameters: Tensor | Parameters,
    max_norm: float | Tensor,
    total_norm: float | Tensor,
    foreach: bool | None = None,  # noqa: FBT001 torch's signature
) -> None:
    """Clip gradients in place by a precomputed norm, as `torch.nn.utils.clip_grads_with_norm_`.

    The coefficient is ``c = min(1, max_norm / (total_norm + 1e-6))``, as in `clip_grad_norm_`: it is never
    rounded to half precision, NaN and infinite elements stay unchanged, and outside a compiled step nothing
    is written if nothing is clipped, with the same exception on a GPU. Works the same inside and outside
    ``torch.compile``. It waits for a device only to clip gradients on the CPU by a norm on that device.

    A norm that is NaN or inf tells nothing about the finite elements, so it clips nothing; in torch
    all gradients become NaN or 0. `clip_grad_norm_` clips the finite elements of such gradients.

    Args:
        parameters: as for `clip_grad_norm_`; ``total_norm`` need not be their norm. For a DTensor the part
            that this rank holds is scaled, so ``total_norm`` has to be the same on all ranks.
        max_norm: as for `clip_grad_norm_`.
        total_norm: a number or a one-element tensor, as `gradiometer.total_norm` or
            `torch.nn.utils.get_total_norm` returns it; not negative. The value of a tensor is not checked;
            a negative one clips nothing.
        foreach: ignored; the only implementation takes all tensors at once.

    Raises:
        ValueError: for an invalid ``max_norm`` or ``total_norm``, such as a negative number.
        TypeError: for a gradient that cannot be scaled in place. Gradients are then unchanged.

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.Linear(2, 1)
    >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
    >>> norm = gm.total_norm([p.grad for p in model.parameters()])
    >>> gm.clip_grads_with_norm_(model.parameters(), 1.0, norm)
    >>> model.weight.grad
    tensor([[0.5883, 0.7845]])
    """
    del foreach
    what = "clip_grads_with_norm_"
    limit = limit_of(max_norm, "max_norm", what)
    if isinstance(total_norm, Tensor) and is_dtensor(type(total_norm)):
        total_norm = total_norm.full_tensor()  # type: ignore[attr-defined]
    if not isinstance(total_norm, float) or total_norm == total_norm:  # noqa: PLR0124 NaN is a norm
        total_norm = limit_of(total_norm, "total_norm", what)
    source = [parameters] if isinstance(parameters, Tensor) else parameters
    named = named_parameters(source, what)
    grads, _ = grads_of(named, what)
    check(grads, what)
    parts = parts_of(grads, what)
    if not parts:
        return
    if isinstance(total_norm, Tensor):
        norm = total_norm.to(torch.float64).reshape(())
    else:
        devices = [part.tensors[0].device for part in parts]
        device = next((device for device in devices if device.type != "cpu"), devices[0])
        norm = number(total_norm, device)
    is_norm = norm.isfinite() & (norm >= 0.0)
    coefficient = torch.where(is_norm, coefficient_of(norm, limit), 1.0)
    clip = clip_begins(named.tensors, limit, lambda: coefficient)
    for part in parts:
        scale_(part, coefficient)
    clip_ended(clip)


def collect_and_clip_(
    model: Parameters,
    max_norm: float | Tensor | AdaptiveClip,
    *,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
    inv_scale: Tensor | float | None = None,
    skip_nonfinite: bool = False,
    fingerprint: bool = False,
    reduce: bool | Ranks | None = None,
) -> TensorStats:
    """Measure every gradient and clip the total norm in place, with one read for both.

    Args:
        model: as for `gradiometer.collect_grads`.
        max_norm: as for `clip_grad_norm_`.
        norm_type: as for `clip_grad_norm_`.
        error_if_nonfinite: as for `clip_grad_norm_`.
        thresholds: limits of the flags.
        inv_scale: as for `gradiometer.collect_grads`. The norm and ``max_norm`` are those of the
            unscaled gradients; the gradients stay scaled.
        skip_nonfinite: as for `gradiometer.collect_grads`.
        fingerprint: as for `gradiometer.collect_grads`.
        reduce: as for `clip_grad_norm_`.

    Returns:
        TensorStats of the gradients before clipping; if merged over ranks, those of the whole model, with
        this rank's stats in ``.local``.

    Raises:
        ValueError, TypeError, RuntimeError, RankError: as for `clip_grad_norm_`.

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.Linear(2, 1)
    >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
    >>> gm.collect_and_clip_(model, 1.0).total_norm, gm.grad_norm(model) < 1.0
    (tensor(5.0990, dtype=torch.float64), True)
    """
    options: dict[str, Any] = {"thresholds": thresholds, "skip_nonfinite": skip_nonfinite}
    options |= {"inv_scale": inv_scale, "fingerprint": fingerprint, "reduce": reduce}
    return _clip(model, max_norm, norm_type, error_if_nonfinite, "collect_and_clip_", **options)[0]


def clip_coefficient(
    stats: TensorStats, max_norm: float | Tensor | AdaptiveClip, norm_type: float | str = 2.0
) -> Tensor:
    """Return the factor that scales gradients to a norm of at most ``max_norm``.

    It is ``min(1, max_norm / (norm + 1e-6))`` with the norm of the finite elements, and never NaN. A step
    that updates by hand can multiply its learning rate by it, without writing a gradient.

    Args:
        stats: of all tensors that are clipped together.
        max_norm: as for `clip_grad_norm_`. For a module this is a step, which changes its state.
        norm_type: 2 or infinity, the orders that ``stats`` hold.

    Returns:
        0-d float64 from 0 to 1, on the device of ``stats``; from `gradiometer.PerTensorClip` ``(T,)``, one
        for each row.

    Raises:
        ValueError: for a ``max_norm`` that is negative, NaN or not a number, and for other orders.
        TypeError: if ``stats`` is not TensorStats.

    >>> import torch, gradiometer as gm
    >>> gm.clip_coefficient(gm.collect([torch.tensor([3.0, -4.0])]), 10.0)
    tensor(1., dtype=torch.float64)
    """
    what = "clip_coefficient"
    stats = stats_given(stats, what)
    order = order_of(norm_type, what)
    if order not in {2.0, math.inf}:
        msg = f"{what}: norm_type must be 2 or inf, the orders that stats hold, got {norm_type!r}; "
        raise ValueError(msg + "use clip_grad_norm_ for other orders")
    with torch.no_grad():
        if isinstance(max_norm, AdaptiveClip):
            max_norm.check_order(order, what)
            return max_norm.decide(Gradients.of(stats, order))
        return coefficient_of(norms_of(stats.columns, order).finite, limit_of(max_norm, "max_norm", what))


@torch.no_grad()
def _clip(
    model: Parameters,
    max_norm: float | Tensor | AdaptiveClip,
    norm_type: float | str,
    error_if_nonfinite: bool,  # noqa: FBT001
    what: str,
    *,
    reduce: bool | Ranks | None,
    inv_scale: Tensor | float | None = None,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
    skip_nonfinite: bool = False,
    fingerprint: bool = False,
) -> tuple[TensorStats, Callable[[], Norms]]:
    """Return the stats and the norms before clipping. All checks come before the first write."""
    order = order_of(norm_type, what)
    clip = max_norm if isinstance(max_norm, AdaptiveClip) else None
    limit: Any = 0.0 if isinstance(max_norm, AdaptiveClip) else limit_of(max_norm, "max_norm", what)
    if error_if_nonfinite and torch.compiler.is_compiling():
        msg = f"{what}: error_if_nonfinite=True waits for the norm, which a compiled function cannot do; "
        raise RuntimeError(msg + "omit it, and check the norm or stats.found_inf outside")
    parameters = named_parameters(model, what)
    grads, home = grads_of(parameters, what)

    def measured(ranks: Ranks | None) -> tuple[TensorStats, tuple[list[Part], Tensor | None]]:
        # all local checks come before the reduction over ranks
        if clip is not None:
            clip.check(parameters, ranks, order, what)
        local = redistributed(grads, parameters, ranks, what)
        options: dict[str, Any] = {"skip_nonfinite": skip_nonfinite, "fingerprint": fingerprint}
        stats = measure(local, what, thresholds, inv_scale, home=home, **options)
        parts = parts_of(grads, what)
        finite = finite_norm(local, order, ranks, stats.columns.device)
        if finite is not None and inv_scale is not None:
            finite = unscaled(finite, inv_scale)
        return stats, (parts, finite)

    if clip is not None and is_active():
        limit = clip.digest()
    agreed = {"max_norm": limit, "norm_type": order, "inv_scale": 1.0 if inv_scale is None else inv_scale}
    stats, (parts, finite), ranks = over_ranks_with(
        reduce, parameters, what, measured, fingerprint=fingerprint, **agreed
    )
    known: list[Norms] = []

    def norms() -> Norms:
        # a module may not need them
        if not known:
            known.append(norms_of(stats.columns, order, finite, ranks))
        return known[0]

    if error_if_nonfinite:
        _refuse_nonfinite(stats, norms().norm, order, ranks)
    if isinstance(clip, WeightNormClip) and clip.unitwise:
        held = [p for p in parameters.tensors if p.grad is not None]
        event = clip_begins(held, None, lambda: None)
        clip.scale_units_(grads.names, parts, held, inv_scale)
        clip_ended(event)
        return stats, norms
    if clip is None:
        factors = coefficient_of(norms().finite, limit)
    else:
        weights = _weights(parameters, stats, what, reduce) if clip.needs_weights else None
        factors = clip.decide(Gradients(stats.names, stats.columns, order, norms, weights))
        if stats.local is not None and factors.dim():
            rows = {name: row for row, name in enumerate(stats.names)}
            factors = take(factors, [rows[name] for name in grads.names])
    shown = limit if clip is None and order == 2.0 else None
    event = clip_begins(parameters.tensors, shown, lambda: None if factors.dim() else factors)
    for part in parts:
        scale_(part, factors)
    clip_ended(event)
    return stats, norms


def _weights(parameters: Named, stats: TensorStats, what: str, reduce: bool | Ranks | None) -> Tensor:  # noqa: FBT001
    """Return the columns of the weights in the rows of the gradients' ``stats``."""
    # on another rank a parameter may have a gradient that it does not have here
    merged = stats.is_reduced
    kept = [p if p.grad is not None or (merged and p.requires_grad) else None for p in parameters.tensors]
    weights = present(parameters.names, kept)
    home = stats.columns.device
    return over_ranks(reduce, parameters, what, lambda _: measure(weights, what, home=home)).columns


def _refuse_nonfinite(stats: TensorStats, norm: Tensor, order: float, ranks: Ranks | None) -> None:
    report, value = materialize((stats, norm))
    if value.isfinite():
        return
    rows = [row for row in report.rows() if row.n_nonfinite]
    found = [f"{row.name!r} has {row.n_nan} NaN and {row.n_inf} Inf of {row.numel}" for row in rows[:_NAMES]]
    if ranks is not None and ranks.size > 1:
        where = [ranks.where(row.name, report.ranks[row.name]) for row in rows[:_NAMES]]
        found = [f"{text} (first on {place})" for text, place in zip(found, where, strict=True)]
    if len(rows) > _NAMES:
        found.append(f"{len(rows) - _NAMES} more")
    reason = ", ".join(found) or "All elements are finite, but their powers are beyond float64"
    # begins like torch's message
    msg = f"The total norm of order {order} for gradients from `parameters` is non-finite, so it cannot be"
    msg += f" clipped. {reason}. To clip only the finite elements, set `error_if_nonfinite=False`"
    raise RuntimeError(msg)
