"""Whether a call may be part of the warm-up of a CUDA graph, in which no table may stay on the device."""

from __future__ import annotations

import sys
from functools import cache
from typing import Final

import torch
from torch._C import _get_function_stack_at, _len_torch_function_stack

from gradiometer.extras import is_installed

_GRAPH_TREES: Final = "torch._inductor.cudagraph_trees"


def in_function_mode() -> bool:
    """Return whether a function mode is active, other than the one of ``torch.set_default_device``.

    Inductor enters one that also sets a device while it warms up or records a CUDA graph.
    """
    count = _len_torch_function_stack()
    if count == 1:
        default = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None)
        return _get_function_stack_at(0) is not getattr(default, "device_context", None)
    return count > 0


def is_possible() -> bool:
    """Return whether a call through the dispatcher may be part of the warm-up of a CUDA graph.

    An op can't tell: nothing is captured yet, and the dispatcher hides function modes. But only Inductor's
    graph trees allocate from a graph's pool in a warm-up, and their module is imported for the first of them.
    """
    if _GRAPH_TREES in sys.modules:
        return True
    # a version of torch without this module may have another one
    return "torch._inductor" in sys.modules and not _has_graph_trees()


@cache
def _has_graph_trees() -> bool:
    return is_installed(_GRAPH_TREES)
