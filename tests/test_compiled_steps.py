"""Typical compiled training steps: each must compile to one graph and give the results of an eager call.

The table `CASES` lists the steps. The test of a case checks that:

- there is no graph break, and no recompilation after the second call;
- the graph's results are bitwise equal to those of an eager call on the gradients that the step returns;
- every attribute and method of the results works;
- the weights are bitwise equal to those of the same compiled step without telemetry.

``pytest tests/test_compiled_steps.py`` prints a table of all cases at its end.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import pickle
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._dynamo.variables import constant
from torch._inductor.utils import run_and_get_code
from torch.func import functional_call, grad_and_value
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils import parametrizations
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import gradiometer as gm
from gradiometer.distributed.sharding import Sharding
from support.compiling import needs_compiler, no_recompile

pytestmark = [
    pytest.mark.usefixtures("_dynamo", "_one_thread"),
    # Dynamo instantiates autograd.Function when it traces one
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

STEPS = 4


# models and batches


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))


def with_zero_grads() -> nn.Module:
    model = small()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return model


def two() -> nn.Module:
    return nn.ModuleDict({"a": small(), "b": small()})


def frozen() -> nn.Module:
    model = small()
    model[0].requires_grad_(False)
    return model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(4, 3, bias=False), nn.Linear(4, 3)
        self.up.weight = self.down.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.down(x) * self.up(x)


class Partly(nn.Module):
    """A model with an unused part."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 3).requires_grad_(False)
        self.a, self.b = nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x.to(torch.complex64) @ self.weight).sum(-1)


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.block, self.use_reentrant = small(), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant)


class Unrolled(nn.Module):
    """A recurrent cell, called for three time steps."""

    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell = kind(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Any = None
        for _ in range(3):
            hidden = self.cell(x, hidden)
        return hidden[0] if isinstance(hidden, tuple) else hidden


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(16, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        images = x.repeat(1, 4).view(-1, 1, 4, 4)
        return self.head(self.norm(self.conv(images)).flatten(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.unsqueeze(1))).squeeze(1)


class Watching(torch.autograd.Function):
    """An identity that measures the gradient in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: Tensor) -> Tensor:
        ctx.save_for_backward(found)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (found,) = ctx.saved_tensors
        found.copy_(gm.collect({"hidden": grad}).columns)
        return grad, None


class Watched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        self.register_buffer("found", torch.zeros((1, len(gm.COLUMNS)), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Watching.apply(self.first(x), self.found))


class Language(nn.Module):
    """A language model of the transformers library with random weights."""

    def __init__(self, config: str, model: str, **sizes: int) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        made = getattr(transformers, config)(vocab_size=16, use_cache=False, **sizes)
        self.model = getattr(transformers, model)(made)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 5).long().clamp(max=15)
        return self.model(input_ids=tokens).logits.float().mean(1)[:, :3]


def gpt2() -> nn.Module:
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
    return Language("GPT2Config", "GPT2LMHeadModel", **sizes, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)


def llama() -> nn.Module:
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Language("LlamaConfig", "LlamaForCausalLM", **sizes, max_position_embeddings=8)


def sub_compiled() -> nn.Module:
    model = small()
    model[0] = torch.compile(model[0], backend="aot_eager")
    return model


def batch(i: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    del i
    return torch.randn(5, 4, dtype=dtype), torch.randn(5, 3, dtype=dtype)


def sized(i: int) -> tuple[Tensor, Tensor]:
    n = (7, 3, 5, 9)[i]
    return torch.randn(n, 4), torch.randn(n, 3)


def marked(i: int) -> tuple[Tensor, Tensor]:
    x, y = sized(i)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(y, 0)
    return x, y


# telemetry: functions that take a model and return a function; the step calls it and returns its result

Tell = Callable[[], Any]


def nothing() -> Any:
    return ()


def grads_of(model: nn.Module) -> Tell:
    return lambda: gm.collect_grads(model)


def asked(function: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Tell]:
    return lambda model: functools.partial(function, model)


class Triple(NamedTuple):
    first: gm.TensorStats
    none: None
    second: gm.TensorStats


def nested(model: nn.Module) -> Any:
    return {"a": [gm.collect_grads(model)], "b": ({"c": gm.collect_weights(model)},)}


def twice(model: nn.Module) -> Any:
    stats = gm.collect_grads(model)
    return stats, stats


def beside_none(model: nn.Module) -> Any:
    stats = gm.collect_grads(model)
    return stats, None, [stats, None]


def named_tuple(model: nn.Module) -> Any:
    return Triple(gm.collect_grads(model), None, gm.collect_weights(model))


def several(model: nn.Module) -> Any:
    return gm.collect_grads(model), gm.collect_weights(model), gm.collect_grads(model, skip_nonfinite=True)


def pairs(model: nn.Module) -> Any:
    listed = [p for p in model.parameters() if p.grad is not None]
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return (
        gm.collect_grads(model.named_parameters()),
        gm.collect_grads(listed),
        gm.collect(grads),
        # eager code sums the squares of all gradients at once: the last bits of fp64 may differ
        gm.total_norm([p.grad for p in listed]).float(),
    )


def both_models(model: nn.Module) -> Any:
    return gm.collect_grads(model["a"]), gm.collect_grads(model["b"])


def merged(model: nn.Module) -> Any:
    stats = gm.collect_grads(model)
    return stats.merge(gm.collect_weights(model)), stats


def grouped(model: nn.Module) -> Any:
    stats = gm.collect_grads(model)
    rules = {"first": r"^0\.", "bias": lambda name: name.endswith("bias"), "none": ["x"], "all": "."}
    return stats.group(rules), stats.group({"second": model[2]}, model=model)


def by_module(model: nn.Module) -> Any:
    stats = gm.collect_grads(model)
    return stats.by_module(), stats.by_module(1).norm, stats.by_module(0)


def ratio(model: nn.Module) -> Any:
    return gm.group_ratio(gm.collect_grads(model).group({"a": r"^0\.", "b": r"^2\."}), ["a", "b"], "b")


def every_value(model: nn.Module) -> Any:
    stats = gm.collect_grads(model)
    return {name: getattr(stats, name) for name in sorted(VALUES - {"columns", "flags"})}


def not_finite(model: nn.Module) -> Any:
    spoilt = [(name, p.grad / 0 - p.grad) for name, p in model.named_parameters()]
    stats = gm.collect(spoilt, skip_nonfinite=True)
    return stats, stats.skipped, stats.found_inf


def scaled(model: nn.Module) -> Any:
    scale = torch.full((), 0.25)
    return gm.collect_grads(model, inv_scale=scale), gm.collect_grads(model, inv_scale=0.5)


def thresholds(model: nn.Module) -> Any:
    return gm.collect_grads(model, thresholds=gm.Thresholds(exploding=1e-3, vanishing=0.0))


def coefficient(model: nn.Module) -> Any:
    stats = gm.collect_grads(model)
    return gm.clip_coefficient(stats, 0.1), gm.clip_coefficient(stats, torch.tensor(0.2), "inf"), stats


def clip(model: nn.Module) -> Any:
    return gm.clip_grad_norm_(model, 0.01)


def clip_of_order(model: nn.Module) -> Any:
    return gm.clip_grad_norm_(model.parameters(), 0.01, 3.0)


def collect_and_clip(model: nn.Module) -> Any:
    return gm.collect_and_clip_(model, torch.tensor(0.01), inv_scale=2.0)


def adaptive(make: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Tell]:
    def of_model(model: nn.Module) -> Tell:
        clip = make(model)
        return lambda: (gm.collect_and_clip_(model, clip), clip.factor, clip.clip_fraction, *copies(clip))

    return of_model


def copies(module: nn.Module) -> list[Tensor]:
    return [x.clone() for x in module.buffers()]


z_score = adaptive(lambda _: gm.ZScoreClip(warmup_steps=2, z_threshold=0.01))
per_tensor = adaptive(lambda model: gm.PerTensorClip(model, warmup_steps=1, max_ratio=0.5))
unitwise = adaptive(lambda model: gm.WeightNormClip(model, unitwise=True))


def smoothed(model: nn.Module) -> Tell:
    ema = gm.EMA(decay=0.5)
    return lambda: (ema(gm.collect_grads(model).total_norm), ema.steps)


def noise_scale(model: nn.Module) -> Tell:
    noise = gm.NoiseScale(5, groups={"first": r"^0\.", "all": ""}, decay=0.5)

    def tell() -> Any:
        # the first of two micro-batches, of which the step has the sum
        noise.add(gm.collect([(name, 0.6 * p.grad) for name, p in model.named_parameters()]))
        noise.add(gm.collect_grads(model))
        return noise.step(), noise.squared_norm, noise.trace, noise.steps

    return tell


def agreement(model: nn.Module) -> Tell:
    agrees = gm.GradientAgreement(model, projections=8, groups={"first": r"^0\."}, ranks=gm.Ranks(model))

    def tell() -> Any:
        # the first of two micro-batches, of which the step has the sum
        parts = [(name, 0.6 * p.grad.cos()) for name, p in model.named_parameters()]
        agrees.add(gm.collect_projections(parts, projections=8))
        agrees.add()
        agrees.add_averaged()
        return agrees.step()[1:]

    return tell


def recorded(model: nn.Module) -> Tell:
    recorder = gm.Recorder(model, capacity=3, weights=True)

    def tell() -> Any:
        recorder.record()
        skip = recorder.skip_step
        recorder.advance()
        return skip, recorder.cursor.clone(), recorder.ring.clone()

    return tell


def recorded_stats(model: nn.Module) -> Tell:
    recorder = gm.Recorder(model, capacity=3)

    def tell() -> Any:
        stats = gm.collect_grads(model)
        recorder.record(stats)
        recorder.advance()
        return stats, recorder.ring.clone()

    return tell


def monitored(model: nn.Module) -> Tell:
    monitor = gm.Monitor(model, rules=(), sinks=())
    monitor.close()

    def tell() -> Any:
        monitor.record()
        return monitor.skip_step, monitor._recorder.ring.clone()

    return tell


def watched(model: nn.Module) -> Any:
    # the buffer that the backward pass has written
    return model.found.clone(), gm.collect_grads(model)


# steps: functions that take a model, its telemetry and a batch, and are compiled as a whole, and others that
# take a model and its telemetry and return a step, which takes a batch. A step returns the telemetry's result
# and the gradients to compare with, or () instead of the gradients if the parameters still have them (not
# None, which torch may lose)


Told = tuple[Any, Mapping[str, Tensor] | tuple[()]]
Step = Callable[[Tensor, Tensor], Told]


def step_of(body: Callable[..., Told], model: nn.Module, tell: Tell) -> Step:
    """Return the compiled step of a function that is compiled as a whole."""

    def step(x: Tensor, y: Tensor) -> Told:
        return body(model, tell, x, y)

    return compiled(step)


def gradients(model: nn.Module, *, copied: bool = False) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.clone() for name, grad in found.items()} if copied else found


def trained(model: nn.Module) -> list[Tensor]:
    """Return the parameters that get a gradient: torch cannot compile a step that first clears other ones."""
    return [p for name, p in model.named_parameters() if p.requires_grad and "unused" not in name]


def clear(model: nn.Module) -> None:
    for p in trained(model):
        p.grad = None


def update(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(0.1 * p.grad)


def backward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = mse_loss(model(x), y)
    loss.backward()
    return loss.detach()


def cleared_last(model: nn.Module, tell: Tell, x: Tensor, y: Tensor) -> Told:
    backward(model, x, y)
    grads = gradients(model, copied=True)
    told = tell()
    update(model)
    clear(model)
    return told, grads


def cleared_first(model: nn.Module, tell: Tell, x: Tensor, y: Tensor) -> Told:
    for p in trained(model):
        p.grad = None
    backward(model, x, y)
    grads = gradients(model, copied=True)
    told = tell()
    update(model)
    return told, grads


def cleared_twice(model: nn.Module, tell: Tell, x: Tensor, y: Tensor) -> Told:
    clear(model)
    backward(model, x, y)
    grads = gradients(model)
    told = tell()
    update(model)
    clear(model)
    return told, grads


def cleared_by_module(model: nn.Module, tell: Tell, x: Tensor, y: Tensor) -> Told:
    model.zero_grad()
    backward(model, x, y)
    told = tell()
    update(model)
    return told, ()


def cleared_before_loss(model: nn.Module, tell: Tell, x: Tensor, y: Tensor) -> Told:
    loss = mse_loss(model(x), y)
    for p in trained(model):
        p.grad = None
    loss.backward()
    told = tell()
    update(model)
    return told, ()


def zeroed_first(model: nn.Module, tell: Tell, x: Tensor, y: Tensor) -> Told:
    for p in model.parameters():
        p.grad.zero_()
    backward(model, x, y)
    told = tell()
    update(model)
    return told, ()


def zeroed_last(model: nn.Module, tell: Tell, x: Tensor, y: Tensor) -> Told:
    backward(model, x, y)
    grads = gradients(model, copied=True)
    told = tell()
    update(model)
    torch._foreach_zero_([p.grad for p in model.parameters()])
    return told, grads


def cleared_outside(model: nn.Module, tell: Tell, *, set_to_none: bool = True) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @compiled
    def inside(x: Tensor, y: Tensor) -> Told:
        backward(model, x, y)
        return tell(), gradients(model, copied=True)

    def step(x: Tensor, y: Tensor) -> Told:
        told = inside(x, y)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        return told

    return step


def cleared_elsewhere(model: nn.Module, tell: Tell) -> Step:
    """One compiled function clears the gradients and trains; another one measures."""

    @compiled
    def train(x: Tensor, y: Tensor) -> Tensor:
        clear(model)
        return backward(model, x, y)

    @compiled
    def measure() -> Any:
        told = tell()
        update(model)
        return told

    def step(x: Tensor, y: Tensor) -> Told:
        train(x, y)
        return measure(), ()

    return step


def measured_after(model: nn.Module, tell: Tell) -> Step:
    """Backward runs outside; the compiled function measures, and clears the gradients in place."""

    @compiled
    def measure() -> Told:
        grads = gradients(model, copied=True)
        told = tell()
        update(model)
        for p in model.parameters():
            p.grad.zero_()
        return told, grads

    def step(x: Tensor, y: Tensor) -> Told:
        backward(model, x, y)
        return measure()

    return step


def alone(model: nn.Module, tell: Tell) -> Step:
    @compiled
    def inside(x: Tensor, y: Tensor) -> Any:
        clear(model)
        backward(model, x, y)
        return tell()

    def step(x: Tensor, y: Tensor) -> Told:
        told = inside(x, y), gradients(model)
        update(model)
        return told

    return step


def kept(model: nn.Module, tell: Tell, *, on: str) -> Step:
    notes: list[Any] = []
    table: dict[str, Any] = {}

    @compiled
    def inside(x: Tensor, y: Tensor) -> Tensor:
        clear(model)
        loss = backward(model, x, y)
        if on == "module":
            model.notes = tell()
        elif on == "list":
            notes.append(tell())
        else:
            table["stats"] = tell()
        return loss

    def step(x: Tensor, y: Tensor) -> Told:
        inside(x, y)
        told = {"module": lambda: model.notes, "list": notes.pop, "dict": lambda: table.pop("stats")}[on]()
        if on == "module":
            # the compiled function has set this attribute; read and delete it, as training code would
            del model.notes
        update(model)
        return told, gradients(model)

    return step


def accumulated(model: nn.Module, tell: Tell, x: Tensor, y: Tensor) -> Told:
    clear(model)
    for part in range(2):
        (mse_loss(model(x + part), y) / 2).backward()
    told = tell()
    update(model)
    return told, ()


def between(model: nn.Module, tell: Tell, x: Tensor, y: Tensor) -> Told:
    clear(model)
    backward(model, x, y)
    grads = gradients(model, copied=True)
    told = tell()
    backward(model, -x, y)
    update(model)
    return told, grads


class Around(NamedTuple):
    before: Any
    after: Any


def around_update(model: nn.Module, tell: Tell, x: Tensor, y: Tensor) -> Told:
    clear(model)
    backward(model, x, y)
    told = tell()
    update(model)
    if tell is nothing:
        return told, ()
    return Around(told, gm.collect_weights(model)), ()


def of_two(model: nn.Module, tell: Tell, x: Tensor, y: Tensor) -> Told:
    clear(model)
    mse_loss(model["a"](x), y).backward()
    mse_loss(model["b"](x), y).backward()
    told = tell()
    update(model)
    return told, ()


def of_one_of_two(model: nn.Module, tell: Tell, x: Tensor, y: Tensor) -> Told:
    clear(model["a"])
    mse_loss(model["a"](x) + model["b"](x).detach(), y).backward()
    told = tell()
    update(model)
    return told, ()


def functional(model: nn.Module, tell: Tell, *, how: str) -> Step:
    """Gradients that are not attributes of parameters."""
    parameters = dict(model.named_parameters())

    def loss_of(values: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(functional_call(model, values, (x,)), y)

    def step(x: Tensor, y: Tensor) -> Told:
        if how == "grad_and_value":
            grads, _ = grad_and_value(loss_of)({n: p.detach() for n, p in parameters.items()}, x, y)
        else:
            listed = torch.autograd.grad(mse_loss(model(x), y), list(parameters.values()))
            grads = dict(zip(parameters, listed, strict=True))
        told = tell() if tell is nothing else gm.collect(grads)
        with torch.no_grad():
            for name, p in parameters.items():
                p.sub_(0.1 * grads[name])
        return told, {name: grad.clone() for name, grad in grads.items()}

    return compiled(step)


def under_autocast(model: nn.Module, tell: Tell, x: Tensor, y: Tensor) -> Told:
    clear(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = mse_loss(model(x).float(), y)
    loss.backward()
    told = tell()
    update(model)
    return told, ()


def under_autocast_whole(model: nn.Module, tell: Tell, x: Tensor, y: Tensor) -> Told:
    clear(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        backward(model, x, y)
        told = tell()
    update(model)
    return told, ()


def decided(model: nn.Module, tell: Tell, x: Tensor, y: Tensor) -> Told:
    """The step skips its own update if a gradient is not finite."""
    clear(model)
    backward(model, x, y)
    told = tell()
    skip = told.found_inf > 0 if isinstance(told, gm.TensorStats) else torch.zeros((), dtype=torch.bool)
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(torch.where(skip, 0.0, 0.1 * p.grad))
    return told, ()


def poisoned(model: nn.Module, tell: Tell, *, reset: bool) -> Step:
    """First compile an unrelated step that begins by clearing its gradients."""
    other = nn.Linear(4, 3)

    def others(x: Tensor) -> Tensor:
        for p in other.parameters():
            p.grad = None
        loss = other(x).sum()
        loss.backward()
        return loss.detach()

    torch.compile(others, fullgraph=True, backend="aot_eager")(torch.randn(2, 4))
    if reset:
        torch._dynamo.reset()
    return step_of(zeroed_first, model, tell)


def tokens_of(model: nn.Module, tell: Tell, x: Tensor, y: Tensor) -> Told:
    tokens = (x.abs() * 3).long().clamp(max=7)
    clear(model)
    cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    del y
    told = tell()
    update(model)
    return told, ()


# the table


@dataclass(frozen=True)
class Case:
    """A step: its code, its model, and its telemetry.

    ``acts``: the telemetry changes the gradients, so that the weights differ from a step without telemetry.
    ``replayed``: the eager call to compare with runs the backward pass too. ``whole``: ``body`` is compiled
    as a whole. ``deep``: only for the deep profile, since other cases are much alike.
    """

    name: str
    body: Callable[..., Any] = cleared_first
    tell: Callable[[nn.Module], Tell] = grads_of
    model: Callable[..., nn.Module] = small
    batch: Callable[[int], tuple[Tensor, Tensor]] = batch
    options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    acts: bool = False
    replayed: bool = False
    whole: bool = True
    deep: bool = False


INDUCTOR = {"backend": "inductor"}
part = functools.partial

CASES = (
    # where gradients are cleared
    Case("cleared first"),
    Case("cleared last", cleared_last),
    Case("cleared first and last", cleared_twice, deep=True),
    Case("cleared between loss and backward", cleared_before_loss, deep=True),
    Case("cleared by model.zero_grad()", cleared_by_module, deep=True),
    Case("cleared in place, first", zeroed_first, model=with_zero_grads, deep=True),
    Case("cleared in place, last", zeroed_last, model=with_zero_grads, deep=True),
    Case("cleared outside", cleared_outside, whole=False),
    Case("cleared outside, in place", part(cleared_outside, set_to_none=False), whole=False, deep=True),
    Case("cleared in another compiled function", cleared_elsewhere, whole=False),
    Case("backward outside", measured_after, whole=False),
    # how the result is used
    Case("returned alone", alone, whole=False, deep=True),
    Case("returned nested", tell=asked(nested)),
    Case("returned twice", tell=asked(twice), deep=True),
    Case("returned beside None", tell=asked(beside_none)),
    Case("returned beside None, cleared last", cleared_last, tell=asked(beside_none), deep=True),
    Case("returned in a named tuple", cleared_last, tell=asked(named_tuple), deep=True),
    Case("kept on a module", part(kept, on="module"), whole=False),
    Case("kept in a list", part(kept, on="list"), whole=False, deep=True),
    Case("kept in a dict", part(kept, on="dict"), whole=False, deep=True),
    # how much is collected
    Case("several collections", tell=asked(several), deep=True),
    Case("parameters as pairs, a list, tensors", tell=asked(pairs)),
    Case("no rows", tell=lambda _: lambda: (gm.collect([]), gm.collect([]).group({"all": "."})), deep=True),
    Case("collected between two backwards", between, deep=True),
    Case("weights before and after", around_update, asked(gm.collect_weights)),
    Case("two models", of_two, tell=asked(both_models), model=two, deep=True),
    Case("two models, one without gradients", of_one_of_two, tell=asked(both_models), model=two),
    Case("accumulated in the graph", accumulated, deep=True),
    Case("grad_and_value", part(functional, how="grad_and_value"), whole=False),
    Case("autograd.grad", part(functional, how="autograd.grad"), whole=False, deep=True),
    Case("collected in autograd.Function.backward", tell=asked(watched), model=Watched, replayed=True),
    # parameters
    Case("frozen parameters", model=frozen, deep=True),
    Case("tied parameters", model=Tied),
    Case("parameters without gradients", cleared_last, model=Partly),
    Case("parameters without gradients, cleared first", model=Partly, deep=True),
    Case("adapter", model=Adapter, deep=True),
    Case("complex parameters", model=Complex),
    Case("embedding", tokens_of, model=lambda: nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8)), deep=True),
    Case("float64", model=lambda: small().double(), batch=part(batch, dtype=torch.float64), deep=True),
    Case("bfloat16", model=lambda: small().bfloat16(), batch=part(batch, dtype=torch.bfloat16), deep=True),
    Case(
        "bfloat16, clipped",
        tell=asked(clip),
        model=lambda: small().bfloat16(),
        batch=part(batch, dtype=torch.bfloat16),
        acts=True,
    ),
    Case("weight_norm", model=lambda: parametrizations.weight_norm(nn.Linear(4, 3)), deep=True),
    Case("spectral_norm", model=lambda: parametrizations.spectral_norm(nn.Linear(4, 3)), deep=True),
    Case("orthogonal", model=lambda: parametrizations.orthogonal(nn.Linear(4, 3)), deep=True),
    Case("convolution and batch norm, channels last", model=Convolution),
    Case("attention", model=Attention, deep=True),
    Case("GRUCell", model=lambda: Unrolled(nn.GRUCell), deep=True),
    Case("LSTMCell", model=lambda: Unrolled(nn.LSTMCell), deep=True),
    Case("GRU, allow_rnn", model=lambda: Recurrent(nn.GRU), config={"allow_rnn": True}, deep=True),
    Case("transformers GPT-2", model=gpt2, deep=True),
    Case("transformers Llama", model=llama, deep=True),
    Case("a compiled part", model=sub_compiled, deep=True),
    # modes of torch
    Case("autocast", under_autocast),
    Case("autocast around the collection", under_autocast_whole, deep=True),
    Case("activation checkpointing", model=lambda: Checkpointed(use_reentrant=False)),
    Case("activation checkpointing, reentrant", model=lambda: Checkpointed(use_reentrant=True), deep=True),
    Case("dynamic=True", batch=sized, options={"dynamic": True}, deep=True),
    Case("mark_dynamic", batch=marked, deep=True),
    Case("sizes that change", batch=sized),
    Case(
        "after someone else's poisoned compile",
        part(poisoned, reset=False),
        model=with_zero_grads,
        whole=False,
    ),
    Case(
        "after that and dynamo.reset()",
        part(poisoned, reset=True),
        model=with_zero_grads,
        whole=False,
        deep=True,
    ),
    # other work in the graph
    Case("every value", tell=asked(every_value), deep=True),
    Case("NaN and Inf", tell=asked(not_finite)),
    Case("inv_scale", tell=asked(scaled), deep=True),
    Case("thresholds", tell=asked(thresholds), deep=True),
    Case("merge", tell=asked(merged), deep=True),
    Case("group", tell=asked(grouped)),
    Case("by_module", tell=asked(by_module), deep=True),
    Case("group_ratio", tell=asked(ratio), deep=True),
    Case("clip_coefficient", tell=asked(coefficient), deep=True),
    Case("clip_grad_norm_", tell=asked(clip), acts=True, deep=True),
    Case("clip_grad_norm_ of order 3", tell=asked(clip_of_order), acts=True, deep=True),
    Case("collect_and_clip_", tell=asked(collect_and_clip), acts=True),
    Case("ZScoreClip", tell=z_score, acts=True),
    Case("PerTensorClip", cleared_last, tell=per_tensor, acts=True),
    Case("PerTensorClip, parameters without gradients", model=Partly, tell=per_tensor, acts=True, deep=True),
    Case("WeightNormClip", tell=adaptive(gm.WeightNormClip), acts=True),
    Case("WeightNormClip of units", tell=unitwise, acts=True, deep=True),
    Case("EMA", tell=smoothed, deep=True),
    Case("noise scale", tell=noise_scale),
    Case("gradient agreement", tell=agreement),
    Case("Recorder", tell=recorded),
    Case("Recorder of stats", tell=recorded_stats, deep=True),
    Case("Monitor", tell=monitored),
    Case("a decision on found_inf", decided),
    # Inductor
    Case("Inductor, cleared first", options=INDUCTOR),
    Case("Inductor, returned nested", cleared_last, tell=asked(nested), options=INDUCTOR, deep=True),
    Case("Inductor, collect_and_clip_", tell=asked(collect_and_clip), acts=True, options=INDUCTOR),
    Case("Inductor, ZScoreClip", tell=z_score, acts=True, options=INDUCTOR, deep=True),
    Case("Inductor, PerTensorClip", tell=per_tensor, acts=True, options=INDUCTOR),
    Case("Inductor, groups", tell=asked(by_module), options=INDUCTOR, deep=True),
    Case("Inductor, Recorder", tell=recorded, options=INDUCTOR, deep=True),
    Case("Inductor, dynamic=True", batch=sized, options={"dynamic": True, **INDUCTOR}, deep=True),
    Case(
        "Inductor, reduce-overhead, PerTensorClip",
        tell=per_tensor,
        acts=True,
        options={"mode": "reduce-overhead", **INDUCTOR},
        deep=True,
    ),
    Case("Inductor, reduce-overhead", options={"mode": "reduce-overhead", **INDUCTOR}),
)

# options for functions that a step compiles itself, set by each case
_OPTIONS: dict[str, Any] = {}


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, **{"backend": "aot_eager", **_OPTIONS})


def prepared(case: Case, tell: Callable[[nn.Module], Tell]) -> tuple[nn.Module, Step]:
    """Return a case's model, with the same weights in every call, and its compiled step."""
    torch.manual_seed(1)
    model = case.model()
    told = tell(model)
    return model, step_of(case.body, model, told) if case.whole else case.body(model, told)


def forget_none() -> None:
    """In torch 2.12 to 2.14, undo the process-wide effect of a step that begins by clearing its gradients.

    It breaks a second compiled function that ends with ``p.grad = None``, with or without telemetry.
    """
    constant.CONSTANT_VARIABLE_NONE.source = None


def batches(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Return a case's batches, the same in every call."""
    torch.manual_seed(1)
    case.model()
    found = []
    for i in range(STEPS):
        found.append(case.batch(i))
        torch.manual_seed(i)
    return found


# weights after each step without telemetry; a third of the cases share them, so they are computed once
_BARE: dict[tuple[Any, ...], list[Mapping[str, Tensor]]] = {}


def weights_without_telemetry(case: Case) -> list[Mapping[str, Tensor]]:
    """Return the weights after each step of the same compiled step without telemetry."""
    key = (case.body, case.model, case.batch, repr(case.options), repr(case.config), case.whole)
    if key not in _BARE:
        model, step = prepared(case, lambda _: nothing)
        weights = []
        for i, (x, y) in enumerate(batches(case)):
            torch.manual_seed(i)
            step(x, y)
            forget_none()
            weights.append(copy.deepcopy(model.state_dict()))
        _BARE[key] = weights
        # reset what Dynamo has learned about dynamic sizes, for the step with telemetry
        torch._dynamo.reset()
    return _BARE[key]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.name.replace(" ", "-"),
            marks=[pytest.mark.deep] * case.deep + [needs_compiler] * ("backend" in case.options),
        )
        for case in CASES
    ],
)
def test_a_compiled_step(case, monkeypatch, record_property):
    start = time.monotonic()
    monkeypatch.setattr(sys.modules[__name__], "_OPTIONS", dict(case.options))
    forget_none()
    with torch._dynamo.config.patch(**case.config):
        bare = None if case.acts else weights_without_telemetry(case)
        model, step = prepared(case, case.tell)
        torch.manual_seed(1)
        twin = case.model()
        tell = case.tell(twin)
        counters.clear()
        for i, (x, y) in enumerate(batches(case)):
            torch.manual_seed(i)
            before = copy.deepcopy(model.state_dict())
            with no_recompile() if i >= 2 else contextlib.nullcontext():
                told, grads = step(x, y)
                forget_none()
            assert not counters["graph_break"]
            twin.load_state_dict(before)
            if case.replayed:
                backward(twin, x, y)
            put(twin, gradients(model) if isinstance(grads, tuple) else grads)
            expected = tell()
            if isinstance(told, Around):
                twin.load_state_dict(model.state_dict())
                expected = Around(expected, gm.collect_weights(twin))
            # the results of the first call, and of a later one
            if i in {0, STEPS - 1}:
                assert_usable(told)
            assert_same(told, expected)
            if bare is not None:
                assert_equal_bits(model.state_dict(), bare[i])
    backend = case.options.get("mode") or case.options.get("backend", "aot_eager")
    record_property("compiled step", (case.name, backend, f"{time.monotonic() - start:.1f} s"))


def put(model: nn.Module, grads: Mapping[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        grad = grads.get(name, grads.get(name.replace("_orig_mod.", "")))
        p.grad = None if grad is None else grad.detach().clone()


def assert_equal_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, x in a.items():
        assert torch.equal(x, b[name]) or (x.isnan() == b[name].isnan()).all(), name


def assert_same(told: Any, expected: Any) -> None:
    def is_stats(x: object) -> bool:
        return isinstance(x, gm.TensorStats)

    found, structure = pytree.tree_flatten(told, is_leaf=is_stats)
    wanted, same = pytree.tree_flatten(expected, is_leaf=is_stats)
    assert structure == same
    for x, y in zip(found, wanted, strict=True):
        if isinstance(y, gm.TensorStats):
            assert (x.names, x.thresholds, x.skip_nonfinite) == (y.names, y.thresholds, y.skip_nonfinite)
            assert (x.sharding, x.origin, x.local) == (y.sharding, y.origin, y.local)
            for name in ("columns", "flags", "norm"):
                assert_bits(getattr(x, name), getattr(y, name))
        elif isinstance(y, Tensor):
            assert_bits(x, y)
        else:
            # a None returned by the step itself, which torch 2.12 to 2.14 may lose, is not checked
            assert y is None


def assert_bits(x: Tensor, y: Tensor) -> None:
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    assert torch.equal(x.nan_to_num(nan=-7.0), y.nan_to_num(nan=-7.0)), (x, y)


# using the results of a graph

# properties that are tensors, and a call for each method
VALUES = {
    name
    for name, value in vars(gm.TensorStats).items()
    if isinstance(value, property) and name not in {"measured", "is_reduced", "is_local"}
}
CALLS: dict[str, Callable[[gm.TensorStats], Any]] = {
    "by_module": lambda stats: stats.by_module(1).materialize(),
    "group": lambda stats: stats.group({"all": ".", "none": []}).materialize(),
    "health_score": lambda stats: stats.health_score(vanishing=0.1).item(),
    "is_healthy_within": lambda stats: stats.is_healthy_within(norm_ratio=10.0).item(),
    "materialize": lambda stats: str(stats.materialize()),
    "materialize_async": lambda stats: stats.materialize_async().result().to_dict(),
    "merge": lambda stats: stats.merge(stats).materialize(),
    "packed": lambda stats: stats.packed().tolist(),
    "reduce": lambda stats: stats.reduce().materialize(),
    "reduced_by": lambda stats: stats.reduced_by(gm.Ranks({n: torch.ones(1) for n in stats.names}), "test"),
    "total_value": lambda stats: stats.total_value("norm").item(),
    "unpacked": lambda stats: stats.unpacked(stats.packed()).to_dict(),
}
KINDS = {
    "names": tuple,
    "columns": Tensor,
    "flags": Tensor,
    "thresholds": gm.Thresholds,
    "skip_nonfinite": bool,
    "sharding": Sharding | None,
    "origin": Tensor | None,
    "local": gm.TensorStats | None,
    "fingerprints": Tensor | None,
    "diverged": Tensor | None,
    "projections": gm.ProjectionStats | None,
}


def assert_usable(told: Any) -> None:
    for x in pytree.tree_leaves(told, is_leaf=lambda x: isinstance(x, gm.TensorStats)):
        if isinstance(x, gm.TensorStats):
            assert_stats_usable(x)
        elif isinstance(x, Tensor):
            assert not x.requires_grad
            x.clone().tolist()


def assert_stats_usable(stats: gm.TensorStats) -> None:
    assert {each.name for each in dataclasses.fields(stats)} == KINDS.keys()
    for name, kind in KINDS.items():
        assert isinstance(getattr(stats, name), kind), (name, type(getattr(stats, name)))
    assert (stats.is_reduced, stats.is_local, stats.measured) == (False, False, len(stats.names) > 0)
    for name in VALUES:
        assert not getattr(stats, name).requires_grad
    # new methods must be listed here too
    methods = {name for name in dir(stats) if not name.startswith("_") and callable(getattr(stats, name))}
    assert methods == CALLS.keys()
    for call in CALLS.values():
        call(stats)
    assert "TensorStats" in repr(stats)
    assert gm.materialize([stats])[0].names == stats.names
    again = (
        copy.copy(stats),
        copy.deepcopy(stats),
        pickle.loads(pickle.dumps(stats)),  # noqa: S301 our own bytes
        dataclasses.replace(stats),
        pytree.tree_map(torch.clone, stats),
    )
    for each in again:
        assert torch.equal(each.columns, stats.columns)
        assert set(vars(each)) == set(vars(stats))


# steps that torch cannot compile


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_dynamo_refuses_recurrent_modules_itself(kind, record_property):
    """With or without telemetry. Alternatives: RNN cells, or an eager backward and a compiled collection."""
    model = Recurrent(kind)
    for tell in (nothing, grads_of(model)):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="RNN, GRU, or LSTM"):
            step_of(cleared_first, model, tell)(*batch(0))
    # named pairs, because Dynamo does not trace into such a module
    named = list(model.named_parameters())
    apart = compiled(lambda: gm.collect_grads(named))
    for i in range(STEPS):
        clear(model)
        backward(model, *batch(i))
        with no_recompile() if i >= 2 else contextlib.nullcontext():
            stats = apart()
        assert_stats_usable(stats)
        assert_same(stats, gm.collect_grads(model))
    record_property(
        "compiled step", (f"{kind.__name__}, backward outside", "aot_eager", "torch cannot compile it inside")
    )


def test_torch_refuses_sparse_gradients_itself(record_property):
    """With or without telemetry; eager calls measure sparse gradients."""
    model = nn.Embedding(5, 3, sparse=True)
    tokens = torch.tensor([0, 1, 1])

    def step(tell: Tell) -> Any:
        model(tokens).sum().backward()
        return tell()

    for tell in (nothing, grads_of(model)):
        model.weight.grad = None
        with pytest.raises((torch._dynamo.exc.TorchDynamoException, NotImplementedError)):
            compiled(step)(tell)
    model.weight.grad = None
    step(nothing)
    assert model.weight.grad.is_sparse
    assert gm.collect_grads(model).sumsq.tolist() == [3 + 3 * 4]
    record_property("compiled step", ("sparse gradients, eager", "eager", "torch cannot compile them inside"))


def test_a_traced_backward_calls_no_parameter_hooks():
    model = nn.Linear(4, 3)
    called: list[str] = []
    model.weight.register_post_accumulate_grad_hook(lambda _: called.append("after"))
    step_of(cleared_first, model, nothing)(*batch(0))
    assert called == []
    backward(model, *batch(0))
    assert called == ["after"]


# exported programs


class Exported(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = small()

    def forward(self, x: Tensor) -> Any:
        hidden = self.model(x)
        stats = gm.collect({"x": x, "hidden": hidden})
        return {
            "hidden": hidden,
            "stats": stats,
            "groups": stats.by_module(0),
            "weights": gm.collect_weights(self),
        }


class Regrouped(nn.Module):
    def forward(self, stats: gm.TensorStats) -> Any:
        return stats.group({"all": "."}), stats.total_norm


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_a_program_is_exported(strict, record_property):
    # otherwise, strict export of any nested result fails
    forget_none()
    model, x = Exported(), torch.randn(5, 4)
    with torch.no_grad():
        program = torch.export.export(model, (x,), strict=strict).module()
        stats = gm.collect({"a": x})
        regrouped = torch.export.export(Regrouped(), (stats,), strict=strict).module()
        for _ in range(2):
            x = torch.randn(5, 4)
            told, expected = program(x), model(x)
            assert_same(told, expected)
            assert_usable(told)
            stats = gm.collect({"a": x})
            assert_same(regrouped(stats), Regrouped()(stats))
    record_property("compiled step", (f"torch.export, {'' if strict else 'not '}strict", "export", ""))


# half a minute of C++; the export is tested above
@pytest.mark.deep
@needs_compiler
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")
def test_a_program_is_compiled_ahead_of_time(tmp_path, record_property):
    start = time.monotonic()
    model, x = Exported(), torch.randn(5, 4)
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        loaded = torch._inductor.aoti_load_package(path)
        x = torch.randn(5, 4)
        told = loaded(x)
    assert_usable(told)
    assert_same(told["stats"], gm.collect({"x": x, "hidden": told["hidden"]}))
    assert_same(told["weights"], gm.collect_weights(model))
    record_property("compiled step", ("AOTInductor", "inductor", f"{time.monotonic() - start:.1f} s"))


# changing numbers, and the size of graphs


def numbers(model: nn.Module) -> dict[str, Callable[[float], Any]]:
    return {
        "inv_scale": lambda v: gm.collect_grads(model, inv_scale=v),
        "clip_coefficient": lambda v: gm.clip_coefficient(gm.collect_grads(model), v),
        "clip_grad_norm_": lambda v: gm.clip_grad_norm_(model, v),
        "collect_and_clip_": lambda v: gm.collect_and_clip_(model, v, inv_scale=v, norm_type="inf"),
        "health_score": lambda v: gm.collect_grads(model).health_score(vanishing=v),
        "group_ratio": lambda v: gm.group_ratio(gm.collect_grads(model).group({"a": "0"}), "a", "a", floor=v),
    }


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in {"inv_scale", "collect_and_clip_"} else (pytest.mark.deep,))
        for name in numbers(small())
    ],
)
def test_a_number_that_changes_is_compiled_twice_at_most(name):
    def made() -> tuple[nn.Module, Callable[[float], Any]]:
        torch.manual_seed(1)
        model = with_zero_grads()
        for p in model.parameters():
            p.grad.normal_()
        return model, numbers(model)[name]

    (model, function), (twin, eager) = made(), made()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(function, fullgraph=True, backend=counter)
    for i in range(20):
        number = 0.1 + i / 7
        assert_same(step(number), eager(number))
    assert counter.frame_count <= 2
    assert_equal_bits(gradients(model), gradients(twin))


def graph_nodes(function: Callable[[], Any]) -> int:
    """Return the number of calls in the graph that the backend receives."""
    counts: list[int] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        counts.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=count))()
    (found,) = counts
    return found


@pytest.mark.parametrize("bias", [pytest.param(True, marks=pytest.mark.deep), False])
def test_a_graph_has_few_nodes_a_tensor(bias):
    """Compile time grows with the number of nodes; ``kernels_bench.compile_time`` measures it."""
    model = nn.Sequential(*[nn.Linear(3, 3, bias=bias or i % 2 > 0) for i in range(20)])
    tensors = list(model.parameters())
    for p in tensors:
        p.grad = torch.ones_like(p)
    # plain operators measure lists that are short enough, and have more nodes
    # nodes with torch 2.13: 2 per tensor plus 8 for torch, 2 per tensor plus 49 for gradiometer
    torchs = graph_nodes(lambda: nn.utils.clip_grad_norm_(tensors, 1.0))
    # 50 more at most: for the coefficient, and other nodes that occur once per graph
    assert graph_nodes(lambda: gm.clip_grad_norm_(tensors, 1.0)) <= torchs + 50
    assert graph_nodes(lambda: gm.collect_and_clip_(tensors, 1.0).norm) <= torchs + 60
    assert graph_nodes(lambda: gm.collect_grads(model)) <= 10
    # modules with equally many tensors are merged together; otherwise the results must be reordered
    assert graph_nodes(lambda: gm.collect_grads(model).by_module()) <= (60 if bias else 60 + 2 * 20)


@needs_compiler
def test_inductor_computes_a_coefficient_once():
    model = with_zero_grads()
    _, codes = run_and_get_code(torch.compile(lambda: gm.clip_grad_norm_(model, 1.0), fullgraph=True))
    # the smallest normal fp32 number, used to split the coefficient, does not occur in each multiplication
    assert 1 <= sum(code.count("1.1754943508222875e-38") for code in codes) <= 4
