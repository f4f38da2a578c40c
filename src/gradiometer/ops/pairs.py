"""The op that measures pairs of tensors, ``gradiometer::pair_stats``, and the one that copies tensors."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from gradiometer.columns import PAIRS
from gradiometer.ops import launch_plans, packing, pair_reference, uploads
from gradiometer.ops.dispatch import recognize, without_grad
from gradiometer.ops.library import REVISION, by_device, define

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.ops.launch_plans import LaunchPlan

    Tensors = Sequence[Tensor]


def recognize_pairs(a: Tensors, b: Tensors, g: Tensors | None = None) -> LaunchPlan | None:
    """Return the plan of pairs like these that were measured, if the dispatcher is not needed."""
    plan = recognize([*a, *b, *(g or ())])
    # the same tensors in one list, or cut in another way, need not have had the same shapes
    lists = 2 if g is None else 3
    return plan if plan is not None and plan.cut is not None and plan.cut[2] == lists else None


def measure_pairs(
    a: Tensors, b: Tensors, g: Tensors | None = None, *, plan: LaunchPlan | None = None
) -> Tensor:
    """Measure pairs of tensors of one device in one read.

    Args:
        a: at least one floating-point or complex strided tensor.
        b: tensors of the same shapes; strides and dtypes may differ.
        g: gradients of the same shapes; an empty one stands for none.
        plan: the result of `recognize_pairs` for these lists.

    Returns:
        columns ``(T, P) float64`` in the order of `gradiometer.columns.PAIRS`, on their device.
    """
    if plan is not None:
        return _measure(a, b, g, plan)
    with without_grad():
        return torch.ops.gradiometer.pair_stats(a, b, g, REVISION)  # type: ignore[no-any-return]


def _by_reference(a: Tensors, b: Tensors, g: Tensors | None = None, plan: LaunchPlan | None = None) -> Tensor:
    sides = [a, b] if g is None else [a, b, g]
    tensors = list(chain.from_iterable(sides))
    if plan is None:
        # let `recognize_pairs` find this list, as a launch of the kernels does
        plan = launch_plans.recognize(tensors) or launch_plans.remember(tensors)
        plan.cut, plan.chunk_map = (0, 0, len(sides)), None
    eager = launch_plans.host_plan(tensors, plan, _PLANS_OF[len(sides)])
    return pair_reference.pair_stats(a, b, g, eager)


def _plan_of(lists: int, tensors: Tensors) -> pair_reference.PairPlan:
    count = len(tensors) // lists
    sides = [tensors[start : start + count] for start in range(0, len(tensors), count)]
    return pair_reference.plan_of(pair_reference.pairs_of(*sides))


# by the number of lists; the same tensors may be cut in two ways
_PLANS_OF: Final = {lists: partial(_plan_of, lists) for lists in (2, 3)}


def _by_kernels(a: Tensors, b: Tensors, g: Tensors | None = None, plan: LaunchPlan | None = None) -> Tensor:
    from gradiometer import kernels  # noqa: PLC0415 as in dispatch.py

    sides = [a, b] if g is None else [a, b, g]
    keep = plan is not None or not uploads.may_warm_up()
    packed = packing.pack_pairs(sides, kernels.tuning.CHUNK, kernels.tuning.MAX_CHUNKS, plan, keep=keep)
    chunk_map = packed.chunk_map
    size = len(kernels.PAIR_PARTIALS), chunk_map.num_chunks
    partials = torch.empty(size, dtype=torch.float64, device=packed.table.device)
    for group in chunk_map.groups:
        kernels.pairs(packed.pointers, packed.table, partials, *group, chunk_map.num_tensors)
    return kernels.finalize_pairs(packed.table, partials, chunk_map.num_tensors)


_measure = by_device(_by_reference, _by_kernels)


def keep_(kept: list[Tensor], current: list[Tensor]) -> None:
    """Copy tensors into others of the same shapes.

    In a compiled step it is one op: of ``copy_`` to a buffer that is read later, Inductor would make a new
    tensor, and copy that into the buffer at the end.
    """
    with torch.no_grad():
        if torch.compiler.is_compiling():
            torch.ops.gradiometer.keep_(kept, current)
        else:
            _keep(kept, current)


def _keep(kept: list[Tensor], current: list[Tensor]) -> None:
    if kept:
        torch._foreach_copy_(kept, current)


def _fake(a: list[Tensor], *_: Any) -> Tensor:
    return a[0].new_empty((len(a), PAIRS.width), dtype=torch.float64)


define("pair_stats(Tensor[] a, Tensor[] b, Tensor[]? g=None) -> Tensor", _measure, _fake)
define("keep_(Tensor(a!)[] kept, Tensor[] current) -> ()", _keep)
