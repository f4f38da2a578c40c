"""Memory that a kernel should write has NaN before, so that what it does not write is noticed."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """Fill the kernels' output buffers; integers are filled with the least one."""
    from gradiometer.ops import library, pairs

    empty = torch.empty

    def filled(*args: Any, **options: Any) -> torch.Tensor:
        made = empty(*args, **options)
        return made.fill_(math.nan if made.is_floating_point() else -(2**31))

    def filling(run_kernels: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "empty", filled)
                return run_kernels(*args, **options)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "run_kernels", filling(library.run_kernels))
        patch.setattr(pairs, "_run_kernels", filling(pairs._run_kernels))
        yield
