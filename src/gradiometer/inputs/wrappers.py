"""Wrappers of modules, such as data parallelism's, which are no part of the names in a model.

A wrapper is known by its class and holds the module in an attribute. A module of a model's own may have that
attribute's name, such as ``module``, so its name alone does not tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# the class of a wrapper -> the packages that define it, and the attribute that holds the module
_WRAPPERS: Final = {
    "AbstractGradSampleModule": (("opacus",), "_module"),
    "ActivationWrapper": (("torch",), "_checkpoint_wrapped_module"),
    "DataParallel": (("torch",), "module"),
    "DeepSpeedEngine": (("deepspeed",), "module"),
    "DistributedDataParallel": (("torch", "megatron"), "module"),
    "Float16Module": (("megatron",), "module"),
    "FullyShardedDataParallel": (("torch",), "_fsdp_wrapped_module"),
    "OptimizedModule": (("torch",), "_orig_mod"),
    "_FabricModule": (("lightning", "lightning_fabric"), "_forward_module"),
}

# these act in their own forward and backward, or replace the parameters, so a call needs the wrapper
_KEPT: Final = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def _attribute(module: nn.Module) -> str | None:
    """Return the attribute that holds the module in a wrapper; None for any other module."""
    for kind in type(module).__mro__:
        if kind.__name__ in _WRAPPERS:
            packages, name = _WRAPPERS[kind.__name__]
            if kind.__module__.partition(".")[0] in packages:
                return name
    return None


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of torch.compile, data parallelism and training frameworks."""
    while True:
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            module = module.module
        elif type(module).__name__ == "OptimizedModule":
            module = module._orig_mod  # type: ignore[assignment] # noqa: SLF001
        elif torch.compiler.is_compiling():
            # Dynamo would guard what `_attribute` reads; frameworks do not compile their own wrappers
            return module
        else:
            name = _attribute(module)
            if name is None or name in _KEPT:
                return module
            module = getattr(module, name)


def modules_by_name(root: nn.Module) -> dict[str, list[nn.Module]]:
    """Return the modules by their names without wrappers: a module, or its wrappers and then the module."""
    found: dict[str, list[nn.Module]] = {}
    for _, module, name in _named(root):
        found.setdefault(name, []).append(module)
    return found


def named_buffers(root: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers of a module with their names without wrappers."""
    pairs = list(root.named_buffers())
    names = without_wrappers(root, [name for name, _ in pairs])
    return [(name, buffer) for name, (_, buffer) in zip(names, pairs, strict=True)]


def without_wrappers(root: nn.Module, names: Iterable[str]) -> list[str]:
    """Return the names of parameters or buffers of a module without the parts that wrappers add."""
    known = {path: name for path, _, name in _named(root) if path != name}
    if not known:
        return list(names)
    found = []
    for name in names:
        outer, _, last = name.rpartition(".")
        found.append(_joined(known.get(outer, outer), last))
    return found


def _named(root: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the full name of each module, the module, and its name without wrappers."""
    names: dict[str, str] = {}
    wrapped: dict[str, str | None] = {}
    for path, module in root.named_modules():
        outer, _, last = path.rpartition(".")
        above = names.get(outer, outer)
        names[path] = above if wrapped.get(outer) == last else _joined(above, last)
        wrapped[path] = _attribute(module)
        yield path, module, names[path]


def _joined(outer: str, last: str) -> str:
    return f"{outer}.{last}" if outer else last
