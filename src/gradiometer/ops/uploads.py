"""Copy pointers and chunk maps to the device, in eager code and in CUDA graphs.

Pinned memory is either copied from once and released at once, outside of any capture, or made in a capture
and kept as long as the process lives. So none is released that a stream being captured has used: PyTorch's
allocator would record an event in that capture, and a later allocation would fail when it queries it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# pinned memory that captured graphs read at every replay: never written again and never freed
_captured: list[Tensor] = []


def upload(host: Tensor, device: torch.device) -> Tensor:
    """Return values that are the same in all calls, on the device, for the kernels of one call."""
    return copy_lasting(host, device)[0] if is_capturing(device) else copy(host, device)


def copy_lasting(host: Tensor, device: torch.device) -> tuple[Tensor, bool]:
    """Copy in a capture, from memory that lasts; return the copy, and whether that memory is new."""
    lasting, is_new = _lasting(host, device)
    return _upload(lasting, device), is_new


def _lasting(values: Tensor, device: torch.device) -> tuple[Tensor, bool]:
    """Return pinned memory for captured copies that holds these values, and whether it is new."""
    # recordings with the same addresses share it, as do all of one list share the static table
    for host in _captured:
        if torch.equal(host, values):
            return host, False
    host = _pinned(values, device)
    _captured.append(host)
    return host, True


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
