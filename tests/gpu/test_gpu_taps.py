"""Taps on a real device: the definitions of the columns, captured graphs, compiled steps, checkpointing."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import gradiometer as gm
from gradiometer import ops
from gradiometer.columns import CURSOR_SIZE, Cursor
from gradiometer.ops import tap_partials
from support.activations import Calls, agree, columns_of, merged
from support.gpu import (
    DEVICE,
    DTYPES,
    FEW,
    compiled,
    fewer,
    no_waits,
    no_waits_on_a_gpu,
    on_a_gpu,
    record,
    values,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("_dynamo"),
    # shown, not raised: drivers and Inductor give advice that depends on the machine
    pytest.mark.filterwarnings("default"),
]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
# of compiled functions
STEPS = 2 if FEW else 8
# the most channels that the scratch of a store has
MOST = 2**16


def shaped(*shape: int, dtype: torch.dtype = torch.float32, dead: int = -1, dim: int = -1) -> Tensor:
    """Return numbers of several magnitudes, some of them 0; the channels ``dead`` and after it are all 0."""
    x = values(math.prod(shape), dtype).view(shape)
    if dead >= 0:
        x.movedim(dim, 0)[dead:] = 0.0
    return x


def measured(x: Tensor, channel_dim: int = -1, **options: Any) -> Tensor:
    """Return the row of one call in eager code, which must not wait."""
    model = Calls("x")
    taps = gm.Taps(model, names=["x"], **options).to(DEVICE)
    with no_waits():
        model(x, channel_dim=channel_dim)
        stats = taps.stats()
        taps.advance()
    taps.remove()
    assert not taps.values[0].any()
    return stats.columns[0].cpu()


def check(x: Tensor, channel_dim: int = -1) -> None:
    agree(measured(x, channel_dim), columns_of(x.cpu(), channel_dim))


# values


@every_dtype
def test_the_kernel_agrees_with_the_definitions(dtype):
    for shape in fewer([(33, 1025), (7, 5), (1,), (3, 2**12), (130, 768)]):
        check(shaped(*shape, dtype=dtype))
        check(shaped(*shape, dtype=dtype, dead=shape[-1] // 2))
    for dim in fewer([1, 0, 2, 3]):
        check(shaped(5, 33, 17, 9, dtype=dtype, dead=4, dim=dim), dim)


@every_dtype
def test_views_that_begin_anywhere_agree(dtype):
    base = values(40_000, dtype)
    for start in fewer([1, 3, 2, 5, 8]):
        check(base[start : start + 57 * 96].view(57, 96))
    wide = base[:39_900].view(150, 266)
    for x in fewer([wide.t(), wide[:, 3:], wide[:, ::2], wide.view(10, 15, 266).permute(2, 0, 1)]):
        check(x, 0)
        check(x, -1)


@every_dtype
def test_nan_and_inf_are_counted_wherever_they_are(dtype):
    for place in fewer([1024, -1, 0, 1, 1023, 20_000]):
        x = shaped(70, 301, dtype=dtype)
        x.view(-1)[place] = math.nan
        x.view(-1)[place - 1] = -math.inf
        check(x)
    check(torch.full((65, 70), math.inf, dtype=dtype, device=DEVICE))
    check(torch.full((3,), math.nan, dtype=dtype, device=DEVICE))


@every_dtype
def test_channels_are_zero_only_if_all_their_elements_are(dtype):
    check(torch.zeros(10, 768, dtype=dtype, device=DEVICE))
    check(torch.full((5, 7), -0.0, dtype=dtype, device=DEVICE))
    for place in fewer([768 * 5 + 5, 768 * 9, 0, 767, 768 * 10 - 1]):
        x = torch.zeros(10, 768, dtype=dtype, device=DEVICE)
        x.view(-1)[place] = torch.finfo(dtype).tiny
        check(x)
        check(x.t(), 0)


@pytest.mark.parametrize("channels", [MOST + 1, MOST, MOST - 1, 3 * MOST + 7])
@pytest.mark.parametrize("dim", [0, 1])
def test_more_channels_than_the_scratch_has(channels, dim):
    for dtype in [torch.bfloat16, torch.float32][: 1 if FEW else 2]:
        x = torch.zeros((channels, 2) if dim == 0 else (2, channels), dtype=dtype, device=DEVICE)
        x.movedim(dim, 0)[[0, 5, MOST - 2, channels - 1], [0, 1, 1, 0]] = 2.0
        check(x, dim)
        check(torch.zeros_like(x), dim)


def test_other_kinds_of_tensors():
    real = values(6000).view(50, 60, 2)
    check(torch.view_as_complex(real))
    check(values(1)[0])
    check(torch.ones(3, 1, device=DEVICE).expand(3, 40))
    fp8 = values(3000).view(50, 60).to(torch.float8_e4m3fn)
    agree(measured(fp8), columns_of(fp8.float().cpu()))
    assert not measured(torch.empty(0, 4, device=DEVICE)).any()


def test_large_activations_agree():
    # beyond the most programs of a launch, on a GPU
    x = shaped(100 if FEW else 40_000, 300, dead=290)
    check(x.bfloat16())
    check(x.t(), 0)


class Layer(nn.Module):
    """Measures the attention logits and the routing of its arguments."""

    def forward(self, q: Tensor, k: Tensor, probs: Tensor, selected: Tensor) -> None:
        gm.tap_attention(q, k, "attn")
        gm.tap_router(probs, "moe", selected=selected)


@pytest.mark.parametrize("is_captured", [False, True])
def test_attention_and_routers_agree_with_their_definitions(is_captured):
    model = Layer()
    names = ["attn.max_logit_bound", "moe.expert_load", "moe.router_entropy"]
    taps = gm.Taps(model, names=names).to(DEVICE)
    q, k = (torch.randn(2, 4, 33, 8, device=DEVICE) for _ in range(2))
    probs = torch.randn(64, 5, device=DEVICE).softmax(-1)
    selected = probs.topk(2).indices
    if is_captured:
        graph, _ = record(lambda: model(q, k, probs, selected))
        q.normal_()
        probs.copy_(torch.randn(64, 5, device=DEVICE).softmax(-1))
        selected.copy_(probs.topk(2).indices)
        taps.advance()
        graph.replay()
    else:
        with no_waits():
            model(q, k, probs, selected)
    report = taps.stats().materialize()
    taps.remove()
    bound = q.double().norm(dim=-1).amax(-1) * k.double().norm(dim=-1).amax(-1) / 8**0.5
    row = report["attn.max_logit_bound"]
    # norms of 8 numbers in fp32
    assert (row.numel, row.abs_max) == (8, pytest.approx(bound.max().item(), rel=2**-20))
    load = torch.bincount(selected.flatten().cpu(), minlength=5).double() / 64
    row = report["moe.expert_load"]
    assert (row.abs_max, row.mean) == pytest.approx((load.max().item(), load.mean().item()), rel=2**-20)
    entropy = torch.special.entr(probs.double()).sum(-1) / math.log(5)
    row = report["moe.router_entropy"]
    assert (row.numel, row.mean) == (64, pytest.approx(entropy.mean().item(), rel=2**-19))


# partial sums


@pytest.fixture
def stores():
    """Return the stores of values and gradients, and a cursor whose step is due."""
    cursor = torch.zeros(CURSOR_SIZE, dtype=torch.float64, device=DEVICE)
    cursor[Cursor.EVERY] = 1
    return *[ops.new_store(3, torch.device(DEVICE)) for _ in range(2)], cursor


def pieces_of(dtype: torch.dtype) -> dict[str, Tensor]:
    """Return tensors whose partial sums suffice, and others that have to be read."""
    rows = 8 if FEW else 96
    full = values(rows * 768, dtype).abs().add(1.0).view(rows, 768)
    return {
        "finite": full,
        "a zero": full.masked_fill(torch.arange(768, device=DEVICE) == 5, 0.0).index_fill(
            0, torch.tensor([3], device=DEVICE), 2.0
        ),
        "a channel of zeros": full.masked_fill(torch.arange(768, device=DEVICE) == 5, 0.0),
        "zeros": torch.zeros_like(full),
        "NaN": full.index_fill(0, torch.tensor([rows - 1], device=DEVICE), math.nan),
        "Inf": full.index_fill(0, torch.tensor([rows - 1], device=DEVICE), -math.inf),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_partial_sums_agree_with_the_definitions(dtype, stores):
    store, grads, cursor = stores
    for x in pieces_of(dtype).values():
        assert tap_partials.fusible(x) is not None
        store[1].zero_()
        with no_waits():
            torch.ops.gradiometer.tap(x, store, grads, cursor, 1, 1, fused=True)
        agree(store[1].cpu(), columns_of(x.cpu()))
    assert not store[0].any()
    assert not store[2].any()
    assert not grads[:3].any()


def test_captured_partial_sums_decide_anew_at_each_replay(stores):
    store, grads, cursor = stores
    x = pieces_of(torch.float32)["finite"].clone()
    graph, _ = record(lambda: torch.ops.gradiometer.tap(x, store, grads, cursor, 1, 1, fused=True))
    store[1].zero_()
    seen = []
    for new in pieces_of(torch.float32).values():
        x.copy_(new)
        graph.replay()
        seen.append(columns_of(x.cpu()))
        agree(store[1].cpu(), merged(seen))


# values and gradients of a model


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Model(nn.Module):
    """Blocks, which activation checkpointing may compute again."""

    def __init__(self, use_reentrant: bool | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Linear(8, 64)
        self.blocks = nn.ModuleList([Block(64) for _ in range(2)])
        self.use_reentrant = use_reentrant
        self.to(DEVICE, dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = gm.tap(self.inp(x), "inp")
        for block in self.blocks:
            if self.use_reentrant is None:
                x = block(x)
            else:
                # without random numbers, whose states torch would read and set in a capture
                x = checkpoint(block, x, use_reentrant=self.use_reentrant, preserve_rng_state=False)
        return x


TAPPED = {"up": r"\.up$", "act": r"\.act$", "blocks": r"^blocks\.\d$"}
checkpointed = pytest.mark.parametrize("use_reentrant", [False, True, None])


def expected_rows(model: Model, x: Tensor) -> dict[str, Any]:
    """Return the rows of a model without taps, from hooks and autograd."""
    plain, rows = Model(), {}
    plain.load_state_dict(model.state_dict())
    plain.to(x.dtype)

    def hook(_module: nn.Module, _args: Any, output: Tensor, name: str) -> None:
        rows[name] = columns_of(output.detach().cpu())
        output.register_hook(lambda g: rows.update({f"{name}.grad": columns_of(g.cpu())}))

    for name, module in plain.named_modules():
        if name.endswith((".up", ".act")) or isinstance(module, Block):
            module.register_forward_hook(functools.partial(hook, name=f"{name}.out"))
    plain.inp.register_forward_hook(functools.partial(hook, name="inp"))
    plain(x).square().sum().backward()
    return rows


def clear(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    # reentrant checkpointing needs an input with a gradient
    return torch.randn(33, 8, dtype=dtype, device=DEVICE, requires_grad=True)


def assert_rows(taps: gm.Taps, expected: dict[str, Any], tolerance: float) -> None:
    stats = taps.stats()
    assert set(stats.names) == set(expected)
    for name, row in zip(stats.names, stats.columns.cpu(), strict=True):
        agree(row, expected[name], tolerance)


@checkpointed
def test_values_and_gradients_are_measured_once_without_a_wait(use_reentrant):
    model = Model(use_reentrant, torch.float64)
    taps = gm.Taps(model, TAPPED, names=["inp"])
    for i in range(2):
        x = batch(torch.float64)
        clear(model)
        if i:
            with no_waits():
                model(x).square().sum().backward()
        else:
            # the first call compiles and loads kernels
            model(x).square().sum().backward()
        assert_rows(taps, expected_rows(model, x), 1e-11)
        taps.advance()
    taps.remove()


@checkpointed
def test_a_captured_step_measures_each_replay(use_reentrant):
    model = Model(use_reentrant, torch.float64)
    taps = gm.Taps(model, TAPPED, names=["inp"])
    x = batch(torch.float64)

    def step() -> None:
        clear(model)
        model(x).square().sum().backward()

    graph, _ = record(step)
    with no_waits():
        taps.advance()
    for _ in range(2):
        with torch.no_grad():
            x.normal_()
        expected = expected_rows(model, x)
        graph.replay()
        assert_rows(taps, expected, 1e-11)
        # calls of a step merge
        graph.replay()
        assert_rows(taps, {name: merged([row] * 2) for name, row in expected.items()}, 1e-11)
        taps.advance()
    taps.remove()


# the second is copied first, in the steps that are measured
@pytest.mark.parametrize("stride", [1, 2])
def test_the_cadence_is_read_at_each_replay(stride):
    model = Calls("x")
    taps = gm.Taps(model, names=["x"], every=3).to(DEVICE)
    x = values(5000 * stride).view(50, -1)[:, ::stride]
    graph, _ = record(lambda: model(x))
    taps.configure_(step=0).advance()
    calls = []
    for step in range(1, 13):
        with no_waits():
            if step == 7:
                taps.configure_(every=0)
            if step == 10:
                taps.configure_(every=2)
            graph.replay()
            stats = taps.stats()
        calls.append(int(stats.n_calls[0]))
        if calls[-1]:
            agree(stats.columns[0].cpu(), columns_of(x.cpu()))
        taps.advance()
    assert [step for step, count in enumerate(calls, start=1) if count] == [3, 6, 10, 12]
    assert set(calls) == {0, 1}
    taps.remove()


@pytest.mark.parametrize("channels", [768, MOST + 1])
def test_a_captured_call_resets_its_marks(channels):
    model = Calls("x")
    taps = gm.Taps(model, names=["x"]).to(DEVICE)
    x = torch.ones(4, channels, device=DEVICE)
    graph, _ = record(lambda: model(x))
    for alive in (1, channels, 0, channels // 2):
        taps.advance()
        x.zero_()
        x[2, :alive] = 3.0
        graph.replay()
        agree(taps.stats().columns[0].cpu(), columns_of(x.cpu()))
    taps.remove()


# streams


@on_a_gpu
def test_taps_on_several_streams_wait_for_each_other():
    model = Calls("x", "y")
    taps = gm.Taps(model, names=model.names).to(DEVICE)
    # of several programs each, and of different sizes, so that they would disturb each other
    xs = [values(2**20 * (i + 1)).view(-1, 512)[:, : 300 + i] for i in range(3)]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, x in zip(streams, xs, strict=True):
            with torch.cuda.stream(stream):
                model(x)
    with torch.cuda.stream(streams[0]):
        stats = taps.stats()
    torch.cuda.synchronize()
    expected = merged([columns_of(x.cpu()) for x in xs] * 50)
    for row in stats.columns[:2].cpu():
        agree(row, expected)
    taps.remove()


# compiled steps


class Tapped(nn.Module):
    """A layer with dead channels, whose output has a gradient that is an argument."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 256)
        with torch.no_grad():
            self.linear.weight[250:] = 0.0
            self.linear.bias[250:] = 0.0
        self.to(DEVICE, dtype)

    def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = gm.tap(self.linear(x), "y")
        return (y * w).sum(), y


@pytest.mark.compiles
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "op"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_compiled_step_measures_what_it_computes(mode, fused, dtype):
    model = Tapped(dtype)
    taps = gm.Taps(model, names=["y"], fused=fused)

    def step(x: Tensor, w: Tensor) -> Tensor:
        loss, y = model(x, w)
        loss.backward()
        clear(model)
        return y.detach()

    run = compiled(step, mode)
    for i in range(STEPS):
        x, w = torch.randn(48, 16, device=DEVICE).to(dtype), torch.randn(48, 256, device=DEVICE).to(dtype)
        w[:, :3] = 0.0
        if i == STEPS - 1:
            x[5] = math.nan
        torch.compiler.cudagraph_mark_step_begin()
        # by then it is compiled, warmed up and captured
        if i < 4:
            y = run(x, w)
        else:
            with no_waits_on_a_gpu():
                y = run(x, w)
        value, grad = taps.stats().columns.cpu()
        agree(value, columns_of(y.cpu()))
        agree(grad, columns_of(w.cpu()))
        taps.advance()
    taps.remove()
    assert not counters["graph_break"]
    if counters["inductor"]["cudagraph_skips"]:
        warnings.warn("Inductor made no CUDA graph of this step", stacklevel=1)


@pytest.mark.compiles
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "op"])
def test_a_compiled_step_with_checkpoints_measures_once(mode, fused):
    model = Model(use_reentrant=False)
    taps = gm.Taps(model, TAPPED, names=["inp"], fused=fused)

    def step(x: Tensor) -> None:
        model(x).square().sum().backward()
        clear(model)

    run = compiled(step, mode)
    for _ in range(STEPS):
        x = batch()
        torch.compiler.cudagraph_mark_step_begin()
        run(x)
        # two compilers round fp32 differently
        assert_rows(taps, expected_rows(model, x), 1e-3)
        taps.advance()
    taps.remove()
