"""Tensors of a step compared with those of its reference, each with the error that rounding explains."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from gradiometer.checks.allowed_error import Limits, Rounding, limits
from gradiometer.checks.fault_kind import factor_of, fault_kind, nonfinite
from gradiometer.stats.text_table import number
from gradiometer.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

# elements of a tensor whose rounding is not parallel to it
_ENOUGH: Final = 16
# tensors that tell a factor from rounding, and by how much more than rounding it differs from 1
_MANY: Final = 4
_BEYOND: Final = 3.0


@dataclass(frozen=True)
class GradientRow:
    """How one tensor compares with its reference.

    Attributes:
        name: the parameter's name, or that of the output.
        what: ``"output"``, ``"gradient"``, ``"update"``; or ``"slope"``, of the loss along a gradient, whose
            norm is compared with it.
        module: the module that has the parameter, as text; ``""`` for outputs.
        numel: the number of elements.
        norm: the norm of the reference, in float64 if there is a float64 run.
        error: the norm of the difference from it; NaN if the tensor was not compared.
        allowed: the largest error that rounding explains; NaN if the tensor was not compared.
        cosine: the cosine of the angle between the tensor and the reference.
        norm_ratio: the norm in proportion to that of the reference.
        fails: whether the tensor is wrong.
        text: what is wrong with it, why it was not compared, or ``""``.
    """

    name: str
    what: str
    module: str = ""
    numel: int = 0
    norm: float = math.nan
    error: float = math.nan
    allowed: float = math.nan
    cosine: float = math.nan
    norm_ratio: float = math.nan
    fails: bool = False
    text: str = ""

    @property
    def is_compared(self) -> bool:
        """Whether the tensor could be compared."""
        return self.fails or not math.isnan(self.error)

    @property
    def is_rounding(self) -> bool:
        """Whether the reference is smaller than the allowed error, so that only large faults show."""
        return self.is_compared and not self.fails and self.norm <= self.allowed

    def short(self) -> str:
        """Return the name, the error, and what is wrong; cosine and ratio of norms are left out."""
        name = f"{self.what} {self.name}" + (f" ({self.module})" if self.module else "")
        size = self.norm or 1.0
        of = " of its norm" if self.norm else ""
        error = f"error {number(self.error / size)}{of}, allowed {number(self.allowed / size)}"
        parts = ["" if math.isnan(self.error) else error, self.text]
        return printable(f"{name}: {'; '.join(filter(None, parts))}")

    def __str__(self) -> str:
        name = f"{self.what} {self.name}" + (f" ({self.module})" if self.module else "")
        if math.isnan(self.error):
            return printable(f"{name}: {self.text}")
        size = self.norm or 1.0
        text = f"{name}: error {number(self.error / size)}, allowed {number(self.allowed / size)}"
        text += " of its norm" if self.norm else ""
        # a slope has no direction
        text += "" if math.isnan(self.cosine) else f"; cosine {self.cosine:.4f}"
        text += "" if math.isnan(self.norm_ratio) else f", ratio of norms {number(self.norm_ratio, 4)}"
        return printable(f"{text}; {self.text}" if self.text else text)


class Tensors(NamedTuple):
    """Tensors by name, of one kind, from each run of a step.

    Attributes:
        given: those of the step as given.
        reference: those of the reference in the step's precision.
        exact: those of the reference in float64; None if there is no such run.
        rounded: those of the reference within `RoundedProducts`; None if there is no such run.
    """

    given: Mapping[str, Tensor]
    reference: Mapping[str, Tensor]
    exact: Mapping[str, Tensor] | None = None
    rounded: Mapping[str, Tensor] | None = None


class Compared(NamedTuple):
    """What `compare_tensors` returns.

    Attributes:
        rows: a row for each tensor, in the order of the reference.
        factors: the factor of each tensor that has a gradient and was compared: 1 if it agrees, and None if
            no single one explains the difference.
        limits: how large the errors may be.
        shared: the factor that all tensors have up to rounding, if it is farther from 1 than that; else 1.
    """

    rows: list[GradientRow]
    factors: dict[str, float | None]
    limits: Limits
    shared: float = 1.0


class _Pair(NamedTuple):
    """A tensor as given and its reference, what rounding does to it, error, norm and inner product.

    Attributes:
        apart: the part of the error that is not parallel to the reference, if there are enough elements to
            tell it.
    """

    given: Tensor
    base: Tensor
    rounding: Rounding
    error: float
    size: float
    product: float
    apart: float


def compare_tensors(
    what: str,
    tensors: Tensors,
    factor: float,
    modules: Mapping[str, str],
    *,
    is_smooth: bool = False,
    like: Limits | None = None,
    floors: Mapping[str, float] | None = None,
) -> Compared:
    """Compare the tensors of a step with those of its reference.

    Args:
        what: the kind of tensors: ``"output"``, ``"gradient"`` or ``"update"``.
        tensors: the tensors of each run.
        factor: by how much an error may exceed that of the reference.
        modules: the module of each parameter, as text.
        is_smooth: whether the tensors are known not to jump, see `limits`.
        like: the limits of the gradients, for outputs.
        floors: the norm of an error that is to be expected in each tensor besides.
    """
    rows: dict[str, GradientRow] = {}
    pairs: dict[str, _Pair] = {}
    for name in dict.fromkeys([*tensors.reference, *tensors.given]):
        found = _pair(name, tensors, what)
        rows[name] = found if isinstance(found, GradientRow) else GradientRow(name, what)
        rows[name] = replace(rows[name], what=what, module=modules.get(name, ""))
        if isinstance(found, _Pair):
            pairs[name] = found
    roundings = {name: pair.rounding for name, pair in pairs.items()}
    for name, size in (floors or {}).items():
        if name in roundings:
            roundings[name] = roundings[name]._replace(error=max(roundings[name].error, size))
    errors = {name: pair.error for name, pair in pairs.items()}
    limit = limits(
        roundings,
        errors,
        factor,
        is_measured=tensors.exact is not None,
        is_smooth=is_smooth,
        like=like,
        apart={name: pair.apart for name, pair in pairs.items()},
    )
    factors: dict[str, float | None] = {}
    for name, pair in pairs.items():
        allowed = limit.allowed[name]
        rows[name] = row = _judged(rows[name], pair, allowed)
        if pair.rounding.norm > allowed:
            factors[name] = factor_of(_wide(pair.given), _wide(pair.base), allowed) if row.fails else 1.0
    shared = 1.0 if tensors.exact is None else _shared(list(pairs.values()), limit.usual)
    return Compared(list(rows.values()), factors, limit, shared)


def _shared(pairs: list[_Pair], usual: float) -> float:
    """Return the factor that all tensors share, if it is far beyond their rounding; otherwise 1."""
    known = [x for x in pairs if x.rounding.numel >= _ENOUGH and x.rounding.norm > 16.0 * x.rounding.error]
    if len(known) < _MANY:
        return 1.0
    factors = [pair.product / pair.rounding.norm**2 for pair in known]
    middle = statistics.median(factors)
    spread = statistics.fmean([(each - middle) ** 2 for each in factors]) ** 0.5
    return middle if abs(middle - 1.0) > _BEYOND * max(spread, usual) else 1.0


def _pair(name: str, tensors: Tensors, what: str) -> _Pair | GradientRow:
    """Return what is to be compared, or the row of what can't be."""
    given, reference = tensors.given.get(name), tensors.reference.get(name)
    exact = (tensors.exact or {}).get(name)
    rounded = (tensors.rounded or {}).get(name)
    # another function may return other things, and one process outputs of other shapes
    is_wrong = what != "output"
    if given is None or reference is None:
        left, other = ("the step", reference) if given is None else ("the reference", given)
        size = float(_wide(other).norm()) if other is not None else 0.0
        # autograd may leave out a gradient that is 0
        text = f"{left} has none, the other one has a norm of {size:.3g}"
        if size != 0:
            return GradientRow(name, "", fails=is_wrong, text=text)
        return GradientRow(name, "", norm=0.0, error=0.0, allowed=0.0)
    if given.shape != reference.shape:
        shapes = f"has the shape {tuple(given.shape)}, in the reference {tuple(reference.shape)}"
        return GradientRow(name, "", fails=is_wrong, text=shapes)
    if not (given.is_floating_point() or given.is_complex()):
        if torch.equal(given.cpu(), reference.cpu()):
            return GradientRow(name, "", numel=given.numel(), error=0.0, allowed=0.0, norm=0.0)
        return GradientRow(name, "", numel=given.numel(), text=f"differs, but has no gradient: {given.dtype}")
    if tensors.exact is not None and (exact is None or exact.shape != given.shape):
        return GradientRow(name, "", numel=given.numel(), text="the float64 run does not have it")
    mine, other = _wide(given), _wide(reference)
    base = other if exact is None else _wide(exact)
    if (row := _nonfinite(name, mine, other, base)) is not None:
        return row
    coarse = None
    if rounded is not None and rounded.shape == given.shape:
        size = float((_wide(rounded) - base).norm())
        coarse = size if math.isfinite(size) else None
    size, rounding = float(base.norm()), float((other - base).norm())
    product, error = float((mine * base).sum()), float((mine - base).norm())
    apart = error
    if given.numel() >= _ENOUGH and size:
        apart = float((mine - product / size**2 * base).norm())
    return _Pair(
        given,
        reference if exact is None else exact,
        Rounding(size, rounding, given.numel(), reference.dtype, coarse),
        error,
        float(mine.norm()),
        product,
        apart,
    )


def _nonfinite(name: str, given: Tensor, reference: Tensor, base: Tensor) -> GradientRow | None:
    """Return the row of a tensor that has NaN or Inf in one of the runs."""
    wrong, expected = (not bool(x.isfinite().all()) for x in (given, reference))
    row = GradientRow(name, "", numel=given.numel())
    if wrong and expected:
        return replace(row, text=f"not finite in both: {nonfinite(given)}")
    if wrong:
        return replace(row, fails=True, text=f"{nonfinite(given)}; the reference is finite")
    if expected:
        return replace(row, fails=True, text=f"finite, but the reference has {nonfinite(reference)}")
    if not bool(base.isfinite().all()):
        return replace(row, text=f"the float64 run has {nonfinite(base)}")
    return None


def _judged(row: GradientRow, pair: _Pair, allowed: float) -> GradientRow:
    """Return the row of a tensor with its error."""
    norm, fails = pair.rounding.norm, not pair.error <= allowed
    lengths = pair.size * norm
    return replace(
        row,
        numel=pair.rounding.numel,
        norm=norm,
        error=pair.error,
        allowed=allowed,
        cosine=pair.product / lengths if lengths else math.nan,
        norm_ratio=pair.size / norm if norm else math.nan,
        fails=fails,
        text=fault_kind(_wide(pair.given), _wide(pair.base), allowed) if fails else "",
    )


def _wide(x: Tensor) -> Tensor:
    """Return a tensor in float64, on its device if that has float64."""
    x = x.detach()
    x = x.to_dense() if x.layout != torch.strided else x
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    x = x.cpu() if x.device.type == "mps" else x
    return x.to(torch.float64)
