"""Steps that change or depend on what is seldom changed: settings, hooks, iterators, sparse gradients."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn

import gradiometer as gm


def step_of(model, before=None):
    def step(x):
        if before is not None:
            before()
        loss = model(x.to(next(model.parameters()).dtype)).square().mean()
        loss.backward()
        return loss

    return step


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(8, 4)


BATCHES = iter([1.0, 2.0])


def square(x):
    """Return a value of the iterator, which no step here calls; its name is that of an attribute, too."""
    return x * next(BATCHES)


def test_the_name_of_an_attribute_is_not_that_of_a_global(x):
    model = nn.Linear(4, 1)
    assert gm.check_gradients(step_of(model), x, model=model)
    assert next(BATCHES) == 1.0
    with pytest.raises(ValueError, match="has an iterator"):
        gm.check_gradients(lambda: square(model(x)).sum().backward(), model=model)


@pytest.mark.parametrize("kind", ["list", "generator", "loader", "count"])
def test_an_iterator_is_an_error_and_not_advanced(kind, x):
    model, batches = nn.Linear(4, 1), [x, x + 1, x + 2]
    iterator = {
        "list": lambda: iter(batches),
        "generator": lambda: (batch for batch in batches),
        "loader": lambda: iter(torch.utils.data.DataLoader(batches, batch_size=None)),
        "count": itertools.count,
    }[kind]()
    step = step_of(model)
    with pytest.raises(ValueError, match=r"has an iterator, a .*; pass what it yields"):
        gm.check_gradients(lambda: step(next(iterator) + x), model=model)
    assert torch.equal(torch.as_tensor(next(iterator)), x if kind != "count" else torch.tensor(0))


@pytest.mark.parametrize("reads", [False, True])
def test_an_iterator_of_an_object_is_an_error_if_the_step_names_it(reads, x):
    class Trainer:
        def __init__(self):
            self.model, self.batches = nn.Linear(4, 1), iter([x, x + 1])

        def train(self, x):
            return step_of(self.model)(x)

        def read(self):
            return self.train(next(self.batches))

    trainer = Trainer()
    if reads:
        with pytest.raises(ValueError, match="has an iterator"):
            gm.check_gradients(trainer.read, model=trainer.model)
    else:
        assert gm.check_gradients(trainer.train, x, model=trainer.model)
    assert torch.equal(next(trainer.batches), x)


def test_a_step_that_does_not_repeat_is_an_error(x):
    class Counter:
        calls = 0

    model = nn.Linear(4, 1)

    def step(x):
        Counter.calls += 1
        loss = (model(x) * Counter.calls).square().mean()
        loss.backward()
        return loss

    with pytest.raises(ValueError, match=r"two runs .* differ by .* % of their norm.*pass it as an argument"):
        gm.check_gradients(step, x, model=model)


def test_settings_of_torch_are_restored(x):
    def settings():
        return (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.get_float32_matmul_precision(),
            torch.get_deterministic_debug_mode(),
            torch.is_anomaly_enabled(),
        )

    model, before, calls = nn.Linear(4, 1), settings(), []

    def change():
        calls.append(1)
        torch.set_default_dtype(torch.bfloat16)
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True)

    assert gm.check_gradients(step_of(model, change), x, model=model)
    assert settings() == before

    def fail():
        change()
        torch.set_grad_enabled(False)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gm.check_gradients(step_of(model, fail), x, model=model)
    assert settings() == before


def test_hooks_of_parameters_are_as_before(x):
    model, called = nn.Linear(4, 1), []
    model.bias.register_hook(lambda _: called.append("before"))

    def register():
        model.weight.register_hook(lambda _: called.append("weight"))
        model.bias.register_hook(lambda _: called.append("bias"))
        model.bias.register_post_accumulate_grad_hook(lambda _: called.append("after"))

    assert gm.check_gradients(step_of(model, register), x, model=model)
    assert called == []
    step_of(model)(x)
    assert called == ["before"]


_TOTAL = 0


def test_what_nested_functions_assign_is_restored(x):
    def count():
        def inner():
            global _TOTAL  # noqa: PLW0603
            _TOTAL += 1

        inner()
        count.calls = getattr(count, "calls", 0) + 1

    assert gm.check_gradients(step_of(model := nn.Linear(4, 1), count), x, model=model)
    assert (_TOTAL, vars(count)) == (0, {})


def test_a_sparse_gradient_from_before_is_restored():
    torch.manual_seed(0)
    model = nn.Embedding(20, 4, sparse=True)

    def step(index):
        model(index).square().mean().backward()

    step(torch.tensor([1, 2]))
    grad = model.weight.grad
    before = grad.to_dense().clone()
    assert gm.check_gradients(step, torch.tensor([2, 3, 3]), model=model)
    assert model.weight.grad is grad
    assert torch.equal(grad.to_dense(), before)


def test_gradients_behind_an_argument_are_restored(x):
    before, model = nn.Linear(4, 4), nn.Linear(4, 1)
    hidden = before(x)
    before.bias.grad = grad = torch.ones(4)

    def step(hidden):
        loss = model(hidden).square().mean()
        loss.backward(retain_graph=True)
        return loss

    assert gm.check_gradients(step, hidden, model=model)
    assert before.weight.grad is None
    assert before.bias.grad is grad
    assert torch.equal(grad, torch.ones(4))


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    more: dict


@pytest.mark.parametrize("is_wrong", [False, True])
def test_outputs_in_a_data_class_are_compared(is_wrong, x):
    model = nn.Linear(4, 1)
    step = step_of(model)

    def given(x):
        loss = step(x).detach()
        return Output(loss, {"twice": loss * (3 if is_wrong else 2)})

    def reference(x):
        loss = step(x).detach()
        return Output(loss, {"twice": loss * 2})

    report = gm.check_gradients(given, x, model=model, against=reference)
    assert [row.name for row in report.failures] == ["output.more.twice"] * is_wrong
    assert report["output.loss"].is_compared
