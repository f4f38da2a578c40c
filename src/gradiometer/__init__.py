"""gradiometer: the instrument panel of a PyTorch training step.

It measures every gradient, weight and update at every step, inside the compiled graph. It reports norms
that do not overflow, NaN and Inf by parameter name, and vanishing and exploding layers. It reads memory
once and does not wait for the device.
"""

from gradiometer import rules, sinks
from gradiometer.columns import (
    COLUMNS,
    DEFAULT_DEAD_THRESHOLD,
    DEFAULT_EXPLODING_THRESHOLD,
    DEFAULT_VANISHING_THRESHOLD,
    Flag,
    Thresholds,
)
from gradiometer.control import (
    ElementCounts,
    FiniteReport,
    check_finite,
    clip_coefficient,
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    collect_and_clip_,
    inverse_scale,
    share_found_inf_,
)
from gradiometer.distributed import RankError, Ranks
from gradiometer.monitor import Monitor
from gradiometer.recorder import Recorder, StepRecord
from gradiometer.rules import Finding, Severity
from gradiometer.runs import Run, RunError, read_run
from gradiometer.stats import (
    EMA,
    ModuleReports,
    Pending,
    Report,
    Smoothed,
    TensorReport,
    TensorStats,
    collect,
    collect_grads,
    collect_weights,
    grad_norm,
    group_ratio,
    materialize,
    materialize_async,
    total_norm,
)
from gradiometer.version import __version__
from gradiometer.web import write_page

__all__ = [
    "COLUMNS",
    "DEFAULT_DEAD_THRESHOLD",
    "DEFAULT_EXPLODING_THRESHOLD",
    "DEFAULT_VANISHING_THRESHOLD",
    "EMA",
    "ElementCounts",
    "Finding",
    "FiniteReport",
    "Flag",
    "ModuleReports",
    "Monitor",
    "Pending",
    "RankError",
    "Ranks",
    "Recorder",
    "Report",
    "Run",
    "RunError",
    "Severity",
    "Smoothed",
    "StepRecord",
    "TensorReport",
    "TensorStats",
    "Thresholds",
    "__version__",
    "check_finite",
    "clip_coefficient",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "collect",
    "collect_and_clip_",
    "collect_grads",
    "collect_weights",
    "grad_norm",
    "group_ratio",
    "inverse_scale",
    "materialize",
    "materialize_async",
    "read_run",
    "rules",
    "share_found_inf_",
    "sinks",
    "total_norm",
    "write_page",
]
