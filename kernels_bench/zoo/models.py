"""Small models of every family, of 2,000 to 200,000 parameters."""

from __future__ import annotations

import itertools
import math

import torch
from torch import nn
from torch.nn import functional

import gradiometer as gm


def mlp(*sizes, activation=nn.ReLU, dropout=0.0):
    """Return linear layers with activations between them."""
    layers = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), activation()]
        layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers[: -2 if dropout else -1])


class Convolutional(nn.Module):
    def __init__(self, width=16, classes=10):
        super().__init__()
        widths = (1, width, 2 * width, 2 * width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in itertools.pairwise(widths)
        )
        self.head = nn.Linear(2 * width, classes)

    def features(self, x):
        for block in self.blocks:
            x = block(x)
        return x.mean((2, 3))

    def forward(self, x):
        return self.head(self.features(x))


class Residual(nn.Module):
    """A residual block; ``gain`` multiplies its branch."""

    def __init__(self, width, *, zero):
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        if zero:
            nn.init.zeros_(self.norm2.weight)
        self.gain = 1.0

    def forward(self, x):
        branch = self.norm2(self.second(torch.relu(self.norm1(self.first(x)))))
        return torch.relu(x + self.gain * branch)


class ResNet(nn.Module):
    def __init__(self, width=16, blocks=3, classes=10, *, zero=True):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Residual(width, zero=zero) for _ in range(blocks))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    def __init__(self, width=12):
        super().__init__()

        def block(fan_in, fan_out):
            return nn.Sequential(
                nn.Conv2d(fan_in, fan_out, 3, padding=1), nn.GroupNorm(4, fan_out), nn.SiLU()
            )

        self.encoder = nn.ModuleList([block(1, width), block(width, 2 * width)])
        self.middle = block(2 * width, 2 * width)
        self.decoder = nn.ModuleList([block(4 * width, width), block(2 * width, width)])
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        skipped = []
        for block in self.encoder:
            x = block(x)
            skipped.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.decoder:
            x = block(torch.cat([functional.interpolate(x, scale_factor=2.0), skipped.pop()], 1))
        return self.head(x)


class Recurrent(nn.Module):
    """An LSTM or GRU; of characters with a vocabulary, and else of vectors to one number."""

    def __init__(self, cell, fan_in, width=48, vocabulary=None):
        super().__init__()
        self.embed = None if vocabulary is None else nn.Embedding(vocabulary, fan_in)
        self.rnn = cell(fan_in, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary or 1)

    def forward(self, x):
        hidden, _ = self.rnn(x if self.embed is None else self.embed(x))
        return self.head(hidden[:, -1] if self.embed is None else hidden)


class Attention(nn.Module):
    name = "attention"  # of its tap

    def __init__(self, width, heads, *, causal):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.heads, self.causal = heads, causal

    def forward(self, x):
        split = (2, (self.heads, -1))
        q, k, v = (f(x).unflatten(*split).transpose(1, 2) for f in (self.query, self.key, self.value))
        gm.tap_attention(q, k, self.name)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """A mixture of experts, of which each token takes one; ``balance`` is the usual auxiliary loss."""

    name = "experts"  # of its tap

    def __init__(self, width, experts):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(mlp(width, 2 * width, width, activation=nn.GELU) for _ in range(experts))
        self.balance = torch.zeros(())

    def forward(self, x):
        flat = x.flatten(0, 1)
        chances = self.router(flat).softmax(1)
        share, chosen = chances.max(1)
        gm.tap_router(chances, self.name, selected=chosen)
        used = functional.one_hot(chosen, len(self.experts)).float().mean(0)
        self.balance = len(self.experts) * (used * chances.mean(0)).sum()
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(1)
            out = out.index_add(0, rows, expert(flat[rows]) * share[rows, None])
        return out.unflatten(0, x.shape[:2])


class Block(nn.Module):
    def __init__(self, width, heads, *, causal=True, experts=0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.mlp = Experts(width, experts) if experts else mlp(width, 4 * width, width, activation=nn.GELU)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary=32, width=48, layers=2, *, tied=False, experts=0, std=0.02, length=24):
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4, experts=experts) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02 if std is None else std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            # without a std, embeddings keep torch's default, N(0, 1)
            elif isinstance(module, nn.Embedding) and std is not None:
                nn.init.normal_(module.weight, std=std)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ViT(nn.Module):
    def __init__(self, width=48, layers=2, classes=10, side=16, patch=4):
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(Block(width, 4, causal=False) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


class Encoder(nn.Module):
    """torch's own transformer encoder, which predicts the next character."""

    def __init__(self, vocabulary=32, width=48, layers=2, *, dropout=0.1):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.encoder(self.embed(x), mask, is_causal=True))


class Autoencoder(nn.Module):
    def __init__(self, latent=8, *, variational=False):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), mlp(256, 64, 2 * latent if variational else latent))
        self.decoder = mlp(latent, 64, 256)
        self.variational = variational

    def forward(self, x):
        code = self.encoder(x)
        if not self.variational:
            return self.decoder(code), torch.zeros(())
        mean, log_var = code.chunk(2, 1)
        divergence = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1).mean()
        return self.decoder(mean + (0.5 * log_var).exp() * torch.randn_like(mean)), divergence


class Denoiser(nn.Module):
    """Predicts the noise in points, from the points and a time from 0 to 1."""

    def __init__(self, width=96):
        super().__init__()
        self.time = mlp(16, width)
        self.start = nn.Linear(2, width)
        self.body = mlp(width, width, width, width, activation=nn.SiLU)
        self.head = nn.Linear(width, 2)
        nn.init.zeros_(self.head.weight)

    def forward(self, x, time):
        waves = time[:, None] * torch.exp2(torch.arange(8.0)) * math.pi
        hidden = self.start(x) + self.time(torch.cat([waves.sin(), waves.cos()], 1))
        return self.head(functional.silu(hidden + self.body(hidden)))


class Towers(nn.Module):
    def __init__(self, dim=32, width=64, out=16):
        super().__init__()
        self.first, self.second = mlp(dim, width, out), mlp(dim, width, out)
        self.temperature = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, x, y):
        x, y = functional.normalize(self.first(x), dim=1), functional.normalize(self.second(y), dim=1)
        return x @ y.T * self.temperature.exp().clamp(max=100)


class GraphNetwork(nn.Module):
    def __init__(self, dim=16, width=32, classes=4, dropout=0.5):
        super().__init__()
        self.first, self.second = nn.Linear(dim, width), nn.Linear(width, classes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, adjacency):
        x = torch.relu(adjacency @ self.first(self.dropout(x)))
        return adjacency @ self.second(self.dropout(x))


class Recommender(nn.Module):
    def __init__(self, users=200, items=300, width=16):
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)
        self.body = mlp(3 * width, 32, 1)

    def forward(self, user, item):
        u, v = self.users(user), self.items(item)
        return self.body(torch.cat([u, v, u * v], 1)).squeeze(1)


class LoRA(nn.Module):
    """A frozen linear layer and a trained update of low rank that starts at 0."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T * 2.0


class ActorCritic(nn.Module):
    def __init__(self, observed=4, actions=2, width=64):
        super().__init__()
        self.body = mlp(observed, width, width, activation=nn.Tanh)
        self.actor, self.critic = nn.Linear(width, actions), nn.Linear(width, 1)

    def forward(self, x):
        x = torch.tanh(self.body(x))
        return self.actor(x), self.critic(x).squeeze(-1)


class CartPoles:
    """Many poles on carts, as in Gym's CartPole; a fallen one starts again."""

    def __init__(self, count=16):
        self.state = 0.1 * torch.rand(count, 4) - 0.05

    def step(self, action):
        """Return the reward and whether each pole fell, both ``(count,)``; ``state`` is the next one."""
        x, v, angle, spin = self.state.unbind(1)
        force = torch.where(action == 1, 10.0, -10.0)
        push = (force + 0.05 * spin.square() * angle.sin()) / 1.1
        turn = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4 / 3 - 0.1 * angle.cos().square() / 1.1))
        speed = push - 0.05 * turn * angle.cos() / 1.1
        state = torch.stack([x + 0.02 * v, v + 0.02 * speed, angle + 0.02 * spin, spin + 0.02 * turn], 1)
        fell = (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > 0.21)
        self.state = torch.where(fell[:, None], 0.1 * torch.rand_like(state) - 0.05, state)
        return torch.ones(len(x)), fell
