"""Read which parameters the optimizers hold, and with which learning rates."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradiometer.monitor.optimizer_methods import method_of
from gradiometer.recorder import OptimizerState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

# a state or option of an optimizer by which it keeps updates that are too small for a parameter's dtype
_KEEPS: Final = ("master", "stochastic", "kahan")
# part of the name of an attribute that holds master weights
_MASTERS: Final = ("master", "fp32", "float32")
# parameters with master weights whose writes are counted, and the writes after which these are written back:
# more than a checkpoint that is loaded makes
_SAMPLED, _WRITES = 8, 3
# numbers of a param group that are not its hyperparameters
_NOT_OPTIONS: Final = frozenset({"lr", "initial_lr", "params", "param_names"})
# bytes of an element of a dtype in which small updates are lost
_SHORT: Final = 2


class OptimizerReader:
    """Reads an `OptimizerState` without waiting for the device, and keeps no optimizer alive."""

    def __init__(self, optimizers: Iterable[Optimizer], parameters: Sequence[Tensor]) -> None:
        known = list(optimizers)
        self._optimizers = [weakref.ref(optimizer) for optimizer in known]
        self._copied = {id(p) for optimizer in known for p in _copied_in(optimizer)}
        self._copied |= {id(p) for p in _copied_by(known, parameters)}
        self._parameters = parameters
        self._state: OptimizerState | None = None
        self._versions: list[int] = []
        self._sampled: list[Tensor] = []
        self._writes = 0

    def read(self, *, afresh: bool) -> OptimizerState | None:
        """Return what the optimizers hold; the same object if nothing has changed.

        None if no optimizer is known, or if one of them is gone. ``afresh``: look at the parameters of each
        group again, not only at the learning rates.
        """
        alive = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
        if not alive or len(alive) < len(self._optimizers):
            return None
        groups = [group for optimizer in alive for group in optimizer.param_groups]
        rates = tuple([_rate(group.get("lr")) for group in groups])
        options = tuple([_options(group) for group in groups])
        writes_back = self._writes_back()
        old = self._state
        if old is None or afresh or len(rates) != len(old.rates):
            new = replace(self._whole(alive, rates), writes_back=writes_back, options=options)
            self._state = old if new == old else new
        elif (rates, writes_back, options) != (old.rates, old.writes_back, old.options):
            self._state = replace(old, rates=rates, writes_back=writes_back, options=options)
        return self._state

    def _writes_back(self) -> bool:
        if self._writes < _WRITES:
            versions = [p._version for p in self._sampled]  # noqa: SLF001
            self._writes += versions != self._versions
            self._versions = versions
        return self._writes >= _WRITES

    def _whole(self, optimizers: Sequence[Optimizer], rates: tuple[float | None, ...]) -> OptimizerState:
        place_of = {id(p): place for place, p in enumerate(self._parameters)}
        held, copied = [-1] * len(place_of), [id(p) in self._copied for p in self._parameters]
        keeps = list(copied)
        owners: list[int] = []
        methods = tuple([method_of(one, group) for one in optimizers for group in one.param_groups])
        scheduled = tuple(["initial_lr" in group for one in optimizers for group in one.param_groups])
        has_others = False
        for owner, optimizer in enumerate(optimizers):
            for group in optimizer.param_groups:
                options = [name for name, value in group.items() if value is True]
                for parameter in group["params"]:
                    place = place_of.get(id(parameter))
                    if place is None:
                        has_others = True
                    elif held[place] < 0:
                        held[place] = len(owners)
                        names = [*options, *(optimizer.state.get(parameter) or ())]
                        keeps[place] |= any(_has_word(name, _KEEPS) for name in names)
                        copied[place] |= any(_has_word(name, _MASTERS[:1]) for name in names)
                owners.append(owner)
        sampled = [p for p, has in zip(self._parameters, copied, strict=True) if has][:_SAMPLED]
        if len(sampled) != len(self._sampled):
            self._sampled, self._versions = sampled, [p._version for p in sampled]  # noqa: SLF001
        state = OptimizerState(tuple(held), rates, tuple(owners), tuple(keeps), tuple(copied), has_others)
        return replace(state, methods=methods, scheduled=scheduled)


def _copied_by(optimizers: Iterable[Optimizer], parameters: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the parameters that no optimizer holds, but a copy in a wider dtype.

    It compares their values, which may wait for the device.
    """
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    own = {id(p) for p in parameters}
    others: dict[torch.Size, dict[int, Tensor]] = {}
    for p in held:
        if id(p) not in own:
            others.setdefault(p.shape, {})[id(p)] = p
    is_held = {id(p) for p in held}
    for parameter in parameters:
        if id(parameter) not in is_held:
            alike = others.get(parameter.shape, {})
            found = (p for p in alike.values() if _is_wider(p, parameter) and _are_copies([p], [parameter]))
            copy = next(found, None)
            if copy is not None:
                del alike[id(copy)]
                yield parameter


def _is_wider(copy: Tensor, parameter: Tensor) -> bool:
    is_floating = copy.is_floating_point() and parameter.is_floating_point()
    return is_floating and copy.element_size() > parameter.element_size()


def _copied_in(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of 16 bits or less of which an attribute of the optimizer has master weights.

    These are copies in a wider dtype, which another optimizer inside holds, or which the name calls so: other
    copies, such as the slow weights of Lookahead, keep no small updates. It compares their values, which may
    wait for the device.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    short = [p for p in held if p.is_floating_point() and p.element_size() <= _SHORT]
    for name, value in vars(optimizer).items() if short else ():
        if isinstance(value, Optimizer) or _has_word(name, _MASTERS):
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


def _has_word(name: object, words: Iterable[str]) -> bool:
    return isinstance(name, str) and any(word in name for word in words)


def _options(group: Mapping[str, object]) -> dict[str, float]:
    """Return the hyperparameters of a param group that are numbers on the host, but for the learning rate."""
    values = {name: value for name, value in group.items() if name not in _NOT_OPTIONS}
    betas = values.pop("betas", ())
    if isinstance(betas, (tuple, list)):
        values |= {f"beta{i}": beta for i, beta in enumerate(betas, 1)}
    # its kernel computes in float32, whatever the dtype of the states is
    values |= {"fused": 1.0} if values.get("fused") is True else {}
    found = {name: _rate(value) for name, value in values.items() if not isinstance(value, (bool, str))}
    return {name: number for name, number in found.items() if number is not None}


def _rate(value: object) -> float | None:
    """Return a learning rate; None if it is on a device, or not a number."""
    if isinstance(value, Tensor) and (value.device.type != "cpu" or value.numel() != 1):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
