"""Hooks of a user's modules."""

from __future__ import annotations

import contextlib
from typing import Any


class ModuleHook:
    """A hook of a module. In a copy of the module it does nothing, and a file of one needs no gradiometer."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Be a function of Python itself that takes any arguments and returns None."""
        return getattr, (contextlib.nullcontext(), "__exit__")
