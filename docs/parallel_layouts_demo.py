"""Train a model in one process, and on two ranks with DDP, FSDP2 and tensor parallelism: is it the same?

    python docs/parallel_layouts_demo.py

All runs record projections of gradients and weights, which `gm.compare_runs` turns into distances. One more
run with tensor parallelism has a fault in one layer: the gradient of its input is not added up over ranks.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import gradiometer as gm

STEPS, BATCH, LENGTH = 20, 8, 6
WORDS, WIDTH = 31, 24
LAYOUTS = ("one process", "DDP", "FSDP2", "tensor parallelism")
FAULT = "tensor parallelism with a fault"
BROKEN, BEFORE = "blocks.1.up", "blocks.1.norm"


class Up(nn.Linear):
    """A linear layer whose output features may be sharded, written by hand."""

    adds_up = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by this rank's rows of the weight."""
        if not isinstance(x, DTensor):
            return super().forward(x)
        # each rank has only its rows' share of the gradient of `x`: it is partial
        grad_placements = [Partial()] if self.adds_up else [Replicate()]
        local = x.to_local(grad_placements=grad_placements)
        y = nn.functional.linear(local, self.weight.to_local(), self.bias.to_local())
        return DTensor.from_local(y, x.device_mesh, [Shard(-1)], run_check=False)


class Block(nn.Module):
    """A norm and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = Up(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the MLP's output."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        y = self.head(self.norm(self.blocks(self.embed(x))))
        return nn.functional.cross_entropy(y.flatten(0, 1), target.flatten())


def laid_out(model: Model, layout: str) -> nn.Module:
    """Return the model in a layout of two ranks."""
    mesh = init_device_mesh("cpu", (2,))
    if layout == "DDP":
        return nn.parallel.DistributedDataParallel(model)
    if layout == "FSDP2":
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    model.get_submodule(BROKEN).adds_up = layout != FAULT
    return parallelize_module(model, mesh, plan)


def train(layout: str, folder: Path) -> None:
    """Record a run with SGD; data-parallel ranks have half of each batch."""
    # the same weights in each process
    torch.manual_seed(0)
    model: nn.Module = Model()
    shares, rank = 1, 0
    if layout != LAYOUTS[0]:
        model = laid_out(model, layout)
    if layout in {"DDP", "FSDP2"}:
        shares, rank = 2, dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(1)
    with gm.Monitor(model, run_dir=folder / layout, weights=True, projections=32, rules=()) as monitor:
        for _ in range(STEPS):
            words = torch.randint(0, WORDS, (BATCH, LENGTH), generator=data)
            x, target = [part.chunk(shares)[rank] for part in (words, words.roll(1, dims=1))]
            loss = model(x, target)
            loss.backward()
            monitor.record()
            optimizer.step()
            optimizer.zero_grad()
            monitor.advance(loss=loss.detach())


def train_as_rank(rank: int, folder: Path) -> None:
    """Record the runs of two ranks, in one of two processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    for layout in (*LAYOUTS[1:], FAULT):
        train(layout, folder)
    dist.destroy_process_group()


def main() -> None:
    """Compare each run with that of one process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(LAYOUTS[0], folder)
        torch.multiprocessing.spawn(train_as_rank, args=(folder,), nprocs=2)
        found = {}
        for layout in (*LAYOUTS[1:], FAULT):
            result = gm.compare_runs(folder / LAYOUTS[0], folder / layout)
            sys.stdout.write(f"{layout}: {result.apart}\n")
            found[layout] = result.distances and result.distances.departure
    faulty = found.pop(FAULT)
    # the first tensors in backward order that the gradient of this layer's input reaches
    if any(found.values()) or faulty is None or not faulty.name.startswith(BEFORE):
        sys.exit("not as expected")


if __name__ == "__main__":
    main()
