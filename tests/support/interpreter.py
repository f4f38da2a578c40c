"""Triton's interpreter, made quicker: it looks once, and not at each call, for what it replaces.

For each launch, and for each call of a device function in it, the interpreter goes through all members of the
language's modules to find the builtins; their names never change.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any


def find_builtins_once() -> None:
    """Have the interpreter remember which members are builtins; it still looks at each of them."""
    from triton.language import core
    from triton.runtime import interpreter

    names: dict[Any, list[str]] = {}

    def getmembers(package: Any) -> list[tuple[str, Any]]:
        # met first before any of its members is replaced
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]
        return [(name, getattr(package, name)) for name in names[package]]

    # of the module's names this one alone is another
    interpreter.inspect = SimpleNamespace(**vars(inspect) | {"getmembers": getmembers})
