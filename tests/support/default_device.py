"""A default device for the factory calls of the package alone: tests make their own tensors on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import gradiometer

PACKAGE = str(Path(gradiometer.__file__).parent)


class DefaultDevice(TorchFunctionMode):
    """Does what ``torch.set_default_device(device)`` does, for calls whose caller is in the package."""

    def __init__(self, device):
        super().__init__()
        self.device = torch.device(device)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        del types
        kwargs = kwargs or {}
        # factory functions are built in: the next Python frame is that of the call
        ours = sys._getframe(1).f_code.co_filename.startswith(PACKAGE)
        if ours and func in _device_constructors() and kwargs.get("device") is None:
            kwargs["device"] = self.device
        return func(*args, **kwargs)
