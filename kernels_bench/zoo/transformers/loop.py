"""A plain training loop, each part of which a fault can exchange, and a run of it that may be resumed."""

from __future__ import annotations

import contextlib
import copy
import warnings

import torch
from torch import nn
from torch.nn import functional


class Loop:
    """A model, and how it is trained. A fault replaces methods and attributes of an instance.

    Args:
        model: the model.
        optimizer: its optimizer.
        task: two functions, which draw a batch and return the batch for evaluation.
        steps: number of steps.
        schedule: the factor of the learning rate by step.
        accumulate: number of micro-batches in a step.
        clip: maximum norm of the gradients of a step.
        scaler: a GradScaler.
        autocast: the dtype of the forward pass; float32 by default.
        resume: the step before which the run is saved, ended and started anew.
        smoothing: label smoothing.
    """

    def __init__(
        self,
        model,
        optimizer,
        task,
        *,
        steps=150,
        schedule=lambda step: 1.0,  # noqa: ARG005
        accumulate=1,
        clip=None,
        scaler=None,
        autocast=None,
        resume=None,
        smoothing=0.0,
    ):
        self.model, self.optimizer, self.steps, self.accumulate = model, optimizer, steps, accumulate
        self.batch, held = task
        self.held = held()
        self.schedule = schedule
        self.scheduler = self.scheduled(optimizer)
        self.clip, self.scaler, self.autocast, self.resume = clip, scaler, autocast, resume
        self.smoothing = smoothing
        self.before, self.after = [], []
        self.step, self.monitor = 0, None

    def scheduled(self, optimizer):
        """Return a scheduler of an optimizer by the schedule, which may be replaced later."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.schedule(step))  # noqa: PLW0108

    # the parts of a step

    def train_step(self):
        """Train one step; return the loss."""
        for _ in range(self.accumulate):
            loss = self.loss(self.batch())
            self.backward(loss / self.accumulate)
        self.note(loss)
        self.clip_gradients()
        self.update()
        self.clear()
        self.advance_schedule()
        return loss

    def loss(self, batch):
        """Return the loss of a batch."""
        labels = batch["labels"]
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        with self.casting():
            logits = self.model(**inputs)
        return self.criterion(logits.float().flatten(0, -2), labels.flatten())

    def casting(self):
        """Return the context of the forward pass."""
        return torch.autocast("cpu", self.autocast) if self.autocast else contextlib.nullcontext()

    def criterion(self, logits, labels):
        """Return the loss of ``(tokens, classes)`` logits."""
        return functional.cross_entropy(logits, labels, label_smoothing=self.smoothing)

    def backward(self, loss):
        """Compute the gradients."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def note(self, loss):
        """Tell the monitor the loss."""
        if self.monitor is not None:
            self.monitor.note(loss=loss)

    def clip_gradients(self):
        """Clip the gradients, unscaled."""
        if self.clip is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)

    def update(self):
        """Update the weights."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def clear(self):
        """Clear the gradients."""
        self.optimizer.zero_grad()

    def advance_schedule(self):
        """Set the learning rate of the next step."""
        self.scheduler.step()

    # around the steps

    def at(self, step, act):
        """Call ``act`` at the start of a step."""
        self.before.append(lambda: act() if self.step == step else None)

    def save(self):
        """Return the checkpoint."""
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        if self.scaler is not None:
            parts["scaler"] = self.scaler
        state = {name: part.state_dict() for name, part in parts.items()}
        return copy.deepcopy(state) | {"rng": torch.get_rng_state()}

    def load(self, state):
        """Continue from a checkpoint."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["rng"])

    def evaluate(self):
        """Return the loss of data that is always the same and correct, in evaluation mode."""
        was_training = self.model.training
        self.model.eval()
        labels = self.held["labels"]
        inputs = {name: value for name, value in self.held.items() if name != "labels"}
        with torch.no_grad():
            loss = functional.cross_entropy(
                self.model(**inputs).float().flatten(0, -2), labels.flatten()
            ).item()
        self.model.train(was_training)
        return loss


def train(make, watch=None, *, steps=None):
    """Train; return the loop, the losses and the monitor that watched the end, if any.

    Args:
        make: returns a new `Loop`, always the same, for the start and a resumed run.
        watch: returns a monitor of a loop.
        steps: at most this number of steps.
    """
    with warnings.catch_warnings():
        # torch's own hint at schedulers, and zeros of a learning rate, would end a test
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step", category=UserWarning)
        return _train(make, watch, steps)


def _train(make, watch, steps):
    loop = make()
    loop.monitor = monitor = watch(loop) if watch else None
    losses = []
    for step in range(loop.steps if steps is None else min(steps, loop.steps)):
        if step == loop.resume:
            checkpoint = loop.save()
            seen = monitor.state_dict() if monitor else None
            if monitor:
                monitor.close()
            loop = make()
            loop.load(checkpoint)
            if watch:
                monitor = watch(loop)
                monitor.load_state_dict(seen)
            loop.monitor = monitor
        loop.step = step
        for act in loop.before:
            act()
        losses.append(float(loop.train_step().detach()))
        for act in loop.after:
            act()
        if monitor:
            # so that each step's findings come alone
            monitor.flush()
    return loop, losses, monitor
