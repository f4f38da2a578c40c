"""The parameters of a module, or of a list of parameters, with their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradiometer.inputs import module_walk
from gradiometer.inputs.checks import refusal
from gradiometer.inputs.named import Named, Tensors, named_tensors, present, with_names
from gradiometer.inputs.wrappers import unwrapped, without_wrappers

if TYPE_CHECKING:
    from collections.abc import Iterable

Parameters = nn.Module | Tensors


def named_parameters(source: nn.Module | Mapping[str, Any] | Iterable[Any], what: str) -> Named:
    """Return the named parameters of a module or of any input of `named_tensors`; tied ones once."""
    if isinstance(source, nn.Module):
        return _of_module(unwrapped(source), what)
    named = named_tensors(source, what)
    for name, parameter in zip(named.names, named.tensors, strict=True):
        if not isinstance(parameter, Tensor):
            raise TypeError(f"{what}: {name!r} {refusal(parameter)}")
    seen: set[Tensor] = set()
    once: list[Tensor | None] = []
    for parameter in named.tensors:
        once.append(None if parameter in seen else parameter)
        seen.add(parameter)
    return present(named.names, once)


def _of_module(module: nn.Module, what: str) -> Named:
    is_compiling = torch.compiler.is_compiling()
    found = None if is_compiling else module_walk.planned(module)
    if found is not None:
        return Named(*found)
    pairs = list(module.named_parameters())
    names = [name for name, _ in pairs]
    if not is_compiling:
        names = without_wrappers(module, names)
    named = with_names(names, [parameter for _, parameter in pairs], what)
    if not is_compiling:
        module_walk.plan(module, *named)
    return named


def tracked_parameters(model: Parameters | Mapping[str, nn.Module]) -> tuple[tuple[str, ...], list[Tensor]]:
    """Return names and parameters; in a mapping of modules, names are prefixed with the module's name."""
    if isinstance(model, Mapping) and model and all(isinstance(part, nn.Module) for part in model.values()):
        pairs = [
            (f"{prefix}.{name}", parameter)
            for prefix, part in model.items()
            for name, parameter in zip(*named_parameters(part, "Recorder"), strict=True)
        ]
        return named_parameters(pairs, "Recorder")
    return named_parameters(model, "Recorder")
