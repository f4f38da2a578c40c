"""The custom ops: schemas, fakes and dispatch to the Triton kernels or to eager PyTorch.

The ops measure lists of tensors: they return raw columns ``(T, C) float64`` and flags ``(T,) int32``, or
write them into a ring. Packing for the kernels and the eager reference are here too. Nothing here depends on
names, ranks or reports. Triton is imported on the first call on a device that needs it.
"""

from gradiometer.ops.clipping import clip_factors_, scale_
from gradiometer.ops.dispatch import INSTALL_COMPILER, INTERPRETED, recognize, uses_kernels, writable
from gradiometer.ops.exponents import measure_exponents, record_exponents_
from gradiometer.ops.in_graph import is_exporting, tensor_stats_in_graph
from gradiometer.ops.index_boxes import encode
from gradiometer.ops.launch_plans import LaunchPlan
from gradiometer.ops.line_reference import line_counts
from gradiometer.ops.lines import measure_lines
from gradiometer.ops.merge_rows import merge_rows_
from gradiometer.ops.pairs import keep_, measure_pairs, recognize_pairs
from gradiometer.ops.projections import may_project, measure_projections
from gradiometer.ops.ring import append_, numbers, record_
from gradiometer.ops.stream_order import StreamOrder
from gradiometer.ops.taps import may_measure, new_store, tap
from gradiometer.ops.tensors import measure, norm_on_host, tensor_stats
from gradiometer.ops.uploads import is_capturing

__all__ = [
    "INSTALL_COMPILER",
    "INTERPRETED",
    "LaunchPlan",
    "StreamOrder",
    "append_",
    "clip_factors_",
    "encode",
    "is_capturing",
    "is_exporting",
    "keep_",
    "line_counts",
    "may_measure",
    "may_project",
    "measure",
    "measure_exponents",
    "measure_lines",
    "measure_pairs",
    "measure_projections",
    "merge_rows_",
    "new_store",
    "norm_on_host",
    "numbers",
    "recognize",
    "recognize_pairs",
    "record_",
    "record_exponents_",
    "scale_",
    "tap",
    "tensor_stats",
    "tensor_stats_in_graph",
    "uses_kernels",
    "writable",
]
