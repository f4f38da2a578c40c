"""Operators in float64 that torch has only for narrower dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


def _unscale(grads: Sequence[Tensor], found: Tensor, scale: Tensor) -> None:
    """Multiply gradients by the inverse scale of a GradScaler, and note whether one is not finite."""
    for x in grads:
        found.logical_or_(~x.isfinite().all())
        x.mul_(scale)


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Multiply groups of rows, columns or inner dimensions, which end at ``offs``: the experts of a layer."""
    del out_dtype
    if offs is None:
        result = torch.bmm(a, b)
    else:
        ends = offs.tolist()
        groups = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        if a.dim() == b.dim() == 2:
            return torch.stack([a[:, g] @ b[g] for g in groups])
        if a.dim() == 2:
            # rows after the last group have no expert
            result = a.new_zeros(a.shape[0], b.shape[-1])
            for i, g in enumerate(groups):
                result[g] = a[g] @ b[i]
        else:
            result = a.new_zeros(a.shape[1], b.shape[-1])
            for i, g in enumerate(groups):
                result[:, g] = a[i] @ b[:, g]
    return result if bias is None else result + bias


EXACT: Final[dict[str, Callable[..., Any]]] = {
    "aten::_amp_foreach_non_finite_check_and_unscale_": _unscale,
    "aten::_grouped_mm": _grouped_mm,
}
