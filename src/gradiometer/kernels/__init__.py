"""Triton kernels; the only place that imports triton.

The launchers share arguments: ``pointers``, the addresses of T tensors; ``table``, that of a `ChunkMap` of
`gradiometer.ops`; ``num_tensors``, T; ``dtype``, ``first_chunk`` and ``num_chunks``, one of its groups.
``partials`` have a column for each of all N chunks; a launch writes those of its group. A ``cursor`` or
``gate`` is that of a ring: with a gate, nothing is read or written in a step that is not due. Shapes and
dtypes stand at the arguments of the kernels; all tensors but that of `contiguous` are contiguous.
"""

from gradiometer.kernels import tuning
from gradiometer.kernels.activations import ACTIVATION_PARTIALS, activation
from gradiometer.kernels.append import append
from gradiometer.kernels.clip_factors import clip_factors
from gradiometer.kernels.contiguous import contiguous
from gradiometer.kernels.driver import load_driver
from gradiometer.kernels.exponents import begin_exponents, classes, exponents
from gradiometer.kernels.finalize import finalize
from gradiometer.kernels.fingerprint import NUM_FINGERPRINT_PARTIALS, finalize_fingerprints
from gradiometer.kernels.lines import lines
from gradiometer.kernels.moments import PARTIALS, moments
from gradiometer.kernels.pairs import PAIR_PARTIALS, finalize_pairs, pairs
from gradiometer.kernels.projections import merge_projections, project
from gradiometer.kernels.scale import scale
from gradiometer.kernels.tap_partials import merge_partials

__all__ = [
    "ACTIVATION_PARTIALS",
    "NUM_FINGERPRINT_PARTIALS",
    "PAIR_PARTIALS",
    "PARTIALS",
    "activation",
    "append",
    "begin_exponents",
    "classes",
    "clip_factors",
    "contiguous",
    "exponents",
    "finalize",
    "finalize_fingerprints",
    "finalize_pairs",
    "lines",
    "load_driver",
    "merge_partials",
    "merge_projections",
    "moments",
    "pairs",
    "project",
    "scale",
    "tuning",
]
