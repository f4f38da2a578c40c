"""Attention weights of each head against float64 references, and what blocks add to their input."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradiometer as gm
from gradiometer.columns import ATTENTION
from support.activations import CallsFunction
from support.compiling import needs_compiler

pytestmark = pytest.mark.usefixtures("_dynamo")


def measured(q, k, weights, heads=2, compiled=False, **options):
    """Measure one call, and return the rows of its heads."""
    model = CallsFunction(lambda *args: gm.tap_attention(*args[:2], "attn", weights=args[2], **options))
    taps = gm.Taps(model, attention={"attn": heads})
    (torch.compile(model, fullgraph=True) if compiled else model)(q, k, weights)
    report = taps.attention_stats().materialize()
    assert report.names == tuple(f"attn.head{i}" for i in range(heads))
    return [report[name] for name in report.names]


def reference(weights, head, mask=None, *, is_causal=False):
    """Return the means over queries in plain Python, of weights (samples, heads, queries, keys)."""
    samples, _, queries, keys = weights.shape
    found = {"masked_mass": [], "future_mass": [], "row_sum": [], "entropy": []}
    for i in range(samples):
        for a in range(queries):
            row = weights[i, head, a].double().tolist()
            masked = [False] * keys
            if mask is not None:
                of = mask.expand(weights.shape)[i, head, a]
                masked = [not x if of.dtype == torch.bool else x <= -5000 for x in of.tolist()]
            future = [is_causal and b > a + max(keys - queries, 0) for b in range(keys)]
            allowed = [not (x or y) for x, y in zip(masked, future, strict=True)]
            if not any(allowed):
                continue
            found["row_sum"].append(sum(row))
            for name, where in (("masked_mass", masked), ("future_mass", future)):
                found[name].append(sum(abs(w) for w, x in zip(row, where, strict=True) if x))
            kept = [max(w, 0.0) for w, x in zip(row, allowed, strict=True) if x]
            if len(kept) > 1 and sum(kept) > 0:
                shares = [w / sum(kept) for w in kept if w]
                found["entropy"].append(-sum(p * math.log(p) for p in shares) / math.log(len(kept)))
    return {name: sum(x) / len(x) if x else 0.0 for name, x in found.items()}


def qk(queries=5, keys=5, heads=2, key_heads=2, dtype=torch.float32, samples=3):
    torch.manual_seed(0)
    shapes = (samples, heads, queries, 8), (samples, key_heads, keys, 8)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def softmax_of(q, k, bias=0.0, scale=8**-0.5):
    k = k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3)
    return (q.double() @ k.double().mT * scale + bias).softmax(-1).to(q.dtype)


PADDING = torch.ones(3, 1, 1, 5, dtype=torch.bool)
PADDING[0, ..., 3:] = False
NO_KEY = torch.ones(3, 1, 5, 5, dtype=torch.bool)
NO_KEY[1, 0, 2] = False
FLOAT = torch.zeros(5, 5)
FLOAT[:, 0] = -1e4
FLOAT[2, 1] = -3.0
MASKS = {"none": None, "padding": PADDING, "no key": NO_KEY, "float": FLOAT, "row": PADDING[0, 0, 0]}


# compiled with Inductor, each case takes seconds: the deep profile has all of them
ROWS = [
    pytest.param(
        *(name, is_causal, compiled),
        marks=[needs_compiler, *([] if (name, is_causal) == ("padding", True) else [pytest.mark.deep])]
        if compiled
        else [],
    )
    for name in MASKS
    for is_causal in (False, True)
    for compiled in (False, True)
]


@pytest.mark.parametrize(("name", "is_causal", "compiled"), ROWS)
def test_rows_are_those_of_a_reference(name, is_causal, compiled):
    q, k = qk()
    # unmasked, so that each mask leaks
    weights = softmax_of(q, k)
    for head, row in enumerate(
        measured(q, k, weights, mask=MASKS[name], is_causal=is_causal, compiled=compiled)
    ):
        expected = reference(weights, head, MASKS[name], is_causal=is_causal)
        assert {key: getattr(row, key) for key in expected} == pytest.approx(expected, rel=1e-6)
        # a query that may attend to no key is left out
        assert (row.masked_mass > 0, row.future_mass > 0) == (name not in {"none", "no key"}, is_causal)
        assert row.max_future <= 1.0 + 1e-6
        assert row.n_unnormalized == 0


@given(data=st.data())
def test_a_masked_softmax_leaks_nothing(data):
    queries, keys = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
    is_causal = data.draw(st.booleans())
    bits = data.draw(st.lists(st.booleans(), min_size=queries * keys, max_size=queries * keys))
    mask = torch.tensor(bits).view(queries, keys)
    q, k = qk(queries, keys, dtype=dtype)
    allowed = mask
    if is_causal:
        allowed = mask & torch.ones(queries, keys, dtype=torch.bool).tril(max(keys - queries, 0))
    bias = torch.zeros(queries, keys, dtype=torch.float64).masked_fill(~allowed, -torch.inf)
    weights = softmax_of(q, k, bias)
    for row in measured(q, k, weights, mask=mask, is_causal=is_causal):
        assert (row.masked_mass, row.future_mass, row.max_masked, row.max_future) == (0.0, 0.0, 0.0, 0.0)
        assert row.n_unnormalized == 0
        # a query without a key has weights of NaN, which count nowhere
        assert row.n_queries == 3 * int(allowed.any(1).sum())
        assert row.n_choices == 3 * int((allowed.sum(1) > 1).sum())
        assert 0.0 <= row.entropy <= 1.0
        assert math.isfinite(row.row_sum)


def test_equal_and_certain_weights():
    q, k = qk()
    equal, certain = torch.full((3, 2, 5, 5), 0.2), torch.eye(5).expand(3, 2, 5, 5)
    assert [row.entropy for row in measured(q, k, equal)] == pytest.approx([1.0, 1.0])
    assert [row.entropy for row in measured(q, k, certain)] == [0.0, 0.0]
    q, k = qk(keys=1)
    (row, _) = measured(q, k, torch.ones(3, 2, 5, 1))
    assert (row.n_choices, row.n_scales, row.row_sum) == (0, 0, 1.0)


def test_sums_over_another_dimension_and_zeros_are_counted():
    q, k = qk()
    logits = q @ k.mT / 8**0.5
    wrong = logits.softmax(-2)
    row = measured(q, k, wrong)[0]
    assert row.row_sum == pytest.approx(1.0)
    assert row.unnormalized_fraction > 0.9
    assert row.n_zero == 0
    assert row.max_sum == pytest.approx(float(wrong[:, 0].sum(-1).max()))
    # of logits
    assert measured(q, k, logits)[0].row_sum == pytest.approx(float(logits[:, 0].double().sum(-1).mean()))
    dropped = logits.softmax(-1)
    dropped[..., 1] = 0.0
    assert measured(q, k, dropped)[0].n_zero == 15


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 8**0.5, 0.5])
@pytest.mark.parametrize("name", list(MASKS))
def test_the_scale_of_logits_is_found(name, factor, dtype):
    q, k = qk(dtype=dtype, key_heads=1)
    mask = MASKS[name]
    bias = 0.0
    if mask is not None:
        bias = mask if mask.dtype != torch.bool else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    rows = measured(q, k, softmax_of(q, k, bias, factor * 8**-0.5), mask=mask)
    scaled = measured(q, k, softmax_of(q, k, bias, factor), mask=mask, scale=torch.tensor(factor))
    # weights are rounded by eps / 2, and where a scale is found logits have a spread of at least 16 eps, so
    # that the error of the slope is at most the quotient
    limit = 1 / 32 if dtype == torch.bfloat16 else max(4.0 * torch.finfo(dtype).eps, 1e-6)
    for found, wanted, expected in ((rows, factor, 8**-0.5), (scaled, 1.0, factor)):
        known = [row for row in found if row.n_scales]
        assert len(known) == 2 or (known and dtype == torch.bfloat16)
        assert [row.logit_scale for row in known] == pytest.approx([wanted] * len(known), rel=limit)
        assert [row.max_scale for row in known] == pytest.approx([expected] * len(known))


def test_no_scale_is_found_of_other_weights():
    q, k = qk(keys=40)
    other = torch.randn(3, 2, 5, 40).softmax(-1)
    equal = torch.full((3, 2, 5, 40), 1 / 40)
    for weights in (other, equal):
        assert [(row.n_scales, row.max_scale) for row in measured(q, k, weights)] == [(0, 0.0)] * 2


def test_without_a_dimension_of_heads_or_weights():
    torch.manual_seed(0)
    q, k = torch.randn(5, 8), torch.randn(7, 8)
    (row,) = measured(q, k, (q @ k.mT / 8**0.5).softmax(-1), heads=1, is_causal=True)
    assert (row.numel, row.n_queries, row.n_choices) == (35, 5, 5)
    assert row.logit_scale == pytest.approx(1.0, rel=1e-5)
    q, k = qk(queries=0)
    assert measured(q, k, torch.ones(3, 2, 0, 5))[0].numel == 0


def test_calls_merge_steps_are_due_and_evaluation_measures_nothing():
    q, k = qk()
    model = CallsFunction(lambda *args: gm.tap_attention(*args[:2], "attn", weights=args[2]))
    taps = gm.Taps(model, attention={"attn": 2}, every=2)
    weights = softmax_of(q, k)
    model(q, k, weights)
    model(q, k, weights)
    assert taps.attention_stats().numel.tolist() == [150.0, 150.0]
    taps.advance()
    model(q, k, weights)
    assert taps.attention_stats().numel.tolist() == [0.0, 0.0]
    taps.advance()
    model.eval()(q, k, weights)
    assert taps.attention_stats().numel.tolist() == [0.0, 0.0]
    model.train()(q, k, weights)
    taps.remove()
    model(q, k, weights)
    assert taps.attention_stats().numel.tolist() == [75.0, 75.0]


def test_names_and_values_that_do_not_fit_are_refused():
    q, k = qk()
    weights = softmax_of(q, k)
    with pytest.raises(
        ValueError, match=r"weights of 'attn' have the shape \(3, 5, 5\).*not averaged over the heads"
    ):
        measured(q, k, weights.mean(1))
    with pytest.raises(ValueError, match="'attn' has 2 heads; pass that number"):
        measured(q, k, weights, heads=3)
    with pytest.raises(TypeError, match=r"mask of 'attn' is torch.int64; pass a bool tensor, True to attend"):
        measured(q, k, weights, mask=torch.ones(5, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"mask of 'attn' has the shape \(4, 5\)"):
        measured(q, k, weights, mask=torch.ones(4, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="this call has no weights"):
        measured(q, k, None)
    with pytest.raises(TypeError, match="attention must map names of calls to numbers of heads"):
        gm.Taps(CallsFunction(print), attention={"attn": 0})
    with pytest.raises(TypeError, match="residual must map names of groups to rules"):
        gm.Taps(CallsFunction(print), residual="blocks")
    # the bound alone needs no weights to be known
    model = CallsFunction(lambda *args: gm.tap_attention(*args[:2], "attn", weights=args[2]))
    taps = gm.Taps(model, names=["attn.max_logit_bound"])
    model(q, k, weights)
    assert list(taps.stats().materialize()) == ["attn.max_logit_bound"]


class Adds(nn.Module):
    """A block that is called by a keyword and returns a tuple with another tensor first."""

    def __init__(self, scale=0.5):
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), scale

    def forward(self, places, *, x):
        return places.float(), x + self.scale * self.linear(x)


class Stream(nn.Module):
    def __init__(self, block=Adds, checkpointed=False):
        super().__init__()
        self.blocks, self.checkpointed = nn.ModuleList([block(), block()]), checkpointed

    def forward(self, x):
        for block in self.blocks:
            if self.checkpointed:
                _, x = checkpoint(block, torch.arange(3), x=x, use_reentrant=False)
            else:
                _, x = block(torch.arange(3), x=x)
        return x


def stream(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(5, 3, 4).to(dtype).requires_grad_()


BLOCKS = [
    pytest.param(
        *(dtype, compiled, checkpointed),
        marks=[needs_compiler, *([] if dtype == torch.bfloat16 and checkpointed else [pytest.mark.deep])]
        if compiled
        else [],
    )
    for dtype in (torch.float64, torch.float32, torch.bfloat16)
    for compiled in (False, True)
    for checkpointed in (False, True)
]


@pytest.mark.parametrize(("dtype", "compiled", "checkpointed"), BLOCKS)
def test_blocks_are_compared_with_their_input(dtype, compiled, checkpointed):
    torch.manual_seed(1)
    model = Stream(checkpointed=checkpointed).to(dtype)
    plain = stream(dtype)
    model(plain).sum().backward()
    expected, x = [], stream(dtype).detach()
    for block in model.blocks:
        _, out = block(torch.arange(3), x=x)
        a, b = x.double().flatten(), out.detach().double().flatten()
        expected.append([(b - a).norm() / a.norm(), torch.cosine_similarity(a, b, 0), a.norm(), b.norm()])
        x = out.detach()
    taps = gm.Taps(model, residual={"blocks": r"^blocks\.\d+$"})
    tapped = stream(dtype)
    (torch.compile(model, fullgraph=True) if compiled else model)(tapped).sum().backward()
    stats = taps.residual_stats()
    assert stats.names == ("blocks.0.residual", "blocks.1.residual")
    assert stats.numel.tolist() == [60.0, 60.0]
    found = [[row.added_ratio, row.cosine, row.norm_in, row.norm_out] for row in stats.materialize().values()]
    # a compiler passes on bf16 values before it rounds them
    limit = 0.02 if compiled and dtype == torch.bfloat16 else 1e-6
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx([float(x) for x in wanted], rel=limit)
    if not compiled:
        assert torch.equal(tapped.grad, plain.grad)


class InPlace(nn.Linear):
    def forward(self, x):
        return x.add_(1.0)


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (nn.Linear(4, 3), "nothing that it returns has the shape of its input"),
        (InPlace(4, 4), "it returns its input itself"),
        (nn.Embedding(9, 4), "no argument is a floating-point tensor"),
    ],
)
def test_blocks_that_cannot_be_compared_are_logged_once(block, reason, caplog):
    model = nn.Sequential(block)
    taps = gm.Taps(model, residual={"all": "0"})
    for _ in range(2):
        model(torch.ones(2, 4).long() if isinstance(block, nn.Embedding) else torch.ones(2, 4))
    (record,) = caplog.records
    assert record.message == f"Taps: the residual of '0' is not measured: {reason}" + (
        ", which it may have changed in place" if isinstance(block, InPlace) else ""
    )
    assert taps.residual_stats().numel.tolist() == [0.0]


def test_values_that_are_not_finite_are_not_measured():
    model = nn.Sequential(nn.Linear(4, 4))
    taps = gm.Taps(model, residual={"all": "0"})
    model(torch.full((2, 4), torch.inf))
    assert taps.residual_stats().numel.tolist() == [0.0]


def test_a_recorder_keeps_the_rows_of_each_kind():
    torch.manual_seed(0)
    model = Stream()
    taps = gm.Taps(model, {"linear": nn.Linear}, residual={"blocks": r"^blocks\.\d+$"})
    recorder = gm.Recorder(model, taps=taps)
    model(stream()).sum().backward()
    recorder.record(inv_scale=0.5)
    (record,) = recorder.read()
    assert record.report("residual").names == ("blocks.0.residual", "blocks.1.residual")
    assert record.report("activations").names == ("blocks.0.linear.out", "blocks.1.linear.out")
    assert record.report("activation_grads").names == record.report("activations").names
    with pytest.raises(KeyError, match=r"attention were not recorded.*gm.Taps\(model, attention=...\)"):
        record.value("entropy", "attention")


def test_every_column_is_at_its_place():
    q, k = qk()
    model = CallsFunction(lambda *args: gm.tap_attention(*args[:2], "attn", weights=args[2], is_causal=True))
    taps = gm.Taps(model, attention={"attn": 2})
    model(q, k, softmax_of(q, k))
    stats = taps.attention_stats()
    assert stats.columns.shape == (2, ATTENTION.width)
    assert stats.n_scales.tolist() == [1.0, 1.0]
    assert (stats.max_future <= stats.max_sum).all()
