"""Count the backward passes that write a gradient, and notice what changes it afterwards."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor


def _nothing() -> None:
    return None


@dataclass(eq=False, slots=True)
class _Seen:
    """What is known of a parameter's gradient: who wrote it last, and when.

    ``passes``: backward passes so far, of which ``used`` came before the last step of the optimizer.
    ``task``: the backward pass in which the gradient is noted at the end. ``grad``, ``version`` and
    ``weight``: the gradient then, its version and that of the parameter. ``lost``: passes since the last step
    whose gradients were cleared before the next one; ``is_sure``: whether nothing else happened between
    passes. ``is_stale``: whether the gradient contains one that an earlier step has used. ``is_left``:
    whether there was a gradient at the end of the last pass.
    """

    parameter: Tensor
    passes: int = 0
    used: int = 0
    task: int = -1
    # not a reference, which would keep its memory
    grad: Callable[[], object] = _nothing
    version: int = 0
    weight: int = 0
    lost: int = 0
    is_sure: bool = True
    is_stale: bool = False
    is_left: bool = False

    def end_pass(self) -> None:
        self.note()
        self.is_left = self.grad is not _nothing

    def note(self) -> None:
        grad = self.parameter.grad
        self.weight = self.parameter._version  # noqa: SLF001
        if grad is None:
            self.grad, self.version = _nothing, 0
        else:
            self.grad, self.version = weakref.ref(grad), grad._version  # noqa: SLF001

    def compare(self) -> None:
        """Find out what happened to the gradient before the backward pass that has just added to it."""
        grad, is_first = self.parameter.grad, self.passes == self.used + 1
        # neither a gradient with a graph nor a sparse one is always added to in place
        if grad is None or grad.requires_grad or grad.layout != torch.strided:
            self.is_sure = self.is_stale = False
            return
        version = grad._version  # noqa: SLF001
        if self.grad() is grad:
            # added to as it was, or written once before that: zeroed, if all is well
            is_kept, is_cleared = version == self.version + 1, version == self.version + 2
        else:
            # one that the backward pass has created; what the loop has assigned was written since
            is_kept, is_cleared = False, version == 0
        if is_first:
            # without an earlier pass, nothing is known of what was there
            self.is_stale = is_kept and self.passes > 1
            return
        self.is_stale = self.is_stale and is_kept
        self.lost += is_cleared
        # as SAM does, which wants the second gradient alone
        is_moved = self.parameter._version != self.weight  # noqa: SLF001
        if is_moved or not (is_kept or is_cleared):
            self.is_sure = False


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

    def since_step(self, parameter: Tensor) -> int:
        """Return how many backward passes wrote it since the last step; 0 if that is not known."""
        seen = self._seen.get(parameter)
        return 0 if seen is None or _task() >= 0 else seen.passes - seen.used

    def lost(self, parameter: Tensor) -> int:
        """Return how many of those since the last step were cleared before the next one; 0 if not known."""
        seen = self._seen[parameter]
        return seen.lost if seen.is_sure else 0

    def is_stale(self, parameter: Tensor) -> bool:
        """Return whether the gradient contains one that an earlier step has used."""
        return self._seen[parameter].is_stale

    def was_cleared(self, parameter: Tensor) -> bool:
        """Return whether the gradient is gone that the last backward pass left at its end."""
        return parameter.grad is None and self._seen[parameter].is_left

    def has_changed(self, parameter: Tensor, writes: int = 0) -> bool:
        """Return whether a gradient was written or replaced since its last backward pass, or `note`.

        ``writes``: in-place writes that are expected. False if that is not known, during a backward pass,
        and without one since the last step.
        """
        seen, grad = self._seen.get(parameter), parameter.grad
        if seen is None or seen.passes == seen.used or grad is None or _task() >= 0:
            return False
        return seen.grad() is not grad or grad._version not in {seen.version, seen.version + writes}  # noqa: SLF001

    def doubt(self, parameters: Iterable[Tensor]) -> None:
        """Take nothing for sure of what happened between the passes of this step."""
        for parameter in parameters:
            self._seen[parameter].is_sure = False

    def note(self, counted: Iterable[Tensor]) -> None:
        """Take the gradients of these parameters as they are now."""
        for parameter in counted:
            self._seen[parameter].note()

    def end(self, counted: Iterable[Tensor]) -> None:
        """Forget what an optimizer has used."""
        used = list(counted)
        for parameter in used:
            seen = self._seen[parameter]
            seen.used, seen.lost, seen.is_sure = seen.passes, 0, True
            seen.note()
        mine = set(map(id, used))
        for parameter, seen in self._seen.items():
            if id(parameter) not in mine:
                # the passes before it may have been for this optimizer
                seen.is_sure = seen.passes == seen.used

    def _after_accumulation(self, parameter: Tensor) -> None:
        seen = self._seen.get(parameter)
        if seen is None or torch.compiler.is_compiling():
            return
        seen.passes += 1
        seen.compare()
        # a pass that raises an error never comes to its end
        if seen.task != _task():
            seen.task = _task()
            # at the end of the backward pass, and after the callback of DistributedDataParallel, which may
            # write the gradient and is queued by then
            queue = Variable._execution_engine.queue_callback  # noqa: SLF001
            queue(lambda: queue(seen.end_pass))


def _task() -> int:
    """Return the number of the backward pass that runs in this thread; -1 without one."""
    return torch._C._current_graph_task_id()  # noqa: SLF001
