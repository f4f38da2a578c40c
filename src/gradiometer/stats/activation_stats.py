"""ActivationStats: the raw columns of activations on the device, and the values derived from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradiometer.columns import ACTIVATIONS
from gradiometer.distributed import plain_sharding, with_shards
from gradiometer.stats.activation_report import ActivationReport
from gradiometer.stats.device_values import DeviceValue, ElementValues
from gradiometer.stats.named_stats import NamedStats

if TYPE_CHECKING:
    from gradiometer.distributed import Sharding


@dataclass(frozen=True, eq=False, repr=False, init=False)
class ActivationStats(ElementValues, NamedStats[ActivationReport]):
    """Statistics of T activations and gradients of activations, on their device.

    Only `materialize` waits for the device. It is a pytree, so compiled functions can return it. Sums are in
    fp64, over finite elements. A row that was not measured has 0 in every column.

    Attributes:
        names: T names: those of activations, such as ``blocks.3.mlp.out``, then those of their gradients,
            such as ``blocks.3.mlp.out.grad``.
        columns: ``(T, A) float64``, the raw columns in the order of ``gm.ACTIVATION_COLUMNS``.

    Every raw column and derived value is a property too, ``(T,) float64``:

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.Sequential(torch.nn.Flatten())
    >>> taps = gm.Taps(model, {"all": "0"})
    >>> _ = model(torch.tensor([[3.0, 0.0], [4.0, 0.0]]))
    >>> taps.stats().zero_channel_fraction[0]
    tensor(0.5000, dtype=torch.float64)
    """

    schema = ACTIVATIONS

    sum4 = DeviceValue()
    """Sum of x**4 over finite elements, ``(T,) float64``."""

    n_channels = DeviceValue()
    """Channels of each call, added up, ``(T,) float64``."""

    n_zero_channels = DeviceValue()
    """Channels whose elements are all 0 in a call, added up, ``(T,) float64``."""

    n_calls = DeviceValue()
    """Calls that were measured, ``(T,) float64``."""

    outlier_ratio = DeviceValue()
    """``abs_max / rms``, ``(T,) float64``; 0 if all elements are 0."""

    kurtosis = DeviceValue()
    """Mean of x**4 over the square of the mean of x**2, ``(T,) float64``.

    Neither is about the mean of x. 3 for a normal distribution about 0, 1 for a constant magnitude; 0 if all
    elements are 0.
    """

    zero_channel_fraction = DeviceValue()
    """``n_zero_channels / n_channels``, ``(T,) float64``: the share of dead units."""

    def _agreeable(self) -> Sharding:
        # each rank measures the activations of its own batch, so that all of them count
        return with_shards(plain_sharding(self.names), {"": None})
