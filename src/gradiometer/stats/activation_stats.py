"""Statistics of activations and their gradients: on the device, and by name in plain Python on the host."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any

from gradiometer.columns import ACTIVATIONS
from gradiometer.distributed import plain_sharding, with_shards
from gradiometer.stats.device_values import ActivationValues
from gradiometer.stats.named_stats import NamedStats
from gradiometer.stats.table_report import TableReport

if TYPE_CHECKING:
    from torch import Tensor

    from gradiometer.distributed import Sharding


@dataclass(frozen=True)
class ActivationRow:
    """Statistics of one activation or gradient, of all calls of a step; named as in `ActivationStats`."""

    name: str
    numel: int
    n_calls: int
    norm: float
    rms: float
    mean: float
    std: float
    abs_max: float
    outlier_ratio: float
    kurtosis: float
    n_zero: int
    zero_fraction: float
    n_channels: int
    n_zero_channels: int
    zero_channel_fraction: float
    n_nan: int
    n_inf: int


class ActivationReport(TableReport[ActivationRow]):
    """Statistics of activations of one step, on the host: a mapping from names to `ActivationRow`.

    ``print(report)`` shows a table in the order of the model. Activations that were not measured are left
    out.

    Attributes:
        names: the names of the rows.

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> taps = gm.Taps(model, {"relu": r"^1$"})
    >>> _ = model(torch.ones(8, 2))
    >>> report = taps.stats().materialize()
    >>> report["1.out"].numel, report["1.out"].n_calls
    (16, 1)
    """

    schema = ACTIVATIONS
    _row_class = ActivationRow
    _noun = "activation"
    _nothing = (
        "nothing measured: no activations (they are measured in training mode; names= of gm.Taps are "
        "those of calls of gm.tap)"
    )
    # activations and their gradients have nothing in common
    _shows_total = False

    def __init__(
        self, names: tuple[str, ...], columns: Tensor, *, flags: Tensor | None = None, **options: Any
    ) -> None:
        """Create a report of columns on the host; ``options`` are those of `TableReport`."""
        kept = ACTIVATIONS.value(columns, "n_calls") > 0
        names = tuple(compress(names, kept.tolist()))
        super().__init__(names, columns[kept], flags=None if flags is None else flags[kept], **options)

    def to_string(self, max_rows: int | None = 40) -> str:
        """Return the table that ``print`` shows, with ``max_rows`` rows at most; None: all."""
        return super().to_string(max_rows)

    def _cell(self, row: ActivationRow, name: str) -> str:
        if name == "n_zero_channels" and row.n_zero_channels:
            return f"{row.n_zero_channels} of {row.n_channels}"
        return super()._cell(row, name)


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
