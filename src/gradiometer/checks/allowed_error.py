"""How far a gradient may be from float64, by the errors that the reference's gradients have themselves.

The allowed error of a tensor is ``factor * (1 + 6 / sqrt(numel)) * (error + unit * norm)``. ``error`` is the
reference's own distance from float64, ``unit`` the relative error that its gradients usually have, and at
least the precision of the coarsest arithmetic that is usual for the dtype. A tensor of few elements has more:
its error is the norm of few random numbers, which may be near 0 by chance.

For float32, TF32 is usual. A step that does not use it is told by the errors of all its gradients, and has a
``unit`` of 2**-16 at least: compiled code may sum 10**5 terms one after the other, where eager mode sums in a
tree. It also has the error that the reference has with coarse products, in proportion to the precision: a
gradient that they change much is changed by any rounding. Gradients that jump, as at the edge of a ReLU, are
left out: one jump that rounding causes in one run and not in the other changes them by 1e-3.

A gradient whose terms cancel, such as that of a bias before a BatchNorm, is rounding alone. Its scale is that
of the terms, which the other gradients of its module show.

A float32 step may use TF32 where the reference does not. Then the loss and so all gradients are hundreds of
times farther from float64, while a fault in the backward pass leaves those before it as near as they are.
Only such a step is judged by the errors of `RoundedProducts`. A common factor of all gradients does not make
one: rounding is not parallel to a gradient, so the part of the error that is parallel does not count. Nor do
errors that coarse products do not explain in a quarter of the gradients either, as those of another loss.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

# by how much the error of a healthy step may exceed that of the reference
FACTOR: Final = 3.0
_SMALL: Final = 6.0
# TF32 cuts off all but 10 bits; the errors of float64 are those of long sums
_UNITS: Final = {torch.float64: 2.0**-44, torch.float32: 2.0**-10, torch.float16: 2.0**-10}
_BFLOAT16: Final = 2.0**-8
_FLOAT8: Final = 2.0**-3
# for errors that were not measured: a step whose gradients are float32 may compute in bfloat16
_UNMEASURED: Final = 2.0**-6
# the least ratio of the errors of a tensor is below 1.4 in float32 steps, and above 7 in those with TF32
_COARSE: Final = 4.0
# the least share of the gradients whose errors coarse rounding explains, if that is what they are
_EXPLAINED: Final = 0.25
# what coarse products change by less than this tells nothing about them
_UNTOUCHED: Final = 2.0**-13
# the unit of float32 without TF32; and the largest relative error of a reference that has neither that nor
# 16-bit parts
_FINE: Final = 2.0**-16
_FINEST: Final = 2.0**-14
# from products in 8 bits to float32, and some more
_CONDITION: Final = 2.0**-13


class Rounding(NamedTuple):
    """What is known of a tensor's rounding error.

    Attributes:
        norm: the norm of the tensor, in float64 where there is that.
        error: the norm of the difference between the reference and float64; 0 if it was not measured.
        numel: the number of elements.
        dtype: the dtype of the reference's tensor.
        coarse: the norm of the error within `RoundedProducts`; None if there is no such run.
    """

    norm: float
    error: float
    numel: int
    dtype: torch.dtype
    coarse: float | None = None


class Limits(NamedTuple):
    """What `limits` returns.

    Attributes:
        allowed: the norm that each tensor's error may have.
        usual: the relative error that a quarter of the tensors does not exceed; 0 if it was not measured.
        is_coarse: whether the step rounds as TF32 does, and the reference does not.
        is_fine: whether both round as float32 without TF32 does.
    """

    allowed: dict[str, float]
    usual: float
    is_coarse: bool
    is_fine: bool = False


def limits(
    tensors: Mapping[str, Rounding],
    errors: Mapping[str, float],
    factor: float,
    *,
    is_measured: bool,
    is_smooth: bool = False,
    like: Limits | None = None,
    apart: Mapping[str, float] | None = None,
) -> Limits:
    """Return how large the errors of a step may be.

    Args:
        tensors: what is known of each tensor, by name.
        errors: the error of each tensor of the step.
        factor: by how much an error may exceed that of the reference.
        is_measured: whether there is a float64 run. Otherwise errors are assumed from the dtypes.
        is_smooth: whether the tensors are known not to jump, so that they may be judged as finely as float32
            rounds.
        like: the limits of the gradients, for a few outputs, which do not tell how the step rounds.
        apart: the errors without their part that is parallel to the tensor, which tell how the step rounds.
    """
    if not is_measured:
        roundings = {name: _coarse(x, 0.0) for name, x in tensors.items()}
        return Limits(_allowed(roundings, factor, None), 0.0, is_coarse=False)
    relative = sorted(x.error / x.norm for x in tensors.values() if x.norm > 0)
    usual = relative[len(relative) // 4] if relative else 0.0
    if like is None:
        coarse = _is_coarse(tensors, errors if apart is None else apart, factor, usual)
        fine = is_smooth and not coarse and _is_fine(tensors)
    else:
        usual, coarse, fine = max(like.usual, usual), like.is_coarse, like.is_fine
    change = (lambda x: _coarse(x, usual)) if coarse else _conditioned if fine else lambda x: x
    roundings = {name: change(x) for name, x in tensors.items()}
    return Limits(_allowed(roundings, factor, usual, is_fine=fine), usual, coarse, fine)


def unit_of(dtype: torch.dtype) -> float:
    """Return the relative error that one rounding may have in a step whose gradients have a dtype."""
    if dtype in _UNITS:
        return _UNITS[dtype]
    return _FLOAT8 if dtype.itemsize == 1 else _BFLOAT16


def _is_coarse(
    tensors: Mapping[str, Rounding], errors: Mapping[str, float], factor: float, usual: float
) -> bool:
    """Return whether a step rounds much more than its reference, as with TF32, by the errors of all."""
    known = {
        name: x
        for name, x in tensors.items()
        if x.norm > 16.0 * x.error and (x.coarse is None or x.coarse > _UNTOUCHED * x.norm)
    }
    # an error of few elements may be small by chance
    known = {name: x for name, x in known.items() if x.numel >= 16} or known
    least = {name: x.error + x.norm * torch.finfo(x.dtype).eps / 2 for name, x in known.items()}
    if not known or min(errors[name] / each for name, each in least.items()) <= _COARSE:
        return False
    allowed = _allowed({name: _coarse(x, usual) for name, x in tensors.items()}, factor, usual)
    return sum(errors[name] <= allowed[name] for name in known) >= _EXPLAINED * len(known)


def _is_fine(tensors: Mapping[str, Rounding]) -> bool:
    """Return whether the reference rounds as float32 does, by the errors of all but a quarter."""
    known = sorted(x.error / x.norm for x in tensors.values() if x.norm > 16.0 * x.error)
    return bool(known) and known[3 * len(known) // 4] <= _FINEST


def _conditioned(rounding: Rounding) -> Rounding:
    """Return the rounding of a tensor with at least the error that its sensitivity to rounding tells of."""
    return rounding._replace(error=max(rounding.error, _CONDITION * (rounding.coarse or 0.0)))


def _coarse(rounding: Rounding, usual: float) -> Rounding:
    """Return the rounding of a tensor of a reference that would round as TF32 does."""
    error = rounding.error
    if rounding.coarse is not None:
        error = max(error, rounding.coarse)
    elif usual:
        # a gradient that rounding changes much is changed as much more by coarse rounding
        dtype = rounding.dtype
        error *= max(1.0, unit_of(dtype) / max(usual, torch.finfo(dtype).eps / 2))
    return rounding._replace(error=error)


def _allowed(
    tensors: Mapping[str, Rounding], factor: float, usual: float | None, *, is_fine: bool = False
) -> dict[str, float]:
    """Return the norm that each tensor's error may have; ``usual`` is None if it is not known."""
    largest = _largest({name: x.norm for name, x in tensors.items()})
    allowed = {}
    for name, (norm, error, numel, dtype, _) in tensors.items():
        unit = max(_FINE if is_fine and dtype == torch.float32 else unit_of(dtype), usual or 0.0)
        if usual is None and dtype != torch.float64:
            unit = max(unit, _UNMEASURED)
        scale = error + unit * norm
        # rounding of the terms that cancel
        terms = unit * largest[name]
        if norm <= max(error, terms):
            scale += terms
        allowed[name] = factor * (1.0 + _SMALL / math.sqrt(max(numel, 1))) * scale
    return allowed


def _largest(norms: Mapping[str, float]) -> dict[str, float]:
    """Return the largest norm in the innermost module that has another tensor too, for each name."""
    members: dict[str, list[str]] = {}
    for name in norms:
        for outer in _outer(name):
            members.setdefault(outer, []).append(name)
    most = {outer: max(norms[name] for name in names) for outer, names in members.items()}
    return {
        name: next((most[outer] for outer in _outer(name) if len(members[outer]) > 1), norms[name])
        for name in norms
    }


def _outer(name: str) -> list[str]:
    """Return the modules around a parameter, the innermost first.

    >>> _outer("blocks.0.weight")
    ['blocks.0', 'blocks', '']
    """
    parts = name.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]
