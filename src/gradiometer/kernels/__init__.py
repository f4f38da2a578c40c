"""Triton kernels; the only place that imports triton."""

from gradiometer.kernels.finalize import finalize
from gradiometer.kernels.moments import PARTIALS, moments
from gradiometer.kernels.tuning import CHUNK, MAX_CHUNKS

__all__ = ["CHUNK", "MAX_CHUNKS", "PARTIALS", "finalize", "moments"]
