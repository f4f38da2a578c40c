"""Operations on gradients and steps: clipping, checks for NaN, Inf and determinism, GradScaler support.

The functions scale or clamp gradients in place, or check tensors and steps; norms are computed in fp64.
Nothing here records or reports over time.
"""

from gradiometer.control.check_deterministic import Determinism, check_deterministic
from gradiometer.control.check_finite import check_finite
from gradiometer.control.clip import (
    clip_coefficient,
    clip_grad_norm_,
    clip_grads_with_norm_,
    collect_and_clip_,
)
from gradiometer.control.clip_events import (
    Clip,
    ClipObserver,
    clip_begins,
    clip_ended,
    observers,
    observers_now,
    value_clip_begins,
)
from gradiometer.control.clip_value import ElementCounts, clip_grad_value_
from gradiometer.control.coord_check import coord_check
from gradiometer.control.coord_report import CoordCheck, CoordRow, Slope
from gradiometer.control.finite_report import FiniteReport
from gradiometer.control.grad_scaler import inverse_scale, is_still_scaled, share_found_inf_
from gradiometer.control.gradient_agreement import GradientAgreement
from gradiometer.control.gradient_cosines import GradientCosines
from gradiometer.control.locate_nonfinite import locate_nonfinite
from gradiometer.control.located import Located
from gradiometer.control.noise_scale import NoiseScale
from gradiometer.control.per_tensor_clip import PerTensorClip
from gradiometer.control.random_state import random_state, restore_random_state
from gradiometer.control.weight_norm_clip import WeightNormClip
from gradiometer.control.z_score_clip import ZScoreClip

__all__ = [
    "Clip",
    "ClipObserver",
    "CoordCheck",
    "CoordRow",
    "Determinism",
    "ElementCounts",
    "FiniteReport",
    "GradientAgreement",
    "GradientCosines",
    "Located",
    "NoiseScale",
    "PerTensorClip",
    "Slope",
    "WeightNormClip",
    "ZScoreClip",
    "check_deterministic",
    "check_finite",
    "clip_begins",
    "clip_coefficient",
    "clip_ended",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "collect_and_clip_",
    "coord_check",
    "inverse_scale",
    "is_still_scaled",
    "locate_nonfinite",
    "observers",
    "observers_now",
    "random_state",
    "restore_random_state",
    "share_found_inf_",
    "value_clip_begins",
]
