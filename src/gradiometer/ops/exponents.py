"""The ops that count the elements of tensors by magnitude.

``gradiometer::exponent_stats`` returns the histograms. ``gradiometer::record_exponents_`` writes them into a
store in the steps that are due, as its cursor on the device says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradiometer.columns import EXPONENTS, Cursor
from gradiometer.ops import exponent_reference, packing, uploads
from gradiometer.ops.dispatch import for_a_graph, without_grad
from gradiometer.ops.launch_plans import host_plan
from gradiometer.ops.library import REVISION, by_device, define
from gradiometer.ops.ring import is_due
from gradiometer.ops.taps import may_measure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.ops.launch_plans import LaunchPlan


def measure_exponents(tensors: Sequence[Tensor], plan: LaunchPlan | None = None) -> Tensor:
    """Return the histograms of tensors of one device, ``(T, C) int64``, see `gradiometer.columns.exponents`.

    ``tensors``: at least one floating-point or complex strided tensor. ``plan``: the result of `recognize`
    for them, if it was called.
    """
    if plan is not None:
        return _measure(tensors, plan)
    with without_grad():
        return torch.ops.gradiometer.exponent_stats(tensors, REVISION)  # type: ignore[no-any-return]


def record_exponents_(tensors: Sequence[Tensor], store: Tensor, cursor: Tensor) -> None:
    """Write the histograms of tensors of one device into a store, in a step that is due.

    A later call in the same step overwrites the rows that it measures.

    Args:
        tensors: T tensors; one without elements stands for a tensor that is not measured.
        store: ``(T + 1, C + 1) int64``, changed in place: histograms, and the step in which each was
            measured; the last row has only the step of the last call that was due.
        cursor: `gradiometer.columns.Cursor`; the call is measured if EVERY is positive and divides STEP.
    """
    if torch.compiler.is_compiling() or may_measure(cursor):
        with torch.no_grad():
            torch.ops.gradiometer.record_exponents_(for_a_graph(tensors), store, cursor)


def _by_reference(tensors: Sequence[Tensor], plan: LaunchPlan | None = None) -> Tensor:
    eager = host_plan(tensors, plan, exponent_reference.plan_of)
    return exponent_reference.exponent_stats(tensors, eager)


def _by_kernels(tensors: Sequence[Tensor], plan: LaunchPlan | None = None) -> Tensor:
    rows = torch.zeros((len(tensors), EXPONENTS.width), dtype=torch.int64, device=tensors[0].device)
    _launch(tensors, rows, None, plan)
    return rows


def _launch(
    tensors: Sequence[Tensor], rows: Tensor, cursor: Tensor | None, plan: LaunchPlan | None = None
) -> None:
    """Add the histograms to rows of zeros; with a cursor, write them into a store if the step is due."""
    from gradiometer import kernels  # noqa: PLC0415 as in dispatch.py

    keep = plan is not None or not uploads.may_warm_up()
    packed = packing.pack(tensors, kernels.tuning.CHUNK, kernels.tuning.MAX_CHUNKS, plan, keep=keep)
    count = packed.chunk_map.num_tensors
    if cursor is not None:
        kernels.begin_exponents(packed.table, rows, cursor, count)
    for group in packed.chunk_map.groups:
        classes = packed.constant(kernels.classes(group.dtype))
        kernels.exponents(packed.pointers, packed.table, classes, rows, *group, count, cursor)


def _record_by_reference(tensors: Sequence[Tensor], store: Tensor, cursor: Tensor) -> None:
    if not is_due(cursor):
        return
    step = cursor[Cursor.STEP].to(torch.int64)
    store[-1, -1] = step
    measured = [i for i, x in enumerate(tensors) if x.numel()]
    if measured:
        rows = torch.tensor(measured, dtype=torch.int64, device=store.device)
        store[rows, :-1] = _by_reference([tensors[i] for i in measured])
        store[rows, -1] = step


def _fake(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty((len(tensors), EXPONENTS.width), dtype=torch.int64)


_measure = by_device(_by_reference, _by_kernels)
define("exponent_stats(Tensor[] tensors) -> Tensor", _measure, _fake)
define(
    "record_exponents_(Tensor[] tensors, Tensor(a!) store, Tensor cursor) -> ()",
    by_device(_record_by_reference, _launch),
)
