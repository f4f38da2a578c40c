"""More healthy kinds of run, in which no fault is planted. Import it to add them to the table of kinds."""

from __future__ import annotations

import copy

import torch
from torch.optim import SGD, Adafactor, Adam, AdamW, RMSprop

from kernels_bench.zoo.optimizers import Lion, cosine, stairs
from kernels_bench.zoo.transformers import models, tasks
from kernels_bench.zoo.transformers.kinds import KINDS, falling, grouped, kind, pretrained
from kernels_bench.zoo.transformers.loop import Loop

PLANTED = tuple(KINDS)


def small_gpt(optimizer, *, model=None, task=None, **rest):
    """Return a loop of a GPT and the optimizer that ``optimizer`` returns for it."""
    model = models.GPT() if model is None else model
    rest = {"schedule": falling(150), "clip": 1.0, **rest}
    return Loop(model, optimizer(model), task or tasks.causal(), **rest)


def adamw(model):
    """Return AdamW of two groups."""
    return AdamW(grouped(model), 4e-3)


@kind
def gpt_rmsprop():
    return small_gpt(lambda model: RMSprop(model.parameters(), 1e-3))


@kind
def gpt_adafactor():
    return small_gpt(lambda model: Adafactor(model.parameters(), 1e-2))


@kind
def gpt_nesterov():
    return small_gpt(lambda model: SGD(model.parameters(), 0.3, momentum=0.9, nesterov=True), clip=0.5)


@kind
def gpt_lion():
    return small_gpt(lambda model: Lion(model.parameters(), 5e-4, weight_decay=0.1))


@kind
def gpt_constant_rate():
    return small_gpt(lambda model: Adam(model.parameters(), 2e-3), schedule=lambda _: 1.0, clip=None)


@kind
def gpt_steps_of_the_rate():
    return small_gpt(adamw, schedule=stairs(80, 120))


@kind
def gpt_recomputed():
    return small_gpt(adamw, model=models.GPT(recompute=True))


@kind
def gpt_label_smoothing():
    return small_gpt(adamw, smoothing=0.1)


@kind
def gpt_batch_of_4():
    return small_gpt(adamw, task=tasks.causal(4))


@kind
def gpt_dropout_of_0_4():
    return small_gpt(adamw, model=models.GPT(dropout=0.4))


@kind
def gpt_padded():
    return small_gpt(adamw, task=tasks.causal(padded=True))


@kind
def gpt_ema_aside():
    t = small_gpt(adamw)
    average = copy.deepcopy(t.model).requires_grad_(requires_grad=False)

    def follow():
        for mean, p in zip(average.parameters(), t.model.parameters(), strict=True):
            mean.lerp_(p.detach(), 0.05)

    t.after.append(follow)
    return t


@kind
def gpt_skipped_by_the_scaler():
    # the scale is found in the first steps
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    return small_gpt(adamw, scaler=scaler, autocast=torch.float16, steps=120)


@kind
def llama_accumulation():
    task = tasks.causal(8, tasks.PAIRS)
    return small_gpt(adamw, model=models.GPT(rotary=True), task=task, accumulate=2, steps=120)


@kind
def bert_pre_norm():
    model = models.BERT(pre=True)
    return Loop(model, AdamW(grouped(model), 3e-3), tasks.masked(), schedule=falling(150, 20))


@kind
def bert_frozen_embeddings():
    model = models.BERT()
    model.embed.requires_grad_(requires_grad=False)
    optimizer = AdamW(grouped(model, 0.01), 3e-3)
    return Loop(model, optimizer, tasks.masked(), schedule=falling(150, 20), clip=1.0)


@kind
def bert_layerwise_rates():
    model = models.BERT()
    parts = [model.embed, model.norm, *model.blocks, model.transform]
    groups = [{"params": part.parameters(), "lr": 4e-3 * 0.7 ** (4 - i)} for i, part in enumerate(parts)]
    groups.append({"params": [model.head.bias]})
    return Loop(model, AdamW(groups, 4e-3), tasks.masked(), schedule=falling(150, 20), clip=1.0)


@kind
def t5_dropout():
    model = models.T5(dropout=0.1)
    return Loop(model, AdamW(grouped(model), 4e-3), tasks.translated(), schedule=falling(150, 20), clip=1.0)


@kind
def t5_bf16_resumed():
    model = models.T5()
    rest = {"schedule": falling(150, 20), "clip": 1.0, "autocast": torch.bfloat16, "resume": 80}
    return Loop(model, AdamW(grouped(model), 4e-3), tasks.translated(), **rest)


@kind
def vit_cosine_to_0():
    model = models.ViT(dropout=0.1)
    return Loop(model, AdamW(grouped(model, 0.3), 2e-3), tasks.images(), schedule=cosine(149))


@kind
def vit_sgd():
    model = models.ViT()
    return Loop(model, SGD(model.parameters(), 0.03, momentum=0.9), tasks.images(), schedule=falling(150))


@kind
def lora_resumed():
    model = models.GPT()
    model.load_state_dict(pretrained())
    models.adapted(model, rank=2)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return Loop(model, AdamW(parameters, 5e-3), tasks.causal(dialect=1), steps=120, resume=60)
