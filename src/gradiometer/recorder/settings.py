"""Checks of what a recorder gets: numbers for its cursor before any of them is changed, stats and tensors."""

from __future__ import annotations

from typing import Final, TypeVar

import torch
from torch import Tensor, nn

from gradiometer.columns import Cursor
from gradiometer.inputs import describe, is_limit, is_one_number, layout
from gradiometer.stats import PairStats, TensorStats

_Stats = TypeVar("_Stats", TensorStats, PairStats)

# the cursor is float64, which holds every integer up to here
_MOST: Final = 2**53


def check_integer(what: str, name: str, value: object, least: int) -> None:
    """Raise a ValueError unless the value is an integer from ``least`` to 2**53."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        msg = f"{what}({name}={describe(value)}): {name} must be an integer, at least {least}"
        raise ValueError(f"{msg} and at most 2**53" if isinstance(value, int) and value > _MOST else msg)


def check_skips(skip_nonfinite: object, skip_above: object) -> None:
    """Raise a ValueError for an invalid condition; None is valid."""
    if skip_nonfinite is not None and not isinstance(skip_nonfinite, (bool, int)):
        msg = f"Recorder(skip_nonfinite={skip_nonfinite!r:.40}): skip_nonfinite must be True or False"
        raise ValueError(msg)
    if skip_above is not None and not is_limit(skip_above):
        msg = f"Recorder(skip_above={describe(skip_above)}): skip_above must be a non-negative number"
        raise ValueError(msg)


def check_cursor(cursor: Tensor) -> None:
    """Raise a ValueError unless the numbers are those of a recorder."""
    numbers = cursor.tolist()
    leasts = {Cursor.STEP: 0, Cursor.COUNT: 0, Cursor.EVERY: 1, Cursor.SKIP_NONFINITE: 0}
    for place, least in {**leasts, Cursor.PROJECT_EVERY: 0}.items():
        value = numbers[place]
        check_integer("cursor", place.name.lower(), int(value) if value == value // 1 else value, least)
    check_skips(None, numbers[Cursor.SKIP_ABOVE])


def set_step(cursor: Tensor, step: float | Tensor) -> None:
    """Set the current step, to a number of the host or to a 0-d tensor. Never waits for the device."""
    place = cursor[Cursor.STEP]
    if isinstance(step, Tensor):
        place.copy_(step)
    else:
        place.fill_(step)


def of_this_rank(stats: _Stats, kind: type[_Stats], function: str) -> _Stats:
    """Return the statistics of this rank, without those of others."""
    if not isinstance(stats, kind):
        msg = f"Recorder: stats must be the {kind.__name__} that {function} returns, "
        raise TypeError(msg + f"got {type(stats).__name__}")
    if stats.origin is None:
        return stats
    if stats.local is None:
        msg = "Recorder: groups that are merged over ranks do not keep this rank's values; "
        raise ValueError(msg + f"pass the stats that {function}(..., reduce=ranks) returns")
    return stats.local


def is_ordinary(tensor: Tensor, ring: Tensor) -> bool:
    """Return whether the op accepts the tensor as it is."""
    kind = type(tensor)
    return (
        (kind is Tensor or kind is nn.Parameter)
        and layout(tensor) == torch.strided
        and tensor.device == ring.device
        and (torch.compiler.is_compiling() or not tensor.is_neg())
    )


def is_scale(inv_scale: Tensor | float, ring: Tensor) -> bool:
    """Return whether the op accepts the scale as it is."""
    return (
        isinstance(inv_scale, Tensor)
        and is_one_number(inv_scale)
        and inv_scale.is_floating_point()
        and inv_scale.device == ring.device
    )
