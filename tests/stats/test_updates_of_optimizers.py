"""What optimizers do to the weights, measured against the differences that are computed by hand."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import gradiometer as gm
from support.compiling import needs_compiler
from support.pair_oracle import assert_pair

NAMES = tuple(column.name for column in gm.PAIR_COLUMNS)
STEPS = 3


class Lion(torch.optim.Optimizer):
    """The sign of a moving average: X. Chen et al., "Symbolic Discovery of Optimization Algorithms"."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.99)):
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.sub_(torch.lerp(p.grad, average, group["betas"][0]).sign_(), alpha=group["lr"])
                average.lerp_(p.grad, 1 - group["betas"][1])


class ScheduleFreeSGD(torch.optim.Optimizer):
    """Weights between an average x and iterates z: A. Defazio et al., "The Road Less Scheduled"."""

    def __init__(self, parameters, lr=0.1, beta=0.9):
        super().__init__(parameters, {"lr": lr, "beta": beta})
        self.count = 0

    @torch.no_grad()
    def step(self):
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["x"], state["z"] = p.detach().clone(), p.detach().clone()
                state["z"].sub_(p.grad, alpha=group["lr"])
                state["x"].lerp_(state["z"], 1 / self.count)
                p.copy_(torch.lerp(state["z"], state["x"], group["beta"]))


def eight_bit(parameters):
    return pytest.importorskip("bitsandbytes").optim.Adam8bit(parameters, lr=1e-2)


def of(name, **options):
    return functools.partial(getattr(torch.optim, name), **options)


OPTIMIZERS = {
    **{
        name: of(name, lr=0.01)
        for name in ("Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RAdam")
    },
    **{name: of(name, lr=0.01) for name in ("Adafactor", "RMSprop", "Rprop", "SGD")},
    "SGD with momentum": of("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD foreach": of("SGD", lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": of("SGD", lr=0.1, momentum=0.9, fused=True),
    "AdamW": of("AdamW", lr=0.01, foreach=False),
    "AdamW foreach": of("AdamW", lr=0.01, foreach=True),
    "AdamW fused": of("AdamW", lr=0.01, fused=True),
    "Lion": Lion,
    "schedule-free SGD": ScheduleFreeSGD,
    "8-bit Adam": eight_bit,
    # takes matrices alone
    "Muon": of("Muon", lr=0.02),
}


def model_of(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 70, bias=False), nn.Tanh(), nn.Linear(70, 3, bias=False)).to(dtype)


def trained(model, optimizer, step=None):
    """Train for some steps; check each update against the weights before and after it. Yield the reports."""
    snapshot = gm.Snapshot(model)
    for i in range(STEPS):
        snapshot.update_(model)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(i)).to(next(model.parameters()).dtype)
        model(x).square().mean().backward()
        (step or optimizer.step)()
        stats = gm.collect_updates(model, snapshot)
        for row, (name, p) in zip(stats.columns.tolist(), model.named_parameters(), strict=True):
            assert_pair(dict(zip(NAMES, row, strict=True)), p, before[name], p.grad)
        yield stats.materialize()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_of_each_step_is_that_of_the_weights(name, dtype):
    model = model_of(dtype)
    for report in trained(model, OPTIMIZERS[name](model.parameters())):
        assert report.total.norm_u > 0


def test_every_optimizer_of_torch_is_here():
    left_out = {
        "Optimizer",
        # one step calls a closure, which computes gradients several times
        "LBFGS",
        # takes sparse gradients alone, see test_an_optimizer_for_sparse_gradients
        "SparseAdam",
    }
    there = {name for name in vars(torch.optim) if name[0].isupper()} - left_out
    assert there <= {name.split()[0] for name in OPTIMIZERS}


def test_an_optimizer_for_sparse_gradients():
    model = nn.Embedding(9, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    snapshot = gm.Snapshot(model)
    before = model.weight.detach().clone()
    model(torch.tensor([1, 5, 5])).square().sum().backward()
    optimizer.step()
    stats = gm.collect_updates(model, snapshot)
    row = dict(zip(NAMES, stats.columns[0].tolist(), strict=True))
    assert_pair(row, model.weight, before, model.weight.grad.to_dense())
    # rows 1 and 5
    assert (row["n_nonzero_g"], row["n_unchanged"], row["n_stuck"]) == (8, 28, 0)


@needs_compiler
@pytest.mark.usefixtures("_dynamo")
@pytest.mark.parametrize("name", ["SGD with momentum", "AdamW"])
def test_a_compiled_optimizer(name):
    model = model_of()
    optimizer = OPTIMIZERS[name](model.parameters())

    @torch.compile
    def step():
        optimizer.step()

    for report in trained(model, optimizer, step):
        assert report.total.norm_u > 0


def test_a_closure_that_is_called_several_times():
    model = model_of()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = torch.randn(8, 6)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    snapshot, before = gm.Snapshot(model), [p.detach().clone() for p in model.parameters()]
    optimizer.step(closure)
    for row, p, old in zip(
        gm.collect_updates(model, snapshot).columns, model.parameters(), before, strict=True
    ):
        assert_pair(dict(zip(NAMES, row.tolist(), strict=True)), p, old, p.grad)


# what the columns tell about an optimizer


def test_lion_changes_every_element_by_its_learning_rate():
    model = model_of()
    *_, report = trained(model, Lion(model.parameters(), lr=2.0**-10))
    for row in report.values():
        # weights below 1 in fp32 are rounded to at most 2**-25
        assert abs(row.abs_max_u - 2.0**-10) <= 2.0**-25
        assert abs(row.rms_u - 2.0**-10) <= 2.0**-25


def test_gradient_descent_goes_down_and_momentum_less_so():
    model = model_of()
    for report in trained(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        assert report.total.descent_cosine == pytest.approx(1.0, abs=1e-6)
    model = model_of()
    *_, report = trained(model, torch.optim.Adam(model.parameters(), lr=0.01))
    assert 0 < report.total.descent_cosine < 0.99


def test_bf16_weights_lose_updates_that_fp32_weights_keep():
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = model_of(dtype)
        *_, report = trained(model, torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0))
        found[dtype] = report.total.stuck_fraction
    # a step of 1e-5 is less than half a unit in the last place of bf16 for weights above 2**9 * 1e-5 = 0.005
    assert found[torch.float32] == 0.0
    assert found[torch.bfloat16] > 0.9


def test_a_step_that_a_grad_scaler_skips_changes_nothing():
    model = model_of()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    snapshot = gm.Snapshot(model)
    # infinite gradients
    scaler.scale(model(torch.ones(2, 6)).sum() * 1e38).backward()
    scaler.step(optimizer)
    scaler.update()
    report = gm.collect_updates(model, snapshot).materialize()
    assert report.total.unchanged_fraction == 1.0
    assert report.total.n_stuck == report.total.n_nonzero_g
