"""ActivationStats: the raw columns of activations on the device, and the values derived from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradiometer.columns import ACTIVATIONS
from gradiometer.distributed import plain_sharding, with_shards
from gradiometer.stats.activation_report import ActivationReport
from gradiometer.stats.device_values import ActivationValues
from gradiometer.stats.named_stats import NamedStats

if TYPE_CHECKING:
    from gradiometer.distributed import Sharding


@dataclass(frozen=True, eq=False, repr=False, init=False)
class ActivationStats(ActivationValues, NamedStats[ActivationReport]):
    """Statistics of T activations and gradients of activations, on their device.

    Only `materialize` waits for the device. It is a pytree, so compiled functions can return it. Sums are in
    fp64, over finite elements. A row that was not measured has 0 in every column.

    Attributes:
        names: T names: those of activations, such as ``blocks.3.mlp.out``, then those of their gradients,
            such as ``blocks.3.mlp.out.grad``.
        columns: ``(T, A) float64``, the raw columns in the order of ``gm.ACTIVATION_COLUMNS``.

    Every raw column and derived value is a property too, ``(T,) float64``; the page "Columns and flags" of
    the reference lists them:

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.Sequential(torch.nn.Flatten())
    >>> taps = gm.Taps(model, {"all": "0"})
    >>> _ = model(torch.tensor([[3.0, 0.0], [4.0, 0.0]]))
    >>> taps.stats().zero_channel_fraction[0]
    tensor(0.5000, dtype=torch.float64)
    """

    schema = ACTIVATIONS

    def _agreeable(self) -> Sharding:
        # each rank measures the activations of its own batch, so that all of them count
        return with_shards(plain_sharding(self.names), {"": None})
