"""Inputs whose statistics are the same in any order of additions, and the ways to measure them."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from conftest import INTERPRETED
from gradiometer.columns import DEFAULT_THRESHOLDS, Thresholds
from gradiometer.kernels import tuning
from gradiometer.ops import dispatch, launch_plans
from gradiometer.ops import tensors as tensor_ops
from kernels_bench.machine_code.compile import launching_for
from support.unwritten import unwritten_is_nan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

SPECIAL = (math.nan, math.inf, -math.inf)


@contextmanager
def kernels(target: str, change: Callable[[str, str], str] | None = None) -> Iterator[Any]:
    """Measure on the kernels of a target; return its last launches, if they are executed."""
    launch_plans.clear()
    if INTERPRETED:
        with launching_for(target):
            yield None
    else:
        from support import ptx

        with unwritten_is_nan(), ptx.executed_kernels(target, *([change] if change else [])) as launches:
            yield launches
    launch_plans.clear()


def tensor_stats(
    tensors: Sequence[Tensor], thresholds: Thresholds = DEFAULT_THRESHOLDS, inv_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return tensor_ops.tensor_stats(list(tensors), thresholds, inv_scale)


def in_eager(*args: Any) -> tuple[Tensor, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "uses_kernels", lambda _: False)
        return tensor_stats(*args)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.int64), b.view(torch.int64))


def integers(n: int, dtype: torch.dtype, start: int = 0) -> Tensor:
    """Return small integers, a fifth of them 0; ``start`` elements past an aligned address."""
    g = torch.Generator().manual_seed(n)
    values = torch.randint(-2, 3, (n + start,), generator=g)
    return values.to(dtype)[start:]


def each_level(dtype: torch.dtype, value: float) -> list[Tensor]:
    """Return zeros with one value, which one level of a reduction over lanes has to pass on."""
    tile = tuning.MOMENTS[dtype].tile
    tensors = [torch.zeros(tile, dtype=dtype) for _ in range(tile.bit_length() - 1)]
    for k, x in enumerate(tensors):
        x[2**k] = value
    return tensors
