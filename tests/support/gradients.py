"""Models with gradients, and bitwise comparison."""

from __future__ import annotations

import torch
from torch import nn


def with_grads(*grads):
    """Return parameters with these gradients."""
    parameters = []
    for grad in grads:
        parameter = nn.Parameter(torch.empty(grad.shape, dtype=grad.dtype, device=grad.device))
        parameter.grad = grad
        parameters.append(parameter)
    return parameters


def grads_of(parameters):
    return [parameter.grad for parameter in parameters]


def real(x):
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.resolve_neg()


def bits(x):
    """Compare bit patterns, which distinguish -0 from 0 and one NaN from another."""
    x = real(x).contiguous()
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]).clone()


def bit_patterns(tensors):
    return [bits(x).tolist() for x in tensors]


def assert_unchanged(tensors, before):
    for x, kept in zip(tensors, before, strict=True):
        assert torch.equal(bits(x), kept)
