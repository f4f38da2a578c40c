"""The op that projects tensors on random signs, ``gradiometer::project``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradiometer.columns.projections import FIRST_PROJECTION
from gradiometer.ops import index_boxes, projection_reference
from gradiometer.ops.dispatch import uses_kernels, without_grad
from gradiometer.ops.library import REVISION, by_device, define
from gradiometer.ops.ring import is_projected

if TYPE_CHECKING:
    from collections.abc import Sequence


def measure_projections(
    tensors: Sequence[Tensor],
    names: Sequence[str],
    count: int,
    seed: int = 0,
    boxes: Sequence[int] = (),
    cursor: Tensor | None = None,
) -> Tensor:
    """Return projections of tensors of one device, ``(T, 3 + count) float64``, in one read.

    Args:
        tensors: at least one floating-point or complex strided tensor; one without elements has a row of 0.
        names: a name for each, which its signs depend on.
        count: projections, a multiple of 8.
        seed: of the signs.
        boxes: which elements of the whole tensors they are, from `encode`; empty: all.
        cursor: measure only if the step is due; rows are 0 otherwise. See `gradiometer.columns.Cursor`.
    """
    with without_grad():
        return torch.ops.gradiometer.project(tensors, list(names), count, seed, list(boxes), cursor, REVISION)  # type: ignore[no-any-return]


def may_project(cursor: Tensor) -> bool:
    """Return whether a step may be due; False only if it is known not to be, on the CPU."""
    return (
        torch.compiler.is_compiling()
        or cursor.device.type != "cpu"
        or uses_kernels(cursor.device)
        or is_projected(cursor)
    )


def _by_reference(
    tensors: Sequence[Tensor],
    names: Sequence[str],
    count: int,
    seed: int,
    boxes: Sequence[int],
    cursor: Tensor | None,
) -> Tensor:
    if cursor is not None and not is_projected(cursor):
        return _fake(tensors, names, count).zero_()
    parts = index_boxes.decode(boxes, len(tensors))
    return projection_reference.project(tensors, names, count, seed, parts)


def _by_kernels(
    tensors: Sequence[Tensor],
    names: Sequence[str],
    count: int,
    seed: int,
    boxes: Sequence[int],
    cursor: Tensor | None,
) -> Tensor:
    return _by_reference(tensors, names, count, seed, boxes, cursor)


def _fake(tensors: Sequence[Tensor], _names: Sequence[str], count: int, *_: object) -> Tensor:
    return tensors[0].new_empty((len(tensors), FIRST_PROJECTION + count), dtype=torch.float64)


define(
    "project(Tensor[] tensors, str[] names, int count, int seed, int[] boxes, Tensor? cursor) -> Tensor",
    by_device(_by_reference, _by_kernels),
    _fake,
)
