"""Collection: gradients, weights or any named tensors -> TensorStats, in one read."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from gradiometer import derived, ops
from gradiometer.inputs import (
    Named,
    Traits,
    check,
    check_names,
    has_float64,
    is_plain_subclass,
    local_shards,
    named_parameters,
    named_tensors,
    present,
)
from gradiometer.layout import UNKNOWN, is_dtensor, placed_like
from gradiometer.norms import finite_norm, norms_of, order_of
from gradiometer.ranks import agreed, is_active, layout_here, ranks_for
from gradiometer.schema import COLUMN_INDEX, DEFAULT_THRESHOLDS, NUM_COLUMNS, Thresholds
from gradiometer.stats import TensorStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gradiometer.inputs import Parameters, Tensors
    from gradiometer.pack import Known
    from gradiometer.ranks import Ranks

__all__ = [
    "collect",
    "collect_grads",
    "collect_weights",
    "grad_norm",
    "grads_of",
    "measure",
    "measure_grads",
    "over_ranks",
    "settled",
    "total_norm",
]


def collect_grads(
    model: Parameters,
    *,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
    inv_scale: Tensor | float | None = None,
    skip_nonfinite: bool = False,
    reduce: bool | Ranks = False,
) -> TensorStats:
    """Measure every gradient of a model in one read, on its device, without waiting for it.

    Works the same inside and outside ``torch.compile``: no graph break, no host sync.

    Args:
        model: a module, or parameters as a mapping, an iterable, or (name, parameter) pairs.
            Parameters without a gradient are left out; tied ones count once.
        thresholds: where flags begin.
        inv_scale: ``1 / scale`` of a GradScaler, one element: the statistics are those of the
            unscaled gradients, which stay as they are. Positive and finite.
            `gradiometer.inverse_scale` has it without a wait.
        skip_nonfinite: whether a step with a non-finite gradient is skipped, as by a GradScaler.
            Then such a gradient is flagged ``NAN`` or ``INF`` but not ``EXPLODING``, and
            ``skipped`` of the stats and the report tells that the step is.
        reduce: whether to merge with what the other ranks hold, as `TensorStats.reduce` does; or what the
            ranks have agreed on, `gradiometer.Ranks`. All ranks have to come here then. Of a DTensor only
            the local shard is read in either case.

    Returns:
        TensorStats with a row per gradient, named like its parameter; T = 0 rows with no gradient.

    Raises:
        TypeError: for a gradient that cannot be measured; the message names it.
        RankError: with ``reduce``, where ranks differ or one does not answer.

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.Linear(2, 1)
    >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
    >>> stats = gm.collect_grads(model)
    >>> stats.names, stats.norm
    (('weight', 'bias'), tensor([5., 1.], dtype=torch.float64))
    """
    options: dict[str, Any] = {"skip_nonfinite": skip_nonfinite, "reduce": reduce}
    return measure_grads(model, "collect_grads", thresholds, inv_scale, **options)[1]


def collect_weights(
    model: Parameters,
    *,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
    reduce: bool | Ranks = False,
) -> TensorStats:
    """Measure every parameter of a model in one read, on its device, without waiting for it.

    Args:
        model: as for `collect_grads`.
        thresholds: where flags begin.
        reduce: as for `collect_grads`.

    Returns:
        TensorStats with a row per parameter; tied parameters count once.

    Raises:
        TypeError: for a parameter that cannot be measured; the message names it.
        RankError: as for `collect_grads`.

    >>> import torch, gradiometer as gm
    >>> gm.collect_weights(torch.nn.Linear(2, 1)).names
    ('weight', 'bias')
    """
    named = named_parameters(model, "collect_weights")
    return over_ranks(
        reduce, named, "collect_weights", lambda _: measure(named, "collect_weights", thresholds)
    )


def collect(
    tensors: Tensors,
    *,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
    inv_scale: Tensor | float | None = None,
    skip_nonfinite: bool = False,
    reduce: bool | Ranks = False,
) -> TensorStats:
    """Measure any tensors in one read, on their device, without waiting for it.

    Tensors may differ in dtype, strides and device. Complex ones are measured as their real view
    (two elements each), sparse COO ones with all their zeros. With several devices the result is
    on the first that is not the CPU.

    Args:
        tensors: a mapping name -> tensor, (name, tensor) pairs, or tensors, named by position.
        thresholds: where flags begin.
        inv_scale: one element; the statistics are those of ``inv_scale * x``. Positive and finite.
        skip_nonfinite: whether a step with a non-finite element is skipped; as for `collect_grads`.
        reduce: as for `collect_grads`. A plain tensor counts as a copy that all ranks have; where each has
            another one, make ``gm.Ranks(tensors, shards={".*": None})`` once and pass that.

    Returns:
        TensorStats with a row per tensor.

    Raises:
        TypeError: for a tensor that cannot be measured; the message names it.
        ValueError: for a name that stands twice.

    >>> import torch, gradiometer as gm
    >>> gm.collect({"a": torch.tensor([1e20]), "b": torch.zeros(3)}).norm
    tensor([1.0000e+20, 0.0000e+00], dtype=torch.float64)
    """
    named = named_tensors(tensors, "collect")

    def measured(_: Ranks | None) -> TensorStats:
        return measure(named, "collect", thresholds, inv_scale, skip_nonfinite=skip_nonfinite)

    return over_ranks(reduce, named, "collect", measured)


@overload
def grad_norm(
    model: Parameters,
    *,
    empty: float | Literal["raise"] = ...,
    inv_scale: Tensor | float | None = ...,
    reduce: bool | Ranks | None = ...,
) -> float: ...


@overload
def grad_norm(
    model: Parameters,
    *,
    empty: None,
    inv_scale: Tensor | float | None = ...,
    reduce: bool | Ranks | None = ...,
) -> float | None: ...


def grad_norm(
    model: Parameters,
    *,
    empty: float | Literal["raise"] | None = 0.0,
    inv_scale: Tensor | float | None = None,
    reduce: bool | Ranks | None = None,
) -> float | None:
    """Return the L2 norm of all gradients of a model, computed in fp64, after one transfer.

    NaN with any NaN, inf with any Inf, as torch would say it. The total norm of `collect_grads`, up to the
    rounding of fp64: on the CPU nothing but squares is summed, over all gradients at once.

    Args:
        model: as for `collect_grads`.
        empty: what to return when there is no gradient; ``"raise"`` for a ValueError.
        inv_scale: as for `collect_grads`.
        reduce: as for `collect_grads`; None: where a parameter is a DTensor, so that the norm is that of
            the model and not of a shard.

    >>> import torch, gradiometer as gm
    >>> gm.grad_norm(torch.nn.Linear(2, 1))
    0.0
    """
    if inv_scale is None and not reduce and not torch.compiler.is_compiling():
        names, parameters = named_parameters(model, "grad_norm")
        grads = present(names, [p.grad for p in parameters])
        norm = ops.norm_on_host(grads.tensors)
        if norm is not None:
            check_names(grads.names, "grad_norm")
            return norm
    _, stats = measure_grads(model, "grad_norm", inv_scale=inv_scale, reduce=reduce)
    if stats.origin is not None:
        # rows that no rank has measured are in no report
        report = stats.materialize()
        if report.measured:
            return report.total_norm
    elif stats.measured:
        return float(stats.total_norm)
    if empty == "raise":
        msg = "grad_norm: no parameter has a gradient; call it after backward() and before zero_grad()"
        raise ValueError(msg)
    if isinstance(empty, str):
        msg = f"grad_norm: empty must be a number, None or 'raise', got {empty!r}"
        raise ValueError(msg)  # noqa: TRY004 what a misspelt word is
    return empty


def total_norm(
    tensors: Tensors, norm_type: float | str = 2.0, *, reduce: bool | Ranks | None = None
) -> Tensor:
    """Return the norm of all tensors together as a 0-d float64 tensor on their device; 0 with none.

    `torch.nn.utils.get_total_norm` in fp64: no square or power of an fp32 or half number overflows. NaN
    and Inf count as torch says: NaN makes the norm NaN, and Inf makes it inf, but to a negative order Inf
    is nothing, and of order 0 both are elements other than 0.

    Args:
        tensors: as for `collect`.
        norm_type: any order that `torch.linalg.vector_norm` takes: 2, 1, 0.5, ``"inf"``, -inf, a negative
            number. Of order 0 it is the number of tensors that are not all zero, as torch's norm of norms
            is. Orders other than 0, 2 and infinity read the tensors twice.
        reduce: as for `grad_norm`. Orders other than 0, 2 and infinity take two more collectives, of one
            number.

    Raises:
        ValueError: for a ``norm_type`` that is no order.
        TypeError, RankError: as for `collect`.

    >>> import torch, gradiometer as gm
    >>> gm.total_norm([torch.tensor([3.0]), torch.tensor([4.0])])
    tensor(5., dtype=torch.float64)
    >>> gm.total_norm([torch.tensor([3.0]), torch.tensor([-4.0])], "inf")
    tensor(4., dtype=torch.float64)
    """
    order = order_of(norm_type, "total_norm")
    named = named_tensors(tensors, "total_norm")
    if order == 2.0:
        norm = None if reduce or torch.compiler.is_compiling() else ops.norm_on_host(named.tensors)
        if norm is not None:
            check_names(named.names, "total_norm")
            return torch.tensor(norm, dtype=torch.float64)
        return over_ranks(reduce, named, "total_norm", lambda _: measure(named, "total_norm")).total_norm
    finite: Tensor | None = None
    over: Ranks | None = None

    def measured(ranks: Ranks | None) -> TensorStats:
        nonlocal finite, over
        over = ranks
        stats = measure(named, "total_norm")
        finite = finite_norm(named, order, ranks, stats.columns.device)
        return stats

    stats = over_ranks(reduce, named, "total_norm", measured)
    return norms_of(stats.columns, order, finite, over).said


# for what is built on a collection


def grads_of(named: Named, what: str) -> tuple[Named, torch.device | None]:
    """Return the gradients, and, where there is none, the device on which their statistics would be."""
    names, parameters = named
    grads = present(names, [p.grad for p in parameters])
    if grads.tensors:
        return grads, None
    if parameters and not any([isinstance(p, nn.Parameter) or p.requires_grad for p in parameters]):
        msg = f"{what}: none of these {len(parameters)} tensors is a parameter or has a .grad; of gradients "
        raise TypeError(msg + "themselves collect and total_norm take a list, and clipping their parameters")
    devices = [device for device in dict.fromkeys([p.device for p in parameters]) if has_float64(device)]
    # as with gradients: on the first that is not the CPU
    devices.sort(key=lambda device: device.type == "cpu")
    return grads, devices[0] if devices else None


def measure_grads(
    model: Parameters,
    what: str,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
    inv_scale: Tensor | float | None = None,
    *,
    skip_nonfinite: bool = False,
    reduce: bool | Ranks | None = False,
) -> tuple[Named, TensorStats]:
    """Return a model's gradients, and their statistics: of this rank, or of all, as `over_ranks` says."""
    parameters = named_parameters(model, what)
    grads, home = grads_of(parameters, what)

    def measured(ranks: Ranks | None) -> TensorStats:
        local = settled(grads, parameters, ranks, what)
        return measure(local, what, thresholds, inv_scale, skip_nonfinite=skip_nonfinite, home=home)

    return grads, over_ranks(reduce, parameters, what, measured)


def settled(grads: Named, parameters: Named, ranks: Ranks | None, what: str) -> Named:
    """Return the gradients, placed as their parameters are; with ranks those that `Ranks.settle` returns.

    ``parameters``: all, in order.
    """
    if ranks is None and not _any_dtensor(grads) and not (is_active() and _any_dtensor(parameters)):
        return grads
    kept = [p for p in parameters.tensors if p.grad is not None]
    if ranks is not None:
        return Named(grads.names, ranks.settle(grads, kept, what))
    placed = [placed_like(*each, what) for each in zip(*grads, kept, strict=True)]
    return Named(grads.names, placed)


def over_ranks(
    reduce: bool | Ranks | None,  # noqa: FBT001
    parameters: Named,
    what: str,
    measured: Callable[[Ranks | None], TensorStats],
) -> TensorStats:
    """Return what is measured, merged over the ranks if that is asked for.

    A rank on which it fails tells the others, which would wait for it, and then raises. ``reduce`` None:
    where there is a DTensor.
    """
    if reduce is None:
        reduce = _any_dtensor(parameters)
    ranks = ranks_for(reduce, what)
    layout = layout_here(*parameters)
    if ranks is None and reduce and layout is not None:
        devices = [p.device for p in parameters.tensors]
        ranks = agreed(layout, next((device for device in devices if device.type != "cpu"), None))
    if ranks is None:
        if torch.compiler.is_compiling() and is_active() and _any_dtensor(parameters):
            layout = UNKNOWN
        stats = measured(None)
        return stats if layout is None else replace(stats, layout=layout)
    try:
        ranks.check(layout, what)
        stats = replace(measured(ranks), layout=ranks.layout)
    except Exception as error:
        ranks.fail(error)
        raise
    return stats.reduced_by(ranks, what)


def _any_dtensor(named: Named) -> bool:
    return any([is_dtensor(kind) for kind in {type(tensor) for tensor in named.tensors}])


def measure(
    named: Named,
    what: str,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
    inv_scale: Tensor | float | None = None,
    *,
    skip_nonfinite: bool = False,
    home: torch.device | None = None,
) -> TensorStats:
    """Do what `collect` does for tensors that have names; ``what``: who asks, for messages of errors."""
    with torch.no_grad():
        stats = _measure_named(named, thresholds, inv_scale, what, home)
    if not skip_nonfinite:
        return stats
    flags = derived.compute_flags(stats.columns, thresholds, skip_nonfinite=True)
    return replace(stats, flags=flags, skip_nonfinite=True)


def _measure_named(
    named: Named,
    thresholds: Thresholds,
    inv_scale: Tensor | float | None,
    what: str,
    home: torch.device | None,
) -> TensorStats:
    if not isinstance(thresholds, Thresholds):
        msg = f"{what}: thresholds must be gm.Thresholds(...), got {thresholds!r}"
        raise TypeError(msg)
    named = local_shards(named, what)
    names, tensors = named
    known = ops.recognize(tensors)
    # like a list that was measured before: it is not looked at again
    traits = check(named, what) if known is None else Traits({Tensor}, {torch.strided}, [known.device])
    check_names(names, what)
    _check_scale(inv_scale, what)
    if not tensors:
        columns = torch.empty((0, NUM_COLUMNS), dtype=torch.float64, device=home)
        return TensorStats(names, columns, columns.new_empty((0,), dtype=torch.int32), thresholds)
    if any([is_plain_subclass(kind) for kind in traits.types]):
        # a subclass's own operators have no say, and its type none in the result
        tensors = [t.as_subclass(Tensor) if is_plain_subclass(type(t)) else t for t in tensors]
    sparse = torch.sparse_coo in traits.layouts
    dense = [_values(tensor) for tensor in tensors] if sparse else tensors
    columns, flags = _measure_tensors(dense, traits.devices, thresholds, inv_scale, known)
    if sparse:
        columns = _add_implicit_zeros(columns, tensors, dense)
        flags = derived.compute_flags(columns, thresholds)
    return TensorStats(names, columns, flags, thresholds)


def _measure_tensors(
    tensors: list[Tensor],
    devices: list[torch.device],
    thresholds: Thresholds,
    scale: Tensor | float | None,
    known: Known | None,
) -> tuple[Tensor, Tensor]:
    """Measure tensors of one or several devices, one call a device."""
    if len(devices) == 1:
        return ops.measure(tensors, thresholds, _on(scale, devices[0]), known)

    # A copy to the CPU would have to wait for the device, so the CPU's rows travel. It is the last, since the
    # host itself measures it: the other devices are at work meanwhile.
    order = sorted(devices, key=lambda device: device.type == "cpu")
    home = order[0]
    # neighbours of one device
    runs: list[tuple[torch.device, list[Tensor]]] = []
    for tensor in tensors:
        if not runs or runs[-1][0] != tensor.device:
            runs.append((tensor.device, []))
        runs[-1][1].append(tensor)
    columns: dict[torch.device, Iterator[Tensor]] = {}
    flags: dict[torch.device, Iterator[Tensor]] = {}
    for device in order:
        own = [run for where, run in runs if where == device]
        # a scale would have to be waited for, too: the CPU's rows meet it where they travel to
        late = isinstance(scale, Tensor) and scale.device.type != "cpu" and device.type == "cpu"
        factor = _on(scale, home if late else device)
        part = ops.tensor_stats([x for run in own for x in run], thresholds, None if late else factor)
        rows, bits = [x.to(home, non_blocking=True) for x in part]
        if late and factor is not None:
            rows = derived.rescale(rows, factor.reshape(()).to(rows))
            bits = derived.compute_flags(rows, thresholds)
        # slices, so that no index tensor has to travel
        sizes = [len(run) for run in own]
        columns[device], flags[device] = iter(rows.split(sizes)), iter(bits.split(sizes))
    in_order = [(next(columns[where]), next(flags[where])) for where, _ in runs]
    return torch.cat([rows for rows, _ in in_order]), torch.cat([bits for _, bits in in_order])


def _check_scale(inv_scale: Tensor | float | None, what: str) -> None:
    if inv_scale is None:
        return
    if isinstance(inv_scale, Tensor):
        if inv_scale.numel() == 1 and inv_scale.is_floating_point():
            return
        got = f"shape {tuple(inv_scale.shape)} and dtype {inv_scale.dtype}"
    else:
        if isinstance(inv_scale, (int, float)) and 0 < inv_scale < math.inf:
            return
        got = repr(inv_scale)
    msg = (
        f"{what}: inv_scale must be one positive finite floating-point number, "
        f"such as 1 / scaler.get_scale(), or a tensor of one; got {got}"
    )
    raise ValueError(msg)


def _on(scale: Tensor | float | None, device: torch.device) -> Tensor | None:
    if scale is None:
        return None
    if isinstance(scale, Tensor):
        # on the CPU it is used at once, and must have arrived
        return scale.detach().to(device, non_blocking=device.type != "cpu")
    return derived.number(scale, device)


def _values(tensor: Tensor) -> Tensor:
    # duplicate coordinates of a sparse tensor are added up first: its norm is that of the sums
    return tensor.coalesce().values() if tensor.layout == torch.sparse_coo else tensor


def _add_implicit_zeros(columns: Tensor, tensors: list[Tensor], dense: list[Tensor]) -> Tensor:
    """Count what a sparse tensor does not store as the zeros they are."""
    columns = columns.clone()
    for i, (tensor, values) in enumerate(zip(tensors, dense, strict=True)):
        missing = (tensor.numel() - values.numel()) * (2 if tensor.is_complex() else 1)
        if missing:
            columns[i, COLUMN_INDEX["numel"]] += missing
            columns[i, COLUMN_INDEX["n_zero"]] += missing
    return columns
