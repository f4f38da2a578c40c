"""Copy pointers and chunk maps to the device, in eager code and in CUDA graphs.

Pinned memory is either copied from once and released at once, outside of any capture, or made in a capture
and kept as long as the process lives. So none is released that a stream being captured has used: PyTorch's
allocator would record an event in that capture, and a later allocation would fail when it queries it.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch._C import _get_function_stack_at, _len_torch_function_stack

from gradiometer.extras import is_installed

_GRAPH_TREES: Final = "torch._inductor.cudagraph_trees"
# pinned memory that captured graphs read at every replay: never written again and never freed
_captured: list[Tensor] = []


def upload(host: Tensor, device: torch.device) -> Tensor:
    """Return values that are the same in all calls, on the device, for the kernels of one call."""
    return copy_lasting(host, device)[0] if is_capturing(device) else copy(host, device)


def copy_lasting(host: Tensor, device: torch.device) -> tuple[Tensor, bool]:
    """Copy in a capture, from memory that lasts; return the copy, and whether that memory is new."""
    # recordings with the same addresses share it, as do all of one list share the static table
    for lasting in _captured:
        if torch.equal(lasting, host):
            return _upload(lasting, device), False
    lasting = _pinned(host, device)
    _captured.append(lasting)
    return _upload(lasting, device), True


def copy(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device; call it outside of a capture."""
    # the pinned memory is released when the copy is queued, and reused when it is done
    return _upload(_pinned(host, device), device)


def _pinned(host: Tensor, device: torch.device) -> Tensor:
    return host if device.type == "cpu" else host.pin_memory()


def _upload(host: Tensor, device: torch.device) -> Tensor:
    return host.to(device, non_blocking=True)


def stream_of(device: torch.device) -> int:
    """Return the id of the device's current stream."""
    return 0 if device.type == "cpu" else _module_of(device).current_stream(device).stream_id


def is_capturing(device: torch.device) -> bool:
    """Return whether work queued on this device now becomes part of a CUDA or XPU graph."""
    if device.type not in {"cuda", "xpu"}:
        return False
    module = _module_of(device)
    # a fake tensor's device may not exist
    return bool(module.is_initialized() and module.is_current_stream_capturing())


def _module_of(device: torch.device) -> Any:
    return torch.cuda if device.type == "cuda" else torch.xpu


# the warm-up of a CUDA graph, in which no table may stay on the device


def in_function_mode() -> bool:
    """Return whether a function mode is active, other than the one of ``torch.set_default_device``.

    Inductor enters one that also sets a device while it warms up or records a CUDA graph.
    """
    count = _len_torch_function_stack()
    if count == 1:
        default = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None)
        return _get_function_stack_at(0) is not getattr(default, "device_context", None)
    return count > 0


def may_warm_up() -> bool:
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
