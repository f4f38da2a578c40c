"""Run checkpoints with an ordinary graph: `torch.autograd.grad` does not work through reentrant ones."""

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


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Keep activations instead of recomputing them, in checkpoints of both kinds."""
    module: Any = torch.utils.checkpoint
    # the name has changed with torch 2.14; `checkpoint` looks it up at each call
    names = ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")
    before = {name: getattr(module, name) for name in names if hasattr(module, name)}
    with plain_checkpoints():
        for name in before:
            setattr(module, name, _nothing)
        try:
            yield
        finally:
            for name, generator in before.items():
                setattr(module, name, generator)


def _nothing(*_: Any, **__: Any) -> Iterator[None]:
    """Do nothing before and after the function of a checkpoint, which calls it in between."""
    yield
