"""Views of a tensor as the plain numbers that are measured."""

from __future__ import annotations

import torch
from torch import Tensor


def as_real(tensor: Tensor) -> Tensor:
    """Return the real view ``(..., 2)`` of a complex tensor, and others as they are.

    Lazy conjugation and negation are resolved.
    """
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj().resolve_neg())
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def as_flat(tensor: Tensor) -> Tensor | None:
    """Return the tensor's memory as one dimension, or None if it has gaps or overlaps.

    A transposed or channels_last tensor is returned in memory order: no statistic depends on the order of
    elements.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return None
        expected *= size
    return tensor.as_strided((tensor.numel(),), (1,))


def on_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return the tensor on a device, copied asynchronously except to the CPU.

    A copy to the CPU is read at once, so it has to be complete.
    """
    return tensor.to(device, dtype, non_blocking=device.type != "cpu")
