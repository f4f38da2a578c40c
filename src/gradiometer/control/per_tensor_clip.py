"""Clipping of each tensor's norm by its own history (AdaGC)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from gradiometer import ops
from gradiometer.columns import TENSORS, realized
from gradiometer.control.adaptive_clip import TensorwiseClip, is_on_host
from gradiometer.control.scale import LARGEST, coefficient_of
from gradiometer.stats import first_unfit

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from gradiometer.control.adaptive_clip import Gradients
    from gradiometer.distributed import Ranks
    from gradiometer.inputs import Parameters
    from gradiometer.stats import Norms


class PerTensorClip(TensorwiseClip):
    """Clip the gradient of each tensor where its norm exceeds the average of its own earlier norms (AdaGC).

    Pass it in place of ``max_norm``: ``gm.collect_and_clip_(model, clip)``. With xᵢ the norm of tensor i, aᵢ
    its average, d = ``decay`` and r = ``max_ratio``:

        limitᵢ  = r aᵢ
        factorᵢ = limitᵢ / (xᵢ + eps)   if xᵢ > limitᵢ, else 1
        aᵢ      ← d aᵢ + (1 - d) min(xᵢ, limitᵢ)

    (Wang et al. 2025, arXiv 2502.11034, and the authors' code). In the first ``warmup_steps`` steps the total
    norm of all tensors is clipped to ``max_norm``, with one factor, and aᵢ is the least of the clipped norms
    of tensor i. A tensor that has no average yet is not clipped, and its first norm is its average.

    A tensor with a NaN or Inf does not change its average. Its non-finite elements keep their values, and
    the finite ones are clipped by their norm, against the current limit. Other tensors are not affected. A
    norm of 0 does not change the average either, unlike in the authors' code: a first gradient of zeros, as
    in low-rank adapters, would set the limit to 0 forever. A tensor without a gradient has factor 1 and keeps
    its average. Every call that clips counts as a step. With ``reduce=`` all ranks compute the same factors
    and averages from the merged norms.

    It works in eager mode and in a compiled step, and never waits for a device. The buffers are part of the
    ``state_dict``, keep their addresses under CUDA graphs, and stay in float64 if the module is cast.

    Args:
        model: a module, or parameters as a mapping, an iterable, or (name, parameter) pairs: those that are
            clipped. If ranks hold different layers, as pipeline stages do: their ``gm.Ranks(model)``.
        max_ratio: positive; the largest ratio of a norm to its average.
        decay: of the averages, in [0, 1).
        warmup_steps: the number of steps in which the total norm is clipped; 0: none.
        max_norm: the limit of the total norm in these steps; ``math.inf``: none.
        eps: not negative; added to a norm before dividing by it.
        device: of the gradients; None: that of the model.

    Attributes:
        names: T names, one per tensor.
        average: ``(T,) float64``, a buffer: the average norms; inf without any.
        count: ``(1,) float64``, a buffer: the number of warm-up steps so far.
        record: ``(3, T) float64``, a buffer: the last factors, the numbers of steps, and of clipped ones.

    Raises:
        ValueError: for an argument out of range, or two tensors of the same name.

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.ParameterDict({"a": torch.zeros(1), "b": torch.zeros(1)})
    >>> clip = gm.PerTensorClip(model, warmup_steps=2, max_norm=10.0)
    >>> for a, b in ((1.0, 5.0), (1.2, 4.0), (8.0, 4.1)):
    ...     model["a"].grad, model["b"].grad = torch.tensor([a]), torch.tensor([b])
    ...     stats = gm.collect_and_clip_(model, clip)
    >>> clip.factor
    tensor([0.1300, 1.0000], dtype=torch.float64)
    """

    _or_zero: ClassVar[Collection[str]] = ("warmup_steps", "eps")
    average: Tensor
    count: Tensor

    def __init__(
        self,
        model: Parameters | Ranks,
        *,
        max_ratio: float = 1.04,
        decay: float = 0.99,
        warmup_steps: int = 100,
        max_norm: float = 1.0,
        eps: float = 1e-6,
        device: torch.device | str | int | None = None,
    ) -> None:
        settings = {"max_ratio": max_ratio, "decay": decay, "warmup_steps": warmup_steps}
        super().__init__(model, device, settings | {"max_norm": max_norm, "eps": eps})
        self.max_ratio, self.decay, self.warmup_steps, self.max_norm, self.eps = self.settings.values()
        self.register_buffer("average", torch.full_like(self.record[0], math.inf))
        self.register_buffer("count", torch.zeros_like(self.key))

    def _unfit(self, name: str, value: Tensor) -> str:
        """Refuse averages that are not norms: a tensor would never be clipped, or never be updated."""
        if name == "average":
            return first_unfit(value, 0.0, math.inf, "the average norm", self.names)
        if name == "count":
            return first_unfit(value, 0.0, LARGEST, "the number of warm-up steps")
        return super()._unfit(name, value)

    def decide(self, gradients: Gradients) -> Tensor:
        """Return the factor of each row, ``(len(names),) float64``, and update the averages."""
        names, norms = gradients.names, gradients.norms
        columns = self._spread(names, gradients.columns)
        if self._uses_kernel(columns):
            buffers = self.average, self.count, self.record
            settings = tuple(self.settings.values())
            return self._gathered(names, ops.clip_factors_(columns, buffers, settings, per_tensor=True))
        norm = TENSORS.value(columns, "finite_norm")
        n_nonfinite = TENSORS.value(columns, "n_nonfinite")
        # the host takes one of two ways, and the short one if every norm enters the average
        is_host = is_on_host(columns.device)
        is_done = is_host and self.count.item() >= self.warmup_steps
        if is_done and len(norm) and n_nonfinite.sum().item() == 0.0:
            least, most = torch.aminmax(norm)
            if least.item() > 0.0 and most.item() < math.inf:
                factor, average = self._later(norm)
                self.average.copy_(average)
                self._note(factor, 1.0, factor < 1.0)
                return self._gathered(names, factor)
        is_known = norm > 0.0
        if is_done:
            factor, average = self._later(norm)
        elif is_host:
            factor, average = self._first(norm, is_known, norms)
        else:
            warm = self.count >= self.warmup_steps
            pairs = zip(self._later(norm), self._first(norm, is_known, norms), strict=True)
            factor, average = [torch.where(warm, later, first) for later, first in pairs]
        # a norm beyond fp64 does not enter either
        enters = is_known & (n_nonfinite == 0.0) & (average < math.inf)
        self.average.copy_(torch.where(enters, average, self.average))
        if not is_done:
            self.count.copy_((self.count + enters.any()).clamp(max=self.warmup_steps))
        self._note(factor, is_known, factor < 1.0)
        return realized(self._gathered(names, factor))

    def _later(self, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors after the warm-up, and the new averages."""
        # inf without history
        limit = self.max_ratio * self.average
        ratio = limit / (norm + self.eps).clamp(max=LARGEST)
        factor = torch.where(norm > limit, ratio, 1.0)
        average = self.decay * self.average + (1.0 - self.decay) * torch.minimum(norm, limit)
        return factor, torch.where(average < math.inf, average, norm)

    def _first(self, norm: Tensor, is_known: Tensor, norms: Callable[[], Norms]) -> tuple[Tensor, Tensor]:
        """Return the factors in the warm-up, and the new averages, which are least norms."""
        coefficient = coefficient_of(norms().finite, self.max_norm)
        return torch.where(is_known, coefficient, 1.0), torch.minimum(self.average, coefficient * norm)

    def _state(self) -> list[Tensor]:
        return [self.average, self.count]
