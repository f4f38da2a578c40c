"""PairStats: the raw columns of named pairs of tensors on the device, and the values derived from them."""

from __future__ import annotations

from dataclasses import dataclass

from gradiometer.columns import PAIRS
from gradiometer.stats.device_values import DeviceValue
from gradiometer.stats.named_stats import NamedStats
from gradiometer.stats.pair_report import PairReport


@dataclass(frozen=True, eq=False, repr=False, init=False)
class PairStats(NamedStats[PairReport]):
    """Statistics of T named pairs of tensors, on their device. Only `materialize` waits for the device.

    A pair is a tensor b and a later one a, such as weights before and after a step, with u = a - b; for
    updates there is also a gradient g. Sums are in fp64, over the elements that are finite in both. PairStats
    is a pytree, so compiled functions can take and return it. Later changes of the tensors do not change it.

    Attributes:
        names: T names, one per row.
        columns: ``(T, P) float64``, the raw columns in the order of ``gm.PAIR_COLUMNS``.
        sharding: as for `TensorStats`.
        origin: ``(T,) float64``, after `reduce`: the first rank, by its index in the group, with a NaN or Inf
            in its part of the pair; -1 if none has; -2 if no rank measured it. None before `reduce`.
        local: after `reduce`: the statistics of this process before it.

    Every raw column and derived value is a property too, ``(T,) float64``:

    >>> import torch, gradiometer as gm
    >>> stats = gm.compare({"w": torch.tensor([3.0, 4.5])}, {"w": torch.tensor([3.0, 4.0])})
    >>> stats.update_ratio, stats.n_unchanged
    (tensor([0.1000], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """

    schema = PAIRS
    _noun = "pair"

    numel = DeviceValue()
    """Elements, ``(T,) float64``."""

    sumsq_a = DeviceValue()
    """Sum of a**2, ``(T,) float64``."""

    sumsq_b = DeviceValue()
    """Sum of b**2, ``(T,) float64``."""

    dot_ab = DeviceValue()
    """Sum of a * b, ``(T,) float64``."""

    sumsq_u = DeviceValue()
    """Sum of u**2, ``(T,) float64``."""

    sum_u = DeviceValue()
    """Sum of u, ``(T,) float64``."""

    n_unchanged = DeviceValue()
    """Elements that have the same bits in a and b, ``(T,) float64``.

    For two dtypes: elements that are the same number, with the same sign if they are 0.
    """

    sumsq_g = DeviceValue()
    """Sum of g**2, ``(T,) float64``; 0 without a gradient."""

    dot_ug = DeviceValue()
    """Sum of u * g, ``(T,) float64``."""

    n_nonzero_g = DeviceValue()
    """Elements whose gradient is not 0, ``(T,) float64``."""

    n_stuck = DeviceValue()
    """Elements that are unchanged although their gradient is not 0, ``(T,) float64``."""

    n_nan = DeviceValue()
    """Elements that are NaN in a or b, ``(T,) float64``."""

    n_posinf = DeviceValue()
    """Elements without NaN that are +Inf in a, or -Inf in b and finite in a, ``(T,) float64``."""

    n_neginf = DeviceValue()
    """Elements without NaN that are -Inf in a, or +Inf in b and finite in a, ``(T,) float64``."""

    n_inf = DeviceValue()
    """``n_posinf + n_neginf``, ``(T,) float64``."""

    n_nonfinite = DeviceValue()
    """``n_nan + n_inf``, elements that are NaN or infinite in a or b, ``(T,) float64``."""

    abs_max_u = DeviceValue()
    """Largest |u|, ``(T,) float64``."""

    norm_a = DeviceValue()
    """L2 norm of a, ``(T,) float64``."""

    norm_b = DeviceValue()
    """L2 norm of b, ``(T,) float64``."""

    norm_u = DeviceValue()
    """L2 norm of u, ``(T,) float64``."""

    norm_g = DeviceValue()
    """L2 norm of g, ``(T,) float64``."""

    rms_u = DeviceValue()
    """Root mean square of u, ``(T,) float64``."""

    update_ratio = DeviceValue()
    """``norm_u / norm_b``, ``(T,) float64``; 0 if nothing changed, inf if only b is 0."""

    cosine = DeviceValue()
    """Cosine of a and b, ``(T,) float64``; NaN if one of them is 0."""

    descent_cosine = DeviceValue()
    """Cosine of u and -g, ``(T,) float64``: 1 for a step of gradient descent; NaN if one of them is 0."""

    unchanged_fraction = DeviceValue()
    """``n_unchanged / numel``, ``(T,) float64``."""

    stuck_fraction = DeviceValue()
    """``n_stuck / n_nonzero_g``, ``(T,) float64``: the share of the updates that rounding has lost."""
