"""Mixed precision: the scale of a GradScaler, taken without waiting for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.amp import GradScaler

__all__ = ["inverse_scale"]

_ELSEWHERE: Final = object()


def inverse_scale(scaler: GradScaler) -> Tensor:
    """Return ``1 / scale`` of a GradScaler on its device, without waiting for it.

    For ``inv_scale=``, while gradients are still scaled: after ``backward()``, before
    ``scaler.unscale_``, ``scaler.step`` and ``scaler.update``. It is the number by which
    ``unscale_`` would multiply them, and a snapshot: a later ``update()`` does not change it.
    ``1 / scaler.get_scale()`` says the same and waits.

    Args:
        scaler: a `torch.amp.GradScaler`, such as `ShardedGradScaler` too.

    Returns:
        0-d float32 on the scaler's device; of its initial scale before the first
        ``scaler.scale(loss)``, and 1.0 if it is disabled.

    Raises:
        TypeError: for what is no GradScaler.

    >>> import torch, gradiometer as gm
    >>> scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    >>> model = torch.nn.Linear(2, 1)
    >>> scaler.scale(model(torch.tensor([[3.0, 4.0]])).sum()).backward()
    >>> gm.inverse_scale(scaler)
    tensor(0.1250)
    >>> gm.collect_grads(model, inv_scale=gm.inverse_scale(scaler)).norm
    tensor([5., 1.], dtype=torch.float64)
    """
    if not callable(getattr(scaler, "get_scale", None)):
        msg = (
            f"inverse_scale: expected a torch.amp.GradScaler, got {type(scaler).__name__}; "
            "of another loss scaler pass inv_scale=1 / scale itself"
        )
        raise TypeError(msg)
    # in the order of GradScaler.unscale_, so to the bit what it multiplies by
    return _scale(scaler).double().reciprocal().float()


def _scale(scaler: GradScaler) -> Tensor:
    """Return the scale as a 0-d tensor.

    From private attributes, as get_scale() is ``_scale.item()``, and no method of a GradScaler can be traced
    into a graph. Should they ever go, get_scale() is still right, though it waits.
    """
    scale = getattr(scaler, "_scale", _ELSEWHERE)
    if not getattr(scaler, "_enabled", True):
        number = 1.0
    elif isinstance(scale, Tensor):
        return scale.detach().reshape(())
    elif scale is None and hasattr(scaler, "_init_scale"):
        # made by the first scaler.scale(loss)
        number = scaler._init_scale  # noqa: SLF001
    else:
        number = scaler.get_scale()
    device = torch.device(getattr(scaler, "_device", "cpu"))
    # a disabled scaler may name a device that is not there
    there = device.type == "cpu" or torch.get_device_module(device).is_available()
    return torch.full((), number, dtype=torch.float32, device=device if there else "cpu")
