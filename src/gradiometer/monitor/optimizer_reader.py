"""Read which parameters the optimizers hold, and with which learning rates."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from gradiometer.recorder import OptimizerState, master_copies

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.optim import Optimizer

__all__ = ["OptimizerReader"]

# a state or option of an optimizer by which it keeps updates that are too small for a parameter's dtype
_KEEPS: Final = ("master", "stochastic", "kahan")


class OptimizerReader:
    """Reads an `OptimizerState` without waiting for the device, and keeps no optimizer alive.

    Args:
        optimizers: the optimizers that update the model; empty if they are not known.
        parameters: the parameters of the roster.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD([layer.weight], lr=0.1)
    >>> OptimizerReader([optimizer], list(layer.parameters())).read(afresh=True)
    OptimizerState(groups=(0, -1), rates=(0.1,), rounded_well=(False, False))
    """

    def __init__(self, optimizers: Iterable[Optimizer], parameters: Sequence[Tensor]) -> None:
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._parameters = parameters
        self._state: OptimizerState | None = None

    def read(self, *, afresh: bool) -> OptimizerState | None:
        """Return what the optimizers hold; the same object if nothing has changed.

        None if no optimizer is known, or if one of them is gone. ``afresh``: look at the parameters of each
        group again, not only at the learning rates.
        """
        alive = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
        if not alive or len(alive) < len(self._optimizers):
            return None
        groups = [(optimizer, group) for optimizer in alive for group in optimizer.param_groups]
        rates = tuple([_rate(group.get("lr")) for _, group in groups])
        old = self._state
        if old is None or afresh or len(rates) != len(old.rates):
            new = self._whole(groups, rates)
            self._state = old if new == old else new
        elif rates != old.rates:
            self._state = replace(old, rates=rates)
        return self._state

    def _whole(
        self, groups: Sequence[tuple[Optimizer, Mapping[str, Any]]], rates: tuple[float | None, ...]
    ) -> OptimizerState:
        place_of = {id(p): place for place, p in enumerate(self._parameters)}
        held, keeps = [-1] * len(place_of), [False] * len(place_of)
        for number, (optimizer, group) in enumerate(groups):
            options = any(value is True and _is_kept(name) for name, value in group.items())
            for parameter in group["params"]:
                place = place_of.get(id(parameter))
                if place is not None and held[place] < 0:
                    held[place] = number
                    state = optimizer.state.get(parameter) or {}
                    keeps[place] = options or any(isinstance(name, str) and _is_kept(name) for name in state)
        left = [p for p, group in zip(self._parameters, held, strict=True) if group < 0]
        others = [p for _, group in groups for p in group["params"] if id(p) not in place_of]
        copied = {id(p) for p in master_copies(others, left)}
        keeps = [keep or id(p) in copied for keep, p in zip(keeps, self._parameters, strict=True)]
        return OptimizerState(tuple(held), rates, tuple(keeps))


def _is_kept(name: str) -> bool:
    return any(word in name for word in _KEEPS)


def _rate(value: object) -> float | None:
    """Return a learning rate; None if it is on a device, or not a number."""
    if isinstance(value, Tensor) and (value.device.type != "cpu" or value.numel() != 1):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
