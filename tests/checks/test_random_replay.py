"""Random numbers of one run, in another run of another dtype."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from gradiometer.checks.random_replay import ReplayError, recording, replaying

OPERATORS = {
    "dropout": lambda x: functional.dropout(x, 0.3),
    "dropout1d": lambda x: functional.dropout1d(x[None], 0.3),
    "dropout2d": lambda x: functional.dropout2d(x[None, None], 0.3),
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.3, training=True),
    "feature_alpha_dropout": lambda x: functional.feature_alpha_dropout(x[None], 0.3, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "rrelu_": lambda x: functional.rrelu_(x * 1, training=True),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli of p": lambda x: torch.bernoulli(x.detach(), 0.3),
    "bernoulli_ of a tensor": lambda x: torch.empty_like(x).bernoulli_(torch.rand_like(x)),
    "rand": lambda x: torch.rand(3, 4, dtype=x.dtype, generator=torch.Generator()),
    "rand out": lambda x: torch.rand(3, 4, out=torch.empty(3, 4, dtype=x.dtype)),
    "randn": lambda x: torch.randn(3, dtype=x.dtype),
    "randn_like": torch.randn_like,
    "randint": lambda _: torch.randint(0, 9, (3,)),
    "randint_like": lambda x: torch.randint_like(x, 5),
    "randperm": lambda _: torch.randperm(9),
    "multinomial": lambda x: torch.multinomial(x.softmax(-1), 2),
    "poisson": lambda x: torch.poisson(x.exp()),
    "binomial": lambda x: torch.binomial(x.detach().exp().round(), x.detach().sigmoid()),
    "normal of tensors": lambda x: torch.normal(x, x.exp()),
    "normal of a mean": lambda x: torch.normal(x, 1.0),
    "normal of a size": lambda x: torch.normal(0.0, 1.0, (3,), dtype=x.dtype),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.3),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "random_": lambda x: torch.empty_like(x).random_(0, 9),
    "gamma": lambda x: torch.distributions.Gamma(x.exp(), 1.0).rsample(),
    "dirichlet": lambda x: torch.distributions.Dirichlet(x.exp()).rsample(),
    "gumbel_softmax": functional.gumbel_softmax,
    "attention": lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.4),
    "fractional_max_pool2d": lambda x: functional.fractional_max_pool2d(x[None, None], 2, output_size=2),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_draws_the_same_numbers_in_float64(name):
    function = OPERATORS[name]
    x = torch.randn(3, 4, requires_grad=True)
    y = x.detach().double().requires_grad_()
    with recording() as draws:
        first = function(x)
    assert draws.drawn
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with replaying(draws):
        second = function(y)
    assert draws.used == len(draws.drawn)
    assert torch.equal(torch.get_rng_state(), state)
    assert second.dtype == (torch.float64 if first.is_floating_point() else first.dtype)
    torch.testing.assert_close(second.to(first.dtype), first, rtol=1e-4, atol=1e-5)
    if first.requires_grad:
        first.sum().backward()
        second.sum().backward()
        torch.testing.assert_close(y.grad.float(), x.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.4), nn.RReLU(), nn.Linear(6, 2)),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True),
    ],
    ids=["mlp", "transformer"],
)
def test_a_model_in_bfloat16_and_in_float64(make):
    model = make().bfloat16()
    wide = copy.deepcopy(model).double()
    x = torch.randn(5, 3, 4).bfloat16()
    with recording() as draws:
        model(x).square().mean().backward()
    with replaying(draws):
        wide(x.double()).square().mean().backward()
    assert draws.used == len(draws.drawn) > 0
    last = list(model.parameters())[-1].grad, list(wide.parameters())[-1].grad
    torch.testing.assert_close(last[0].double(), last[1], rtol=0.1, atol=0.05)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks_drop_the_same_outputs(kind):
    seen = []

    class Kernels(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func.__name__ in {"lstm", "gru", "rnn_tanh"}:
                seen.append(torch.backends.cudnn.enabled)
            return func(*args, **kwargs or {})

    model = kind(3, 4, 2, dropout=0.5)
    x = torch.randn(6, 2, 3)
    with Kernels(), recording() as draws:
        first = model(x)[0]
    with Kernels(), replaying(draws):
        second = copy.deepcopy(model).double()(x.double())[0]
    torch.testing.assert_close(second.float(), first)
    # that of cuDNN keeps its random numbers
    assert seen == [False, False]
    assert torch.backends.cudnn.enabled


def test_numbers_that_the_backward_draws():
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x * 2

        @staticmethod
        def backward(_ctx, grad):
            return grad + torch.randn_like(grad)

    x = torch.ones(3, requires_grad=True)
    y = x.detach().double().requires_grad_()
    with recording() as draws:
        Noisy.apply(x).sum().backward()
    with replaying(draws):
        Noisy.apply(y).sum().backward()
    assert torch.equal(x.grad, y.grad.float())


def test_what_the_step_writes_to_its_numbers_is_not_recorded():
    with recording() as draws:
        x = torch.rand(3)
        before = x.clone()
        x.zero_()
    for _ in range(2):
        with replaying(draws):
            y = torch.rand(3)
        assert torch.equal(y, before)
        y.zero_()


def test_dropout_that_keeps_all_or_nothing():
    x = torch.randn(4)
    for p in (0.0, 1.0):
        with recording() as draws:
            first = torch.native_dropout(x, p, True)[0]
        with replaying(draws):
            assert torch.equal(torch.native_dropout(x, p, True)[0], first)
    with recording() as draws:
        functional.dropout(x, 0.5, training=False)
        torch.native_dropout(x, 0.5, False)
        functional.scaled_dot_product_attention(x[None], x[None], x[None])
    assert not draws.drawn


def test_attention_with_dropout_has_no_fused_kernel_while_it_is_recorded():
    seen = []

    class Kernels(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func.__name__ == "scaled_dot_product_attention":
                seen.append(torch.backends.cuda.flash_sdp_enabled())
            return func(*args, **kwargs or {})

    x = torch.randn(1, 2, 3, 4)
    attention = functional.scaled_dot_product_attention
    layer = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
    calls = {
        "imported": lambda: attention(x, x, x, None, 0.5),
        "by its name": lambda: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        "without dropout": lambda: attention(x, x, x),
    }
    for name, call in calls.items():
        with Kernels(), sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            with recording() as draws:
                call()
            assert seen.pop() == (name == "without dropout")
            assert len(draws.drawn) == (name != "without dropout")
        assert functional.scaled_dot_product_attention is attention
    inner = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "gradiometer.checks.random_replay._ATTENTION",
            functools.wraps(attention)(
                lambda *args, **kwargs: (inner.append(1), attention(*args, **kwargs))[1]
            ),
        )
        # inside of a function of torch
        with recording():
            layer(x[0], x[0], x[0], need_weights=False)
    assert inner == [1]


def test_another_operator_or_shape_is_an_error():
    with recording() as draws:
        torch.rand(3)
    with replaying(draws), pytest.raises(ReplayError, match=r"aten::randn .* recorded run called aten::rand"):
        torch.randn(3)
    with replaying(draws), pytest.raises(ReplayError, match=r"shape \[4\], but the recorded run drew \[3\]"):
        torch.rand(4)
    with replaying(draws):
        torch.rand(3)
        with pytest.raises(ReplayError, match="drew only 1 times"):
            torch.rand(3)
    for function in (functional.dropout, lambda x: functional.rrelu(x, training=True), torch.rand_like):
        with recording() as draws:
            function(torch.ones(3))
        with replaying(draws), pytest.raises(ReplayError, match="shape"):
            function(torch.ones(2, 2))


def test_numbers_inside_of_a_kernel_are_an_error():
    with torch.library._scoped_library("gradiometer_replay", "DEF") as library:
        library.define("noise(Tensor x) -> Tensor", tags=[torch.Tag.nondeterministic_seeded])
        library.impl("noise", lambda x: x * torch.rand(()), "CPU")
        noise = torch.ops.gradiometer_replay.noise
        with recording() as draws:
            noise(torch.ones(3))
        with replaying(draws), pytest.raises(ReplayError, match=r"gradiometer_replay::noise draws .* inside"):
            noise(torch.ones(3))
        # another kernel in the dtype of the replay
        with replaying(draws), pytest.raises(ReplayError, match=r"gradiometer_replay::noise draws .* inside"):
            torch.rand(())
