"""The demo: a small training run whose gradients are watched, and two faults that are named.

``python -m gradiometer.demo`` trains a character-level transformer on the sources of Python's own
standard library. Forward, backward, gradient statistics and AdamW are one compiled graph. Then an Inf
is put into one gradient, later the learning rate is raised a thousandfold, and the tensors where it
shows are named with their step. Every figure is measured in the run; a failed check exits with 1.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
import warnings
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import gradiometer as gm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Model", "corpus", "main"]

VOCABULARY: Final = 128
CHARACTERS: Final = 2**20
WIDTH: Final = 192
HEADS: Final = 6
LAYERS: Final = 3
CONTEXT: Final = 64
BATCH: Final = 8
CULPRIT: Final = "blocks.1.up.weight"
LR: Final = 2e-3
LR_JUMP: Final = 1000
MIN_STEPS: Final = 10
MAX_STEPS_AFTER_JUMP: Final = 60
TIMING_ROUNDS: Final = 60
TIMING_SECONDS: Final = 12.0
SHOWN: Final = 3

# operators that make the host wait for a value of the device
SYNCS: Final = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique"}


def corpus(characters: int = CHARACTERS) -> Tensor:
    """Return the text of Python's standard library, ``(characters,) uint8`` below 128.

    The top-level modules in the order of their names; what is not ASCII reads as 127.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    # names with an underscore first differ from build to build
    files = sorted(folder.glob("[a-z]*.py"))
    text = b"".join(file.read_bytes() for file in files)[:characters]
    if len(text) < characters:
        raise RuntimeError(
            f"the demo's text is {characters:,} characters of Python's own sources, and {folder} has"
            f" {len(text):,}: run it with a Python that has its .py files"
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).clamp(max=VOCABULARY - 1)


class Block(nn.Module):
    """Attention, then an MLP, each behind a LayerNorm and around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, S, D) -> (B, S, D)``."""
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A character-level transformer of 1.4 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """``(B, S) -> (B, S, VOCABULARY)``."""
        x = self.embed(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class SyncProbe(TorchDispatchMode):
    """Counts operators, and those among them that wait for the device or copy from it to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0
        self.collections = 0
        self.syncs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operator and run it."""
        result = func(*args, **(kwargs or {}))
        namespace, name = func.name().split(".")[0].split("::")
        self.operators += 1
        self.collections += namespace == "gradiometer"
        leaves = [x for x in (*args, result) if isinstance(x, Tensor)]
        to_host = isinstance(result, Tensor) and result.is_cpu and any(not x.is_cpu for x in leaves)
        self.syncs += name in SYNCS or to_host
        return result


class Backend:
    """A backend of torch.compile that counts the graphs it is given, and can run them under a probe."""

    def __init__(self, name: str) -> None:
        self.graphs = 0
        self.probe: SyncProbe | None = None
        self._compile: Callable[..., Any] = torch._dynamo.lookup_backend(name)  # noqa: SLF001

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        """Compile one graph."""
        self.graphs += 1
        compiled = self._compile(graph, inputs)

        def run(*args: Any) -> Any:
            # inside the compiled region: torch.compile itself refuses to run under a dispatch mode
            with self.probe or nullcontext():
                return compiled(*args)

        return run


Step = tuple[Tensor, gm.TensorStats | None]


class Training:
    """The model, the optimizer's state and the text, on one device; and the step, with and without collection."""

    def __init__(self, device: torch.device, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Model().to(device)
        self.parameters = list(self.model.parameters())
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.parameters]
        self.count = torch.zeros((), device=device)
        self.text = corpus().to(device)
        self.generator = torch.Generator(device).manual_seed(seed)
        # inputs of the step, so that nothing is compiled again when their values change
        self.lr = torch.tensor(LR, device=device)
        self.fault = torch.zeros_like(self.model.get_parameter(CULPRIT))

    def batch(self) -> tuple[Tensor, Tensor]:
        """Draw tokens and the tokens that follow them, ``(BATCH, CONTEXT) int64`` each."""
        device = self.text.device
        start = torch.randint(
            len(self.text) - CONTEXT, (BATCH, 1), generator=self.generator, device=device
        )
        piece = self.text[start + torch.arange(CONTEXT + 1, device=device)].long()
        return piece[:, :-1], piece[:, 1:]

    def compiled(self, backend: Backend, *, collect: bool) -> Callable[[], Step]:
        """Return a training step: one graph of forward, backward, statistics and update."""

        def step(tokens: Tensor, targets: Tensor, lr: Tensor, fault: Tensor) -> Step:
            logits = self.model(tokens)
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            culprit = self.model.get_parameter(CULPRIT)
            culprit.grad = fault if culprit.grad is None else culprit.grad + fault
            stats = gm.collect_grads(self.model) if collect else None
            self.update(lr, skip=stats.found_inf > 0 if stats else None)
            return loss.detach(), stats

        compiled: Callable[..., Step] = torch.compile(step, fullgraph=True, backend=backend)
        return lambda: compiled(*self.batch(), self.lr, self.fault)

    @torch.no_grad()
    def update(self, lr: Tensor, skip: Tensor | None) -> None:
        """AdamW, written out. Where ``skip`` is true nothing changes, and the host need not know."""
        count = self.count + 1
        new = [(self.count, count)]
        for p, (first, second) in zip(self.parameters, self.moments, strict=True):
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            mean = first.lerp(grad, 0.1)
            square = second.lerp(grad * grad, 0.01)
            change = (mean / (1 - 0.9**count)) / ((square / (1 - 0.99**count)).sqrt() + 1e-8)
            new += [(p, p * (1 - 0.01 * lr) - lr * change), (first, mean), (second, square)]
            p.grad = None
        for old, value in new:
            old.copy_(value if skip is None else torch.where(skip, old, value))

    def state(self) -> list[Tensor]:
        """Return everything that a step changes: weights, moments, step count."""
        return [*self.parameters, *(m for pair in self.moments for m in pair), self.count]

    def snapshot(self) -> list[Tensor]:
        """Copy that state."""
        return [x.detach().clone() for x in self.state()]

    @torch.no_grad()
    def restore(self, snapshot: list[Tensor]) -> None:
        """Put a copied state back."""
        for x, saved in zip(self.state(), snapshot, strict=True):
            x.copy_(saved)


@dataclass(frozen=True)
class Record:
    """What the host learnt of one step."""

    step: int
    report: gm.Report

    @property
    def finite(self) -> bool:
        """Whether every gradient was."""
        return not (self.report.nan or self.report.inf)


class Run:
    """Runs watched steps, shows them, and keeps a record of each."""

    def __init__(self, step: Callable[[], Step], every: int) -> None:
        self.step = step
        self.records: list[Record] = []
        self._next = 0
        self._pending: deque[tuple[int, gm.Pending]] = deque()
        self._tty = sys.stdout.isatty()
        self._every = 5 if self._tty else every

    def advance(self, steps: int, *, until_nonfinite: bool = False) -> list[Record]:
        """Run steps and return their records; reports are read when they have arrived, never waited for."""
        first, since, shown = len(self.records), time.perf_counter(), self._next
        for last in range(self._next + steps - 1, self._next - 1, -1):
            loss, stats = self.step()
            ...
