"""Learning-rate schedules, as factors of the learning rate by step, and an optimizer that torch lacks."""

from __future__ import annotations

import math

import torch


def warm_up(steps, then=lambda step: 1.0):  # noqa: ARG005
    """From 0, linearly, and then another schedule."""
    return lambda step: step / steps if step < steps else then(step)


def cosine(steps, *, start=0, least=0.0):
    """From 1 to ``least`` at the last step."""
    return lambda step: least + (1 - least) * (1 + math.cos(math.pi * (step - start) / (steps - start))) / 2


def linear(steps):
    """From 1 to exactly 0 at the last step."""
    return lambda step: 1 - step / (steps - 1)


def stairs(*edges, factor=0.1):
    """Multiplied by ``factor`` at each edge."""
    return lambda step: factor ** sum(step >= edge for edge in edges)


def restarts(period, *, least=0.01):
    """A cosine that starts again after each period."""
    return lambda step: cosine(period, least=least)(step % period)


class Lion(torch.optim.Optimizer):
    """Sign updates (arXiv:2302.06675)."""

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            (fast, slow), lr = group["betas"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(momentum.lerp(p.grad, 1 - fast).sign_(), alpha=-lr)
                momentum.lerp_(p.grad, 1 - slow)
