"""The optimizer's update from identical gradients: its implementations agree, and faults are found."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.checks.update_check import compare_updates


class Lion(torch.optim.Optimizer):
    """An optimizer with one implementation."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.sub_(group["lr"] * torch.lerp(momentum, p.grad, 0.1).sign())
                momentum.lerp_(p.grad, 0.01)


OPTIMIZERS = {
    "Adam": lambda p, **o: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1, **o),
    "AdamW": lambda p, **o: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, **o),
    "SGD": lambda p, **o: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **o),
    "plain SGD": lambda p, **o: torch.optim.SGD(p, lr=0.1, maximize=True, **o),
    "RMSprop": lambda p, **o: torch.optim.RMSprop(p, centered=True, momentum=0.5, **o),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "Adafactor": torch.optim.Adafactor,
}
FUSED = ("Adam", "AdamW", "SGD", "plain SGD", "Adagrad")
# pytorch#191763: on a CPU, fused SGD does not update whole vectors of 16-bit parameters
HAS_FUSED_SGD_BUG = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)


def model_of(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)


def grads_of(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator).to(p.dtype) for name, p in model.named_parameters()
    }


def trained(optimizer, model, steps=3):
    for i in range(steps):
        for name, grad in grads_of(model, 10 + i).items():
            model.get_parameter(name).grad = grad
        optimizer.step()
    optimizer.zero_grad()


def values(optimizer, model):
    return copy.deepcopy([dict(model.named_parameters()), optimizer.state_dict()])


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 3])
def test_implementations_agree(name, dtype, steps):
    options = [{}, {"foreach": True}] + [{"fused": True}] * (name in FUSED)
    for each in options:
        if HAS_FUSED_SGD_BUG and "fused" in each and "SGD" in name and dtype == torch.bfloat16:
            continue
        model = model_of(dtype)
        optimizer = OPTIMIZERS[name](model.parameters(), **each)
        trained(optimizer, model, steps)
        before, state = values(optimizer, model), optimizer.state
        report = compare_updates(optimizer, grads_of(model), model)

        assert report, str(report)
        assert len(report) == 6
        assert report.precision == "float64"
        assert same(before, values(optimizer, model))
        assert optimizer.state is state
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.skipif(not HAS_FUSED_SGD_BUG, reason="fixed in torch 2.14")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_sgd_that_leaves_out_elements_is_found(dtype):
    model = nn.Linear(64, 2, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    report = compare_updates(optimizer, grads_of(model), model)

    assert [each.name for each in report.failures] == ["weight"]
    assert report.first.text == "all elements are 0"


class Wrong(torch.optim.Adam):
    """Adam whose implementation for many tensors scales one update."""

    scale = 1.05

    @torch.no_grad()
    def step(self, closure=None):
        before = [p.clone() for p in self.param_groups[0]["params"]]
        super().step(closure)
        if self.param_groups[0]["foreach"]:
            p = self.param_groups[0]["params"][2]
            p.copy_(before[2] + self.scale * (p - before[2]))


@pytest.mark.parametrize(
    ("scale", "text"), [(1.05, "1.05"), (2.0, "all elements are 2 times"), (0.0, "are 0")]
)
def test_a_wrong_update_is_named(scale, text):
    model = model_of()
    optimizer = Wrong(model.parameters(), foreach=True)
    optimizer.scale = scale
    trained(optimizer, model)
    report = compare_updates(optimizer, grads_of(model), model, modules={"1.weight": "LayerNorm"})

    assert [each.name for each in report.failures] == ["1.weight"]
    assert report.first.what == "update"
    assert text in str(report.first)
    assert str(report.first).startswith("update 1.weight (LayerNorm): error ")


def test_rounding_where_a_gradient_is_near_0_is_no_fault():
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    grads = {name: 1e-9 * g for name, g in grads_of(model).items()}

    assert compare_updates(optimizer, grads, model)


def test_groups_and_parameters_without_gradient():
    model = model_of()
    first, *others = model.parameters()
    optimizer = torch.optim.AdamW([{"params": [first], "lr": 0.1}, {"params": others}], lr=1e-4, foreach=True)
    grads = grads_of(model)
    del grads["2.bias"]
    report = compare_updates(optimizer, grads, model)

    assert report, str(report)
    assert {each.name for each in report} == set(grads)
    assert report["0.weight"].norm > 100 * report["2.weight"].norm


def test_a_step_of_ones_own_runs_on_the_parameters_and_is_undone():
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters())
    trained(optimizer, model)
    optimizer.register_step_post_hook(lambda *_: pytest.fail("hooks are not called"))
    before = values(optimizer, model)
    tensors = [x for state in optimizer.state.values() for x in state.values()]

    def doubled():
        start = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        for p, old in zip(model.parameters(), start, strict=True):
            p.data.add_(p.data - old)

    assert compare_updates(optimizer, grads_of(model), model, step=optimizer.step)
    report = compare_updates(optimizer, grads_of(model), model, step=doubled)

    assert len(report.failures) == 6
    assert all(each.text == "all elements are 2 times the reference" for each in report)
    assert same(before, values(optimizer, model))
    assert all(
        x is y
        for x, y in zip(tensors, [x for s in optimizer.state.values() for x in s.values()], strict=True)
    )


class Compiled(torch.optim.SGD):
    """SGD that may leave the last parameter out if it is compiled."""

    is_wrong = False

    @torch.no_grad()
    def step(self, closure=None):
        del closure
        parameters = self.param_groups[0]["params"]
        for p in parameters[: -1 if self.is_wrong and torch.compiler.is_compiling() else None]:
            p.sub_(self.param_groups[0]["lr"] * p.grad)
        # torch 2.12 to 2.14 fail to return None from compiled code after a backward pass was compiled, too
        return parameters


@pytest.mark.parametrize("is_wrong", [True, False])
@pytest.mark.parametrize("is_attribute", [True, False])
def test_a_compiled_step_is_compared_as_it_is(is_wrong, is_attribute):
    # at the limit of recompilation, code runs eagerly
    torch._dynamo.reset()
    model = model_of()
    optimizer = Compiled(model.parameters(), lr=0.1)
    optimizer.is_wrong = is_wrong
    compiled = torch.compile(optimizer.step, backend="aot_eager")
    if is_attribute:
        optimizer.step = compiled

    def step(x):
        if not is_attribute:
            optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if is_attribute:
            optimizer.step()
            optimizer.zero_grad()
        else:
            compiled()
        return loss

    before = values(optimizer, model)
    report = gm.check_gradients(step, torch.randn(4, 12), model=model)

    assert same(before, values(optimizer, model))
    assert [row.what for row in report].count("update") == 6
    assert [(row.what, row.name) for row in report.failures] == ([("update", "2.bias")] if is_wrong else [])
    assert bool(report) != is_wrong


def test_an_update_that_is_compiled_with_more_is_not_compared():
    torch._dynamo.reset()
    model = model_of()
    optimizer = Compiled(model.parameters(), lr=0.1)

    @torch.compile(backend="aot_eager")
    def update():
        optimizer.step()
        return next(model.parameters()).sum()

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        update()
        return loss

    report = gm.check_gradients(step, torch.randn(4, 12), model=model, optimizer=optimizer)
    assert report, str(report)
    assert "not compared: update optimizer: Compiled is compiled within the step" in str(report)
    assert len([row for row in report if row.what == "update"]) == 1


def test_an_optimizer_with_one_implementation():
    model = model_of()
    optimizer = Lion(model.parameters())
    trained(optimizer, model)
    report = compare_updates(optimizer, grads_of(model), model)

    assert report
    assert report.against == "Lion in eager mode"
    assert not report.notes


def test_an_optimizer_that_casts_is_lifted():
    class Casting(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.grad = cast(p.grad)
            super().step(closure)

    cast = torch.Tensor.bfloat16

    @contextmanager
    def lifting():
        nonlocal cast
        cast = torch.Tensor.double
        yield
        cast = torch.Tensor.bfloat16

    model = model_of(torch.bfloat16)
    report = compare_updates(
        Casting(model.parameters(), lr=1.0, foreach=True), grads_of(model), model, lifting=lifting
    )

    assert report, str(report)
    assert report.precision == "float64"


def test_a_scheduler_and_a_wrapper():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    optimizer.step()
    scheduler.step()
    wrapper = type("Wrapper", (), {"optimizer": optimizer})()
    grads = grads_of(model)
    report = compare_updates(wrapper, grads, model)

    assert report
    assert report["0.weight"].norm == pytest.approx(0.05 * float(grads["0.weight"].norm()))


class Narrow(torch.optim.SGD):
    """Runs in float32 only."""

    @torch.no_grad()
    def step(self, closure=None):
        if any(p.dtype == torch.float64 for group in self.param_groups for p in group["params"]):
            raise RuntimeError("no kernel for float64")
        super().step(closure)


def test_without_float64_updates_are_compared_with_the_plain_implementation():
    model = model_of()
    report = compare_updates(Narrow(model.parameters(), foreach=True), grads_of(model), model)

    assert report
    assert report.precision == ""
    assert report.notes == ("Narrow can't run in float64: RuntimeError: no kernel for float64",)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.LBFGS, "needs a closure"),
        (lambda _: object(), "object is not a torch.optim.Optimizer"),
    ],
)
def test_what_cannot_be_compared_does_not_pass(make, reason):
    model = model_of()
    report = compare_updates(make(model.parameters()), grads_of(model), model)

    assert not report
    assert not report.is_comparable
    assert reason in str(report)
