"""Synthetic tasks with something to learn: functions that return a function, which draws the next batch."""

from __future__ import annotations

import math

import torch
from torch.nn import functional


def clusters(size=32, classes=10, dim=32, *, examples=4096, scale=0.7, noise=0.0):
    """Vectors ``(size, dim)`` in two clusters for each class; a share ``noise`` of the labels is random."""
    centers = torch.randn(2 * classes, dim) * scale
    which = torch.randint(2 * classes, (examples,))
    x, y = centers[which] + torch.randn(examples, dim), which % classes
    y = torch.where(torch.rand(examples) < noise, torch.randint(classes, (examples,)), y)
    return drawn(size, x, y)


def regression(size=32, dim=16, *, examples=4096, scale=1.0, offset=0.0, noise=None):
    """Vectors ``(size, dim)`` and targets ``(size, 1)`` of a nonlinear function."""
    x = torch.randn(examples, dim)
    y = torch.tanh(x @ torch.randn(dim, 4)) @ torch.randn(4, 1) + 0.3 * x[:, :1]
    y = y + (0.05 * torch.randn(examples, 1) if noise is None else noise.sample((examples, 1)))
    return drawn(size, x, y * scale + offset)


def images(size=32, classes=10, *, examples=1024, side=16, noise=0.5):
    """Noisy pictures ``(size, 1, side, side)`` of shifted smooth patterns."""
    patterns = functional.interpolate(torch.randn(classes, 1, 4, 4), side, mode="bicubic")
    y = torch.randint(classes, (examples,))
    x = torch.stack([p.roll(torch.randint(-2, 3, (2,)).tolist(), (1, 2)) for p in patterns[y]])
    return drawn(size, x + noise * torch.randn_like(x), y)


def discs(size=8, *, examples=256, side=16):
    """Noisy pictures of two discs, and the discs' masks, both ``(size, 1, side, side)``."""
    axis = torch.arange(side, dtype=torch.float32)
    centers, radii = torch.rand(examples, 2, 2, 1, 1) * side, 2 + 2 * torch.rand(examples, 2, 1, 1)
    away = (axis[:, None] - centers[:, :, 0]).square() + (axis - centers[:, :, 1]).square()
    masks = (away < radii.square()).any(1, keepdim=True).float()
    return drawn(size, masks + 0.5 * torch.randn_like(masks), masks)


def text(size=16, vocabulary=32, *, length=24, branches=4, examples=20000):
    """Characters of a Markov chain ``(size, length)``, and those that follow them."""
    successors = torch.stack([torch.randperm(vocabulary)[:branches] for _ in range(vocabulary)])
    chances = torch.distributions.Dirichlet(torch.ones(branches)).sample((vocabulary,))
    picks = [torch.multinomial(chance, examples, replacement=True).tolist() for chance in chances]
    table, letters = successors.tolist(), [0]
    for i in range(examples - 1):
        letters.append(table[letters[-1]][picks[letters[-1]][i]])
    stream = torch.tensor(letters)

    def draw():
        starts = torch.randint(examples - length - 1, (size, 1))
        chunk = stream[starts + torch.arange(length + 1)]
        return chunk[:, :-1], chunk[:, 1:]

    return draw


def adding(size=32, *, length=24):
    """The adding problem: numbers and two marks ``(size, length, 2)``; the sum of the marked numbers."""

    def draw():
        numbers, marks = torch.rand(size, length), torch.zeros(size, length)
        marks.scatter_(1, torch.rand(size, length).topk(2).indices, 1.0)
        return torch.stack([numbers, marks], dim=2), (numbers * marks).sum(1, keepdim=True)

    return draw


def points(size=128):
    """Points ``(size, 2)`` of a mixture of eight Gaussians on a circle."""

    def draw():
        angle = torch.randint(8, (size,)) * (math.tau / 8)
        return (torch.stack([angle.cos(), angle.sin()], 1) + 0.08 * torch.randn(size, 2),)

    return draw


def views(size=64, *, latent=8, dim=32):
    """Two noisy views ``(size, dim)`` of the same things, in the same order."""
    first, second = torch.randn(2, latent, dim).unbind()

    def draw():
        things = torch.randn(size, latent)
        return tuple(torch.tanh(things @ view) + 0.2 * torch.randn(size, dim) for view in (first, second))

    return draw


def ratings(size=128, users=200, items=300, *, rank=3):
    """Indices of users and items, and ratings of low rank; a few items are far more popular than others."""
    u, v = torch.randn(users, rank), torch.randn(items, rank)
    popular = 1.0 / torch.arange(1, items + 1, dtype=torch.float32)

    def draw():
        user, item = torch.randint(users, (size,)), torch.multinomial(popular, size, replacement=True)
        return user, item, (u[user] * v[item]).sum(1) / rank**0.5 + 0.3 * torch.randn(size)

    return draw


def graph(nodes=200, classes=4, dim=16):
    """One graph of communities: features, normalized adjacency and labels, always the same."""
    y = torch.randint(classes, (nodes,))
    linked = (torch.rand(nodes, nodes) < torch.where(y[:, None] == y, 0.06, 0.01)).float()
    a = ((linked + linked.T + torch.eye(nodes)) > 0).float()
    root = a.sum(1).rsqrt()
    batch = functional.one_hot(y, dim).float() + torch.randn(nodes, dim), root[:, None] * a * root, y
    return lambda: batch


def drawn(size, *tensors):
    """Return a function that draws ``size`` examples, without repetition within an epoch."""
    examples, order = len(tensors[0]), []

    def draw():
        if len(order) < size:
            order[:] = torch.randperm(examples).tolist()
        chosen = torch.tensor([order.pop() for _ in range(size)])
        return tuple(tensor[chosen] for tensor in tensors)

    return draw


def fixed(draw):
    """Return a function that always returns the same batch."""
    batch = draw()
    return lambda: batch
