"""Runs of a step for check_gradients: what is read, in which order, and what runs eagerly."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradiometer.checks.gradient_runs import eagerly, run_step
from gradiometer.checks.recompiled import WithoutDropout, recompiled
from gradiometer.checks.step_state import StepState
from support.compiling import needs_compiler


def model_and_names():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return model, {p: name for name, p in model.named_parameters()}


def test_gradients_are_those_before_the_update_in_the_order_of_the_backward():
    model, names = model_and_names()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 3)

    def step():
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "number": 3, "rate": 0.5}

    model(x).square().mean().backward()
    expected = {name: p.grad.clone() for p, name in names.items()}
    model.zero_grad()
    order, called = {}, []
    run = run_step(step, names, [optimizer], order, called)
    assert all(torch.equal(run.grads[name], grad) for name, grad in expected.items())
    assert set(list(order)[:2]) == {"2.weight", "2.bias"}
    assert run.outputs.keys() == {"output.loss", "output.rate"}
    assert called == [optimizer]
    assert not run.notes
    assert not optimizer._optimizer_step_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in names)


def test_gradients_of_the_first_of_several_updates():
    model, names = model_and_names()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        for factor in (1.0, 2.0):
            optimizer.zero_grad()
            (model(torch.ones(1, 3)).sum() * factor).backward()
            optimizer.step()

    run = run_step(step, names, [optimizer])
    assert torch.equal(run.grads["2.bias"], torch.ones(2))
    assert "several times" in run.notes[0]


def test_an_optimizer_in_the_backward_pass_is_seen():
    model, names = model_and_names()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in names}

    def update(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in names:
        p.register_post_accumulate_grad_hook(update)
    state = StepState(model, (), {}, model)
    assert len(state.optimizers) == 4
    before = [p.detach().clone() for p in names]
    with state.restored():
        run = run_step(lambda: model(torch.ones(1, 3)).sum().backward(), names, state.optimizers, {})
    assert run.grads.keys() == set(names.values())
    assert all(torch.equal(a, b) for a, b in zip(before, names, strict=True))


def test_gradients_that_a_step_leaves_alone_are_not_read():
    model, names = model_and_names()
    model(torch.ones(1, 3)).sum().backward()
    assert not run_step(lambda: model(torch.ones(1, 3)), names, []).grads
    assert run_step(lambda: model(torch.ones(1, 3)).sum().backward(), names, []).grads
    # equal bits, but computed anew
    model.zero_grad()
    model(torch.ones(1, 3)).sum().backward()

    def again():
        model.zero_grad()
        model(torch.ones(1, 3)).sum().backward()

    assert run_step(again, names, []).grads


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_no_checkpoint_recomputes_eagerly(use_reentrant):
    model, _ = model_and_names()
    calls = []

    def part(x):
        calls.append(x)
        return model(x)

    x = torch.randn(2, 3, requires_grad=True)

    def step():
        checkpoint(part, x, use_reentrant=use_reentrant).sum().backward()

    step()
    assert len(calls) == 2
    with eagerly():
        step()
    assert len(calls) == 3
    step()
    assert len(calls) == 5


@pytest.mark.parametrize("how", ["function", "module", "in place", "region"])
def test_compiled_code_runs_eagerly_and_its_backend_is_known(how):
    model, _ = model_and_names()
    seen = []

    class Layer(nn.Module):
        def forward(self, x):
            seen.append(torch.compiler.is_compiling())
            return model(x)

    layer = Layer()
    if how == "function":
        called = torch.compile(layer.forward, backend="eager")
    elif how == "module":
        called = torch.compile(layer, backend="eager")
    elif how == "in place":
        layer.compile(backend="eager")
        called = layer
    else:
        called = nn.Sequential(torch.compile(layer, backend="eager"), nn.Identity())
    called(torch.ones(1, 3))
    seen.clear()
    backends = []
    with eagerly(backends):
        called(torch.ones(1, 3))
        called(torch.ones(1, 3))
    assert seen == [False, False]
    assert len(backends) == 1
    backends.clear()
    with eagerly(backends):
        layer.forward(torch.ones(1, 3))
    assert not backends


def test_dropout_is_off_in_eager_mode():
    x = torch.ones(2, 1, 8, 4)
    with WithoutDropout():
        for function in (functional.dropout, functional.alpha_dropout, functional.feature_alpha_dropout):
            assert torch.equal(function(x, 0.5, True), x)
            assert torch.equal(function(x, p=0.5, training=True), x)
        assert torch.equal(nn.Dropout(0.9)(x), x)
        torch.manual_seed(0)
        attended = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    assert torch.equal(attended, functional.scaled_dot_product_attention(x, x, x))
    assert not torch.equal(functional.dropout(x), x)


@needs_compiler
def test_compiled_again_without_dropout_or_with_the_numbers_of_eager_mode():
    model, _ = model_and_names()

    def noisy(x):
        x = model[2](functional.dropout(model[1](model[0](x)), 0.5))
        return functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    compiled = torch.compile(noisy, fullgraph=True)
    x = torch.randn(2, 6, 3)

    def called():
        torch.manual_seed(1)
        return compiled(x).detach()

    as_it_is = called()
    backends = []
    with eagerly(backends):
        eager = called()
    with eagerly(), WithoutDropout():
        plain = called()
    with recompiled(backends[0], dropout=True):
        torch.testing.assert_close(called(), eager)
    with recompiled(backends[0], dropout=False):
        torch.testing.assert_close(called(), plain)
    assert not torch.allclose(as_it_is, eager)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(called(), as_it_is)
        with recompiled(backends[0], dropout=False):
            called()


def test_compiled_again_also_at_the_limit_of_recompilations():
    def noisy(x, number):
        return functional.dropout(x * number, 0.5)

    compiled = torch.compile(noisy, backend="aot_eager", dynamic=False)
    backends = []
    with torch._dynamo.config.patch(recompile_limit=2, specialize_float=True):
        for number in (2.0, 3.0):
            compiled(torch.ones(9), number)
        with eagerly(backends):
            compiled(torch.ones(9), 2.0)
        with recompiled(backends[0], dropout=False):
            assert torch.equal(compiled(torch.ones(9), 3.0), torch.full((9,), 3.0))
        with torch._dynamo.config.patch(error_on_recompile=True):
            for number in (2.0, 3.0):
                compiled(torch.ones(9), number)
