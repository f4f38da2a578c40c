"""Steps with a planted fault each, and what `gm.locate_nonfinite` has to say about them.

The line of the fault ends with the comment ``# here``.
"""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable


class Fault(NamedTuple):
    name: str
    # returns the model and a step without arguments
    make: Callable[[], tuple[nn.Module, Callable[[], object]]]
    operation: str | None
    module: str | None
    direction: str | None
    forward_operation: str | None = None
    # the operation that made NaN of an Inf
    then: str | None = None
    # a part of the reason
    reason: str = ""
    # what the line is in, if not in `make`
    code: object = None

    @property
    def line(self) -> tuple[str, int, str]:
        """The file, the number and the text of the line."""
        return line_of(self.code or self.make)


def line_of(code) -> tuple[str, int, str]:
    """Return the file of a function or class, and the line in it that ends with ``# here``."""
    lines, first = inspect.getsourcelines(code)
    (place,) = [i for i, line in enumerate(lines) if line.rstrip().endswith("# here")]
    return inspect.getsourcefile(code), first + place, lines[place].strip().removesuffix("# here").strip()


FAULTS: list[Fault] = []


def planted(name, operation, module, direction, *more, **options):
    def add(make):
        FAULTS.append(Fault(name, make, operation, module, direction, *more, **options))
        return make

    return add


class Layer(nn.Module):
    """A linear layer, and what the fault computes from its output."""

    def __init__(self, compute, size=4):
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.compute = compute

    def forward(self, *args):
        x, *more = args
        return self.compute(self.linear(x), *more)  # here


class Stack(nn.Module):
    """Layers, of which number 1 has the fault; its name is ``layers.1``."""

    def __init__(self, compute, wrap=lambda call, x: call(x)):
        super().__init__()
        self.layers = nn.ModuleList([Layer(torch.tanh), Layer(compute), Layer(torch.tanh)])
        self.wrap = wrap

    def forward(self, x):
        for layer in self.layers:
            x = self.wrap(layer, x)
        return x


def stack(compute, x=None, loss=lambda y: y.square().mean(), **options):
    torch.manual_seed(0)
    model = Stack(compute, **options)
    x = torch.randn(3, 4) if x is None else x
    return model, lambda: loss(model(x)).backward()


@planted("log of 0", "aten.log", "layers.1", "forward", None, "aten.mm", reason="-Inf")
def _log():
    def compute(x):
        return torch.log(x.relu())  # here

    return stack(compute)


@planted("0/0 in a norm", "aten.div", "layers.1", "forward", reason="NaN")
def _norm():
    def compute(x):
        x = x * torch.tensor([[1.0], [0.0], [1.0]])
        return x / x.norm(dim=-1, keepdim=True)  # here

    return stack(compute)


@planted(
    *("the gradient of sqrt at 0, in a norm", "aten.div", "layers.1", "backward", "aten.sqrt"), reason="NaN"
)
def _sqrt():
    def compute(x):
        x = x * torch.tensor([[1.0], [0.0], [1.0]])
        norm = x.square().sum(-1, keepdim=True).sqrt()  # here
        return x / (norm + 1e-6)

    return stack(compute)


@planted("fp16 overflow in attention", "aten.bmm", "layers.1", "forward", None, "aten._softmax", reason="Inf")
def _attention():
    def compute(x):
        q = k = (x * 1000).half()
        scores = q[None] @ k[None].mT  # here
        return scores.softmax(-1)[0].float() @ x

    return stack(compute)


@planted(
    "a softmax over a row that is masked completely", "aten._softmax", "layers.1", "forward", reason="NaN"
)
def _masked_row():
    def compute(x):
        scores = x @ x.mT
        mask = torch.tensor([[0, 0, 0], [1, 1, 1], [0, 1, 1]], dtype=torch.bool)
        scores = scores.masked_fill(mask, -math.inf)
        return scores.softmax(-1) @ x  # here

    return stack(compute)


@planted("overflow of exp", "aten.exp", "layers.1", "forward", None, "aten.div", reason="Inf")
def _exp():
    def compute(x):
        e = (x * 1000).exp()  # here
        return e / e.sum(-1, keepdim=True)

    return stack(compute)


@planted("an embedding of index -1", "aten.embedding", "tokens", "forward", reason="IndexError")
def _embedding():
    model = nn.ModuleDict({"tokens": nn.Embedding(10, 4)})
    index = torch.tensor([3, -1])
    return model, lambda: model["tokens"](index).sum().backward()  # here


@planted("division by a standard deviation of 0", "aten.div", "layers.1", "forward", reason="NaN")
def _std():
    def compute(x):
        x = x.relu() * 0 + 1
        return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)  # here

    return stack(compute)


@planted("0/0 that only the forward leaves out", "aten.div", "layers.1", "backward", "aten.div", reason="NaN")
def _where():
    def compute(x):
        count = torch.tensor([[1.0], [0.0], [1.0]])
        return torch.where(count > 0, x / count, 0.0)  # here

    return stack(compute)


@planted("a power of a negative number", "aten.pow", "layers.1", "forward", reason="NaN")
def _pow():
    def compute(x):
        return x**0.5  # here

    return stack(compute)


@planted("the logarithm of a probability of 0", "aten.log", None, "forward", reason="-Inf")
def _nll():
    def loss(y):
        p = (y * 1e4).softmax(-1)
        return F.nll_loss(p.log(), torch.tensor([0, 1, 2]))  # here

    return stack(torch.tanh, loss=loss)


@planted(
    "the gradient of acos at 1", "aten.rsqrt", "layers.1", "backward", "aten.acos", "aten.add", reason="Inf"
)
def _acos():
    def compute(x):
        cosine = F.normalize(x[:, :1], dim=-1)
        return torch.acos(cosine) * x  # here

    return stack(compute)


@planted("all targets are ignored", "aten.nll_loss_forward", None, "forward", reason="NaN")
def _ignored():
    def loss(y):
        return F.cross_entropy(y, torch.full((3,), -100))  # here

    return stack(torch.tanh, loss=loss)


@planted(
    "overflow in a cast to fp16",
    "aten._to_copy",
    "layers.1",
    "forward",
    None,
    "aten.addmm",
    reason="a cast to float16",
)
def _cast():
    def compute(x):
        return (x * 1e6).to(torch.float16).float()  # here

    return stack(compute)


@planted(
    "overflow in fp16 under autocast",
    "aten.addmm",
    "layers.1.linear",
    "forward",
    None,
    "aten.addmm",
    reason="Inf",
    code=Layer,
)
def _autocast():
    class Scaled(nn.Module):
        def forward(self, x):
            return x * 1e3

    model, _ = stack(lambda x: x)
    model.layers[0] = Scaled()
    nn.init.constant_(model.layers[1].linear.weight, 100.0)

    def step():
        with torch.autocast("cpu", torch.float16):
            y = model(torch.full((3, 4), 1.0))
        y.float().sum().backward()

    return model, step


@planted(
    "a norm of constant inputs without eps",
    "aten.native_layer_norm",
    "layers.1.norm",
    "forward",
    reason="NaN",
)
def _layer_norm():
    model, step = stack(torch.tanh)
    layer = model.layers[1]
    layer.norm = nn.LayerNorm(4, eps=0.0)
    layer.compute = lambda x: layer.norm(x * 0)  # here
    return model, step


class Reciprocal(torch.autograd.Function):
    """1/(x + 1), with a wrong backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 1 / (x + 1)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return -grad / x**2  # here


@planted(
    "a wrong backward of a custom function",
    "aten.div",
    "layers.1",
    "backward",
    "Reciprocal",
    "aten.mm",
    code=Reciprocal,
)
def _custom():
    return stack(lambda x: Reciprocal.apply(x - x.detach()))


def checkpointed(use_reentrant):
    def wrap(layer, x):
        return checkpoint(layer, x, use_reentrant=use_reentrant)

    def compute(x):
        return (x - x.detach()).sqrt()  # here

    return stack(compute, torch.randn(3, 4, requires_grad=True), wrap=wrap)


@planted(
    "a gradient in a checkpointed block",
    "aten.div",
    "layers.1",
    "backward",
    "aten.sqrt",
    "aten.mm",
    code=checkpointed,
)
def _checkpoint():
    return checkpointed(use_reentrant=False)


@planted("the same, reentrant", "aten.div", "layers.1", "backward", "aten.sqrt", "aten.mm", code=checkpointed)
def _reentrant():
    return checkpointed(use_reentrant=True)


@planted("Adam without eps and without gradients", "aten._foreach_addcdiv_", None, None, reason="NaN")
def _adam():
    model, _ = stack(torch.tanh)
    optimizer = torch.optim.Adam(model.parameters(), eps=0.0, foreach=True)

    def step():
        (model(torch.zeros(3, 4)).sum() * 0).backward()
        optimizer.step()  # here

    return model, step


@planted(
    "overflow in accumulated fp16 gradients",
    "aten.add_",
    None,
    "backward",
    "adding up the gradients of bias",
    reason="Inf",
)
def _accumulated():
    model = nn.Linear(2, 1).half()

    def step():
        for _ in range(2):
            (model(torch.ones(1, 2, dtype=torch.float16)) * 40_000).sum().backward()  # here

    return model, step


@planted("a factor that is NaN", "aten.mul", "layers.1", "forward", reason="number NaN")
def _nan():
    def compute(x):
        return x * float("nan")  # here

    return stack(compute)


def rows() -> list[str]:
    """Return the rows of the table in the documentation."""
    found = []
    for fault in FAULTS:
        text = f"`{fault.operation}`"
        if fault.forward_operation:
            what = fault.forward_operation
            text += f", {what}" if " " in what else f" in the backward of `{what}`"
        if fault.then:
            text += f", then `{fault.then}`"
        found.append(f"| {fault.name} | `{fault.line[2]}` | {text} |")
    return found
