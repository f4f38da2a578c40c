"""One tensor's statistics on the host, as a row of plain Python values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradiometer.columns import Fingerprint, Flag


@dataclass(frozen=True)
class TensorReport:
    """One tensor's statistics. Means, norms and extremes are those of its finite elements.

    Only ``norm`` is as torch defines it: NaN with any NaN, inf with any Inf. ``std`` is the population
    standard deviation. ``fingerprint`` is None unless it was asked for.
    """

    name: str
    numel: int
    norm: float
    finite_norm: float
    rms: float
    mean: float
    std: float
    abs_max: float
    zero_fraction: float
    n_zero: int
    n_nan: int
    n_posinf: int
    n_neginf: int
    n_inf: int
    n_nonfinite: int
    sum: float
    sumsq: float
    flags: Flag
    fingerprint: Fingerprint | None = None
