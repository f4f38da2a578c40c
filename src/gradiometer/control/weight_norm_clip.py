"""Clipping of each tensor's gradient by the norm of its weight (AGC)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

import torch
from torch import Tensor
from torch.linalg import vector_norm

from gradiometer.columns import TENSORS, number, realized, spread, take
from gradiometer.control.adaptive_clip import Gradients, TensorwiseClip, stats_given
from gradiometer.control.scale import LARGEST, real_memory, scale_by_, unscaled
from gradiometer.inputs import describe, is_dtensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.control.scale import Part
    from gradiometer.distributed import Ranks
    from gradiometer.inputs import Named, Parameters
    from gradiometer.stats import TensorStats

# as in the authors' code: the least norm of a gradient that is divided by
_LEAST: Final = 1e-6
# number of elements converted to fp64 at a time
_PIECE: Final = 2**20


class WeightNormClip(TensorwiseClip):
    """Clip the gradient of each tensor where its norm is too large for that of its weight (AGC).

    Pass it in place of ``max_norm``: ``gm.collect_and_clip_(model, clip)``. With the norms ‖g‖ of a gradient
    and ‖w‖ of its weight:

        limit  = max_ratio · max(‖w‖, eps)
        factor = limit / max(‖g‖, 1e-6)   if ‖g‖ > limit, else 1

    (Brock et al. 2021, arXiv 2102.06171, and the authors' code). With ``unitwise=True`` these are, as in the
    paper, the norms of each output unit: of the rows of a matrix, of the filters of a convolution, in general
    of all but the first dimension. Scalars and vectors, also with further dimensions of size 1, are one
    unit. This takes operators of PyTorch for each tensor instead of a kernel for all. The paper does not clip
    the last linear layer: to leave tensors out, pass the others here and to `collect_and_clip_`.

    It keeps no state but the record. Norms are those of the finite elements; others keep their values. A
    tensor without a gradient has factor 1. With ``reduce=`` the norms are those of whole tensors, which takes
    two more collectives, and all ranks compute the same factors.

    It works in eager mode and in a compiled step, and never waits for a device. The buffers are part of the
    ``state_dict``, keep their addresses under CUDA graphs, and stay in float64 if the module is cast.

    Args:
        model: a module, or parameters as a mapping, an iterable, or (name, parameter) pairs: those that are
            clipped. If ranks hold different layers, as pipeline stages do: their ``gm.Ranks(model)``.
        max_ratio: positive; the largest ratio of both norms, λ in the paper.
        eps: positive; a smaller norm of a weight counts as this, so that weights of 0 can be trained.
        unitwise: whether each output unit has a factor of its own; not for DTensors and other shards.
        device: of the gradients; None: that of the model.

    Attributes:
        names: T names, one per tensor.
        record: ``(3, T) float64``, a buffer: the last factors, the numbers of steps, and of clipped ones;
            with ``unitwise`` the least factor of each tensor, and the numbers of its units over all steps.

    Raises:
        ValueError: for an argument out of range, or two tensors of the same name.

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.Linear(2, 1)
    >>> with torch.no_grad():
    ...     model.weight.copy_(torch.tensor([[3.0, 4.0]])), model.bias.zero_()
    (Parameter containing:
    tensor([[3., 4.]], requires_grad=True), Parameter containing:
    tensor([0.], requires_grad=True))
    >>> model.weight.grad, model.bias.grad = torch.ones(1, 2), torch.zeros(1)
    >>> clip = gm.WeightNormClip(model)
    >>> stats = gm.collect_and_clip_(model, clip)
    >>> model.weight.grad.norm(), clip.factor
    (tensor(0.0500), tensor([0.0354, 1.0000], dtype=torch.float64))
    """

    needs_weights: ClassVar[bool] = True

    def __init__(
        self,
        model: Parameters | Ranks,
        *,
        max_ratio: float = 0.01,
        eps: float = 1e-3,
        unitwise: bool = False,
        device: torch.device | str | int | None = None,
    ) -> None:
        if not isinstance(unitwise, bool):
            raise ValueError(f"WeightNormClip: unitwise must be True or False, got {describe(unitwise)}")  # noqa: TRY004
        super().__init__(model, device, {"max_ratio": max_ratio, "eps": eps}, unitwise)
        self.max_ratio, self.eps = self.settings.values()
        self.unitwise = unitwise

    def forward(self, stats: TensorStats, weights: TensorStats) -> Tensor:  # type: ignore[override]
        """Count these statistics as a step, and return its factors; nothing is scaled.

        Args:
            stats: of the gradients; with several ranks, merged.
            weights: of the weights, with at least the names of ``stats``; merged, too.

        Returns:
            ``(len(stats.names),) float64`` from 0 to 1.

        Raises:
            TypeError: if one is not TensorStats.
            ValueError: with ``unitwise``; for another device; for a name that is not in `names`, or not in
                ``weights``.
        """
        what = "WeightNormClip"
        stats, weights = stats_given(stats, what), stats_given(weights, what)
        if self.unitwise:
            msg = f"{what}: statistics have no norms of units; with unitwise=True pass it to clip_grad_norm_ "
            raise ValueError(msg + "or collect_and_clip_")
        columns = weights.columns
        if weights.names != stats.names:
            rows = {name: row for row, name in enumerate(weights.names)}
            missing = [name for name in stats.names if name not in rows]
            if missing:
                msg = f"{what}: {missing[0]!r} has a gradient, but weights have no such row; pass "
                raise ValueError(msg + "gm.collect_weights(model) of the same model")
            columns = take(columns, [rows[name] for name in stats.names])
        return self.decide(Gradients.of(stats, weights=columns))

    def extra_repr(self) -> str:
        """Return the arguments."""
        return super().extra_repr() + (", unitwise=True" if self.unitwise else "")

    def check(self, parameters: Named, ranks: Ranks | None, order: float, what: str) -> None:
        """Also reject shards if units are clipped."""
        super().check(parameters, ranks, order, what)
        if not self.unitwise:
            return
        for name, parameter in zip(*parameters, strict=True):
            reason = ""
            if is_dtensor(type(parameter)) or is_dtensor(type(parameter.grad)):
                reason = "is a DTensor"
            elif parameter.is_sparse or (parameter.grad is not None and parameter.grad.is_sparse):
                reason = "has a sparse gradient"
            if reason:
                msg = f"{what}: {name!r} {reason}, whose units this rank cannot clip; use unitwise=False"
                raise TypeError(msg)
        if ranks is not None and ranks.sharding.is_sharded:
            msg = f"{what}: gm.Ranks has tensors that are sharded, whose units no rank has as a whole; use "
            raise TypeError(msg + "unitwise=False")

    def decide(self, gradients: Gradients) -> Tensor:
        """Return the factor of each row, ``(len(names),) float64``."""
        names, columns, *_, weights = gradients
        if weights is None:
            msg = "clip_coefficient: gm.WeightNormClip needs the norms of the weights too; call "
            raise ValueError(msg + "clip(stats, gm.collect_weights(model)), or use collect_and_clip_")
        # one call for both
        columns = torch.stack([self._spread(names, columns), self._spread(names, weights)])
        norm, size = TENSORS.value(columns, "finite_norm").unbind()
        factor = self._factor(norm, size)
        self._note(factor, norm > 0.0, factor < 1.0)
        return realized(self._gathered(names, factor))

    @torch.no_grad()
    def scale_units_(
        self,
        names: tuple[str, ...],
        parts: Sequence[Part],
        weights: Sequence[Tensor],
        inv_scale: Tensor | float | None = None,
    ) -> None:
        """Clip each output unit of G gradients, the ``parts``, in place; ``names`` and ``weights`` have G."""
        found: dict[int, Tensor] = {}
        for part in parts:
            for row, grad in zip(part.rows, part.tensors, strict=True):
                noted = self._scale_units_of(grad, weights[row].detach(), inv_scale)
                found[row] = noted.to(self.record.device)
        # least factor, number of units, and of clipped ones; nothing of a gradient that another row has
        rows = [self._rows(names, "WeightNormClip")[row] for row in found]
        every = torch.stack(list(found.values())) if found else self.record.new_zeros((0, 3))
        whole = spread(every, rows, len(self.names))
        factor, units, clipped = whole.unbind(dim=1)
        self._note(torch.where(units > 0.0, factor, 1.0), units, clipped)

    def _scale_units_of(self, grad: Tensor, weight: Tensor, inv_scale: Tensor | float | None) -> Tensor:
        """Clip the units of one gradient; return ``(3,) float64``: least factor, units, clipped units."""
        has_units = grad.numel() > 0 and sum([size > 1 for size in weight.shape]) > 1
        weight = real_memory(weight)
        dims = tuple(range(1 if has_units else 0, grad.dim()))
        pieces = [(grad, weight)]
        if has_units and not torch.compiler.is_compiling():
            # each piece is copied to fp64
            rows = max(1, _PIECE * len(grad) // grad.numel())
            pieces = list(zip(grad.split(rows), weight.split(rows), strict=True))
        noted = []
        for g, w in pieces:
            norm, size = [_norms(x, dims) for x in (g, w)]
            factor = self._factor(norm if inv_scale is None else unscaled(norm, inv_scale), size)
            scale_by_(g, factor)
            is_clipped = (factor < 1.0).sum()
            noted.append(torch.stack([factor.amin(), number(factor.numel(), g.device), is_clipped]))
        every = torch.stack(noted)
        return torch.cat([every[:, :1].amin(dim=0), every[:, 1:].sum(dim=0)])

    def _factor(self, norm: Tensor, size: Tensor) -> Tensor:
        limit = self.max_ratio * size.clamp(min=self.eps)
        # the norm may be inf, if squares are beyond fp64
        return torch.where(norm > limit, limit / norm.clamp(min=_LEAST, max=LARGEST), 1.0)


def _norms(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the norms of the finite elements over some dimensions, which are kept, in float64."""
    wide = x.to(torch.float64)
    return vector_norm(torch.where(wide.isfinite(), wide, 0.0), dim=dims, keepdim=True)  # type: ignore[no-any-return]
