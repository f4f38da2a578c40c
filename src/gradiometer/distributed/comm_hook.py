"""Read the gradients of this rank in DDP's backward, before they are averaged over the ranks."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable


def register_bucket_hook(
    model: nn.Module, measure: Callable[[Any], None], state: Any, hook: Callable[..., Any] | None
) -> None:
    """Register a hook that calls ``measure`` with each bucket, and then ``hook``; None: DDP's all-reduce."""
    # torch.compile wraps the model
    ddp = getattr(model, "_orig_mod", model)
    if not isinstance(ddp, nn.parallel.DistributedDataParallel):
        msg = f"register_comm_hook: expected a DistributedDataParallel model, got {type(ddp).__name__}; with "
        msg += "FSDP2, no rank has the gradient of its own examples: accumulate over micro-batches instead"
        raise TypeError(msg)
    if hook is None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: PLC0415 its import is slow

        hook, state = default_hooks.allreduce_hook, ddp.process_group
    wrapped = hook

    # DDP checks the signature: that of the wrapped function
    @functools.wraps(wrapped)
    def measured(state: Any, bucket: Any) -> Any:
        measure(bucket)
        return wrapped(state, bucket)

    ddp.register_comm_hook(state, measured)
