"""Norms of every order, from the columns if they hold them, else from the tensors in fp64."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from gradiometer.columns import TENSORS, sqrt
from gradiometer.inputs import Named, is_plain_subclass, local_shards

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradiometer.distributed import Ranks

# number of elements converted to fp64 at a time, for orders that the columns do not hold
_PIECE: Final = 2**20


class Norms(NamedTuple):
    """The norm as torch defines it, and that of the finite elements; 0-d float64, on one device."""

    norm: Tensor
    finite: Tensor


def order_of(norm_type: float | str, what: str) -> float:
    """Return the order of a norm; raise ValueError for NaN, or if it is not a number."""
    try:
        order = float(norm_type)
    except (TypeError, ValueError):
        order = math.nan
    if order != order:  # noqa: PLR0124 NaN; Dynamo cannot trace math.isnan
        msg = f"{what}: norm_type must be the order of a norm, such as 2 or 'inf', got {norm_type!r}"
        raise ValueError(msg)
    return order


@torch.no_grad()
def finite_norm(named: Named, order: float, ranks: Ranks | None, home: torch.device) -> Tensor | None:
    """Return the norm of the finite elements that this rank counts; None if the columns hold it.

    It is 0-d float64 on ``home``. Without elements it is the identity: 0, or inf for a negative order.
    No power leaves the range of fp64. The tensors are read once more, one piece in fp64 at a time.
    """
    if order in {0.0, 2.0}:
        return None
    # a complex element is measured as two real ones, but the largest magnitude is that of the whole element
    if order == math.inf and not _any_complex(named, ranks):
        return None
    nothing = 0.0 if order > 0 else math.inf
    norms = []
    for tensor in _counted(named, ranks):
        if tensor.numel() > 0:
            pieces = [_norm_in_range(torch.where(x.isfinite(), x, nothing), order) for x in _wide(tensor)]
            norms.append(_norm_in_range(torch.stack(pieces), order).to(home, non_blocking=True))
    if not norms:
        # filled on the device, so nothing is copied to it
        return torch.full((), nothing, dtype=torch.float64, device=home)
    return _norm_in_range(torch.stack(norms), order)


def norms_of(
    columns: Tensor, order: float, finite: Tensor | None = None, ranks: Ranks | None = None
) -> Norms:
    """Return both norms of all tensors together: torch's norm of the tensors' norms.

    ``columns``: ``(T, C) float64``, merged over the ranks; ``finite``: the result of `finite_norm` here.
    """
    if order == 0.0:
        filled = TENSORS.value(columns, "numel") - TENSORS.value(columns, "n_zero")
        finite = filled - TENSORS.value(columns, "n_nonfinite")
        return Norms(*((x > 0).sum(dtype=torch.float64) for x in (filled, finite)))
    total = TENSORS.merge_rows(columns)
    if finite is not None:
        norm = finite if ranks is None else ranks.norm_of(finite, order)
        if order < 0:
            norm = torch.where(TENSORS.value(total, "numel") > 0, norm, 0.0)
        return Norms(_as_torch_says(total, norm, order), norm)
    top = TENSORS.value(total, "abs_max")
    if order == math.inf:
        return Norms(_as_torch_says(total, top, order), top)
    norm = TENSORS.value(total, "finite_norm")
    # squares overflow fp64 beyond 1e154; this bound is not less than the norm
    bound = top * sqrt(TENSORS.value(total, "numel"))
    return Norms(_as_torch_says(total, norm, order), torch.where(norm < math.inf, norm, bound))


def _as_torch_says(total: Tensor, norm: Tensor, order: float) -> Tensor:
    """Return torch's norm of all elements, given the norm of the finite ones."""
    if order > 0:
        # with a negative order Inf adds nothing
        norm = norm + torch.where(TENSORS.value(total, "n_inf") > 0, math.inf, 0.0)
    return norm + torch.where(TENSORS.value(total, "n_nan") > 0, math.nan, 0.0)


def _any_complex(named: Named, ranks: Ranks | None) -> bool:
    """Return whether any tensor is complex, on any of the ranks if they are given."""
    if ranks is None:
        return any([x.is_complex() for x in named.tensors])
    return any([spec.dtype.startswith("complex") for spec in ranks.plan.specs])


def _counted(named: Named, ranks: Ranks | None) -> list[Tensor]:
    """Return the tensors that this rank counts, DTensors as local shards; only one copy counts."""
    names, tensors = local_shards(named, "norm")
    if ranks is None:
        return tensors
    return [x for name, x in zip(names, tensors, strict=True) if name in ranks.counted]


def _norm_in_range(x: Tensor, order: float) -> Tensor:
    """Return torch's norm, computed so that no power leaves the range of fp64, as 1e35 to the tenth would."""
    if math.inf in {order, -order}:
        return vector_norm(x, order)  # type: ignore[no-any-return]
    # in units of the element that dominates
    size = x.abs()
    unit = size.amax() if order > 0.0 else size.amin()
    unit = torch.where((unit > 0.0) & (unit < math.inf), unit, 1.0)
    return vector_norm(size / unit, order) * unit  # type: ignore[no-any-return]


def _wide(tensor: Tensor) -> Iterator[Tensor]:
    x = tensor.as_subclass(Tensor) if is_plain_subclass(type(tensor)) else tensor
    if x.layout == torch.sparse_coo:
        values = x.coalesce().values()
        # one zero for all zeros that are not stored
        zeros = values.new_zeros(1 if values.numel() < x.numel() else 0)
        x = torch.cat([values.reshape(-1), zeros])
    for piece in x.reshape(-1).split(_PIECE):
        yield piece.to(torch.complex128 if piece.is_complex() else torch.float64)
