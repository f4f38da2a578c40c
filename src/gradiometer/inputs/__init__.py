"""Convert a user's input to named tensors.

The input is a module, a mapping, a list or pairs. The output is `Named`: names without the parts that
wrappers add, and tensors that can be measured. Any other input raises an error that says what to
do and, for an item of a collection, names it. Nothing here computes.
"""

from gradiometer.inputs.checks import (
    Traits,
    check,
    describe,
    has_float64,
    is_limit,
    is_one_number,
    is_plain_subclass,
    layout,
    refusal,
)
from gradiometer.inputs.dtensor import (
    Place,
    is_dtensor,
    is_partial,
    is_whole,
    local_shard,
    local_shards,
    placed_like,
    places,
    reduction_of,
)
from gradiometer.inputs.named import Named, Tensors, check_names, named_tensors, present, with_names
from gradiometer.inputs.parameters import Parameters, named_parameters, tracked_parameters
from gradiometer.inputs.parts import Box, Part
from gradiometer.inputs.views import as_flat, as_real, on_device
from gradiometer.inputs.wrappers import modules_by_name, named_buffers, unwrapped, without_wrappers

__all__ = [
    "Box",
    "Named",
    "Parameters",
    "Part",
    "Place",
    "Tensors",
    "Traits",
    "as_flat",
    "as_real",
    "check",
    "check_names",
    "describe",
    "has_float64",
    "is_dtensor",
    "is_limit",
    "is_one_number",
    "is_partial",
    "is_plain_subclass",
    "is_whole",
    "layout",
    "local_shard",
    "local_shards",
    "modules_by_name",
    "named_buffers",
    "named_parameters",
    "named_tensors",
    "on_device",
    "placed_like",
    "places",
    "present",
    "reduction_of",
    "refusal",
    "tracked_parameters",
    "unwrapped",
    "with_names",
    "without_wrappers",
]
