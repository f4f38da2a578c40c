"""Grouping of rows by pattern, predicate, names or modules, and along the tree of modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from gradiometer.inputs import Named

# a regular expression searched in the name, a predicate of the name, exact names, or modules
GroupRule = (
    str | re.Pattern[str] | Callable[[str], bool] | Collection[str] | nn.Module | Collection[nn.Module]
)


def pairs_of(
    rules: Mapping[str, GroupRule] | Iterable[tuple[str, GroupRule]],
) -> list[tuple[str, GroupRule]]:
    """Check the rules of groups and return them as (name, rule) pairs."""
    if isinstance(rules, (str, nn.Module)) or not isinstance(rules, Iterable):
        msg = f"group: rules must be a mapping from group names to rules, such as patterns, got {rules!r}"
        raise TypeError(msg)
    pairs = list(rules.items()) if isinstance(rules, Mapping) else list(rules)
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names) or not all([isinstance(name, str) for name in names]):
        raise ValueError(f"group: the names of groups must be unique strings, got {tuple(names)}")
    return pairs


def members(names: tuple[str, ...], group: str, rule: GroupRule, model: Named | None) -> list[int]:
    """Return the indices of the rows in a group, in order; ``model`` holds the model's named parameters."""
    # before callables, since a module is callable
    modules = _modules(rule)
    if modules:
        chosen = _names_within(modules, names, group, model)
        return [i for i, name in enumerate(names) if name in chosen]
    if isinstance(rule, re.Pattern):
        return list(_found(names, rule.pattern, rule.flags))
    if isinstance(rule, str):
        try:
            return list(_found(names, rule, 0))
        except re.error as error:
            msg = f"group: the rule of {group!r} is not a regular expression: {error}: {rule!r}"
            raise ValueError(msg) from error
    if callable(rule):
        return [i for i, name in enumerate(names) if rule(name)]
    if isinstance(rule, Collection) and all([isinstance(name, str) for name in rule]):
        return [i for i, name in enumerate(names) if name in rule]
    raise TypeError(
        f"group: the rule of {group!r} must be a regular expression, a predicate, a collection of names, "
        f"or one or more modules, got {type(rule).__name__ if isinstance(rule, Tensor) else repr(rule)}"
    )


def by_module(names: tuple[str, ...], depth: int | None) -> dict[str, list[int]]:
    """Return module -> indices of the rows below it, in the order of the rows; see `module_of`."""
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 0):
        msg = "by_module: depth must be a non-negative integer (levels below the root) or None, "
        raise ValueError(msg + f"got {depth!r}")
    return {module: list(rows) for module, rows in _rows_by_module(names, depth)}


def module_of(name: str, depth: int | None) -> str:
    """Return the module that a tensor belongs to, at most ``depth`` levels down; ``""`` is the root.

    >>> [module_of("blocks.0.mlp.weight", depth) for depth in (0, 1, 2, None)]
    ['', 'blocks', 'blocks.0', 'blocks.0.mlp']
    """
    return ".".join(name.split(".")[:-1][:depth])


def _modules(rule: Any) -> list[nn.Module]:
    if isinstance(rule, nn.Module):
        return [rule]
    if isinstance(rule, (list, tuple, set, frozenset)) and rule:
        modules = [one for one in rule if isinstance(one, nn.Module)]
        return modules if len(modules) == len(rule) else []
    return []


def _names_within(
    modules: list[nn.Module], names: tuple[str, ...], group: str, model: Named | None
) -> set[str]:
    if model is None:
        raise TypeError(f"group: the rule of {group!r} is a module; pass its model: group(…, model=model)")
    # compare parameters, not names: a tied parameter is named after its first occurrence
    inside = {parameter for module in modules for parameter in module.parameters()}
    if names and model.names and not any([name in names for name in model.names]):
        raise ValueError(
            f"group: no row has the name of a parameter of model: the first row is {names[0]!r}, the first "
            f"parameter {model.names[0]!r}; pass the model that was measured, with the same wrappers"
        )
    chosen = {name for name, parameter in zip(model.names, model.tensors, strict=True) if parameter in inside}
    if inside and not chosen:
        msg = f"group: the module in the rule of {group!r} has no parameter in common with model; "
        raise ValueError(msg + "pass the model that contains it")
    return chosen


def _found(names: tuple[str, ...], pattern: str, flags: int) -> tuple[int, ...]:
    search = re.compile(pattern, flags).search
    return tuple(i for i, name in enumerate(names) if search(name))


def _rows_by_module(names: tuple[str, ...], depth: int | None) -> tuple[tuple[str, tuple[int, ...]], ...]:
    found: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        found.setdefault(module_of(name, depth), []).append(i)
    return tuple([(module, tuple(rows)) for module, rows in found.items()])


# The attribute that torch.compiler.assume_constant_result sets; calling that would import Dynamo as well.
# Names and patterns are constants of a graph, and not every version of Dynamo can trace the re module.
_found._dynamo_marked_constant = True  # type: ignore[attr-defined] # noqa: SLF001
_rows_by_module._dynamo_marked_constant = True  # type: ignore[attr-defined] # noqa: SLF001
