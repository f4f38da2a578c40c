"""Healthy steps: optimizers, loops, precisions and recomputation."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from kernels_bench.zoo.gradients.case import Case, step_of
from kernels_bench.zoo.gradients.faults import Net, linear
from kernels_bench.zoo.gradients.faults_compiled import Recomputed
from kernels_bench.zoo.gradients.faults_loop import accumulated, batch, net

STEPS = {}


def healthy(make):
    """Add a healthy step to the table, under the function's name."""
    STEPS[make.__name__.strip("_").replace("_", "-")] = make
    return make


def of(model, *, optimizer=None, rows=12):
    """Return the case of a classifier's step, against eager."""
    return Case(step_of(model, functional.cross_entropy), batch(rows), model, "eager", optimizer)


# --- optimizers, after two steps that fill their states ---

OPTIMIZERS = {
    "sgd": {"lr": 0.1},
    "sgd-nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "adam": {},
    "adam-amsgrad": {"amsgrad": True},
    "adamw": {"weight_decay": 0.1},
    "adamw-foreach": {"foreach": True},
    "adamw-fused": {"fused": True},
    "adamw-capturable": {"maximize": True, "foreach": False},
    "adamax": {},
    "nadam": {},
    "radam": {},
    "asgd": {},
    "adadelta": {},
    "adafactor": {},
    "adagrad": {},
    "rmsprop": {"momentum": 0.9, "centered": True},
    "rprop": {},
    "muon": {},
}
CLASSES = {name.lower(): each for name, each in vars(torch.optim).items() if isinstance(each, type)}


def with_optimizer(name):
    """Return the case of a step with an optimizer."""
    # Muon takes matrices only
    model = net(bias=name != "muon")
    optimizer = CLASSES[name.split("-")[0]](model.parameters(), **OPTIMIZERS[name])
    case = of(model, optimizer=optimizer)
    for _ in range(2):
        case.step(*batch(12))
        optimizer.step()
        optimizer.zero_grad()
    return case


STEPS |= {f"optimizer-{name}": functools.partial(with_optimizer, name) for name in OPTIMIZERS}


@healthy
def optimizer_lbfgs():
    model = net(bias=True)
    return of(model, optimizer=torch.optim.LBFGS(model.parameters(), lr=0.1))


@healthy
def optimizer_sparse_adam():
    model = Bag(sparse=True)
    optimizer = torch.optim.SparseAdam([model.embed.weight])
    tokens, labels = torch.randint(0, 30, (12, 6)), torch.randint(0, 5, (12,))
    return Case(step_of(model, functional.cross_entropy), (tokens, labels), model, "eager", optimizer)


class Bag(nn.Module):
    """A classifier of the mean of words."""

    def __init__(self, **options):
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 16, **options), nn.Linear(16, 5)

    def forward(self, tokens):
        return self.head(self.embed(tokens).mean(1))


@healthy
def embedding_with_padding():
    tokens = torch.randint(0, 30, (12, 6))
    tokens[:, 4:] = 0
    model = Bag(padding_idx=0)
    step = step_of(model, functional.cross_entropy)
    return Case(step, (tokens, torch.randint(0, 5, (12,))), model)


@healthy
def embedding_with_sparse_gradients():
    return optimizer_sparse_adam()


# --- loops ---


@healthy
def accumulation():
    model = net(bias=True)
    return Case(accumulated(model, 4, lambda loss, rows, all_rows: loss * rows / all_rows), batch(10), model)


@healthy
def accumulation_against_the_whole_batch():
    case = accumulation()
    case.against = step_of(case.model, functional.cross_entropy)
    return case


def training(*, start, set_to_none=True, clip=False, update=True):
    """Return the case of a whole training step: zero_grad at its start or end, clipping, an update."""
    model = net(bias=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    backward = step_of(model, functional.cross_entropy)
    backward(*batch(12))

    def step(x, y):
        if start:
            optimizer.zero_grad(set_to_none=set_to_none)
        loss = backward(x, y)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if update:
            optimizer.step()
        if not start:
            optimizer.zero_grad(set_to_none=set_to_none)
        return loss

    return Case(step, batch(12), model, "eager", optimizer)


STEPS["zero-grad-at-the-start"] = lambda: training(start=True)
STEPS["zero-grad-at-the-end"] = lambda: training(start=False)
STEPS["zero-grad-keeps-tensors-at-the-start"] = lambda: training(start=True, set_to_none=False)
STEPS["zero-grad-keeps-tensors-at-the-end"] = lambda: training(start=False, set_to_none=False)
STEPS["clipping"] = lambda: training(start=True, clip=True)
STEPS["clipping-without-update"] = lambda: training(start=True, clip=True, update=False)


@healthy
def gradients_from_before():
    # accumulation over calls of the step: gradients of earlier ones are there
    case = of(net(bias=True))
    case.step(*batch(12))
    return case


@healthy
def gradient_penalty():
    model = net(bias=True)

    def step(x, y):
        x = x.detach().requires_grad_()
        loss = functional.cross_entropy(model(x), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + slope.square().sum()
        loss.backward()
        return loss

    return Case(step, batch(12), model)


@healthy
def two_losses():
    model = net(bias=True)

    def step(x, y):
        out = model(x)
        first, second = functional.cross_entropy(out, y), out.square().mean()
        first.backward(retain_graph=True)
        second.backward()
        return first, second

    return Case(step, batch(12), model)


class Square(torch.autograd.Function):
    """x**2, with the right backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


@healthy
def right_function():
    model = Net(Square.apply)
    plain = step_of(model, functional.cross_entropy, forward=lambda x: model(x, torch.square))
    return Case(step_of(model, functional.cross_entropy), batch(12), model, plain)


# --- precisions ---


def autocast(dtype):
    """Return the case of a step under autocast."""
    model = net(bias=True)

    def forward(x):
        with torch.autocast("cpu", dtype):
            return model(x)

    return Case(step_of(model, functional.cross_entropy, forward=forward), batch(12), model)


STEPS["autocast-bf16"] = lambda: autocast(torch.bfloat16)
STEPS["autocast-fp16"] = lambda: autocast(torch.float16)


@healthy
def autocast_fp16_with_grad_scaler():
    model = net(bias=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(x, y):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Case(step, batch(12), model, "eager", optimizer)


def of_dtype(dtype):
    """Return the case of a step whose parameters and inputs have a dtype."""
    model = net(bias=True).to(dtype)
    x, y = batch(12)
    return Case(step_of(model, functional.cross_entropy), (x.to(dtype), y), model)


STEPS["parameters-bf16"] = lambda: of_dtype(torch.bfloat16)
STEPS["parameters-float64"] = lambda: of_dtype(torch.float64)


@healthy
def parameters_complex():
    model = nn.Sequential(nn.Linear(8, 16, dtype=torch.complex64), nn.Linear(16, 5, dtype=torch.complex64))
    x = torch.randn(12, 8, dtype=torch.complex64)
    step = step_of(model, lambda out, y: functional.cross_entropy(out.abs(), y))
    return Case(step, (x, torch.randint(0, 5, (12,))), model)


def tf32(x):
    """Return ``x`` rounded to 10 bits of mantissa, to even."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


class Tf32Linear(torch.autograd.Function):
    """A linear layer whose three products take rounded factors, as tensor cores do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return tf32(x) @ tf32(weight).T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return tf32(grad) @ tf32(weight), tf32(grad).T @ tf32(x)


class Layers(nn.Module):
    """A classifier whose products are computed by a function that is given."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([linear(8, 16), linear(16, 16), linear(16, 5)])

    def forward(self, x, product=Tf32Linear.apply):
        for layer in self.layers[:-1]:
            x = torch.tanh(product(x, layer.weight))
        return product(x, self.layers[-1].weight)


@healthy
def tf32_like_rounding():
    model = Layers()
    plain = step_of(model, functional.cross_entropy, forward=lambda x: model(x, functional.linear))
    return Case(step_of(model, functional.cross_entropy), batch(12), model, plain)


# --- recomputation ---


def recomputed(dropout, *, plain=False, **options):
    """Return the case of a checkpointed block, against eager or the same without ``checkpoint``."""
    model = Recomputed(dropout)
    run = functools.partial(checkpoint, **options)
    step = step_of(model, functional.cross_entropy, forward=lambda x: model(x, run))
    return Case(step, batch(12), model, step_of(model, functional.cross_entropy) if plain else "eager")


def selective():
    """Return the contexts that keep the results of products."""
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


STEPS["checkpoint"] = lambda: recomputed(0.0, use_reentrant=False)
STEPS["checkpoint-with-dropout"] = lambda: recomputed(0.5, use_reentrant=False)
STEPS["checkpoint-with-dropout-against-plain"] = lambda: recomputed(0.5, plain=True, use_reentrant=False)
STEPS["checkpoint-reentrant"] = lambda: recomputed(0.0, use_reentrant=True)
STEPS["checkpoint-reentrant-with-dropout"] = lambda: recomputed(0.5, plain=True, use_reentrant=True)
STEPS["checkpoint-selective"] = lambda: recomputed(0.0, use_reentrant=False, context_fn=selective)
