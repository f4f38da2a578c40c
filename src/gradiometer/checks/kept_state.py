"""Keep the state of a model while it is examined: weights, buffers, modes, attributes and random numbers."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from gradiometer.control import random_state, restore_random_state
from gradiometer.stats import repeating

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn


@contextmanager
def kept_state(model: nn.Module, *, values: bool = True) -> Iterator[None]:
    """Restore everything that examining a model may change, also after an error.

    Attributes of modules are put back, so that what a module assigns in its forward is forgotten. Without
    ``values``, for a model that is not called, those of parameters and buffers are not looked at.
    """
    modules = list(model.modules())
    tensors = _tensors(modules)
    strided = [x for x in tensors if values and not x.is_meta and x.layout == torch.strided]
    data = [(x, x.data, x.data.clone()) for x in strided]
    grads = [(x, x.grad, x.requires_grad) for x in tensors if x.is_leaf]
    attributes = [(x, dict(vars(x)), {key: dict(vars(x)[key]) for key in _TABLES}) for x in modules]
    devices = {x.device for x in tensors}
    random = random_state(devices)
    try:
        with repeating(tensors):
            yield
    finally:
        for module, own, tables in attributes:
            vars(module).clear()
            vars(module).update(own)
            for key, entries in tables.items():
                table = own[key]
                if len(table) != len(entries) or any(table.get(k) is not x for k, x in entries.items()):
                    table.clear()
                    table.update(entries)
        for x, used, copy in data:
            x.data = used
            # a write of the forward, also of running statistics
            if not _same(used, copy):
                used.copy_(copy)
        for x, grad, requires in grads:
            x.grad = grad
            if x.requires_grad != requires:
                x.requires_grad_(requires)
        restore_random_state(random)


_TABLES = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks")


def _tensors(modules: list[nn.Module]) -> list[Tensor]:
    found: dict[Tensor, None] = {}
    for module in modules:
        own: list[Any] = [*module._parameters.values(), *module._buffers.values()]  # noqa: SLF001
        found.update(dict.fromkeys(x for x in own if x is not None))
    return list(found)


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same bits."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
