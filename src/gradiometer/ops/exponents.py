"""The op for histograms of magnitudes: schema, fake, and the choice between kernels and eager PyTorch.

``gradiometer::exponent_stats`` is opaque to the compiler, functional and not differentiable, as
``gradiometer::tensor_stats`` is. ``gradiometer::record_exponents_`` writes the histograms into a store in the
steps that are due, as its cursor on the device says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradiometer.columns import NUM_EXPONENT_COLUMNS, Cursor
from gradiometer.ops import exponent_reference, packing, warm_up
from gradiometer.ops.library import (
    LIBRARY,
    for_a_graph,
    launching_on,
    uses_kernels,
    without_autocast,
    without_grad,
)
from gradiometer.ops.revision import REVISION
from gradiometer.ops.taps import is_due, may_measure

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["measure_exponents", "record_exponents_"]

LIBRARY.define("exponent_stats(Tensor[] tensors, str revision='') -> Tensor")
LIBRARY.define("record_exponents_(Tensor[] tensors, Tensor(a!) store, Tensor cursor) -> ()")


def measure_exponents(tensors: Sequence[Tensor], plan: packing.LaunchPlan | None = None) -> Tensor:
    """Return the histograms of tensors of one device.

    Args:
        tensors: at least one floating-point or complex strided tensor.
        plan: the result of `recognize` for them, if it was called.

    Returns:
        ``(T, C) int64``, see `gradiometer.columns.exponents`, on their device.
    """
    if plan is not None:
        return _eager(tensors, plan)
    with torch.no_grad():
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


def _record_exponents(tensors: list[Tensor], store: Tensor, cursor: Tensor) -> None:
    device = store.device
    with without_grad(), without_autocast(device):
        if uses_kernels(device):
            with launching_on(device):
                _run_kernels(tensors, store, cursor)
        elif is_due(cursor):
            store[-1, -1] = cursor[Cursor.STEP].to(torch.int64)
            measured = [i for i, x in enumerate(tensors) if x.numel()]
            if measured:
                rows = torch.tensor(measured, dtype=torch.int64, device=device)
                store[rows, :-1] = _eager([tensors[i] for i in measured])
                store[rows, -1] = cursor[Cursor.STEP].to(torch.int64)


def _exponent_stats(tensors: list[Tensor], revision: str = "") -> Tensor:
    del revision
    return _eager(tensors)


def _eager(tensors: Sequence[Tensor], plan: packing.LaunchPlan | None = None) -> Tensor:
    """Measure at once; ``plan``: the result of `recognize`, in a call from eager mode."""
    device = tensors[0].device
    with without_grad(), without_autocast(device):
        if not uses_kernels(device):
            plan = plan or packing.recognize(tensors) or packing.remember(tensors)
            if plan.direct and plan.exponents is None:
                plan.exponents = exponent_reference.plan_of(tensors)
            return exponent_reference.exponent_stats(tensors, plan.exponents)
        with launching_on(device):
            return _run_kernels(tensors, plan=plan)


def _run_kernels(
    tensors: Sequence[Tensor],
    rows: Tensor | None = None,
    gate: Tensor | None = None,
    plan: packing.LaunchPlan | None = None,
) -> Tensor:
    """Return the histograms; with a store and a cursor, write them there if the step is due."""
    from gradiometer import kernels  # noqa: PLC0415 as in library.py

    keep = plan is not None or not warm_up.is_possible()
    packed = packing.pack(tensors, kernels.tuning.CHUNK, kernels.tuning.MAX_CHUNKS, plan, keep=keep)
    chunk_map = packed.chunk_map
    if rows is None or gate is None:
        rows = torch.zeros(
            (chunk_map.num_tensors, NUM_EXPONENT_COLUMNS), dtype=torch.int64, device=packed.table.device
        )
    else:
        kernels.begin_exponents(packed.table, rows, gate, chunk_map.num_tensors)
    for group in chunk_map.groups:
        kernels.exponents(
            packed.pointers,
            packed.table,
            packing.upload(kernels.classes(group.dtype), packed.table.device),
            rows,
            group.dtype,
            group.first_chunk,
            group.num_chunks,
            chunk_map.num_tensors,
            gate,
        )
    return rows


def _fake(tensors: list[Tensor], revision: str = "") -> Tensor:
    del revision
    return tensors[0].new_empty((len(tensors), NUM_EXPONENT_COLUMNS), dtype=torch.int64)


LIBRARY.impl("exponent_stats", _exponent_stats, "CompositeExplicitAutograd")
LIBRARY.impl("record_exponents_", _record_exponents, "CompositeExplicitAutograd")
for _name in ("exponent_stats", "record_exponents_"):
    LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("gradiometer::exponent_stats", _fake, lib=LIBRARY)
torch.library.register_fake("gradiometer::record_exponents_", lambda *_: None, lib=LIBRARY)
