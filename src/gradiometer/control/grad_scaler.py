"""Mixed precision: read a GradScaler's scale without waiting for the device, and skip on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradiometer.control.adaptive_clip import stats_given
from gradiometer.distributed import is_active
from gradiometer.inputs import on_device

if TYPE_CHECKING:
    from torch.amp import GradScaler

    from gradiometer.stats import TensorStats


def inverse_scale(scaler: GradScaler) -> Tensor:
    """Return ``1 / scale`` of a GradScaler on its device, without waiting for it.

    Pass it as ``inv_scale=`` while gradients are still scaled: after ``backward()``, before
    ``scaler.unscale_``, ``scaler.step`` and ``scaler.update``. It is the number by which
    ``unscale_`` would multiply them. It is a snapshot: a later ``update()`` does not change it.
    ``1 / scaler.get_scale()`` gives the same number, but waits.

    Args:
        scaler: a `torch.amp.GradScaler` or a subclass such as `ShardedGradScaler`.

    Returns:
        0-d float32 on the scaler's device. Before the first ``scaler.scale(loss)`` it is the inverse of the
        initial scale; it is 1.0 if the scaler is disabled.

    Raises:
        TypeError: if ``scaler`` is not a GradScaler.

    >>> import torch, gradiometer as gm
    >>> scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    >>> model = torch.nn.Linear(2, 1)
    >>> scaler.scale(model(torch.tensor([[3.0, 4.0]])).sum()).backward()
    >>> gm.inverse_scale(scaler)
    tensor(0.1250)
    >>> gm.collect_grads(model, inv_scale=gm.inverse_scale(scaler)).norm
    tensor([5., 1.], dtype=torch.float64)
    """
    _check_scaler(scaler, "inverse_scale", "pass inv_scale=1 / scale")
    # the same operations as in GradScaler.unscale_, for the same factor to the bit
    return _scale(scaler).double().reciprocal().float()


def is_still_scaled(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's gradients have the scale: `unscale_` was not called in this step."""
    # private, as in share_found_inf_
    states = getattr(scaler, "_per_optimizer_states", None)
    return states is None or states[id(optimizer)]["stage"] is OptState.READY


def share_found_inf_(scaler: GradScaler, optimizer: torch.optim.Optimizer, stats: TensorStats) -> None:
    """Make a GradScaler skip the optimizer's step if ``stats`` found a NaN or Inf on any rank.

    A GradScaler checks the gradients of its own rank only, and for DTensors those of one mesh. If one stage
    of a pipeline has an Inf, for example, that rank skips the step and halves its scale, and the others do
    not. Call this between the collection and ``scaler.step``: then all ranks skip together and all scales
    stay equal. It waits neither for the device nor for another rank, since ``stats`` cover all ranks.

    It unscales the optimizer's gradients with ``scaler.unscale_`` if that has not been done yet. A rank whose
    optimizer has no gradient, or which has no loss, takes part like the others; a GradScaler alone raises
    an error there.

    Args:
        scaler: a `torch.amp.GradScaler`; a disabled one is not changed.
        optimizer: the optimizer whose step may be skipped. With several, call this for each.
        stats: of the gradients, merged over the ranks: ``gm.collect_grads(model, reduce=ranks)``.

    Raises:
        TypeError: if ``scaler`` is not a GradScaler, or ``stats`` is not TensorStats.
        ValueError: for stats of this rank alone, if there are other ranks.
        RuntimeError: after ``scaler.step(optimizer)``.

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu")
    >>> scaler.scale(model(torch.tensor([[3.0, float("inf")]])).sum()).backward()
    >>> stats = gm.collect_grads(model, inv_scale=gm.inverse_scale(scaler), reduce=True)
    >>> gm.share_found_inf_(scaler, optimizer, stats)
    >>> scaler.step(optimizer)  # skipped, on all ranks
    >>> scaler.update()
    >>> scaler.get_scale()
    32768.0
    """
    what = "share_found_inf_"
    _check_scaler(scaler, what, "collect with reduce= and skip its step if stats.skipped")
    stats_given(stats, what)
    if stats.origin is None and is_active():
        msg = f"{what}: these stats are of this rank only; collect them with reduce=gm.Ranks(model)"
        raise ValueError(msg)
    if not getattr(scaler, "_enabled", True):
        return
    # This attribute is private, but no method of a GradScaler accepts results from elsewhere. An Inf written
    # into a gradient would have to be there before unscale_, and a rank without gradients could not write it.
    states = getattr(scaler, "_per_optimizer_states", None)
    if states is None:
        msg = f"{what}: this {type(scaler).__name__} of torch {torch.__version__} does not store found_inf"
        raise RuntimeError(msg + "; skip the step if stats.skipped")
    if getattr(scaler, "_scale", None) is None:
        # the first loss creates the scale, and only the last stage of a pipeline has a loss
        scaler.scale(torch.ones((), device=stats.columns.device))
    state = states[id(optimizer)]
    if state["stage"] is OptState.STEPPED:
        raise RuntimeError(f"{what}: scaler.step(optimizer) was already called; call {what} before it")
    if state["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
        state = states[id(optimizer)]
    found = state["found_inf_per_device"]
    if not found:
        # no gradient on this rank, so the scaler has checked none
        scale = _scale(scaler)
        found[scale.device] = torch.zeros_like(scale)
    for device, ours in found.items():
        ours.copy_(torch.maximum(ours, on_device(stats.found_inf, device)))


def _check_scaler(scaler: object, what: str, otherwise: str) -> None:
    if not callable(getattr(scaler, "get_scale", None)):
        msg = f"{what}: expected a torch.amp.GradScaler, got {type(scaler).__name__}; with another loss "
        raise TypeError(msg + "scaler, " + otherwise)


def _scale(scaler: GradScaler) -> Tensor:
    """Return the scale as a 0-d tensor."""
    # private attributes: get_scale() waits, and no method of a GradScaler can be traced into a graph
    scale = getattr(scaler, "_scale", None)
    if not getattr(scaler, "_enabled", True):
        number = 1.0
    elif isinstance(scale, Tensor):
        return scale.detach().reshape(())
    elif scale is None and hasattr(scaler, "_scale") and hasattr(scaler, "_init_scale"):
        # created by the first scaler.scale(loss)
        number = scaler._init_scale  # noqa: SLF001
    else:
        # without these attributes it is still right, though it waits
        number = scaler.get_scale()
    device = torch.device(getattr(scaler, "_device", "cpu"))
    # a disabled scaler may name a device that does not exist
    there = device.type == "cpu" or torch.get_device_module(device).is_available()
    return torch.full((), number, dtype=torch.float32, device=device if there else "cpu")
