"""Small transformers of 20,000 to 60,000 parameters, made of parts that a fault can exchange."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils import checkpoint

from kernels_bench.zoo.models import LoRA
from kernels_bench.zoo.transformers.attention import Attention

WIDTH, HEADS = 32, 4


class FeedForward(nn.Module):
    """Two linear layers; ``gated`` multiplies the activations by a third one, as in SwiGLU."""

    def __init__(self, activation=nn.GELU, *, gated=False):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 3 * WIDTH) if gated else None
        self.activation = activation()

    def forward(self, x):
        hidden = self.activation(self.first(x))
        return self.second(hidden if self.gate is None else hidden * self.gate(x))


class Block(nn.Module):
    """Attention, cross attention if there is any, and a feed-forward network, with residual connections."""

    def __init__(
        self,
        *,
        norm=nn.LayerNorm,
        pre=True,
        cross=False,
        activation=nn.GELU,
        gated=False,
        dropout=0.0,
        **rest,
    ):
        super().__init__()
        self.attention, self.norm1 = Attention(WIDTH, HEADS, dropout=dropout, **rest), norm(WIDTH)
        if cross:
            self.cross, self.norm_cross = Attention(WIDTH, HEADS, dropout=dropout), norm(WIDTH)
        self.mlp, self.norm2 = FeedForward(activation, gated=gated), norm(WIDTH)
        self.dropout, self.pre = nn.Dropout(dropout), pre

    def forward(self, x, allowed=None, source=None, source_allowed=None):
        x = self.residual(x, self.norm1, lambda h: self.attention(h, None, allowed))
        if source is not None:
            x = self.residual(x, self.norm_cross, lambda h: self.cross(h, source, source_allowed))
        return self.residual(x, self.norm2, self.mlp)

    def residual(self, x, norm, branch):
        """Add a branch to x, with the norm before the branch or after the sum."""
        return x + self.dropout(branch(norm(x))) if self.pre else norm(x + self.dropout(branch(x)))


class Tokens(nn.Module):
    """The embedding of tokens, with learned positions unless ``length`` is None."""

    def __init__(self, vocabulary, length, dropout=0.0):
        super().__init__()
        self.table = nn.Embedding(vocabulary, WIDTH)
        self.positions = None if length is None else nn.Embedding(length, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens):
        return self.dropout(self.position(self.table(tokens)))

    def position(self, x):
        """Add the embedding of each position."""
        return x if self.positions is None else x + self.positions.weight[: x.shape[1]]


def initialize(model, std=0.08):
    """Draw all weights from N(0, std²), those of embeddings and linear layers; biases are 0."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=std)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)


class GPT(nn.Module):
    """A causal language model.

    Args:
        rotary: rotary positions, RMSNorm, a gated feed-forward network and fewer heads of keys, as in Llama.
    """

    def __init__(
        self, vocabulary=24, length=20, *, blocks=2, rotary=False, tied=False, dropout=0.0, recompute=False
    ):
        super().__init__()
        self.embed = Tokens(vocabulary, None if rotary else length, dropout)
        norm = nn.RMSNorm if rotary else nn.LayerNorm
        rest = {"kv_heads": 2, "rotary": True, "gated": True, "activation": nn.SiLU} if rotary else {}
        self.blocks = nn.ModuleList(
            Block(norm=norm, causal=True, dropout=dropout, **rest) for _ in range(blocks)
        )
        self.norm = norm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.recompute = recompute
        initialize(self)
        if tied:
            self.head.weight = self.embed.table.weight

    def forward(self, tokens, allowed=None):
        x = self.embed(tokens)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint.checkpoint(block, x, allowed, use_reentrant=False)
            else:
                x = block(x, allowed)
        return self.head(self.norm(x))


class BERT(nn.Module):
    """A masked language model: norms after the sums, and a head that is tied to the embedding."""

    def __init__(self, vocabulary=24, length=20, *, dropout=0.0, pre=False):
        super().__init__()
        self.embed, self.norm = Tokens(vocabulary, length, dropout), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block(pre=pre, dropout=dropout) for _ in range(2))
        self.transform = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, vocabulary)
        initialize(self)
        self.head.weight = self.embed.table.weight

    def forward(self, tokens, allowed):
        x = self.norm(self.embed(tokens))
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(self.transform(x))


class T5(nn.Module):
    """An encoder and a decoder with cross attention, RMSNorm and ReLU; both share the embedding."""

    def __init__(self, vocabulary=16, length=10, *, dropout=0.0):
        super().__init__()
        self.embed = Tokens(vocabulary, length, dropout)
        rest = {"norm": nn.RMSNorm, "activation": nn.ReLU, "dropout": dropout}
        self.encoder = nn.ModuleList(Block(**rest) for _ in range(2))
        self.decoder = nn.ModuleList(Block(causal=True, cross=True, **rest) for _ in range(2))
        self.encoder_norm, self.norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        initialize(self, 0.1)

    def forward(self, source, allowed, tokens):
        memory = self.embed(source)
        for block in self.encoder:
            memory = block(memory, allowed)
        memory, x = self.encoder_norm(memory), self.embed(tokens)
        for block in self.decoder:
            x = block(x, None, memory, allowed)
        return self.head(self.norm(x))


class ViT(nn.Module):
    """A classifier of pictures; ``batch_norm`` normalizes the patches with running statistics."""

    def __init__(self, classes=10, side=16, patch=4, *, dropout=0.0, batch_norm=False):
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, patch, stride=patch)
        self.patch_norm = nn.BatchNorm2d(WIDTH) if batch_norm else nn.Identity()
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2 + 1, WIDTH))
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes)

    def forward(self, images):
        x = self.patch_norm(self.patches(images)).flatten(2).mT
        x = self.position(torch.cat([self.token.expand(len(x), -1, -1), x], 1))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))

    def position(self, x):
        """Add the embedding of each position."""
        return x + self.positions


def adapted(model, rank=4):
    """Freeze a model, and give the projections of its attentions and feed-forward networks adapters."""
    model.requires_grad_(requires_grad=False)
    for block in model.blocks:
        for part, names in ((block.attention, ("query", "value")), (block.mlp, ("first", "second"))):
            for name in names:
                setattr(part, name, LoRA(getattr(part, name), rank))
    return model
