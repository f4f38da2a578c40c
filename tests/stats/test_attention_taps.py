"""Attention logits, and the load and entropy of routers."""

import math
from fractions import Fraction
from operator import mul

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradiometer as gm
from gradiometer.stats import attention_taps
from gradiometer.stats.attention_taps import _norms as norms
from support.activations import CallsFunction
from support.compiling import needs_compiler

pytestmark = pytest.mark.usefixtures("_dynamo")


def rows(names, function, *args):
    """Measure one call of a function, and return the rows."""
    model = CallsFunction(function)
    taps = gm.Taps(model, names=names)
    model(*args)
    return taps.stats().materialize()


def logits_of(q, k, scale=None):
    k = k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3) if q.dim() > 2 else k
    return q.double() @ k.double().transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)


def exact_squares(q, k, scale=None):
    """Return the squares of the largest magnitude of a logit, and of its bound, over all heads."""
    d, queries, keys = q.shape[-1], q.shape[-2], k.shape[-2]
    k = k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3) if q.dim() > 2 else k
    heads = [
        [[Fraction(y) for y in row] for row in x.double().reshape(-1, d).tolist()]
        for x in (q.flatten(0, -2), k.flatten(0, -2))
    ]
    # an irrational scale has a rational square
    square = Fraction(1, d) if scale is None else Fraction(scale) ** 2
    logit = bound = Fraction(0)
    for i in range(len(heads[0]) // queries):
        qs, ks = heads[0][i * queries : (i + 1) * queries], heads[1][i * keys : (i + 1) * keys]
        logit = max(logit, *[sum(map(mul, a, b)) ** 2 for a in qs for b in ks])
        longest = [max(sum(y * y for y in row) for row in rows) for rows in (qs, ks)]
        bound = max(bound, longest[0] * longest[1])
    return logit * square, bound * square


def assert_is_the_bound(found, q, k, scale=None):
    """Check a bound exactly: above the logits, and above the product of norms by rounding alone."""
    logit, bound = exact_squares(q, k, scale)
    # the factor of the documentation, and rounding errors that it makes up for
    slack = 1 + 2 * (q.shape[-1] + 32) * Fraction(2) ** -52
    assert logit <= bound <= Fraction(found) ** 2 <= bound * slack**2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("q_shape", "k_shape", "scale"),
    [((2, 4, 7, 8), (2, 4, 9, 8), None), ((2, 4, 7, 8), (2, 2, 9, 8), -0.5), ((5, 8), (3, 8), 2.0)],
)
def test_the_bound_is_at_least_every_logit(dtype, q_shape, k_shape, scale):
    torch.manual_seed(0)
    q, k = (torch.randn(shape).to(dtype) for shape in (q_shape, k_shape))
    found = rows(["attn.max_logit_bound"], lambda *args: gm.tap_attention(*args, "attn", scale=scale), q, k)
    assert list(found) == ["attn.max_logit_bound"]
    row = found["attn.max_logit_bound"]
    assert row.numel == math.prod(q_shape[:-2])
    assert_is_the_bound(row.abs_max, q, k, scale)


SIZE = 77
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def queries_and_keys(dtype):
    """Yield pairs whose products round, overflow or underflow, and whether they are finite."""
    generator = torch.Generator().manual_seed(0)
    info = torch.finfo(dtype)

    def normal(rows):
        return torch.randn(1, 2, rows, SIZE, generator=generator, dtype=torch.float64)

    for _ in range(20):
        yield normal(3), normal(2)
        # a logit of parallel vectors is the bound itself
        q = normal(3)
        yield q, q[:, :, :2]
        yield q, q[:, :, :2] * -0.5
    one = torch.zeros(1, 2, 3, SIZE, dtype=torch.float64)
    one[0, 1, 2, 5] = 1.0
    yield one, one[:, :, :2]
    yield one, normal(2)
    yield torch.zeros_like(one), normal(2)
    yield torch.zeros_like(one), torch.zeros_like(one)[:, :, :2]
    if dtype == torch.float64:
        # norms and their product are normal numbers
        most, least = info.max / 16, info.tiny
        ends = [(most, 1 / most), (most, least), (1e153, 1e153), (least, 1.0), (1e-153, 1e-153)]
    else:
        # fp64 has these products, but no narrower dtype
        most, least = info.max, info.smallest_normal * info.eps
        ends = [(most, 1 / most), (most, least), (most, most), (least, least), (info.tiny, info.tiny)]
    for of_q, of_k in ends:
        signs = normal(3).sign()
        yield of_q * signs, of_k * signs[:, :, :2]
        yield of_q * one, of_k * signs[:, :, :2]


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_the_bound_of_any_numbers_is_at_least_every_logit(dtype, backend):
    model = CallsFunction(lambda q, k: gm.tap_attention(q, k, "attn"))
    taps = gm.Taps(model, names=["attn.max_logit_bound"])
    step = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
    for pair in queries_and_keys(dtype):
        q, k = [x.to(dtype) for x in pair]
        step(q, k)
        row = taps.stats().materialize()["attn.max_logit_bound"]
        assert (row.numel, row.n_nan, row.n_inf) == (2, 0, 0)
        assert_is_the_bound(row.abs_max, q, k)
        taps.advance()


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", [None, "inductor"])
def test_the_bound_shows_nan_and_inf(dtype, backend):
    model = CallsFunction(lambda q, k: gm.tap_attention(q, k, "attn"))
    taps = gm.Taps(model, names=["attn.max_logit_bound"])
    step = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
    for bad in (math.nan, math.inf, -math.inf):
        for is_in_k in (False, True):
            for other in (1.0, 0.0):
                q, k = torch.ones(1, 3, 5, 8, dtype=dtype), torch.ones(1, 3, 4, 8, dtype=dtype)
                (k if is_in_k else q)[0, 1, 2, 3] = bad
                (q if is_in_k else k)[0, 1] *= other
                step(q, k)
                row = taps.stats().materialize()["attn.max_logit_bound"]
                # Inf times 0 is NaN, as in the logits
                is_nan = math.isnan(bad) or other == 0.0
                assert (row.numel, row.n_nan, row.n_inf) == (3, is_nan, not is_nan)
                taps.advance()


def test_the_bound_of_parallel_vectors_is_the_logit():
    q, k = torch.tensor([[[3.0, 4.0], [0.0, 1.0]]]), torch.tensor([[[6.0, 8.0]]])
    found = rows(["a.max_logit_bound"], lambda: gm.tap_attention(q, k, "a", scale=1.0))
    assert 50.0 <= found["a.max_logit_bound"].abs_max <= 50.0 * (1 + 2 * 34 * 2**-52)


def test_half_precision_does_not_overflow():
    q = torch.full((1, 2, 4), 6e4, dtype=torch.float16)
    with torch.autocast("cpu", torch.bfloat16):
        found = rows(["a.max_logit_bound"], lambda: gm.tap_attention(q, q, "a", scale=1.0))
    assert_is_the_bound(found["a.max_logit_bound"].abs_max, q, q, 1.0)


def test_a_scale_of_each_head_and_query():
    q, k = torch.ones(5, 2, 3, 4), torch.ones(5, 2, 7, 4)
    scales = [
        torch.tensor(-2.0, dtype=torch.bfloat16),
        torch.tensor([[[-2.0]], [[1.0]]], requires_grad=True),
        torch.tensor([1.0, -2.0, 0.5]).view(3, 1),
        torch.tensor([1.0, 1.0, -2.0, 1.0, 1.0, 1.0, 1.0]),
    ]
    for scale in scales:
        logits = (q @ k.mT * scale).abs()
        found = rows(["a.max_logit_bound"], lambda scale=scale: gm.tap_attention(q, k, "a", scale=scale))
        row = found["a.max_logit_bound"]
        assert row.numel == 10
        assert logits.max() == 8.0
        assert 8.0 <= row.abs_max <= 8.0 * (1 + 2 * 36 * 2**-52)
        assert row.mean >= logits.amax((-2, -1)).mean().item()


def test_large_inputs_are_converted_in_parts(monkeypatch):
    q, k = torch.randn(2, 3, 50, 8), torch.randn(2, 3, 70, 8)
    q[1, 2, 31, 3] = 100.0
    names = ["a.max_logit_bound"]
    whole = rows(names, lambda: gm.tap_attention(q, k, "a"))["a.max_logit_bound"]
    monkeypatch.setattr(attention_taps, "_MOST_CONVERTED", 500)
    calls = []
    monkeypatch.setattr(attention_taps, "_norms", lambda x: calls.append(x.numel()) or norms(x))
    parts = rows(names, lambda: gm.tap_attention(q, k, "a"))["a.max_logit_bound"]
    assert (parts.abs_max, parts.mean) == (whole.abs_max, whole.mean)
    assert max(calls) <= 500


def test_max_scores_are_the_logits_themselves():
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    scores = logits_of(q, k).masked_fill(torch.ones(5, 5).triu(0).bool(), -math.inf)
    top = scores.amax(-1)  # -inf in the first row
    found = rows(["a.max_logit"], lambda: gm.tap_attention(q, k, "a", max_scores=top))
    row = found["a.max_logit"]
    per_head = top.amax(-1)
    assert (row.abs_max, row.n_inf) == (per_head.max().item(), 0)


@pytest.mark.parametrize("masked", [-math.inf, torch.finfo(torch.float32).min, -1e9, -5.0])
@pytest.mark.parametrize(("own", "largest"), [(3.0, 3.0), (-100.0, 0.0)])
def test_max_scores_that_are_negative_count_as_zero(masked, own, largest):
    """As of a sample that is all padding, and of heads without a positive logit."""
    top = torch.full((2, 3, 5), masked)
    top[0, 1] = own
    row = rows(["a.max_logit"], lambda: gm.tap_attention(X, X, "a", max_scores=top))["a.max_logit"]
    assert (row.abs_max, row.numel, row.n_nan) == (largest, 6, 0)


def test_max_scores_show_nan_and_inf():
    top = torch.tensor([[-5.0, math.nan], [-math.inf, math.inf], [-math.inf, -1.0]])
    row = rows(["a.max_logit"], lambda: gm.tap_attention(X, X, "a", max_scores=top))["a.max_logit"]
    assert (row.n_nan, row.n_inf, row.abs_max) == (1, 1, 0.0)


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


ROUTER = ["moe.expert_load", "moe.router_entropy"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_balanced_and_collapsed_routers(dtype):
    balanced = torch.full((8, 4), 0.25, dtype=dtype)
    found = rows(ROUTER, lambda: gm.tap_router(balanced, "moe"))
    load, entropy = (found[name] for name in ROUTER)
    assert (load.abs_max, load.mean, load.zero_fraction, load.numel) == (0.25, 0.25, 0.0, 4)
    assert math.isclose(entropy.mean, 1.0, rel_tol=1e-6)
    one = functional.one_hot(torch.zeros(8, dtype=torch.int64), 4).to(dtype)
    found = rows(ROUTER, lambda: gm.tap_router(one, "moe", selected=one.argmax(-1)))
    load, entropy = (found[name] for name in ROUTER)
    assert (load.abs_max, load.mean, load.zero_fraction, entropy.mean) == (1.0, 0.25, 0.75, 0.0)


def test_dropped_tokens_and_scores_that_are_no_probabilities():
    scores = torch.tensor([[1.0, 3.0], [2.0, 2.0], [0.0, 0.0]])
    selected = torch.tensor([[1], [-1], [2]])
    found = rows(ROUTER, lambda: gm.tap_router(scores, "moe", selected=selected))
    load, entropy = (found[name] for name in ROUTER)
    assert (load.abs_max, load.mean, load.zero_fraction) == (pytest.approx(1 / 3), pytest.approx(1 / 6), 0.5)
    expected = [-(0.25 * math.log2(0.25) + 0.75 * math.log2(0.75)), 1.0, 0.0]
    assert math.isclose(entropy.mean, sum(expected) / 3, rel_tol=1e-6)


def test_nan_probabilities_show():
    probs = torch.tensor([[0.5, 0.5], [math.nan, 0.5]])
    found = rows(ROUTER, lambda: gm.tap_router(probs, "moe"))
    assert found["moe.router_entropy"].n_nan == 1
    assert found["moe.expert_load"].n_nan > 0


def test_nothing_to_measure():
    empty = torch.empty(0, 4)
    assert not rows(ROUTER, lambda: gm.tap_router(empty, "moe"))
    assert not rows(["a.max_logit_bound"], lambda: gm.tap_attention(empty, empty, "a"))
    one = torch.ones(3, 1)
    assert rows(ROUTER, lambda: gm.tap_router(one, "moe"))["moe.router_entropy"].mean == 0.0


def test_calls_that_nobody_measures_compute_nothing():
    # neither tensors nor shapes are looked at
    gm.tap_attention(None, None, "nobody")
    gm.tap_router(None, "nobody")
    model = CallsFunction(lambda: gm.tap_attention(None, None, "a")).eval()
    taps = gm.Taps(model, names=["a.max_logit_bound"])
    model()
    taps.configure_(every=2, step=1)
    model.train()()


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
def test_mistakes_are_named(names, call, error, says):
    with pytest.raises(error, match=says):
        rows(names, call)
