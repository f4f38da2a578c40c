"""The contract of attention: softmax over keys, scale, heads."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradiometer.checks import check_model
from gradiometer.rules import Severity
from kernels_bench.zoo.transformers.models import BERT, GPT, T5, ViT, adapted
from kernels_bench.zoo.transformers.tasks import causal, images, masked, translated


def result(model, batch, **options):
    return check_model(model, batch, only=["attention"], **options)["attention"]


def attentions(model):
    return [x for x in model.modules() if type(x).__name__ == "Attention"]


def plant(model, name, method):
    for each in attentions(model):
        setattr(each, name, method.__get__(each))
    return model


def scores(self, q, k, scale):
    return q @ self.repeated(k).mT * scale


def unscaled(self, q, k):
    return scores(self, q, k, 1.0)


def without_root(self, q, k):
    return scores(self, q, k, 1 / 8)


def multiplied(self, q, k):
    return scores(self, q, k, math.sqrt(8))


def by_the_width(self, q, k):
    return scores(self, q, k, 32**-0.5)


def scaled_twice(self, q, k):
    return scores(self, q / 8**0.5, k / 8**0.5, 1.0)


def only_queries(self, q, k):
    return scores(self, q / 8**0.25, k, 1.0)


def by_a_number(self, q, k):
    return scores(self, q, k, 0.2)


def over_queries(_, x):
    return x.softmax(-2)


def over_heads(_, x):
    return x.softmax(1)


def over_examples(_, x):
    return x.softmax(0)


def twice(_, x):
    return x.softmax(-1).softmax(-1)


def sigmoid(_, x):
    return x.sigmoid()


def log_softmax(_, x):
    return x.log_softmax(-1)


def masked_after(_, x):
    return x.nan_to_num(neginf=0).softmax(-1).tril()


def dropped(_, x):
    return functional.dropout(x.softmax(-1), 0.3)


def relu(_, x):
    return x.relu() / 3


def exp_plus_one(_, x):
    return x.exp() / (1 + x.exp().sum(-1, keepdim=True))


def of_length_one(_, x):
    return functional.normalize(x.softmax(-1), dim=-1)


def split_over_tokens(self, x):
    return x.reshape(x.shape[0], -1, x.shape[1], self.size)


def split_over_examples(self, x):
    return x.reshape(x.shape[1], x.shape[0], -1, self.size).permute(1, 2, 0, 3)


def merge_over_tokens(self, weights, v):
    x = weights @ self.repeated(v)
    return x.reshape(x.shape[0], x.shape[2], -1)


def merge_transposed(self, weights, v):
    x = weights @ self.repeated(v)
    return x.permute(0, 3, 1, 2).reshape(x.shape[0], x.shape[2], -1)


def reversed_values(self, x, source):
    k, v = self.split(self.key(source)), self.value(source)
    return self.split(self.query(x)), k, self.split(torch.cat([v[:, 1:], v[:, :1]], 1))


@pytest.mark.parametrize(
    ("name", "method", "text"),
    [
        ("softmax", over_queries, "the softmax is over the queries"),
        ("softmax", over_heads, "the softmax is over the heads or examples"),
        ("softmax", over_examples, "the softmax is over the heads or examples"),
        ("softmax", twice, "the softmax is applied to the output of a softmax"),
        ("softmax", sigmoid, "sigmoid of the scores"),
        ("softmax", log_softmax, "log_softmax"),
        ("softmax", masked_after, "masked or scaled after the softmax"),
        ("softmax", dropped, "dropped in evaluation mode"),
        ("softmax", relu, "not 1: they are not a softmax"),
        ("softmax", exp_plus_one, "not 1: they are not a softmax"),
        ("softmax", of_length_one, "masked or scaled after the softmax"),
        ("split", split_over_tokens, "heads are split across tokens"),
        ("split", split_over_examples, "are in the same attention matrix"),
        ("combine", merge_over_tokens, "heads are merged across tokens"),
        ("combine", merge_transposed, "heads are merged across tokens"),
        ("project", reversed_values, "its value at"),
        ("scores", unscaled, "scores are not scaled"),
        ("scores", without_root, "scaled by 1/d"),
        ("scores", multiplied, "multiplied by sqrt(d)"),
        ("scores", by_the_width, "the width of all heads together"),
        ("scores", scaled_twice, "scaled by 1/d"),
        ("scores", only_queries, "d**-0.25"),
    ],
)
@pytest.mark.parametrize("make", [GPT, BERT])
def test_a_fault_is_told(make, name, method, text):
    batch = (causal(4) if make is GPT else masked(4))[0]()
    found = result(plant(make(), name, method), batch)
    assert found.is_failure, found
    assert any(text in evidence.text for evidence in found.evidence)
    assert found.evidence[0].name.startswith("blocks.")


@pytest.mark.parametrize(
    ("make", "task"),
    [
        (GPT, causal(4)),
        (lambda: GPT(rotary=True, dropout=0.1), causal(4, padded=True)),
        (lambda: GPT(recompute=True), causal(4)),
        (BERT, masked(4)),
        (lambda: BERT(pre=True, dropout=0.2), masked(4)),
        (T5, translated()),
        (lambda: ViT(batch_norm=True), images()),
        (lambda: adapted(GPT()), causal(4)),
    ],
)
def test_healthy_models_hold(make, task):
    torch.manual_seed(0)
    assert result(make(), task[0]()).status == "holds"


def test_one_layer_that_scales_otherwise_is_told():
    model = GPT(blocks=3)
    attentions(model)[1].scores = lambda q, k: q @ k.mT / 5
    found = result(model, causal(4)[0]())
    assert found.evidence[0].name == "blocks.1.attention"
    assert "unlike in other layers" in found.text
    assert found.severity == Severity.WARNING


def test_a_scale_that_is_no_known_mistake_is_noted():
    found = result(plant(GPT(), "scores", by_a_number), causal(4)[0]())
    assert found.status == "broken"
    assert not found.is_failure


class Fused(nn.Module):
    """Attention by scaled_dot_product_attention."""

    def __init__(self, length=6, **options):
        super().__init__()
        self.project, self.out, self.options = nn.Linear(8, 24), nn.Linear(8, 8), options
        self.length = length

    def forward(self, x):
        q, k, v = self.project(x).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        q = q[:, :, : self.length]
        y = functional.scaled_dot_product_attention(q, k, v, **self.options)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dropout_p": 0.2}, "dropped in evaluation mode"),
        ({"scale": 0.25}, "scaled by 1/d"),
        ({"length": 3, "is_causal": True}, "is_causal=True for 3 queries and 6 keys"),
    ],
)
def test_faults_of_the_fused_function(options, text):
    found = result(Fused(**options), torch.randn(3, 6, 8))
    assert found.is_failure
    assert text in found.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"length": 1}])
def test_the_fused_function_holds(options, dtype):
    assert result(Fused(**options).to(dtype), torch.randn(3, 6, 8).to(dtype)).status == "holds"


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("weights", [True, False])
def test_multihead_attention_of_torch_holds(first, weights):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.MultiheadAttention(8, 2, batch_first=first, dropout=0.1)

        def forward(self, x):
            y = x if first else x.mT.permute(2, 0, 1)
            y = self.a(y, y, y, need_weights=weights)[0]
            return x + (y if first else y.transpose(0, 1))

    assert result(Model(), torch.randn(3, 6, 8)).status == "holds"


def test_examples_first_for_a_layer_that_has_them_second_is_told():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.MultiheadAttention(8, 2)

        def forward(self, x):
            return self.a(x, x, x)[0]

    found = result(Model(), torch.randn(3, 6, 8))
    assert found.is_failure
    assert "examples 0 and 2 are in the same attention matrix" in found.text


def test_a_model_without_attention():
    found = result(nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1)), torch.randn(4, 3))
    assert found.status == "does not apply"


def test_one_token_and_one_example_hold():
    assert result(Fused(), torch.randn(1, 6, 8)).status == "holds"
    assert not result(Fused(), torch.randn(2, 1, 8)).is_failure


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_normalized_queries_and_keys_hold(norm):
    class Normed(Fused):
        def __init__(self):
            super().__init__()
            self.norm = norm(4)

        def forward(self, x):
            q, k, v = self.project(x).unflatten(2, (3, 2, 4)).unbind(2)
            q, k, v = (each.transpose(1, 2) for each in (self.norm(q), self.norm(k), v))
            return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    class Mixed(Normed):
        def forward(self, x):
            q, k, v = self.project(x).unflatten(2, (3, 2, 4)).unbind(2)
            q, k, v = (each.reshape(len(x), 2, -1, 4) for each in (self.norm(q), self.norm(k), v))
            return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    assert result(Normed(), torch.randn(3, 6, 8)).status == "holds"
    assert "heads are split across tokens" in result(Mixed(), torch.randn(3, 6, 8)).text


def test_blocks_of_local_attention_that_overlap_hold():
    class Local(Fused):
        def forward(self, x):
            q, k, v = self.project(x).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            q = q.unflatten(2, (3, 2))
            k, v = (self.blocks(each) for each in (k, v))
            return self.out(((q @ k.mT / 2).softmax(-1) @ v).flatten(2, 3).transpose(1, 2).flatten(2))

        @staticmethod
        def blocks(x):
            x = x.unflatten(2, (3, 2))
            return torch.cat([torch.cat([torch.zeros_like(x[:, :, :1]), x[:, :, :-1]], 2), x], 3)

    assert not result(Local(), torch.randn(2, 6, 8)).is_failure


def test_attention_over_channels_holds():
    class OverChannels(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.project(x).chunk(3, -1)
            q, k = (functional.normalize(each.mT, dim=-1) for each in (q, k))
            return ((q @ k.mT).softmax(-1) @ v.mT).mT

    assert not result(OverChannels(), torch.randn(3, 6, 8)).is_failure


def test_slots_that_are_normalized_over_queries_and_then_over_keys_hold():
    class Slots(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            weights = (self.q(x[:, :3]) @ self.k(x).mT / 8**0.5).softmax(1)
            return weights / weights.sum(-1, keepdim=True) @ self.v(x)

    assert not result(Slots(), torch.randn(3, 6, 8)).is_failure


def test_a_softmax_in_steps_holds():
    def steps(_, x):
        x = (x - x.amax(-1, keepdim=True)).exp()
        return x / x.sum(-1, keepdim=True)

    assert result(plant(GPT(), "softmax", steps), causal(4)[0]()).status == "holds"


def test_a_sink_and_a_soft_cap_hold():
    class Sink(Fused):
        def forward(self, x):
            q, k, v = self.project(x).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            scores = torch.cat([5 * (q @ k.mT / 2 / 5).tanh(), torch.zeros_like(q[..., :1])], -1)
            return self.out((scores.softmax(-1)[..., :-1] @ v).transpose(1, 2).flatten(2))

    assert not result(Sink(), torch.randn(3, 6, 8)).is_failure


def test_weights_and_random_state_are_as_before():
    model = GPT(dropout=0.1)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    batch = causal(4)[0]()
    state = torch.get_rng_state()
    result(model, batch)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert torch.backends.mha.get_fastpath_enabled()
