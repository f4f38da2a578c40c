"""Taps: what is measured, in which steps, and how often."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradiometer as gm
from gradiometer.columns import ACTIVATION_COLUMNS, ACTIVATION_INDEX


def columns_of(x, channel_dim=-1):
    """Return the columns of one call, by the definitions."""
    wide = (
        x.detach().to(torch.float64).flatten()
        if not x.is_complex()
        else torch.view_as_real(x.detach()).double().flatten()
    )
    finite = wide[wide.isfinite()]
    channels = x.detach().movedim(channel_dim, 0).flatten(1) if x.dim() else x.detach().view(1, 1)
    return {
        "numel": wide.numel(),
        "sumsq": float((finite**2).sum()),
        "sum": float(finite.sum()),
        "n_zero": int((wide == 0).sum()),
        "n_nan": int(wide.isnan().sum()),
        "n_posinf": int((wide == torch.inf).sum()),
        "n_neginf": int((wide == -torch.inf).sum()),
        "sum4": float((finite**4).sum()),
        "n_channels": len(channels),
        "n_zero_channels": int((channels == 0).all(dim=1).sum()),
        "n_calls": 1,
        "abs_max": float(finite.abs().max()) if len(finite) else 0.0,
    }


def merged(calls):
    """Return the columns of several calls."""
    return {
        column.name: (sum if column.merge == "sum" else max)([call[column.name] for call in calls])
        for column in ACTIVATION_COLUMNS
    }


def agree(row, expected, tolerance=1e-12):
    assert set(expected) == set(ACTIVATION_INDEX)
    for name, value in expected.items():
        # a sum of n numbers of either sign loses at most n ulp of the sum of magnitudes
        scale = (expected["numel"] * expected["sumsq"]) ** 0.5 if name == "sum" else abs(value)
        assert abs(float(row[ACTIVATION_INDEX[name]]) - value) <= tolerance * scale, name


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

    def hook(module, args, output, name):
        # the next module may change the output in place
        rows[name] = columns_of(output.detach().clone())
        output.register_hook(lambda g: rows.update({f"{name}.grad": columns_of(g.clone())}))

    for name, module in model.named_modules():
        if name.endswith((".up", ".act")) or isinstance(module, Block):
            module.register_forward_hook(functools.partial(hook, name=f"{name}.out"))
    model.inp.register_forward_hook(functools.partial(hook, name="inp"))
    model(x).square().sum().backward()
    return rows


MODES = ["eager", "graph", "backward in the graph"]


def stepper(model, mode, after=lambda: None):
    """Return a step: forward, backward, and ``after``."""

    def loss_of(x):
        return model(x).square().sum()

    if mode == "eager":

        def step(x):
            loss_of(x).backward()
            after()

        return step
    if mode == "graph":
        compiled = torch.compile(loss_of, fullgraph=True)

        def step(x):
            compiled(x).backward()
            after()

        return step

    def whole(x):
        loss_of(x).backward()
        after()

    return torch.compile(whole, fullgraph=True)


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def traced_backward():
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("use_reentrant", "whole"), [(None, False), (False, False), (False, True), (True, False), (True, True)]
)
def test_values_and_gradients_are_measured_once(mode, use_reentrant, whole, traced_backward):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    model = Model(use_reentrant, whole)
    taps = gm.Taps(model, TAPPED, names=["inp"])
    step = stepper(model, mode)
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
    taps.remove()
