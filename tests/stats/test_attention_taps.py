"""Attention logits, and the load and entropy of routers."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradiometer as gm

pytestmark = pytest.mark.usefixtures("_dynamo")


class Calls(nn.Module):
    """A model whose forward pass is a function of its arguments."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, *args):
        self.function(*args)
        return self.weight * 1.0


@pytest.fixture
def rows():
    """Measure one call of a function, and return the rows."""
    kept = []

    def measured(names, function, *args):
        taps = gm.Taps(Calls(function), names=names)
        kept.append(taps)
        taps._model[0](*args)
        return taps.stats().materialize()

    yield measured
    for taps in kept:
        taps.remove()


def logits_of(q, k, scale=None):
    k = k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3) if q.dim() > 2 else k
    return q.double() @ k.double().transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("q_shape", "k_shape", "scale"),
    [((2, 4, 7, 8), (2, 4, 9, 8), None), ((2, 4, 7, 8), (2, 2, 9, 8), -0.5), ((5, 8), (3, 8), 2.0)],
)
def test_the_bound_is_at_least_every_logit(rows, dtype, q_shape, k_shape, scale):
    torch.manual_seed(0)
    q, k = (torch.randn(shape).to(dtype) for shape in (q_shape, k_shape))
    found = rows(["attn.max_logit_bound"], lambda *args: gm.tap_attention(*args, "attn", scale=scale), q, k)
    assert list(found) == ["attn.max_logit_bound"]
    row = found["attn.max_logit_bound"]
    longest = [x.double().norm(dim=-1).amax(-1) for x in (q, k)]
    if q.dim() > 2:
        longest[1] = longest[1].repeat_interleave(q_shape[-3] // k_shape[-3], dim=-1)
    bounds = longest[0] * longest[1] * abs(8**-0.5 if scale is None else scale)
    assert row.numel == bounds.numel()
    assert math.isclose(row.abs_max, bounds.max().item(), rel_tol=1e-5)
    assert row.abs_max * (1 + 1e-6) >= logits_of(q, k, scale).abs().max().item()


def test_the_bound_of_parallel_vectors_is_the_logit(rows):
    q, k = torch.tensor([[[3.0, 4.0], [0.0, 1.0]]]), torch.tensor([[[6.0, 8.0]]])
    found = rows(["a.max_logit_bound"], lambda: gm.tap_attention(q, k, "a", scale=1.0))
    assert found["a.max_logit_bound"].abs_max == 50.0


def test_half_precision_does_not_overflow(rows):
    q = torch.full((1, 2, 4), 6e4, dtype=torch.float16)
    found = rows(["a.max_logit_bound"], lambda: gm.tap_attention(q, q, "a", scale=1.0))
    assert math.isclose(found["a.max_logit_bound"].abs_max, 4 * q[0, 0, 0].item() ** 2, rel_tol=1e-6)


def test_max_scores_are_the_logits_themselves(rows):
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    scores = logits_of(q, k).masked_fill(torch.ones(5, 5).triu(0).bool(), -math.inf)
    top = scores.amax(-1)  # -inf in the first row
    found = rows(["a.max_logit"], lambda: gm.tap_attention(q, k, "a", max_scores=top))
    row = found["a.max_logit"]
    per_head = top.amax(-1)
    assert (row.abs_max, row.n_inf) == (per_head.abs().max().item(), 0)


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_whole_model_is_measured_once_in_each_step(is_compiled, is_checkpointed):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.router = nn.Linear(8, 24), nn.Linear(8, 4)

        def body(self, x):
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            gm.tap_attention(q, k, "attn")
            x = functional.scaled_dot_product_attention(q, k, v)
            probs = self.router(x).softmax(-1)
            weights, selected = probs.topk(2)
            gm.tap_router(probs, "moe", selected=selected)
            return weights, q, k, probs, selected

        def forward(self, x):
            return (checkpoint(self.body, x, use_reentrant=False) if is_checkpointed else self.body(x))[0]

    torch.manual_seed(0)
    model = Layer()
    names = ["attn.max_logit_bound", "moe.expert_load", "moe.router_entropy"]
    taps = gm.Taps(model, names=names)
    step = torch.compile(model, fullgraph=True, backend="aot_eager") if is_compiled else model
    for i in range(3):
        x = torch.randn(2, 6, 8)
        with torch._dynamo.config.patch(error_on_recompile=i == 2):
            step(x).sum().backward()
        found = taps.stats().materialize()
        assert list(found) == names
        # outside of the model's forward pass nothing is measured
        _, q, k, probs, selected = [y.detach() for y in model.body(x)]
        bound = q.norm(dim=-1).amax(-1) * k.norm(dim=-1).amax(-1) * 8**-0.5
        assert math.isclose(found[names[0]].abs_max, bound.max().item(), rel_tol=1e-5)
        load = torch.bincount(selected.flatten(), minlength=4) / 12
        assert math.isclose(found[names[1]].abs_max, load.max().item(), rel_tol=1e-6)
        assert math.isclose(found[names[1]].mean, 0.5, rel_tol=1e-6)
        entropy = -(probs * probs.log()).sum(-1) / math.log(4)
        assert found[names[2]].numel == 12
        assert math.isclose(found[names[2]].mean, entropy.mean().item(), rel_tol=1e-5)
        taps.advance()
    taps.remove()


ROUTER = ["moe.expert_load", "moe.router_entropy"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_balanced_and_collapsed_routers(rows, dtype):
    balanced = torch.full((8, 4), 0.25, dtype=dtype)
    found = rows(ROUTER, lambda: gm.tap_router(balanced, "moe"))
    load, entropy = (found[name] for name in ROUTER)
    assert (load.abs_max, load.mean, load.zero_fraction, load.numel) == (0.25, 0.25, 0.0, 4)
    assert math.isclose(entropy.mean, 1.0, rel_tol=1e-6)
    one = functional.one_hot(torch.zeros(8, dtype=torch.int64), 4).to(dtype)
    found = rows(ROUTER, lambda: gm.tap_router(one, "moe", selected=one.argmax(-1)))
    load, entropy = (found[name] for name in ROUTER)
    assert (load.abs_max, load.mean, load.zero_fraction, entropy.mean) == (1.0, 0.25, 0.75, 0.0)


def test_dropped_tokens_and_scores_that_are_no_probabilities(rows):
    scores = torch.tensor([[1.0, 3.0], [2.0, 2.0], [0.0, 0.0]])
    selected = torch.tensor([[1], [-1], [2]])
    found = rows(ROUTER, lambda: gm.tap_router(scores, "moe", selected=selected))
    load, entropy = (found[name] for name in ROUTER)
    assert (load.abs_max, load.mean, load.zero_fraction) == (pytest.approx(1 / 3), pytest.approx(1 / 6), 0.5)
    expected = [-(0.25 * math.log2(0.25) + 0.75 * math.log2(0.75)), 1.0, 0.0]
    assert math.isclose(entropy.mean, sum(expected) / 3, rel_tol=1e-6)


def test_nan_probabilities_show(rows):
    probs = torch.tensor([[0.5, 0.5], [math.nan, 0.5]])
    found = rows(ROUTER, lambda: gm.tap_router(probs, "moe"))
    assert found["moe.router_entropy"].n_nan == 1
    assert found["moe.expert_load"].n_nan > 0


def test_nothing_to_measure(rows):
    empty = torch.empty(0, 4)
    assert not rows(ROUTER, lambda: gm.tap_router(empty, "moe"))
    assert not rows(["a.max_logit_bound"], lambda: gm.tap_attention(empty, empty, "a"))
    one = torch.ones(3, 1)
    assert rows(ROUTER, lambda: gm.tap_router(one, "moe"))["moe.router_entropy"].mean == 0.0


def test_calls_that_nobody_measures_compute_nothing():
    # neither tensors nor shapes are looked at
    gm.tap_attention(None, None, "nobody")
    gm.tap_router(None, "nobody")
    model = Calls(lambda: gm.tap_attention(None, None, "a")).eval()
    taps = gm.Taps(model, names=["a.max_logit_bound"])
    model()
    taps.configure_(every=2, step=1)
    model.train()()
    taps.remove()


X = torch.ones(2, 3, 4)


@pytest.mark.parametrize(
    ("names", "call", "error", "says"),
    [
        (["a.max_logit_bound"], lambda: gm.tap_attention(X, X[..., :2], "a"), ValueError, "'a' has queries"),
        (["a.max_logit_bound"], lambda: gm.tap_attention(X.int(), X, "a"), TypeError, "q of 'a'.*int32"),
        (["a.max_logit_bound"], lambda: gm.tap_attention(X, X.cfloat(), "a"), TypeError, "k of 'a'.*complex"),
        (
            ["a.max_logit_bound"],
            lambda: gm.tap_attention(X, X, "a", max_scores=X),
            ValueError,
            "add that name",
        ),
        (["a"], lambda: gm.tap_attention(X, X, "a"), ValueError, "'a.max_logit_bound'"),
        (ROUTER, lambda: gm.tap_router(X.int(), "moe"), TypeError, "probs of 'moe'.*int32"),
        (
            ROUTER,
            lambda: gm.tap_router(X, "moe", selected=X),
            TypeError,
            "selected of 'moe' is torch.float32",
        ),
        (
            ROUTER,
            lambda: gm.tap_router(X, "moe", selected=X[0].int()),
            ValueError,
            "selected of 'moe'.*shape",
        ),
        (ROUTER[:1], lambda: gm.tap_router(X, "moe"), ValueError, "'moe.router_entropy'; add that name"),
        (["moe"], lambda: gm.tap_router(X, "moe"), ValueError, "'moe.expert_load'; add that name"),
    ],
    ids=["d", "int q", "complex k", "other row", "plain name", "int", "selected", "shape", "one row", "name"],
)
def test_mistakes_are_named(rows, names, call, error, says):
    with pytest.raises(error, match=says):
        rows(names, call)
