"""Collection inside a compiled step: one graph, compiled once, with the results of an eager call.

A compiled step's gradients depend on its compiler, so the bitwise comparison uses the statistics of the
gradients that the step itself returns.
"""

from __future__ import annotations

import inspect
import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import RecompileError
from torch.nn.functional import mse_loss

import gradiometer as gm
from gradiometer.columns import TENSORS
from support.compiling import Kept, batch, graphs, needs_compiler, no_recompile, small_model

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("_dynamo")


EVERYTHING = {"all": "."}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def train_step(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, gm.TensorStats, dict[str, Tensor]]:
    loss = mse_loss(model(x), y)
    loss.backward()
    stats = gm.collect_grads(model)
    grads = gradients(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * parameter.grad)
    for parameter in model.parameters():
        parameter.grad = None
    return loss.detach(), stats, grads


def assert_same(stats: gm.TensorStats, expected: gm.TensorStats) -> None:
    assert isinstance(stats, gm.TensorStats)
    assert stats.names == expected.names
    assert stats.thresholds == expected.thresholds
    assert not stats.columns.requires_grad
    # bit for bit; NaN does not occur in raw columns
    assert torch.equal(stats.columns, expected.columns)
    assert torch.equal(stats.flags, expected.flags)


# whole steps


def test_changed_addresses_are_read_and_do_not_recompile():
    model = small_model()
    step = torch.compile(lambda: gm.collect_grads(model), fullgraph=True, backend="aot_eager")
    kept = []
    for i in range(5):
        for parameter in model.parameters():
            # earlier gradients are kept alive, so these have other addresses
            kept.append(parameter.grad)
            parameter.grad = torch.full_like(parameter, i)
        with no_recompile() if i else nullcontext():
            stats = step()
        assert_same(stats, gm.collect_grads(model))
        assert stats.abs_max.tolist() == [i] * 4


def test_the_check_for_recompilation_can_fail():
    step = torch.compile(lambda x, n: gm.collect([x * n]), fullgraph=True, backend="aot_eager")
    step(torch.ones(3), 2)
    with no_recompile(), pytest.raises(RecompileError):
        step(torch.ones(3), 3)


# shapes


@pytest.mark.parametrize("how", [pytest.param("dynamic=True", marks=pytest.mark.deep), "mark_dynamic"])
def test_changing_batch_sizes_do_not_recompile(how):
    model = small_model()

    def whole(x: Tensor, y: Tensor) -> tuple[gm.TensorStats, dict[str, Tensor]]:
        hidden = model(x)
        mse_loss(hidden, y).backward()
        grads = gradients(model)
        # static and dynamic shapes in one call
        stats = gm.collect({"hidden": hidden, "error": (hidden - y).T, **grads})
        for parameter in model.parameters():
            parameter.grad = None
        return stats, {"hidden": hidden.detach(), "error": (hidden - y).T.detach(), **grads}

    step = torch.compile(
        whole, fullgraph=True, backend="aot_eager", dynamic=True if how == "dynamic=True" else None
    )
    for i, size in enumerate((7, 3, 20, 5, 64)):
        x, y = batch(size)
        if how == "mark_dynamic":
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(y, 0)
        with no_recompile() if i else nullcontext():
            stats, measured = step(x, y)
        assert_same(stats, gm.collect(measured))
        assert stats.numel[:2].tolist() == [size * 3] * 2
    assert graphs() == 1


@needs_compiler
@pytest.mark.deep
def test_changing_batch_sizes_do_not_recompile_with_inductor():
    step = torch.compile(
        lambda x: gm.collect({"twice": x * 2, "sum": x.sum(0)}).group(EVERYTHING).columns,
        fullgraph=True,
        dynamic=True,
    )
    for i, size in enumerate((7, 3, 20)):
        x = torch.randn(size, 4)
        with no_recompile() if i else nullcontext():
            columns = step(x)
        expected = gm.collect({"twice": x * 2, "sum": x.sum(0)}).group(EVERYTHING).columns
        torch.testing.assert_close(columns, expected)
        assert columns[0, 0] == size * 4 + 4


# collected values


def run_once(function: Callable[..., Any], *args: Any) -> tuple[Any, Kept]:
    """Compile a function and run it twice; return the second result and the graphs."""
    kept = Kept()
    step = torch.compile(function, fullgraph=True, backend=kept.backend)
    step(*args)
    with no_recompile():
        result = step(*args)
    assert graphs() == 1
    return result, kept


def with_gradients(model: nn.Module) -> nn.Module:
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = torch.randn_like(parameter) * 10.0 ** (i - 2)
    return model


def test_everything_derived_is_computed_in_the_graph():
    model = with_gradients(small_model())
    names = ("numel", "sumsq", "sum", "n_zero", "n_nan", "n_posinf", "n_neginf", "abs_max")
    names += ("n_inf", "n_nonfinite", "finite_norm", "norm", "rms", "mean", "std", "zero_fraction")
    names += ("total", "total_norm", "found_inf")

    def everything() -> dict[str, Any]:
        stats = gm.collect_grads(model)
        grouped = stats.group({"first": lambda name: name.startswith("0"), "none": lambda _: False})
        return {name: getattr(stats, name) for name in names} | {
            "grouped": grouped,
            "merged": stats.merge(stats),
            "both": grouped.merge(grouped).total_norm,
        }

    result, kept = run_once(everything)
    expected = everything()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert torch.equal(result[name], value), name
        else:
            assert_same(result[name], value)
    assert kept.op_calls() == 1


def test_names_are_those_of_the_model_and_not_of_its_wrappers():
    model = small_model()
    model[0] = torch.compile(model[0], backend="aot_eager")
    outer = torch.compile(with_gradients(model), backend="aot_eager")
    names = ("0.weight", "0.bias", "2.weight", "2.bias")
    assert any("_orig_mod" in name for name, _ in outer.named_parameters())
    assert gm.collect_grads(outer).names == names
    stats, _ = run_once(lambda: gm.collect_weights(outer))
    assert stats.names == names


@pytest.mark.parametrize("home", ["model", pytest.param("parameters", marks=pytest.mark.deep), "nothing"])
def test_no_gradients_compile_to_no_rows(home):
    model = small_model()
    source = {"model": model, "parameters": list(model.parameters()), "nothing": []}[home]

    def step() -> tuple[gm.TensorStats, Tensor, gm.TensorStats]:
        stats = gm.collect_grads(source)
        return stats, stats.total_norm, stats.group(EVERYTHING).merge(stats.group(EVERYTHING))

    (stats, norm, grouped), kept = run_once(step)
    assert_same(stats, gm.collect_grads(source))
    assert not stats.measured
    assert stats.columns.shape == (0, TENSORS.width)
    assert (norm, grouped.norm.tolist()) == (0.0, [0.0])
    assert kept.op_calls() == 0
    assert not stats.materialize().measured


def test_a_gradient_that_appears_later_is_measured():
    model = small_model()
    step = torch.compile(lambda: gm.collect_grads(model), fullgraph=True, backend="aot_eager")
    assert step().names == ()
    with_gradients(model)
    # another set of tensors is another graph, compiled once
    assert_same(step(), gm.collect_grads(model))
    model[0].bias.grad = None
    assert step().names == ("0.weight", "2.weight", "2.bias")
    with no_recompile():
        assert step().names == ("0.weight", "2.weight", "2.bias")


# arguments


def test_new_thresholds_are_traced_once_each_and_flag_rightly():
    model = with_gradients(small_model())
    kept = Kept()

    def measure(thresholds: gm.Thresholds) -> gm.TensorStats:
        return gm.collect_grads(model, thresholds=thresholds)

    step = torch.compile(measure, fullgraph=True, backend=kept.backend)
    for thresholds in (
        gm.Thresholds(),
        gm.Thresholds(exploding=1e-3),
        gm.Thresholds(vanishing=5.0),
        gm.Thresholds(vanishing=0.0, exploding=math.inf, dead=2.0),
    ):
        assert_same(step(thresholds), gm.collect_grads(model, thresholds=thresholds))
    compiled = len(kept.graphs)
    assert compiled <= 4
    with no_recompile():
        for exploding in (1e-3, 1e-3, 100.0):
            thresholds = gm.Thresholds(exploding=exploding)
            assert_same(step(thresholds), gm.collect_grads(model, thresholds=thresholds))
    assert len(kept.graphs) == compiled


def test_an_inv_scale_tensor_is_read_at_every_call():
    model = with_gradients(small_model())
    kept = Kept()
    step = torch.compile(
        lambda scale: gm.collect_grads(model, inv_scale=1.0 / scale), fullgraph=True, backend=kept.backend
    )
    unscaled = gm.collect_grads(model)
    for i, scale in enumerate((2.0, 1024.0, 65536.0)):
        with no_recompile() if i else nullcontext():
            stats = step(torch.tensor(scale))
        assert_same(stats, gm.collect_grads(model, inv_scale=torch.tensor(1.0 / scale)))
        # a power of 2 changes no bit of the mantissa
        assert torch.equal(stats.norm * scale, unscaled.norm)
    assert kept.op_calls() == 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (torch.arange(3), "'wrong' has dtype torch.int64"),
        (torch.ones(3) > 0, "'wrong' has dtype torch.bool"),
        (3.0, "'wrong' has type float, not Tensor"),
    ],
    ids=["integer", "bool", "number"],
)
def test_what_cannot_be_measured_is_refused_by_name_inside(wrong, words):
    step = torch.compile(
        lambda x: gm.collect({"right": x, "wrong": wrong}), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises((TypeError, torch._dynamo.exc.TorchDynamoException)) as refused:
        step(torch.ones(3))
    assert words in str(refused.value)


def test_a_name_that_stands_twice_is_refused_inside():
    step = torch.compile(lambda x: gm.collect([("a", x), ("a", x)]), fullgraph=True, backend="aot_eager")
    with pytest.raises((ValueError, torch._dynamo.exc.TorchDynamoException)) as refused:
        step(torch.ones(3))
    assert "two tensors have the name 'a'" in str(refused.value)


# the graph


@pytest.mark.parametrize("used", [False, True])
def test_unused_statistics_cost_nothing(used):
    model = small_model()

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        loss, stats, grads = train_step(model, x, y)
        stats.group(EVERYTHING).total_norm.add(1)
        return (loss, *grads.values(), stats.norm) if used else (loss, *grads.values())

    _, kept = run_once(step, *batch())
    assert kept.op_calls() == used


@pytest.mark.parametrize("layers", [1, 10, pytest.param(50, marks=pytest.mark.deep)])
def test_one_call_of_the_op_measures_any_number_of_parameters(layers):
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(layers)]).to(torch.float64)

    with_ones(model)

    def step() -> Tensor:
        return gm.collect_grads(with_ones(model)).total_norm

    norm, kept = run_once(step)
    assert norm == pytest.approx(math.sqrt(12 * layers))
    assert kept.op_calls() == 1


def with_ones(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


def test_gradients_are_neither_copied_nor_changed():
    model = with_gradients(small_model().to(torch.float64))
    _, kept = run_once(lambda: gm.collect_grads(model).columns)
    (graph,) = kept.graphs
    calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    op = torch.ops.gradiometer.tensor_stats.default
    # only views of the gradients come before it
    before = calls[: calls.index(op)]
    assert all(target in {torch.ops.aten.detach.default, torch.ops.aten.alias.default} for target in before)
    assert torch.ops.aten.copy_.default not in calls


@pytest.mark.parametrize("name", ["materialize", "materialize_async"])
def test_a_copy_to_the_host_inside_says_to_do_it_outside(name):
    def inside(x):
        return getattr(gm.collect([x]), name)()

    with pytest.raises(Exception, match=r"copies to the host, .*; call it outside"):
        torch.compile(inside, fullgraph=True, backend="aot_eager")(torch.ones(3))


@pytest.mark.parametrize("stats", [gm.TensorStats, gm.PairStats, gm.ActivationStats, gm.ExponentStats])
def test_defaults_of_constructors_are_literals(stats):
    # torch 2.11 wraps all defaults of a constructor, and can only wrap literals
    defaults = inspect.signature(stats).parameters.values()
    assert all(each.default in {each.empty, None, True, False} for each in defaults)
