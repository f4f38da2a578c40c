"""Clipping of the total norm by its z-score (ZClip)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradiometer import ops
from gradiometer.columns import number, realized, sqrt
from gradiometer.control.adaptive_clip import AdaptiveClip, is_on_host
from gradiometer.control.scale import EPS, LARGEST
from gradiometer.stats import first_unfit

if TYPE_CHECKING:
    from gradiometer.control.adaptive_clip import Gradients


class ZScoreClip(AdaptiveClip):
    """Clip the total norm where it is an outlier among the norms of earlier steps (ZClip).

    Pass it in place of ``max_norm``: ``gm.collect_and_clip_(model, clip)``. With x the total norm, m and v
    the mean and the variance of earlier norms, d = ``decay`` and z₀ = ``z_threshold``:

        z      = (x - m) / (√v + eps)
        limit  = m + z₀ √v / (z / z₀)   if z > z₀, else inf
        factor = min(1, min(limit, max_norm) / (x + 1e-6))
        m      ← d m + (1 - d) y        with y = min(x, limit)
        v      ← d v + (1 - d) (y - m)²

    The larger an outlier, the closer to the mean it is clipped (Kumar et al. 2025, arXiv 2504.02507, and the
    authors' code). In the first ``warmup_steps`` steps m and v are the mean and the population variance of
    the norms so far, and only ``max_norm`` is a limit.

    In a step with a NaN or Inf the state does not change. Non-finite elements keep their values, and the
    finite ones are clipped by their norm, against the current limit. A norm of 0, as without gradients, does
    not change the state either. Every call that clips counts as a step. With ``reduce=`` all ranks compute
    the same factor and the same state from the merged norm.

    It works in eager mode and in a compiled step, and never waits for a device. The buffers are part of the
    ``state_dict``, keep their addresses under CUDA graphs, and stay in float64 if the module is cast.

    Args:
        z_threshold: positive; a norm with a larger z-score is clipped.
        decay: of the mean and the variance, in [0, 1).
        warmup_steps: positive; the number of norms before the first is compared with them.
        max_norm: an upper limit in every step; ``math.inf``: none.
        eps: positive; added to the standard deviation.
        device: of the gradients.

    Attributes:
        state: ``(3,) float64``, a buffer: mean, variance, and the number of norms in them.
        record: ``(3, 1) float64``, a buffer: the last factor, the number of steps, and of clipped ones.

    Raises:
        ValueError: for an argument out of range.

    >>> import torch, gradiometer as gm
    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> clip = gm.ZScoreClip(warmup_steps=4)
    >>> for norm in (1.0, 1.2, 0.8, 1.0, 9.0, float("nan")):
    ...     weight.grad = torch.tensor([norm])
    ...     stats = gm.collect_and_clip_([weight], clip)
    ...     print(f"{norm} -> {weight.grad.item():.2f}")
    1.0 -> 1.00
    1.2 -> 1.20
    0.8 -> 0.80
    1.0 -> 1.00
    9.0 -> 1.02
    nan -> nan
    """

    state: Tensor

    def __init__(
        self,
        *,
        z_threshold: float = 2.5,
        decay: float = 0.97,
        warmup_steps: int = 25,
        max_norm: float = math.inf,
        eps: float = 1e-6,
        device: torch.device | str | int | None = None,
    ) -> None:
        settings = {"z_threshold": z_threshold, "decay": decay, "warmup_steps": warmup_steps}
        super().__init__(1, device, settings | {"max_norm": max_norm, "eps": eps})
        self.z_threshold, self.decay, self.warmup_steps, self.max_norm, self.eps = self.settings.values()
        self.register_buffer("state", torch.zeros(3, dtype=torch.float64, device=device))

    @property
    def mean(self) -> Tensor:
        """The mean of earlier norms, 0-d float64; 0 without any."""
        return self.state[0].clone()

    @property
    def std(self) -> Tensor:
        """Their standard deviation, 0-d float64."""
        return sqrt(self.state[1])

    def _unfit(self, name: str, value: Tensor) -> str:
        """Refuse what is not a mean and a variance of norms: no later norm would change it."""
        if name != "state":
            return super()._unfit(name, value)
        words = "the mean norm", "the variance of the norms", "the number of norms"
        texts = [first_unfit(x, 0.0, LARGEST, what) for x, what in zip(value, words, strict=True)]
        return next(filter(None, texts), "")

    def decide(self, gradients: Gradients) -> Tensor:
        """Return the factor of all gradients, 0-d float64, and update the state."""
        columns = gradients.columns
        self._check_device(columns)
        if gradients.order == 2.0 and self._uses_kernel(columns):
            settings = tuple(self.settings.values())
            return ops.clip_factors_(columns, (self.state, self.record), settings, per_tensor=False)
        total, finite = gradients.norms()
        if not is_on_host(columns.device):
            mean, variance, count = self.state.unbind()
            factor, enters, after = self._step(total, finite, mean, variance, count, torch.where, sqrt)
            self.state.copy_(torch.where(enters, torch.stack(after), self.state))
            # a step without gradients is none
            self._note(factor.reshape(1), (total != 0.0).reshape(1), (factor < 1.0).reshape(1))
            return realized(factor)
        # the same with the host's numbers, which takes less time than operators on tensors of one element
        mean, variance, count = self.state.tolist()
        norm = total.item()
        numbers = norm, finite.item(), mean, variance, count
        value, is_entered, after = self._step(*numbers, lambda x, yes, no: yes if x else no, math.sqrt)
        _, (steps,), (clipped,) = self.record.tolist()
        record = [[value], [steps + (norm != 0.0)], [clipped + (value < 1.0)]]
        self.record.copy_(torch.tensor(record, dtype=torch.float64, device="cpu"))
        if is_entered:
            self.state.copy_(torch.tensor(after, dtype=torch.float64, device="cpu"))
        return number(value, columns.device)

    def _step(
        self, norm: Any, finite: Any, mean: Any, variance: Any, count: Any, where: Any, root: Any
    ) -> tuple[Any, Any, tuple[Any, Any, Any]]:
        """Return the factor, whether the norm enters the state, and the state if it does.

        ``norm`` and ``finite`` are those of all and of the finite elements. All are 0-d float64 tensors, or
        all are floats.
        """
        is_warm = count >= self.warmup_steps
        std = root(variance)
        z = (finite - mean) / (std + self.eps)
        is_outlier = is_warm & (z > self.z_threshold)
        eta = where(is_outlier, z / self.z_threshold, 1.0)
        limit = where(is_outlier, mean + (self.z_threshold * std) / eta, finite)

        bound = where(is_outlier, limit, self.max_norm)
        bound = where(bound > self.max_norm, self.max_norm, bound)
        above = finite + EPS
        ratio = bound / where(above > LARGEST, LARGEST, above)
        factor = where(ratio < 1.0, ratio, 1.0)

        number = count + 1.0
        change = limit - mean
        running = mean + change / number
        deviation = change * (limit - running)
        faded = self.decay * mean + (1.0 - self.decay) * limit
        square = (limit - faded) * (limit - faded)
        mean = where(is_warm, faded, running)
        spread = where(
            is_warm,
            self.decay * variance + (1.0 - self.decay) * square,
            variance + (deviation - variance) / number,
        )
        # finite - finite is 0; squares may overflow
        enters = (norm - norm == 0.0) & (norm > 0.0) & (spread < math.inf)
        return factor, enters, (mean, spread, number)

    def _recorded(self, row: int) -> Tensor:
        return self.record[row, 0].clone()

    def _state(self) -> list[Tensor]:
        return [self.state]
