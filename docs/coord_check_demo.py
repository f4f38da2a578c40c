"""Check how a small transformer scales with its width, in the standard parametrization and in μP.

    python docs/coord_check_demo.py [--seeds 3] [--out docs/how-to]

Trains a character transformer on the text of Python's standard library, with Adam. Prints both tables, and
draws coord-check-standard.svg and coord-check-mup.svg. It takes about half a minute on one core.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

import gradiometer as gm
from gradiometer.demo.training import corpus

WIDTHS, STEPS = (64, 128, 256, 512), 4
# the width at which both parametrizations are the same
BASE = 64
LR, VOCABULARY, HEADS, LAYERS, CONTEXT, BATCH = 4e-3, 128, 4, 2, 32, 8


class Block(nn.Module):
    """Attention and a feed-forward layer, both with a residual connection."""

    def __init__(self, name: str, width: int, *, mup: bool) -> None:
        super().__init__()
        self.name = name
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = [nn.Linear(width, width, bias=False) for _ in range(3)]
        self.proj = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        size, base = width // HEADS, BASE // HEADS
        # μP divides attention logits by the size of a head and not by its square root
        self.scale = base**0.5 / size if mup else size**-0.5

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(batch, context, width)``."""
        y = self.norm1(x)
        q, k, v = [part(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)]
        scores = gm.tap(q @ k.mT * self.scale, f"{self.name}.scores")
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        attention = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        x = x + self.proj(attention.transpose(1, 2).flatten(2))
        z: Tensor = x + self.down(gelu(self.up(self.norm2(x))))
        return z


class Transformer(nn.Module):
    """Predicts the next character."""

    def __init__(self, width: int, *, mup: bool) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*[Block(f"blocks.{i}", width, mup=mup) for i in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        # μP multiplies the output by 1 / width
        self.multiplier = BASE / width if mup else 1.0
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        if mup:
            # as recommended: otherwise these begin as width**-0.5
            for weight in (self.head.weight, *[block.q.weight for block in self.blocks]):
                nn.init.zeros_(weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, ``(batch, context, characters)``."""
        x: Tensor = self.norm(self.blocks(self.embed(tokens) + self.position.weight))
        return self.head(x * self.multiplier)


def make_model(width: int, *, mup: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and Adam."""
    model = Transformer(width, mup=mup)
    # matrices whose inputs and outputs both get wider
    hidden = [module.weight for module in model.blocks.modules() if isinstance(module, nn.Linear)]
    among = set(hidden)
    others = [p for p in model.parameters() if p not in among]
    lr = LR * BASE / width if mup else LR
    return model, torch.optim.Adam([{"params": hidden, "lr": lr}, {"params": others, "lr": LR}])


def check(*, mup: bool, seeds: int) -> gm.CoordCheck:
    """Run the coordinate check on one batch of text."""
    text = corpus(2**18)
    start = torch.arange(BATCH).unsqueeze(1) * 4096
    piece = text[start + torch.arange(CONTEXT + 1)].long()

    def loss(model: nn.Module) -> Tensor:
        return cross_entropy(model(piece[:, :-1]).flatten(0, 1), piece[:, 1:].flatten())

    names = [f"blocks.{i}.scores" for i in range(LAYERS)]
    make = partial(make_model, mup=mup)
    return gm.coord_check(make, WIDTHS, loss, names=names, steps=STEPS, seeds=seeds)


def main() -> None:
    """Check both parametrizations."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--out", type=Path, help="folder of the pictures")
    args = parser.parse_args()
    for name, mup in (("standard", False), ("mup", True)):
        result = check(mup=mup, seeds=args.seeds)
        sys.stdout.write(f"{name}: {result}\n\n")
        if args.out:
            result.save_svg(args.out / f"coord-check-{name}.svg")


if __name__ == "__main__":
    main()
