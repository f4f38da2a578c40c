"""Launch the kernels that clip: those that scale gradients, and those that decide by how much.

They have no ops: a compiled graph contains plain operators instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradiometer.ops import dispatch, packing, uploads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.ops.launch_plans import LaunchPlan


def scale_(tensors: Sequence[Tensor], factor: Tensor, plan: LaunchPlan) -> None:
    """Multiply tensors of one device in place, by a kernel that touches none whose factor is 1.

    No two tensors share memory; ``plan`` is the result of `writable` for them. ``factor``: 0-d float64 on
    their device, at most 1; or one for each tensor.
    """
    # this bypasses the dispatcher, so we bump the version counters for autograd ourselves
    torch.autograd.graph.increment_version(tensors)
    device = tensors[0].device
    with dispatch.launching_on(device):
        from gradiometer import kernels  # noqa: PLC0415 as in dispatch.py

        tuning = kernels.tuning
        keep = not uploads.in_function_mode()
        packed = packing.pack(tensors, tuning.CHUNK, tuning.MAX_CHUNKS, plan, keep=keep)
        # in reverse, as the kernel does with the chunks of a group
        for group in packed.chunk_map.groups[::-1]:
            kernels.scale(packed.pointers, packed.table, factor, *group, packed.chunk_map.num_tensors)


def clip_factors_(
    columns: Tensor, buffers: Sequence[Tensor], settings: Sequence[float], *, per_tensor: bool
) -> Tensor:
    """Return the factors of a step, and change the buffers of the module in place.

    See `gradiometer.kernels.clip_factors` for the arguments; all tensors are on one device that uses kernels.
    """
    # this bypasses the dispatcher, so we bump the version counters for autograd ourselves
    torch.autograd.graph.increment_version(buffers)
    with dispatch.launching_on(columns.device):
        from gradiometer import kernels  # noqa: PLC0415 as in dispatch.py

        return kernels.clip_factors(columns, buffers, settings, per_tensor=per_tensor)
