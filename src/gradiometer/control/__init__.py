"""Operations on gradients: clipping, checks for NaN and Inf, GradScaler support.

The functions scale or clamp gradients in place, or check tensors; norms are computed in fp64. Nothing here
records or reports over time.
"""

from gradiometer.control.check_finite import check_finite
from gradiometer.control.clip import (
    clip_coefficient,
    clip_grad_norm_,
    clip_grads_with_norm_,
    collect_and_clip_,
)
from gradiometer.control.clip_value import ElementCounts, clip_grad_value_
from gradiometer.control.finite_report import FiniteReport
from gradiometer.control.grad_scaler import inverse_scale, is_still_scaled, share_found_inf_

__all__ = [
    "ElementCounts",
    "FiniteReport",
    "check_finite",
    "clip_coefficient",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "collect_and_clip_",
    "inverse_scale",
    "is_still_scaled",
    "share_found_inf_",
]
