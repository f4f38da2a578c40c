"""Healthy steps: layers and models, from a batch norm to transformers with a tiny config."""

from __future__ import annotations

import importlib.util

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels_bench.zoo import models
from kernels_bench.zoo.gradients.case import Case, step_of
from kernels_bench.zoo.gradients.healthy import net

STEPS = {}


def healthy(make):
    """Add a healthy step to the table, under the function's name."""
    STEPS[make.__name__.replace("_", "-")] = make
    return make


def pictures(model, rows=6, size=12, channels=1):
    """Return the case of a classifier of pictures."""
    args = torch.randn(rows, channels, size, size), torch.randint(0, 5, (rows,))
    return Case(step_of(model, functional.cross_entropy), args, model)


@healthy
def dropout():
    x, y = torch.randn(12, 8), torch.randint(0, 5, (12,))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 5))
    return Case(step_of(model, functional.cross_entropy), (x, y), model)


@healthy
def noise_in_the_step():
    # a denoiser: the noise and its level are drawn in the step
    model = net(bias=True)

    def step(x, y):
        level = torch.rand(len(x), 1)
        noise = torch.randn_like(x)
        keep = torch.bernoulli(torch.full((len(x), 1), 0.9))
        loss = functional.cross_entropy(model((x + level * noise) * keep), y)
        loss.backward()
        return loss

    return Case(step, (torch.randn(12, 8), torch.randint(0, 5, (12,))), model)


@healthy
def batch_norm():
    return pictures(models.Convolutional(width=4, classes=5))


@healthy
def resnet():
    return pictures(models.ResNet(width=8, classes=5, blocks=2))


@healthy
def group_norm_and_pooling():
    layers = [nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3)]
    return pictures(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)))


@healthy
def bias_before_batch_norm():
    # the gradient of the bias is 0 but for rounding
    layers = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(800, 5)]
    return pictures(nn.Sequential(*layers))


class Recurrent(nn.Module):
    """A classifier of sequences by the last output of a recurrent layer."""

    def __init__(self, kind, **options):
        super().__init__()
        self.body = kind(8, 12, batch_first=True, **options)
        self.head = nn.Linear(24 if options.get("bidirectional") else 12, 5)

    def forward(self, x):
        return self.head(self.body(x)[0][:, -1])


def sequences(model):
    """Return the case of a classifier of sequences."""
    args = torch.randn(6, 7, 8), torch.randint(0, 5, (6,))
    return Case(step_of(model, functional.cross_entropy), args, model)


STEPS["rnn"] = lambda: sequences(Recurrent(nn.RNN))
STEPS["gru"] = lambda: sequences(Recurrent(nn.GRU, bidirectional=True))
STEPS["lstm"] = lambda: sequences(Recurrent(nn.LSTM, num_layers=2, dropout=0.3))


class Tied(nn.Module):
    """A language model whose output is its embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.fc, self.head = nn.Embedding(30, 16), nn.Linear(16, 16), nn.Linear(16, 30)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.fc(self.embed(tokens)))).mT


@healthy
def tied_weights():
    model, tokens = Tied(), torch.randint(0, 30, (4, 9))
    return Case(step_of(model, functional.cross_entropy), (tokens[:, :-1], tokens[:, 1:]), model)


class Transformer(nn.Module):
    """A small transformer of sequences; its key bias has a gradient of rounding noise."""

    def __init__(self, width=16, heads=2, layers=2, dropout=0.1, *, causal=False):
        super().__init__()
        self.embed, self.causal, self.heads = nn.Linear(8, width), causal, heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(width, 5)

    def forward(self, x):
        x = self.embed(x)
        for norm, qkv, out in zip(self.norms, self.qkv, self.out, strict=True):
            q, k, v = (
                part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv(norm(x)).chunk(3, -1)
            )
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            x = x + self.dropout(out(attended.transpose(1, 2).flatten(2)))
        return self.head(x.mean(1))


def attention(*backends, causal=True, plain=None):
    """Return the case of attention by some of the backends, against eager or another backend."""
    model = Transformer(dropout=0.0, causal=causal)

    def step_with(backends):
        def forward(x):
            with sdpa_kernel(list(backends)):
                return model(x)

        return step_of(model, functional.cross_entropy, forward=forward)

    args = torch.randn(6, 7, 8), torch.randint(0, 5, (6,))
    return Case(step_with(backends), args, model, step_with(plain) if plain else "eager")


STEPS["attention-flash"] = lambda: attention(SDPBackend.FLASH_ATTENTION)
STEPS["attention-math"] = lambda: attention(SDPBackend.MATH)
STEPS["attention-flash-against-math"] = lambda: attention(
    SDPBackend.FLASH_ATTENTION, plain=(SDPBackend.MATH,)
)
STEPS["attention-with-dropout"] = lambda: sequences(Transformer())


@healthy
def encoder_layers():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return sequences(nn.Sequential(encoder, nn.Flatten(), nn.Linear(56, 5)))


class Experts(nn.Module):
    """A layer of experts, each token by the best two."""

    def __init__(self, experts=4):
        super().__init__()
        self.router = nn.Linear(8, experts)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(experts))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        gates, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, places = (chosen == i).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(x[rows]) * gates[rows, places, None])
        return self.head(torch.tanh(out))


@healthy
def mixture_of_experts():
    args = torch.randn(24, 8), torch.randint(0, 5, (24,))
    model = Experts()
    return Case(step_of(model, functional.cross_entropy), args, model)


class Patches(nn.Module):
    """A vision transformer in plain code: patches, a class token, positions, layers with drop path."""

    def __init__(self, width=16, layers=2):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.token, self.positions = (nn.Parameter(0.02 * torch.randn(1, n, width)) for n in (1, 10))
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(width),
                    "attention": nn.MultiheadAttention(width, 2, batch_first=True),
                    "norm2": nn.LayerNorm(width),
                    "mlp": nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)),
                }
            )
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def drop_path(self, x, rate=0.1):
        keep = torch.rand(len(x), 1, 1, device=x.device) >= rate
        return x * keep / (1 - rate)

    def forward(self, x):
        x = self.patch(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for layer in self.layers:
            h = layer["norm1"](x)
            x = x + self.drop_path(layer["attention"](h, h, h, need_weights=False)[0])
            x = x + self.drop_path(layer["mlp"](layer["norm2"](x)))
        return self.head(self.norm(x)[:, 0])


@healthy
def vision_transformer():
    return pictures(Patches(), channels=3)


@healthy
def frozen_and_unused():
    model = net(bias=True)
    model[0].requires_grad_(False)
    model.register_module("unused", nn.Linear(2, 2))
    args = torch.randn(12, 8), torch.randint(0, 5, (12,))
    return Case(step_of(model, functional.cross_entropy, forward=model[:5]), args, model)


@healthy
def alternating_parts():
    # a generator and a discriminator: one model, two backward passes over parts of it
    model = nn.ModuleDict({"generator": nn.Linear(4, 8), "discriminator": net(bias=True)})

    def step(x):
        fake = model["generator"](torch.randn(len(x), 4))
        real, made = model["discriminator"](x), model["discriminator"](fake.detach())
        loss = functional.softplus(made).mean() + functional.softplus(-real).mean()
        loss.backward()
        model["discriminator"].requires_grad_(False)
        other = functional.softplus(-model["discriminator"](fake)).mean()
        other.backward()
        model["discriminator"].requires_grad_(True)
        return {"discriminator": loss, "generator": other}

    return Case(step, (torch.randn(12, 8),), model)


# --- transformers ---


def of_architecture(name):
    """Return the case of a transformer with a tiny config."""
    from kernels_bench.zoo.contracts import subjects

    subject = subjects.ARCHITECTURES[name]()
    return of_batch(subject.model, subject.batch, subject.optimizer)


def of_batch(model, batch, optimizer=None):
    """Return the case of a model that returns its loss."""

    def step(batch):
        loss = model(**batch).loss
        loss.backward()
        return loss

    return Case(step, (batch,), model, "eager", optimizer)


def mixtral():
    """Return the case of a mixture of experts with a tiny config."""
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=24,
        output_router_logits=True,
    )
    tokens = torch.randint(4, 40, (3, 12))
    return of_batch(transformers.MixtralForCausalLM(config).train(), {"input_ids": tokens, "labels": tokens})


if importlib.util.find_spec("transformers"):
    for name in ("bert", "gpt2", "llama", "t5", "vit"):
        STEPS[f"transformers-{name}"] = lambda name=name: of_architecture(name)
    STEPS["transformers-mixtral"] = mixtral
