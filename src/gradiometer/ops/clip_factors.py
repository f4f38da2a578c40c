"""Launch the kernels that decide for `gradiometer.ZScoreClip` and `gradiometer.PerTensorClip`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradiometer.ops.library import launching_on

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["clip_factors_"]


def clip_factors_(
    columns: Tensor, buffers: Sequence[Tensor], settings: Sequence[float], *, per_tensor: bool
) -> Tensor:
    """Return the factors of a step, and change the buffers of the module in place.

    See `gradiometer.kernels.clip_factors` for the arguments; all tensors are on one device that uses kernels.
    """
    # this bypasses the dispatcher, so we bump the version counters for autograd ourselves
    torch.autograd.graph.increment_version(buffers)
    with launching_on(columns.device):
        from gradiometer import kernels  # noqa: PLC0415 as in library.py

        return kernels.clip_factors(columns, buffers, settings, per_tensor=per_tensor)
