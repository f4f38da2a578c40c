"""Smoothing: an exponential moving average of norms and ratios that stays on the device."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gradiometer.stats.float64_module import Float64Module, first_unfit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

_LARGEST: Final = sys.float_info.max


class Smoothed(NamedTuple):
    """The result of one `EMA` update; both fields are float64 snapshots of ``shape``, on the EMA's device.

    ``value``: the mean after the update. ``drift``: the distance of x from the mean before
    the update, relative to that mean.
    """

    value: Tensor
    drift: Tensor


# so that torch.export can save a program that returns it
pytree._register_namedtuple(Smoothed, serialized_type_name="gradiometer.Smoothed")  # noqa: SLF001 it has no public name


class EMA(Float64Module):
    """Exponential moving average of a device tensor, element by element, without waiting for the device.

    With d = ``decay``, w₀ = 0, and x the finite values:

        wₜ = d wₜ₋₁ + (1 - d)                         the weight of all values so far, 1 - dᵗ
        mₜ = mₜ₋₁ + (1 - d) / wₜ · (xₜ - mₜ₋₁)        their mean, ∑ (1 - d) dᵗ⁻ⁱ xᵢ / wₜ
        driftₜ = |xₜ - mₜ₋₁| / (|mₜ₋₁| + eps)         against the mean before xₜ

    This is Adam's average with its bias correction (Kingma & Ba 2015, section 3). The update acts on the
    corrected mean itself, so a constant input gives exactly that constant from the first step on.

    A NaN or infinite element does not change its mean and weight; the drift of that step is NaN or inf.
    The next finite value continues from the previous state. The first finite value has drift 0.
    So ``drift <= 5`` means "as usual", also on the first step, and is never true for a non-finite value.

    With ``bias_correction=False`` it is the classical average that starts at 0, like Adam's moments before
    their correction:

        m₀ = 0,  mₜ = d mₜ₋₁ + (1 - d) xₜ

    Without history its value is 0, and in the first ``1 / (1 - decay)`` steps it is too small, by the factor
    wₜ. Drift is measured against the same mₜ₋₁, so it is large there: ``|x₁| / eps`` at the first value. The
    state has the same form, so a ``state_dict`` of one kind loads into the other.

    The module has one buffer, which is part of its owner's ``state_dict``, moves with ``.to(device)`` and
    keeps its address under CUDA graphs. ``.half()`` and other casts of the owner leave it in float64. A
    compiled step updates it inside the graph; in eager mode an update takes about twenty small operations.
    The results are not differentiable.

    Args:
        shape: of the values; ``()`` for a total norm, ``(T,)`` for one value per tensor.
        decay: in [0, 1), where 0 keeps only the last value; values fade after ``1 / (1 - decay)`` steps.
        eps: positive, on the scale of x; it dominates the denominator of the drift if the mean is smaller.
        bias_correction: whether to apply Adam's bias correction.
        device: of the state and the values.

    Attributes:
        state: ``(3, *shape)`` float64, the buffer: the corrected mₜ (0 without history), wₜ, and t, the
            count of `steps`.

    Raises:
        ValueError: for an invalid shape, and for a decay or eps out of range.
        TypeError: if ``bias_correction`` is not a bool.

    >>> import torch, gradiometer as gm
    >>> ema = gm.EMA(decay=0.9)
    >>> for norm in (2.0, 2.0, float("nan"), 12.0):
    ...     value, drift = ema(torch.tensor(norm))
    ...     print(f"{value:.3f} {drift:.1f}")
    2.000 0.0
    2.000 0.0
    2.000 nan
    5.690 5.0
    """

    state: Tensor

    def __init__(
        self,
        shape: int | Sequence[int] = (),
        *,
        decay: float = 0.99,
        eps: float = 1e-12,
        bias_correction: bool = True,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(decay, (int, float)) or not 0 <= decay < 1:
            raise ValueError(f"EMA(decay={decay!r}): decay must be a number in [0, 1)")
        if not isinstance(eps, (int, float)) or not 0 < eps < math.inf:
            raise ValueError(f"EMA(eps={eps!r}): eps must be a positive finite number")
        if not isinstance(bias_correction, bool):
            msg = f"EMA(bias_correction={bias_correction!r}): bias_correction must be True or False"
            raise TypeError(msg)
        self.bias_correction = bias_correction
        self.decay = float(decay)
        self.eps = float(eps)
        size = (shape,) if isinstance(shape, int) else shape
        if not isinstance(size, (tuple, list)) or not all(isinstance(n, int) and n >= 0 for n in size):
            msg = f"EMA({shape!r}): shape must be () or non-negative integers; pass decay by keyword"
            raise ValueError(msg)
        # never 0-d: compiled graphs of torch 2.11 and 2.13 lose writes into a 0-d float64 tensor on the CPU
        self.register_buffer("state", torch.zeros((3, *size), dtype=torch.float64, device=device))

    def forward(self, x: Tensor) -> Smoothed:
        """Add the next value; return the mean after it and its drift from the mean before it.

        Args:
            x: ``shape``, of a floating-point dtype, on the device of the EMA: ``stats.total_norm``,
                ``stats.norm``, a ratio of groups.

        Raises:
            TypeError: if ``x`` is not a floating-point tensor.
            ValueError: if ``x`` has another shape or device.
        """
        self._check(x)
        x = x.detach().to(torch.float64)
        mean, weight, steps = self.state.unbind()
        # without history, x is its own mean before, so there is no change
        before = torch.where(weight > 0, mean, x)
        change = x - before
        reference = before if self.bias_correction else mean * weight
        drift = (x - reference).abs() / (reference.abs() + self.eps)

        faded = self.decay * weight
        weight = faded + (1 - self.decay)
        rest = faded / weight
        # computed from x: exact if the mean does not change, and if x has all the weight
        mean = x - rest * change
        # test the change, not x: the difference of finite numbers may be infinite and make the mean infinite
        after = torch.stack([mean, weight, steps + 1])
        self.state.copy_(torch.where(change.isfinite(), after, self.state))
        return Smoothed(self.value, drift)

    @property
    def value(self) -> Tensor:
        """The mean of the finite values so far, ``shape`` float64.

        Without any it is NaN, or 0 without bias correction.
        """
        mean, weight, _ = self.state.unbind()
        return torch.where(weight > 0, mean, torch.nan) if self.bias_correction else mean * weight

    @property
    def steps(self) -> Tensor:
        """The number of finite values, ``shape`` float64."""
        return self.state[2].clone()

    def reset_(self) -> Self:
        """Forget all values in place; the buffer keeps its address."""
        self.state.zero_()
        return self

    def extra_repr(self) -> str:
        """Return the arguments."""
        own = f"shape={tuple(self.state.shape[1:])}, decay={self.decay}, eps={self.eps}"
        return own if self.bias_correction else f"{own}, bias_correction=False"

    def _unfit(self, name: str, value: Tensor) -> str:
        """Refuse what no update can change again, or makes of finite values."""
        del name
        mean, weight, steps = value.unbind()
        # the sum of the weights is rounded
        return (
            first_unfit(mean, -_LARGEST, _LARGEST, "a mean")
            or first_unfit(weight, 0.0, 1.0 + 1e-9, "the weight of a mean")
            or first_unfit(steps, 0.0, math.inf, "a number of steps")
        )

    def _check(self, x: Tensor) -> None:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"EMA: x must be a floating-point tensor, got {kind}")
        if x.shape != self.state.shape[1:]:
            got, own = tuple(x.shape), tuple(self.state.shape[1:])
            msg = f"EMA: x has shape {got}, but this average has shape {own}; create it with EMA({got})"
            raise ValueError(msg)
        if x.device != self.state.device:
            msg = f"EMA: x is on {x.device}, but this average is on {self.state.device}; "
            raise ValueError(msg + f"create it with EMA(device={str(x.device)!r}), or move it there")
