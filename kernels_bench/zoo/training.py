"""A training run as parts that a fault can exchange, and the loop over its steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn


@dataclass
class Training:
    """A model, and what happens to it in each step.

    Attributes:
        model: the model.
        optimizers: its optimizers; one for each loss.
        losses: functions of a batch, which return a loss; called one after the other.
        batch: returns the next batch, a tuple.
        steps: number of steps.
        schedule: the factor of the learning rate in a step.
        accumulate: number of micro-batches in a step.
        clip: maximum norm of the gradients of a step.
        scaler: a GradScaler.
        watched: what to watch, if it is not the model.
        before: functions called at the start of each step.
        after: functions called after each update.
        record_late: whether the gradients are recorded after they are cleared, which is a mistake.
        step: the current step.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    losses: Sequence[Callable[..., Tensor]]
    batch: Callable[[], tuple[Tensor, ...]]
    steps: int = 160
    schedule: Callable[[int], float] = lambda step: 1.0  # noqa: ARG005
    accumulate: int = 1
    clip: float | None = None
    scaler: torch.amp.GradScaler | None = None
    watched: Any = None
    before: list[Callable[[], object]] = field(default_factory=list)
    after: list[Callable[[], object]] = field(default_factory=list)
    record_late: bool = False
    step: int = 0

    def backward(self, loss):
        """Compute the gradients of a loss."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def update(self, optimizer):
        """Update the weights."""
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()

    def clear(self, optimizer):
        """Clear the gradients."""
        optimizer.zero_grad()

    def at(self, step, act):
        """Call ``act`` at the start of a step."""
        self.before.append(lambda: act() if self.step == step else None)

    def run(self, observers):
        """Run all steps; return the losses."""
        rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        losses = []
        for step in range(self.steps):
            self.step = step
            for optimizer, initial in zip(self.optimizers, rates, strict=True):
                for group, lr in zip(optimizer.param_groups, initial, strict=True):
                    group["lr"] = lr * self.schedule(self.step)
            for act in self.before:
                act()
            losses.append(self._step(observers))
        return losses

    def _step(self, observers):
        shown = None
        for loss_of, optimizer in zip(self.losses, self.optimizers, strict=True):
            for _ in range(self.accumulate):
                loss = loss_of(*self.batch())
                self.backward(loss / self.accumulate if self.accumulate > 1 else loss)
            if not self.record_late:
                self._record(observers, loss)
            if self.clip is not None:
                if self.scaler is not None:
                    self.scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.update(optimizer)
            self.clear(optimizer)
            if self.record_late:
                self._record(observers, loss)
            shown = loss if shown is None else shown
        for act in self.after:
            act()
        for observer in observers:
            observer.advance(shown, self.optimizers[0].param_groups[0]["lr"])
        return float(shown.detach())

    def _record(self, observers, loss):
        for observer in observers:
            observer.record(loss)
