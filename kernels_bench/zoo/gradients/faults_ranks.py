"""Faults of two ranks on the CPU, each against what one process computes from the whole batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from kernels_bench.zoo.gradients.case import Case, adder, step_of
from kernels_bench.zoo.gradients.faults import linear
from kernels_bench.zoo.gradients.faults_loop import batch, net

FAULTS = {}
fault = adder(FAULTS)


def part(x, dim=0):
    """Return this rank's part of a tensor."""
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


class Sum(torch.autograd.Function):
    """The sum over ranks, of the output or of the gradient."""

    @staticmethod
    def forward(ctx, x, of_gradient):
        ctx.of_gradient = of_gradient
        if of_gradient:
            return x.view_as(x)
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        if ctx.of_gradient:
            grad = grad.clone()
            dist.all_reduce(grad)
        return grad, None


class Gather(torch.autograd.Function):
    """All ranks' parts of a sequence; the gradient of each part stays with its rank."""

    @staticmethod
    def forward(ctx, x):
        del ctx
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        del ctx
        return part(grad, 1)


# --- data parallel ---


def averaged(change):
    """Return the case of DDP's step on this rank's rows, changed, against one process with all rows."""
    model = net()
    own = change(DistributedDataParallel(model))

    def step(x, y):
        loss = own(part(x), part(y)).detach()
        dist.all_reduce(loss)
        return loss / dist.get_world_size()

    return Case(step, batch(12), model, step_of(model, functional.cross_entropy))


@fault("4.weight", "other", ranks=2)
def fused_loss_bypasses_ddp():
    return averaged(lambda ddp: step_of(ddp.module, functional.cross_entropy))


@fault("4.weight", "factor", ranks=2, factor=0.5)
def averaged_by_ddp_and_by_the_loop():
    def change(ddp):
        step = step_of(ddp, functional.cross_entropy)

        def divided(x, y):
            loss = step(x, y)
            for p in ddp.parameters():
                p.grad /= dist.get_world_size()
            return loss

        return divided

    return averaged(change)


@fault("4.weight", "factor", ranks=2, factor=2.0)
def summed_and_not_averaged():
    def change(ddp):
        step = step_of(ddp.module, functional.cross_entropy)

        def summed(x, y):
            loss = step(x, y)
            for p in ddp.parameters():
                dist.all_reduce(p.grad)
            return loss

        return summed

    return averaged(change)


# --- tensor and sequence parallel, by hand: each rank uses its part of a weight ---


class Parallel(nn.Module):
    """A stem, and a column- and a row-parallel layer; ``reduced``: whether the stem's gradient is whole."""

    def __init__(self):
        super().__init__()
        self.stem, self.fc, self.head = linear(8, 16), linear(16, 32), linear(32, 5)

    def forward(self, x, *, reduced=False):
        hidden = torch.tanh(self.stem(x))
        if reduced:
            hidden = Sum.apply(hidden, True)
        local = torch.tanh(hidden @ part(self.fc.weight).T)
        return Sum.apply(local @ part(self.head.weight, 1).T, False)

    def plain(self, x):
        return self.head(torch.tanh(self.fc(torch.tanh(self.stem(x)))))


def tensor_parallel(*, reduced):
    """Return the case of a tensor-parallel step, against one process."""
    model = Parallel()
    backward = step_of(model, functional.cross_entropy, forward=lambda x: model(x, reduced=reduced))

    def step(x, y):
        loss = backward(x, y)
        for layer in (model.fc, model.head):
            dist.all_reduce(layer.weight.grad)
        return loss

    return Case(step, batch(12), model, step_of(model, functional.cross_entropy, forward=model.plain))


@fault("stem.weight", "other", ranks=2)
def column_parallel_gradient_is_partial():
    return tensor_parallel(reduced=False)


class Sequence(nn.Module):
    """A norm of this rank's part of the sequence; the rest sees all of it."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc, self.head = nn.RMSNorm(8), linear(8, 16), linear(16, 5)

    def forward(self, x):
        return self.rest(Gather.apply(self.norm(part(x, 1))))

    def plain(self, x):
        return self.rest(self.norm(x))

    def rest(self, x):
        return self.head(torch.tanh(self.fc(x)).mean(1))


def sequence_parallel(*, reduced):
    """Return the case of a sequence-parallel norm, against one process."""
    model = Sequence()
    backward = step_of(model, functional.cross_entropy)

    def step(x, y):
        loss = backward(x, y)
        if reduced:
            dist.all_reduce(model.norm.weight.grad)
        return loss

    x, y = torch.randn(6, 4, 8), torch.randint(0, 5, (6,))
    return Case(step, (x, y), model, step_of(model, functional.cross_entropy, forward=model.plain))


@fault("norm.weight", "other", ranks=2)
def norm_of_a_sequence_part_is_not_reduced():
    return sequence_parallel(reduced=False)


# --- the same without the fault ---

HEALTHY = {
    "ddp": lambda: averaged(lambda ddp: step_of(ddp, functional.cross_entropy)),
    "tensor-parallel": lambda: tensor_parallel(reduced=True),
    "sequence-parallel": lambda: sequence_parallel(reduced=True),
}
