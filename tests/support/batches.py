"""Small models of tokens, and loops over batches that are planned in advance."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 its usual name

import gradiometer as gm

CLASSES = 24


class Tokens(nn.Module):
    """Predicts a token at each position from the one there and the mean of those before; sees a mask."""

    def __init__(self, classes=CLASSES, width=16):
        super().__init__()
        self.embed, self.mix, self.head = (
            nn.Embedding(classes, width),
            nn.Linear(2 * width, width),
            nn.Linear(width, classes),
        )

    def forward(self, tokens, allowed=None):
        x = self.embed(tokens)
        if allowed is not None:
            x = x * allowed[..., None]
        seen = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return self.head(self.mix(torch.cat([x, seen], 2)).tanh())


def text(rows=16, length=21, classes=CLASSES, first=3):
    """Return random tokens ``(rows, length)``, of which the small ones are frequent."""
    return first + (torch.rand(rows, length).square() * (classes - first)).long()


def next_tokens(**kinds):
    """Return the arguments and the labels of a language model."""
    chunk = text(**kinds)
    return {"tokens": chunk[:, :-1]}, chunk[:, 1:].clone()


def mean_loss(logits, labels):
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


def train(
    model, draw, *, steps=12, loss_of=mean_loss, seed=0, rules=None, note=True, watched=True, **options
):
    """Train on what ``draw(step)`` returns: arguments and labels; return the monitor after its end."""
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = gm.watch(model, optimizer, rules=rules, **options) if watched else None
    for step in range(steps):
        inputs, labels = draw(step)
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        loss = loss_of(output, labels)
        loss.backward()
        if monitor:
            monitor.note(loss=loss if note else loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    if monitor:
        monitor.close()
    return monitor


def looks(monitor):
    """Return what was seen of the batches."""
    return monitor.last.model.batches
