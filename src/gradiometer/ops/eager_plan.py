"""How eager PyTorch measures a list of tensors: large ones, single numbers, and groups of small ones."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from gradiometer.inputs import as_real

if TYPE_CHECKING:
    from collections.abc import Sequence


__all__ = ["BATCH", "FEW", "SMALL", "WIDTHS", "Group", "Plan", "plan_of", "prepared"]

# a small tensor fills one zero-padded row of the next width
SMALL: Final = 2**12
WIDTHS: Final = (2**4, 2**6, 2**8, 2**10, SMALL)
# the width for each number of elements
_WIDTH_OF: Final = tuple([WIDTHS[bisect_left(WIDTHS, size)] for size in range(SMALL + 1)])
# elements of a batch of such rows: below what torch spreads over threads
BATCH: Final = 2**15 - 1
# elements for which the number of operators counts more than their work
FEW: Final = BATCH // 3


class Group(NamedTuple):
    """Small tensors of one dtype that are padded to one width.

    ``indices``: their places in the call. ``flat``: whether each has one dimension. ``padding``: the zeros
    after each.
    """

    width: int
    indices: list[int]
    sizes: list[int]
    flat: list[bool]
    padding: list[Tensor]


class Plan(NamedTuple):
    """How a list of tensors is measured: places of large ones and of single numbers; groups of others."""

    large: list[int]
    single: list[int]
    groups: list[Group]


def plan_of(tensors: Sequence[Tensor]) -> Plan:
    """Return the plan of tensors as `prepared` returns them; it also holds where only addresses differ."""
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
        # a few short tensors are one group: zeros after a row change no bit of its sums
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
    """Return a tensor of real numbers; a small one in a dtype that has the operators that are needed."""
    x = as_real(tensor)
    # fp8 formats lack operators, and one of them lacks a zero to pad with
    return x.to(torch.float32) if x.itemsize == 1 and x.numel() <= SMALL else x
