"""Compare the calls of ranks: arguments as rows of the maximum that a reduction takes anyway."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from gradiometer.columns import derived
from gradiometer.distributed.rendezvous import RankError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "ARGUMENTS",
    "SAME_CALLS",
    "Call",
    "StateDigest",
    "differ",
    "difference",
    "differing_calls",
    "told",
    "values_of",
]

SAME_CALLS: Final = "every rank must make the same calls in the same order"

# the arguments that must be the same on all ranks; the first two may be tensors
ARGUMENTS: Final = (
    "max_norm",
    "inv_scale",
    "norm_type",
    "vanishing",
    "exploding",
    "dead",
    "skip_nonfinite",
)


class StateDigest(NamedTuple):
    """Stands for an argument that is a module: the ranks compare a number that its state determines.

    ``number``: 0-d, an integer that float64 can hold. ``name``: of the module's class.
    """

    number: Tensor
    name: str


def told(arguments: Mapping[str, Any], like: Tensor) -> Tensor:
    """Return ``(A, 2) float64``: each argument, 0 if absent, and its negative; maxima give its extremes."""
    values = torch.stack([_number(arguments.get(name, 0.0), like) for name in ARGUMENTS])
    return torch.stack([values, -values], dim=1)


def _number(value: Any, like: Tensor) -> Tensor:
    if isinstance(value, StateDigest):
        value = value.number
    if not isinstance(value, Tensor):
        return derived.number(value, like.device)
    value = value.detach().to(like.device, like.dtype, non_blocking=True).reshape(())
    # a maximum may drop NaN
    return torch.where(value.isnan(), torch.finfo(like.dtype).min, value)


def differ(tops: Tensor) -> Tensor:
    """Return which of the merged rows differ between ranks, ``(A,) bool``."""
    return tops[:, 0] > -tops[:, 1]


class Call(NamedTuple):
    """A rank's call of `Ranks.reduce`: what it tells the others once they know that a call differs."""

    number: int
    what: str
    # hash of the tensors that its ranks have agreed on
    model: int
    # as text; a tensor on another device is only named, since nothing waits for it
    arguments: dict[str, str]
    # why the rank has failed, or None
    failure: str | None


def values_of(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the arguments of a `Call`."""
    return {name: _text(value) for name, value in arguments.items()}


def _text(value: Any) -> str:
    if isinstance(value, StateDigest):
        state = "" if value.number.device.type != "cpu" else f" with settings and state {int(value.number):x}"
        return f"{value.name}{state}"
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return f"a tensor on {value.device}"
    return repr(value if isinstance(value, bool) else float(value))


def difference(calls: Sequence[Call], ranks: Sequence[int]) -> str:
    """Return how the calls of these ranks differ, or which rank has failed."""
    for rank, call in zip(ranks, calls, strict=True):
        if call.failure is not None:
            return f"rank {rank} failed: {call.failure}"
    first = calls[0]
    other = next((place for place, call in enumerate(calls) if call != first), 0)
    theirs = calls[other]
    here, there = f"rank {ranks[0]}", f"rank {ranks[other]}"
    names = [name for name in ARGUMENTS if first.arguments.get(name) != theirs.arguments.get(name)]
    if first.what != theirs.what:
        said = f"{there} called {theirs.what}, but {here} called {first.what}"
    elif first.model != theirs.model:
        said = f"{there} and {here} called {first.what} with gm.Ranks of different models"
    elif names:
        own, its = (f"{names[0]}={call.arguments.get(names[0])}" for call in (first, theirs))
        said = f"{there} called {first.what} with {its}, but {here} with {own}"
    else:
        said = f"{there} is at call {theirs.number} of its gm.Ranks, but {here} is at call {first.number}"
    return f"{said}; {SAME_CALLS}"


def differing_calls(origin: int) -> RankError:
    """Return the error for columns that `Ranks.reduce` has set to NaN, with this ``origin``."""
    first = -4 - origin
    if first < 0:
        return RankError(f"reduce: the ranks made different calls; {SAME_CALLS}")
    return RankError(f"reduce: {ARGUMENTS[first]} differs between ranks; pass the same value on all ranks")
