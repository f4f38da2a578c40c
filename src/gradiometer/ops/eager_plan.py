"""Plan how eager PyTorch measures a list: one by one, in batches that share a buffer, or in padded rows."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from gradiometer.inputs import as_real
from gradiometer.ops import openmp

if TYPE_CHECKING:
    from collections.abc import Sequence


# a small tensor fills one zero-padded row, usually of the smallest width that holds it; `row_sums` adds up
# rows of at most LANES elements, of a multiple of them, and above 1024 of a multiple of 1024
SMALL: Final = 2**13
LANES: Final = 64
WIDTHS: Final = (2**4, 2**6, 2**8, 2**10, *range(2**11, SMALL + 1, 2**10))
# the width for each number of elements
WIDTH_OF: Final = tuple([WIDTHS[bisect_left(WIDTHS, size)] for size in range(SMALL + 1)])
# most elements in a batch of such rows: fewer than torch spreads over threads; four times that on one thread
BATCH: Final = 2**15 - 1
# the same for middle-sized tensors, of up to MIDDLE elements, on one thread: its cache holds them in fp64
BATCH_ALONE: Final = 2**17
# a batch of two or more takes less time than each alone
MIDDLE: Final = 2**16
# up to this many elements the number of operators costs more than their work
FEW: Final = BATCH // 3


class PaddedGroup(NamedTuple):
    """Small tensors of one dtype that are padded to one width.

    ``indices``: their positions in the call. ``padding``: the zeros after each; none if all fill their rows.
    """

    width: int
    indices: list[int]
    sizes: list[int]
    padding: list[Tensor]


class EagerPlan(NamedTuple):
    """How to measure a list of tensors.

    ``large``, ``single``: the indices of large tensors and of single numbers. ``batches``: those of
    middle-sized tensors that share a buffer, none in fp64. ``groups``: small tensors.
    """

    large: list[int]
    single: list[int]
    batches: list[list[int]]
    groups: list[PaddedGroup]


def plan_of(tensors: Sequence[Tensor]) -> EagerPlan:
    """Return the plan for tensors from `prepared`; it also holds if only the addresses differ."""
    plan = EagerPlan([], [], [], [])
    middle: list[tuple[int, int]] = []
    small: dict[torch.dtype, dict[int, list[int]]] = {}
    most = MIDDLE if openmp.can_run_alone() else BATCH
    for index, x in enumerate(tensors):
        numel = x.numel()
        if numel > most or (numel > SMALL and x.dtype == torch.float64):
            plan.large.append(index)
        elif numel > SMALL:
            middle.append((numel, index))
        elif numel == 1:
            plan.single.append(index)
        elif numel:
            small.setdefault(x.dtype, {}).setdefault(WIDTH_OF[numel], []).append(index)
    for by_width in small.values():
        widest, together = max(by_width), [index for indices in by_width.values() for index in indices]
        # a few short tensors form one group: trailing zeros change no bit of a row's sums
        groups = {widest: together} if len(together) * widest <= FEW else by_width
        plan.groups.extend([_group_of(tensors, *group) for group in groups.items()])
    plan.batches.extend(_batches(sorted(middle)))
    return plan


def _batches(middle: list[tuple[int, int]]) -> list[list[int]]:
    """Put tensors together, given as (size, index), those of one size next to each other."""
    length = filled = BATCH_ALONE if openmp.can_run_alone() else BATCH
    batches: list[list[int]] = []
    for numel, index in middle:
        filled += numel
        if filled > length:
            batches.append([])
            filled = numel
        batches[-1].append(index)
    return batches


def _group_of(tensors: Sequence[Tensor], width: int, indices: list[int]) -> PaddedGroup:
    members = [tensors[index] for index in indices]
    sizes = [x.numel() for x in members]
    width = exact_width(set(sizes), width)
    if min(sizes) == width:
        return PaddedGroup(width, indices, sizes, [])
    zeros = members[0].new_zeros(width)
    padding = {size: zeros[size:] for size in set(sizes)}
    return PaddedGroup(width, indices, sizes, [padding[size] for size in sizes])


def exact_width(sizes: set[int], width: int) -> int:
    """Return the size if there is only one and it is a width, or else the width; no sum depends on this."""
    (size,) = sizes if len(sizes) == 1 else (width,)
    # rows of whole words, see fingerprint.py
    unit = 16 if size <= LANES else LANES if size <= 16 * LANES else 16 * LANES
    return width if size % unit else size


def prepared(tensor: Tensor) -> Tensor:
    """Return a tensor as real numbers; a small one in a dtype that has the required operators."""
    x = as_real(tensor)
    # fp8 formats lack operators, and one of them has no zero to pad with
    return x.to(torch.float32) if x.itemsize == 1 and x.numel() <= SMALL else x
