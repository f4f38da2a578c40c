"""The numbers that ranks exchange in addition to their steps."""

from __future__ import annotations

from typing import NamedTuple


class RankStatus(NamedTuple):
    """The status of a rank, or the maximum over all ranks.

    A rank is encoded as ``size - rank``, so that the maximum is the first such rank; 0 stands for none.
    """

    fewest: float  # minus the number of waiting steps
    most: float  # the number of waiting steps
    behind: float  # a rank without waiting steps
    leaves: float  # a rank that no longer takes part
    fault: float  # a rank that ends with a fault that the others do not know
    is_closing: float
    is_flooded: float  # more steps wait than the limit
    has_new_scalars: float  # a scalar has no index in the window yet
