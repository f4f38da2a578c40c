"""Triton kernels; the only place that imports triton."""

from gradiometer.kernels.finalize import finalize
from gradiometer.kernels.moments import PARTIALS, moments
from gradiometer.kernels.tuning import CHUNK

__all__ = ["CHUNK", "PARTIALS", "finalize", "moments"]
