"""Faults of training loops: losses, micro-batches and scales."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from kernels_bench.zoo.gradients.case import Case, adder, step_of
from kernels_bench.zoo.gradients.faults import linear

FAULTS = {}
fault = adder(FAULTS)
IGNORED = -100


def net(*, bias=False):
    """Return a classifier of three layers."""
    layers = [nn.Linear(8, 16, bias=bias), nn.Tanh(), nn.Linear(16, 16, bias=bias), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(16, 5, bias=bias))


def batch(rows):
    """Return inputs and labels."""
    return torch.randn(rows, 8), torch.randint(0, 5, (rows,))


# --- micro-batches ---


def accumulated(model, size, divide):
    """Return a step over micro-batches of ``size``, which returns the mean loss of all rows.

    Its gradients are those of the sum of ``divide(loss, rows, all rows)``.
    """

    def step(x, y):
        total = torch.zeros(())
        for inputs, labels in zip(x.split(size), y.split(size), strict=True):
            loss = functional.cross_entropy(model(inputs), labels)
            divide(loss, len(inputs), len(x)).backward()
            total += loss.detach() * len(inputs) / len(x)
        return total

    return step


@fault("4.weight", "factor", factor=4.0)
def micro_batches_are_not_averaged():
    model = net()
    step = accumulated(model, 4, lambda loss, _, __: loss)
    return Case(step, batch(16), model, step_of(model, functional.cross_entropy))


@fault("4.weight", "other")
def last_micro_batch_counts_like_a_full_one():
    model = net()
    step = accumulated(model, 4, lambda loss, _, __: loss / 3)
    return Case(step, batch(10), model, step_of(model, functional.cross_entropy))


class AddsAgain(torch.autograd.Function):
    """A linear layer with fused accumulation, whose backward also returns what is accumulated already."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        own = grad.T @ x
        if ctx.weight.grad is not None:
            own = own + ctx.weight.grad
        return grad @ weight, own


class Fused(nn.Module):
    """A classifier whose middle layer is called by a function that is given."""

    def __init__(self):
        super().__init__()
        self.stem, self.fc, self.head = linear(8, 16), linear(16, 16), linear(16, 5)

    def forward(self, x, call=None):
        hidden = torch.tanh(self.stem(x))
        return self.head(torch.tanh((call or AddsAgain.apply)(hidden, self.fc.weight)))


@fault("fc.weight", "other")
def gradient_doubles_with_each_micro_batch():
    model = Fused()
    step = accumulated(model, 4, lambda loss, rows, all_rows: loss * rows / all_rows)

    def plain(x):
        return model(x, functional.linear)

    return Case(step, batch(16), model, step_of(model, functional.cross_entropy, forward=plain))


# --- losses ---


class FusedLoss(torch.autograd.Function):
    """A fused linear layer and cross-entropy: the gradient is computed with the loss.

    ``masked`` and ``mean``: whether it has regard to ignored rows, and divides by the number of the others.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, masked, mean):
        logits = hidden @ weight.T
        kept = labels != IGNORED
        grad = logits.softmax(-1) - functional.one_hot(labels.clamp(min=0), weight.shape[0])
        if masked:
            grad = grad * kept[:, None]
        if mean:
            grad = grad / kept.sum()
        ctx.save_for_backward(grad @ weight, grad.T @ hidden)
        return functional.cross_entropy(logits, labels, ignore_index=IGNORED)

    @staticmethod
    def backward(ctx, grad):
        for_hidden, for_weight = ctx.saved_tensors
        return grad * for_hidden, grad * for_weight, None, None, None


class WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = linear(8, 16), linear(16, 5)

    def forward(self, x, labels, fused):
        return fused(torch.tanh(self.stem(x)), self.head.weight, labels)


def fused_loss(*, masked, mean):
    """Return the case of a fused loss, against the two plain functions; 3 of 11 rows are ignored."""
    model = WithLoss()

    def step(x, y):
        loss = model(x, y, lambda *args: FusedLoss.apply(*args, masked, mean))
        loss.backward()
        return loss

    def reference(x, y):
        loss = model(
            x, y, lambda h, weight, y: functional.cross_entropy(h @ weight.T, y, ignore_index=IGNORED)
        )
        loss.backward()
        return loss

    x, y = batch(11)
    y[torch.randperm(11)[:3]] = IGNORED
    return Case(step, (x, y), model, reference)


@fault("head.weight", "other")
def fused_loss_counts_ignored_rows():
    return fused_loss(masked=False, mean=True)


@fault("head.weight", "factor", factor=8.0)
def fused_loss_is_not_a_mean():
    return fused_loss(masked=True, mean=False)


# --- scales ---


@fault("2.bias", "factor", factor=1024.0)
def loss_scale_is_not_taken_from_all():
    # the scaled gradients of matrices are divided; the head's bias has a group of its own, which is, too
    model = net(bias=True)
    hooked = [model[0].weight, model[2].weight, model[4].weight, model[4].bias]

    def step(x, y):
        loss = functional.cross_entropy(model(x), y)
        (loss * 1024).backward()
        for p in hooked:
            p.grad /= 1024
        return loss

    return Case(step, batch(12), model, step_of(model, functional.cross_entropy))


@fault("2.weight", "factor", factor=0.5)
def hook_halves_a_gradient():
    # a hook that is meant to average over two ranks runs in a single process
    model = net()
    step_plain = step_of(model, functional.cross_entropy)

    def step(x, y):
        handle = model[2].weight.register_hook(lambda grad: grad / 2)
        try:
            return step_plain(x, y)
        finally:
            handle.remove()

    return Case(step, batch(12), model, step_plain)
