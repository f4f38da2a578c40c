"""Triton's interpreter, corrected and sped up.

Its ``tl.fma`` rounds twice. For each launch, and for each call of a device function in it, the interpreter
searches all members of the language's modules to find the builtins, whose names never change.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any


def round_fma_once() -> None:
    """Make the interpreter's fused multiply-add round once."""
    from triton.runtime import interpreter

    from support.arithmetic import fma

    def create_fma(_: Any, x: Any, y: Any, z: Any) -> Any:
        return interpreter.TensorHandle(fma(x.data, y.data, z.data), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = create_fma


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
