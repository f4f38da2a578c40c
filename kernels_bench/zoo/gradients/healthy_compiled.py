"""Healthy steps that are compiled: a model is compiled once, and has new weights for each seed."""

from __future__ import annotations

import functools

import torch
import torch._dynamo.config
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kernels_bench.zoo.gradients.case import Case, step_of
from kernels_bench.zoo.gradients.faults_compiled import Block
from kernels_bench.zoo.gradients.healthy_layers import Transformer

STEPS = {}


def again(model):
    """Draw a model's weights again."""
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()


def compiled(make):
    """Add a healthy step to the table; ``make`` returns it, and is called once in a process."""
    made = functools.cache(make)

    def case():
        found = made()
        again(found.model)
        found.model.zero_grad()
        return Case(found.step, data(), found.model, found.against, found.optimizer)

    STEPS[make.__name__.replace("_", "-")] = case
    return make


def data():
    """Return sequences and labels."""
    return torch.randn(6, 7, 8), torch.randint(0, 5, (6,))


def transformer(dropout=0.0):
    """Return a small transformer."""
    return Transformer(dropout=dropout, layers=1)


def in_mode(dropout=0.0, **options):
    """Return the case of a model that is compiled with options."""
    model = transformer(dropout)
    return Case(step_of(model, functional.cross_entropy, forward=torch.compile(model, **options)), (), model)


@compiled
def compiled_by_default():
    return in_mode()


@compiled
def compiled_to_reduce_overhead():
    return in_mode(mode="reduce-overhead")


@compiled
def compiled_with_autotuning():
    model = nn.Sequential(nn.Flatten(), nn.Linear(56, 16), nn.Tanh(), nn.Linear(16, 5))
    forward = torch.compile(model, mode="max-autotune")
    return Case(step_of(model, functional.cross_entropy, forward=forward), (), model)


@compiled
def compiled_with_dropout():
    return in_mode(dropout=0.5)


@compiled
def compiled_with_dynamic_shapes():
    return in_mode(dynamic=True)


@compiled
def compiled_module():
    model = transformer()
    model.compile()
    return Case(step_of(model, functional.cross_entropy), (), model)


@compiled
def compiled_by_regions():
    model = nn.Sequential(nn.Linear(8, 16), Block(), Block(), nn.Flatten(), nn.Linear(112, 5))
    for block in model[1:3]:
        block.compile()
    return Case(step_of(model, functional.cross_entropy), (), model)


@compiled
def compiled_with_its_backward():
    model = transformer()

    @torch.compile(fullgraph=True)
    def whole(x, y):
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    def step(x, y):
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            return whole(x, y)

    return Case(step, (), model)


@compiled
def compiled_under_autocast():
    model = transformer()
    forward = torch.compile(model)

    def cast(x):
        with torch.autocast("cpu", torch.bfloat16):
            return forward(x)

    return Case(step_of(model, functional.cross_entropy, forward=cast), (), model)


@compiled
def compiled_and_recomputed():
    model = nn.ModuleDict({"stem": nn.Linear(8, 16), "block": Block(), "head": nn.Linear(16, 5)})

    @torch.compile
    def forward(x):
        x = checkpoint(model["block"], model["stem"](x), use_reentrant=False)
        return model["head"](x.mean(1))

    return Case(step_of(model, functional.cross_entropy, forward=forward), (), model)


@compiled
def compiled_with_a_break():
    model = transformer()

    @torch.compile
    def forward(x):
        out = model(x)
        torch._dynamo.graph_break()
        return out * 2

    return Case(step_of(model, functional.cross_entropy, forward=forward), (), model)
