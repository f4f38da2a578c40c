"""What is differentiated: the loss, or a random projection of the outputs of a model that has none."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from gradiometer.checks.batch import tensors_of
from gradiometer.checks.report import NotApplicable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from gradiometer.checks.probe import Probe


def trainable(probe: Probe) -> dict[str, Tensor]:
    """Return the parameters with elements that require gradients, by name; tied ones once."""
    return {name: p for name, p in probe.model.named_parameters() if p.requires_grad and p.numel()}


def objective(probe: Probe, changes: Mapping[str, Any] | None = None, seed: int = 0) -> Tensor:
    """Return the loss, or else a random projection of all outputs, 0-d; call it in ``differentiated``.

    Args:
        probe: the probe.
        changes: other values of inputs, by name.
        seed: the seed of random numbers, also of the projection.
    """
    torch.manual_seed(seed)
    result, loss = probe.result_with_loss(changes)
    if loss is not None:
        return loss.reshape(())
    outputs = [x for x in tensors_of(result) if x.dtype.is_floating_point | x.is_complex() and x.numel()]
    if not outputs:
        raise NotApplicable("the model returns neither a loss nor an output")
    graph = [x for x in outputs if x.requires_grad]
    return torch.stack([projection(x, seed) for x in graph or outputs]).sum()


def projection(x: Tensor, seed: int = 0) -> Tensor:
    """Return the sum of the elements of a tensor, each times a random number."""
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    generator = torch.Generator(device="cpu").manual_seed(seed)
    noise = torch.randn(x.shape, generator=generator, device="cpu", dtype=torch.float64)
    # finite differences of infinities, such as of masked scores, are no numbers
    products = (x * noise.to(x.device, x.dtype)).masked_fill(~x.isfinite(), 0.0)
    return products.sum() / math.sqrt(x.numel())


def some(names: Sequence[str]) -> str:
    """Return the first three names, and the number of the others.

    >>> some(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    return f"{', '.join(names[:3])} and {len(names) - 3} more" if len(names) > 3 else ", ".join(names)
