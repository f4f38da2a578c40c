"""Small training runs on real text and rendered digits, recorded at each step and checked by rules."""

from __future__ import annotations

import functools
import sysconfig
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 its usual name

from gradiometer.recorder.recorder import Recorder
from gradiometer.recorder.updates import Updates
from gradiometer.rules import default_rules
from gradiometer.rules.ledger import Ledger

# the digits of a 5 x 7 font; each row is a hexadecimal number
FONT = (
    *("0e11131519110e", "040c040404040e", "0e11010204081f", "1f02040201110e", "02060a121f0202"),
    *("1f101e0101110e", "0608101e11110e", "1f010204080808", "0e11110e11110e", "0e11110f01020c"),
)
SIZE = 16


def digits(count, generator):
    """Return images (count, 1, 16, 16) of rotated, scaled, shifted and noisy digits, and their labels."""
    rows = [[int(glyph[i : i + 2], 16) for i in range(0, 14, 2)] for glyph in FONT]
    font = torch.tensor([[[row >> (4 - bit) & 1 for bit in range(5)] for row in glyph] for glyph in rows])
    which = torch.randint(10, (count,), generator=generator)
    angle = (torch.rand(count, generator=generator) - 0.5) * 0.8
    scale = 1.1 + 0.5 * torch.rand(count, generator=generator)
    shift = (torch.rand(count, 2, generator=generator) - 0.5) * 0.7
    cos, sin = scale * angle.cos(), scale * angle.sin()
    x, y = torch.stack([cos, -sin, shift[:, 0]], 1), torch.stack([sin, cos, shift[:, 1]], 1)
    moves = torch.stack([x, y], 1)
    grid = F.affine_grid(moves, [count, 1, SIZE, SIZE], align_corners=False)
    images = F.grid_sample(font[which].unsqueeze(1).float(), grid, align_corners=False)
    return images + 0.1 * torch.randn(images.shape, generator=generator), which


@functools.cache
def corpus():
    """Return ASCII characters of Python's own standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(file.read_bytes() for file in sorted(folder.glob("[a-z]*.py")))[: 2**18]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).clamp(max=127)


def characters(batch, context, generator):
    """Return excerpts of the standard library's text (batch, context), and the characters that follow."""
    text = corpus()
    start = torch.randint(len(text) - context - 1, (batch, 1), generator=generator)
    piece = text[start + torch.arange(context + 1)].long()
    return piece[:, :-1], piece[:, 1:]


class Recurrent(nn.Module):
    """A next-character model."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(128, 32)
        self.rnn = nn.LSTM(32, 96, 2, batch_first=True)
        self.head = nn.Linear(96, 128)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


class Attention(nn.Module):
    """A transformer block with key biases, whose gradients are only rounding errors."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (
            part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(y))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """A next-character model with embeddings of rare characters, which seldom have a gradient."""

    def __init__(self, layers=3, width=64, heads=4, context=32):
        super().__init__()
        self.embed, self.position = nn.Embedding(128, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Attention(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.embed(tokens) + self.position.weight)))


class Residual(nn.Module):
    """Two convolutions whose biases precede a norm: their gradients are rounding errors."""

    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x):
        return F.relu(x + self.body(x))


def convolutional():
    """Return a small residual network."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), Residual(16), Residual(16)),
        *(nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), Residual(32)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


def perceptron(depth=4, width=64, activation=nn.ReLU):
    """Return a plain network for digits; its matrices are ``1.weight``, ``3.weight`` and so on."""
    sizes = [SIZE * SIZE] + [width] * (depth - 1)
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), activation())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(width, 10))


def batches(batch=32, seed=0):
    """Return a function that returns the next batch of digits."""
    generator = torch.Generator().manual_seed(seed)
    return lambda: digits(batch, generator)


class Run:
    """A training run that records each step and applies rules to it."""

    def __init__(self, model, batch, optimizer, rules=None, *, schedule=None, updates=False, **recorder):
        self.model, self.batch, self.optimizer, self.schedule = model, batch, optimizer, schedule
        self.rules = default_rules() if rules is None else rules
        self.recorder = Recorder(model, capacity=1, updates=updates, **recorder)
        self.updates = Updates(self.recorder) if updates else None
        self.ledger = Ledger()
        self.records, self.step = [], 0

    def go(self, steps, before=None):
        """Train; ``before(step)`` may change gradients after the backward, before they are recorded."""
        for _ in range(steps):
            inputs, targets = self.batch()
            logits = self.model(inputs)
            loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
            self.optimizer.zero_grad()
            loss.backward()
            if before is not None:
                before(self.step)
            self.recorder.record()
            if self.updates is not None:
                self.updates.keep(self.step)
            if not self.recorder.skip_step:
                self.optimizer.step()
            if self.schedule is not None:
                self.schedule.step()
            if self.updates is not None:
                self.updates.measure(self.step)
            self.look(self.recorder.read()[-1], loss.item())
            self.recorder.advance()
            self.step += 1
        return self.ledger.findings

    def look(self, record, loss):
        """Apply the rules to a step."""
        record.scalars["loss"] = loss
        self.records.append(record)
        for rule in self.rules:
            self.ledger.add(rule.check(record))
