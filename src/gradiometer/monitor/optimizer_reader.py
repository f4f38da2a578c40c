"""Read which parameters the optimizers hold, and with which learning rates."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradiometer.recorder import OptimizerState, master_copies

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["OptimizerReader"]

# a state or option of an optimizer by which it keeps updates that are too small for a parameter's dtype
_KEEPS: Final = ("master", "stochastic", "kahan")
# bytes of an element of a dtype in which small updates are lost
_SHORT: Final = 2


class OptimizerReader:
    """Reads an `OptimizerState` without waiting for the device, and keeps no optimizer alive.

    Args:
        optimizers: the optimizers that update the model; empty if they are not known.
        parameters: the parameters of the roster.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD([layer.weight], lr=0.1)
    >>> OptimizerReader([optimizer], list(layer.parameters())).read(afresh=True)
    OptimizerState(groups=(0, -1), rates=(0.1,), owners=(0,), rounded_well=(False, False))
    """

    def __init__(self, optimizers: Iterable[Optimizer], parameters: Sequence[Tensor]) -> None:
        known = list(optimizers)
        self._optimizers = [weakref.ref(optimizer) for optimizer in known]
        self._copied = {id(p) for optimizer in known for p in _copied_in(optimizer)}
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
        rates = tuple([_rate(group.get("lr")) for optimizer in alive for group in optimizer.param_groups])
        old = self._state
        if old is None or afresh or len(rates) != len(old.rates):
            new = self._whole(alive, rates)
            self._state = old if new == old else new
        elif rates != old.rates:
            self._state = replace(old, rates=rates)
        return self._state

    def _whole(self, optimizers: Sequence[Optimizer], rates: tuple[float | None, ...]) -> OptimizerState:
        place_of = {id(p): place for place, p in enumerate(self._parameters)}
        held, keeps = [-1] * len(place_of), [id(p) in self._copied for p in self._parameters]
        owners: list[int] = []
        others: list[Tensor] = []
        for owner, optimizer in enumerate(optimizers):
            for group in optimizer.param_groups:
                is_kept = any(value is True and _is_kept(name) for name, value in group.items())
                for parameter in group["params"]:
                    place = place_of.get(id(parameter))
                    if place is None:
                        others.append(parameter)
                    elif held[place] < 0:
                        held[place] = len(owners)
                        state = optimizer.state.get(parameter) or {}
                        keeps[place] |= is_kept or any(_is_kept(name) for name in state)
                owners.append(owner)
        left = [p for p, group in zip(self._parameters, held, strict=True) if group < 0]
        copied = {id(p) for p in master_copies(others, left)}
        keeps = [keep or id(p) in copied for keep, p in zip(keeps, self._parameters, strict=True)]
        return OptimizerState(tuple(held), rates, tuple(owners), tuple(keeps))


def _copied_in(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of 16 bits or less of which an attribute of the optimizer has wider copies.

    It compares their values, which may wait for the device.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    short = [p for p in held if p.is_floating_point() and p.element_size() <= _SHORT]
    for name, value in vars(optimizer).items() if short else ():
        if name not in {"state", "param_groups"}:
            tensors = list(_tensors_in(value))
            if _are_copies(tensors, short) or (len(held) > len(short) and _are_copies(tensors, held)):
                return short
    return []


def _are_copies(tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
    if len(tensors) != len(parameters) or not any(
        a is not b for a, b in zip(tensors, parameters, strict=True)
    ):
        return False
    try:
        return all(
            copy.shape == p.shape
            and (copy.element_size() > p.element_size() or p.element_size() > _SHORT)
            and torch.equal(copy.detach().to(p.device, p.dtype), p.detach())
            for copy, p in zip(tensors, parameters, strict=True)
        )
    except (RuntimeError, TypeError, NotImplementedError):
        return False  # such as distributed tensors, or some on the meta device


def _tensors_in(value: object, depth: int = 3) -> Iterator[Tensor]:
    """Yield the tensors in lists, mappings and optimizers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Optimizer):
        yield from _tensors_in([group["params"] for group in value.param_groups], depth)
    elif depth and isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(part, depth - 1)


def _is_kept(name: object) -> bool:
    return isinstance(name, str) and any(word in name for word in _KEEPS)


def _rate(value: object) -> float | None:
    """Return a learning rate; None if it is on a device, or not a number."""
    if isinstance(value, Tensor) and (value.device.type != "cpu" or value.numel() != 1):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
