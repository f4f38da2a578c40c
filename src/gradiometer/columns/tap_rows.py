"""The columns of activations in a recorded step: those of every kind, and further ones.

A tap has a row of kind ``activations`` and one of kind ``activation_grads`` with the columns of a tensor, see
`gradiometer.columns.activations`. A second row of each has the further columns, which all merge by sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from gradiometer.columns import derived
from gradiometer.columns.activations import (
    ACTIVATION_COLUMNS,
    ACTIVATION_DERIVED,
    ACTIVATION_INDEX,
    activation_value,
    tensor_columns,
)
from gradiometer.columns.schema import Flag
from gradiometer.columns.tensors import COLUMN_INDEX, NUM_COLUMNS

if TYPE_CHECKING:
    from torch import Tensor

    from gradiometer.columns.schema import Thresholds

# the number of calls comes first: it marks a second row as measured
TAP_NAMES: Final = ("n_calls", "sum4", "n_channels", "n_zero_channels")
TAP_COLUMNS: Final = tuple(ACTIVATION_COLUMNS[ACTIVATION_INDEX[name]] for name in TAP_NAMES)
"""The further columns of an activation: name, merge, scaling and meaning of each."""
NUM_TAP_COLUMNS: Final = len(TAP_COLUMNS)

TAP_STATISTICS: Final = tuple(ACTIVATION_DERIVED)
"""Values that only activations have, see `gradiometer.ActivationStats`."""

# the thresholds of norms are about gradients of parameters
_FLAGS: Final = int(Flag.NAN | Flag.INF | Flag.DEAD)


def from_activations(columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two rows of each activation. ``(T, A) -> (T, C), (T, C) float64``."""
    further = [activation_value(columns, name) for name in TAP_NAMES]
    further += [torch.zeros_like(further[0])] * (NUM_COLUMNS - len(further))
    return tensor_columns(columns), torch.stack(further, dim=1)


def scaled_activations(columns: Tensor, scale: Tensor) -> Tensor:
    """Return the columns of ``scale * x``. ``scale``: 0-d float64, finite and positive."""
    for power in range(1, 5):
        # one power at a time: the fourth alone may leave the range of float64
        scales = [
            scale if _POWERS[c.scaling] >= power else torch.ones_like(scale) for c in ACTIVATION_COLUMNS
        ]
        columns = columns * torch.stack(scales)
    return columns


_POWERS: Final = {"1": 0, "s": 1, "|s|": 1, "s*s": 2, "s*s*s*s": 4}


def tap_flags(columns: Tensor, thresholds: Thresholds) -> Tensor:
    """Return the flags of activations: NAN, INF and DEAD. ``(..., C) -> (...) int32``."""
    return derived.compute_flags(columns, thresholds).bitwise_and(_FLAGS)


def has_tap_value(name: str) -> bool:
    """Return whether only activations have this value."""
    return name in TAP_STATISTICS or name in TAP_NAMES


def tap_value(columns: Tensor, further: Tensor, name: str) -> Tensor:
    """Return a value that only activations have. ``(..., C), (..., 4) -> (...) float64``."""
    parts = [
        further[..., TAP_NAMES.index(c.name)] if c.name in TAP_NAMES else columns[..., COLUMN_INDEX[c.name]]
        for c in ACTIVATION_COLUMNS
    ]
    return activation_value(torch.stack(parts, dim=-1), name)


def activations_from(columns: Tensor, further: Tensor) -> Tensor:
    """Interim: the columns of activations from two rows."""
    parts = [
        further[..., TAP_NAMES.index(c.name)] if c.name in TAP_NAMES else columns[..., COLUMN_INDEX[c.name]]
        for c in ACTIVATION_COLUMNS
    ]
    return torch.stack(parts, dim=-1)
