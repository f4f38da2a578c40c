"""Keep the state of a model while it is examined: weights, buffers, modes, attributes and random numbers."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from gradiometer.checks.kept_objects import kept_objects, package_of, restore_slots, same_bits, slots, write
from gradiometer.control import random_state, restore_random_state
from gradiometer.stats import repeating

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn


@contextmanager
def kept_state(model: nn.Module, *, values: bool = True, batch: Any = None) -> Iterator[None]:
    """Restore everything that examining a model may change, also after an error.

    Attributes of modules are put back, so that what a module assigns in its forward is forgotten, and so are
    the containers, objects, tensors and generators that these attributes and the batch lead to. Without
    ``values``, for a model that is not called, those of parameters and buffers are not looked at.
    """
    modules = list(model.modules())
    tensors = _tensors(modules)
    strided = [x for x in tensors if values and not x.is_meta and x.layout == torch.strided]
    data = [(x, x.data, x.data.clone()) for x in strided]
    grads = [(x, x.grad, _copy(x.grad) if values else None, x.requires_grad) for x in tensors if x.is_leaf]
    # those of a ScriptModule have no tables
    attributes = [
        (x, dict(vars(x)), {key: dict(vars(x)[key]) for key in _TABLES if isinstance(vars(x).get(key), dict)})
        for x in modules
    ]
    held = [
        (x, list(slots(x)), {name: getattr(x, name) for name in slots(x) if hasattr(x, name)})
        for x in modules
    ]
    others = [x for _, own, tables in attributes for key, x in own.items() if key not in tables]
    others += [x for _, _, own in held for x in own.values()]
    packages = {package_of(x) for x in [*modules, batch]} - {"torch"} | {"numpy"}
    objects = kept_objects([*others, batch], [*tensors, *modules], packages) if values else []
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
        for module, names, own in held:
            restore_slots(module, names, own)
        for restore in objects:
            # an object of another library may refuse to be changed
            with suppress(Exception):
                restore()
        for x, used, copy in data:
            x.data = used
            # a write of the forward, also of running statistics
            if not same_bits(used, copy):
                write(used, copy)
        for x, grad, before, requires in grads:
            x.grad = grad
            if grad is not None and before is not None and not same_bits(grad, before):
                write(grad, before)
            if x.requires_grad != requires:
                x.requires_grad_(requires)
        restore_random_state(random)


_COPIED = (torch.strided, torch.sparse_coo)
_TABLES = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks")


def _tensors(modules: list[nn.Module]) -> list[Tensor]:
    found: dict[Tensor, None] = {}
    for module in modules:
        own: list[Any] = [*module._parameters.values(), *module._buffers.values()]  # noqa: SLF001
        found.update(dict.fromkeys(x for x in own if x is not None))
    return list(found)


def _copy(x: Tensor | None) -> Tensor | None:
    return None if x is None or x.is_meta or x.layout not in _COPIED else x.detach().clone()
