"""The measurement behind the collect functions: checks, the ops of each device, and ranks."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from gradiometer import ops
from gradiometer.columns import DEFAULT_THRESHOLDS, NUM_FINGERPRINT_COLUMNS, TENSORS, Thresholds
from gradiometer.columns.rows import number
from gradiometer.distributed import (
    UNKNOWN,
    given_ranks,
    implicit_ranks_for,
    is_active,
    redistribute,
    sharding_here,
)
from gradiometer.inputs import (
    Named,
    Traits,
    check,
    check_names,
    describe,
    has_float64,
    is_dtensor,
    is_one_number,
    is_plain_subclass,
    local_shards,
    named_parameters,
    on_device,
    placed_like,
    present,
)
from gradiometer.stats.named_stats import NamedStats
from gradiometer.stats.tensor_stats import TensorStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gradiometer.columns import Schema
    from gradiometer.distributed import Ranks
    from gradiometer.inputs import Parameters
    from gradiometer.ops import LaunchPlan

Stats = TypeVar("Stats", bound=NamedStats[Any])
Other = TypeVar("Other")


def grads_of(named: Named, caller: str) -> tuple[Named, torch.device | None]:
    """Return the gradients; without any, also the device on which their statistics would be."""
    names, parameters = named
    grads = present(names, [p.grad for p in parameters])
    if grads.tensors:
        return grads, None
    if parameters and not any([isinstance(p, nn.Parameter) or p.requires_grad for p in parameters]):
        msg = f"{caller}: none of these {len(parameters)} tensors is a parameter or has a .grad; "
        raise TypeError(msg + "pass parameters, or pass the gradients themselves to collect or total_norm")
    devices = [device for device in dict.fromkeys([p.device for p in parameters]) if has_float64(device)]
    # the first that is not the CPU, as with gradients
    devices.sort(key=lambda device: device.type == "cpu")
    return grads, devices[0] if devices else torch.device("cpu")


def measure_grads(
    model: Parameters,
    caller: str,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
    inv_scale: Tensor | float | None = None,
    *,
    skip_nonfinite: bool = False,
    fingerprint: bool = False,
    reduce: bool | Ranks | None = False,
) -> tuple[Named, TensorStats]:
    """Return a model's gradients and their statistics, merged over the ranks as in `over_ranks`."""
    parameters = named_parameters(model, caller)
    grads, home = grads_of(parameters, caller)

    def measured(ranks: Ranks | None) -> TensorStats:
        local = redistributed(grads, parameters, ranks, caller)
        options: dict[str, Any] = {"skip_nonfinite": skip_nonfinite, "fingerprint": fingerprint}
        return measure(local, caller, thresholds, inv_scale, home=home, **options)

    agreed: dict[str, Any] = {"inv_scale": 1.0 if inv_scale is None else inv_scale}
    return grads, over_ranks(reduce, parameters, caller, measured, fingerprint=fingerprint, **agreed)


def redistributed(grads: Named, parameters: Named, ranks: Ranks | None, caller: str) -> Named:
    """Return the gradients, placed like their parameters; with ranks, as `distributed.redistribute` does.

    ``parameters``: all of them, in order.
    """
    if ranks is None and not _any_dtensor(grads) and not (is_active() and _any_dtensor(parameters)):
        return grads
    kept = [p for p in parameters.tensors if p.grad is not None]
    if ranks is not None:
        return Named(grads.names, redistribute(grads, kept, ranks.timeout, caller))
    return Named(grads.names, [placed_like(*each, caller) for each in zip(*grads, kept, strict=True)])


def over_ranks(
    reduce: bool | Ranks | None,  # noqa: FBT001
    parameters: Named,
    caller: str,
    measured: Callable[[Ranks | None], Stats],
    **options: Any,
) -> Stats:
    """Return the stats that ``measured`` returns, merged over the ranks; see `over_ranks_with`."""
    return over_ranks_with(reduce, parameters, caller, lambda ranks: (measured(ranks), None), **options)[0]


def over_ranks_with(
    reduce: bool | Ranks | None,  # noqa: FBT001
    parameters: Named,
    caller: str,
    measured: Callable[[Ranks | None], tuple[Stats, Other]],
    *,
    schema: Schema = TENSORS,
    fingerprint: bool = False,
    **arguments: Any,
) -> tuple[Stats, Other, Ranks | None]:
    """Return the stats that ``measured`` returns, merged over the ranks if ``reduce`` asks for that.

    If ``measured`` fails on a rank, that rank tells the others, which would otherwise wait for it, and then
    raises. So it also does what may fail beside the measurement.

    Args:
        reduce: as for `collect`. None merges if there is a DTensor.
        parameters: all tensors on which the ranks agree.
        caller: the name of the calling function, the same on all ranks.
        measured: returns the stats of this rank, of the schema, and any other value.
        schema: of the stats.
        fingerprint: whether they have fingerprints.
        arguments: those of the caller's that must be the same on all ranks; None stands for none.

    Returns the merged stats, the other value, and the ranks; None if the stats are not merged.
    """
    if reduce is None:
        reduce = _any_dtensor(parameters)
    ranks = given_ranks(reduce, caller)
    sharding = sharding_here(*parameters)
    if ranks is None and reduce and sharding is not None:
        home = next((p.device for p in parameters.tensors if p.device.type != "cpu"), None)
        ranks = implicit_ranks_for(sharding, home)
    if ranks is None:
        if torch.compiler.is_compiling() and is_active() and _any_dtensor(parameters):
            sharding = UNKNOWN
        stats, other = measured(None)
        return stats if sharding is None else replace(stats, sharding=sharding), other, None
    try:
        ranks.check(sharding, caller)
        stats, other = measured(ranks)
        stats = replace(stats, sharding=ranks.sharding)
    except Exception as error:
        ranks.fail(error, schema=schema, fingerprint=fingerprint)
        raise
    return stats.reduced_by(ranks, caller, **arguments), other, ranks


def _any_dtensor(named: Named) -> bool:
    return any([is_dtensor(kind) for kind in set(map(type, named.tensors))])


@torch.no_grad()
def measure(
    named: Named,
    caller: str,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
    inv_scale: Tensor | float | None = None,
    *,
    skip_nonfinite: bool = False,
    fingerprint: bool = False,
    home: torch.device | None = None,
) -> TensorStats:
    """Measure named tensors as `collect` does; ``caller`` names the caller in error messages."""
    if not isinstance(thresholds, Thresholds):
        raise TypeError(f"{caller}: thresholds must be gm.Thresholds(...), got {thresholds!r}")
    plan = ops.recognize(named.tensors)
    if plan is None:
        whole, named = named, local_shards(named, caller)
        plan = None if named is whole else ops.recognize(named.tensors)
    names, tensors = named
    # recognized: the list is like one that was measured before, so it is not checked again
    traits = check(named, caller) if plan is None else Traits({Tensor}, {torch.strided}, [plan.device])
    check_names(names, caller)
    _check_scale(inv_scale, caller)
    if not tensors:
        columns = torch.empty((0, TENSORS.width), dtype=torch.float64, device=home or "cpu")
        bits = columns.new_empty((0, NUM_FINGERPRINT_COLUMNS), dtype=torch.int64) if fingerprint else None
        flags = columns.new_empty((0,), dtype=torch.int32)
        return TensorStats(
            names, columns, flags, thresholds, skip_nonfinite=skip_nonfinite, fingerprints=bits
        )
    if any([is_plain_subclass(kind) for kind in traits.types]):
        # neither a subclass's own operators nor its type may affect the result
        tensors = [t.as_subclass(Tensor) if is_plain_subclass(type(t)) else t for t in tensors]
    sparse = torch.sparse_coo in traits.layouts
    values = dense if fingerprint else _values
    stored = [values(tensor) for tensor in tensors] if sparse else tensors
    columns, flags, bits = _measure_tensors(
        stored, traits.devices, thresholds, inv_scale, plan, fingerprint=fingerprint
    )
    if sparse:
        columns = _add_implicit_zeros(columns, tensors, stored)
    if sparse or skip_nonfinite:
        flags = TENSORS.flags_of(columns, thresholds, skip_nonfinite=skip_nonfinite)
    return TensorStats(names, columns, flags, thresholds, skip_nonfinite=skip_nonfinite, fingerprints=bits)


def _measure_tensors(
    tensors: list[Tensor],
    devices: list[torch.device],
    thresholds: Thresholds,
    scale: Tensor | float | None,
    plan: LaunchPlan | None,
    *,
    fingerprint: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Measure tensors of one or several devices, with one call per device."""
    if len(devices) == 1:
        scale = _on(scale, devices[0])
        if torch.compiler.is_compiling() and not fingerprint:
            return *ops.tensor_stats_in_graph(tensors, thresholds, scale), None
        return ops.measure(tensors, thresholds, scale, plan, fingerprint=fingerprint)

    home = next((device for device in devices if device.type != "cpu"), devices[0])

    def measured(rows: list[int]) -> list[Tensor]:
        own = [tensors[i] for i in rows]
        # copying the scale to the CPU would wait, so the CPU's rows are rescaled on `home`
        late = isinstance(scale, Tensor) and scale.device.type != "cpu" and own[0].device.type == "cpu"
        factor = _on(scale, home if late else own[0].device)
        columns, flags, bits = ops.measure(
            own, thresholds, None if late else factor, ops.recognize(own), fingerprint=fingerprint
        )
        if late and factor is not None:
            columns = columns.to(home, non_blocking=True)
            columns = TENSORS.scaled(columns, factor.reshape(()).to(columns))
            flags = TENSORS.flags_of(columns, thresholds)
        return [x for x in (columns, flags, bits) if x is not None]

    columns, flags, *bits = rows_by_device(tensors, measured)
    return columns, flags, bits[0] if bits else None


def rows_by_device(tensors: Sequence[Tensor], measured: Callable[[list[int]], list[Tensor]]) -> list[Tensor]:
    """Return tables with a row per tensor, on the first device that is not the CPU.

    ``measured`` returns the rows of the tensors at some indices, which are on one device, of each table.
    """
    # Copying to the CPU would wait for the device, so the CPU's rows are copied to the device. The CPU comes
    # last, since the host itself measures there while the other devices work.
    devices = sorted(dict.fromkeys([x.device for x in tensors]), key=lambda device: device.type == "cpu")
    if len(devices) == 1:
        return measured(list(range(len(tensors))))
    runs: list[tuple[torch.device, list[int]]] = []
    for i, x in enumerate(tensors):
        if not runs or runs[-1][0] != x.device:
            runs.append((x.device, []))
        runs[-1][1].append(i)
    found: dict[torch.device, Iterator[tuple[Tensor, ...]]] = {}
    for device in devices:
        own = [rows for where, rows in runs if where == device]
        tables = [x.to(devices[0], non_blocking=True) for x in measured([i for rows in own for i in rows])]
        # slices, so that no index tensor is copied
        found[device] = zip(*[x.split([len(rows) for rows in own]) for x in tables], strict=True)
    return [torch.cat(x) for x in zip(*[next(found[where]) for where, _ in runs], strict=True)]


def _check_scale(inv_scale: Tensor | float | None, caller: str) -> None:
    if inv_scale is None:
        return
    if isinstance(inv_scale, Tensor):
        if is_one_number(inv_scale) and inv_scale.is_floating_point():
            return
    elif isinstance(inv_scale, (int, float)) and 0 < inv_scale <= sys.float_info.max:
        return
    msg = f"{caller}: inv_scale must be a positive finite number, such as 1 / scaler.get_scale(), "
    raise ValueError(msg + f"or a one-element floating-point tensor, got {describe(inv_scale)}")


def _on(scale: Tensor | float | None, device: torch.device) -> Tensor | None:
    if scale is None:
        return None
    if isinstance(scale, Tensor):
        return on_device(scale.detach(), device)
    return number(scale, device)


def _values(tensor: Tensor) -> Tensor:
    # duplicate coordinates of a sparse tensor are summed first: its norm is that of the sums
    return tensor.coalesce().values() if tensor.layout == torch.sparse_coo else tensor


def dense(tensor: Tensor) -> Tensor:
    """Return the dense form of a tensor, with the bits of a sparse tensor's values."""
    if tensor.layout != torch.sparse_coo:
        return tensor
    tensor = tensor.coalesce()
    whole = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if tensor.values().numel():
        # to_dense would add the values to zeros, which loses the sign of -0
        whole[tuple(tensor.indices())] = tensor.values()
    return whole


def _add_implicit_zeros(columns: Tensor, tensors: list[Tensor], dense: list[Tensor]) -> Tensor:
    """Add the elements that a sparse tensor does not store, which are 0, to its counts."""
    columns = columns.clone()
    for i, (tensor, values) in enumerate(zip(tensors, dense, strict=True)):
        missing = (tensor.numel() - values.numel()) * (2 if tensor.is_complex() else 1)
        if missing:
            columns[i, TENSORS.index["numel"]] += missing
            columns[i, TENSORS.index["n_zero"]] += missing
    return columns


def plain(named: Named, caller: str) -> list[Tensor]:
    """Return the tensors, after a check, as dense ones of no subclass with its own operators."""
    traits = check(named, caller)
    tensors = named.tensors
    if any([is_plain_subclass(kind) for kind in traits.types]):
        tensors = [x.as_subclass(Tensor) if is_plain_subclass(type(x)) else x for x in tensors]
    return [dense(x) for x in tensors] if torch.sparse_coo in traits.layouts else tensors
