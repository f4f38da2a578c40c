"""Count the backward passes that write a gradient, and notice what changes it afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor


@dataclass(eq=False, slots=True)
class _Seen:
    """What is known of a parameter's gradient: who wrote it last, and when."""

    parameter: Tensor
    passes: int = 0
    # those before the last step of the optimizer
    used: int = 0
    # the backward pass in which it is noted at the end
    task: int = -1
    grad: int = 0
    version: int = 0

    def note(self) -> None:
        grad = self.parameter.grad
        self.grad, self.version = id(grad), 0 if grad is None else grad._version  # noqa: SLF001


class BackwardPasses:
    """Counts the backward passes that write the gradients of a few parameters, by hooks on the host.

    A hook does not run in a backward pass that was traced: then the count is 0, and nothing is known.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._seen = {p: _Seen(p) for p in parameters}
        hooks = [p.register_post_accumulate_grad_hook(self._after_accumulation) for p in self._seen]
        self._remove: list[Callable[[], None]] = [hook.remove for hook in hooks]

    def remove(self) -> None:
        """Remove the hooks."""
        while self._remove:
            self._remove.pop()()
        self._seen.clear()

    def counted(self) -> list[Tensor]:
        """Return the parameters whose backward passes are counted, and of which one was seen."""
        return [p for p, seen in self._seen.items() if seen.passes]

    def count(self, parameter: Tensor) -> int:
        """Return how many backward passes wrote this gradient; 0 if that is not known."""
        seen = self._seen.get(parameter)
        return 0 if seen is None else seen.passes

    def has_changed(self, parameter: Tensor, writes: int = 0) -> bool:
        """Return whether a gradient was written or replaced since its last backward pass, or `note`.

        ``writes``: in-place writes that are expected. False if that is not known, during a backward pass,
        and without one since the last step.
        """
        seen, grad = self._seen.get(parameter), parameter.grad
        if seen is None or seen.passes == seen.used or grad is None or _task() >= 0:
            return False
        return id(grad) != seen.grad or grad._version not in {seen.version, seen.version + writes}  # noqa: SLF001

    def note(self, counted: Iterable[Tensor]) -> None:
        """Take the gradients of these parameters as they are now."""
        for parameter in counted:
            self._seen[parameter].note()

    def end(self, counted: Iterable[Tensor]) -> None:
        """Forget what an optimizer has used."""
        for parameter in counted:
            seen = self._seen[parameter]
            seen.used = seen.passes

    def _after_accumulation(self, parameter: Tensor) -> None:
        seen = self._seen.get(parameter)
        if seen is None or torch.compiler.is_compiling():
            return
        seen.passes += 1
        # a pass that raises an error never comes to its end
        if seen.task != _task():
            seen.task = _task()
            # at the end of the backward pass, and after the callback of DistributedDataParallel, which may
            # write the gradient and is queued by then
            queue = Variable._execution_engine.queue_callback  # noqa: SLF001
            queue(lambda: queue(seen.note))


def _task() -> int:
    """Return the number of the backward pass that runs in this thread; -1 without one."""
    return torch._C._current_graph_task_id()  # noqa: SLF001
