"""Faults of compiled and recomputed steps."""

from __future__ import annotations

import functools

import torch
import torch._functorch.config
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kernels_bench.zoo.gradients.case import Case, adder, step_of
from kernels_bench.zoo.gradients.faults import Net, linear
from kernels_bench.zoo.gradients.faults_loop import batch

FAULTS = {}
fault = adder(FAULTS)


# --- compiled against eager ---


class SquaredRelu(torch.autograd.Function):
    """relu(x)**2; the backward forgets the factor 2."""

    @staticmethod
    def forward(ctx, x):
        positive = x.relu()
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    def backward(ctx, grad):
        (positive,) = ctx.saved_tensors
        return grad * positive


def squared_relu(x):
    """Return relu(x)**2; the fused function only where it pays."""
    if torch.compiler.is_compiling():
        return SquaredRelu.apply(x)
    return x.relu().square()


@fault("stem.weight", "factor", factor=0.5)
def function_for_the_compiled_path_is_wrong():
    model = Net(squared_relu)
    step = step_of(model, functional.cross_entropy, forward=torch.compile(model, backend="aot_eager"))
    return Case(step, batch(12), model)


class Gate(torch.autograd.Function):
    """x * scale with a parameter for each feature; the backward sums over the wrong half of the batch."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        return grad * scale, (grad * x)[: len(x) // 2].sum(0)


class Scaled(nn.Module):
    """A classifier whose features have a scale."""

    def __init__(self):
        super().__init__()
        self.stem, self.head, self.scale = linear(8, 16), linear(16, 5), nn.Parameter(torch.rand(16) + 0.5)

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        return self.head(Gate.apply(x, self.scale) if torch.compiler.is_compiling() else x * self.scale)


@fault("scale", "other")
def kernel_sums_over_half_of_the_batch():
    model = Scaled()
    step = step_of(model, functional.cross_entropy, forward=torch.compile(model))
    return Case(step, batch(12), model)


# --- recomputed against plain ---


class Block(nn.Module):
    """Two layers with dropout between them."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.fc1, self.fc2, self.dropout = linear(16, 32), linear(32, 16), nn.Dropout(dropout)
        self.shift = nn.Parameter(torch.zeros(16))

    def forward(self, x):
        # autograd keeps neither of these two, and so does not see that x may be written later
        return self.fc2(self.dropout(torch.tanh(self.fc1(x + self.shift))))


class Recomputed(nn.Module):
    """A classifier with a residual block, which is called by a function that is given."""

    def __init__(self, dropout):
        super().__init__()
        self.stem, self.block, self.head = linear(8, 16), Block(dropout), linear(16, 5)

    def forward(self, x, run=None, *, in_place=False):
        hidden = self.stem(x)
        if not in_place:
            return self.head(hidden + (run(self.block, hidden) if run else self.block(hidden)))
        # as an argument, the input would be seen by autograd
        return self.head(hidden.add_(run(functools.partial(self.block, hidden))))


def recomputed(dropout=0.0, *, in_place=False, eager=True, **options):
    """Return the case of a block under ``checkpoint``, against eager mode or without ``checkpoint``."""
    model = Recomputed(dropout)
    run = functools.partial(checkpoint, **options)
    step = step_of(model, functional.cross_entropy, forward=lambda x: model(x, run, in_place=in_place))
    plain = step_of(model, functional.cross_entropy)
    return Case(step, batch(12), model, "eager" if eager else plain, plain=plain)


@fault("block.fc2.weight", "other")
def recomputed_without_the_random_state():
    return recomputed(0.5, eager=False, use_reentrant=False, preserve_rng_state=False)


@fault("block.fc2.weight", "other")
def reentrant_without_the_random_state():
    return recomputed(0.5, use_reentrant=True, preserve_rng_state=False)


@fault("block.fc2.weight", "other")
def recomputed_from_a_written_input():
    # the residual is added in place: the block is computed again from the sum
    return recomputed(in_place=True, use_reentrant=False)


# --- bugs of PyTorch ---


class Angle(nn.Module):
    """The least angle of each row."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.randn(40, 3))

    def forward(self, y):
        return torch.atan2(self.x, y).amin(-1)


@fault("x", "rows")
def gradient_of_a_least_angle_is_dropped():
    # pytorch#186799: code for the CPU computes atan2 twice, and the second result is not the least to the bit
    model = Angle()
    compiled = torch.compile(model)

    def step(y):
        loss = compiled(y).sum()
        loss.backward()
        return loss

    return Case(step, (torch.randn(40, 3),), model)


class Dropped(nn.Module):
    """Two layers, each with dropout."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = linear(8, 32), linear(32, 32)

    def forward(self, x):
        for layer in (self.stem, self.head):
            x = functional.dropout(torch.relu(layer(x)), 0.5, self.training)
        return x


@fault("head.weight", "other")
def dropout_is_drawn_again_below_a_memory_budget():
    # pytorch#190758
    model = Dropped()
    compiled = torch.compile(model)

    def step(x, y):
        with torch._functorch.config.patch(activation_memory_budget=0.5):
            loss = functional.cross_entropy(compiled(x), y)
        loss.backward()
        return loss

    return Case(step, batch(64), model)
