"""The public collection functions: their results, which agree with plain formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import gradiometer as gm
from support.gradients import with_grads


def double_norm(*tensors: torch.Tensor) -> float:
    return math.sqrt(math.fsum(x * x for tensor in tensors for x in tensor.double().flatten().tolist()))


def close(measured: float, expected: float) -> bool:
    # the documented bound: 1e-13 of the exactly rounded norm
    return abs(measured - expected) <= 1e-13 * expected


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean(dim=(2, 3)))


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.block = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(x)))


def backward(model: nn.Module, x: torch.Tensor) -> nn.Module:
    model(x).square().mean().backward()
    return model


MODELS = {
    "linear": lambda: backward(nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 2)), torch.randn(4, 5)),
    "convolution": lambda: backward(Conv(), torch.randn(2, 3, 6, 6)),
    "tied transformer": lambda: backward(Text(), torch.randint(11, (2, 5))),
    "bf16": lambda: backward(nn.Linear(5, 7).bfloat16(), torch.randn(4, 5).bfloat16()),
}


# collect_grads, collect_weights


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_every_gradient_and_weight_of_a_model_is_measured_under_its_name(make: object) -> None:
    model = make()
    parameters = dict(model.named_parameters())
    for stats, tensors in (
        (gm.collect_grads(model), {name: p.grad for name, p in parameters.items()}),
        (gm.collect_weights(model), {name: p.detach() for name, p in parameters.items()}),
    ):
        assert stats.names == tuple(tensors)
        for name, norm, numel, top in zip(stats.names, stats.norm, stats.numel, stats.abs_max, strict=True):
            assert close(norm.item(), double_norm(tensors[name]))
            assert numel.item() == tensors[name].numel()
            assert top.item() == tensors[name].abs().max().item()


def test_weights_are_measured_without_gradients_and_frozen_ones_too() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).requires_grad_(False)
    nn.init.constant_(model[0].weight, 3.0)
    stats = gm.collect_weights(model)
    assert stats.names == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert stats.norm[0].item() == 6.0
    assert not stats.columns.requires_grad


def test_a_gradient_left_on_a_parameter_frozen_since_counts_as_it_does_in_clipping() -> None:
    model = nn.Linear(2, 1)
    model.weight.grad, model.bias.grad = torch.tensor([[3.0, 0.0]]), torch.tensor([4.0])
    model.weight.requires_grad_(False)
    assert gm.collect_grads(model).names == ("weight", "bias")
    assert gm.grad_norm(model) == nn.utils.clip_grad_norm_(model.parameters(), 100.0).item() == 5.0


def test_buffers_are_no_weights() -> None:
    model = nn.BatchNorm1d(3)
    assert gm.collect_weights(model).names == ("weight", "bias")


def test_the_position_of_an_unnamed_parameter_is_its_name() -> None:
    parameters = [*with_grads(torch.ones(1)), nn.Parameter(torch.zeros(2)), *with_grads(torch.ones(3))]
    assert gm.collect_grads(parameters).names == ("0", "2")
    assert gm.collect_weights(parameters).names == ("0", "1", "2")


def test_one_call_measures_a_thousand_parameters_in_order() -> None:
    # of 1 to 50 elements: all widths of the batches of small tensors up to 64, each with many tensors
    model = nn.ParameterList(nn.Parameter(torch.full((i % 50 + 1,), i / 8)) for i in range(1000))
    for i, parameter in enumerate(model):
        parameter.grad = torch.full_like(parameter, -i / 4)
    weights, grads = gm.collect_weights(model), gm.collect_grads(model)
    assert weights.names == grads.names == tuple(str(i) for i in range(1000))
    sizes = [i % 50 + 1 for i in range(1000)]
    assert weights.numel.tolist() == sizes
    # multiples of 1/8 and their sums are exact
    assert weights.sum.tolist() == [n * i / 8 for i, n in enumerate(sizes)]
    assert weights.sumsq.tolist() == [n * (i / 8) ** 2 for i, n in enumerate(sizes)]
    assert weights.abs_max.tolist() == [i / 8 for i in range(1000)]
    assert grads.sum.tolist() == [-n * i / 4 for i, n in enumerate(sizes)]
    assert grads.n_zero.tolist() == [1.0, *[0.0] * 999]
    total = math.sqrt(math.fsum(n * (i / 8) ** 2 for i, n in enumerate(sizes)))
    assert close(weights.total_norm.item(), total)
    assert gm.grad_norm(model) == grads.total_norm.item()


@pytest.mark.parametrize("function", [gm.collect, gm.collect_weights, gm.collect_grads])
def test_thresholds_are_passed_through(function: object) -> None:
    (parameter,) = with_grads(torch.tensor([3.0, 4.0, 0.0, 0.0]))
    parameter.data.copy_(parameter.grad)
    x = {"w": parameter}
    assert function(x).thresholds == gm.Thresholds()
    assert function(x).flags.tolist() == [0]
    for thresholds, expected in (
        (gm.Thresholds(exploding=4.75), gm.Flag.EXPLODING),
        (gm.Thresholds(vanishing=5.25), gm.Flag.VANISHING),
        (gm.Thresholds(dead=0.5), gm.Flag.DEAD),
        (gm.Thresholds(vanishing=5.0, exploding=5.0, dead=0.75), gm.Flag(0)),
    ):
        stats = function(x, thresholds=thresholds)
        assert stats.thresholds is thresholds
        assert stats.flags.tolist() == [expected]
        assert stats.materialize().thresholds is thresholds


def test_measuring_leaves_parameters_and_gradients_as_they_are() -> None:
    model = MODELS["linear"]()
    before = {name: (p.grad, p.grad.clone(), p.detach().clone()) for name, p in model.named_parameters()}
    gm.collect_grads(model, inv_scale=0.5)
    gm.collect_weights(model)
    gm.grad_norm(model)
    for name, p in model.named_parameters():
        grad, grad_copy, copy = before[name]
        assert p.grad is grad
        assert torch.equal(grad, grad_copy)
        assert torch.equal(p, copy)
        assert p.requires_grad
        assert grad._version == 0


def test_a_subclass_of_parameter_is_measured_in_eager_and_compiled() -> None:
    class Labelled(nn.Parameter):
        pass

    model = nn.Module()
    model.weight = Labelled(torch.tensor([3.0, 4.0]))
    assert type(dict(model.named_parameters())["weight"]) is Labelled
    measure = torch.compile(lambda: gm.collect_weights(model), backend="aot_eager", fullgraph=True)
    for stats in (gm.collect_weights(model), measure()):
        assert stats.names == ("weight",)
        assert stats.norm.tolist() == [5.0]
        assert type(stats.columns) is torch.Tensor


# grad_norm


@pytest.mark.parametrize("empty", [[], nn.ReLU(), nn.Linear(2, 1), {}], ids=repr)
def test_grad_norm_without_gradients_is_what_the_caller_says(empty: object) -> None:
    assert gm.grad_norm(empty) == 0.0
    assert type(gm.grad_norm(empty)) is float
    assert gm.grad_norm(empty, empty=None) is None
    assert gm.grad_norm(empty, empty=-1.0) == -1.0
    assert math.isnan(gm.grad_norm(empty, empty=math.nan))
    with pytest.raises(
        ValueError, match=r"^grad_norm: no parameter has a gradient; call it after backward\(\)"
    ):
        gm.grad_norm(empty, empty="raise")


@pytest.mark.parametrize("empty", [0.0, None, -1.0, "raise"])
def test_grad_norm_with_gradients_never_asks_what_empty_means(empty: object) -> None:
    parameters = [*with_grads(torch.tensor([-2.0])), nn.Parameter(torch.zeros(2))]
    norm = gm.grad_norm(parameters, empty=empty)
    assert (type(norm), norm) == (float, 2.0)
    # a gradient of zeros, or one without elements, is a gradient
    assert gm.grad_norm(with_grads(torch.zeros(3)), empty=empty) == 0.0
    assert gm.grad_norm(with_grads(torch.zeros(0)), empty=empty) == 0.0


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_grad_norm_is_what_clip_grad_norm_returns(make: object) -> None:
    model = make()
    grads = [p.grad.clone() for p in model.parameters()]
    ours = gm.grad_norm(model)
    assert close(ours, double_norm(*grads))
    theirs = nn.utils.clip_grad_norm_(model.parameters(), max_norm=math.inf)
    # the norm of n elements in a format of unit roundoff u has an error of at most (n/2 + 1) u, whatever the
    # order of summation; theirs is a norm of norms, each rounded to the gradients' dtype
    u = torch.finfo(theirs.dtype).eps / 2
    n = max(grad.numel() for grad in grads)
    assert abs(ours - theirs.item()) <= ((n / 2 + 1) * 2**-24 + (len(grads) / 2 + 3) * u) * ours


@pytest.mark.parametrize("value", [1e20, 3e38, 1e-20, 1e-38])
def test_grad_norm_is_right_where_squares_leave_the_range_of_float32(value: float) -> None:
    grad = torch.full((50, 80), value)
    exact = grad[0, 0].item()
    assert close(gm.grad_norm(with_grads(grad, grad.clone())), exact * math.sqrt(8000.0))


def test_grad_norm_of_fp16_gradients_does_not_overflow() -> None:
    # 300**2 overflows fp16, and so does the sum; 300 * sqrt(40000) is exact
    assert gm.grad_norm(with_grads(torch.full((40_000,), 300.0, dtype=torch.float16))) == 60_000.0


def test_grad_norm_of_very_different_gradients_is_right() -> None:
    small, large = torch.full((1000,), 1e-10), torch.full((10,), 1e15)
    expected = math.sqrt(math.fsum([1000 * small[0].item() ** 2, 10 * large[0].item() ** 2]))
    assert close(gm.grad_norm(with_grads(small, large)), expected)
    assert close(gm.grad_norm(with_grads(large, small)), expected)
    # the small one is not lost: it has its own row
    stats = gm.collect_grads(with_grads(large, small))
    assert close(stats.norm[1].item(), small[0].item() * math.sqrt(1000.0))


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ([math.nan], math.nan),
        ([math.inf], math.inf),
        ([-math.inf], math.inf),
        ([math.inf, math.nan], math.nan),
    ],
    ids=str,
)
def test_grad_norm_says_what_is_not_finite(bad: list[float], expected: float) -> None:
    norm = gm.grad_norm(with_grads(torch.ones(4), torch.tensor(bad)))
    assert norm == expected or (math.isnan(norm) and math.isnan(expected))


# total_norm


def test_total_norm_takes_mappings_pairs_and_generators() -> None:
    tensors = [torch.full((i + 1,), float(i + 1)) for i in range(3)]
    expected = gm.total_norm(tensors)
    assert close(expected.item(), math.sqrt(1 + 8 + 27))
    for source in (
        tuple(tensors),
        iter(tensors),
        {str(i): x for i, x in enumerate(tensors)},
        [(f"t{i}", x) for i, x in enumerate(tensors)],
    ):
        assert gm.total_norm(source) == expected


def test_total_norm_counts_a_tensor_as_often_as_it_is_passed() -> None:
    # unlike parameters, tensors are not checked for ties
    x = torch.tensor([3.0])
    assert gm.total_norm([x, x, x, x]).item() == 6.0


# options are keyword-only


def test_options_are_given_by_name_only() -> None:
    x = [torch.ones(2)]
    for call in (
        lambda: gm.collect(x, gm.Thresholds()),
        lambda: gm.collect_grads(x, gm.Thresholds()),
        lambda: gm.collect_weights(x, gm.Thresholds()),
        lambda: gm.grad_norm(x, None),
    ):
        with pytest.raises(TypeError, match="positional argument"):
            call()


def test_a_misspelt_word_for_no_gradient_is_refused():
    with pytest.raises(ValueError, match=r"^grad_norm: empty must be"):
        gm.grad_norm(torch.nn.Linear(2, 2), empty="rise")
