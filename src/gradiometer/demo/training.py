"""The training of the demo: a character-level transformer, and a compiled step with or without a monitor."""

from __future__ import annotations

import sysconfig
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from gradiometer.demo.progress import progress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradiometer.monitor import Monitor

    # runs a step and returns the loss
    Step = Callable[[], Tensor]

VOCABULARY, CHARACTERS = 128, 2**20
LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 3, 192, 6, 64, 16
LR = 1e-3
FAULTY: Final = "blocks.1.up.weight"
# operators that make the host wait for a value on the device
SYNCS: Final = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2"}


def corpus(characters: int = CHARACTERS) -> Tensor:
    """Return the text of Python's standard library, ``(characters,) uint8`` below 128.

    The text is that of the top-level modules in the order of their names; non-ASCII bytes become 127.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    # names that begin with an underscore differ from build to build
    text = b"".join(file.read_bytes() for file in sorted(folder.glob("[a-z]*.py")))[:characters]
    if len(text) < characters:
        raise FileNotFoundError(
            f"{folder} has {len(text):,} characters of Python source, but the demo needs {characters:,}: "
            "run it with a Python that includes its .py files"
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).clamp(max=VOCABULARY - 1)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return torch.add(x, self.down(gelu(self.up(self.norm2(x)))))


class CharacterTransformer(nn.Module):
    """A small GPT that predicts the next character; the page of the run shows the name of this class."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[_Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a batch."""
        x = self.blocks(self.embed(tokens) + self.position.weight)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Probe(TorchDispatchMode):
    """Counts operators, and the ones that wait for the device or copy from it to the host."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = self.recordings = self.syncs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # an operator that changes its arguments is wrapped, unless Inductor has unwrapped it
        called = args[0] if isinstance(func, HigherOrderOperator) else func
        namespace, name = called.name().split(".")[0].split("::")
        to_host = isinstance(result, Tensor) and result.is_cpu
        from_device = any(isinstance(x, Tensor) and not x.is_cpu for x in args)
        self.operators += 1
        self.recordings += namespace == "gradiometer"
        self.syncs += name in SYNCS or (to_host and from_device)
        return result


class Backend:
    """A backend of torch.compile that counts the graphs it compiles, and can run them under a probe."""

    def __init__(self, name: str) -> None:
        self.graphs = 0
        self.probe: Probe | None = None
        self._compile: Callable[..., Any] = torch._dynamo.lookup_backend(name)  # noqa: SLF001 no public way

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        """Compile a graph; torch.compile calls this."""
        self.graphs += 1
        compiled = self._compile(graph, inputs)

        def run(*args: Any) -> Any:
            # enter the probe here, since torch.compile itself does not run under a dispatch mode
            with self.probe or nullcontext():
                return compiled(*args)

        return run


class Training:
    """Model, optimizer state and text on one device, and the compiled step."""

    def __init__(self, device: torch.device, seed: int) -> None:
        torch.manual_seed(seed)
        self.device = device
        self.model = CharacterTransformer().to(device)
        self.parameters = list(self.model.parameters())
        self.moments = [(torch.zeros_like(p.data), torch.zeros_like(p.data)) for p in self.parameters]
        self.count = torch.zeros((), device=device)
        self.text = corpus().to(device)
        self.generator = torch.Generator(device).manual_seed(seed)
        # inputs of the step, so that a change of their values does not recompile it
        self.lr = torch.tensor(LR, device=device)
        self.fault = torch.zeros_like(self.model.get_parameter(FAULTY).data)

    def compile(self, backend: Backend, monitor: Monitor | None) -> Step:
        """Compile the step and run it once: forward, backward, recording and update in one graph."""
        faulty = self.model.get_parameter(FAULTY)

        def step(tokens: Tensor, targets: Tensor, lr: Tensor, fault: Tensor) -> Tensor:
            loss: Tensor = self.model(tokens, targets)
            loss.backward()
            faulty.grad = fault if faulty.grad is None else faulty.grad + fault
            if monitor is not None:
                monitor.record()
            self._update(lr, None if monitor is None else monitor.skip_step)
            return loss.detach()

        compiled = torch.compile(step, fullgraph=True, backend=backend)
        which = "without" if monitor is None else "with"
        with progress(f"compiling the step {which} the monitor, usually half a minute"):
            compiled(*self._batch(), self.lr, self.fault)

        def take() -> Tensor:
            loss: Tensor = compiled(*self._batch(), self.lr, self.fault)
            if monitor is not None:
                monitor.advance(loss=loss, lr=self.lr)
            return loss

        return take

    def _batch(self) -> tuple[Tensor, Tensor]:
        last = len(self.text) - CONTEXT
        start = torch.randint(last, (BATCH, 1), generator=self.generator, device=self.device)
        piece = self.text[start + torch.arange(CONTEXT + 1, device=self.device)].long()
        return piece[:, :-1], piece[:, 1:]

    @torch.no_grad()
    def _update(self, lr: Tensor, skip: Tensor | None) -> None:
        """Apply AdamW, written out. Where ``skip`` is true nothing changes, without a host sync."""
        count = self.count + 1
        new = [(self.count, count)]
        for p, (first, second) in zip(self.parameters, self.moments, strict=True):
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            mean, square = first.lerp(grad, 0.1), second.lerp(grad * grad, 0.01)
            change = mean / (1 - 0.9**count) / ((square / (1 - 0.99**count)).sqrt() + 1e-8)
            new += [(p, p * (1 - 0.01 * lr) - lr * change), (first, mean), (second, square)]
            p.grad = None
        for old, value in new:
            old.copy_(value if skip is None else torch.where(skip, old, value))

    def wait(self) -> None:
        """Wait until the device has finished its work."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def __str__(self) -> str:
        """Return what trains on what."""
        model, elements = self.model, sum(p.numel() for p in self.parameters)
        return (
            f"Model: {type(model).__name__}, {LAYERS} layers of width {WIDTH} with {HEADS} heads, "
            f"{elements:,} parameters in {len(self.parameters)} tensors.\n"
            f"Data: {len(self.text):,} characters of the source code of Python's standard library, "
            f"in batches of {BATCH} x {CONTEXT}."
        )

    def state(self) -> list[Tensor]:
        """Return all tensors that a step changes."""
        return [self.count, *(p.data for p in self.parameters), *(m for pair in self.moments for m in pair)]
