"""The columns of updates in a recorded step: those of every kind, and further ones that only pairs have.

An update is the pair of a weight before and after a step, see `gradiometer.columns.pairs`. Its row of kind
``updates`` has the columns of ``u``, like a tensor; a second row has the further columns, which all merge by
sum.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from gradiometer.columns.pairs import NUM_PAIR_COLUMNS, PAIR_COLUMNS, PAIR_INDEX, pair_value
from gradiometer.columns.tensors import COLUMN_INDEX, NUM_COLUMNS

UPDATE_NAMES: Final = ("sumsq_b", "sumsq_g", "dot_ug", "n_nonzero_g", "n_stuck", "sumsq_a")
UPDATE_COLUMNS: Final = tuple(PAIR_COLUMNS[PAIR_INDEX[name]] for name in UPDATE_NAMES)
"""The further columns of an update: name, merge, scaling and meaning of each."""
NUM_UPDATE_COLUMNS: Final = len(UPDATE_COLUMNS)

UPDATE_STATISTICS: Final = ("update_ratio", "descent_cosine", "unchanged_fraction", "stuck_fraction")
"""Values that only updates have, see `gradiometer.PairStats`."""

# column of a pair -> column of a tensor in which its value is recorded
_OF_TENSOR: Final = {
    "numel": "numel",
    "sumsq_u": "sumsq",
    "sum_u": "sum",
    "n_unchanged": "n_zero",
    "n_nan": "n_nan",
    "n_posinf": "n_posinf",
    "n_neginf": "n_neginf",
    "abs_max_u": "abs_max",
}


def from_pairs(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two rows of each update. ``(T, P) -> (T, C), (T, C) float64``.

    The second one has the number of elements, the further columns, and zeros.
    """
    nothing = torch.zeros_like(pairs[:, 0])
    of_tensor = {place: pair_value(pairs, name) for name, place in _OF_TENSOR.items()}
    first = [of_tensor.get(name, nothing) for name in COLUMN_INDEX]
    second = [pair_value(pairs, name) for name in ("numel", *UPDATE_NAMES)]
    second += [nothing] * (NUM_COLUMNS - len(second))
    return torch.stack(first, dim=1), torch.stack(second, dim=1)


def has_update_value(name: str) -> bool:
    """Return whether only updates have this value, and it can be derived from their columns."""
    return name in UPDATE_STATISTICS or name in UPDATE_NAMES


def update_value(columns: Tensor, further: Tensor, name: str) -> Tensor:
    """Return a value that only updates have. ``(..., C), (..., 6) -> (...) float64``.

    NaN where the further columns that it needs are NaN.
    """
    # the product of a and b is not recorded
    pairs = further.new_full((*further.shape[:-1], NUM_PAIR_COLUMNS), torch.nan)
    for pair, of_tensor in _OF_TENSOR.items():
        pairs[..., PAIR_INDEX[pair]] = columns[..., COLUMN_INDEX[of_tensor]]
    for i, pair in enumerate(UPDATE_NAMES):
        pairs[..., PAIR_INDEX[pair]] = further[..., i]
    return pair_value(pairs, name)


def pairs_from(columns: Tensor, further: Tensor) -> Tensor:
    """Interim: the columns of pairs from two rows."""
    pairs = further.new_full((*further.shape[:-1], NUM_PAIR_COLUMNS), torch.nan)
    for pair, of_tensor in _OF_TENSOR.items():
        pairs[..., PAIR_INDEX[pair]] = columns[..., COLUMN_INDEX[of_tensor]]
    for i, pair in enumerate(UPDATE_NAMES):
        pairs[..., PAIR_INDEX[pair]] = further[..., i]
    return pairs
