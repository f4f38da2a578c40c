"""Training for tests of DeepSpeed and Megatron: a model with awkward sizes, and its gradients in float64."""

from __future__ import annotations

import torch
from torch import nn

SIZES = (5, 7, 3)


def model_of(dtype=torch.float32):
    """Return a model whose parameters have 35, 7, 21, 3 and 4 elements; one of them is frozen."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model.register_parameter("frozen", nn.Parameter(torch.ones(4), requires_grad=False))
    return model.to(dtype)


def batch_of(step, rank, micro=0):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(6, 5, generator=generator), torch.randn(6, 3, generator=generator)


def loss_of(model, step, rank, micro=0, dtype=torch.float32):
    x, y = batch_of(step, rank, micro)
    return nn.functional.mse_loss(model(x.to(dtype)), y.to(dtype)) * 5


def reference(model, step, size, accumulation=1):
    """Return the gradients in float64 by name, of the mean over ranks and micro-batches."""
    exact = model_of(torch.float64)
    with torch.no_grad():
        for p, own in zip(exact.parameters(), model.parameters(), strict=True):
            p.copy_(own)
    for rank in range(size):
        for micro in range(accumulation):
            loss = loss_of(exact, step, rank, micro, torch.float64) / (size * accumulation)
            loss.backward()
    return {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}


def norms_of(grads):
    return {name: float(grad.double().norm()) for name, grad in grads.items()}


def rows_of(record, kind="grads", statistic="norm"):
    """Return a statistic by name, of the rows that were measured."""
    values, measured = record.value(statistic, kind).tolist(), record.measured(kind).tolist()
    return {
        name: value for name, value, there in zip(record.names(kind), values, measured, strict=True) if there
    }
