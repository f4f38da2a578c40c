"""Plan how eager PyTorch measures a list: large tensors, single numbers, and groups of small tensors."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from gradiometer.inputs import as_real

if TYPE_CHECKING:
    from collections.abc import Sequence


__all__ = ["BATCH", "FEW", "SMALL", "WIDTHS", "Group", "Plan", "plan_of", "prepared"]

# a small tensor fills one zero-padded row, usually of the smallest width that holds it
SMALL: Final = 2**12
WIDTHS: Final = (2**4, 2**6, 2**8, 2**10, SMALL)
# the width for each number of elements
_WIDTH_OF: Final = tuple([WIDTHS[bisect_left(WIDTHS, size)] for size in range(SMALL + 1)])
# most elements in a batch of such rows: fewer than torch spreads over threads; twice that on one thread
BATCH: Final = 2**15 - 1
# up to this many elements the number of operators costs more than their work
FEW: Final = BATCH // 3


class Group(NamedTuple):
    """Small tensors of one dtype that are padded to one width.

    ``indices``: their positions in the call. ``flat``: whether each has one dimension. ``padding``: the zeros
    after each.
    """

    width: int
    indices: list[int]
    sizes: list[int]
    flat: list[bool]
    padding: list[Tensor]


class Plan(NamedTuple):
    """How to measure a list of tensors: indices of large tensors and single numbers; groups of the others."""

    large: list[int]
    single: list[int]
    groups: list[Group]


def plan_of(tensors: Sequence[Tensor]) -> Plan:
    """Return the plan for tensors from `prepared`; it also holds if only the addresses differ."""
    plan = Plan([], [], [])
    small: dict[torch.dtype, dict[int, list[int]]] = {}
    for index, x in enumerate(tensors):
        numel = x.numel()
        if numel > SMALL:
            plan.large.append(index)
        elif numel == 1:
            plan.single.append(index)
        elif numel:
            small.setdefault(x.dtype, {}).setdefault(_WIDTH_OF[numel], []).append(index)
    for by_width in small.values():
        widest, together = max(by_width), [index for indices in by_width.values() for index in indices]
        # a few short tensors form one group: trailing zeros change no bit of a row's sums
        groups = {widest: together} if len(together) * widest <= FEW else by_width
        plan.groups.extend([_group_of(tensors, *group) for group in groups.items()])
    return plan


def _group_of(tensors: Sequence[Tensor], width: int, indices: list[int]) -> Group:
    members = [tensors[index] for index in indices]
    sizes = [x.numel() for x in members]
    zeros = members[0].new_zeros(width)
    padding = {size: zeros[size:] for size in set(sizes)}
    return Group(width, indices, sizes, [x.dim() == 1 for x in members], [padding[size] for size in sizes])


def prepared(tensor: Tensor) -> Tensor:
    """Return a tensor as real numbers; a small one in a dtype that has the required operators."""
    x = as_real(tensor)
    # fp8 formats lack operators, and one of them has no zero to pad with
    return x.to(torch.float32) if x.itemsize == 1 and x.numel() <= SMALL else x
