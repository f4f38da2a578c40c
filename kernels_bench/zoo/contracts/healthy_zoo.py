"""The healthy kinds of the other two families: each model, one of its batches, and its loop's loss."""

from __future__ import annotations

import functools

from torch import nn

from kernels_bench.zoo import healthy as training
from kernels_bench.zoo.contracts.subjects import Subject
from kernels_bench.zoo.transformers import healthy as transformers

# which of the second family's models are causal; an encoder with a decoder is neither
CAUSAL = {"gpt": True, "llama": True, "lora": True, "bert": False}
# those that have been trained before
PRETRAINED = ("lora", "lora-resumed", "gpt-lora", "cnn-frozen-batch-norm", "cnn-progressive-unfreezing")


def pretrained(name):
    """Return the option of a kind that has been trained before."""
    return {"pretrained": True} if name in PRETRAINED else {}


def of_loop(name):
    """Return a subject of a kind of transformer."""
    loop = transformers.KINDS[name]()

    def forward(model, batch):
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        with loop.casting():
            return model(**inputs)

    def loss(model, batch):
        loop.model = model
        return loop.loss(batch)

    options = {"forward": forward, "loss": loss} | pretrained(name)
    causal = CAUSAL.get(name.split("-")[0])
    if causal is not None:
        options["causal"] = causal
    return Subject(loop.model, loop.batch(), loop.optimizer, options)


def of_training(name):
    """Return a subject of a kind of the first family, whose losses are closures over their model."""
    t = training.KINDS[name]()

    def loss(model, batch):
        # those of a GAN freeze the other part
        flags = [(p, p.requires_grad) for p in model.parameters()]
        total = sum(part(*batch) for part in t.losses)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        return total

    def forward(model, batch):
        # what the losses call
        parts = model.children() if isinstance(model, nn.ModuleDict) else [model]
        seen = []
        hooks = [part.register_forward_hook(lambda _, __, out: seen.append(out)) for part in parts]
        try:
            loss(model, batch)
        finally:
            for hook in hooks:
                hook.remove()
        return seen[0] if len(seen) == 1 else tuple(seen)

    optimizer = t.optimizers[0] if len(t.optimizers) == 1 else list(t.optimizers)
    return Subject(t.model, t.batch(), optimizer, {"forward": forward, "loss": loss} | pretrained(name))


MODELS = {f"loop-{name}": functools.partial(of_loop, name) for name in transformers.KINDS}
MODELS |= {f"training-{name}": functools.partial(of_training, name) for name in training.KINDS}
