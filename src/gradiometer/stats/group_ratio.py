"""The ratio of two groups' gradient norms, normalized by their numbers of parameters."""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Any, Final, overload

import torch
from torch import Tensor

from gradiometer.columns import sqrt, take
from gradiometer.inputs import on_device
from gradiometer.stats.tensor_stats import TensorStats

if TYPE_CHECKING:
    from collections.abc import Sequence

# maximum number of names in an error message
_NAMES: Final = 10

Number = float | Tensor


@overload
def group_ratio(
    grouped: TensorStats, numerator: str | Sequence[str], denominator: str, *, floor: float = ...
) -> Tensor: ...


@overload
def group_ratio(
    norm_a: Number, norm_b: Number, /, *, n_a: Number, n_b: Number, floor: float = ...
) -> Tensor: ...


def group_ratio(
    grouped: TensorStats | Number,
    numerator: str | Sequence[str] | Number,
    denominator: str | None = None,
    *,
    n_a: Number | None = None,
    n_b: Number | None = None,
    floor: float = 1e-8,
) -> Tensor:
    """Return ``(norm_a / sqrt(n_a)) / (norm_b / sqrt(n_b))`` of two groups, on their device.

    The ratio of finite norms is always finite: it is 0 if a group has no elements or a norm below ``floor``.
    NaN and Inf propagate as in division.

    ``group_ratio(grouped, "a", "b")`` takes groups by name. ``group_ratio(norm_a, norm_b, n_a=..., n_b=...)``
    takes norms and numbers of elements from anywhere: numbers, or tensors whose shapes broadcast.

    Args:
        grouped: stats with a row per group, as `TensorStats.group` returns them; or the norm of a.
        numerator: the name of a group, or several names for several ratios in one call; or the norm of b.
        denominator: the name of a group; only with stats.
        n_a: the number of elements of a; only with norms.
        n_b: the number of elements of b; only with norms.
        floor: a norm below it counts as 0.

    Returns:
        0-d float64, ``(K,)`` for K names, or the shape that the tensors broadcast to. It is on the first
        tensor's device that is not the CPU, else on the CPU.

    Raises:
        KeyError: if no group has the name.
        ValueError: for a negative floor, norm or number of elements; for NaN, except as a norm. The values of
            tensors are not checked.
        TypeError: for arguments that are neither stats, numbers nor real tensors; for norms without ``n_a``
            and ``n_b``, or stats with them.

    >>> import torch, gradiometer as gm
    >>> stats = gm.collect({"encoder.w": torch.ones(9), "head.w": torch.full((4,), 0.5)})
    >>> gm.group_ratio(stats.group({"encoder": r"^encoder", "head": r"^head"}), "head", "encoder")
    tensor(0.5000, dtype=torch.float64)
    >>> gm.group_ratio(1.0, 3.0, n_a=4, n_b=9)
    tensor(0.5000, dtype=torch.float64)
    """
    # true for NaN too; Dynamo cannot trace math.isnan of a number that changes
    if not isinstance(floor, (int, float)) or not floor >= 0:
        raise ValueError(f"group_ratio: floor must be a non-negative number, got {floor}")
    if isinstance(grouped, TensorStats):
        if n_a is not None or n_b is not None:
            msg = "group_ratio: got n_a or n_b, but the stats hold the numbers of elements; omit n_a and n_b"
            raise TypeError(msg)
        return _of_groups(grouped, numerator, denominator, floor)
    if not isinstance(grouped, (Real, Tensor)):
        msg = "group_ratio: expected the TensorStats that group returns, or two norms as numbers or tensors, "
        raise TypeError(msg + f"got {type(grouped).__name__}")
    if denominator is not None or n_a is None or n_b is None:
        msg = "group_ratio: two norms need their numbers of elements; call "
        raise TypeError(msg + "group_ratio(norm_a, norm_b, n_a=..., n_b=...)")
    given = {"norm_a": grouped, "n_a": n_a, "norm_b": numerator, "n_b": n_b}
    devices = [x.device for x in given.values() if isinstance(x, Tensor)]
    home = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
    return _ratio(*[_as_tensor(name, x, home) for name, x in given.items()], floor=floor)


def _of_groups(grouped: TensorStats, numerator: Any, denominator: Any, floor: float) -> Tensor:
    one = isinstance(numerator, str)
    above = [_row(grouped, name) for name in ([numerator] if one else numerator)]
    below = _row(grouped, denominator)
    norms, sizes = grouped.norm, grouped.numel
    ratios = _ratio(take(norms, above), take(sizes, above), norms[below], sizes[below], floor=floor)
    return ratios[0] if one else ratios


def _ratio(norm_a: Tensor, n_a: Tensor, norm_b: Tensor, n_b: Tensor, *, floor: float) -> Tensor:
    nothing = [(n == 0) | (norm < floor) | (norm == 0) for norm, n in ((norm_a, n_a), (norm_b, n_b))]
    ratio = _rms(norm_a, n_a) / _rms(norm_b, n_b)
    return torch.where((nothing[0] | nothing[1]) & norm_a.isfinite() & norm_b.isfinite(), 0.0, ratio)


def _rms(norm: Tensor, n: Tensor) -> Tensor:
    return norm / sqrt(n.clamp(min=1.0))


def _as_tensor(name: str, x: Any, home: torch.device) -> Tensor:
    if isinstance(x, Tensor):
        if x.is_complex() or x.dtype == torch.bool:
            raise TypeError(f"group_ratio: {name} must be real, got a tensor of dtype {x.dtype}")
        return on_device(x.detach(), home, torch.float64)
    if not isinstance(x, Real):
        raise TypeError(f"group_ratio: {name} must be a number or a tensor, got {type(x).__name__}")
    # a norm may be NaN
    if x < 0 or (x != x and name in {"n_a", "n_b"}):  # noqa: PLR0124
        raise ValueError(f"group_ratio: {name} must be a non-negative number, got {x}")
    # a product, so that a new number does not recompile a compiled step
    return torch.ones((), dtype=torch.float64, device=home) * float(x)


def _row(grouped: TensorStats, name: str) -> int:
    if name not in grouped.names:
        shown = ", ".join(map(repr, grouped.names[:_NAMES])) or "none"
        rest = len(grouped.names) - _NAMES
        more = f" and {rest} more; if these are not groups, call group first" if rest > 0 else ""
        raise KeyError(f"group_ratio: no group {name!r}; available: {shown}{more}")
    return grouped.names.index(name)
