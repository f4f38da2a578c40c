"""Taps: what is measured, in which steps, and how often."""

import copy
import dataclasses
import functools
import gc
import io
import types
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gradiometer as gm
from gradiometer.columns import ACTIVATIONS
from gradiometer.ops import tap_partials
from support.activations import Calls, agree, columns_of
from support.compiling import Kept, every_backend, needs_compiler

pytestmark = pytest.mark.usefixtures("_dynamo")


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(d, 2 * d), nn.ReLU(inplace=True), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class Model(nn.Module):
    def __init__(self, use_reentrant=None, whole=False):
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([Block(8) for _ in range(3)])
        self.use_reentrant, self.whole = use_reentrant, whole

    def body(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x):
        x = gm.tap(self.inp(x), "inp")
        if self.use_reentrant is None:
            return self.body(x)
        if self.whole:
            return checkpoint(self.body, x, use_reentrant=self.use_reentrant)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


TAPPED = {"up": r"\.up$", "act": r"\.act$", "blocks": r"^blocks\.\d$"}


def expected_rows(x):
    """Return the rows of a plain model, measured by hooks and autograd."""
    model, rows = Model(), {}

    def hook(_module, _args, output, name):
        # the next module may change the output in place
        rows[name] = columns_of(output.detach().clone())
        output.register_hook(lambda g: rows.update({f"{name}.grad": columns_of(g.clone())}))

    for name, module in model.named_modules():
        if name.endswith((".up", ".act")) or isinstance(module, Block):
            module.register_forward_hook(functools.partial(hook, name=f"{name}.out"))
    model.inp.register_forward_hook(functools.partial(hook, name="inp"))
    model(x).square().sum().backward()
    return rows


@pytest.fixture(params=[False, True], ids=["op", "fused"])
def fused(request, monkeypatch):
    """Return whether a graph gets plain operators, which then measure small tensors, too."""
    if request.param:
        monkeypatch.setattr(tap_partials, "_LEAST", 2)
        monkeypatch.setattr(tap_partials, "_ENOUGH", 2)
    # a graph that is cached on disk may be that of the usual sizes
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield request.param


MODES = ["eager", "graph", "backward in the graph"]


def stepper(model, mode, backend):
    """Return a step: forward and backward."""
    compiled = torch.compile(fullgraph=True, backend=backend)

    def loss_of(x):
        return model(x).square().sum()

    forward = compiled(loss_of) if mode == "graph" else loss_of

    def step(x):
        forward(x).backward()

    return compiled(step) if mode == "backward in the graph" else step


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("use_reentrant", "whole", "backend"),
    [
        (None, False, "aot_eager"),
        (False, False, "aot_eager"),
        (True, False, "aot_eager"),
        (True, True, "aot_eager"),
        # its partition decides what is computed again
        pytest.param(False, True, "inductor", marks=needs_compiler),
    ],
)
def test_values_and_gradients_are_measured_once(mode, use_reentrant, whole, backend, fused):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    model = Model(use_reentrant, whole)
    taps = gm.Taps(model, TAPPED, names=["inp"], fused=fused)
    step = stepper(model, mode, backend)
    expected = expected_rows(x)
    for i in range(3):
        for p in model.parameters():
            p.grad = None
        with torch._dynamo.config.patch(error_on_recompile=i == 2):
            step(x)
        stats = taps.stats()
        assert set(stats.names) == set(expected)
        for name, row in zip(stats.names, stats.columns, strict=True):
            agree(row, expected[name], 1e-5 if mode != "eager" else 1e-12)
        taps.advance()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_large_activations_are_read_in_pieces(dtype, is_transposed):
    x = torch.randn(1500, 700, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[:, ::3] = 0
    # this channel has its first number after the first rows, which are searched first
    x[900, 3] = 1.0
    x = x.t() if is_transposed else x
    dim = 0 if is_transposed else 1
    model = Calls("x")
    taps = gm.Taps(model, names=["x"])
    model(x, channel_dim=dim)
    agree(taps.stats().columns[0], columns_of(x, dim), 1e-11)
    assert taps.stats().n_zero_channels[0] == 233


def test_fourth_powers_of_float64_may_overflow_and_small_numbers_are_no_zeros():
    model = Calls("x")
    taps = gm.Taps(model, names=["x"])
    model(torch.tensor([1e200, 1e-200], dtype=torch.float64))
    row = taps.stats().materialize()["x"]
    assert (row.abs_max, row.n_zero, row.n_inf) == (1e200, 0, 0)


class Plain(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


class Pair(NamedTuple):
    index: torch.Tensor
    hidden: torch.Tensor


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    index: object = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    index: object
    hidden: torch.Tensor


class Items(OrderedDict):
    """A mapping with more than its items, as outputs of Hugging Face models are."""

    extra = 1


INDEX = torch.arange(3)
OUTPUTS = {
    "tuple": (lambda x: (INDEX, x * 2, x), lambda out: out[1]),
    "list": (lambda x: [x * 2, x], lambda out: out[0]),
    "named tuple": (lambda x: Pair(INDEX, x * 2), lambda out: out.hidden),
    "dict": (lambda x: {"index": INDEX, "hidden": x * 2}, lambda out: out["hidden"]),
    "ordered": (lambda x: Items(hidden=x * 2, index=None), lambda out: out["hidden"]),
    "dataclass": (lambda x: Output(x * 2), lambda out: out.hidden),
    "frozen dataclass": (lambda x: Frozen(INDEX, x * 2), lambda out: out.hidden),
}


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_first_float_of_a_structured_output(kind, is_compiled):
    make, hidden = OUTPUTS[kind]
    model = nn.Sequential(Plain(make), Plain(hidden))
    taps = gm.Taps(model, {"first": "^0$"})
    kinds = []
    model[0].register_forward_hook(lambda _module, _args, out: kinds.append(type(out)))
    if is_compiled:
        model[0]._forward_hooks.popitem()
    x = torch.ones(2, 3, requires_grad=True)
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if is_compiled else model
    call(x).sum().backward()
    report = taps.stats().materialize()
    assert report["0.out"].rms == 2.0
    assert report["0.out.grad"].rms == 1.0
    if not is_compiled:
        assert kinds == [type(make(x))]
    assert x.grad.eq(2).all()


@pytest.mark.parametrize("output", [None, INDEX, (INDEX,), {"a": None}, "text"])
def test_outputs_without_floats_are_left_alone(output):
    model = nn.Sequential(Plain(lambda _: output))
    taps = gm.Taps(model, {"all": "."})
    assert model(torch.ones(2)) is output
    assert len(taps.stats().materialize()) == 0


@pytest.mark.parametrize("is_compiled", [False, True])
def test_only_due_steps_are_measured_and_the_cadence_recompiles_nothing(is_compiled, fused):
    model = nn.Sequential(nn.Linear(3, 2))
    taps = gm.Taps(model, {"all": "."}, every=3, fused=fused)

    def loss_of(x):
        return model(x).sum()

    step = torch.compile(loss_of, fullgraph=True, backend="aot_eager") if is_compiled else loss_of
    x = torch.randn(4, 3)
    step(x).backward()
    taps.advance()
    seen = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i in range(1, 12):
            if i == 8:
                taps.configure_(every=0)
            if i == 10:
                taps.configure_(every=1)
            step(x).backward()
            seen.append(taps.stats().n_calls.tolist())
            taps.advance()
    assert [i for i, calls in enumerate(seen, start=1) if calls != [0, 0]] == [3, 6, 10, 11]
    assert all(calls in ([0, 0], [1, 1]) for calls in seen)


class Operators(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        del types
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_an_eager_step_that_is_not_due_calls_no_operator(dtype):
    model = Calls("x")
    taps = gm.Taps(model, names=["x"], every=2)
    weight = torch.randn(30, 40, dtype=dtype, requires_grad=True)
    for step, expected in ((1, 0), (2, 1)):
        taps.configure_(step=step)
        x = weight.t()[:, ::2]
        with Operators() as forward:
            y = model(x)
        loss = y.sum()
        with Operators() as backward:
            loss.backward()
        for seen in (forward, backward):
            assert seen.names.count("gradiometer.tap_.default") == expected
        assert bool(forward.names) == expected
    assert taps.stats().n_calls.tolist() == [1, 1]


def part(x):
    return x.transpose(1, 3)[:, ::2]


# those that a graph has in memory anyway
IN_MEMORY = {
    # in the format channels_last, which eager code does not choose
    "convolution": (lambda x: nn.functional.conv2d(x, torch.ones(8, 4, 3, 3)), torch.float32),
    "matrix product": (lambda x: (x.flatten(1) @ x.flatten(1).t()).t(), torch.float32),
    "part": (part, torch.float32),
    "part, float64": (part, torch.float64),
    "part, bf16": (part, torch.bfloat16),
}


@needs_compiler
@pytest.mark.parametrize("name", IN_MEMORY)
def test_a_compiled_step_that_is_not_due_copies_nothing(name):
    make, dtype = IN_MEMORY[name]
    x, counts = torch.randn(2, 4, 16, 16).to(dtype), []
    for is_tapped in (False, True):
        torch._dynamo.reset()
        model = nn.Sequential(Plain(make), Plain(lambda x: x.float().sum()))
        taps = gm.Taps(model, {"all": "0"}, every=2).configure_(step=1) if is_tapped else None
        # a graph that is cached on disk may be that of an earlier version
        with (
            torch._inductor.config.patch(fx_graph_cache=False),
            torch._functorch.config.patch(enable_autograd_cache=False),
        ):
            step = torch.compile(model, fullgraph=True)
            _, codes = run_and_get_code(step, x)
        # Inductor would generate a kernel that copies the values for the op
        counts.append([code.count("cpp_fused") for code in codes])
    assert counts[0] == counts[1] != [0]
    assert not taps.stats().columns.any()
    taps.configure_(step=2)
    step(x)
    agree(taps.stats().columns[0], columns_of(make(x), 1), 1e-6)


@every_backend
def test_a_complex_activation_in_a_graph(backend):
    model = nn.Sequential(Plain(lambda x: torch.complex(x, 2 * x)), Plain(lambda x: x.abs().sum()))
    taps = gm.Taps(model, {"all": "0"})
    x = torch.randn(5, 6, requires_grad=True)
    torch.compile(model, fullgraph=True, backend=backend)(x).backward()
    agree(taps.stats().columns[0], columns_of(torch.complex(x, 2 * x)), 1e-6)
    assert taps.stats().n_channels.tolist() == [6, 6]


def test_calls_of_a_step_merge():
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, layer, layer)
    taps = gm.Taps(model, {"all": "."})
    assert taps.names == ("0.out",)
    for _ in range(2):
        model(torch.randn(5, 2)).sum().backward()
    row = taps.stats().materialize()["0.out"]
    assert (row.n_calls, row.numel, row.n_channels) == (6, 60, 12)
    assert taps.stats().n_calls.tolist() == [6, 6]


def test_nothing_is_measured_in_evaluation_mode_or_after_remove():
    model = Named()
    taps = gm.Taps(model, {"all": "."}, names=["named"])
    model.eval()
    model(torch.ones(1, 2))
    assert not taps.stats().columns.any()
    model.train()
    model(torch.ones(1, 2))
    assert taps.stats().n_calls.tolist() == [1, 1, 0, 0]
    # another model of the same class is not measured
    Named()(torch.ones(1, 2))
    assert taps.stats().n_calls.tolist() == [1, 1, 0, 0]
    taps.remove()
    model(torch.ones(1, 2))
    assert taps.stats().n_calls.tolist() == [1, 1, 0, 0]


def test_sizes_that_change_do_not_recompile_again(fused):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    taps = gm.Taps(model, {"all": "."}, fused=fused)
    step = torch.compile(lambda x: model(x).sum(), fullgraph=True, dynamic=True, backend="aot_eager")
    step(torch.randn(4, 3)).backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in (5, 7, 9):
            taps.advance()
            step(torch.randn(n, 3)).backward()
            assert taps.stats().numel.tolist() == [4 * n] * 4


@pytest.mark.parametrize("is_compiled", [False, True])
def test_autocast_gives_the_statistics_of_the_cast_values(is_compiled, fused):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16))
    taps = gm.Taps(model, {"all": "."}, fused=fused)
    kept = []
    model[0].register_forward_hook(lambda _module, _args, out: kept.append(out)) if not is_compiled else None

    def loss_of(x):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        return out.float().square().sum(), out

    step = torch.compile(loss_of, fullgraph=True, backend="aot_eager") if is_compiled else loss_of
    loss, out = step(torch.randn(8, 16))
    loss.backward()
    assert out.dtype == torch.bfloat16
    stats = taps.stats()
    agree(stats.columns[0], columns_of(out))
    agree(stats.columns[1], columns_of(2 * out.float().to(torch.bfloat16)))


def test_stats_leave_a_compiled_step_and_group_and_merge(fused):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    taps = gm.Taps(model, {"linear": nn.Linear, "relu": lambda name: name == "1"}, fused=fused)

    def whole(x):
        for p in model.parameters():
            p.grad = None
        model(x).sum().backward()
        stats = taps.stats()
        taps.advance()
        return stats

    step = torch.compile(whole, fullgraph=True, backend="aot_eager")
    first, second = step(torch.randn(5, 3)), step(torch.randn(5, 3))
    assert first.numel.tolist() == [20, 20, 5] * 2
    assert taps.cursor[0] == 2
    assert taps.groups == {
        "linear": ("0.out", "2.out", "0.out.grad", "2.out.grad"),
        "relu": ("1.out", "1.out.grad"),
    }
    assert first.group(taps.groups).numel.tolist() == [50, 40]
    both = first.merge(second)
    assert both.n_calls.tolist() == [2] * 6
    assert both.abs_max.tolist() == torch.maximum(first.abs_max, second.abs_max).tolist()
    assert first.materialize_async().result().names == first.names


def test_statistics_of_known_distributions():
    model = Calls("normal", "constant", "spike")
    taps = gm.Taps(model, names=model.names)
    model.names = ("normal",)
    # the standard error of the kurtosis of n normal numbers is sqrt(96 / n)
    model(torch.randn(400_000, generator=torch.Generator().manual_seed(0)))
    model.names = ("constant",)
    model(torch.full((100,), -2.0))
    model.names = ("spike",)
    model(torch.cat([torch.zeros(99), torch.ones(1)]))
    report = taps.stats().materialize()
    assert abs(report["normal"].kurtosis - 3) < 5 * (96 / 400_000) ** 0.5
    assert (report["constant"].kurtosis, report["constant"].outlier_ratio) == (1.0, 1.0)
    assert abs(report["spike"].kurtosis - 100) < 1e-9
    assert abs(report["spike"].outlier_ratio - 10) < 1e-9
    assert "spike" in str(report)


LAYER = nn.Sequential(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: gm.Taps([torch.ones(1)], {"a": "."}), TypeError, "torch.nn.Module"),
        (lambda: gm.Taps(LAYER), ValueError, "nothing to measure"),
        (lambda: gm.Taps(LAYER, nn.Linear), TypeError, "patterns must map names of groups to rules"),
        (lambda: gm.Taps(LAYER, "0"), TypeError, "patterns must map names of groups to rules, got '0'"),
        (lambda: gm.Taps(LAYER, {"a": "nowhere"}), ValueError, "'a' selects no module"),
        (lambda: gm.Taps(LAYER, {"b": nn.Conv2d}), ValueError, "'b' selects no module"),
        (lambda: gm.Taps(LAYER, {"a": "["}), ValueError, "regular expression"),
        (lambda: gm.Taps(LAYER, {"a": "0"}, names=["0.out"]), ValueError, "'0.out' appears twice"),
        (lambda: gm.Taps(LAYER, {"a": "0"}, every=-1), ValueError, "every must be an integer"),
        (lambda: gm.Taps(LAYER, {"a": "0"}, every=True), ValueError, "every=True"),
    ],
)
def test_errors_of_the_constructor(make, error, text):
    hooks = len(LAYER[0]._forward_hooks)
    with pytest.raises(error, match=text):
        make()
    assert len(LAYER[0]._forward_hooks) == hooks


@pytest.mark.parametrize(
    ("x", "options", "error", "text"),
    [
        (3.0, {}, TypeError, "'x' is 3.0; pass a tensor"),
        (torch.ones(2, dtype=torch.int64), {}, TypeError, "torch.int64"),
        (torch.eye(2).to_sparse(), {}, TypeError, "layout"),
        (torch.ones(2, device="meta"), {}, TypeError, "on meta"),
        (torch.ones(2, 2), {"channel_dim": 2}, IndexError, "'x' has 2 dimensions, so channel_dim=2 is none"),
    ],
)
def test_what_cannot_be_measured_is_named(x, options, error, text):
    model = Calls("x")
    gm.Taps(model, names=["x"])
    with pytest.raises(error, match=text):
        model(x, **options)


def test_a_leaf_gets_no_hook_that_stays():
    model = Calls("x")
    taps = gm.Taps(model, names=["x"])
    x = torch.ones(3, requires_grad=True)
    for _ in range(3):
        taps.advance()
        model(x).sum().backward()
    assert taps.stats().n_calls.tolist() == [1, 1]


def test_channels_of_convolutions_and_of_what_follows_them():
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Flatten(2))
    taps = gm.Taps(model, {"all": "."})
    model(torch.randn(2, 1, 5, 5)).sum().backward()
    assert taps.stats().n_channels.tolist() == [6, 6, 6, 9] * 2


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x):
        return gm.tap(self.layer(x), "named")


@pytest.mark.parametrize("is_compiled", [False, True])
def test_functional_gradients(is_compiled, fused):
    model = Named()
    taps = gm.Taps(model, {"all": "."}, names=["named"], fused=fused)

    def loss_of(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).sum()

    def gradients(parameters, x):
        return torch.func.grad_and_value(loss_of)(parameters, x)

    step = torch.compile(gradients, fullgraph=True, backend="aot_eager") if is_compiled else gradients
    step(dict(model.named_parameters()), torch.ones(5, 2))
    assert taps.stats().numel.tolist() == [15] * 4
    assert taps.stats().rms[2:].tolist() == [1, 1]


def saved_and_loaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])


def modules_in(value):
    """Return the modules that a value refers to, directly or not, with taps."""
    found, todo, seen = [], [value], set()
    while todo:
        x = todo.pop()
        if id(x) in seen or isinstance(x, (type, types.ModuleType, types.FunctionType)):
            continue
        seen.add(id(x))
        found += [x] if isinstance(x, nn.Module) else []
        todo += gc.get_referents(x)
    return found


@COPIES
@pytest.mark.parametrize("names", [(), ("named",)])
def test_a_copy_of_a_model_has_taps_of_its_own(copied, names):
    model = Named()
    taps = gm.Taps(model, {"all": "."}, names=names)
    # a part of it that comes first
    part, other, again = copied([next(model.children()), model, {"model": model}])
    assert again["model"] is other
    assert part is next(other.children())
    (own,) = [x for x in modules_in(other) if isinstance(x, gm.Taps)]
    assert own.model is other
    for each in (other, copied(other)):
        each(torch.ones(1, 2)).sum().backward()
    part(torch.ones(1, 2)).sum().backward()
    # one call of the model and one of its part
    assert own.stats().n_calls.tolist() == [2, *[1] * len(names)] * 2
    assert not taps.stats().columns.any()
    own.remove()
    other(torch.ones(1, 2)).sum().backward()
    assert own.stats().n_calls.tolist() == [2, *[1] * len(names)] * 2


@COPIES
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_copy_of_a_part_has_no_taps(copied, is_compiled):
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    taps = gm.Taps(model, {"all": "."}, names=["named"])
    part = copied(model[1])
    assert {id(x) for x in modules_in(part)} == {id(x) for x in part.modules()}
    run = torch.compile(part, backend="aot_eager", fullgraph=True) if is_compiled else part
    assert torch.equal(run(torch.ones(1, 2)), model[1](torch.ones(1, 2)))
    # only the call of the model's own part
    assert taps.stats().n_calls.tolist() == [0, 1, 1, 1, 0] + [0] * 5


def test_casts_of_taps_keep_float64():
    taps = gm.Taps(nn.Sequential(nn.Linear(2, 2)), {"all": "."}).half()
    assert {x.dtype for x in taps.buffers()} == {torch.float64}


def test_exported_models_keep_the_measurement(fused):
    model = nn.Sequential(nn.Linear(2, 3))
    taps = gm.Taps(model, {"all": "."}, fused=fused)
    program = torch.export.export(model, (torch.ones(1, 2),))
    assert not taps.stats().columns.any()
    assert torch.equal(program.module()(torch.ones(1, 2)), model(torch.ones(1, 2)))


# Dynamo reads .grad of a graph's input that is not a leaf
reads_grad = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


# the backend aot_eager notices that the backward of one part changes what the other has saved, the store
@needs_compiler
@reads_grad
def test_modules_that_are_compiled_one_by_one(fused):
    model = Model()
    for block in model.blocks:
        block.compile(fullgraph=True)
    taps = gm.Taps(model, TAPPED, names=["inp"], fused=fused)
    x = torch.randn(5, 4)
    for _ in range(2):
        taps.advance()
        model(x).square().sum().backward()
    expected = expected_rows(x)
    for name, row in zip(taps.stats().names, taps.stats().columns, strict=True):
        agree(row, expected[name], 1e-5)


@needs_compiler
def test_two_forward_passes_before_their_backward_passes(fused):
    model = Named()
    taps = gm.Taps(model, names=["named"], fused=fused)
    step = torch.compile(lambda x: model(x).sum(), fullgraph=True)
    losses = [step(torch.ones(5, 2)) for _ in range(2)]
    for loss in losses:
        loss.backward()
    assert taps.stats().n_calls.tolist() == [2, 2]


@reads_grad
def test_the_input_of_a_compiled_part():
    class Parts(Named):
        def __init__(self):
            super().__init__()
            self.rest = torch.compile(self.tail, fullgraph=True, backend="aot_eager")

        def tail(self, x):
            return gm.tap(x, "named").relu()

        def forward(self, x):
            return self.rest(self.layer(x))

    model = Parts()
    taps = gm.Taps(model, names=["named"])
    model(torch.ones(5, 2)).sum().backward()
    assert taps.stats().numel.tolist() == [15, 15]


def test_taps_of_a_compiled_model_begin_and_end_with_a_reset():
    model = nn.Sequential(nn.Linear(2, 3))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(torch.ones(1, 2))
    taps = gm.Taps(model, {"all": "."})
    for _ in range(2):
        torch.compiler.reset()
        compiled(torch.ones(1, 2)).sum().backward()
        # once, and not again after `remove`
        assert taps.stats().n_calls.tolist() == [1, 1]
        taps.remove()


def train(dtype, taps_of, backend="inductor"):
    """Return the weights after two steps with a backward in the graph, the taps' columns, and the graphs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 64), nn.Tanh()).to(
        dtype
    )
    taps = taps_of(model)

    def whole(x):
        loss = model(x).float().square().sum()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.01 * p.grad)
                p.grad = None
        return loss.detach()

    kept = Kept()
    step = torch.compile(whole, fullgraph=True, backend=kept.backend if backend == "kept" else backend)
    for i in range(2):
        step(torch.randn(40, 32, generator=torch.Generator().manual_seed(i)).to(dtype))
    targets = [node.target for graph in kept.graphs for node in graph.graph.nodes]
    return list(model.parameters()), None if taps is None else taps.stats().columns, targets


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fused_taps_measure_what_the_op_does_and_leave_the_training_alone(dtype):
    pattern = {"all": "[1-4]"}
    plain, _, _ = train(dtype, lambda _: None)
    by_op, op, _ = train(dtype, lambda model: gm.Taps(model, pattern, fused=False))
    by_fused, fused, _ = train(dtype, lambda model: gm.Taps(model, pattern, fused=True))
    for weights in zip(plain, by_op, by_fused, strict=True):
        assert torch.equal(weights[0], weights[1])
        assert torch.equal(weights[0], weights[2])
    for row, expected in zip(fused, op, strict=True):
        agree(row, dict(zip(ACTIVATIONS.index, expected.tolist(), strict=True)), 1e-13)


PRODUCERS = {
    "gelu": nn.functional.gelu,
    "layer norm": lambda x: nn.functional.layer_norm(x, x.shape[-1:]),
    # some are 0 in bf16, but not in fp32
    "underflow": lambda x: nn.functional.layer_norm(x, x.shape[-1:]) * 1e-40,
}


@needs_compiler
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("producer", PRODUCERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_statistics_are_those_of_the_stored_values(dtype, producer, fused):
    # in a kernel that also computes them, Inductor passes on fp32 values before their rounding
    model = nn.Sequential(Plain(PRODUCERS[producer]))
    taps = gm.Taps(model, {"all": "."}, fused=fused)
    x = torch.randn(512, 768, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = torch.compile(model, fullgraph=True)(x)
    agree(taps.stats().columns[0], columns_of(out), 1e-13)


@pytest.mark.parametrize(
    ("options", "dtype", "is_fused"),
    [
        ({}, torch.float32, True),
        ({}, torch.float64, True),
        ({}, torch.bfloat16, False),
        ({"fused": True}, torch.bfloat16, True),
        ({"fused": True}, torch.float16, False),
        ({"fused": False}, torch.float32, False),
        # steps that are not measured would compute the sums
        ({"every": 10}, torch.float32, False),
        ({"every": 10, "fused": True}, torch.float32, True),
    ],
)
def test_the_default_on_a_cpu_is_what_costs_less(options, dtype, is_fused):
    *_, targets = train(dtype, lambda model: gm.Taps(model, {"all": "[1-4]"}, **options), backend="kept")
    names = [str(target) for target in targets]
    # the graph's own form of an op that changes its arguments
    assert any("tap_partials_" in name or "auto_functionalized" in name for name in names)
    sums = sum(target is torch.ops.aten.amax.default for target in targets)
    assert sums == (8 if is_fused else 0)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fused_counts_are_exact(backend, dtype):
    model = nn.Sequential(nn.Identity(), Plain(lambda x: x * 2.0), Plain(torch.relu))
    taps = gm.Taps(model, {"all": "[12]"}, fused=True)
    x = torch.randn(50, 384, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[3, 5], x[7, 1], x[7, 2], x[9] = float("nan"), float("inf"), float("-inf"), 0.0
    x[:, 11] = -1.0
    step = torch.compile(model, fullgraph=True, backend=backend)
    for values in (x, x.nan_to_num(1.0, 1.0, 1.0), x[:, :384].clamp(min=0.5)):
        taps.advance()
        step(values)
        for row, y in zip(taps.stats().columns, (values * 2.0, (values * 2.0).relu()), strict=False):
            agree(row, columns_of(y), 1e-13)


@needs_compiler
@pytest.mark.parametrize("shape", [(2**12, 2**12), (2**24,), (2**8, 2**6, 2**5, 2**5)])
@pytest.mark.parametrize("value", [1 / 3, -0.1])
def test_fused_sums_of_many_constants_are_exact_to_the_bound(shape, value):
    model = nn.Sequential(Plain(lambda x: x + 0.0))
    taps = gm.Taps(model, {"all": "."}, fused=True)
    x = torch.full(shape, value)
    torch.compile(model, fullgraph=True)(x)
    stats, exact = taps.stats(), float(x.flatten()[0])
    n = x.numel()
    assert stats.numel[0] == n
    assert abs(float(stats.norm[0]) / (abs(exact) * n**0.5) - 1) <= 1e-13
    assert abs(float(stats.columns[0, ACTIVATIONS.index["sum"]]) - exact * n) <= 1e-13 * abs(exact) * n
    assert float(stats.abs_max[0]) == abs(exact)
