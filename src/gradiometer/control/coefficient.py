"""The coefficient of clipping, ``min(1, limit / (norm + 1e-6))``, with a norm that may be inf."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from gradiometer.columns import number, realized
from gradiometer.inputs import on_device

# as in torch: added to a norm before dividing by it
EPS: Final = 1e-6
LARGEST: Final = torch.finfo(torch.float64).max


def arrived(number: Tensor, device: torch.device) -> Tensor:
    """Return a number in float64 on a device."""
    return on_device(number, device, torch.float64)


def coefficient_of(norm: Tensor, limit: float | Tensor) -> Tensor:
    """Return the coefficient, 0-d float64 from 0 to 1; 1 if the norm or the limit is NaN."""
    if isinstance(limit, Tensor):
        limit = arrived(limit, norm.device).reshape(())
    else:
        limit = number(limit, norm.device)
    ratio = limit / (norm + EPS).clamp(max=LARGEST)
    # the value of a tensor was not checked: NaN clips nothing
    return realized(torch.where(ratio < 1.0, ratio, 1.0)).clamp(min=0.0)


def unscaled(norm: Tensor, inv_scale: Tensor | float) -> Tensor:
    """Return norms of unscaled gradients, from those of scaled ones."""
    if isinstance(inv_scale, Tensor):
        inv_scale = arrived(inv_scale.detach(), norm.device).reshape(()).abs()
    return norm * inv_scale
