"""ActivationStats: the raw columns of activations on the device, and the values derived from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gradiometer.columns import NUM_ACTIVATION_SUMS, activation_value, derived
from gradiometer.stats import grouping, stats_pytree
from gradiometer.stats.activation_report import ActivationReport
from gradiometer.stats.device_values import DeviceValue
from gradiometer.stats.host_copy import Pending, fetch, outside_of_a_graph

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from gradiometer.stats.grouping import GroupRule

__all__ = ["ActivationStats"]


def _of_rows(name: str, stats: ActivationStats) -> Tensor:
    return activation_value(stats.columns, name)


def _merge_rows(columns: Tensor) -> Tensor:
    return derived.merge_rows(columns, NUM_ACTIVATION_SUMS)


@dataclass(frozen=True, eq=False, repr=False)
class ActivationStats:
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

    names: tuple[str, ...]
    columns: Tensor

    numel = DeviceValue(_of_rows)
    """Elements, ``(T,) float64``."""

    sumsq = DeviceValue(_of_rows)
    """Sum of x**2 over finite elements, ``(T,) float64``."""

    sum = DeviceValue(_of_rows)
    """Sum over finite elements, ``(T,) float64``."""

    n_zero = DeviceValue(_of_rows)
    """Elements equal to 0, ``(T,) float64``."""

    n_nan = DeviceValue(_of_rows)
    """NaN elements, ``(T,) float64``."""

    n_inf = DeviceValue(_of_rows)
    """+Inf and -Inf elements, ``(T,) float64``."""

    abs_max = DeviceValue(_of_rows)
    """Largest finite magnitude, ``(T,) float64``."""

    sum4 = DeviceValue(_of_rows)
    """Sum of x**4 over finite elements, ``(T,) float64``."""

    n_channels = DeviceValue(_of_rows)
    """Channels of each call, added up, ``(T,) float64``."""

    n_zero_channels = DeviceValue(_of_rows)
    """Channels whose elements are all 0 in a call, added up, ``(T,) float64``."""

    n_calls = DeviceValue(_of_rows)
    """Calls that were measured, ``(T,) float64``."""

    norm = DeviceValue(_of_rows)
    """L2 norm, ``(T,) float64``: NaN with any NaN, else inf with any Inf."""

    rms = DeviceValue(_of_rows)
    """Root mean square of finite elements, ``(T,) float64``."""

    mean = DeviceValue(_of_rows)
    """Mean of finite elements, ``(T,) float64``."""

    std = DeviceValue(_of_rows)
    """Standard deviation of finite elements, ``(T,) float64``."""

    zero_fraction = DeviceValue(_of_rows)
    """``n_zero / numel``, ``(T,) float64``."""

    outlier_ratio = DeviceValue(_of_rows)
    """``abs_max / rms``, ``(T,) float64``; 0 if all elements are 0."""

    kurtosis = DeviceValue(_of_rows)
    """Mean of x**4 over the square of the mean of x**2, ``(T,) float64``.

    Neither is about the mean of x. 3 for a normal distribution about 0, 1 for a constant magnitude; 0 if all
    elements are 0.
    """

    zero_channel_fraction = DeviceValue(_of_rows)
    """``n_zero_channels / n_channels``, ``(T,) float64``: the share of dead units."""

    def __repr__(self) -> str:
        """Return a one-line summary. Never waits for the device."""
        rows = f"{len(self.names)} rows, on {self.columns.device}"
        return f"<ActivationStats: {rows}; materialize() reads them>"

    def group(self, rules: Mapping[str, GroupRule] | Iterable[tuple[str, GroupRule]]) -> ActivationStats:
        """Merge rows into groups; rules as for `TensorStats.group`, without modules.

        >>> import torch, gradiometer as gm
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Flatten())
        >>> taps = gm.Taps(model, {"all": "."})
        >>> _ = model(torch.ones(3, 2))
        >>> taps.stats().group({"values": r"out$"}).numel
        tensor([12.], dtype=torch.float64)
        """
        pairs = grouping.pairs_of(rules)
        rows = {name: grouping.members(self.names, name, rule, None) for name, rule in pairs}
        columns = derived.merge_groups(self.columns, list(rows.values()), _merge_rows)
        return replace(self, names=tuple(rows), columns=columns)

    def merge(self, other: ActivationStats) -> ActivationStats:
        """Merge with stats of the same names, as if they were of more calls of the same step.

        Raises:
            ValueError: if the names differ.
        """
        if self.names != other.names:
            msg = "merge: the two stats must have the same names in the same order"
            raise ValueError(msg)
        columns = derived.merge(self.columns, other.columns.to(self.columns.device), NUM_ACTIVATION_SUMS)
        return replace(self, columns=columns)

    def materialize(self) -> ActivationReport:
        """Copy everything to the host in one transfer and return it. Waits for the device.

        Raises:
            RuntimeError: inside a compiled function, or while a CUDA graph is captured.
        """
        outside_of_a_graph("materialize")
        return self.unpacked(*fetch([self.packed()]))

    def materialize_async(self) -> Pending[ActivationReport]:
        """Start the copy that `materialize` makes, and return at once; as `TensorStats.materialize_async`."""
        outside_of_a_graph("materialize_async")
        return Pending([self.packed()], lambda copies: self.unpacked(*copies))

    def packed(self) -> Tensor:
        """Return all tensors that the report needs as one matrix."""
        return self.columns

    def unpacked(self, packed: Tensor) -> ActivationReport:
        """Return the `ActivationReport` of a `packed` matrix that was copied to the host."""
        return ActivationReport(self.names, packed)


stats_pytree.register(ActivationStats)
