"""A small model, trained for one step alone or with each way to share it: the gradients are the same.

A builder runs on every rank, does forward and backward over its share of the batch, and returns its part of
the model with gradients, on torch's default device. Names are those of the whole model. The numbers of rows
are not multiples of the number of ranks, and some tensors have fewer rows than ranks.
"""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

import gradiometer as gm

# only tensor parallelism needs a size that is divisible, HIDDEN
WORDS, WIDTH, HIDDEN, CLASSES = 13, 5, 12, 3
BATCH, LENGTH = 8, 4
# embedding, LayerNorm and two Linear in each of two layers, LayerNorm, Linear
NUM_TENSORS = 1 + 2 * 6 + 2 + 2
# builders that all take a dtype
BUILDERS = ("plain", "ddp", "fsdp", "hsdp", "tp", "fsdp_tp")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """A pipeline stage has some of these parts, with the same names."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({"0": Block(), "1": Block()})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def whole(dtype):
    """Return the model, the same on every rank."""
    model = Model().to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            shape = parameter.shape
            parameter.copy_(torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu"))
    return model


def batch():
    """Return words and their targets; two words do not occur, so that their gradients are 0."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(0, WORDS - 2, (BATCH, LENGTH), generator=generator, device="cpu")
    target = torch.randint(0, CLASSES, (BATCH, LENGTH), generator=generator, device="cpu")
    return x.to(torch.get_default_device()), target.to(torch.get_default_device())


def loss_of(y, target):
    return nn.functional.cross_entropy(y.flatten(0, 1), target.flatten())


def backward(model, place=0, places=1):
    """Train on a share of the batch; the mean over equal shares is the mean over the batch."""
    x, target = (part.chunk(places)[place] for part in batch())
    loss_of(model(x), target).backward()
    return model


# builders: (rank, size, dtype) -> this rank's part of the model, with gradients


@functools.cache
def mesh_of(shape, names):
    """Return the mesh; its groups are made once per process."""
    return init_device_mesh(torch.get_default_device().type, shape, mesh_dim_names=names)


def alone(dtype):
    return backward(whole(dtype))


def plain(_rank, _size, dtype):
    return alone(dtype)


def ddp(rank, size, dtype):
    return backward(nn.parallel.DistributedDataParallel(whole(dtype)), rank, size)


def sharded(model, mesh):
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp(rank, size, dtype):
    return backward(sharded(whole(dtype), mesh_of((size,), ("dp_shard",))), rank, size)


def hsdp(rank, size, dtype):
    mesh = mesh_of((size // 2, 2), ("dp_replicate", "dp_shard"))
    return backward(sharded(whole(dtype), mesh), rank, size)


def over_tensors(model, mesh):
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.norm": SequenceParallel(),
        "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, plan)


def tp(_rank, size, dtype):
    return backward(over_tensors(whole(dtype), mesh_of((size,), ("tp",))))


def fsdp_tp(_rank, size, dtype):
    mesh = mesh_of((size // 2, 2), ("dp_shard", "tp"))
    model = sharded(over_tensors(whole(dtype), mesh["tp"]), mesh["dp_shard"])
    return backward(model, mesh.get_local_rank("dp_shard"), size // 2)


def stage_of(model, place):
    """Delete all but the first or the second half of the model."""
    del model.layers[str(1 - place)]
    if place == 0:
        model.norm = model.head = None
    else:
        model.embed = None
    return model


def pipelined(model, place, group, share=0, shares=1):
    """Train a stage with torch's own schedule and two micro-batches."""
    x, target = (part.chunk(shares)[share] for part in batch())
    # torch compares the schedules of processes as pickled objects, with a warning
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stage = PipelineStage(model, place, 2, torch.get_default_device(), group=group)
        schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=loss_of)
        if place == 0:
            schedule.step(x)
        else:
            schedule.step(target=target)
    return model


def pipeline(rank, _size, dtype):
    return pipelined(stage_of(whole(dtype), rank), rank, dist.group.WORLD)


def pipeline_fsdp(_rank, size, dtype):
    mesh = mesh_of((2, size // 2), ("pp", "dp_shard"))
    place, share = mesh.get_coordinate()
    model = sharded(stage_of(whole(dtype), place), mesh["dp_shard"])
    return pipelined(model, place, mesh.get_group("pp"), share, size // 2)


def names_and_parameters(model):
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return list(model.named_parameters())


def grads_of(model):
    return {name: p.grad for name, p in names_and_parameters(model) if p.grad is not None}


def held(tensor):
    """Return the part that this rank holds, in the tensor's own memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# name -> builder, numbers of ranks, and the collectives that add up partial gradients
KINDS = {
    "plain": (plain, (2,), 0),
    "DDP": (ddp, (2, 4), 0),
    "FSDP2": (fsdp, (2, 4), 0),
    "HSDP": (hsdp, (4,), 0),
    "TP": (tp, (2, 4), 1),
    "FSDP2 x TP": (fsdp_tp, (4,), 0),
    "pipeline": (pipeline, (2,), 0),
    "pipeline x FSDP2": (pipeline_fsdp, (4,), 0),
}
CASES = [(kind, size) for kind, (_, sizes, _) in KINDS.items() for size in sizes]


class Collectives(TorchDispatchMode):
    """Records each collective: its name, and the shapes of its inputs."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            # it is called again as operations on its local shards
            return NotImplemented
        if "c10d" in function.namespace:
            name = function._schema.name.split("::")[1]
            # not the op that waits for a collective, nor the one that wraps its result
            if name != "wait_tensor" and not name.startswith("_wrap"):
                tensors = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
                self.calls.append((name, [(tuple(x.shape), x.dtype) for x in tensors]))
        return function(*args, **(kwargs or {}))


def build(rank, size, how, dtype=torch.float64):
    """Return this rank's part of the model of a builder, with gradients; None if it needs four ranks."""
    return None if size == 2 and how in {"hsdp", "fsdp_tp"} else globals()[how](rank, size, dtype)


def error_of(call, *kinds):
    """Return the message of the RankError that a call raises, or of an error of one of these kinds."""
    with pytest.raises((gm.RankError, *kinds)) as raised:
        call()
    return str(raised.value)
