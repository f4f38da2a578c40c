"""Attention of explicit weights, in small steps that a fault can exchange."""

from __future__ import annotations

import torch
from torch import nn


class Attention(nn.Module):
    """Attention of several heads.

    Args:
        width: width of the model.
        heads: number of heads of queries.
        kv_heads: number of heads of keys and values; by default as many.
        causal: whether a position may attend only to itself and earlier ones.
        rotary: whether queries and keys are rotated by their position.
        dropout: share of the weights that are dropped.
    """

    name = "attention"

    def __init__(self, width, heads, *, kv_heads=None, causal=False, rotary=False, dropout=0.0):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads or heads, width // heads
        self.causal, self.rotary = causal, rotary
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key, self.value = (nn.Linear(width, self.kv_heads * self.size) for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.observe = None

    def forward(self, x, source=None, allowed=None):
        """Attend.

        Args:
            x: ``(batch, queries, width)``.
            source: what keys and values are made of, ``(batch, keys, width)``; x by default.
            allowed: bool, ``(batch, keys)``: which keys are no padding.
        """
        q, k, v = self.project(x, x if source is None else source)
        if self.rotary:
            q, k = self.position(q, k)
        mask = self.intended(q, k, allowed)
        weights = self.softmax(self.mask(self.scores(q, k), mask))
        if self.observe is not None:
            self.observe(self.name, q, k, weights, mask=mask, is_causal=self.causal)
        return self.out(self.combine(self.dropout(weights), v))

    def intended(self, q, k, allowed):
        """Return what may be attended, bool ``(batch or 1, 1, queries, keys)``. No fault changes it."""
        mask = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool)
        if self.causal:
            mask = mask.tril()
        return mask if allowed is None else mask & allowed[:, None, None]

    def split(self, x):
        """Return ``(batch, heads, positions, size)``."""
        return x.unflatten(2, (-1, self.size)).transpose(1, 2)

    def project(self, x, source):
        """Return queries, keys and values, split into heads."""
        return self.split(self.query(x)), self.split(self.key(source)), self.split(self.value(source))

    def position(self, q, k):
        """Rotate queries and keys."""
        return self.rotate(q), self.rotate(k)

    def angles(self, count):
        """Return the angle of each position and pair of elements, ``(count, size / 2)``."""
        speeds = 100.0 ** -(torch.arange(self.size // 2) / (self.size // 2))
        return torch.arange(count)[:, None] * speeds

    def rotate(self, x, angles=None):
        """Rotate the pairs of elements of x."""
        angles = self.angles(x.shape[2]) if angles is None else angles
        first, second = x.chunk(2, -1)
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
        ).to(x.dtype)

    def repeated(self, x):
        """Repeat each head of keys or values for its heads of queries."""
        return x.repeat_interleave(self.heads // self.kv_heads, 1)

    def scores(self, q, k):
        """Return the scaled products of queries and keys."""
        return q @ self.repeated(k).mT / self.size**0.5

    def mask(self, scores, mask):
        """Return the scores with -inf where the mask is False."""
        return scores.masked_fill(~mask, -torch.inf)

    def softmax(self, scores):
        """Return the weights."""
        return scores.softmax(-1)

    def combine(self, weights, v):
        """Return the weighted values, heads side by side."""
        return (weights.to(v.dtype) @ self.repeated(v)).transpose(1, 2).flatten(2)
