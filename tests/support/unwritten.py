"""Memory that a kernel should write has NaN before, so that what it does not write is noticed."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """Fill the kernels' output buffers; integers are filled with the least one."""
    from gradiometer.ops import dispatch

    empty, launching_on = torch.empty, dispatch.launching_on

    def filled(*args: Any, **options: Any) -> torch.Tensor:
        made = empty(*args, **options)
        return made.fill_(math.nan if made.is_floating_point() else -(2**31))

    @contextmanager
    def launching(device: torch.device) -> Iterator[None]:
        with launching_on(device), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", filled)
            yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "launching_on", launching)
        yield
