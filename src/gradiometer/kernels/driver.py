"""Triton's driver. Triton builds it with a C compiler when it first launches a kernel on a machine."""

from typing import Any

from triton.runtime import driver


def load_driver() -> Any:
    """Return the driver of this machine's GPU; build it if necessary. Any exception may be raised."""
    return driver.active
