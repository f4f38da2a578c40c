"""Collection of gradients, weights or any named tensors into TensorStats, in one read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from gradiometer import ops
from gradiometer.columns import DEFAULT_THRESHOLDS, Thresholds, number
from gradiometer.inputs import check_names, named_parameters, named_tensors, on_device, present
from gradiometer.ops import tensor_stats_in_graph
from gradiometer.stats.measure import measure, measure_grads, over_ranks, over_ranks_with
from gradiometer.stats.norms import finite_norm, norms_of, order_of
from gradiometer.stats.project import projected
from gradiometer.stats.tensor_stats import TensorStats

if TYPE_CHECKING:
    from gradiometer.distributed import Ranks
    from gradiometer.inputs import Parameters, Tensors
    from gradiometer.stats.projection_stats import ProjectionStats


def collect_grads(
    model: Parameters,
    *,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
    inv_scale: Tensor | float | None = None,
    skip_nonfinite: bool = False,
    fingerprint: bool = False,
    projections: int | None = None,
    reduce: bool | Ranks = False,
) -> TensorStats:
    """Measure every gradient of a model in one read on its device, without host synchronization.

    Works the same inside and outside ``torch.compile``: no graph break, no host sync.

    Args:
        model: a module, or parameters as a mapping, an iterable, or (name, parameter) pairs.
            Parameters without a gradient are left out; tied ones count once.
        thresholds: limits of the flags.
        inv_scale: ``1 / scale`` of a GradScaler, one element, positive and finite. The statistics are then
            those of the unscaled gradients; the gradients themselves are not changed.
            `gradiometer.inverse_scale` returns it without a wait.
        skip_nonfinite: whether a step with a non-finite gradient is skipped, as by a GradScaler.
            Such a gradient is then flagged ``NAN`` or ``INF`` but not ``EXPLODING``, and
            ``skipped`` of the stats and the report is true.
        fingerprint: whether to compute `TensorStats.fingerprints` too, in the same read. They are those of
            the gradients' own bits, whatever ``inv_scale`` is.
        projections: also project each gradient on this number of random signs, in one more read, see
            `gradiometer.collect_projections`: `TensorStats.projections`.
        reduce: whether to merge with the statistics of the other ranks, as `TensorStats.reduce` does: a bool,
            or a `gradiometer.Ranks`. If so, all ranks have to make this call. For a DTensor only the local
            shard is read in either case.

    Returns:
        TensorStats with a row per gradient, named like its parameter; no rows without gradients.

    Raises:
        TypeError: for a gradient that cannot be measured; the message names it.
        RankError: with ``reduce``, if the ranks disagree or one does not respond.

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.Linear(2, 1)
    >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
    >>> stats = gm.collect_grads(model)
    >>> stats.names, stats.norm
    (('weight', 'bias'), tensor([5., 1.], dtype=torch.float64))
    """
    is_plain = inv_scale is projections is None and skip_nonfinite is reduce is fingerprint is False
    if is_plain and torch.compiler.is_compiling():
        stats = _grads_in_graph(model, thresholds)
        if stats is not None:
            return stats
    options: dict[str, Any] = {"skip_nonfinite": skip_nonfinite, "reduce": reduce, "fingerprint": fingerprint}
    stats = measure_grads(model, "collect_grads", thresholds, inv_scale, **options)[1]
    if projections is None:
        return stats
    named = named_parameters(model, "collect_grads")
    found = projected(named, "collect_grads", projections, 0, reduce, of_grads=True)
    return replace(stats, projections=_scaled(found, inv_scale))


def _scaled(found: ProjectionStats, inv_scale: Tensor | float | None) -> ProjectionStats:
    if inv_scale is None:
        return found
    columns = found.columns
    if isinstance(inv_scale, Tensor):
        factor = on_device(inv_scale.detach(), columns.device).reshape(()).to(columns)
    else:
        factor = number(inv_scale, columns.device)
    return replace(found, columns=found.schema.scaled(columns, factor))


def _grads_in_graph(model: Parameters, thresholds: Thresholds) -> TensorStats | None:
    """Return the statistics of the gradients of a module; None unless each is an ordinary dense tensor.

    Dynamo guards every function and every global that it traces, and checks the guards before each step.
    Those of `gradiometer.stats.measure` take longer than the measurement of a few small tensors.
    """
    if not isinstance(model, nn.Module) or isinstance(model, (DistributedDataParallel, DataParallel)):
        return None
    names: list[str] = []
    grads: list[Tensor] = []
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if type(parameter) is not nn.Parameter or "_orig_mod" in name or "_wrapped_module" in name:
            return None
        if grad is None:
            continue
        if type(grad) is not Tensor or grad.is_sparse or not grad.is_floating_point() or grad.itemsize < 2:
            return None
        if grad.device != parameter.device or grad.device.type not in ("cpu", "cuda"):
            return None
        names.append(name)
        grads.append(grad)
    if not isinstance(thresholds, Thresholds) or len({grad.device for grad in grads}) != 1:
        return None
    if len(set(names)) != len(names):
        return None
    columns, flags = tensor_stats_in_graph(grads, thresholds)
    return TensorStats(tuple(names), columns, flags, thresholds)


def collect_weights(
    model: Parameters,
    *,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
    fingerprint: bool = False,
    projections: int | None = None,
    reduce: bool | Ranks = False,
) -> TensorStats:
    """Measure every parameter of a model in one read on its device, without host synchronization.

    Args:
        model: as for `collect_grads`.
        thresholds: limits of the flags.
        fingerprint: as for `collect_grads`.
        projections: as for `collect_grads`.
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
    stats = over_ranks(
        reduce,
        named,
        "collect_weights",
        lambda _: measure(named, "collect_weights", thresholds, fingerprint=fingerprint),
        fingerprint=fingerprint,
    )
    if projections is None:
        return stats
    return replace(stats, projections=projected(named, "collect_weights", projections, 0, reduce))


def collect(
    tensors: Tensors,
    *,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
    inv_scale: Tensor | float | None = None,
    skip_nonfinite: bool = False,
    fingerprint: bool = False,
    projections: int | None = None,
    reduce: bool | Ranks = False,
) -> TensorStats:
    """Measure any tensors in one read on their device, without host synchronization.

    Tensors may differ in dtype, strides and device. Complex tensors are measured as their real view
    (two elements each), sparse COO tensors with all their zeros. With several devices the result is
    on the first that is not the CPU.

    Args:
        tensors: a mapping name -> tensor, (name, tensor) pairs, or tensors, which are named by position.
        thresholds: limits of the flags.
        inv_scale: one element, positive and finite; the statistics are those of ``inv_scale * x``.
        skip_nonfinite: whether a step with a non-finite element is skipped; as for `collect_grads`.
        fingerprint: as for `collect_grads`. A sparse tensor has that of its dense form.
        projections: as for `collect_grads`.
        reduce: as for `collect_grads`. A plain tensor counts as a copy that all ranks share. If each rank has
            its own tensor, make ``gm.Ranks(tensors, shards={".*": None})`` once and pass that.

    Returns:
        TensorStats with a row per tensor.

    Raises:
        TypeError: for a tensor that cannot be measured; the message names it.
        ValueError: for a duplicate name.

    >>> import torch, gradiometer as gm
    >>> gm.collect({"a": torch.tensor([1e20]), "b": torch.zeros(3)}).norm
    tensor([1.0000e+20, 0.0000e+00], dtype=torch.float64)
    """
    named = named_tensors(tensors, "collect")

    def measured(_: Ranks | None) -> TensorStats:
        options: dict[str, Any] = {"skip_nonfinite": skip_nonfinite, "fingerprint": fingerprint}
        return measure(named, "collect", thresholds, inv_scale, **options)

    agreed: dict[str, Any] = {"inv_scale": 1.0 if inv_scale is None else inv_scale}
    stats = over_ranks(reduce, named, "collect", measured, fingerprint=fingerprint, **agreed)
    if projections is None:
        return stats
    found = projected(named, "collect", projections, 0, reduce)
    return replace(stats, projections=_scaled(found, inv_scale))


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

    NaN with any NaN, inf with any Inf, as in torch. It equals the total norm of `collect_grads` up to fp64
    rounding: on the CPU only the squares are summed, over all gradients at once.

    Args:
        model: as for `collect_grads`.
        empty: value to return if there is no gradient; ``"raise"`` raises a ValueError.
        inv_scale: as for `collect_grads`.
        reduce: as for `collect_grads`. None merges if a parameter is a DTensor, so that the norm is the
            model's and not a shard's.

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
        # the report leaves out rows that no rank has measured
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
        raise ValueError(msg)  # noqa: TRY004 a misspelt word is a wrong value
    return empty


def total_norm(
    tensors: Tensors, norm_type: float | str = 2.0, *, reduce: bool | Ranks | None = None
) -> Tensor:
    """Return the norm of all tensors together as a 0-d float64 tensor on their device; 0 with none.

    Like `torch.nn.utils.get_total_norm`, but in fp64: no square or power of an fp32 or half number overflows.
    NaN and Inf count as in torch: NaN makes the norm NaN, and Inf makes it inf. With a negative order Inf
    adds nothing; with order 0 both count as nonzero elements.

    Args:
        tensors: as for `collect`.
        norm_type: any order of `torch.linalg.vector_norm`: 2, 1, 0.5, ``"inf"``, -inf, a negative number.
            With order 0 the result is the number of tensors that are not all zero, like torch's norm of
            norms. Orders other than 0, 2 and infinity read the tensors twice.
        reduce: as for `grad_norm`. Orders other than 0, 2 and infinity take one or two more collectives of
            one number.

    Raises:
        ValueError: if ``norm_type`` is not an order.
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
            return torch.tensor(norm, dtype=torch.float64, device="cpu")
        return over_ranks(
            reduce, named, "total_norm", lambda _: measure(named, "total_norm"), norm_type=order
        ).total_norm

    def measured(ranks: Ranks | None) -> tuple[TensorStats, Tensor | None]:
        stats = measure(named, "total_norm")
        return stats, finite_norm(named, order, ranks, stats.columns.device)

    stats, finite, ranks = over_ranks_with(reduce, named, "total_norm", measured, norm_type=order)
    return norms_of(stats.columns, order, finite, ranks).norm
