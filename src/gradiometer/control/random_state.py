"""The states of the random number generators that a step may use: of Python, NumPy, torch and devices."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def random_state(devices: Iterable[torch.device] = ()) -> dict[str, Any]:
    """Return the states of the global generators of this process, for the CPU and these devices.

    Never waits for a device: the state of its generator, a seed and an offset, is on the host. The result has
    only tensors and plain values.

    >>> import torch
    >>> state, first = random_state(), torch.rand(2)
    >>> restore_random_state(state)
    >>> torch.equal(torch.rand(2), first)
    True
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy: Any = sys.modules.get("numpy")
    # while another thread imports it, the module has no attributes
    if hasattr(numpy, "random"):
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tobytes(), *rest)
    for device in devices:
        if device.type not in {"cpu", "meta"}:
            # MPS has one generator
            where = [] if device.index is None else [device]
            state[str(device)] = torch.get_device_module(device).get_rng_state(*where)
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restore what `random_state` returned."""
    for name, value in state.items():
        if name == "python":
            version, keys, gauss = value
            random.setstate((version, tuple(keys), gauss))
        elif name == "torch":
            torch.set_rng_state(value)
        elif name == "numpy":
            import numpy as np  # noqa: PLC0415 optional

            kind, keys, *rest = value
            np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))  # noqa: NPY002 the global one
        else:
            device = torch.device(name)
            where = [] if device.index is None else [device]
            torch.get_device_module(device).set_rng_state(value, *where)
