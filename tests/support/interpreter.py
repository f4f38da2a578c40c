"""Speed up Triton's interpreter: look up what it patches once, not at every call.

For each launch, and for each call of a device function in it, the interpreter searches all members of the
language's modules to find the builtins; their names never change.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any


def find_builtins_once() -> None:
    """Make the interpreter cache the names of builtins; it still inspects each of these members."""
    from triton.language import core
    from triton.runtime import interpreter

    names: dict[Any, list[str]] = {}

    def getmembers(package: Any) -> list[tuple[str, Any]]:
        # this is the first call, before any of its members is replaced
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]
        return [(name, getattr(package, name)) for name in names[package]]

    # only this function of the module is replaced
    interpreter.inspect = SimpleNamespace(**vars(inspect) | {"getmembers": getmembers})
