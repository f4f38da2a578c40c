"""What the objects of training frameworks hold: gradients, or parts of them, and a GradScaler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from gradiometer import distributed
from gradiometer.inputs import is_dtensor, named_parameters

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from torch import Tensor

    from gradiometer.inputs import Parameters
    from gradiometer.monitor.summary import Summary

# wrappers of a model whose parameters are neither the trained ones nor DTensors
_ENGINES: Final = frozenset(
    {"FullyShardedDataParallel", "XlaFullyShardedDataParallel", "DeepSpeedEngine", "MegatronEngine"}
)


def has_whole_gradients(model: Any, *, sharded: bool) -> bool:
    """Return whether a rank has full gradients, or DTensors, after backward.

    ``model`` has all its wrappers; ``sharded``: whether the framework reports that ranks hold parts.
    """
    if not isinstance(model, nn.Module):
        return not sharded
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if kinds & _ENGINES:
        return False
    return not sharded or any(is_dtensor(type(p)) for p in model.parameters())


def scaler_of(owner: Any) -> Any:
    """Return the GradScaler of an accelerator or precision plugin, if it has an enabled one."""
    scaler = getattr(owner, "scaler", None)
    return scaler if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() else None


def measurable(model: Parameters) -> Parameters:
    """Return the model; if it has quantized weights, only the parameters that can have gradients."""
    named = named_parameters(model, "Monitor")
    pairs = [(n, p) for n, p in zip(*named, strict=True) if p.is_floating_point() or p.is_complex()]
    return model if len(pairs) == len(named.names) else pairs


def whole(value: Tensor) -> Tensor:
    """Return a scalar without its graph; a DTensor is reduced to its full value."""
    value = value.detach()
    return value.full_tensor() if is_dtensor(type(value)) else value  # type: ignore[attr-defined]


def is_first() -> bool:
    """Return whether this process is the first rank of its job, which logs for all."""
    return not distributed.is_active() or distributed.ranks_of(distributed.group_of(None))[0] == 0


class Watching:
    """A ``with`` block of a callback: at its end, a run that has not ended is closed."""

    _session: Any

    def __enter__(self) -> Self:
        """Return the callback."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the monitor; after an exception, which propagates, write a black box."""
        self._session.end(error)

    def summary(self) -> Summary | str:
        """Return `Monitor.summary` of the current or last run."""
        monitor = self._session.monitor
        return "no run was watched" if monitor is None else monitor.summary()
