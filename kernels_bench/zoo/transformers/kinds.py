"""The kinds of run in which faults are planted, all healthy: each is a function that returns a new `Loop`."""

from __future__ import annotations

import functools
import zlib

import torch
from torch.optim import SGD, AdamW

from kernels_bench.zoo.optimizers import cosine, warm_up
from kernels_bench.zoo.transformers import models, tasks
from kernels_bench.zoo.transformers.loop import Loop, train

KINDS = {}


def kind(make):
    """Add a kind to the table, under the function's name."""
    KINDS[make.__name__.replace("_", "-")] = make
    return make


def start(name, seed):
    """Return a new loop of a kind; ``seed`` decides its weights and batches."""
    torch.manual_seed(zlib.crc32(name.encode()) + seed)
    return KINDS[name]()


def grouped(model, decay=0.1):
    """Return two groups of parameters: matrices, which decay, and vectors, which do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def falling(steps, warm=10, least=0.1):
    """Return a warm-up and a cosine."""
    return warm_up(warm, lambda step: cosine(steps, start=warm, least=least)(min(step, steps)))


@kind
def gpt():
    model = models.GPT()
    optimizer = AdamW(grouped(model), 5e-3)
    return Loop(model, optimizer, tasks.causal(), schedule=falling(150), clip=1.0)


@kind
def gpt_dropout():
    model = models.GPT(dropout=0.1)
    return Loop(model, AdamW(grouped(model), 5e-3), tasks.causal(), schedule=falling(150))


@kind
def gpt_tied():
    model = models.GPT(tied=True)
    return Loop(model, AdamW(grouped(model), 5e-3), tasks.causal(), schedule=falling(150), clip=1.0)


@kind
def gpt_sgd():
    model = models.GPT()
    optimizer = SGD(model.parameters(), 1.0, momentum=0.9)
    return Loop(model, optimizer, tasks.causal(), schedule=falling(180), steps=180, clip=0.5)


@kind
def gpt_accumulation():
    model = models.GPT()
    optimizer = AdamW(grouped(model), 5e-3)
    return Loop(
        model, optimizer, tasks.causal(8), steps=120, schedule=falling(120, least=0.0), accumulate=3, clip=1.0
    )


@kind
def gpt_resumed():
    model = models.GPT()
    optimizer = AdamW(grouped(model), 5e-3)
    return Loop(
        model, optimizer, tasks.causal(), steps=150, schedule=falling(150, least=0.01), clip=1.0, resume=90
    )


@kind
def gpt_fp16():
    model = models.GPT()
    optimizer = AdamW(grouped(model), 5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    rest = {"clip": 1.0, "scaler": scaler, "autocast": torch.float16}
    return Loop(model, optimizer, tasks.causal(), steps=120, schedule=falling(120), **rest)


@kind
def gpt_fp16_sgd():
    model = models.GPT()
    optimizer = SGD(model.parameters(), 1.0, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    rest = {"clip": 0.5, "scaler": scaler, "autocast": torch.float16}
    return Loop(model, optimizer, tasks.causal(), steps=150, schedule=falling(150), **rest)


@kind
def llama():
    model = models.GPT(rotary=True)
    return Loop(
        model, AdamW(grouped(model), 5e-3), tasks.causal(scales=tasks.PAIRS), schedule=falling(150), clip=1.0
    )


@kind
def llama_bf16():
    model = models.GPT(rotary=True)
    optimizer = AdamW(grouped(model), 5e-3)
    rest = {"clip": 1.0, "autocast": torch.bfloat16}
    return Loop(model, optimizer, tasks.causal(scales=tasks.PAIRS), steps=130, schedule=falling(130), **rest)


@kind
def bert():
    model = models.BERT()
    optimizer = AdamW(grouped(model, 0.01), 4e-3)
    return Loop(model, optimizer, tasks.masked(), steps=180, schedule=falling(180, 20), clip=1.0)


@kind
def bert_long_padding():
    model = models.BERT(dropout=0.1)
    optimizer = AdamW(grouped(model, 0.01), 4e-3)
    return Loop(model, optimizer, tasks.masked(32, least=3), steps=160, schedule=falling(160, 20), clip=1.0)


@kind
def t5():
    model = models.T5()
    optimizer = AdamW(grouped(model), 5e-3)
    return Loop(model, optimizer, tasks.translated(), steps=200, schedule=falling(200, 20), clip=1.0)


@kind
def vit():
    model = models.ViT()
    return Loop(model, AdamW(grouped(model), 2e-3), tasks.images(), schedule=falling(150))


@kind
def vit_batch_norm():
    model = models.ViT(dropout=0.1, batch_norm=True)
    return Loop(model, AdamW(grouped(model), 2e-3), tasks.images(), schedule=falling(150), clip=1.0)


@functools.cache
def pretrained():
    """Return the weights of a GPT that has learned the tokens of another dialect."""

    def make():
        model = models.GPT()
        schedule = falling(150, least=0.0)
        return Loop(model, AdamW(model.parameters(), 5e-3), tasks.causal(dialect=0), schedule=schedule)

    state = torch.get_rng_state()
    torch.manual_seed(5)
    loop, _, _ = train(make)
    torch.set_rng_state(state)
    return loop.model.state_dict()


@kind
def lora():
    model = models.GPT()
    model.load_state_dict(pretrained())
    models.adapted(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = AdamW(parameters, 1e-2)
    return Loop(model, optimizer, tasks.causal(dialect=1), steps=120, schedule=falling(120), clip=1.0)
