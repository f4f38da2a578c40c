"""Counts transfers from the device to the host, without a device.

The tensors are fake ones on "cuda". Every read of a value, by `.item()`, `bool()` or a comparison, and
every copy to the CPU is then a call of the dispatcher, from any caller. The values read are made up: a
flag is unset, a number is 0, and a copy arrives as real zeros, which can then be read freely.
"""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from support.fake_device import no_guard
from support.home_grown import with_grads


class Transfers(TorchDispatchMode):
    """Counts how often the host reads values on "cuda"; used above a FakeTensorMode."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        del types
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        away = [tensor for tensor in tensors if tensor.device.type != "cpu"]
        if away and func is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
            with _disable_current_modes():
                return torch.zeros((), dtype=away[0].dtype).item()
        if away and func is torch.ops.aten.copy_.default and args[0].device.type == "cpu":
            self.count += 1
            return args[0]
        if away and {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            raise NotImplementedError(f"{func}: its return value is not implemented")
        made_there = torch.device(kwargs.get("device") or "cpu").type != "cpu"
        # arrived values are real, and so are results computed from them
        with nullcontext() if away or made_there else _disable_current_modes():
            out = func(*args, **kwargs)
        if away and isinstance(out, Tensor) and out.device.type == "cpu":
            self.count += 1
            with _disable_current_modes():
                return torch.zeros(out.shape, dtype=out.dtype)
        return out


class _Lists(TorchFunctionMode):
    """Makes visible that `torch.tensor` of a list of tensors reads each number, which it does in C++."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        del types
        if func is torch.tensor:
            args = (pytree.tree_map_only(Tensor, lambda t: t.item(), args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def count_transfers(call, model):
    """Return the number of transfers that ``call(model, loss)`` makes for a model like this on a device."""
    with FakeTensorMode():
        # new tensors without an explicit device, too
        with torch.device("cuda"):
            grads = {name: p.grad for name, p in model.named_parameters()}
            away = with_grads(
                {
                    name: None if g is None else torch.empty(g.shape, dtype=g.dtype)
                    for name, g in grads.items()
                }
            )
            loss = torch.zeros(())
        # a fake tensor is read element by element, a tensor on a device is copied once
        whole = patch.object(FakeTensor, "tolist", lambda t: t.cpu().tolist())
        with torch.no_grad(), whole, no_guard(), _Lists(), Transfers() as seen:
            call(away, loss)
    return seen.count
