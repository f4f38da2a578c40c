"""Run reentrant checkpoints with an ordinary graph: `torch.autograd.grad` does not work through them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _Plain:
    """In place of torch's CheckpointFunction: the same gradients, without recomputation."""

    @staticmethod
    def apply(run: Callable[..., Any], preserve: bool, *args: Any) -> Any:  # noqa: FBT001 torch's arguments
        del preserve
        # without an input that requires a gradient, a reentrant checkpoint gives no parameter a gradient
        needed = any(isinstance(x, Tensor) and x.requires_grad for x in args)
        with torch.set_grad_enabled(needed and torch.is_grad_enabled()):
            return run(*args)


@contextmanager
def plain_checkpoints() -> Iterator[None]:
    """Replace reentrant checkpoints by calls with the graph that their backward would have."""
    module: Any = torch.utils.checkpoint
    before = module.CheckpointFunction
    module.CheckpointFunction = _Plain
    try:
        yield
    finally:
        module.CheckpointFunction = before
