"""Small models for the tests of contracts, with switches that break them."""

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    """Attention of two heads, with a mask of padding and, if causal, of later positions."""

    def __init__(self, width=8, *, causal=False, masks=True):
        super().__init__()
        self.causal, self.masks, self.heads = causal, masks, 2
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, kept=None):
        q, k, v = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, 2))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        mask = (mask.tril() if self.causal else mask)[None, None]
        if kept is not None and self.masks:
            mask = mask & kept[:, None, None, :]
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a feed-forward network with residual connections and dropout."""

    def __init__(self, width=8, *, dropout=0.0, **rest):
        super().__init__()
        self.attention, self.norm1 = Attention(width, **rest), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))
        self.norm2, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)

    def forward(self, x, kept=None):
        x = x + self.dropout(self.attention(self.norm1(x), kept))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    """Tokens ``(B, T)`` and a mask -> logits ``(B, T, 13)``.

    Args:
        positions: whether an embedding of positions is added.
        rest: arguments of `Block`.
    """

    def __init__(self, *, positions=True, blocks=2, **rest):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(13, 8), nn.Embedding(16, 8)
        self.has_positions = positions
        self.blocks = nn.ModuleList(Block(**rest) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 13, bias=False)

    def forward(self, tokens, attention_mask=None):
        x = self.embedding(tokens)
        if self.has_positions:
            x = x + self.positions.weight[: x.shape[1]]
        kept = None if attention_mask is None else attention_mask.bool()
        for block in self.blocks:
            x = block(x, kept)
        return self.head(self.norm(x))


def text(rows=3, length=8, *, padded=False, shifted=True, seed=0):
    """Return a batch of random tokens; labels are the next tokens, or some of the hidden ones."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, 13, (rows, length + 1), generator=g)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    if not shifted:
        hidden = torch.rand(rows, length, generator=g) < 0.4
        hidden[:, 0] = True
        batch = {"tokens": tokens[:, :-1].masked_fill(hidden, 1)}
        batch["labels"] = tokens[:, :-1].masked_fill(~hidden, -100)
    if padded:
        lengths = torch.tensor([length, length - 3, *[length - 1] * rows])[:rows]
        kept = torch.arange(length) < lengths[:, None]
        batch["tokens"] = batch["tokens"].masked_fill(~kept, 0)
        batch["labels"] = batch["labels"].masked_fill(~kept, -100)
        batch["attention_mask"] = kept.long()
    return batch


def cross_entropy(model, batch):
    """Return the loss of a batch of `text`."""
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    return functional.cross_entropy(model(**inputs).flatten(0, 1), batch["labels"].flatten())
